"""What tests of asynchronous saves share: a small state, a save under way, and a format that waits."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

import megackpt
from megackpt import (
    AsyncCallsQueue,
    AsyncRequest,
    ShardedObject,
    ShardedTensor,
)
from megackpt.backends.base import Source
from megackpt.backends.torch_dist import TorchDist
from megackpt.planning.manifest import SavePlan, WriteResult
from megackpt.storage import Storage
from megackpt.testing import ThreadedGroup

FORMATS = ("torch_dist", "zarr", "safetensors")
ROWS = 1024


class Gate(TorchDist):
    """A format whose ranks write when they are let, and fail where they are told to."""

    def __init__(self) -> None:
        super().__init__(files_per_rank=1)
        object.__setattr__(self, "_open", threading.Event())
        object.__setattr__(self, "_closed_to", set())
        object.__setattr__(self, "_failing", {})

    def write(self, root: Storage, plan: SavePlan, data: Source) -> WriteResult:
        if plan.rank in self._closed_to:
            self._open.wait(30)
        if plan.rank in self._failing:
            raise self._failing[plan.rank]
        return super().write(root, plan, data)


def state(rank: int, ranks: int, value: float) -> dict[str, Any]:
    return {
        "weight": ShardedTensor.from_rank_offsets(
            "weight", torch.full((ROWS, 8), value + rank), (0, rank, ranks)
        ),
        "strided": ShardedTensor.from_rank_offsets(
            "strided", torch.full((4, 6), value).t(), replica_id=rank
        ),
        "object": ShardedObject(
            "object", {"value": value, "rank": rank}, (ranks,), (rank,)
        ),
        "step": value,
    }


def change(held: dict[str, Any]) -> None:
    """What an optimizer's next step does."""
    for entry in held.values():
        if isinstance(entry, ShardedTensor):
            entry.data.fill_(-1)
    held["object"].data["value"] = -1
    held["step"] = -1


def check(directory: Path, ranks: int, value: float) -> None:
    """All that was saved with this value is there."""
    asked = {
        "weight": ShardedTensor.from_rank_offsets(
            "weight", torch.empty(ranks * ROWS, 8)
        ),
        "strided": ShardedTensor.from_rank_offsets("strided", torch.empty(6, 4)),
        "objects": [
            ShardedObject("object", None, (ranks,), (rank,)) for rank in range(ranks)
        ],
        "step": 0,
    }
    got = megackpt.load(asked, directory)
    expected = torch.arange(ranks).repeat_interleave(ROWS)[:, None] + torch.full(
        (1, 8), value
    )
    assert torch.equal(got["weight"], expected)
    assert torch.equal(got["strided"], torch.full((6, 4), value))
    assert got["objects"] == [{"value": value, "rank": rank} for rank in range(ranks)]
    assert got["step"] == value


def begun(
    group: ThreadedGroup, directory: Path, value: float = 1.0, strategy: Any = None
) -> AsyncRequest:
    """An asynchronous save under way, of tensors that have changed since."""
    held = state(group.rank, group.size, value)
    request = megackpt.save(
        held, directory, strategy, async_sharded_save=True, process_group=group
    )
    change(held)
    assert request is not None
    return request


def queue_of(group: ThreadedGroup, **options: Any) -> AsyncCallsQueue:
    return AsyncCallsQueue(process_group=group, **options)
