"""Asynchronous saves: the same checkpoint as by a synchronous one, whatever happens to the tensors and the ranks."""

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
from collections.abc import Callable, Iterator
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
    ShardedObject,
    ShardedTensor,
    Strategy,
)
from megackpt.async_save import Task, queue as calls
from megackpt.backends.base import Source
from megackpt.backends.torch_dist import TorchDist
from megackpt.distributed import group_over
from megackpt.errors import (
    CheckpointingException,
    NotACheckpoint,
    RankFailure,
    RankLost,
    SaveInProgress,
    StorageError,
)
from megackpt.planning.manifest import SavePlan, WriteResult
from megackpt.storage import Storage
from megackpt.testing import ThreadedGroup

FORMATS = ("torch_dist", "zarr", "safetensors")
ROWS = 1024


class Gate(TorchDist):
    """A format whose ranks write when they are let, and fail where they are told to."""

    def __init__(self) -> None:
        super().__init__(files_per_rank=1)
        object.__setattr__(self, "_open", threading.Event())
        object.__setattr__(self, "_closed_to", set())
        object.__setattr__(self, "_failing", {})

    def write(self, root: Storage, plan: SavePlan, data: Source) -> WriteResult:
        if plan.rank in self._closed_to:
            self._open.wait(30)
        if plan.rank in self._failing:
            raise self._failing[plan.rank]
        return super().write(root, plan, data)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made._open.set()


def state(rank: int, ranks: int, value: float) -> dict[str, Any]:
    return {
        "weight": ShardedTensor.from_rank_offsets(
            "weight", torch.full((ROWS, 8), value + rank), (0, rank, ranks)
        ),
        "strided": ShardedTensor.from_rank_offsets(
            "strided", torch.full((4, 6), value).t(), replica_id=rank
        ),
        "object": ShardedObject(
            "object", {"value": value, "rank": rank}, (ranks,), (rank,)
        ),
        "step": value,
    }


def change(held: dict[str, Any]) -> None:
    """What an optimizer's next step does."""
    for entry in held.values():
        if isinstance(entry, ShardedTensor):
            entry.data.fill_(-1)
    held["object"].data["value"] = -1
    held["step"] = -1


def check(directory: Path, ranks: int, value: float) -> None:
    """All that was saved with this value is there."""
    asked = {
        "weight": ShardedTensor.from_rank_offsets(
            "weight", torch.empty(ranks * ROWS, 8)
        ),
        "strided": ShardedTensor.from_rank_offsets("strided", torch.empty(6, 4)),
        "objects": [
            ShardedObject("object", None, (ranks,), (rank,)) for rank in range(ranks)
        ],
        "step": 0,
    }
    got = megackpt.load(asked, directory)
    expected = torch.arange(ranks).repeat_interleave(ROWS)[:, None] + torch.full(
        (1, 8), value
    )
    assert torch.equal(got["weight"], expected)
    assert torch.equal(got["strided"], torch.full((6, 4), value))
    assert got["objects"] == [{"value": value, "rank": rank} for rank in range(ranks)]
    assert got["step"] == value


def begun(
    group: ThreadedGroup, directory: Path, value: float = 1.0, strategy: Any = None
) -> AsyncRequest:
    """An asynchronous save under way, of tensors that have changed since."""
    held = state(group.rank, group.size, value)
    request = megackpt.save(
        held, directory, strategy, async_sharded_save=True, process_group=group
    )
    change(held)
    assert request is not None
    return request


def queue_of(group: ThreadedGroup, **options: Any) -> AsyncCallsQueue:
    return AsyncCallsQueue(process_group=group, **options)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_tensors_may_change_as_soon_as_save_returns(
    tmp_path: Path, name: str, ranks: int
) -> None:
    def run(group: ThreadedGroup) -> list[int]:
        queue = queue_of(group)
        for number in range(3):
            queue.schedule_async_request(
                begun(group, tmp_path / str(number), number, name)
            )
        finalized = queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        return finalized

    assert ThreadedGroup.run(ranks, run) == [[0, 1, 2]] * ranks
    for number in range(3):
        check(tmp_path / str(number), ranks, number)


