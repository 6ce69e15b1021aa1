"""A save that goes on in the place of a dead one of the same id; all others are cleared up as ever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megackpt.checkpoint import begin, completed
from megackpt.checkpoint.marker import Marker, active
from megackpt.errors import CheckpointExists, CorruptCheckpoint, SaveInProgress
from megackpt.storage import LocalStorage

ID = "ab" * 16


def died(saves, where: Path) -> list[object]:
    """A save of ID that wrote rank 0's file, a part of rank 1's, and its journal, and then died."""
    place = saves.begin(where, ID)
    result = saves.write(place, 0, 7)
    (Path(place.path) / "rank1.bin").write_bytes(b"torn")
    place.storage.put("journal", b"rank 0 is done")
    die(place)
    return [result]


def die(place) -> None:
    """As if this process had ended: its marker is that of a process that is no more."""
    place.abandon()
    marker = Path(place.path) / place.marker.name
    text = marker.read_text().replace(
        f'"started": {place.marker.started}', '"started": 1'
    )
    marker.write_text(text)


def finish(saves, place, results: list) -> None:
    saves.commit(place, [*results, saves.write(place, 1, 7)])


@pytest.mark.parametrize("before", ["nothing", "foreign", "checkpoint"])
def test_it_goes_on_where_the_dead_one_stopped(tmp_path, saves, before):
    where = tmp_path / "ckpt"
    if before == "checkpoint":
        saves.save(where, 1)
    if before != "nothing":
        where.mkdir(exist_ok=True)
        (where / "notes.txt").write_text("mine")
    results = died(saves, where)
    if before == "checkpoint":
        assert saves.load(where) == 1
    place = saves.begin(where, ID)
    assert place.resumed
    assert place.storage.get("journal") == b"rank 0 is done"
    stamp = place.storage.stat("rank0.bin")
    place.keep_only({"rank0.bin"})
    assert place.storage.stat("rank0.bin") == stamp
    assert place.storage.size("rank1.bin") is None
    assert place.storage.size("journal") is not None
    finish(saves, place, results)
    assert saves.load(where) == 7
    foreign = set() if before == "nothing" else {"notes.txt"}
    assert (
        set(os.listdir(where))
        == {"rank0.bin", "rank1.bin", "toc", "metadata.json", "megackpt.index"}
        | foreign
    )
    assert os.listdir(tmp_path) == ["ckpt"]


def test_files_in_folders_are_kept_one_by_one(tmp_path, saves):
    place = saves.begin(tmp_path / "ckpt", ID)
    place.announce(["array", "other"])
    for name in ("array/c/0", "array/c/1", "array/deep/er/2", "other/x"):
        place.storage.put(name, b"data")
    place.keep_only({"array/c/1"})
    found = {
        str(p.relative_to(place.path))
        for p in Path(place.path).rglob("*")
        if p.is_file()
    }
    assert found - {place.marker.name} == {"array/c/1"}


@pytest.mark.parametrize("before", ["nothing", "checkpoint"])
def test_others_clear_it_up(tmp_path, saves, before):
    where = tmp_path / "ckpt"
    if before == "checkpoint":
        saves.save(where, 1)
    died(saves, where)
    other = begin(where, save_id="cd" * 16, resume=True)
    assert not other.resumed
    assert not (tmp_path / f".ckpt.megackpt-{ID}").exists()
    other.abort()
    died(saves, where)
    assert not begin(where, save_id=ID).resumed  # not asked to


def test_a_live_one_is_not_taken_over(tmp_path, saves):
    place = saves.begin(tmp_path / "ckpt", ID)
    with pytest.raises(SaveInProgress):
        begin(tmp_path / "ckpt", save_id=ID, resume=True)
    assert Marker(ID).name in os.listdir(place.path)
    place.abort()


def test_one_of_two_gets_it(tmp_path, saves, monkeypatch):
    """Both have seen the dead marker; the one that renames the directory first goes on."""
    died(saves, tmp_path / "ckpt")
    staging, real = tmp_path / f".ckpt.megackpt-{ID}", LocalStorage.rename

    def rename(self, name, to, replace=True):
        monkeypatch.setattr(LocalStorage, "rename", real)
        os.rename(staging, tmp_path / f".ckpt.megackpt-{ID}.rival")
        real(self, name, to, replace)

    monkeypatch.setattr(LocalStorage, "rename", rename)
    with pytest.raises(SaveInProgress, match="has taken over"):
        begin(tmp_path / "ckpt", save_id=ID, resume=True)
    assert ID not in active


@pytest.mark.parametrize("before", ["nothing", "checkpoint"])
def test_a_process_dies_while_it_takes_the_directory(tmp_path, saves, before):
    """Its name for the directory is left, between the two renames."""
    where = tmp_path / "ckpt"
    if before == "checkpoint":
        saves.save(where, 1)
    died(saves, where)
    staging = tmp_path / f".ckpt.megackpt-{ID}"
    staging.rename(f"{staging}.12345")
    place = saves.begin(where, ID)
    assert not place.resumed
    finish(saves, place, [saves.write(place, 0, 7)])
    assert saves.load(where) == 7
    assert os.listdir(tmp_path) == ["ckpt"]


def test_an_existing_checkpoint_is_replaced_only_with_overwrite(tmp_path, saves):
    saves.save(tmp_path / "ckpt", 1)
    died(saves, tmp_path / "ckpt")
    with pytest.raises(CheckpointExists):
        begin(tmp_path / "ckpt", save_id=ID, resume=True, overwrite=False)
    assert begin(tmp_path / "ckpt", save_id=ID, resume=True).resumed


def test_the_checkpoint_that_was_to_be_replaced_may_be_gone(tmp_path, saves):
    saves.save(tmp_path / "ckpt", 1)
    results = died(saves, tmp_path / "ckpt")
    LocalStorage(tmp_path).delete("ckpt")
    place = saves.begin(tmp_path / "ckpt", ID)
    place.keep_only({"rank0.bin"})
    finish(saves, place, results)
    assert saves.load(tmp_path / "ckpt") == 7
    assert os.listdir(tmp_path) == ["ckpt"]


@pytest.mark.parametrize("before", ["nothing", "checkpoint"])
def test_a_save_that_died_after_its_commit_is_complete(
    tmp_path, saves, monkeypatch, before
):
    where = tmp_path / "ckpt"
    assert not completed(where, ID)
    if before == "checkpoint":
        saves.save(where, 1)
    assert not completed(where, ID)
    place = saves.begin(where, ID)
    results = [saves.write(place, 0, 7)]
    assert not completed(where, ID)
    marker = place.marker.name
    with monkeypatch.context() as patch:
        patch.setattr(
            LocalStorage, "delete", lambda *_: None
        )  # nothing is cleared up after the commit
        finish(saves, place, results)
    active.discard(ID)
    text = (where / marker).read_text()
    (where / marker).write_text(
        text.replace(f'"started": {place.marker.started}', '"started": 1')
    )
    assert not completed(where, "cd" * 16)
    assert completed(where, ID)
    assert saves.load(where) == 7
    assert not (where / marker).exists()


def test_what_is_written_can_be_read_again_before_it_counts(tmp_path, saves):
    place = saves.begin(tmp_path / "ckpt", ID)
    results = [saves.write(place, 0, 7), saves.write(place, 1, 7)]
    (Path(place.path) / "rank1.bin").write_bytes(b"\0" * saves.size)
    with pytest.raises(CorruptCheckpoint, match=r"rank1\.bin"):
        saves.commit(place, results, reread=True)
    place.abort()
    assert not (tmp_path / "ckpt").exists()
