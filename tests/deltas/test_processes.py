"""Weights of FSDP2 and tensor parallelism from real processes, and processes that are killed while they publish."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import megackpt
from megackpt.deltas import WeightPublisher
from megackpt.deltas.chain import latest, path_of
from tests.bits import assert_same

ROOT = Path(__file__).resolve().parents[2]


def module() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(24, 30), torch.nn.GELU(), torch.nn.Linear(30, 7)
    )


def gathered(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for key, value in net.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found[key] = whole.detach().bfloat16()
    return found


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(step)
    net(torch.randn(8, 24)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def compare(directory: str, version: int, expected: dict[str, torch.Tensor]) -> None:
    found = {key: torch.zeros_like(value) for key, value in expected.items()}
    megackpt.load(megackpt.sharded(found), path_of(directory, version))
    for key, value in expected.items():
        assert_same(found[key], value, f"{key} of version {version}")


def publish_and_reshard(directory: str) -> None:
    """FSDP2 over tensor parallelism, then a trainer at another layout."""
    net = module()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(net, mesh["tp"], plan)
    fully_shard(net, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    with WeightPublisher(directory, dtype=torch.bfloat16) as publisher:
        for version in range(4):
            train(net, optimizer, version)
            expected = gathered(net)
            publisher.publish(version, net.state_dict(), asynchronous=version % 2 == 1)
            publisher.wait()
            compare(directory, version, expected)
    replicated = module()
    fully_shard(replicated)
    with torch.no_grad():
        for value in replicated.state_dict().values():
            value.add_(1e-3)
    with WeightPublisher(directory, dtype=torch.bfloat16) as publisher:
        publisher.publish(4, replicated.state_dict())
    compare(directory, 4, gathered(replicated))
    compare(directory, 3, expected)
    dist.barrier()


def test_fsdp2_over_tensor_parallelism(ranks: Any, tmp_path: Path) -> None:
    ranks(publish_and_reshard, 4, tmp_path, timeout=120)


def weights_of(version: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weights = {f"w{i}": torch.randn(300, 300) for i in range(4)}
    for before in range(version):
        for tensor in weights.values():
            tensor.view(-1)[before::97] += 1
    return weights


def run(url: str, first: int, last: int) -> None:
    with WeightPublisher(url, anchor_every=3) as publisher:
        for version in range(first, last):
            publisher.publish(version, weights_of(version), version % 2 == 1)


KILLED = """
import os, signal, sys, threading
from tests.deltas.test_processes import run
from megackpt.storage import kernel

url, numbers = sys.argv[1], [int(word) for word in sys.argv[2:]]

def counting(module, name, kill_at, calls):
    real = getattr(module, name)
    def call(*given, **named):
        calls.append(name)
        if len(calls) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given, **named)
    setattr(module, name, call)

for number in numbers:
    child = os.fork()
    if not child:
        calls = []
        for name in ("fsync", "rename", "link", "unlink", "mkdir", "rmdir", "writev", "pwritev"):
            counting(os, name, number, calls)
        counting(kernel, "_rename", number, calls)
        run(f"{url}/{number}", 0, 6)
        print(len(calls), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
"""A process that is killed before one of its calls that change files. Number 0: not killed."""


def kill(place: Path, *numbers: int) -> str:
    program = [sys.executable, "-c", KILLED, str(place), *map(str, numbers)]
    done = subprocess.run(program, check=True, capture_output=True, text=True, cwd=ROOT)
    return done.stdout


@pytest.mark.slow
def test_killed_before_changes_of_files(tmp_path: Path) -> None:
    """The versions before the kill are there, whole, and the next trainer goes on."""
    total = int(kill(tmp_path, 0))
    assert total > 60
    numbers = random.Random(7).sample(range(2, total), 8)
    kill(tmp_path, *numbers)
    reached = set()
    for number in numbers:
        place = str(tmp_path / str(number))
        found = latest(place)
        version = -1 if found is None else found.number
        reached.add(version)
        for each in range(version + 1):
            compare(place, each, weights_of(each))
        run(place, version + 1, version + 3)
        compare(place, version + 2, weights_of(version + 2))
    assert len(reached) > 2
