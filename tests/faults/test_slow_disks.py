"""Disks that hang or crawl: a slow one is waited for, a hanging one is given up and left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import AsyncCallsQueue, AsyncRequest, ShardedTensor
from megackpt.checkpoint.directory_target import DirectoryTarget
from megackpt.errors import StorageError
from megackpt.storage import files, kernel
from megackpt.testing import ThreadedGroup

MIB = 1 << 20
THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")


def begun(where: Path, value: float, mib: int = 1, **options: Any) -> AsyncRequest:
    """An asynchronous save of so many MiB on each rank."""
    group = options.get("process_group")
    rank, ranks = (group.rank, group.size) if group else (0, 1)
    tensor = torch.full((mib * MIB // 4,), value)
    state = {"w": ShardedTensor.from_rank_offsets("w", tensor, (0, rank, ranks))}
    request = megackpt.save(state, where, async_sharded_save=True, **options)
    assert request is not None
    return request


def value_of(where: Path) -> float:
    (value,) = megackpt.load_plain_tensors(where)["w"].unique().tolist()
    return float(value)


@contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """An ext4 file system of its own."""
    image, live = folder / "disk.img", folder / "live"
    live.mkdir()
    with image.open("wb") as file:
        file.truncate(128 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, live], check=True)
    try:
        yield live
    finally:
        subprocess.run(["umount", "--lazy", live], check=True)


def test_a_disk_that_hangs_is_left_alone_by_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker of rank 1 hangs; the transaction is that of rank 0."""
    monkeypatch.setattr("megackpt.limits.WORKER_STOP_SECONDS", 0.1)
    moves, sync = threading.Event(), files._sync_file

    def hang(moved: Any, file: tuple[int, str]) -> None:
        if "/.a." in file[1] and "__1_" in file[1]:
            moves.wait(60)
        sync(moved, file)

    def refuse(*_: object) -> None:
        pytest.fail("the disk that was given up is used")

    def run(group: ThreadedGroup) -> str:
        queue = AsyncCallsQueue(process_group=group, timeout=timedelta(seconds=1))
        request = begun(tmp_path / "a", 1.0, process_group=group)
        queue.schedule_async_request(request)
        with pytest.raises(StorageError, match="has not moved a byte") as raised:
            queue.maybe_finalize_async_calls(blocking=True)
        return str(raised.value)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_sync_file", hang)
        patch.setattr(DirectoryTarget, "discard", refuse)
        texts = ThreadedGroup.run(2, run)
        assert texts[0] == texts[1]
        assert "rank 1" in texts[0]
        assert len(list(tmp_path.iterdir())) == 1
        moves.set()
        while any(t.name.startswith("megackpt-a") for t in threading.enumerate()):
            time.sleep(0.01)
    begun(tmp_path / "a", 2.0).execute_sync()
    assert value_of(tmp_path / "a") == 2.0
    assert os.listdir(tmp_path) == ["a"]


def test_a_slow_fsync_counts_as_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crawl(*arguments: object) -> None:
        if arguments[-1] is True:
            time.sleep(0.4)

    monkeypatch.setattr(kernel, "write_back", crawl)
    request = begun(tmp_path / "a", 1.0, mib=24)
    task = request.task
    assert task is not None
    queue = AsyncCallsQueue(timeout=timedelta(seconds=1.2))
    began = time.monotonic()
    queue.schedule_async_request(request)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert time.monotonic() - began > 2
    assert task.done == task.todo
    assert value_of(tmp_path / "a") == 1.0


def test_a_failed_write_back_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reports it once: here, or at the fsync after it."""

    def fail(*arguments: object) -> None:
        if arguments[-1] is True:
            raise OSError(5, os.strerror(5))

    monkeypatch.setattr(kernel, "write_back", fail)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    with pytest.raises(StorageError, match=r"cannot make durable .*Input/output error"):
        begun(tmp_path / "a", 1.0, mib=24).execute_sync()
    assert os.listdir(tmp_path) == []


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    """A format may read a block twice."""
    request = begun(tmp_path / "a", 1.0)
    task = request.task
    assert task is not None
    for _ in range(3):
        task.advance(task.todo // 2 + 1)
    assert task.done == task.todo


EXITS = """
import sys, time
from datetime import timedelta
import torch, megackpt
from megackpt import AsyncCallsQueue, ShardedTensor, limits
from megackpt.storage import files

limits.WORKER_STOP_SECONDS = 0.2
files._sync_file = lambda moved, file: time.sleep(1000)
queue = AsyncCallsQueue()
state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}
queue.schedule_async_request(megackpt.save(state, sys.argv[1], async_sharded_save=True))
time.sleep(0.5)
"""


def test_the_end_of_the_process_does_not_wait_for_a_disk(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITS, tmp_path / "a"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "ends before these saves are finalized" in done.stderr


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("persistent", [False, True])
def test_a_frozen_disk(tmp_path: Path, persistent: bool) -> None:
    """For 25 seconds. Meanwhile saves to another disk succeed, and no poll takes long."""
    queue = AsyncCallsQueue(persistent=persistent, timeout=timedelta(seconds=8))
    queue.schedule_async_request(begun(tmp_path / "other", 1.0))  # the process starts
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    with mounted(tmp_path) as live:
        begun(live / "c", 1.0).execute_sync()
        request = begun(live / "c", 2.0, mib=24)
        subprocess.run(["fsfreeze", "-f", live], check=True)
        began = time.monotonic()
        thaw = threading.Timer(25, subprocess.run, [["fsfreeze", "-u", live]])
        thaw.start()
        try:
            queue.schedule_async_request(request)
            with pytest.raises(StorageError, match="has not moved a byte"):
                queue.maybe_finalize_async_calls(blocking=True)
            assert time.monotonic() - began < 8 + 5 + 1.5
            queue.schedule_async_request(begun(tmp_path / "other", 2.0))
            assert queue.maybe_finalize_async_calls(blocking=True) == [2]
            assert time.monotonic() - began < 23
        finally:
            thaw.join()
        assert value_of(live / "c") == 1.0
        # Until the worker has ended, the next save leaves its files alone.
        time.sleep(1)
        begun(live / "c", 3.0).execute_sync()
        assert value_of(live / "c") == 3.0
        assert set(os.listdir(live)) == {"c", "lost+found"}
        queue.close()
    assert value_of(tmp_path / "other") == 2.0


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(not THROTTLE.exists(), reason="needs the blkio controller")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name", ["torch_dist", "zarr", "safetensors"])
def test_a_throttled_disk(tmp_path: Path, name: str, persistent: bool) -> None:
    """24 MiB at 3 MB a second, twice the timeout, are saved."""
    with mounted(tmp_path) as live:
        device = os.stat(live).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        os.sync()
        THROTTLE.write_text(f"{number} 3000000")
        try:
            timeout = timedelta(seconds=4)
            queue = AsyncCallsQueue(persistent=persistent, timeout=timeout)
            request = begun(live / "c", 1.0, mib=24, sharded_strategy=name)
            began = time.monotonic()
            queue.schedule_async_request(request)
            assert queue.maybe_finalize_async_calls(blocking=True) == [0]
            assert time.monotonic() - began > 7
            queue.close()
        finally:
            THROTTLE.write_text(f"{number} 0")
        assert value_of(live / "c") == 1.0
