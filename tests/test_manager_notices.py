"""The advice that steps after the newest should be removed is given where a run was set back, and only there."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import CheckpointManager, ShardedTensor

ADVICE = "remove the later steps"


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((8,), float(value)))}


def test_not_while_retention_is_slower_than_the_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory is listed late, by a thread; several steps are complete, and one more is begun, by then."""
    main, may_list, real = threading.main_thread(), threading.Event(), os.listdir

    def late(path: Any = ".") -> list[str]:
        where = (
            os.readlink(f"/proc/self/fd/{path}")
            if isinstance(path, int)
            else os.fspath(path)
        )
        if where == str(tmp_path) and threading.current_thread() is not main:
            may_list.wait(60)
        return real(path)

    monkeypatch.setattr(os, "listdir", late)
    with (
        caplog.at_level(logging.WARNING),
        CheckpointManager(tmp_path, keep_last=1, asynchronous=True) as manager,
    ):
        for step in range(1, 6):
            manager.save(step, state(step))
            manager.finalize()
        manager.save(6, state(6))
        may_list.set()
    assert ADVICE not in caplog.text
    assert [
        step.step for step in CheckpointManager(tmp_path).steps() if step.complete
    ] == [6]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_in_a_run_that_was_set_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    with CheckpointManager(tmp_path, keep_last=3, asynchronous=asynchronous) as manager:
        for step in (10, 20, 30):
            manager.save(step, state(step))
    with (
        caplog.at_level(logging.WARNING),
        CheckpointManager(tmp_path, keep_last=3, asynchronous=asynchronous) as manager,
    ):
        manager.restore(state(), 10)
        manager.save(11, state(11))
    assert ADVICE in caplog.text


def test_in_a_run_that_was_set_back_by_the_same_manager(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        CheckpointManager(tmp_path, keep_last=3) as manager,
    ):
        for step in (10, 20):
            manager.save(step, state(step))
        assert ADVICE not in caplog.text
        manager.restore(state(), 10)
        manager.save(11, state(11))
    assert ADVICE in caplog.text
