"""The demo trainer: every parallelism computes the same and declares the same, and a loaded run goes on."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import megackpt
from megackpt.planning.save_plan import plan_save
from megackpt.state import ShardedTensor, declare, extract

TRAINER = Path(__file__).resolve().parents[2] / "tools" / "train_gpt.py"
SMALL = {
    "layers": 4,
    "width": 16,
    "heads": 4,
    "ffn": 8,
    "context": 12,
    "batch": 4,
    "microbatches": 2,
}
GRIDS = [
    (1, 1, 1),
    (2, 1, 2),
    (1, 2, 1),
    (4, 1, 1),
    (2, 2, 2),
    (1, 4, 1),
    (2, 3, 1),
]  # tp, pp, dp


def trainer_module() -> ModuleType:
    sys.path.insert(
        0, str(TRAINER.parent)
    )  # as Python does for a program, for what lies beside it
    spec = importlib.util.spec_from_file_location("train_gpt", TRAINER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)
    return module


train_gpt = trainer_module()


def new_trainer(grid: Any = None, seed: int = 7) -> Any:
    random.seed(seed)
    torch.manual_seed(seed)
    return train_gpt.Trainer(
        train_gpt.Config(**SMALL), grid or train_gpt.Grid(), lr=1e-3
    )


def place(rank: int, tp: int, pp: int, dp: int) -> Any:
    """A rank's place, without any process."""
    return train_gpt.Grid(
        **vars(train_gpt.ParallelLayout.of(rank, tp=tp, pp=pp, dp=dp)), rank=rank
    )


def pieces(trainer: Any) -> list[ShardedTensor]:
    return [
        shard
        for shard in extract(trainer.state()).shards
        if isinstance(shard, ShardedTensor)
    ]


def whole_tensors(trainer: Any) -> dict[str, torch.Tensor]:
    wholes: dict[str, torch.Tensor] = {}
    for piece in pieces(trainer):
        assert piece.data is not None
        whole = wholes.setdefault(piece.key, torch.full(piece.global_shape, torch.nan))
        whole[piece.global_slice()] = piece.data.detach()
    return wholes


def run_as_rank(rank: int, world: int, rendezvous: str) -> None:
    """Train one step at each parallelism that these ranks can form; compare with one process."""
    torch.set_num_threads(1)
    os.environ["WORLD_SIZE"] = str(world)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    alone = new_trainer()
    expected_loss = alone.train_step()
    expected = whole_tensors(alone)
    for tp, pp in ((2, 1), (2, 2), (1, 4), (4, 1), (1, 2)):
        trainer = new_trainer(train_gpt.join(tp, pp))
        loss = trainer.train_step()
        if trainer.grid.last:
            assert loss == pytest.approx(expected_loss, rel=1e-5)
        moments = [piece for piece in pieces(trainer) if "exp_avg" in piece.key]
        assert moments
        for piece in (
            moments
        ):  # after one step these are the gradients, but for constant factors
            whole = expected[piece.key][piece.global_slice()]
            torch.testing.assert_close(
                piece.data, whole, rtol=1e-3, atol=1e-7, msg=f"{piece.key} {tp} {pp}"
            )
    dist.destroy_process_group()


@pytest.mark.slow
def test_every_parallelism_computes_the_same(tmp_path: Path) -> None:
    mp.spawn(run_as_rank, args=(4, f"file://{tmp_path / 'rendezvous'}"), nprocs=4)


def test_first_values_do_not_depend_on_the_parallelism() -> None:
    expected = whole_tensors(new_trainer())
    for tp, pp, dp in GRIDS:
        for rank in range(tp * pp * dp):
            for piece in pieces(new_trainer(place(rank, tp, pp, dp))):
                assert piece.data is not None
                assert torch.equal(
                    piece.data.detach(), expected[piece.key][piece.global_slice()]
                ), piece.key


def test_every_parallelism_declares_the_same_whole() -> None:
    wholes = []
    for tp, pp, dp in GRIDS:
        states = [
            extract(new_trainer(place(rank, tp, pp, dp)).state())
            for rank in range(tp * pp * dp)
        ]
        parts = [
            declare(state.shards, rank=rank, common=rank == 0)
            for rank, state in enumerate(states)
        ]
        _, manifest = plan_save(
            parts
        )  # raises unless the main replicas tile every tensor exactly
        wholes.append({(entry.key, entry.meta) for entry in manifest.tensors})
    assert all(whole == wholes[0] for whole in wholes)
    shapes = {
        key: meta.shape for key, meta in wholes[0] if not key.startswith("optimizer.")
    }
    assert shapes["layers.fc1"] == (4, 16, 16)
    assert shapes["embedding"] == (256, 16)


def test_a_layout_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(SystemExit, match="cannot be cut"):
        new_trainer(place(0, 3, 1, 1))


@pytest.mark.parametrize("form", ["torch_dist", "zarr"])
def test_a_loaded_run_goes_on_exactly(tmp_path: Path, form: str) -> None:
    trainer = new_trainer()
    trainer.train_step()
    megackpt.save(trainer.state(), tmp_path / "checkpoint", form)
    expected = [trainer.train_step() for _ in range(2)]
    other = new_trainer(seed=8)
    other.restore(megackpt.load(other.state(), tmp_path / "checkpoint"))
    assert [other.train_step() for _ in range(2)] == expected
    assert other.step == trainer.step
    assert other.position == trainer.position
    assert other.scheduler.get_last_lr() == trainer.scheduler.get_last_lr()
    for key, whole in whole_tensors(trainer).items():
        assert torch.equal(whole_tensors(other)[key], whole), key
