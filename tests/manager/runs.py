"""Small runs: a state, saving and restoring it, damaging its checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from megackpt import ShardedTensor
from megackpt.manager import (
    CheckpointManager,
)

TRACKER = "latest_checkpointed_iteration.txt"


def state(value: float, rank: int = 0, size: int = 1) -> dict[str, Any]:
    half = torch.full((8 // size,), float(value))
    return {
        "w": ShardedTensor.from_rank_offsets("w", half, (0, rank, size)),
        "value": value,
    }


def saved(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, state(step))


def restored(
    manager: CheckpointManager, **options: Any
) -> tuple[int, float, list[str]] | None:
    found = manager.restore(state(-1), **options)
    if found is None:
        return None
    assert found.state["w"].eq(found.state["value"]).all()
    return found.step, found.state["value"], [step.name for step in found.skipped]


def names(run: Path) -> list[str]:
    return sorted(os.listdir(run))


def stored(bucket: Any) -> list[str]:
    return list(bucket.keys())


def hurt(checkpoint: Path) -> None:
    """A byte of its largest file, in the middle."""
    data = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    octets = bytearray(data.read_bytes())
    at = octets.index(b"\x00\x00\x40\x40" * 8)  # 3.0
    octets[at] ^= 1
    data.write_bytes(octets)
