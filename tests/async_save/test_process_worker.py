"""The writer process of asynchronous saves: fed through shared memory, persistent, and gone when it should be."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.async_save import AsyncCallsQueue, AsyncRequest, Task, worker_process
from megackpt.async_save.process_worker import ProcessWorker
from megackpt.errors import (
    CheckpointingException,
    CorruptCheckpoint,
    StorageError,
    UntrustedClass,
)
from megackpt.staging.buffers import Buffer

sys.path.insert(0, str(Path(__file__).parent))  # writers import works by name
import chores

from tests.async_save.processes import done, ended, gone, until


@pytest.fixture
def worker() -> Iterator[ProcessWorker]:
    worker = ProcessWorker()
    yield worker
    worker.close()


def begun(
    worker: ProcessWorker, folder: Path, deaf: bool = False
) -> tuple[Task[int], int]:
    """A task that waits for the file "go", and the process in which it does."""
    folder.mkdir()
    task: Task[int] = Task(chores.Wait(folder, deaf), f"save {folder.name}", 1001)
    worker.start(task)
    return task, int(
        until(lambda: (folder / "begun").exists() and (folder / "begun").read_text())
    )


def test_one_process_does_all_tasks_in_their_order_on_memory_that_is_shared(
    worker: ProcessWorker, tmp_path: Path
) -> None:
    arena = Buffer.allocate(10_000)
    arena.memory[:] = 1
    doublings = [Task(chores.Double(arena), f"iter_{i}", arena.size) for i in range(5)]
    notes = [Task(chores.Note(tmp_path, f"line {i}"), f"note {i}") for i in range(5)]
    for pair in zip(doublings, notes, strict=True):
        for task in pair:
            worker.start(task)
    pids = {ended(task).get() for task in [*doublings, *notes]}
    assert len(pids) == 1
    assert pids != {os.getpid()}
    assert (arena.memory == 32).all()
    assert {task.done for task in doublings} == {arena.size}
    assert (tmp_path / "notes").read_text() == "".join(f"line {i}\n" for i in range(5))


def test_the_process_is_modest(worker: ProcessWorker) -> None:
    told = done(worker, chores.surroundings)
    assert not told["torch"]
    assert told["policy"] == os.SCHED_IDLE
    assert told["ioprio"] in (2 << 13 | 7, None)
    assert told["session"] == os.getsid(0)  # or its priority would not count
    assert told["group"] != os.getpgrp()  # no interrupt from the terminal
    assert told["stdin"] == os.devnull
    others = [name for name in told["descriptors"] if "memfd:megackpt" not in name]
    assert len(others) == 4, others  # three standard ones and the socket


def test_progress_arrives_while_the_work_runs(
    worker: ProcessWorker, tmp_path: Path
) -> None:
    task, _ = begun(worker, tmp_path / "w")
    until(lambda: task.done == 1000)
    assert task.outcome is None
    (tmp_path / "w" / "go").touch()
    ended(task)
    assert task.done == 1001


def test_values_that_are_larger_than_a_packet(worker: ProcessWorker) -> None:
    assert done(worker, chores.large) == bytes(3 << 20)
    assert (
        done(worker, partial(len, bytes(3 << 20))) is not None
    )  # refuses its argument, but has travelled


def test_work_that_cannot_travel_says_what_to_do(
    worker: ProcessWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = done(worker, chores.pid)
    error = done(worker, lambda _: 1, "iter_7")
    assert isinstance(error, CheckpointingException)
    assert "iter_7: this work cannot be sent to a writer process" in str(error)
    assert "persistent=False" in str(error)
    assert isinstance(
        done(worker, partial(chores.pid, threading.Lock())), CheckpointingException
    )
    monkeypatch.setattr(chores.pid, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "pid", chores.pid, raising=False)
    error = done(worker, chores.pid)
    assert isinstance(error, CheckpointingException)
    assert "pid is defined in the script itself" in str(error)
    monkeypatch.undo()
    assert done(worker, chores.pid) == first


def test_errors_of_the_work_travel(
    worker: ProcessWorker, capfd: pytest.CaptureFixture[str]
) -> None:
    pid = done(worker, chores.pid)
    error = done(worker, chores.damaged)
    assert type(error) is CorruptCheckpoint
    assert str(error) == "fc1.weight is damaged"
    assert 'raise CorruptCheckpoint("fc1.weight is damaged")' in str(error.__cause__)
    assert type(done(worker, chores.untrusted)) is UntrustedClass
    error = done(worker, chores.wrong)
    assert str(error) == f"in the worker process {pid}: KeyError: 'no such key'"
    assert "in wrong" in str(error.__cause__)
    assert "SystemExit: leaving" in str(done(worker, chores.leave))
    assert "cannot pickle" in str(done(worker, chores.lock))
    assert done(worker, chores.pid) == pid
    assert capfd.readouterr().err == "the last words\n"


def test_a_killed_process_is_reported_and_the_next_task_gets_a_new_one(
    worker: ProcessWorker, tmp_path: Path
) -> None:
    first, pid = begun(worker, tmp_path / "300")
    second: Task[int] = Task(chores.pid, "save 301")
    worker.start(second)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(StorageError) as caught:
        ended(first).get()
    told = f"save 300: the writer process {pid} was killed by SIGKILL (out of memory, perhaps)"
    assert told in str(caught.value)
    assert "The next save starts a new one" in str(caught.value)
    assert ended(second).get() != pid


@pytest.mark.parametrize(
    ("work", "how"),
    [(chores.exits, "ended with status 3"), (chores.crash, "was killed by SIGSEGV")],
)
def test_the_error_for_a_process_that_ends_by_itself(
    worker: ProcessWorker, capfd: pytest.CaptureFixture[str], work: Any, how: str
) -> None:
    error = done(worker, work)
    assert isinstance(error, StorageError)
    assert how in str(error)
    assert isinstance(done(worker, chores.pid), int)
    assert ("in crash" in capfd.readouterr().err) == (work is chores.crash)


def test_a_process_that_dies_while_idle_is_replaced(worker: ProcessWorker) -> None:
    pid = done(worker, chores.pid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid))
    assert done(worker, chores.pid) not in (pid, None)


def test_a_cancelled_task_ends_with_its_process(
    worker: ProcessWorker, tmp_path: Path
) -> None:
    first, pid = begun(worker, tmp_path / "first")
    second: Task[int] = Task(chores.pid, "second")
    worker.start(second)
    third: Task[int] = Task(chores.Note(tmp_path, "third"), "third")
    worker.start(third)
    worker.stop(third)  # one that waits: the current one is not affected
    assert third.outcome is not None
    assert first.outcome is None
    reason = StorageError("too late")
    worker.stop(first, reason)
    assert first.outcome is not None
    assert first.outcome.error is reason
    assert gone(pid)
    assert ended(second).get() != pid
    assert not (tmp_path / "notes").exists()


def test_a_task_claimed_elsewhere_is_not_performed(
    worker: ProcessWorker,
) -> None:
    task: Task[int] = Task(chores.pid, "elsewhere")
    assert task.claim()
    worker.start(task)
    assert isinstance(done(worker, chores.pid), int)
    assert task.outcome is None
    worker.stop(task)
    with pytest.raises(CheckpointingException, match="given up"):
        task.get()


def test_a_process_that_is_stopped_is_killed(worker: ProcessWorker) -> None:
    task: Task[None] = Task(chores.stopped, "save 1")
    worker.start(task)
    until(lambda: task.started)
    worker.stop(task)
    assert task.outcome is not None
    assert isinstance(done(worker, chores.pid), int)


@pytest.mark.slow
def test_the_queue_gives_up_a_process_that_hangs(tmp_path: Path) -> None:
    # Longer than a process takes to start on a busy machine, where it gets only what others leave.
    queue = AsyncCallsQueue(persistent=True, timeout=timedelta(seconds=10))
    queue._worker = ProcessWorker()
    finalized: list[str] = []
    queue.schedule_async_request(
        AsyncRequest(chores.pid, (None,), [lambda: finalized.append("first")])
    )
    wait = chores.Wait(tmp_path, deaf=True)
    queue.schedule_async_request(
        AsyncRequest(wait, (print,), [lambda: finalized.append("hangs")])
    )
    queue.schedule_async_request(
        AsyncRequest(chores.pid, (None,), [lambda: finalized.append("last")])
    )
    with pytest.raises(StorageError, match="has not moved a byte"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert finalized == ["first"]
    assert queue.maybe_finalize_async_calls(blocking=True) == [2]
    assert finalized == ["first", "last"]
    queue.close()


@pytest.mark.parametrize("to", ["torch_dist", "zarr", "safetensors"])
def test_every_format_is_written_by_the_process_and_without_torch(
    tmp_path: Path, to: str
) -> None:
    tensors = {
        f"w{i}": torch.rand(256, 1024, generator=torch.Generator().manual_seed(i))
        for i in range(4)
    }
    expected = {key: tensor.clone() for key, tensor in tensors.items()}
    state = {
        key: ShardedTensor.from_rank_offsets(key, tensor)
        for key, tensor in tensors.items()
    }
    queue = AsyncCallsQueue(persistent=True)
    queue._worker = worker = ProcessWorker()
    request = megackpt.save(state, tmp_path / "ckpt", to, async_sharded_save=True)
    assert request is not None
    queue.schedule_async_request(request)
    for tensor in tensors.values():
        tensor.zero_()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    told = done(worker, chores.surroundings)
    queue.close()
    assert told["written"] > 4 << 20
    assert not told["torch"]
    megackpt.load(state, tmp_path / "ckpt")
    assert all(torch.equal(tensors[key], expected[key]) for key in expected)


def test_signals_meant_for_the_trainer_do_not_end_it(
    worker: ProcessWorker, tmp_path: Path
) -> None:
    task, pid = begun(worker, tmp_path / "w")
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        os.kill(pid, number)
    (tmp_path / "w" / "go").touch()
    assert ended(task).get() == pid


def test_it_outlives_the_thread_that_started_it(worker: ProcessWorker) -> None:
    pids: list[int] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: pids.append(done(worker, chores.pid)))
        thread.start()
        thread.join()
    assert pids[0] == pids[1]


def test_no_descriptor_and_no_memory_is_lost(worker: ProcessWorker) -> None:
    arena = Buffer.allocate(1 << 20)
    pid = done(worker, chores.Double(arena))
    gc.collect()
    counts = len(chores.descriptors(os.getpid())), len(chores.descriptors(pid))
    for i in range(20):
        assert (
            done(worker, chores.Double(arena if i % 2 else Buffer.allocate(1 << 20)))
            == pid
        )
        assert isinstance(done(worker, chores.damaged), CorruptCheckpoint)
    gc.collect()
    assert (
        len(chores.descriptors(os.getpid())) <= counts[0]
    )  # what came before may be let go of late
    assert len(chores.descriptors(pid)) <= counts[1]
    assert (
        done(worker, chores.mapped) < 2 << 20
    )  # the arena stays mapped, beside the task itself
    del arena
    gc.collect()
    assert done(worker, chores.mapped) < 1 << 20


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_leaves_the_writer_alone(
    worker: ProcessWorker, tmp_path: Path
) -> None:
    """As workers of data loaders are."""
    task, pid = begun(worker, tmp_path / "w")
    until(lambda: task.done == 1000)
    sockets = [
        name for name in chores.descriptors(os.getpid()) if name.startswith("socket")
    ]
    forked = os.fork()
    if not forked:
        code = 1
        try:
            left = [
                name
                for name in chores.descriptors(os.getpid())
                if name.startswith("socket")
            ]
            worker.stop(task)
            worker.close()
            assert len(left) == len(sockets) - 1
            assert done(worker, chores.pid) not in (pid, None)
            worker.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(forked, 0)[1] == 0
    assert not gone(pid)
    (tmp_path / "w" / "go").touch()
    assert ended(task).get() == pid
    assert done(worker, chores.pid) == pid


def test_closing_gives_up_what_is_unfinished(
    worker: ProcessWorker, tmp_path: Path
) -> None:
    first, pid = begun(worker, tmp_path / "w")
    second: Task[int] = Task(chores.pid, "second")
    worker.start(second)
    worker.close()
    for task in (first, second):
        with pytest.raises(CheckpointingException, match="given up"):
            ended(task).get()
    until(lambda: gone(pid))
    worker.close()
    assert done(worker, chores.pid) not in (pid, None)


def test_a_collected_worker_ends_its_process(tmp_path: Path) -> None:
    worker = ProcessWorker()
    task, pid = begun(worker, tmp_path / "w")
    del worker
    gc.collect()
    (tmp_path / "w" / "go").touch()
    assert ended(task).get() == pid
    until(lambda: gone(pid))


def test_a_process_that_cannot_be_had(
    worker: ProcessWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        error = done(worker, chores.pid)
    assert isinstance(error, StorageError)
    assert "no writer process can be used" in str(error)
    with monkeypatch.context() as patch:
        patch.delattr(os, "memfd_create")
        error = done(worker, chores.Double(Buffer.allocate(1000)))
    assert isinstance(error, CheckpointingException)
    assert "persistent=False" in str(error)
    assert isinstance(done(worker, chores.pid), int)


def test_refusals_of_the_system_raise_and_the_next_task_works(
    worker: ProcessWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread, no descriptor, no room in the socket; what comes next works."""

    def refused(error: Exception) -> Callable[..., Any]:
        def refuse(*_: object, **__: object) -> None:
            raise error

        return refuse

    arena = Buffer.allocate(1000)
    places: list[tuple[Any, str, Exception]] = [
        (threading.Thread, "start", RuntimeError("can't start new thread")),
        (worker_process, "Pipe", OSError(errno.EMFILE, "Too many open files")),
        (subprocess, "Popen", OSError(errno.EAGAIN, "Resource unavailable")),
        (worker_process, "send_handle", OSError(errno.EMFILE, "Too many open files")),
    ]
    for place, name, error in places:
        worker.close()  # so that the next task starts a process
        with monkeypatch.context() as patch:
            patch.setattr(place, name, refused(error))
            told = done(worker, chores.Double(arena), "iter_8")
        assert type(told) is StorageError
        assert str(told).startswith(f"iter_8: no writer process can be used: {error} (")
        assert isinstance(done(worker, chores.pid), int)


def test_only_the_process_that_is_at_a_task_is_killed(worker: ProcessWorker) -> None:
    """The task that ends while it is given up, and the next one, which gets a process that nobody has killed."""
    pid = done(worker, chores.pid)
    dispatcher = worker._dispatcher
    assert dispatcher is not None
    first: Task[int] = Task(chores.pid, "first")
    held: list[bool] = []

    def kill_late(
        outcome: object,
    ) -> None:  # it is still the current one
        held.append(dispatcher.kill_process_of(first))

    first.on_end(kill_late)
    second: Task[int] = Task(chores.pid, "second")
    worker.start(first)
    worker.start(second)
    assert ended(second).get() != pid
    assert (ended(first).get(), held) == (pid, [True])
    assert not dispatcher.kill_process_of(first)  # it is over
    assert done(worker, chores.pid) == second.get()
