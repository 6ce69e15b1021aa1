"""``prune`` and ``rm``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megackpt.manager import CheckpointManager
from tests.manager.runs import TRACKER, state


@pytest.fixture
def run(tmp_path: Path) -> Path:
    manager = CheckpointManager(tmp_path / "run")
    for step in range(1, 7):
        manager.save(step, state(step), metric=step % 3)
    return tmp_path / "run"


def steps(run: Path) -> list[int]:
    return [step.step or 0 for step in CheckpointManager(run).steps()]


def test_prune(run: Path, asked: Callable[..., Any], plain: Callable[..., str]) -> None:
    dry = asked("prune", run, "--keep-last", 1, "--keep-every", 2, "--dry-run")
    assert dry["removed"] == ["iter_0000001", "iter_0000003", "iter_0000005"]
    assert dry["dry_run"]
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    plain("prune", run, "--keep-last", 1, "--keep-best", 1, "--best-mode", "max")
    assert steps(run) == [5, 6]
    facts = asked("prune", run, "--keep-last", 1, "--keep-days", 0.5)
    assert (facts["newest"], facts["removed"]) == ("iter_0000006", [])
    assert asked("prune", run, "--keep-last", 1)["removed"] == ["iter_0000005"]


def test_a_run_that_was_set_back_is_pruned_before_its_step(
    run: Path, asked: Callable[..., Any]
) -> None:
    (run / TRACKER).write_text("3")
    facts = asked("prune", run, "--keep-last", 1)
    assert (facts["newest"], steps(run)) == ("iter_0000003", [3, 4, 5, 6])


def test_prune_refuses(tmp_path: Path, run: Path, plain: Callable[..., str]) -> None:
    plain("prune", tmp_path / "none", "--keep-last", 1, status=3)
    (tmp_path / "empty").mkdir()
    plain("prune", tmp_path / "empty", "--keep-last", 1, status=3)
    with pytest.raises(SystemExit, match="2"):
        plain("prune", run, "--keep-last", 0)
    with pytest.raises(SystemExit, match="2"):
        plain("prune", run, "--keep-last", 1, "--keep-days", 1e12)
    assert len(steps(run)) == 6


def test_a_rehearsal_leaves_out_those_of_others(
    run: Path, asked: Callable[..., Any]
) -> None:
    (run / "iter_0000001" / "megackpt.index").unlink()
    for dry in (["--dry-run"], []):
        facts = asked("prune", run, "--keep-last", 4, *dry)
        assert facts["removed"] == ["iter_0000002"]


def test_rm_refuses_a_link(run: Path, plain: Callable[..., str]) -> None:
    link, target = run / "link", run / "iter_0000001"
    link.symlink_to(target)
    plain("rm", run / "iter_0000002", f"{link}/", status=3)
    assert link.is_symlink()
    assert steps(run) == [1, 2, 3, 4, 5, 6]


def test_rm(run: Path, asked: Callable[..., Any], plain: Callable[..., str]) -> None:
    one, two = run / "iter_0000001", run / "iter_0000002"
    (one / "notes.txt").write_text("mine")
    assert asked("rm", one, two) == {"removed": [str(one), str(two)]}
    assert [path.name for path in one.iterdir()] == ["notes.txt"]
    assert not two.exists()
    plain("rm", two, status=3)


def test_rm_of_a_checkpoint_whose_files_are_all_cut(
    run: Path, plain: Callable[..., str]
) -> None:
    one = run / "iter_0000001"
    files = [path for path in one.iterdir() if path.is_file()]
    for path in files:
        path.write_bytes(b"{")
    plain("rm", one, status=4)
    assert all(path.read_bytes() == b"{" for path in files)
