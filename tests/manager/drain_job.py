"""A job whose local saves are drained: agents are called as functions, one for each host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megackpt import CheckpointManager
from megackpt.checkpoint import open_checkpoint
from megackpt.manager.local import checkpoints, saves
from megackpt.manager.local.drain import HostDrain
from megackpt.testing import ThreadedGroup
from tests.manager.local_job import Job, check, state


def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents run when a test calls them."""
    for module in (checkpoints, saves):
        monkeypatch.setattr(module, "ensure_agent", lambda _: None)


class DrainJob(Job):
    """Two ranks on two hosts, or as given."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, {"drain": True, **options}, 2, 1)

    def agent(self, host: int) -> HostDrain:
        (location,) = (self.folder / "hosts" / f"host{host}").iterdir()
        return HostDrain(str(location))

    def drain(self, *hosts: int) -> list[HostDrain]:
        """Let the agents of these hosts work by turns until all say that nothing is left."""
        agents = [self.agent(host) for host in hosts]
        for _ in range(20):
            waiting = [agent.work() for agent in agents]
            if not any(waiting):
                break
        return agents

    def durable(self) -> list[int]:
        """The complete steps in the storage."""
        steps = CheckpointManager(self.folder / "run").steps()
        return [step.step for step in steps if step.complete]

    def check_storage(self, step: int) -> None:
        """The step in the storage has the values that were saved, on all ranks."""

        def rank(group: ThreadedGroup) -> None:
            with CheckpointManager(self.folder / "run", process_group=group) as manager:
                found = manager.restore(state(group, -1), step=step)
            assert check(group, found) == (step, "storage")

        ThreadedGroup.run(self.ranks, rank)


def files(where: Path) -> dict[str, bytes]:
    """The files of a checkpoint, without the id of its save.

    Without its index, which has the time that the save took.
    """
    save_id = open_checkpoint(where).manifest.save_id.encode()
    found = {path.name: path.read_bytes() for path in where.iterdir()}
    del found["megackpt.index"]
    return {name: data.replace(save_id, b"") for name, data in found.items()}
