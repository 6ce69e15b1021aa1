"""verify of many small tensors, whose neighbours are read together."""

import os

import pytest
import torch

import megackpt
from megackpt.checkpoint import open_checkpoint, verify, verifying
from megackpt.storage.files import LocalReader


@pytest.fixture
def small(tmp_path):
    """Small tensors, side by side in two files, and the first byte of number 7."""
    state = {f"t{i}": torch.full((16,), float(i)) for i in range(40)}
    megackpt.save(megackpt.sharded(state), tmp_path / "s", "torch_dist")
    manifest = open_checkpoint(tmp_path / "s").manifest
    (chunk,) = manifest.chunks_of("t7")
    return tmp_path / "s" / chunk.location.file, chunk.location.start


def test_one_of_many_small_tensors(small):
    file, start = small
    with file.open("r+b") as opened:
        opened.seek(start + 5)
        opened.write(b"\xff")
    done = []
    report = verify(file.parent, advance=done.append)
    assert report.problems == (
        f"'t7' [0:16]: block 0 of 1 is damaged: {file}, bytes {start} to {start + 64}",
    )
    assert sum(done) == report.bytes
    assert len(done) < 10  # neighbours are read together


def test_small_tensors_where_a_second_read_gives_other_bytes(small, monkeypatch):
    """Only what was wrong is read again."""
    file, start = small
    reads = []
    real = LocalReader.read_into

    def read_into(self, at, buffers):
        real(self, at, buffers)
        if self._path != str(file):
            return
        reads.append((at, sum(map(len, buffers))))
        if at < start < at + reads[-1][1]:
            buffers[0][start - at] ^= 1

    monkeypatch.setattr(LocalReader, "read_into", read_into)
    monkeypatch.setattr(LocalReader, "refetch", lambda _: True)
    assert verify(file.parent, threads=1).ok
    assert reads.count((start, 64)) == 1


def test_small_tensors_behind_the_end_of_their_file(small, monkeypatch):
    file, start = small
    monkeypatch.setattr(verifying, "shortfalls", lambda *_: [])
    os.truncate(file, start + 5)
    named = "".join(verify(file.parent).problems)
    assert "'t7' [0:16]: " in named
    assert "'t0' [0:16]: " not in named
