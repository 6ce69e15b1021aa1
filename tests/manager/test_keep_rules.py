"""Which steps stay by metric and by age, and when the manager wants a save."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt.backends.safetensors import Safetensors
from megackpt.checkpoint.run_directory import METRICS, read_metrics
from megackpt.errors import NotACheckpoint, StorageError
from megackpt.manager import CheckpointManager
from megackpt.manager.keep_rules import KeepRules
from megackpt.storage import root_at
from megackpt.strategies import Strategy
from megackpt.testing import ThreadedGroup
from tests.manager.runs import TRACKER, names, state

LOSSES = {1: 5.0, 2: 1.0, 3: 4.0, 4: 2.0, 5: float("nan"), 6: 3.0}


@pytest.mark.parametrize(
    "strategy",
    [Safetensors(index=False), Strategy("safetensors", options={"index": False})],
)
def test_steps_that_cannot_be_removed(tmp_path: Path, strategy: Any) -> None:
    with pytest.raises(ValueError, match="are never removed: give keep_last=None"):
        CheckpointManager(tmp_path, strategy, keep_last=1)
    CheckpointManager(tmp_path, strategy)


@pytest.mark.parametrize(("mode", "stay"), [("min", [2, 4]), ("max", [1, 3])])
def test_the_best_by_a_metric_stay(tmp_path: Path, mode: Any, stay: list[int]) -> None:
    for step, loss in LOSSES.items():
        # A restart before each step: the metrics are those of the run.
        with CheckpointManager(
            tmp_path, keep_last=1, keep_best=2, best_mode=mode
        ) as manager:
            manager.save(step, state(step), metric=loss)
    assert [step.step for step in manager.steps()] == [*stay, 6]
    kept = json.loads((tmp_path / METRICS).read_text())
    assert set(kept) - {"6"} <= set(map(str, LOSSES))
    manager.save(2, state(2))  # now without a metric
    assert "2" not in json.loads((tmp_path / METRICS).read_text())


def test_a_damaged_one_is_not_a_best(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, state(1), metric=2)
    manager.save(2, state(2), metric=1)
    manager = CheckpointManager(tmp_path, keep_last=1, keep_best=1)
    next((tmp_path / "iter_0000002").glob("*.distcp")).write_bytes(b"")
    manager.save(3, state(3), metric=3)
    assert [step.name for step in manager.steps()] == ["iter_0000001", "iter_0000003"]


def test_unreadable_metrics_remove_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1, keep_best=1)
    manager.save(1, state(1), metric=2)
    (tmp_path / METRICS).write_text("[]")
    manager.save(2, state(2), metric=3)
    assert f"{METRICS} holds no metrics of steps" in caplog.text
    assert names(tmp_path) == ["iter_0000001", "iter_0000002", TRACKER, METRICS]
    assert (tmp_path / TRACKER).read_text() == "2"


@pytest.mark.parametrize("metric", ["loss", torch.ones(2), 10**400])
def test_a_bad_metric_is_refused_before_the_save(tmp_path: Path, metric: Any) -> None:
    manager = CheckpointManager(tmp_path)
    with pytest.raises(
        ValueError, match=r"metrics\['metric'\] is .*: a metric is a num"
    ):
        manager.save(1, state(1), metric=metric)
    assert manager.steps() == ()


def test_not_a_number_is_no_metric(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"1": NaN, "2": 0.5}')
    found = read_metrics(root_at(str(tmp_path)))
    assert found[2] == {"metric": 0.5}
    assert KeepRules().by_metric(found) == [2]


@pytest.mark.parametrize("late", ["tracker", "metric", "removal"])
def test_what_was_given_up_changes_nothing_later(tmp_path: Path, late: str) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, state(1))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    def give_up(_: int) -> None:
        raise StorageError("given up")

    def commit(_: str, work: Any) -> None:
        work(give_up)

    retention = manager._retention
    if late == "tracker":
        manager._restorer.on_storage = commit  # type: ignore[method-assign, assignment]
        manager._on_commit(2, True, {})
    elif late == "metric":
        with pytest.raises(StorageError):
            retention.note_metrics(1, {"metric": 0.5}, give_up)
    else:
        with pytest.raises(StorageError):
            retention.prune(9, give_up)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_young_ones_stay(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1, keep_for=timedelta(hours=1))
    manager.save(1, state(1))
    manager.save(2, state(2))
    two_hours_ago = time.time() - 7200
    for path in (tmp_path / "iter_0000001").iterdir():
        os.utime(path, (two_hours_ago, two_hours_ago))
    manager.save(3, state(3))
    assert [step.step for step in manager.steps()] == [2, 3]


@pytest.mark.parametrize(
    "options",
    [{"keep_best": 1}, {"keep_for": timedelta(1)}, {"keep_last": 1, "keep_best": 0},
     {"keep_last": 1, "best_mode": "loss"}, {"keep_last": 1, "keep_for": 7},
     {"save_interval": 0}, {"save_every_minutes": 0}],
)  # fmt: skip
def test_wrong_rules_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(reversed(options))):
        CheckpointManager(tmp_path, **options)
    assert KeepRules().by_metric(
        {1: {"metric": 2.0}, 3: {"metric": 2.0}, 2: {"metric": 1.0}, 4: {}}
    ) == [2, 3, 1]


def test_when_a_step_is_saved(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, save_interval=5)
    wanted = [
        step for step in range(1, 13) if manager.should_save(step, last=step == 12)
    ]
    assert wanted == [5, 10, 12]


def test_one_late_or_ending_rank_lets_all_save(tmp_path: Path) -> None:
    def rank(group: ThreadedGroup) -> list[bool]:
        manager = CheckpointManager(
            tmp_path, save_every_minutes=60, process_group=group
        )
        answers = [manager.should_save(1)]
        if group.rank == 1:
            manager._last_save_began -= 3601
        answers.append(manager.should_save(2))
        manager.save(2, state(2, group.rank, 2))
        answers.append(manager.should_save(3))
        if group.rank == 1:
            manager._preemption.received = True
        answers += [manager.should_save(4), manager.preempted(), manager.should_save(5)]
        return answers

    answers = ThreadedGroup.run(2, rank)
    assert answers == [[False, True, False, True, True, True]] * 2


def test_a_signal_lets_a_step_be_saved(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.on_signal(signal.SIGUSR1)
        assert not manager.should_save(1)
        signal.raise_signal(signal.SIGUSR1)
        assert manager.should_save(2)


@pytest.mark.parametrize(("mode", "chosen"), [("min", 2), ("max", 3)])
def test_the_best_step_is_restored(tmp_path: Path, mode: Any, chosen: int) -> None:
    assert CheckpointManager(tmp_path / "new").best_step() is None
    with CheckpointManager(tmp_path, best_mode=mode) as manager:
        assert manager.best_step() is None
        with pytest.raises(NotACheckpoint, match="has the metric 'metric'"):
            manager.restore(state(0), "best")
        for step, loss in {1: 3.0, 2: 1.0, 3: 7.0, 4: 2.0}.items():
            manager.save(step, state(step), metric=loss)
        assert manager.best_step() == chosen
        assert restored(manager, "best") == chosen
        assert restored(manager, "latest") == restored(manager, None) == 4
        with pytest.raises(ValueError, match="'latest', 'best' or None, not 'newest'"):
            manager.restore(state(0), "newest")
        next((tmp_path / f"iter_{chosen:07d}").glob("*.distcp")).write_bytes(b"")
        assert manager.best_step() == {2: 4, 3: 1}[chosen]


def restored(manager: CheckpointManager, step: Any) -> int | None:
    found = manager.restore(state(0), step)
    return found and found.step


def test_all_ranks_restore_the_best_step(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step, loss in {1: 1.0, 2: 2.0}.items():
            manager.save(step, {"step": step}, metric=loss)

    def run(group: ThreadedGroup) -> int:
        with CheckpointManager(tmp_path, process_group=group) as manager:
            found = manager.restore({"step": 0}, "best")
            assert found is not None
            return found.step

    assert ThreadedGroup.run(2, run) == [1, 1]
