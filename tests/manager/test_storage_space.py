"""A storage without space is found before a save writes, and after a failed save."""

from __future__ import annotations

import errno
import logging
import os
import socket
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import ShardedTensor
from megackpt.errors import StorageError
from megackpt.manager import CheckpointManager, storage_space
from megackpt.storage import LocalStorage
from megackpt.testing import ThreadedGroup

MIB = 1 << 20


def state(rank: int = 0, size: int = 1, nbytes: int = MIB) -> dict[str, Any]:
    """``nbytes`` of each rank, and as many of which all ranks have a replica."""
    own, shared = torch.zeros(nbytes, dtype=torch.uint8), torch.ones(nbytes // 4)
    return {
        "own": ShardedTensor.from_rank_offsets("own", own, (0, rank, size)),
        "shared": ShardedTensor.from_rank_offsets("shared", shared, replica_id=rank),
    }


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.root
def test_a_full_disk_is_found_before_a_byte(disk: Path) -> None:
    run = disk / "run"

    def work(group: ThreadedGroup) -> str:
        with CheckpointManager(run, process_group=group) as manager:
            for step in (1, 2):
                manager.save(step, state(group.rank, group.size))
        with (
            CheckpointManager(run, process_group=group) as manager,
            pytest.raises(StorageError) as caught,
        ):
            manager.save(3, state(group.rank, group.size))
        return str(caught.value)

    (text,) = {*ThreadedGroup.run(2, work)}
    free = os.statvfs(disk).f_bfree * os.statvfs(disk).f_frsize
    missing = 3 * MIB - free
    assert text.startswith(
        f"step 3 is not saved: {run} on host {socket.gethostname()!r} has "
        f"{free / MIB:.1f} MiB free, and the tensors have 3.0 MiB: "
    )
    assert f": {missing / MIB:.1f} MiB are missing. " in text or missing < MIB
    assert (
        f"megackpt prune {run} --keep-last 1 would free 3.0 MiB: iter_0000001" in text
    )
    assert sorted(os.listdir(run)) == [
        "iter_0000001",
        "iter_0000002",
        "latest_checkpointed_iteration.txt",
    ]


@pytest.mark.root
@pytest.mark.parametrize("asynchronous", [False, True])
def test_after_a_failed_save_the_missing_bytes_are_said(
    disk: Path, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    caplog.set_level(logging.WARNING, "megackpt.manager")
    with CheckpointManager(
        disk, on_error="warn", asynchronous=asynchronous, max_failures=9
    ) as manager:
        manager.save(1, state())
        manager.finalize()
        # Another program takes the space after the check.
        (disk / "foreign").write_bytes(bytes(5 * MIB))
        for step in (2, 3):
            manager.save(step, state())
            manager.finalize()
        assert manager.failed_saves == 2
        found = [r.getMessage() for r in caplog.records if "missing" in r.getMessage()]
        assert len(found) == 2
        assert "MiB are missing" in found[0]
        assert "No older step can be removed" in found[0]
        (disk / "foreign").unlink()
        manager.save(4, state())
        manager.finalize()
        assert manager.failed_saves == 2
    assert [step.step for step in manager.steps()] == [1, 4]


def refusing(number: int) -> Any:
    def put(_self: LocalStorage, name: str, data: bytes) -> None:
        raise OSError(number, os.strerror(number))

    return put


def test_a_quota_is_found_by_a_small_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path / "run", keep_last=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, state())
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "put", refusing(errno.EDQUOT))
        manager = CheckpointManager(tmp_path / "run", keep_last=1)
        with pytest.raises(
            StorageError, match=r"cannot write: .*quota.*would free 2\.0 MiB"
        ):
            manager.save(4, state())
    manager.save(4, state())
    manager.close()
    assert [step.step for step in manager.steps()] == [4]


def test_the_check_is_done_once_a_day_and_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = 0
    counts = []

    class Clock:
        @staticmethod
        def now(zone: Any) -> datetime:
            return datetime(2026, 1, 1, tzinfo=zone) + timedelta(days=days)

    monkeypatch.setattr(storage_space, "datetime", Clock)
    checks = storage_space.StorageSpace._problem
    monkeypatch.setattr(
        storage_space.StorageSpace,
        "_problem",
        lambda self, timeout: counts.append(days) or checks(self, timeout),
    )
    with CheckpointManager(tmp_path) as manager:
        for step, day in enumerate((0, 0, 0, 1, 1)):
            days = day
            manager.save(step, state())
        assert counts == [0, 1]
        manager._queue.failures.failed += 1
        manager.save(9, state())
    assert counts == [0, 1, 1]
    assert datetime.now(UTC).year >= 2026


def test_a_file_system_that_does_not_say_its_size_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: nothing)
    with CheckpointManager(tmp_path / "a" / "b") as manager:
        manager.save(1, state())
    full = os.statvfs_result((4096, 4096, 9, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    manager = CheckpointManager(tmp_path / "c")
    with pytest.raises(StorageError, match=r"0 B free, and the tensors have 2\.0 MiB"):
        manager.save(1, state())
    assert not (tmp_path / "c").exists()
