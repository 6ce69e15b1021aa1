"""The queue of asynchronous saves: requests, votes, finalize functions, threads and the end of a process."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import megackpt
from megackpt import (
    AsyncCallsQueue,
    AsyncRequest,
    ShardedTensor,
)
from megackpt.async_save import Pending, Task, queue as calls
from megackpt.async_save.task import ThreadWorker
from megackpt.async_save.worker_process import is_runnable
from megackpt.distributed import group_over
from megackpt.errors import (
    CheckpointingException,
    RankFailure,
    RankLost,
    StorageError,
)
from megackpt.testing import ThreadedGroup
from tests.async_save.saves import Gate, begun, check, queue_of, state


@pytest.mark.parametrize("busy", [True, False])
def test_a_worker_without_a_processor_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """It moves no byte for longer than the timeout. A disk that hangs is given up."""
    monkeypatch.setattr(ThreadWorker, "waits_for_processor", lambda _: busy)
    monkeypatch.setattr("megackpt.limits.WORKER_STOP_SECONDS", 0.01)
    queue = AsyncCallsQueue(timeout=timedelta(seconds=0.2))
    group = group_over(None, timedelta(seconds=30))
    task: Task[int] = Task(lambda _: time.sleep(0.7) or 1, "a")
    request = AsyncRequest(Pending(task, group, int, int), (), [])
    queue.schedule_async_request(request)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert task.outcome is not None
    assert isinstance(task.outcome.error, StorageError) == (not busy)


def test_time_without_a_processor_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker waits for a processor, then for the disk: each time less than the timeout."""
    monkeypatch.setattr("megackpt.async_save.queue._HEARTBEAT", 0.1)
    monkeypatch.setattr("megackpt.limits.WORKER_STOP_SECONDS", 0.01)
    end = time.monotonic() + 1.5
    monkeypatch.setattr(
        ThreadWorker, "waits_for_processor", lambda _: time.monotonic() < end
    )
    queue = AsyncCallsQueue(timeout=timedelta(seconds=2))
    task: Task[int] = Task(lambda _: time.sleep(2.5) or 1, "a")
    pending = Pending(task, group_over(None, timedelta(seconds=30)), int, int)
    queue.schedule_async_request(AsyncRequest(pending, (), []))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert task.get() == 1


def test_what_is_runnable() -> None:
    code = "print(flush=True)\nwhile {}: pass\ninput()"
    for condition in ("True", "False"):
        process = subprocess.Popen(
            [sys.executable, "-c", code.format(condition)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.2)
        assert is_runnable(process.pid) == (condition == "True")
        process.kill()
        process.communicate()
    assert not is_runnable(process.pid)


def test_finalizing_different_saves_raises_on_all_ranks(tmp_path: Path) -> None:
    def run(group: ThreadedGroup) -> None:
        queue = queue_of(group)
        requests = [begun(group, tmp_path / name) for name in "ab"]
        queue.schedule_async_request(requests[group.rank])
        with pytest.raises(CheckpointingException, match=r"Unmatched async calls\. "):
            queue.maybe_finalize_async_calls(blocking=True)

    ThreadedGroup.run(2, run)


def test_finalize_functions_are_called_in_order_and_last(tmp_path: Path) -> None:
    def run(group: ThreadedGroup) -> list[str]:
        told: list[str] = []
        queue = queue_of(group)
        request = begun(group, tmp_path / "a")

        def complete() -> None:
            assert megackpt.check_is_distributed_checkpoint(tmp_path / "a")
            told.append("first")

        request.add_finalize_fn(complete)
        request.add_finalize_fn(lambda: told.append("second"))
        queue.schedule_async_request(request)
        with pytest.raises(RuntimeError, match="scheduled already"):
            request.freeze().add_finalize_fn(lambda: None)
        queue.close()
        return told

    assert ThreadedGroup.run(2, run) == [["first", "second"]] * 2


def test_requests_of_other_makes() -> None:
    """Megatron's fields; what the function raises on one rank is raised on all."""

    def run(group: ThreadedGroup) -> list[Any]:
        told: list[Any] = []

        def work(*args: Any, **kwargs: Any) -> None:
            told.append((args, kwargs))

        def fail() -> None:
            if group.rank == 1:
                raise OSError("no such disk")

        queue = queue_of(group)
        finish = [lambda: told.append("finalized")]
        queue.schedule_async_request(
            AsyncRequest(work, (1, None, 3), finish, {"key": 4}, lambda: "preloaded")
        )
        queue.schedule_async_request(AsyncRequest(None, (), []))
        queue.schedule_async_request(AsyncRequest(fail, (), finish))
        with pytest.raises(RankFailure, match="Worker failure"):
            queue.close()
        AsyncRequest(work, ("now",), finish).execute_sync()
        return told

    expected = [
        ((1, "preloaded", 3), {"key": 4}),
        "finalized",
        (("now",), {}),
        "finalized",
    ]
    assert ThreadedGroup.run(2, run) == [expected] * 2


def test_the_end_of_a_process_finalizes_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gate: Gate
) -> None:
    gate._closed_to.add(0)
    queue = AsyncCallsQueue()
    request = megackpt.save(
        state(0, 1, 1.0), tmp_path / "a", gate, async_sharded_save=True
    )
    assert request is not None
    queue.schedule_async_request(request)
    threading.Timer(0.1, gate._open.set).start()
    with caplog.at_level(logging.WARNING):
        calls._end_of_process()
    assert not caplog.records
    assert megackpt.verify(tmp_path / "a").ok


