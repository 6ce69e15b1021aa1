"""A manager whose saves may fail: all ranks agree that one did, keep the older steps, and continue."""

from __future__ import annotations

import errno
import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import AsyncCallsQueue, ShardedTensor
from megackpt.errors import RankLost, StorageError
from megackpt.manager import CheckpointManager
from megackpt.testing import ThreadedGroup
from tests.manager.runs import TRACKER, names, restored, state


class Disk:
    """Refuses the files that rank 1 writes for some steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
        self.steps, self.real = steps, os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        for step in self.steps:
            if f"iter_{step:07}" in path and "/__1_" in path:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.real(fd)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_continues_on_all_ranks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asynchronous: bool,
) -> None:
    Disk(monkeypatch, 2, 3)

    def train(group: ThreadedGroup) -> tuple[int, list[int]]:
        done: list[int] = []
        with CheckpointManager(
            tmp_path,
            keep_last=1,
            asynchronous=asynchronous,
            process_group=group,
            on_error="warn",
        ) as manager:
            for step in (1, 2, 3, 4):
                manager.save(step, state(step, group.rank, group.size))
                done += manager.finalize()
                if step == 3:
                    there = [s.step for s in manager.steps() if s.complete]
                    assert there == [1]
            return manager.failed_saves, done

    heard: list[megackpt.Event] = []
    with megackpt.watching(heard.append):
        told = ThreadedGroup.run(2, train)
    assert told == [(2, [1, 4] if asynchronous else [])] * 2
    texts = errors(caplog)
    assert len(texts) == 2
    assert "iter_0000002 is not saved, and training continues" in texts[0]
    assert "failure 2 in a row; 3 raise" in texts[1]
    assert "rank 1: " in texts[1]
    assert "Input/output error" in texts[1]
    totals = [event.error for event in heard if event.stage == "total"]
    assert len(totals) == 8
    assert sum(error is not None for error in totals) == 4
    assert names(tmp_path) == ["iter_0000004", TRACKER]
    assert restored(CheckpointManager(tmp_path)) == (4, 4, [])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_failures_in_a_row_raise_the_last_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    Disk(monkeypatch, 2, 4, 5)

    def train(group: ThreadedGroup) -> int:
        manager = CheckpointManager(
            tmp_path,
            asynchronous=asynchronous,
            process_group=group,
            on_error="warn",
            max_failures=2,
        )

        def save(step: int) -> None:
            manager.save(step, state(step, group.rank, group.size))
            manager.finalize()

        for step in range(1, 5):
            save(step)
        with pytest.raises(StorageError, match="Input/output error") as caught:
            save(5)
        assert caught.value.__notes__ == ["saves that failed in a row: 2"]
        assert manager.failed_saves == 3
        save(6)
        manager.close()
        return manager.failed_saves

    assert ThreadedGroup.run(2, train) == [3, 3]
    assert restored(CheckpointManager(tmp_path)) == (6, 6, [])


def test_several_saves_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One call finalizes those after the failed one, too, and so does the end."""
    Disk(monkeypatch, 1, 3)

    def train(group: ThreadedGroup) -> list[int]:
        with CheckpointManager(
            tmp_path, asynchronous=True, process_group=group, on_error="warn"
        ) as manager:
            for step in (1, 2):
                manager.save(step, state(step, group.rank, group.size))
            done = manager.finalize()
            manager.save(3, state(3, group.rank, group.size))
        assert manager.failed_saves == 2
        return done

    assert ThreadedGroup.run(2, train) == [[2], [2]]
    assert len(errors(caplog)) == 2
    assert names(tmp_path) == ["iter_0000002", TRACKER]


def test_by_default_a_failure_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Disk(monkeypatch, 1)

    def train(group: ThreadedGroup) -> int:
        manager = CheckpointManager(tmp_path, process_group=group)
        with pytest.raises(StorageError):
            manager.save(1, state(1, group.rank, group.size))
        return manager.failed_saves

    assert ThreadedGroup.run(2, train) == [1, 1]
    assert errors(caplog) == []


def test_lost_ranks_are_raised(tmp_path: Path) -> None:
    def train(group: ThreadedGroup) -> None:
        if group.rank == 1:
            raise ZeroDivisionError
        manager = CheckpointManager(tmp_path, process_group=group, on_error="warn")
        manager.save(1, state(1, group.rank, group.size))

    first, second = ThreadedGroup.outcomes(2, train)
    assert isinstance(first, RankLost)
    assert isinstance(second, ZeroDivisionError)


def test_a_queue_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Disk(monkeypatch, 2)

    def declared(group: ThreadedGroup) -> dict[str, Any]:
        half = torch.ones(8)
        return {"w": ShardedTensor.from_rank_offsets("w", half, (0, group.rank, 2))}

    def train(group: ThreadedGroup) -> list[int]:
        queue = AsyncCallsQueue(on_error="warn", timeout=timedelta(seconds=20))
        for step in (1, 2, 3):
            queue.schedule_async_request(
                megackpt.save(
                    declared(group),
                    tmp_path / f"iter_{step:07}",
                    async_sharded_save=True,
                    process_group=group,
                )
            )
        done = queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        return done

    assert ThreadedGroup.run(2, train) == [[0, 2]] * 2
    (text,) = errors(caplog)
    assert text.startswith("iter_0000002 is not saved")
    assert names(tmp_path) == ["iter_0000001", "iter_0000003"]


@pytest.mark.parametrize(
    "options", [{"on_error": "ignore"}, {"max_failures": 0}, {"max_failures": True}]
)
def test_wrong_arguments(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"on_error is|max_failures is"):
        CheckpointManager(tmp_path, **options)
