"""Tensors that name their shards, in a save through torch DCP.

Torch below 2.15 takes a tensor with ``global_shape`` and its like for a whole one. ``async_save``
stages tensors into new ones, which lack these fields; a process receives bare tensors again.
The functions here refuse shards that would be stored as whole tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner_helpers import _create_write_items

from megackpt.adapters.checkpointable import (
    ChunkShape,
    chunks_of_items,
    pieces_by_fields,
)
from megackpt.errors import ShardingError
from megackpt.state.storable import (
    SHARD_FIELDS,
    SHARD_METHODS,
    distributed_name,
    shard_fields,
)

_ADVICE = (
    f"torch knows the protocol from 2.15 on, if all of {', '.join(SHARD_FIELDS)} are set. "
    "megackpt.save(megackpt.sharded(state_dict), ...) knows it with any torch"
)


def check_known(state_dict: Mapping[str, Any]) -> None:
    """Raise ShardingError for shards that the installed torch takes for whole tensors."""
    for key, value in state_dict.items():
        if not shard_fields(value):
            continue
        if hasattr(value, SHARD_METHODS[0]):
            continue  # All releases of torch call the methods, whatever fields there are.
        if _from_fields(key, value) != chunks_of_items(_create_write_items(key, value)):
            raise ShardingError(
                f"{key!r}: torch {torch.__version__} takes a {distributed_name(value)} for a "
                f"whole tensor: {_ADVICE}"
            )


def named_chunks(state_dict: Mapping[str, Any]) -> dict[str, list[ChunkShape]]:
    """The chunks of each value that names chunks, by the key that torch's planners give it."""
    chunks = {}
    for key, value in flatten_state_dict(dict(state_dict))[0].items():
        if not isinstance(value, torch.Tensor):
            continue
        if hasattr(getattr(value, "_local_tensor", value), SHARD_METHODS[0]):
            chunks[key] = chunks_of_items(_create_write_items(key, value))
        elif shard_fields(value):
            chunks[key] = _from_fields(key, value)
    return chunks


def copy_fields(source: Any, staged: Any) -> None:
    """Set the shard fields and methods of staged tensors as on the tensors they are copies of."""
    if isinstance(source, Mapping) and isinstance(staged, Mapping):
        for key, value in source.items():
            copy_fields(value, staged.get(key))
    elif isinstance(source, (list, tuple)) and isinstance(staged, (list, tuple)):
        for value, copy in zip(source, staged, strict=False):
            copy_fields(value, copy)
    elif isinstance(source, torch.Tensor) and isinstance(staged, torch.Tensor):
        if source is staged:
            return
        given = vars(getattr(source, "_local_tensor", source))
        copied = vars(getattr(staged, "_local_tensor", staged))
        # Not the third method: it returns the memory of the source.
        for name in (*SHARD_FIELDS, *SHARD_METHODS[:2]):
            copied.pop(name, None)
            if name in given:
                copied[name] = given[name]


def check_plan(chunks: Mapping[str, list[ChunkShape]], plan: SavePlan) -> None:
    """Raise ShardingError where a plan of staged tensors lacks the chunks of the originals."""
    for key, expected in chunks.items():
        items = [item for item in plan.items if item.index.fqn == key]
        if items and sorted(chunks_of_items(items)) != sorted(expected):
            raise ShardingError(
                f"{key!r}: the tensor names its shard, and the copy that async_save staged of it "
                f"does not (a process receives bare tensors): {_ADVICE}"
            )


def _from_fields(key: str, tensor: torch.Tensor) -> list[ChunkShape]:
    shape, pieces = pieces_by_fields(key, tensor)
    return [(offset, size, shape) for offset, _, size in pieces]
