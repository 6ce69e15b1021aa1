"""Checkpoints on the hosts: real ranks, which send copies while training continues."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megackpt import CheckpointManager, LocalTier, ShardedTensor

RANKS = 4


def state(step: int, size: int = 1 << 18) -> dict[str, Any]:
    rank = dist.get_rank()
    own = torch.arange(float(size)) + 1000 * rank + step
    shard = ShardedTensor.from_rank_offsets("w", own, (0, rank, dist.get_world_size()))
    return {"w": shard, "iteration": step}


def manager(folder: str, **options: Any) -> CheckpointManager:
    host = f"host{dist.get_rank() * 2 // dist.get_world_size()}"
    local = LocalTier(f"{folder}/{host}", every=1, host=host)
    return CheckpointManager(f"{folder}/run", local=local, save_interval=10, **options)


def train(folder: str) -> None:
    """Each state is changed as soon as ``save`` has returned."""
    with manager(folder, asynchronous=True) as checkpoints:
        for step in range(10, 15):
            if checkpoints.should_save(step):
                now = state(step)
                checkpoints.save(step, now)
                now["w"].data.fill_(-1)
            checkpoints.poll()
            time.sleep(0.05)


def restore(folder: str, lowest: int) -> None:
    with manager(folder) as checkpoints:
        asked = state(-1)
        found = checkpoints.restore(asked)
        assert found is not None
        assert found.source == "local"
        assert found.step >= lowest
        assert torch.equal(found.state["w"], state(found.step)["w"].data)
        assert found.state["iteration"] == found.step


def end_early(folder: str) -> None:
    """Rank 2 is killed right after the save of step 13 has begun on all ranks."""
    checkpoints = manager(folder, asynchronous=True)
    for step in range(10, 14):
        checkpoints.should_save(step)
        checkpoints.save(step, state(step))
        if step < 13:
            checkpoints.finalize()
    if dist.get_rank() == 2:
        os._exit(9)
    time.sleep(1.0)
    os._exit(9)


def test_copies_are_sent_while_training_continues(ranks: Any, tmp_path: Path) -> None:
    ranks(train, RANKS, tmp_path)
    steps = {
        p.parent.name.split("_")[1] for p in tmp_path.glob("host0/*/step_*/rank_*")
    }
    assert steps == {"13", "14"}
    assert len(list(tmp_path.glob("host1/*/step_14_*/rank_*"))) == RANKS
    shutil.rmtree(tmp_path / "host1")
    ranks(restore, RANKS, tmp_path, 14)


def test_a_rank_that_ends_during_a_save(ranks: Any, tmp_path: Path) -> None:
    """The step before that is whole on all hosts; step 13 may be."""
    ranks(end_early, RANKS, tmp_path, check=False)
    shutil.rmtree(tmp_path / "host1")
    ranks(restore, RANKS, tmp_path, 12)


def make_managers(folder: str) -> None:
    """One after the other. Each sends copies over connections of its own."""
    opened = []
    for step in range(11, 15):
        with manager(folder, asynchronous=True) as checkpoints:
            assert checkpoints.should_save(step)
            checkpoints.save(step, state(step, 8))
        opened.append(len(os.listdir("/proc/self/fd")))
    assert opened[-1] == opened[0]


def test_connections_for_copies_are_used_again(ranks: Any, tmp_path: Path) -> None:
    ranks(make_managers, 2, tmp_path)
