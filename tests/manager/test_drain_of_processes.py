"""Saves of real ranks that are drained by real agents, after all ranks have died."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megackpt import CheckpointManager, LocalTier
from megackpt.manager.local.drain import read_status
from tests.manager.test_drain_agent import is_running, wait_for
from tests.manager.test_local_tier_of_processes import RANKS, state


def manager(folder: str, **options: Any) -> CheckpointManager:
    host = f"host{dist.get_rank() * 2 // dist.get_world_size()}"
    local = LocalTier(f"{folder}/{host}", every=5, host=host, drain=True)
    return CheckpointManager(f"{folder}/run", local=local, save_interval=10, **options)


def train_and_die(folder: str) -> None:
    """Each state is changed as soon as ``save`` has returned; all ranks die at the end."""
    checkpoints = manager(folder, asynchronous=True)
    for step in range(1, 22):
        if checkpoints.should_save(step):
            now = state(step)
            checkpoints.save(step, now)
            now["w"].data.fill_(-1)
        checkpoints.poll()
    checkpoints.finalize()
    os.kill(os.getpid(), signal.SIGKILL)


def restore(folder: str) -> None:
    with CheckpointManager(f"{folder}/run") as plain:
        for step in (10, 20):
            found = plain.restore(state(-1), step=step)
            assert found is not None
            assert torch.equal(found.state["w"], state(step)["w"].data)
            assert found.state["iteration"] == step


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for location in tmp_path.glob("host*/*"):
        if is_running(str(location)):
            os.kill(read_status(str(location)).pid, signal.SIGTERM)


def test_all_ranks_die_after_their_saves(ranks: Any, folder: Path) -> None:
    ranks(train_and_die, RANKS, folder, check=False)
    wait_for((folder / "run/iter_0000010").exists)
    wait_for((folder / "run/iter_0000020").exists)
    for host in ("host0", "host1"):
        (location,) = (folder / host).iterdir()
        wait_for(
            lambda location=str(location): read_status(location).durable_step == 20
        )
    ranks(restore, RANKS, folder)


def train_beside_slow_agents(folder: str) -> None:
    """The trainer needs no answer of the storage, which takes some bytes a second."""
    host = f"host{dist.get_rank()}"
    rate = {"drain": True, "drain_bytes_per_second": 4096.0}
    local = LocalTier(f"{folder}/{host}", every=1, host=host, **rate)
    with CheckpointManager(f"{folder}/run", local=local, save_interval=1) as slow:
        for step in range(1, 9):
            slow.save(step, state(step, 1 << 12))
        assert slow.durable_step is None
        while not slow.drain_status.waiting:
            time.sleep(0.1)
        assert slow.drain_status.waiting[0] == 1
        assert slow.drain_status.lag_seconds > 0


def test_training_goes_on_beside_a_slow_storage(ranks: Any, folder: Path) -> None:
    ranks(train_beside_slow_agents, 2, folder)
    steps = {p.name.split("_")[1] for p in folder.glob("host0/*/step_*")}
    assert steps == {"1", "7", "8"}
