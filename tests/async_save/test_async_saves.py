"""Asynchronous saves: the same checkpoint as by a synchronous one, whatever happens to the tensors and the ranks."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import (
    AsyncCallsQueue,
    ShardedTensor,
    Strategy,
)
from megackpt.errors import (
    CheckpointingException,
    NotACheckpoint,
    RankFailure,
    SaveInProgress,
    StorageError,
)
from megackpt.testing import ThreadedGroup
from tests.async_save.saves import (
    FORMATS,
    ROWS,
    Gate,
    begun,
    change,
    check,
    queue_of,
    state,
)
from tests.async_save.test_queue import polls_beside_a_load


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


def test_a_failed_save_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tensors = []
    for _ in range(3):
        tensor = torch.ones(5000)
        tensors.append(weakref.ref(tensor))
        shard = ShardedTensor.from_rank_offsets("w", tensor)
        queue = AsyncCallsQueue()
        request = megackpt.save({"w": shard}, tmp_path / "a", async_sharded_save=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", full)
            queue.schedule_async_request(request)
            queue._calls[0].task.wait()
        with pytest.raises(StorageError, match="No space left"):
            queue.close()
        del tensor, shard, request, queue
    gc.collect()
    assert [ref() for ref in tensors] == [None] * 3
    with os.scandir("/proc/self/fd") as entries:
        targets = [os.readlink(entry) for entry in entries if entry.is_symlink()]
    assert [target for target in targets if str(tmp_path) in target] == []


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


def test_a_save_that_is_never_scheduled_does_not_block_the_next_one(
    tmp_path: Path,
) -> None:
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


def test_saves_are_finalized_beside_a_load(ranks: Any, tmp_path: Path) -> None:
    ranks(polls_beside_a_load, 2, tmp_path)
