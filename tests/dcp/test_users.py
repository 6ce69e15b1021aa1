"""Models as people train them, saved and loaded with our reader and writer and with stock DCP's, crosswise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import megackpt
from megackpt.dcp import FileSystemReader, FileSystemWriter, LoadPlanner, SavePlanner

KINDS = ("fsdp2", "tensor", "hsdp", "ddp")


class Block(nn.Module):
    """Sizes that 4 ranks do not divide, a buffer, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12, bias=False)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 30, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.numel()
        hidden = self.embed(tokens)
        return self.head(self.norm(hidden + self.down(torch.relu(self.up(hidden)))))


def model_of(kind: str) -> nn.Module:
    """A model as this kind of training has it, over all ranks there are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.nn.parallel import DistributedDataParallel

    ranks = dist.get_world_size()
    model: nn.Module = Block()
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    elif kind == "hsdp":
        fully_shard(
            model,
            mesh=init_device_mesh(
                "cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard")
            ),
        )
    elif kind == "tensor":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    else:
        model = DistributedDataParallel(model)
    return model


class Training:
    """A model and its optimizer, at a state that ``seed`` tells."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = model_of(kind)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.1, foreach=False
        )
        for step in range(2):
            generator = torch.Generator().manual_seed(seed + step)
            tokens = torch.randint(0, 30, (2, 5), generator=generator)
            self.model(tokens).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def restore(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def whole(self) -> dict[str, Any]:
        """Everything, unsharded, on every rank."""
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        flat, _ = flatten_state_dict(self.state())
        return {
            k: v.full_tensor() if hasattr(v, "full_tensor") else v
            for k, v in flat.items()
        }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key].detach(), value.detach()), key
        else:
            assert found[key] == value, key


Save = Callable[[dict[str, Any], str], object]


def saves() -> dict[str, Save]:
    return {
        "ours": lambda state, where: dcp.save(
            state, storage_writer=FileSystemWriter(where), planner=SavePlanner()
        ),
        "stock": lambda state, where: dcp.save(
            state, storage_writer=dcp.FileSystemWriter(where)
        ),
        "our-writer": lambda state, where: dcp.save(
            state, storage_writer=FileSystemWriter(where)
        ),
        "our-planner": lambda state, where: dcp.save(
            state, checkpoint_id=where, planner=SavePlanner()
        ),
    }


def loads(state: dict[str, Any], where: str, library: str) -> None:
    if library == "stock":
        dcp.load(state, storage_reader=dcp.FileSystemReader(where))
    else:
        dcp.load(state, storage_reader=FileSystemReader(where), planner=LoadPlanner())


def save_all(folder: str) -> None:
    """On 4 ranks: each kind with each library, compared as a whole; then loaded with the other library."""
    for kind in KINDS:
        training = Training(kind, seed=1)
        expected = training.whole()
        if dist.get_rank() == 0:
            torch.save(expected, f"{folder}/{kind}.pt")
        for name, save in saves().items():
            save(training.state(), f"{folder}/{kind}-{name}")
        for name in saves():
            for library in ("ours", "stock"):
                if name != library:
                    other = Training(kind, seed=9)
                    state = other.state()
                    loads(state, f"{folder}/{kind}-{name}", library)
                    other.restore(state)
                    assert_same(other.whole(), expected)


def load_all(folder: str) -> None:
    """On 2 ranks: each kind as every kind, from checkpoints of 4 ranks."""
    for saved in KINDS:
        expected = torch.load(f"{folder}/{saved}.pt")
        for kind in KINDS:
            for name, library in (
                ("ours", "stock"),
                ("stock", "ours"),
                ("ours", "ours"),
            ):
                training = Training(kind, seed=9)
                state = training.state()
                loads(state, f"{folder}/{saved}-{name}", library)
                training.restore(state)
                assert_same(training.whole(), expected)


@pytest.mark.slow
def test_every_kind_of_model_goes_through_every_door_and_into_every_other_kind(
    ranks: Any, tmp_path: Path
) -> None:
    ranks(save_all, 4, tmp_path, timeout=240)
    ranks(load_all, 2, tmp_path, timeout=240)
    for kind in KINDS:
        expected = {
            k: v
            for k, v in torch.load(tmp_path / f"{kind}.pt").items()
            if isinstance(v, torch.Tensor)
        }
        report = megackpt.verify(tmp_path / f"{kind}-ours")
        assert report.ok
        assert_same(
            dict(megackpt.load_plain_tensors(tmp_path / f"{kind}-ours")), expected
        )
