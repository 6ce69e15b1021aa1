"""The checkpoints of a run: which steps exist, the latest good one, retention, restore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megackpt.checkpoint.run_directory import (
    NAMINGS,
    TRACKERS,
    Naming,
    Restored,
    Run,
    SaveStatus,
    Step,
    Tracker,
    list_run,
)

if TYPE_CHECKING:
    from megackpt.manager.checkpoint_manager import CheckpointManager

__all__ = [
    "NAMINGS",
    "TRACKERS",
    "CheckpointManager",
    "Naming",
    "Restored",
    "Run",
    "SaveStatus",
    "Step",
    "Tracker",
    "list_run",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name != "CheckpointManager":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Imports torch, which listing steps does without.
        from megackpt.manager.checkpoint_manager import CheckpointManager

        return CheckpointManager