def test_an_error_in_a_vote_ends_the_request(tmp_path: Path) -> None:
    def run(group: ThreadedGroup) -> Callable[[], None] | None:
        queue = queue_of(group)
        queue.schedule_async_request(begun(group, tmp_path / "a"))
        if group.rank == 1:
            raise RuntimeError("this rank is gone")
        with pytest.raises(RankLost):
            queue.maybe_finalize_async_calls(blocking=True)
        assert queue.get_num_unfinalized_calls() == 0
        queue.close()
        return None

    outcomes = ThreadedGroup.outcomes(2, run)
    assert outcomes[0] is None
    assert not megackpt.check_is_distributed_checkpoint(tmp_path / "a")
    calls._unfinished.clear()  # the queue of the rank that is gone


def test_a_function_that_cannot_be_begun_on_one_rank_is_everybodys_error() -> None:
    def run(group: ThreadedGroup) -> str:
        def preload() -> int:
            if group.rank == 1:
                raise OSError("no memory to load into")
            return 0

        queue = queue_of(group)
        queue.schedule_async_request(
            AsyncRequest(lambda *_: None, (0, 0), [], {}, preload)
        )
        with pytest.raises(RankFailure, match="no memory to load into") as raised:
            queue.close()
        return str(raised.value)

    assert len(set(ThreadedGroup.run(2, run))) == 1


def test_requests_are_megatrons_tuples() -> None:
    class Theirs(NamedTuple):
        async_fn: Any
        async_fn_args: tuple[Any, ...]
        finalize_fns: list[Any]
        async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012
        preload_fn: Any = None
        is_frozen: bool = False
        call_idx: int = 0

    assert Theirs._fields == AsyncRequest._fields
    told: list[Any] = []
    queue = AsyncCallsQueue()
    queue.schedule_async_request(
        Theirs(told.append, ("worked",), [lambda: told.append("finalized")])
    )  # type: ignore[arg-type]
    queue.close()
    assert told == ["worked", "finalized"]
    assert AsyncRequest(print, (), [])._replace(call_idx=3).call_idx == 3
    with pytest.raises(CheckpointingException, match="the second of async_fn_args"):
        AsyncRequest(print, (), [], preload_fn=lambda: 0).execute_sync()


def test_a_request_that_is_over_cannot_be_added_to_or_finalized_again(
    tmp_path: Path,
) -> None:
    request = megackpt.save(state(0, 1, 1.0), tmp_path / "a", async_sharded_save=True)
    assert request is not None
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    with pytest.raises(RuntimeError, match="scheduled already"):
        request.add_finalize_fn(lambda: None)
    queue.close()
    with pytest.raises(
        CheckpointingException, match=r"this save has already ended \(done\)"
    ):
        request.execute_sync()
    check(tmp_path / "a", 1, 1.0)


def test_an_unreferenced_queue_is_finalized_at_the_end_of_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request = megackpt.save(state(0, 1, 1.0), tmp_path / "a", async_sharded_save=True)
    assert request is not None
    AsyncCallsQueue().schedule_async_request(request)
    gc.collect()
    caplog.clear()  # of requests that other tests have dropped
    with caplog.at_level(logging.WARNING):
        calls._end_of_process()
    assert not caplog.records
    check(tmp_path / "a", 1, 1.0)
    assert not calls._unfinished


def test_status_can_be_read_by_any_thread_at_any_time() -> None:
    queue, over = AsyncCallsQueue(), threading.Event()

    def look() -> int:
        looks = 0
        while not over.is_set():
            assert queue.status()
            looks += 1
        return looks

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        for _ in range(200):
            queue.schedule_async_request(AsyncRequest(None, (), []))
            queue.maybe_finalize_async_calls(blocking=True)
        over.set()
        assert looking.result() > 0


