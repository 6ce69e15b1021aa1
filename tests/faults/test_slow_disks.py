"""Disks that hang or crawl: a slow one is waited for, a hanging one is given up and left alone."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import AsyncCallsQueue, AsyncRequest, CheckpointManager, ShardedTensor
from megackpt.checkpoint.directory_target import DirectoryTarget
from megackpt.distributed.group import SingleGroup
from megackpt.errors import StorageError
from megackpt.manager import retention
from megackpt.storage import LocalStorage, files, kernel
from megackpt.testing import ThreadedGroup

MIB = 1 << 20
THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
HALF_A_SECOND = timedelta(seconds=0.5)


def state_of(value: float, mib: int = 1, group: Any = None) -> dict[str, Any]:
    """So many MiB on each rank."""
    rank, ranks = (group.rank, group.size) if group else (0, 1)
    tensor = torch.full((mib * MIB // 4,), value)
    return {"w": ShardedTensor.from_rank_offsets("w", tensor, (0, rank, ranks))}


def begun(where: Path, value: float, mib: int = 1, **options: Any) -> AsyncRequest:
    """An asynchronous save of so many MiB on each rank."""
    state = state_of(value, mib, options.get("process_group"))
    request = megackpt.save(state, where, async_sharded_save=True, **options)
    assert request is not None
    return request


def value_of(where: Path) -> float:
    (value,) = megackpt.load_plain_tensors(where)["w"].unique().tolist()
    return float(value)


@contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """An ext4 file system of its own, in memory: other work on the machine's disk is not felt."""
    memory, live = folder / "memory", folder / "live"
    memory.mkdir()
    live.mkdir()
    with ExitStack() as undo:
        size = f"size={256 * MIB}"
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", size, "tmpfs", memory], check=True
        )
        undo.callback(subprocess.run, ["umount", "--lazy", memory], check=True)
        image = memory / "disk.img"
        with image.open("wb") as file:
            file.truncate(128 * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, live], check=True)
        undo.callback(subprocess.run, ["umount", "--lazy", live], check=True)
        yield live


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


class Hang:
    """Calls of a function hang until ``end``, as in a disk that does not answer.

    ``only``: those in whose arguments, or in whose thread's name, this text is.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, owner: Any, name: str, only: str = ""
    ) -> None:
        self.ends, self.calls = threading.Event(), 0
        self.real = getattr(owner, name)
        self.only = only

        def method(*args: Any, **named: Any) -> Any:
            return self.call(*args, **named)

        patch.setattr(owner, name, method)

    def call(self, *args: Any, **named: Any) -> Any:
        if self.only in f"{threading.current_thread().name} {args!r}":
            self.calls += 1
            self.ends.wait(60)
        return self.real(*args, **named)

    def end(self) -> None:
        """The disk answers again. Wait for the threads that it held."""
        self.ends.set()
        while any(t.name == "megackpt-disk" for t in threading.enumerate()):
            time.sleep(0.01)
        gc.collect()


STEPS = {
    "begin": (LocalStorage, "make_folder", ""),
    "write": (files, "_sync_file", "__1_"),
    "commit": (LocalStorage, "put_new", ""),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_whose_disk_hangs_is_given_up_by_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """One rank of two hangs: the coordinator, or rank 1 as it writes."""
    begun(tmp_path / "a", 1.0).execute_sync()
    hang = Hang(monkeypatch, *STEPS[step])

    def run(group: ThreadedGroup) -> str:
        state = state_of(2.0, 1, group)
        with pytest.raises(StorageError, match=r"not answered for 0\.4") as raised:
            megackpt.save(
                state, tmp_path / "a", process_group=group, timeout=HALF_A_SECOND
            )
        return str(raised.value)

    began = time.monotonic()
    texts = ThreadedGroup.run(2, run)
    assert time.monotonic() - began < 6
    assert hang.calls == 1
    assert texts[0] == texts[1]
    assert f"rank {int(step == 'write')}" in texts[0]
    hang.end()
    assert value_of(tmp_path / "a") == 1.0
    begun(tmp_path / "a", 3.0).execute_sync()
    assert value_of(tmp_path / "a") == 3.0
    assert os.listdir(tmp_path) == ["a"]


def test_a_commit_that_hangs_in_its_last_step_is_not_undone_halfway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exchange may still take place. Until its thread ends, no save takes it for dead."""
    megackpt.save(state_of(1.0), tmp_path / "a")
    with monkeypatch.context() as patch:
        hang = Hang(patch, LocalStorage, "exchange")
        with pytest.raises(
            StorageError, match=r"commit of the save to .* not answered"
        ):
            megackpt.save(state_of(2.0), tmp_path / "a", timeout=HALF_A_SECOND)
        target = DirectoryTarget(str(tmp_path / "a"), create=False)
        assert len(target.recover()) == 1  # alive
        assert value_of(tmp_path / "a") == 1.0
        hang.end()
    assert value_of(tmp_path / "a") == 2.0
    assert os.listdir(tmp_path) == ["a"]


