"""Lightning's Trainer with our strategies: killed, and resumed on other ranks and by another strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

import megackpt
from tests.conftest import Ranks
from tests.integrations.programs import Program

pytestmark = pytest.mark.lightning

CHANGES = (
    ("ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)", "DDPStrategy()"),
    ("ModelParallelStrategy", "DDPStrategy"),
    ("    def configure_model(self):\n", "    def unused(self):\n"),
)  # fmt: skip


@pytest.mark.parametrize("first", ["fsdp2", "ddp"])
def test_a_run_is_killed_and_resumes_with_another_strategy(
    ranks: Ranks, tmp_path: Path, first: str
) -> None:
    fsdp2 = Program("lightning.md", tmp_path, ranks, "lightning")
    ddp = Program("lightning.md", tmp_path, ranks, "lightning")
    for old, new in CHANGES:
        assert old in ddp.source
        ddp.source = ddp.source.replace(old, new)
    if first == "fsdp2":
        fsdp2.survives(2, 1, killed_at=9, saved=2, by=ddp)
    else:
        ddp.survives(2, 1, killed_at=9, saved=2, by=fsdp2)
    left = {path.name for path in (tmp_path / "killed/run/lightning").iterdir()}
    assert "epoch=5-step=12.ckpt" in left
    assert len(left) <= 2  # Lightning forgets the one that the kill has kept


def test_what_is_saved_before_slurm_ends_the_job_is_complete(
    ranks: Ranks, tmp_path: Path
) -> None:
    program = Program("lightning.md", tmp_path, ranks, "lightning")
    program.source = program.source.replace(
        "    def configure_optimizers(self):\n",
        "    def on_train_batch_end(self, *_):\n"
        "        if self.global_step == 3:\n"
        "            self.trainer.save_checkpoint('run/hpc_ckpt_1.ckpt')\n"
        "            os.kill(os.getpid(), 9)\n\n"
        "    def configure_optimizers(self):\n",
    )
    program.run(1, "killed", killed_at=99)
    assert megackpt.verify(tmp_path / "killed/run/hpc_ckpt_1.ckpt").ok
