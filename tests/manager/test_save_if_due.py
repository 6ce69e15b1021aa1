"""One call a training step: it polls, decides, saves, and says whether to stop. Decisions of functions."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megackpt.errors import RankFailure
from megackpt.manager import CheckpointManager, SaveStatus
from megackpt.testing import ThreadedGroup
from tests.manager.runs import names, state

SAVED = SaveStatus(saved=True, should_stop=False)
NOT_DUE = SaveStatus(saved=False, should_stop=False)


def test_the_status_is_a_plain_value() -> None:
    assert repr(SAVED) == "SaveStatus(saved=True, should_stop=False)"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_due_steps_are_saved_and_committed(tmp_path: Path, asynchronous: bool) -> None:
    def train(group: ThreadedGroup) -> list[SaveStatus]:
        with CheckpointManager(
            tmp_path, save_interval=2, asynchronous=asynchronous, process_group=group
        ) as manager:
            found = [
                manager.save_if_due(
                    step,
                    state(step, group.rank, 2),
                    extra={"epoch": 1},
                    metrics={"loss": step},
                    last=step == 5,
                )
                for step in range(1, 6)
            ]
            manager.finalize()
            assert manager.best_step() is None  # there is no metric named "metric"
        return found

    expected = [NOT_DUE, SAVED, NOT_DUE, SAVED, SAVED]
    assert ThreadedGroup.run(2, train) == [expected, expected]
    steps = CheckpointManager(tmp_path).steps()
    assert [(step.step, step.metrics) for step in steps] == [
        (2, {"loss": 2.0}),
        (4, {"loss": 4.0}),
        (5, {"loss": 5.0}),
    ]
    assert all(step.seconds and step.seconds > 0 for step in steps)


def test_a_signal_of_one_rank_stops_all_after_a_complete_save(tmp_path: Path) -> None:
    def train(group: ThreadedGroup) -> list[SaveStatus]:
        manager = CheckpointManager(tmp_path, asynchronous=True, process_group=group)
        manager._listens = True  # only the main thread may set handlers
        found = []
        for step in (1, 2, 3):
            if step == 2 and group.rank == 1:
                manager._preemption.received = True
            found.append(manager.save_if_due(step, state(step, group.rank, 2)))
            if found[-1].should_stop:
                # Complete, without close().
                assert [step.step for step in manager.steps()] == [2]
                break
        manager.close()
        return found

    stopped = SaveStatus(saved=True, should_stop=True)
    assert ThreadedGroup.run(2, train) == [[NOT_DUE, stopped]] * 2


def test_a_real_signal_stops_one_process(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_interval=100) as manager:
        manager.on_signal(signal.SIGUSR1)
        assert manager.save_if_due(1, state(1)) == NOT_DUE
        signal.raise_signal(signal.SIGUSR1)
        assert manager.save_if_due(2, state(2)) == SaveStatus(True, True)
        assert [step.step for step in manager.steps()] == [2]


def test_a_save_that_failed_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path, save_interval=1, on_error="warn") as manager:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda _: os.close(-1))
            assert manager.save_if_due(1, state(1)) == NOT_DUE
        assert manager.save_if_due(2, state(2)) == SAVED


def test_the_function_of_rank_0_decides_for_all(tmp_path: Path) -> None:
    def train(group: ThreadedGroup) -> list[bool]:
        def chosen(step: int) -> bool:
            if step == 4:
                raise KeyError("loss_of_step_4")
            return step == 3 and group.rank == 0

        manager = CheckpointManager(
            tmp_path, save_interval=5, should_save_fn=chosen, process_group=group
        )
        found = [manager.should_save(step) for step in (1, 3, 5)]
        with pytest.raises(RankFailure, match=r"should_save_fn(.|\n)*loss_of_step_4"):
            manager.save_if_due(4, state(4, group.rank, 2))
        assert not manager.should_save(6)
        return found

    assert ThreadedGroup.run(2, train) == [[False, True, True]] * 2
    assert names(tmp_path) == []


def test_steps_of_a_function_stay(tmp_path: Path) -> None:
    def train(group: ThreadedGroup) -> None:
        def keeps(step: int) -> bool:
            if step == 7:
                raise KeyError("no rule for step 7")
            return step == 3

        manager = CheckpointManager(
            tmp_path, keep_last=1, keep_every=2, keep_fn=keeps, process_group=group
        )
        for step in range(1, 7):
            manager.save(step, state(step, group.rank, 2))
        with pytest.raises(RankFailure, match=r"keep_fn(.|\n)*no rule for step 7"):
            manager.save(7, state(7, group.rank, 2))
        manager.save(9, state(9, group.rank, 2))

    ThreadedGroup.run(2, train)
    found = CheckpointManager(tmp_path).steps()
    assert [step.step for step in found] == [2, 3, 4, 6, 9]


def test_a_function_that_fails_for_an_older_step_removes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules: dict[int, bool] = {}
    manager = CheckpointManager(tmp_path, keep_last=1, keep_fn=rules.__getitem__)
    for step in (1, 2):
        rules[step] = False
        manager.save(step, state(step))
        rules.clear()
    assert [step.step for step in manager.steps()] == [1, 2]
    assert "the next save tries again: 1" in caplog.text


@pytest.mark.parametrize(
    ("metrics", "text"),
    [({"acc": 0.5, "loss": "low"}, r"metrics\['loss'\] is 'low': a metric is a number"),
     ({"loss": True}, r"metrics\['loss'\] is True"), ({"loss": None}, r"metrics\['loss'\] is None"),
     ({"acc": 0.5}, r"the metric 'loss', which is not in the metrics \['acc'\]"),
     (0.5, "metrics is a dict of numbers by name, not 0.5")],
)  # fmt: skip
def test_wrong_metrics_are_refused_before_the_save(
    tmp_path: Path, metrics: Any, text: str
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1, keep_best=1, best_metric="loss")
    with pytest.raises(ValueError, match=text):
        manager.save(1, state(1), metrics=metrics)
    assert names(tmp_path) == []


def test_the_best_of_several_metrics_stay_and_are_restored(tmp_path: Path) -> None:
    options: dict[str, Any] = {"best_metric": "accuracy", "best_mode": "max"}
    manager = CheckpointManager(tmp_path, keep_last=1, keep_best=1, **options)
    for step, accuracy in enumerate([0.5, 0.75, float("nan"), 0.25], 1):
        manager.save(step, state(step), metrics={"loss": -step, "accuracy": accuracy})
    assert [step.step for step in manager.steps()] == [2, 4]
    found = manager.restore(state(0), "best")
    assert found is not None
    assert found.step == 2
    # A run of an earlier version, with one number for each step.
    metrics = tmp_path / "megackpt_metrics.json"
    metrics.write_text('{"2": 1.5, "4": 0.5}')
    assert manager.best_step() is None
    manager = CheckpointManager(tmp_path)
    assert manager.best_step() == 4
    assert [step.metrics for step in manager.steps()] == [
        {"metric": 1.5},
        {"metric": 0.5},
    ]
    assert len({*manager.steps()}) == 2  # steps can be keys
