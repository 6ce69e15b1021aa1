"""torchtitan's optimizers and schedulers, and its own trainer, with our manager: killed, and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megackpt import CheckpointManager, verify
from tests.conftest import Ranks
from tests.integrations.programs import Program

pytestmark = pytest.mark.torchtitan


@pytest.mark.parametrize("first", ["ours", "stock"])
def test_a_run_is_killed_and_resumes(ranks: Ranks, tmp_path: Path, first: str) -> None:
    program = Program("torchtitan.md", tmp_path, ranks, "torchtitan")
    stock = Program("torchtitan.md", tmp_path, ranks, "torchtitan")
    ours = "megackpt.integrations.torchtitan"
    assert ours in stock.source
    stock.source = stock.source.replace(ours, "torchtitan.components.checkpoint")
    # A save that is cut off leaves files, over which ours refuses to write.
    stock.source = stock.source.replace('async_mode="async"', 'async_mode="disabled"')
    if first == "ours":
        program.survives(2, 1, killed_at=9, saved=2)
    else:
        stock.survives(2, 2, killed_at=9, saved=2, by=program)
    steps = CheckpointManager(tmp_path / "killed/run/checkpoint").steps()
    complete = [step.step for step in steps if step.complete]
    assert complete[-2:] == [10, 12]
    if first == "ours":
        assert len(complete) <= 4  # the last save but one was running at the last purge


def test_a_clean_resume_logs_no_warning(ranks: Ranks, tmp_path: Path) -> None:
    program = Program("torchtitan.md", tmp_path, ranks, "torchtitan")
    program.resumes_without_a_warning("STEPS = 12", "STEPS = 8")


@pytest.mark.transformers  # for its tokenizers
def test_torchtitans_own_trainer_is_killed_and_resumes(
    ranks: Ranks, tmp_path: Path
) -> None:
    name = "with_torchtitan_trainer.py"
    program = Program(name, tmp_path, ranks, "torchtitan", "huggingface")
    program.survives(2, 2, killed_at=9, saved=2)
    steps = CheckpointManager(tmp_path / "killed/run/checkpoint").steps()
    complete = [step.step for step in steps if step.complete]
    assert complete[-2:] == [10, 12]
    assert verify(tmp_path / "killed/run/checkpoint/step-12").checked  # by digests
