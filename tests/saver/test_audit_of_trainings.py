"""The audit in real trainings: healthy runs raise no alarm, but for statistics of BatchNorm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import megackpt
from megackpt import Strategy
from megackpt.adapters.dtensor import sharded
from tests.audits import Audits
from tests.conftest import ROOT

TRAINER = ROOT / "tools" / "train_gpt.py"
LAYOUTS = ((2, 1), (1, 2), (4, 1), (2, 2), (1, 1))  # TP, PP; the rest is DP
MEGATRON = (
    ("gpt", (2, 1, 1), "fully_reshardable"),
    ("gpt", (1, 1, 1), "dp_reshardable"),
    ("tied", (1, 2, 1), "fully_reshardable"),
    ("tied", (2, 2, 1), "dp_reshardable"),
    ("experts", (1, 1, 2), "fully_reshardable"),
)
"""Model; TP, PP, EP on 4 ranks, the rest is DP; how the optimizer's state is declared."""
EXCLUDED = ("*running_mean", "*running_var")


def saved(
    folder: str, train: Callable[[], None], state: Callable[[], Any], **options: Any
) -> None:
    """Six steps, each of which is saved: every second one asynchronously."""
    strategy = Strategy(audit="full", on_mismatch="warn", **options)
    for number in range(6):
        train()
        request = megackpt.save(
            state(),
            folder,
            strategy,
            async_sharded_save=number % 2 == 1,
        )
        if request is not None:
            request.execute_sync()


def batches(seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(0, 30, (2, 5), generator=generator)


def fully_sharded(folder: str) -> None:
    """FSDP2, HSDP, and FSDP2 over tensor-parallel layers."""
    from tests.adapters.test_dtensor_training import Training

    audits = Audits.watched()
    for kind in ("fsdp", "hsdp", "tp"):
        training = Training(kind, seed=1)
        seed = dist.get_rank()
        if kind == "tp":
            seed //= 2  # ranks of one tensor-parallel group have the same data
        source = batches(seed)

        def train(training: Any = training, source: Any = source) -> None:
            training.model(next(source)).square().mean().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()

        def state(training: Any = training) -> Any:
            return sharded(training.state(), replicated="all")

        saved(f"{folder}/{kind}", train, state)
    audits.write(folder)


def in_megatron(folder: str) -> None:
    from interop.megatron_models import parallel
    from interop.megatron_steps import prepare, trainer
    from interop.megatron_training import trained_state

    prepare()
    audits = Audits.watched()
    for kind, layout, sharding in MEGATRON:
        with parallel(*layout):
            model, optimizer, train = trainer(kind)
            options = {"distrib_optim_sharding_type": sharding}

            def state(parts: Any = (model, optimizer), options: Any = options) -> Any:
                return trained_state(*parts, loading=False, **options)

            saved(f"{folder}/saved", train, state)
    audits.write(folder)


class Network(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.norm = layer(8)
        self.head = nn.Linear(8, 30)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens).flatten(0, 1)))


def data_parallel(folder: str, layer: str, options: dict[str, Any]) -> None:
    audits = Audits.watched()
    torch.manual_seed(0)
    network = Network(getattr(nn, layer))
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    source = batches(dist.get_rank())

    def train() -> None:
        model(next(source)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def state() -> Any:
        held = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
        return sharded(held, replicated="all")

    saved(f"{folder}/saved", train, state, **options)
    audits.write(folder)


def test_statistics_of_batch_norm_are_named(tmp_path: Path, ranks: Any) -> None:
    ranks(data_parallel, 2, tmp_path, "BatchNorm1d", {})
    found = Audits.read(tmp_path)
    assert found.compared == [23] * 6
    assert found.differing == ["model.norm.running_mean", "model.norm.running_var"]
    assert "2 hold running statistics of BatchNorm" in found.text
    assert f"audit_exclude={list(EXCLUDED)}" in found.text
    assert "'model.norm.running_var'" in found.text


def test_excluded_statistics_raise_no_alarm(tmp_path: Path, ranks: Any) -> None:
    ranks(data_parallel, 2, tmp_path, "BatchNorm1d", {"audit_exclude": EXCLUDED})
    found = Audits.read(tmp_path)
    assert found.compared == [21] * 6
    assert found.differing == []


@pytest.mark.campaign
def test_data_parallel_training(tmp_path: Path, ranks: Any) -> None:
    ranks(data_parallel, 4, tmp_path, "LayerNorm", {})
    Audits.read(tmp_path).check("DDP", saves=6)


@pytest.mark.campaign
def test_fully_sharded_trainings(tmp_path: Path, ranks: Any) -> None:
    ranks(fully_sharded, 4, tmp_path, timeout=300)
    Audits.read(tmp_path).check("FSDP2, HSDP, FSDP2 x TP", saves=18)


@pytest.mark.campaign
@pytest.mark.megatron
def test_megatrons_distributed_optimizer(
    tmp_path: Path, ranks: Any, peers: dict[str, str]
) -> None:
    ranks(in_megatron, 4, tmp_path, env=peers, timeout=400)
    Audits.read(tmp_path).check("Megatron-Core", saves=6 * len(MEGATRON))


@pytest.mark.campaign
def test_the_demo_trainer_at_several_parallelisms(tmp_path: Path, ranks: Any) -> None:
    """Each start resumes the run of the one before, and raises where replicas differ."""
    for number, (tp, pp) in enumerate(LAYOUTS, 1):
        steps = f"--steps={20 * number}"
        options = (steps, "--save-every=5", f"--tp={tp}", f"--pp={pp}", "--audit=full")
        ranks(TRAINER, 4, f"--dir={tmp_path}", *options, timeout=300)
    assert len(list(tmp_path.glob("iter_*"))) == 4 * len(LAYOUTS)