def test_an_error_notes_the_saves_finalized_before_it() -> None:
    def fail() -> None:
        raise OSError("no such disk")

    queue = AsyncCallsQueue()
    for work in (None, None, fail):
        queue.schedule_async_request(AsyncRequest(work, (), []))
    with pytest.raises(RankFailure) as raised:
        queue.maybe_finalize_async_calls(blocking=True)
    assert raised.value.__notes__ == ["finalized before in this call: [0, 1]"]


def test_a_failing_callback_does_not_stop_later_callbacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task: Task[int] = Task(lambda _: 7, "work")
    told: list[Any] = []
    task.on_end(lambda outcome: told.append(1 // (outcome.value or 0 - 7)))
    task.on_end(lambda _: 1 // 0)
    task.on_end(told.append)
    task.run()
    assert task.wait(1)
    assert task.get() == 7
    assert len(told) == 2
    assert "a callback failed" in caplog.text


FORKING = """
import os, sys, megackpt, torch
from megackpt import AsyncCallsQueue, ShardedTensor

def state(value):
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((8,), value))}

queue = AsyncCallsQueue()
queue.schedule_async_request(megackpt.save(state(1.0), sys.argv[1], async_sharded_save=True))
child = os.fork()
if not child:
    sys.exit(0)  # as a process that was forked for something else ends
assert os.waitpid(child, 0)[1] == 0
queue.close()
assert megackpt.load_plain_tensors(sys.argv[1])["w"].tolist() == [1.0] * 8
"""


def test_a_forked_process_that_ends_leaves_its_parents_save_alone(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(tmp_path / "a")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "so they are not committed" not in done.stderr


def polls_beside_a_load(directory: str) -> None:
    """Asynchronous saves are finalized while another thread is in a load over the same ranks."""
    import torch.distributed as dist

    rank = dist.get_rank()
    queue = AsyncCallsQueue()
    sharded = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(8), (0, rank, 2))}
    request = megackpt.save(sharded, f"{directory}/a", async_sharded_save=True)
    assert request is not None
    queue.schedule_async_request(request)
    begun, end = threading.Event(), threading.Event()

    def load() -> bool:
        with group_over(None) as group:  # as a load does
            first = group.all_agree(1)
            begun.set()
            return end.wait(30) and first and group.all_agree(1)

    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        assert begun.wait(30)
        if rank == 0:  # in another order than on rank 1
            queue.close()
            end.set()
        else:
            end.set()
            time.sleep(0.2)
            queue.close()
        assert loading.result(30)
    assert megackpt.check_is_distributed_checkpoint(f"{directory}/a")
    megackpt.save(sharded, f"{directory}/b")
    dist.barrier()


def test_a_second_thread_is_refused_and_takes_nothing_away() -> None:
    told: list[str] = []
    looking, over = threading.Event(), threading.Event()
    queue = AsyncCallsQueue()
    queue.schedule_async_request(
        AsyncRequest(None, (), [looking.set, lambda: over.wait(30) and None])
    )
    queue.schedule_async_request(
        AsyncRequest(over.wait, (30,), [lambda: told.append("last")])
    )
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(queue.maybe_finalize_async_calls, blocking=True)
        assert looking.wait(30)
        for refused in (queue.maybe_finalize_async_calls, queue.close):
            with pytest.raises(
                CheckpointingException,
                match="another thread is using this AsyncCalls",
            ):
                refused()
        assert told == []
        over.set()
        assert first.result(30) == [0, 1]
    assert told == ["last"]


def test_a_signals_handler_may_abort_what_the_queue_waits_for() -> None:
    queue, over = AsyncCallsQueue(), threading.Event()

    def abort(*_: object) -> None:
        over.set()
        queue.close(abort=True)

    def work() -> None:
        while not (queue._calls and queue._calls[0].slowest):  # somebody has looked
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)
        over.wait(30)

    before = signal.signal(signal.SIGUSR1, abort)
    try:
        queue.schedule_async_request(AsyncRequest(work, (), []))
        queue.schedule_async_request(AsyncRequest(None, (), []))
        assert queue.maybe_finalize_async_calls(blocking=True) == []
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert queue.get_num_unfinalized_calls() == 0


def test_who_keeps_a_request_that_is_over_keeps_nothing_else(tmp_path: Path) -> None:
    def run(group: ThreadedGroup) -> None:
        queue = queue_of(group)
        kept = [begun(group, tmp_path / name) for name in ("a", "b")]
        saves = [weakref.ref(request.async_fn.finish) for request in kept]  # type: ignore[union-attr]
        queue.schedule_async_request(kept[0])
        queue.maybe_finalize_async_calls(blocking=True)
        queue.schedule_async_request(kept[1])
        queue.close(abort=True)
        assert [request.async_fn.group for request in kept] == [None, None]  # type: ignore[union-attr]
        gc.collect()
        assert [save() for save in saves] == [None, None]

    ThreadedGroup.run(2, run)


def test_a_view_held_as_a_parameter_is_stored_without_what_it_is_a_view_of(
    tmp_path: Path,
) -> None:
    large = torch.arange(1 << 18, dtype=torch.float32)
    held = {str(grad): torch.nn.Parameter(large[2:4], grad) for grad in (False, True)}
    megackpt.save(dict(held), tmp_path / "a")
    assert sum(file.stat().st_size for file in (tmp_path / "a").iterdir()) < 1 << 18
    for key, value in megackpt.load_common_state_dict(tmp_path / "a").items():
        assert torch.equal(value, held[key])
        assert value.requires_grad == held[key].requires_grad


def test_who_would_end_the_process_from_a_thread_has_failed() -> None:
    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(sys.exit, (3,), []))
    with pytest.raises(
        RankFailure,
        match=r"RuntimeError: the work tried to end its thread: SystemExit\(3\)",
    ):
        queue.close()
    with pytest.raises(SystemExit):
        AsyncRequest(sys.exit, (3,), []).execute_sync()


