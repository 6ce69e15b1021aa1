"""transformers' Trainer with our manager: killed, and resumed on other ranks; the best model."""

from __future__ import annotations

from pathlib import Path

import pytest

from megackpt import CheckpointManager
from tests.conftest import Ranks
from tests.integrations.programs import FSDP_ON_CPU, Program

pytestmark = [pytest.mark.transformers, pytest.mark.accelerate]
PEERS = ("huggingface", "accelerate", "")
PLAIN = "        use_cpu=True,\n"
FSDP = """        use_cpu=True,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
"""


def test_a_run_is_killed_and_resumes(ranks: Ranks, tmp_path: Path) -> None:
    program = Program("transformers.md", tmp_path, ranks, *PEERS)
    program.survives(2, 1, killed_at=9, saved=2)
    steps = CheckpointManager(tmp_path / "killed/run/transformers").steps()
    assert [step.step for step in steps] == [10, 12]
    assert all(step.complete for step in steps)


@pytest.mark.campaign
def test_a_run_with_fsdp_is_killed_and_resumes_without(
    ranks: Ranks, tmp_path: Path
) -> None:
    sharded = Program("transformers.md", tmp_path, ranks, *PEERS)
    assert PLAIN in sharded.source
    sharded.source = FSDP_ON_CPU + sharded.source.replace(PLAIN, FSDP)
    plain = Program("transformers.md", tmp_path, ranks, *PEERS)
    sharded.survives(2, 1, killed_at=9, saved=2, by=plain)


def test_the_best_model_is_kept_and_loaded(ranks: Ranks, tmp_path: Path) -> None:
    program = Program("transformers.md", tmp_path, ranks, *PEERS)
    old = "        save_steps=2,\n        save_total_limit=2,\n"
    assert old in program.source
    best = (
        "        eval_strategy='steps',\n        eval_steps=2,\n"
        "        load_best_model_at_end=True,\n        metric_for_best_model='loss',\n"
        "        greater_is_better=True,\n"  # so that the worst is the best, and not the last
    )
    program.source = program.source.replace(old, old + best) + (
        "found = trainer.evaluate()['eval_loss']\n"
        "assert abs(found - trainer.state.best_metric) < 1e-6, trainer.state\n"
    )
    assert max(program.run(1, "best")) == 12
    steps = CheckpointManager(tmp_path / "best/run/transformers").steps()
    assert [step.step for step in steps] == [2, 10, 12]
