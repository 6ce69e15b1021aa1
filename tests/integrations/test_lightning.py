"""Lightning's Trainer with our strategies: killed, and resumed on other ranks and by another strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

import megackpt
from tests.conftest import ROOT, Ranks
from tests.integrations.programs import FENCE, Program

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


def test_a_clean_resume_logs_no_warning(ranks: Ranks, tmp_path: Path) -> None:
    """Nor does a test of the model, which asks for no optimizer."""
    program = Program("lightning.md", tmp_path, ranks, "lightning")
    program.source += (
        "Module.test_step = lambda self, batch: None\n"
        "trainer.test(Module(), loader, ckpt_path=latest_checkpoint('run/lightning'))\n"
    )
    program.resumes_without_a_warning("max_epochs=6", "max_epochs=4")


def test_a_checkpoint_becomes_a_file_for_load_from_checkpoint(
    ranks: Ranks, tmp_path: Path
) -> None:
    program = Program("lightning.md", tmp_path, ranks, "lightning")
    text = (ROOT / "docs/integrations/lightning.md").read_text(encoding="utf-8")
    (lines,) = (block for block in FENCE.findall(text) if "load_plain" in block)
    for old, new in CHANGES:  # a module that needs no mesh
        program.source = program.source.replace(old, new)
    program.source = program.source.replace(
        "        super().__init__()\n",
        "        super().__init__()\n        self.save_hyperparameters()\n",
    ).replace("def __init__(self):", "def __init__(self, width=3):")
    trained = program.source.replace("fit(Module()", "fit(module := Module(width=4)")
    program.source = trained + (
        "if trainer.global_rank == 0:\n"
        "    torch.save(module.state_dict(), 'trained.pt')\n"
    )
    program.run(2, "file")
    program.source = (
        f"{trained[: trained.index('data = torch')]}\n{lines}\n"
        "assert module.hparams.width == 4\n"
        "for name, value in torch.load('trained.pt').items():\n"
        "    assert torch.equal(module.state_dict()[name], value)\n"
        "print('step 1: 0', flush=True)\n"
    )
    program.run(1, "file")