def test_a_finalize_function_that_fails_undoes_nothing(tmp_path: Path) -> None:
    told: list[str] = []

    def fail(error: Exception) -> Callable[[], None]:
        def raise_it() -> None:
            raise error

        return raise_it

    queue = AsyncCallsQueue()
    request = megackpt.save(state(0, 1, 1.0), tmp_path / "a", async_sharded_save=True)
    assert request is not None
    request.add_finalize_fn(fail(OSError("first")))
    request.add_finalize_fn(fail(RankLost("second")))
    request.add_finalize_fn(lambda: told.append("third"))
    queue.schedule_async_request(request)
    own = AsyncRequest(None, (), [fail(RankLost("of a load in it"))])
    queue.schedule_async_request(own)
    own.add_finalize_fn(lambda: told.append("until it is finalized"))
    with pytest.raises(OSError, match="first") as raised:
        queue.maybe_finalize_async_calls(blocking=True)
    assert raised.value.__notes__ == [
        "a had succeeded on all ranks before that: the save is committed",
        "finalized before in this call: [0]",
    ]
    check(tmp_path / "a", 1, 1.0)
    with pytest.raises(RankLost, match="of a load in it"):
        queue.close()
    assert told == ["third", "until it is finalized"]


def test_the_first_error_is_that_of_close(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> bool:
        raise RankLost("a rank is gone")

    def fail() -> None:
        monkeypatch.setattr(AsyncCallsQueue, "_vote", lost)  # from the next request on
        raise OSError("the disk is full")

    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(None, (), [fail]))
    queue.schedule_async_request(AsyncRequest(None, (), []))
    with pytest.raises(OSError, match="the disk is full"):
        queue.close()
    assert queue.get_num_unfinalized_calls() == 0


def test_a_dropped_request_ends_in_an_event_with_an_error(tmp_path: Path) -> None:
    heard: list[megackpt.Event] = []
    with megackpt.watching(heard.append):
        request = megackpt.save(
            state(0, 1, 1.0), tmp_path / "a", async_sharded_save=True
        )
        assert "total" not in {event.stage for event in heard}
        del request
        gc.collect()
    (total,) = (event for event in heard if event.stage == "total")
    assert total.error is not None
    assert (
        "a is not saved: its request was dropped before it was finalized" in total.error
    )


class Untold(Exception):
    def __str__(self) -> str:
        raise ValueError("it has no text")


def test_an_error_without_a_text_is_everybodys_too() -> None:
    def run(group: ThreadedGroup) -> str:
        def fail() -> None:
            if group.rank == 1:
                raise Untold

        queue = queue_of(group)
        queue.schedule_async_request(AsyncRequest(fail, (), []))
        assert queue._calls[0].task.wait(10)
        assert ("its text cannot be had" in queue.status()) == (group.rank == 1)
        with pytest.raises(
            RankFailure, match="rank 1: Untold: its text cannot be had: ValueError"
        ) as raised:
            queue.close()
        return str(raised.value)

    assert len(set(ThreadedGroup.run(2, run, timeout=10))) == 1