@pytest.mark.parametrize("name", FORMATS)
def test_the_files_are_those_of_a_synchronous_save(tmp_path: Path, name: str) -> None:
    def run(group: ThreadedGroup) -> None:
        megackpt.save(
            state(group.rank, group.size, 1.0),
            tmp_path / "now",
            name,
            process_group=group,
        )
        begun(group, tmp_path / "later", 1.0, name).execute_sync()

    ThreadedGroup.run(2, run)
    now, later = (
        {
            file.relative_to(folder): file.read_bytes()
            for file in folder.rglob("*")
            if file.is_file()
        }
        for folder in (tmp_path / "now", tmp_path / "later")
    )
    assert now.keys() == later.keys()
    differing = {file.name for file in now if now[file] != later[file]}
    assert differing <= {"megackpt.index", ".metadata"}  # they tell the id of the save


def test_alone_without_a_group(tmp_path: Path) -> None:
    held = state(0, 1, 5.0)
    queue = AsyncCallsQueue()
    request = megackpt.save(held, tmp_path / "a", async_sharded_save=True)
    change(held)
    assert request is not None
    assert queue.schedule_async_request(request) == 0
    assert queue.get_num_unfinalized_calls() == 1
    queue.close()
    assert queue.get_num_unfinalized_calls() == 0
    check(tmp_path / "a", 1, 5.0)


def test_it_is_a_checkpoint_only_when_it_is_finalized(tmp_path: Path) -> None:
    def run(group: ThreadedGroup) -> None:
        queue = queue_of(group)
        request = begun(group, tmp_path / "a")
        queue.schedule_async_request(request)
        assert request.task is not None
        assert request.task.wait(10)
        assert not megackpt.check_is_distributed_checkpoint(tmp_path / "a")
        while not queue.maybe_finalize_async_calls():  # as a training loop does
            time.sleep(0.01)
        assert queue.maybe_finalize_async_calls() == []

    ThreadedGroup.run(2, run)
    check(tmp_path / "a", 2, 1.0)


def test_saves_in_flight_are_finalized_in_order(tmp_path: Path, gate: Gate) -> None:
    gate._closed_to.add(1)

    def run(group: ThreadedGroup) -> None:
        queue = queue_of(group)
        queue.schedule_async_request(begun(group, tmp_path / "first", 1.0, gate))
        queue.schedule_async_request(begun(group, tmp_path / "second", 2.0))
        while "1 (0 %)" not in queue.status():
            assert queue.maybe_finalize_async_calls() == []
        assert "first" in queue.status().splitlines()[0]
        assert "waiting for rank 1" in queue.status() if group.rank == 0 else True
        assert queue.get_num_unfinalized_calls() == 2
        group.all_agree(0)
        gate._open.set()
        assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
        assert queue.status() == "nothing is being saved"

    ThreadedGroup.run(2, run)
    check(tmp_path / "first", 2, 1.0)
    check(tmp_path / "second", 2, 2.0)


