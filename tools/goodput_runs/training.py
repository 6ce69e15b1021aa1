"""The training: the GPT of train_gpt.py under FSDP2, whose losses depend on the seed alone."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_gpt import Config, Grid, Stage, batch_of, read_text

from goodput_runs.contestants import CONTESTANTS, Run
from goodput_runs.schedule import RANKS_PER_HOST

CONFIG = Config(
    layers=2, width=64, heads=4, ffn=176, context=64, batch=16, microbatches=1
)
GROUP_TIMEOUT = timedelta(seconds=60)
"""After which a collective of the trainer that waits for another rank fails."""
text = cache(read_text)


@dataclass(frozen=True)
class Order:
    """What a rank is told: which library saves, where, until which step."""

    contestant: str
    storage: str
    memory: str
    steps: int
    seed: int


def train(rank: int, order: Order, tell: Callable[..., None]) -> None:
    """One life of a rank, from the newest checkpoint to the end of the run."""
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    ranks = dist.get_world_size()
    torch.manual_seed(order.seed)
    model = Stage(CONFIG, Grid())
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = Run(model, optimizer, Path(order.storage), Path(order.memory), RANKS_PER_HOST)
    began = time.monotonic()
    contestant = CONTESTANTS[order.contestant](run)
    step = contestant.restore()
    tell(restored=step, seconds=time.monotonic() - began)
    while step < order.steps:
        step += 1
        began = time.monotonic()
        loss = train_step(model, optimizer, order.seed, step)
        if rank == 0:
            tell(step=step, loss=loss, seconds=time.monotonic() - began)
        contestant.after_step(step)
    contestant.close()
    dist.destroy_process_group()


def train_step(
    model: Stage, optimizer: torch.optim.Optimizer, seed: int, step: int
) -> float:
    """One step on the batch that belongs to it. Returns the mean loss of all ranks."""
    random.seed(seed * 1_000_003 + step)
    batch = batch_of(text(), step * CONFIG.batch, CONFIG)
    loss: Any = model(batch.chunk(dist.get_world_size())[dist.get_rank()])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def environment(rank: int, ranks: int, address: str, port: int) -> None:
    """What torchrun would set for this rank."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
