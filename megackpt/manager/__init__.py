"""A run's checkpoints. ``finding`` lists them, ``choosing`` takes the latest good one; ``running`` saves, restores and,
by ``retention``, thins them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megackpt.manager.finding import (
    NAMINGS,
    TRACKERS,
    Naming,
    Run,
    Step,
    Tracker,
    list_run,
)

if TYPE_CHECKING:
    from megackpt.manager.running import CheckpointManager, Restored

__all__ = [
    "NAMINGS",
    "TRACKERS",
    "CheckpointManager",
    "Naming",
    "Restored",
    "Run",
    "Step",
    "Tracker",
    "list_run",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in ("CheckpointManager", "Restored"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from megackpt.manager import (
            running,
        )  # needs torch, which lists of steps do without

        return getattr(running, name)
