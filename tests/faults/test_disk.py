"""A disk that refuses on one rank of several: every rank is told which rank and file, and nothing is committed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.errors import StorageError

FORMATS = ["torch_dist", "zarr", "safetensors", "torch"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def state(value: float) -> dict[str, Any]:
    return {f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", torch.full((20_000,), value)) for i in range(2)}


def value_of(where: Path) -> float:
    tensors = megackpt.load_plain_tensors(where)
    (value,) = {float(v) for tensor in tensors.values() for v in tensor.unique()}
    return value


def fill_but(disk: Path, spare: int) -> None:
    with open(disk / "filler", "wb", buffering=0) as filler:
        room = os.statvfs(disk)
        filler.write(bytes(room.f_bavail * room.f_frsize - spare))


@pytest.mark.root
@pytest.mark.parametrize("name", FORMATS)
def test_a_full_disk(small_disk: Path, name: str) -> None:
    """From no room at all to nearly enough, for data, tables of contents and index alike."""
    where = small_disk / "c"
    megackpt.save(state(1.0), where, name)
    for spare in range(0, 150_000, 12_288):
        fill_but(small_disk, spare)
        try:
            with pytest.raises(StorageError, match="No space left") as caught:
                megackpt.save(state(2.0), where, name)
        finally:
            (small_disk / "filler").unlink()
        assert str(small_disk) in str(caught.value)
        assert value_of(where) == 1.0
    megackpt.save(state(3.0), where, name)
    assert value_of(where) == 3.0
    assert os.listdir(small_disk) == ["c"]


def disk(fault: str, victim: int, strategy: str, before: bool = True) -> dict[str, Any]:
    told = {"action": "disk", "job": "save", "point": "", "fault": fault, "victim": victim}
    return {**told, "strategy": strategy, "before": before}


def check(report: dict[str, Any]) -> None:
    assert "hung" not in report, report
    asked = report["order"]
    for told in report["told"]:
        assert told["error"] == "StorageError", report
        if asked["victim"]:
            assert f"rank {asked['victim']}: " in told["text"], report
        assert "/.c.megackpt-" in told["text"] or "/c/" in told["text"], report  # the file
    assert all(one["found"] == (1.0 if asked["before"] else None) for one in report["found"]), report
    assert report["after"] == [{"ones": 3, "found": 3.0}] * 3, report
    assert report["left"] == ["c", "rendezvous"], report


@pytest.mark.root
@pytest.mark.strace
def test_one_rank_of_three(tmp_path: Path, worlds: Any) -> None:
    orders = [
        disk(fault, 2, strategy)
        for strategy in ("torch_dist", "zarr")
        for fault in ("EFBIG", "fsync:error=EIO:when=1")
    ]
    reports = worlds(orders, tmp_path)
    assert len(reports) == len(orders)
    for report in reports:
        check(report)


@pytest.mark.campaign
@pytest.mark.root
@pytest.mark.strace
@pytest.mark.parametrize("strategy", ["torch_dist", "zarr"])
def test_every_fsync_of_one_rank_of_three(
    tmp_path: Path, worlds: Any, note: Callable[[str], None], strategy: str
) -> None:
    orders = [disk("EFBIG", 2, strategy, before) for before in (True, False)]
    for before in (True, False):
        for error in ("EIO", "ENOSPC", "EDQUOT"):
            # strace counts for each thread, and one of torch_dist's writers makes two.
            each = (1, 2) if strategy == "torch_dist" else (1, 2, 3)
            orders += [disk(f"fsync:error={error}:when={n}", 2, strategy, before) for n in each]
    reports = worlds(orders, tmp_path)
    assert len(reports) == len(orders)
    for report in reports:
        check(report)
    note(f"{strategy}: {len(reports)} saves of 3 ranks in which the disk refused one rank")
