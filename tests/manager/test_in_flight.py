"""A manager's own saves in flight: ``restore`` and ``steps`` know of them, and the log does not call them dead."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import CheckpointManager, NotACheckpoint, StorageError
from tests.conftest import Ranks
from tests.manager.runs import restored, state


def texts(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == level]


def test_a_restore_finalizes_the_saves_in_flight(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path, asynchronous=True) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        assert manager.steps() == ()
        assert restored(manager) == (2, 2, [])
        assert [step.step for step in manager.steps()] == [1, 2]
        assert manager.poll() == [1, 2]
        manager.save(3, state(3))
        assert restored(manager, step=3) == (3, 3, [])
    assert not texts(caplog, logging.WARNING)


def test_the_step_to_restore_is_not_removed_by_the_save_in_flight(
    tmp_path: Path,
) -> None:
    with CheckpointManager(tmp_path, asynchronous=True, keep_last=1) as manager:
        manager.save(1, state(1))
        manager.finalize()
        manager.save(2, state(2))
        assert restored(manager, step=1) == (1, 1, [])
        manager.save(3, state(3))
    assert [step.step for step in CheckpointManager(tmp_path).steps()] == [3]


def test_a_restore_raises_the_error_of_the_save_in_flight_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def refuse(fd: int) -> None:
        if ".distcp" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, os.strerror(28))
        real(fd)

    with CheckpointManager(tmp_path, asynchronous=True) as manager:
        manager.save(1, state(1))
        manager.finalize()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", refuse)
            manager.save(2, state(2))
            with pytest.raises(StorageError, match="No space left"):
                manager.restore(state(-1))
        assert restored(manager) == (1, 1, [])


def back_and_forth(root: str) -> None:
    with CheckpointManager(root, asynchronous=True) as manager:
        rank, size = dist.get_rank(), dist.get_world_size()
        assert manager.restore(state(-1, rank, size)) is None
        for step in (1, 2, 3):
            manager.save(step, state(step, rank, size))
        for step in (None, 2):
            found = manager.restore(state(-1, rank, size), step)
            assert found is not None
            assert found.step == found.state["value"] == (step or 3)
        manager.save(4, state(4, rank, size))
        found = manager.restore(state(-1, rank, size))
        assert found is not None
        assert found.step == 4


def test_all_ranks_restore_the_step_that_was_in_flight(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(back_and_forth, 2, tmp_path)


def test_one_line_says_that_a_run_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "misspelled"
    with caplog.at_level(logging.INFO, "megackpt.manager"):
        assert CheckpointManager(root).restore(state(-1)) is None
    assert texts(caplog, logging.INFO) == [f"no checkpoint in {root}: the run begins"]


def test_a_save_that_this_process_gave_up_has_not_died(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    declared = megackpt.sharded({"w": torch.ones(2)})
    megackpt.save(declared, tmp_path / "c", async_sharded_save=True)
    (text,) = texts(caplog, logging.ERROR)
    assert text.startswith(f"{tmp_path / 'c'} is not saved: its request was dropped")
    assert "AsyncCallsQueue.schedule_async_request" in text
    with pytest.raises(NotACheckpoint, match="which is this process, was given up"):
        megackpt.load(declared, tmp_path / "c")


def test_the_reason_of_a_skipped_step_asks_no_question(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, naming="torchtitan")
    manager.save(2, state(2))
    manager.save(4, state(4))
    (tmp_path / "step-6").mkdir()
    megackpt.save(state(8), tmp_path / "step-8", async_sharded_save=True)
    caplog.clear()
    latest = manager.latest()
    assert latest is not None
    assert latest.step == 4
    skipped = texts(caplog, logging.WARNING)
    assert len(skipped) == 2
    assert not [text for text in skipped if "meant" in text or "?" in text]