def test_a_commit_that_was_given_up_does_not_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread removes what it wrote as soon as the disk answers."""
    megackpt.save(state_of(1.0), tmp_path / "a")
    hang = Hang(monkeypatch, LocalStorage, "put_new")
    with pytest.raises(StorageError, match="not answered"):
        megackpt.save(state_of(2.0), tmp_path / "a", timeout=HALF_A_SECOND)
    assert len(os.listdir(tmp_path)) == 2
    hang.end()
    assert value_of(tmp_path / "a") == 1.0
    assert os.listdir(tmp_path) == ["a"]


def test_removing_a_failed_save_is_given_up_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(files, "_sync_file", refuse)
        hang = Hang(patch, DirectoryTarget, "discard")
        with pytest.raises(StorageError, match="no space left"):
            megackpt.save(state_of(1.0), tmp_path / "a", timeout=HALF_A_SECOND)
        assert "end of the save to" in caplog.text
        hang.end()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("step", ["begin", "commit"])
def test_slow_steps_are_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Each call takes a while, and all of them more than twice the timeout."""
    owner, name, _ = STEPS[step]
    real = getattr(owner, name)

    def crawl(*arguments: Any) -> Any:
        for _ in range(12):
            time.sleep(0.1)
        return real(*arguments)

    monkeypatch.setattr(owner, name, crawl)
    began = time.monotonic()
    megackpt.save(state_of(1.0), tmp_path / "a", timeout=HALF_A_SECOND)
    assert time.monotonic() - began > 1.2
    assert value_of(tmp_path / "a") == 1.0


def test_a_signal_reaches_a_rank_whose_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megackpt.limits.WORKER_STOP_SECONDS", 0.1)
    hang = Hang(monkeypatch, files, "_sync_file")
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        megackpt.save(state_of(1.0), tmp_path / "a")
    hang.end()
    megackpt.save(state_of(2.0), tmp_path / "a")
    # The thread that hung removes the files of its save.
    deadline = time.monotonic() + 20
    while os.listdir(tmp_path) != ["a"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert os.listdir(tmp_path) == ["a"]
    assert value_of(tmp_path / "a") == 2.0


def test_without_a_free_thread_the_save_works_on_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "megackpt-disk":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        megackpt.save(state_of(1.0), tmp_path / "a")
    assert value_of(tmp_path / "a") == 1.0


@pytest.mark.parametrize("call", ["load", "restore", "latest"])
def test_opening_a_checkpoint_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    manager = CheckpointManager(tmp_path, timeout=HALF_A_SECOND)
    manager.save(1, state_of(1.0))
    hang = Hang(monkeypatch, LocalStorage, "__init__", "iter_")
    calls: dict[str, Callable[[], Any]] = {
        "load": lambda: megackpt.load(
            state_of(0.0), manager.path(1), timeout=HALF_A_SECOND
        ),
        "restore": lambda: manager.restore(state_of(0.0)),
        "latest": manager.latest,
    }
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"has not answered for 0\.4"):
        calls[call]()
    assert time.monotonic() - began < 6
    hang.end()
    restored = manager.restore(state_of(0.0))
    assert restored is not None
    assert restored.step == 1
    manager.close()


