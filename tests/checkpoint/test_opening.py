"""Opening: what is a checkpoint, what is none, and what is a damaged one."""

from __future__ import annotations

import os

import pytest

from megackpt.checkpoint import open_checkpoint, open_same, opening as opening_room
from megackpt.errors import CheckpointReplaced, CorruptCheckpoint, NotACheckpoint


def test_missing(tmp_path):
    with pytest.raises(NotACheckpoint, match=f"directory {tmp_path}/x does not exist"):
        open_checkpoint(tmp_path / "x")
    with pytest.raises(NotACheckpoint, match="does not exist"):
        open_checkpoint(tmp_path / "x/y/z")


def test_empty_file_and_unknown(tmp_path):
    with pytest.raises(
        NotACheckpoint, match="is not a distributed checkpoint: it is empty"
    ):
        open_checkpoint(tmp_path)
    (tmp_path / "f").touch()
    with pytest.raises(NotACheckpoint, match="is not a distributed checkpoint"):
        open_checkpoint(tmp_path)
    with pytest.raises(
        NotACheckpoint, match="/f is not a distributed checkpoint: no known format"
    ):
        open_checkpoint(tmp_path / "f")


def test_with_and_without_index(tmp_path, saves):
    saves.save(tmp_path / "c", 7)
    opened = open_checkpoint(tmp_path / "c")
    assert opened.backend.properties.name == "tiny"
    assert opened.manifest.backend == ("tiny", 1)
    assert set(opened.small) == {"toc", "metadata.json"}
    assert (
        open_same(tmp_path / "c", opened.manifest.save_id).list()
        == opened.storage.list()
    )
    (tmp_path / "c/megackpt.index").unlink()
    foreign = open_checkpoint(tmp_path / "c")
    assert foreign.small == {}
    assert saves.load(tmp_path / "c") == 7
    open_same(tmp_path / "c", "")
    with pytest.raises(CheckpointReplaced, match=r"now it is \(foreign\)"):
        open_same(tmp_path / "c", opened.manifest.save_id)


def test_a_small_file_that_another_program_wrote(tmp_path, saves):
    saves.save(tmp_path / "c", 7)
    toc = tmp_path / "c/toc"
    data = bytearray(toc.read_bytes())
    data[20] ^= 1
    toc.write_bytes(data)
    os.utime(toc, (2e9, 2e9))
    with pytest.raises(
        CorruptCheckpoint,
        match=r"toc does not match its digest.*toc is newer.*remove megackpt",
    ):
        open_checkpoint(tmp_path / "c")
    os.utime(toc, (1, 1))
    with pytest.raises(CorruptCheckpoint, match=r"megackpt.index is newer"):
        open_checkpoint(tmp_path / "c")
    toc.write_bytes(b"short")
    with pytest.raises(CorruptCheckpoint, match=r"has 5 bytes instead of"):
        open_checkpoint(tmp_path / "c")
    toc.unlink()
    (tmp_path / "c/metadata.json").write_text("{}")
    with pytest.raises(CorruptCheckpoint) as caught:
        opening_room._read(opening_room.LocalStorage(tmp_path / "c"))
    assert "toc is missing" in str(caught.value)
    assert "metadata.json has 2 bytes" in str(caught.value)


def test_every_flipped_bit_of_the_index_is_caught(tmp_path, saves):
    saves.save(tmp_path / "c", 7)
    file = tmp_path / "c/megackpt.index"
    data = bytearray(file.read_bytes())
    for bit in range(0, len(data) * 8, 37):
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        with pytest.raises(opening_room.CheckpointingException):
            open_checkpoint(tmp_path / "c")
        data[bit // 8] ^= 1 << bit % 8


def test_hostile_entries(tmp_path, saves):
    saves.save(tmp_path / "c", 7)
    index = tmp_path / "c/megackpt.index"
    os.rename(index, tmp_path / "elsewhere")
    index.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpoint):
        open_same(tmp_path / "c", "aa")
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(CorruptCheckpoint):
        open_same(tmp_path / "c", "aa")


def test_replaced_at_the_very_moment(tmp_path, saves, monkeypatch):
    """Between opening the directory and reading the index another save replaces all of it."""
    saves.save(tmp_path / "c", 1)
    real, left = opening_room._read, [2]

    def read(storage, **options):
        if left[0]:
            left[0] -= 1
            saves.save(tmp_path / "c", 10 + left[0])
        return real(storage, **options)

    monkeypatch.setattr(opening_room, "_read", read)
    assert saves.load(tmp_path / "c") == 10


def test_always_replaced(tmp_path, saves, monkeypatch):
    saves.save(tmp_path / "c", 1)
    real = opening_room._read

    def read(storage, **options):
        saves.save(tmp_path / "c", 2)
        return real(storage, **options)

    monkeypatch.setattr(opening_room, "_read", read)
    with pytest.raises(CheckpointReplaced, match="again and again"):
        open_checkpoint(tmp_path / "c")


def test_a_save_replaces_a_checkpoint_whose_index_names_a_damaged_column(
    tmp_path, saves
):
    saves.save(tmp_path / "c", 7)
    index = tmp_path / "c/megackpt.index"
    index.write_bytes(index.read_bytes().replace(b'"writer"', b'"vriter"'))
    with pytest.raises(CorruptCheckpoint, match="does not match its own digest"):
        open_checkpoint(tmp_path / "c")
    saves.save(tmp_path / "c", 8)
    assert saves.load(tmp_path / "c") == 8


def test_a_missing_metadata_json_is_named(tmp_path, saves):
    saves.save(tmp_path / "c", 7)
    (tmp_path / "c/metadata.json").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"metadata\.json is missing"):
        open_checkpoint(tmp_path / "c")