@pytest.mark.parametrize(
    "error", [StorageError("the disk is full"), RuntimeError("odd"), MemoryError()]
)
def test_an_error_on_one_rank_is_everybodys(
    tmp_path: Path, gate: Gate, error: Exception
) -> None:
    gate._failing[2] = error

    def run(group: ThreadedGroup) -> tuple[type[BaseException], str]:
        megackpt.save(
            state(group.rank, group.size, 0.0), tmp_path / "a", process_group=group
        )
        queue = queue_of(group)
        queue.schedule_async_request(begun(group, tmp_path / "a", 1.0, gate))
        queue.schedule_async_request(begun(group, tmp_path / "b", 2.0))
        with pytest.raises(CheckpointingException) as raised:
            queue.maybe_finalize_async_calls(blocking=True)
        assert queue.maybe_finalize_async_calls(blocking=True) == [1]
        queue.close()
        return type(raised.value), str(raised.value)

    told = ThreadedGroup.run(3, run)
    assert len(set(told)) == 1
    kind, text = told[0]
    assert "rank 2" in text or "1 of 3 ranks" in text
    assert kind is StorageError or (kind is RankFailure and "Worker failure" in text)
    check(tmp_path / "a", 3, 0.0)
    check(tmp_path / "b", 3, 2.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_a_worker_that_hangs_is_given_up(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megackpt.limits.WORKER_STOP_SECONDS", 0.1)
    gate._closed_to.add(1)

    def run(group: ThreadedGroup) -> str:
        queue = queue_of(group, timeout=timedelta(seconds=1))
        queue.schedule_async_request(begun(group, tmp_path / "a", 1.0, gate))
        with pytest.raises(StorageError, match="has not moved a byte for") as raised:
            queue.maybe_finalize_async_calls(blocking=True)
        queue.schedule_async_request(begun(group, tmp_path / "b", 2.0))
        queue.close()
        return str(raised.value)

    told = ThreadedGroup.run(2, run)
    assert told[0] == told[1]
    assert "rank 1" in told[0]
    assert not megackpt.check_is_distributed_checkpoint(tmp_path / "a")
    check(tmp_path / "b", 2, 2.0)


@pytest.mark.parametrize("old", [False, True])
def test_an_aborted_save_changes_nothing(tmp_path: Path, gate: Gate, old: bool) -> None:
    gate._closed_to.add(0)

    def run(group: ThreadedGroup) -> None:
        if old:
            megackpt.save(
                state(group.rank, group.size, 0.0), tmp_path / "a", process_group=group
            )
        queue = queue_of(group)
        queue.schedule_async_request(begun(group, tmp_path / "a", 1.0, gate))
        if group.rank == 0:
            threading.Timer(0.2, gate._open.set).start()
        queue.close(abort=True)
        assert queue.get_num_unfinalized_calls() == 0
        group.all_agree(0)

    ThreadedGroup.run(2, run)
    if old:
        check(tmp_path / "a", 2, 0.0)
    else:
        with pytest.raises(NotACheckpoint):
            check(tmp_path / "a", 2, 1.0)
    assert (tmp_path / "a").exists() == old
    # Other ranks may still have been writing, so the next save removes their files.
    megackpt.save(state(0, 1, 2.0), tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir() if p.name != "a"] == []


def test_a_save_that_is_never_scheduled_hinders_nobody(tmp_path: Path) -> None:
    def run(group: ThreadedGroup) -> None:
        begun(group, tmp_path / "a", 1.0)  # and dropped
        group.all_agree(0)
        begun(group, tmp_path / "a", 2.0).execute_sync()

    ThreadedGroup.run(2, run)
    check(tmp_path / "a", 2, 2.0)


def test_two_saves_into_one_directory_at_once(tmp_path: Path, gate: Gate) -> None:
    gate._closed_to.add(0)

    def run(group: ThreadedGroup) -> None:
        queue = queue_of(group)
        queue.schedule_async_request(begun(group, tmp_path / "a", 1.0, gate))
        begun(group, tmp_path / "a", 2.0).execute_sync()
        gate._open.set()
        with pytest.raises(SaveInProgress):
            queue.close()

    ThreadedGroup.run(2, run)
    check(tmp_path / "a", 2, 2.0)


def test_ranks_that_finalize_different_saves_are_told(tmp_path: Path) -> None:
    def run(group: ThreadedGroup) -> None:
        queue = queue_of(group)
        if group.rank == 1:
            queue.schedule_async_request(AsyncRequest(lambda: None, (), []))
            queue._calls.clear()
        queue.schedule_async_request(begun(group, tmp_path / "a"))
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


def test_collectives_are_counted(tmp_path: Path) -> None:
    def run(group: ThreadedGroup) -> list[list[str]]:
        counted = []
        for number in range(2):
            group.log.clear()
            request = begun(group, tmp_path / str(number))
            counted.append(list(group.log))
            group.log.clear()
            queue = queue_of(group)
            queue.schedule_async_request(request)
            assert request.task is not None
            request.task.wait(10)
            queue.close()
            assert group.log[-2:] == ["gather", "broadcast"]
            assert set(group.log[:-2]) == {"lowest"}  # one a poll
        return counted

    assert (
        ThreadedGroup.run(2, run) == [[["lowest", "gather", "scatter"], ["lowest"]]] * 2
    )


@pytest.mark.parametrize("name", ["torch_dist", "zarr"])
def test_what_does_not_fit_is_written_before_save_returns(
    tmp_path: Path, name: str
) -> None:
    def large(group: ThreadedGroup, value: float) -> dict[str, Any]:
        tensors = [torch.full((1 << 18,), value + number) for number in range(6)]
        return {
            f"w{number}": ShardedTensor.from_rank_offsets(
                f"w{number}", tensor, (0, group.rank, group.size)
            )
            for number, tensor in enumerate(tensors)
        }

    def run(group: ThreadedGroup) -> None:
        queue = queue_of(group)
        for number in range(3):
            held = large(group, number)
            request = megackpt.save(
                held,
                tmp_path / str(number),
                Strategy(name, staging_memory=2 << 20),
                async_sharded_save=True,
                process_group=group,
            )
            for entry in held.values():
                entry.data.fill_(-1)
            assert request is not None
            assert request.task is not None
            assert request.task.outcome is not None
            queue.schedule_async_request(request)
        queue.close()

    ThreadedGroup.run(2, run)
    for number in range(3):
        got = megackpt.load_plain_tensors(tmp_path / str(number))
        assert {key: tensor.unique().tolist() for key, tensor in got.items()} == {
            f"w{key}": [number + key] for key in range(6)
        }


def test_a_disk_that_fails_beyond_the_cap(tmp_path: Path, gate: Gate) -> None:
    gate._failing[0] = StorageError("the disk is full")

    def run(group: ThreadedGroup) -> None:
        held = {
            "w": ShardedTensor.from_rank_offsets(
                "w", torch.ones(1 << 20), (0, group.rank, group.size)
            )
        }
        object.__setattr__(gate, "files_per_rank", 1)
        strategy = megackpt.strategies.policy._Given(  # type: ignore[attr-defined]
            "torch_dist", 1, instance=gate, staging_memory=1 << 20
        )
        request = megackpt.save(
            held, tmp_path / "a", strategy, async_sharded_save=True, process_group=group
        )
        assert request is not None
        with pytest.raises(StorageError, match="the disk is full"):
            request.execute_sync()

    ThreadedGroup.run(2, run)
    assert not (tmp_path / "a").exists()


def test_the_events_of_an_asynchronous_save(tmp_path: Path) -> None:
    events: list[megackpt.Event] = []
    with megackpt.watching(events.append):
        queue = AsyncCallsQueue()
        held = state(0, 1, 1.0)
        request = megackpt.save(held, tmp_path / "a", async_sharded_save=True)
        assert request is not None
        queue.schedule_async_request(request)
        queue.close()
    stages = [
        event.stage for event in events if event.stage != "plan"
    ]  # where none is reused
    assert stages == ["declare", "begin", "stage", "write", "commit", "total"]
    assert len({event.id for event in events if event.id}) == 1
    total, write = events[-1], events[-3]
    assert total.bytes == write.bytes >= ROWS * 8 * 4
    assert all(event.error is None for event in events)


def test_a_process_that_forgets_its_saves_is_told(
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
    assert "a: writing, 0 %" in caplog.text
    assert "close() finalizes them" in caplog.text
    assert not (tmp_path / "a").exists()


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


def test_a_queue_that_nobody_keeps_is_not_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request = megackpt.save(state(0, 1, 1.0), tmp_path / "a", async_sharded_save=True)
    assert request is not None
    AsyncCallsQueue().schedule_async_request(request)
    gc.collect()
    with caplog.at_level(logging.WARNING):
        calls._end_of_process()
    assert "so they are not committed" in caplog.text
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


def test_what_was_finalized_before_an_error_is_told() -> None:
    def fail() -> None:
        raise OSError("no such disk")

    queue = AsyncCallsQueue()
    for work in (None, None, fail):
        queue.schedule_async_request(AsyncRequest(work, (), []))
    with pytest.raises(RankFailure) as raised:
        queue.maybe_finalize_async_calls(blocking=True)
    assert raised.value.__notes__ == ["finalized before in this call: [0, 1]"]


def test_somebody_who_fails_at_being_told_hinders_nobody(
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


def test_saves_are_finalized_beside_a_load(ranks: Any, tmp_path: Path) -> None:
    ranks(polls_beside_a_load, 2, tmp_path)


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


def test_a_request_that_is_dropped_is_told(tmp_path: Path) -> None:
    heard: list[megackpt.Event] = []
    with megackpt.watching(heard.append):
        request = megackpt.save(
            state(0, 1, 1.0), tmp_path / "a", async_sharded_save=True
        )
        assert "total" not in {event.stage for event in heard}
        del request
        gc.collect()
    (total,) = (event for event in heard if event.stage == "total")
    assert (
        total.error
        == "CheckpointingException: a: its request was dropped before it was finalized"
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
