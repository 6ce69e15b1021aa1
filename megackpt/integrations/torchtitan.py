"""torchtitan: its checkpoint manager, with the engine of megackpt."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpointer import dcp

import megackpt
from megackpt.checkpoint import remove
from megackpt.dcp import install

__all__ = ["CheckpointManager"]

logger = logging.getLogger("megackpt.torchtitan")


class CheckpointManager(dcp.CheckpointManager):
    """torchtitan's manager. It is chosen by ``checkpoint`` of the trainer's configuration.

    Checkpoints have torchtitan's names and keys: each of the two loads those of the other.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(dcp.CheckpointManager.Config):
        """All fields of torchtitan's Config, with the same meaning."""

    def dcp_save(self, *args: Any, **options: Any) -> Any:
        with install():
            return super().dcp_save(*args, **options)

    def dcp_load(self, *args: Any, **options: Any) -> None:
        with install():
            super().dcp_load(*args, **options)

    def _find_load_step(self, folder: str = "") -> int:
        """The newest step that is complete and undamaged, on all ranks; -1: none."""
        step = self._manager(folder).latest()
        if step is None or step.step is None:
            return -1
        return step.step

    def _purge_stale_checkpoints(self) -> None:
        """Remove complete steps only: a save that is not complete yet replaces none."""
        if not self._should_purge():
            return
        manager = self._manager()
        complete = [step for step in manager.steps() if step.complete]
        for step in complete[: -self.keep_latest_k]:
            try:
                remove(f"{manager.root}/{step.name}")
            except megackpt.CheckpointingException as error:
                logger.warning("%s stays: %s", step.name, error)

    def _manager(self, folder: str = "") -> megackpt.CheckpointManager:
        return megackpt.CheckpointManager(folder or self.folder, naming="torchtitan")
