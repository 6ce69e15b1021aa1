"""torchtitan: its checkpoint manager, with the engine of megackpt."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpointer import dcp

import megackpt
from megackpt.dcp import install

__all__ = ["CheckpointManager"]


class CheckpointManager(dcp.CheckpointManager):
    """torchtitan's manager. It is chosen by ``checkpoint`` of the trainer's configuration.

    Checkpoints have torchtitan's names and keys: either manager loads the checkpoints of both.
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
        step = self._manager(folder).latest(own=True)
        if step is None or step.step is None:
            return -1
        return step.step

    def _purge_stale_checkpoints(self) -> None:
        """Only good steps count, so a save that is not complete yet replaces none."""
        if self._should_purge():
            self._manager().prune(sys.maxsize)

    def _manager(self, folder: str = "") -> megackpt.CheckpointManager:
        return megackpt.CheckpointManager(
            folder or self.folder,
            naming="torchtitan",
            keep_last=self.keep_latest_k or None,
        )