def test_a_load_whose_reads_hang_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No read begins after that."""
    megackpt.save(state_of(1.0, 24), tmp_path / "a")
    hang = Hang(monkeypatch, os, "preadv", "megackpt-read")
    text = r"reading .*a \(rank 0, .*0\.4.* tensors of this load must not be used"
    with pytest.raises(StorageError, match=text):
        megackpt.load(state_of(0.0, 24), tmp_path / "a", timeout=HALF_A_SECOND)
    calls = hang.calls
    hang.end()
    assert 0 < hang.calls == calls
    state = megackpt.load(state_of(0.0, 24), tmp_path / "a")
    assert state["w"].unique().tolist() == [1.0]


def test_verifying_the_latest_step_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path, timeout=HALF_A_SECOND)
    manager.save(1, state_of(1.0))
    hang = Hang(monkeypatch, os, "preadv", "megackpt-check")
    with pytest.raises(StorageError, match=rf"find steps in {tmp_path} .*0\.4"):
        manager.latest(verify=True)
    hang.end()
    latest = manager.latest(verify=True)
    assert latest is not None
    assert latest.step == 1


@pytest.mark.parametrize("abort", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_removing_old_steps_is_given_up_at_the_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    abort: bool,
) -> None:
    """All saves are complete. With ``abort`` it is only logged."""
    timeout = timedelta(seconds=0.2)
    manager = CheckpointManager(tmp_path, keep_last=1, asynchronous=True)
    hang = Hang(monkeypatch, retention, "remove")
    for step in (1, 2, 3):
        manager.save(step, state_of(step))
    assert manager.finalize() == [1, 2, 3]
    text = rf"remove steps in {tmp_path} .*has not answered for 0\.18 s"
    assert manager._retention._removal is not None
    monkeypatch.setattr(manager._retention._removal[0], "patience", 0.18)
    if abort:
        manager.close(abort=True)
        assert re.search(text, caplog.text)
    else:
        with pytest.raises(StorageError, match=text):
            manager.close()
    manager.close()
    assert value_of(tmp_path / "iter_0000003") == 3.0
    hang.end()
    assert value_of(tmp_path / "iter_0000002") == 2.0  # given up before its turn
    with CheckpointManager(tmp_path, keep_last=1, timeout=timeout) as again:
        again.save(4, state_of(4.0))
        assert [step.step for step in again.steps()] == [4]


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

limits.EXIT_SECONDS = limits.WORKER_STOP_SECONDS = 0.2
files._sync_file = lambda moved, file: time.sleep(1000)
queue = AsyncCallsQueue()
state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}
queue.schedule_async_request(megackpt.save(state, sys.argv[1], async_sharded_save=True))
time.sleep(0.5)
"""


READS = """
import os, sys, threading, time
from datetime import timedelta
import torch, megackpt
from megackpt import ShardedTensor, StorageError

state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}
megackpt.save(state, sys.argv[1])
real = os.preadv
def hang(*arguments):
    if "megackpt-read" in threading.current_thread().name:
        time.sleep(1000)
    return real(*arguments)
os.preadv = hang
try:
    megackpt.load(state, sys.argv[1], timeout=timedelta(seconds=1))
except StorageError as error:
    print(error)
"""


