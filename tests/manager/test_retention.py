"""Which steps stay, and what is removed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt.checkpoint import (
    begin,
    clear,
    remove,
    run_directory,
)
from megackpt.checkpoint.run_directory import NAMINGS
from megackpt.errors import (
    CorruptCheckpoint,
    NotACheckpoint,
    SaveInProgress,
)
from megackpt.manager import (
    CheckpointManager,
    retention,
)
from megackpt.manager.keep_rules import KeepRules
from megackpt.manager.retention import Retention
from tests.manager.runs import (
    TRACKER,
    hurt,
    names,
    restored,
    saved,
    state,
)

ADVICE = "remove the later steps"


@pytest.mark.parametrize(
    ("last", "every", "stay"),
    [(None, None, [0, 5, 7, 10, 12, 15]), (1, None, [15]), (3, None, [10, 12, 15]), (1, 5, [0, 5, 10, 15]),
     (9, 5, [0, 5, 7, 10, 12, 15]), (2, 7, [0, 7, 12, 15])],
)  # fmt: skip
def test_which_steps_stay(last: int | None, every: int | None, stay: list[int]) -> None:
    steps = [12, 0, 15, 5, 7, 10]
    rules = Retention("run", NAMINGS[0], KeepRules(last, every))
    assert rules.superfluous(steps, lambda _: True) == [
        s for s in sorted(steps) if s not in stay
    ]
    assert rules.superfluous(steps, lambda _: False) == []


def test_checkpoints_of_others_are_never_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    saved(CheckpointManager(tmp_path), 1, 2)
    saved(CheckpointManager(tmp_path, naming="torchtitan"), 1)
    megackpt.save(state(1), tmp_path / "iter_1")  # another way of writing it
    (tmp_path / "iter_0000001" / "megackpt.index").unlink()  # a stranger's
    (tmp_path / "iter_0000002" / "notes.txt").write_text("mine")
    torch.save({}, tmp_path / "iter_0000000")
    saved(manager, 3)
    assert names(tmp_path) == [
        "iter_0000000", "iter_0000001", "iter_0000002", "iter_0000003", "iter_1", TRACKER, "step-1"
    ]  # fmt: skip
    assert names(tmp_path / "iter_0000002") == ["notes.txt"]
    assert "iter_0000001 was not written by megackpt, and is left alone" in caplog.text
    assert megackpt.check_is_distributed_checkpoint(tmp_path / "iter_0000001")
    caplog.clear()
    saved(manager, 4)
    assert names(tmp_path / "iter_0000002") == ["notes.txt"]
    assert caplog.text == ""  # what stays has been told


def test_the_last_good_one_is_never_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    saved(manager, 1)
    real = Retention.apply

    def apply(*arguments: Any) -> None:
        next((tmp_path / "iter_0000002").glob("*.distcp")).unlink()
        real(*arguments)

    monkeypatch.setattr(Retention, "apply", apply)
    saved(manager, 2)
    assert "iter_0000002 is damaged, so it does not count: __0_0" in caplog.text
    assert restored(manager) == (1, 1, ["iter_0000002"])


def test_a_run_that_was_set_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps after the one that is saved are of another life: they neither count nor go."""
    manager = CheckpointManager(tmp_path, keep_last=2)
    saved(CheckpointManager(tmp_path), 10, 20, 30, 40)
    assert restored(manager, step=20) == (20, 20, [])
    saved(manager, 25)
    assert [step.step for step in manager.steps()] == [20, 25, 30, 40]
    assert (tmp_path / TRACKER).read_text() == "25"
    assert "holds step 40, which is after step 20" in caplog.text


