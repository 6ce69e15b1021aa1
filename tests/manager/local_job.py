"""A job that saves on its hosts: ranks as threads, and hosts as directories."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megackpt import CheckpointManager, LocalTier, ShardedObject, ShardedTensor
from megackpt.manager import Restored
from megackpt.testing import ThreadedGroup

RANKS = 4  # on two hosts


def state(group: ThreadedGroup, step: int) -> dict[str, Any]:
    """A sharded tensor, one that all ranks hold, an object of each rank, and common state."""
    rank, size = group.rank, group.size
    own = torch.arange(64.0) + 1000 * rank + step
    return {
        "w": ShardedTensor.from_rank_offsets("w", own, (0, rank, size)),
        "b": ShardedTensor.from_rank_offsets(
            "b", torch.full((5,), float(step)), replica_id=rank
        ),
        "rng": ShardedObject("rng", {"seed": rank + step}, (size,), (rank,)),
        "iteration": step,
    }


@dataclass
class Job:
    """A job whose hosts have a directory each; ``lost`` hosts come back empty."""

    folder: Path
    options: dict[str, Any]
    ranks: int = RANKS
    per_host: int = 2
    interval: int = 10

    def host(self, rank: int) -> str:
        return f"host{rank // self.per_host}"

    def tier(self, rank: int, **options: Any) -> LocalTier:
        place = self.folder / "hosts" / self.host(rank)
        options = {"every": 1} | self.options | options
        return LocalTier(place, host=self.host(rank), **options)

    def manager(self, group: ThreadedGroup, **options: Any) -> CheckpointManager:
        local = self.tier(group.rank)
        options = {"save_interval": self.interval, "process_group": group} | options
        return CheckpointManager(self.folder / "run", local=local, **options)

    def train(self, *steps: int, overwrite: bool = True, **options: Any) -> None:
        """Save these steps."""

        def rank(group: ThreadedGroup) -> None:
            with self.manager(group, **options) as manager:
                for step in steps:
                    if manager.should_save(step):
                        manager.save(step, state(group, step), overwrite=overwrite)

        ThreadedGroup.run(self.ranks, rank)

    def continue_from(self, step: int, *steps: int) -> None:
        """Restore this step and save these, in one job."""

        def rank(group: ThreadedGroup) -> None:
            with self.manager(group) as manager:
                found = manager.restore(state(group, -1), step=step)
                assert check(group, found) is not None
                for later in steps:
                    if manager.should_save(later):
                        manager.save(later, state(group, later))

        ThreadedGroup.run(self.ranks, rank)

    def restore(self, **options: Any) -> tuple[int, str] | None:
        """Restore on all ranks, and check each value. Returns the step, and where it was."""

        def rank(group: ThreadedGroup) -> tuple[int, str] | None:
            with self.manager(group) as manager:
                asked = state(group, -1)
                found = manager.restore(asked, **options)
            return check(group, found)

        (outcome,) = {*ThreadedGroup.run(self.ranks, rank)}
        return outcome

    def lose(self, host: int) -> None:
        shutil.rmtree(self.folder / "hosts" / f"host{host}")

    def pieces(self, host: int) -> list[str]:
        """The pieces on a host: step, and rank."""
        found = (self.folder / "hosts" / f"host{host}").glob("*/step_*/rank_*")
        return sorted(
            f"{p.parent.name.split('_')[1]}:{p.name.split('_')[1]}" for p in found
        )


def check(group: ThreadedGroup, found: Restored | None) -> tuple[int, str] | None:
    if found is None:
        return None
    right = state(group, found.step)
    for key in ("w", "b"):
        assert torch.equal(found.state[key], right[key].data), (group.rank, key)
    assert found.state["rng"] == right["rng"].data
    assert found.state["iteration"] == found.step
    return found.step, found.source
