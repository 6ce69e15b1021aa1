"""accelerate's Accelerator with our manager: killed, and resumed on other ranks, with DDP and FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest

from megackpt import CheckpointManager
from tests.conftest import Ranks
from tests.integrations.programs import FSDP_ON_CPU, Program

pytestmark = [pytest.mark.accelerate, pytest.mark.torchdata, pytest.mark.transformers]
PEERS = ("accelerate", "huggingface", "torchdata", "")
PLAIN = "    cpu=True,\n"
FSDP = """    cpu=True,
    fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap"),
"""


@pytest.mark.parametrize(
    "first", ["ddp", pytest.param("fsdp2", marks=pytest.mark.campaign)]
)
def test_a_run_is_killed_and_resumes(ranks: Ranks, tmp_path: Path, first: str) -> None:
    program = Program("accelerate.md", tmp_path, ranks, *PEERS)
    if first == "ddp":
        program.survives(2, 1, killed_at=9, saved=2)
    else:
        sharded = Program("accelerate.md", tmp_path, ranks, *PEERS)
        assert PLAIN in sharded.source
        sharded.source = FSDP_ON_CPU + sharded.source.replace(PLAIN, FSDP)
        sharded.survives(2, 1, killed_at=9, saved=2, by=program)
    steps = CheckpointManager(tmp_path / "killed/run/accelerate/checkpoints").steps()
    assert [step.step for step in steps] == [5, 6]
    assert all(step.complete for step in steps)