def test_a_running_save_is_left_alone(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    saved(manager, 1)
    other = begin(tmp_path / "iter_0000001", save_id="cd" * 16)
    place = begin(tmp_path / "iter_0000002", save_id="ef" * 16)
    saved(manager, 3)
    for step in (1, 2):
        with pytest.raises(SaveInProgress):
            remove(manager.path(step))
        with pytest.raises(SaveInProgress):
            clear(manager.path(step))
    other.abort()
    place.abort()
    assert restored(manager, step=1) == (1, 1, [])
    saved(manager, 4)
    assert names(tmp_path) == ["iter_0000004", TRACKER]
    with pytest.raises(NotACheckpoint, match="does not exist"):
        remove(manager.path(9))


def test_a_tracker_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it names stays."""
    manager = CheckpointManager(tmp_path, keep_last=1)
    saved(manager, 1)
    (tmp_path / TRACKER).unlink()
    (tmp_path / TRACKER).mkdir()
    saved(manager, 2)
    assert "step 2 is complete, but its tracker is not written" in caplog.text
    assert [step.step for step in manager.steps()] == [1, 2]


def test_the_step_just_saved_stays(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    saved(manager, 10, 5)
    assert names(tmp_path) == ["iter_0000005", "iter_0000010", TRACKER]
    assert (tmp_path / TRACKER).read_text() == "5"


def test_set_back_while_a_save_is_under_way(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=1, asynchronous=True) as manager:
        saved(manager, 20)
        manager.finalize()
        saved(manager, 30)
        assert restored(manager, step=20) == (20, 20, [])
        assert manager.finalize() == [30]
        assert (tmp_path / TRACKER).read_text() == "30"
        saved(manager, 25)
        assert manager.finalize() == [25]
    assert names(tmp_path) == ["iter_0000025", "iter_0000030", TRACKER]
    assert (tmp_path / TRACKER).read_text() == "25"


def test_later_steps_of_any_style_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    megackpt.save(state(1), tmp_path / "20261122")
    saved(CheckpointManager(tmp_path), 100)
    assert restored(CheckpointManager(tmp_path), step=100) == (100, 100, [])
    assert "holds step 20261122, which is after step 100" in caplog.text


def test_only_the_newest_steps_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(CheckpointManager(tmp_path), *range(8))
    looked: list[int | None] = []
    opened: list[int] = []
    look, opening = run_directory._examine, retention.open_checkpoint
    monkeypatch.setattr(
        run_directory,
        "_examine",
        lambda path, step: looked.append(step.step) or look(path, step),
    )
    monkeypatch.setattr(
        retention,
        "open_checkpoint",
        lambda path: opened.append(int(path[-7:])) or opening(path),
    )

    def counted(call: Callable[[], object]) -> tuple[list[int | None], list[int]]:
        looked.clear()
        opened.clear()
        call()
        return looked, opened

    manager = CheckpointManager(tmp_path, keep_last=3)
    assert counted(manager.latest) == ([7], [7])
    assert counted(lambda: manager.restore(state(-1))) == ([7], [7])
    assert counted(lambda: manager.restore(state(-1), step=4)) == ([4, 7], [])
    assert counted(lambda: saved(manager, 8)) == ([8, 7, 6], [8, 7, 6])
    assert names(tmp_path) == ["iter_0000006", "iter_0000007", "iter_0000008", TRACKER]
    assert counted(lambda: saved(manager, 9)) == ([9, 8, 7], [9])
    assert counted(lambda: saved(CheckpointManager(tmp_path), 10)) == ([10, 9], [])


def test_a_step_that_proved_damaged_does_not_count(tmp_path: Path) -> None:
    saved(CheckpointManager(tmp_path), 1, 2, 3)
    hurt(tmp_path / "iter_0000003")
    manager = CheckpointManager(tmp_path, keep_last=2)
    assert restored(manager) == (2, 2, ["iter_0000003"])
    latest = manager.latest()
    assert latest is not None
    assert latest.step == 2
    saved(manager, 4)
    assert names(tmp_path) == ["iter_0000002", "iter_0000003", "iter_0000004", TRACKER]
    saved(manager, 3, 4)
    assert names(tmp_path) == ["iter_0000003", "iter_0000004", TRACKER]


@pytest.mark.parametrize("call", ["restore", "latest", "step"])
def test_a_damaged_step_counts_again_when_it_has_changed(
    tmp_path: Path, call: str
) -> None:
    manager, other = (
        CheckpointManager(tmp_path, keep_last=2),
        CheckpointManager(tmp_path),
    )
    saved(other, 1, 2, 3)
    hurt(tmp_path / "iter_0000003")
    if call == "step":
        with pytest.raises(CorruptCheckpoint, match="block 0"):
            manager.restore(state(-1), step=3)
    else:
        assert manager.latest(verify=True) if call == "latest" else restored(manager)
    assert restored(manager, step=2) == (2, 2, [])
    saved(manager, 4)
    assert restored(manager) == (4, 4, [])  # a rollback
    saved(manager, 4)
    assert names(tmp_path) == ["iter_0000002", "iter_0000003", "iter_0000004", TRACKER]
    saved(manager, 5)
    assert names(tmp_path) == ["iter_0000004", "iter_0000005", TRACKER]
    manager.save(6, state(3))
    hurt(tmp_path / "iter_0000006")
    assert restored(manager) == (5, 5, ["iter_0000006"])
    saved(manager, 7)
    assert names(tmp_path) == ["iter_0000005", "iter_0000006", "iter_0000007", TRACKER]
    remove(tmp_path / "iter_0000007")
    saved(other, 6)
    latest = manager.latest()
    assert latest is not None
    assert latest.step == 6


def test_a_step_that_was_kept_is_removed_after_it_is_saved_again(
    tmp_path: Path,
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    saved(manager, 1)
    (tmp_path / "iter_0000001" / "notes.txt").touch()
    saved(manager, 2)
    saved(CheckpointManager(tmp_path), 1)
    saved(manager, 3)
    assert names(tmp_path / "iter_0000001") == ["notes.txt"]


def test_leftovers_of_a_later_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    saved(manager, 10, 40)
    (tmp_path / "iter_0000040" / "eval.json").touch()
    remove(manager.path(40))
    (tmp_path / "20261122").mkdir()  # logs of a day
    assert restored(manager) == (10, 10, ["iter_0000040"])
    assert "20261122" not in caplog.text
    caplog.clear()
    saved(manager, 35)
    assert caplog.text == ""


@pytest.mark.parametrize("kind", ["link", "directory"])
def test_an_index_that_is_no_file_is_damage(tmp_path: Path, kind: str) -> None:
    manager = CheckpointManager(tmp_path)
    saved(manager, 1, 2)
    index = tmp_path / "iter_0000002" / "megackpt.index"
    index.rename(tmp_path / "index")
    if kind == "link":
        index.symlink_to(tmp_path / "index")
    else:
        index.mkdir()
    Retention(str(tmp_path), NAMINGS[0], KeepRules(1)).apply(2, lambda _: None)
    assert restored(manager) == (1, 1, ["iter_0000002"])


def test_restoring_a_step_waits_for_removals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        retention, "remove", lambda path: threading.Event().wait(0.5) or remove(path)
    )
    with CheckpointManager(tmp_path, keep_last=1, asynchronous=True) as manager:
        saved(manager, 1, 2)
        assert manager.finalize() == [1, 2]
        with pytest.raises(NotACheckpoint, match="iter_0000001 does not exist"):
            manager.restore(state(-1), step=1)


def test_retention_is_slower_than_the_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is listed late, by a thread; several steps are complete, and one more is begun, by then."""
    may_list, real = threading.Event(), Retention.apply

    def late(*arguments: Any) -> None:
        may_list.wait(60)
        real(*arguments)

    monkeypatch.setattr(Retention, "apply", late)
    with CheckpointManager(tmp_path, keep_last=1, asynchronous=True) as manager:
        for step in range(1, 6):
            manager.save(step, state(step))
            manager.finalize()
        manager.save(6, state(6))
        may_list.set()
    assert [
        step.step for step in CheckpointManager(tmp_path).steps() if step.complete
    ] == [6]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_advice_in_a_run_that_was_set_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    with CheckpointManager(tmp_path, keep_last=3, asynchronous=asynchronous) as manager:
        for step in (10, 20, 30):
            manager.save(step, state(step))
    with (
        caplog.at_level(logging.WARNING),
        CheckpointManager(tmp_path, keep_last=3, asynchronous=asynchronous) as manager,
    ):
        manager.restore(state(0), 10)
        manager.save(11, state(11))
    assert ADVICE in caplog.text


def test_advice_in_a_run_that_was_set_back_by_the_same_manager(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        CheckpointManager(tmp_path, keep_last=3) as manager,
    ):
        for step in (10, 20):
            manager.save(step, state(step))
        assert ADVICE not in caplog.text
        manager.restore(state(0), 10)
        manager.save(11, state(11))
    assert ADVICE in caplog.text