def ended(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own, which ends in time."""
    return subprocess.run(
        [sys.executable, "-c", script, directory],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


@pytest.mark.slow
def test_a_commit_that_waits_for_ranks_blames_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last question to the other ranks may take the whole timeout."""
    monkeypatch.setattr(SingleGroup, "confirm", lambda _: time.sleep(3.2))
    megackpt.save(state_of(1.0), tmp_path / "a", timeout=timedelta(seconds=3))
    assert value_of(tmp_path / "a") == 1.0


@pytest.mark.slow
def test_the_end_of_the_process_does_not_wait_for_reads(tmp_path: Path) -> None:
    done = ended(READS, tmp_path / "a")
    assert "has not answered for 0.9 s" in done.stdout
    assert not done.stderr


def test_the_end_of_the_process_gives_a_disk_up(tmp_path: Path) -> None:
    done = ended(EXITS, tmp_path / "a")
    assert "its worker has not moved a byte" in done.stderr
    assert "before these saves are committed on all ranks: a: " in done.stderr


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("persistent", [False, True])
def test_a_frozen_disk(tmp_path: Path, persistent: bool) -> None:
    """Until the save is given up, and a save to another disk has succeeded."""
    queue = AsyncCallsQueue(persistent=persistent, timeout=timedelta(seconds=8))
    queue.schedule_async_request(begun(tmp_path / "other", 1.0))  # the process starts
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    with mounted(tmp_path) as live:
        begun(live / "c", 1.0).execute_sync()
        request = begun(live / "c", 2.0, mib=24)
        subprocess.run(["fsfreeze", "-f", live], check=True)
        # On a busy machine a writer process, which has the lowest priority, takes long to begin.
        thaw = threading.Timer(120, subprocess.run, [["fsfreeze", "-u", live]])
        thaw.start()
        try:
            queue.schedule_async_request(request)
            with pytest.raises(StorageError, match="has not moved a byte"):
                queue.maybe_finalize_async_calls(blocking=True)
            queue.schedule_async_request(begun(tmp_path / "other", 2.0))
            assert queue.maybe_finalize_async_calls(blocking=True) == [2]
            assert thaw.is_alive(), "the disk has answered"
        finally:
            thaw.cancel()
            subprocess.run(["fsfreeze", "-u", live], check=False)
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
@pytest.mark.parametrize("step", ["begin", "save", "commit"])
def test_a_disk_is_frozen_as_a_step_begins(tmp_path: Path, step: str) -> None:
    """For 15 seconds. The trainer's own thread is free long before that."""
    timeout = timedelta(seconds=4)
    with mounted(tmp_path) as live:
        megackpt.save(state_of(1.0), live / "c")
        queue = AsyncCallsQueue(timeout=timeout)

        def save(asynchronous: bool = False) -> Any:
            return megackpt.save(
                state_of(2.0, 8),
                live / "c",
                async_sharded_save=asynchronous,
                timeout=timeout,
            )

        calls: dict[str, Callable[[], Any]] = {
            "begin": lambda: save(asynchronous=True),
            "save": save,
            "commit": lambda: queue.maybe_finalize_async_calls(blocking=True),
        }
        if step == "commit":
            queue.schedule_async_request(save(asynchronous=True))
            while "written here" not in queue.status():
                time.sleep(0.01)
        subprocess.run(["fsfreeze", "-f", live], check=True)
        thaw = threading.Timer(15, subprocess.run, [["fsfreeze", "-u", live]])
        thaw.start()
        began = time.monotonic()
        try:
            with pytest.raises(StorageError, match="the storage has not answered"):
                calls[step]()
            seconds = time.monotonic() - began
            print(f"\n{step}: raised after {seconds:.1f} s")
            assert seconds < 5
        finally:
            thaw.join()
        while any(t.name == "megackpt-disk" for t in threading.enumerate()):
            time.sleep(0.01)
        gc.collect()
        assert value_of(live / "c") == 1.0
        megackpt.save(state_of(3.0), live / "c")
        assert value_of(live / "c") == 3.0
        assert set(os.listdir(live)) == {"c", "lost+found"}
        queue.close()


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(not THROTTLE.exists(), reason="needs the blkio controller")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name", ["torch_dist", "zarr", "safetensors"])
def test_a_throttled_disk(tmp_path: Path, name: str, persistent: bool) -> None:
    """24 or 42 MiB at 3 MB a second, for twice the timeout, are saved."""
    # A writer process has the lowest priority, so it also waits for a processor.
    seconds = 4 + 3 * persistent
    with mounted(tmp_path) as live:
        device = os.stat(live).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        queue = AsyncCallsQueue(persistent=persistent)
        queue.schedule_async_request(begun(tmp_path / "first", 0.0))
        queue.maybe_finalize_async_calls(blocking=True)  # a process has started
        queue._timeout = timedelta(seconds=seconds)
        os.sync()
        THROTTLE.write_text(f"{number} 3000000")
        try:
            request = begun(live / "c", 1.0, mib=6 * seconds, sharded_strategy=name)
            began = time.monotonic()
            queue.schedule_async_request(request)
            assert queue.maybe_finalize_async_calls(blocking=True) == [1]
            assert time.monotonic() - began > 2 * seconds - 1
            queue.close()
        finally:
            THROTTLE.write_text(f"{number} 0")
        assert value_of(live / "c") == 1.0
