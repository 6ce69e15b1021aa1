"""verify names key, file and block of all that is wrong."""

from __future__ import annotations

import os

import pytest

from megackpt import strategies
from megackpt.checkpoint import find_storage, verify, verifying
from megackpt.errors import CheckpointReplaced, CorruptCheckpoint, NotACheckpoint
from megackpt.storage import LocalStorage

MIB = 1 << 20


@pytest.fixture
def where(tmp_path, saves):
    saves.size = 10 * MIB + 5
    saves.save(tmp_path / "c", 7)
    return tmp_path / "c"


def flip(file, at):
    with open(file, "r+b") as f:
        f.seek(at)
        f.write(b"\xff")


@pytest.mark.parametrize("threads", [1, 3])
def test_good(where, threads):
    (where / "notes").touch()
    report = verify(where, threads)
    assert report.ok
    assert report.checked
    assert report.bytes == 2 * (10 * MIB + 5)
    assert (report.files, report.tensors) == (4, 1)
    assert report.foreign == ("notes",)
    assert "all good" in str(report)


def test_all_problems_at_once(where):
    flip(where / "rank0.bin", 3)
    flip(where / "rank0.bin", 9 * MIB)
    flip(where / "rank1.bin", 10 * MIB + 4)
    flip(where / "toc", 50)
    report = verify(where)
    assert len(report.problems) == 4
    text = str(report)
    size = 10 * MIB + 5
    assert (
        f"'weight' [0:{size}]: block 0 of 11 is damaged: {where}/rank0.bin, bytes 0 to {MIB}"
        in text
    )
    assert (
        f"block 9 of 11 is damaged: {where}/rank0.bin, bytes {9 * MIB} to {10 * MIB}"
        in text
    )
    assert (
        f"'weight' [{size}:{2 * size}]: block 10 of 11 is damaged: {where}/rank1.bin"
        in text
    )
    assert "toc does not match its digest" in text


def test_missing_and_truncated(where):
    (where / "rank0.bin").unlink()
    os.truncate(where / "rank1.bin", MIB)
    problems = verify(where).problems
    assert any("rank0.bin, written by rank 0, is missing" in p for p in problems)
    assert any(
        f"rank1.bin, written by rank 1, is truncated ({MIB} of" in p for p in problems
    )
    assert any(p.startswith("'weight'") for p in problems)


def test_a_file_that_disappears_during_the_check_is_reported_once(where, monkeypatch):
    """It was there when the sizes were looked at."""
    monkeypatch.setattr(verifying, "shortfalls", lambda *_: [])
    (where / "rank0.bin").unlink()
    assert verify(where).problems == (f"{where}/rank0.bin is missing",)


def test_what_was_written_and_cannot_be_read_again_is_not_committed(
    tmp_path, saves, monkeypatch
):
    place = saves.begin(tmp_path / "c", "aa")
    results = [saves.write(place, rank, 1) for rank in range(2)]
    opened = LocalStorage.open

    def gone(self, name):
        if name == "rank1.bin":
            raise FileNotFoundError(name)
        return opened(self, name)

    monkeypatch.setattr(LocalStorage, "open", gone)
    with pytest.raises(
        CorruptCheckpoint,
        match=r"read back differs from the data written:\n.*rank1\.bin is missing$",
    ):
        saves.commit(place, results, reread=True)
    place.abort()


@pytest.mark.parametrize(
    "step", ["small_file_problems", "stored_manifest", "shortfalls"]
)
def test_what_is_replaced_meanwhile_is_verified_anew(
    tmp_path, saves, monkeypatch, step
):
    """The replacement removes files of the one that is looked at."""
    saves.save(tmp_path / "c", 1)
    real, left = getattr(verifying, step), [2]

    def look(*args):
        if left[0]:
            left[0] -= 1
            saves.save(tmp_path / "c", 2)
        return real(*args)

    monkeypatch.setattr(verifying, step, look)
    report = verify(tmp_path / "c")
    assert (report.problems, left) == ((), [0])


def test_what_is_replaced_again_and_again(tmp_path, saves, monkeypatch):
    saves.save(tmp_path / "c", 1)
    real = verifying.small_file_problems

    def look(*args):
        saves.save(tmp_path / "c", 2)
        return real(*args)

    monkeypatch.setattr(verifying, "small_file_problems", look)
    with pytest.raises(CheckpointReplaced, match="is being replaced again and again"):
        verify(tmp_path / "c")


def test_a_damaged_index_is_a_problem(where):
    flip(where / "megackpt.index", 40)
    assert "does not match its own digest" in verify(where).problems[0]


def test_nothing_there(tmp_path):
    with pytest.raises(NotACheckpoint):
        verify(tmp_path)


def test_without_digests(where, monkeypatch):
    (where / "megackpt.index").unlink()
    backend = type(strategies.find_backend(find_storage(where)))
    real = backend.read_manifest

    def read_manifest(self, root):
        from dataclasses import replace

        manifest = real(self, root)
        return replace(
            manifest,
            chunks=replace(manifest.chunks, digests=manifest.chunks.digests[:0]),
        )

    monkeypatch.setattr(backend, "read_manifest", read_manifest)
    report = verify(where)
    assert report.ok
    assert not report.checked
    assert "has no digests" in str(report)
    monkeypatch.setattr(backend, "verify_native", lambda *_: ["bad zip"], raising=False)
    report = verify(where)
    assert report.checked
    assert report.problems == ("bad zip",)


def test_formats_that_only_they_can_read(where, monkeypatch, saves, tmp_path):
    from dataclasses import replace

    from megackpt.checkpoint import transaction

    real = transaction.sealed_index
    monkeypatch.setattr(
        transaction,
        "sealed_index",
        lambda manifest, small: real(replace(manifest, encoding="native"), small),
    )
    saves.size = 1000
    saves.save(tmp_path / "n", 7, backend=strategies.backend_named("native"))
    assert verify(tmp_path / "n").ok
    flip(tmp_path / "n/rank1.bin", 3)
    (problem,) = verify(tmp_path / "n").problems
    assert problem.startswith("'weight' [1000:2000]: rank1.bin is damaged")
