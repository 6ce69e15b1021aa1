"""Tensors that say which shards they are, on their way through torch DCP: what torch loses of that is refused.

Torch 2.13 takes a tensor with ``global_shape`` and its like for a whole one. Staging for ``async_save`` makes new
tensors, and a process gets others again: what a tensor said of itself is not on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_write_items

from megackpt.errors import ShardingError
from megackpt.state.storable import (
    SHARD_FIELDS,
    SHARD_METHODS,
    distributed_name,
    has_shard_fields,
)

ChunkPlace = tuple[
    tuple[int, ...], ...
]  # offset and size of a chunk, and the global shape

_WAY = (
    f"the protocol is known from torch 2.15 on, where {', '.join(SHARD_FIELDS)} are all there. Or save it by "
    "megackpt.save(megackpt.sharded(state_dict), ...), which knows it with any torch"
)


def check_known(state_dict: Mapping[str, Any]) -> None:
    """Raise ShardingError for tensors that say that they are shards, and that this torch takes for whole ones."""
    for key, value in state_dict.items():
        if not isinstance(value, torch.Tensor) or not has_shard_fields(value):
            continue
        # Objects that name their chunks by methods do so in all versions, whatever fields they have.
        if not hasattr(value, SHARD_METHODS[0]) and _by_fields(value) != _places(
            _create_write_items(key, value)
        ):
            name = distributed_name(value)
            raise ShardingError(
                f"{key!r}: torch {torch.__version__} takes a {name} for a whole tensor: {_WAY}"
            )


def named_places(state_dict: Mapping[str, Any]) -> dict[str, list[ChunkPlace]]:
    """Of each value that names its own chunks: where these lie, under the key that torch's planners give it."""
    return {
        key: _places(_create_write_items(key, value))
        if _methods(value)
        else _by_fields(value)
        for key, value in flatten_state_dict(dict(state_dict))[0].items()
        if isinstance(value, torch.Tensor)
        and (_methods(value) or has_shard_fields(value))
    }


def keep_names(given: Any, staged: Any) -> None:
    """Let staged tensors say of themselves what those say that they are copies of."""
    if isinstance(given, Mapping) and isinstance(staged, Mapping):
        for key, value in given.items():
            keep_names(value, staged.get(key))
    elif isinstance(given, (list, tuple)) and isinstance(staged, (list, tuple)):
        for value, copy in zip(given, staged, strict=False):
            keep_names(value, copy)
    elif (
        isinstance(given, torch.Tensor)
        and isinstance(staged, torch.Tensor)
        and given is not staged
    ):
        source, target = (getattr(x, "_local_tensor", x) for x in (given, staged))
        for name in (
            *SHARD_FIELDS,
            *SHARD_METHODS[:2],
        ):  # the third gives memory, which is the caller's
            vars(target).pop(name, None)
            if name in vars(source):
                setattr(target, name, vars(source)[name])


def check_plan(named: Mapping[str, list[ChunkPlace]], plan: SavePlan) -> None:
    """Raise ShardingError where a plan of staged tensors is not what the tensors said that they were staged from."""
    for key, places in named.items():
        items = [item for item in plan.items if item.index.fqn == key]
        if items and sorted(_places(items)) != sorted(places):
            raise ShardingError(
                f"{key!r}: the tensor says which shard it is, and what async_save has staged of it does not (a process "
                f"gets bare tensors): {_WAY}"
            )


def _methods(value: Any) -> bool:
    """Does it name its chunks by methods: itself, or the local tensor of a DTensor?"""
    return hasattr(getattr(value, "_local_tensor", value), SHARD_METHODS[0])


def _by_fields(tensor: Any) -> list[ChunkPlace]:
    whole = tuple(getattr(tensor, SHARD_FIELDS[0], ()))
    offsets, sizes = (
        getattr(tensor, SHARD_FIELDS[1], ()),
        getattr(tensor, SHARD_FIELDS[3], ()),
    )
    return [
        (tuple(offset), tuple(size), whole)
        for offset, size in zip(offsets, sizes, strict=False)
    ]


def _places(items: Iterable[WriteItem]) -> list[ChunkPlace]:
    found = [item.tensor_data for item in items]
    return [
        (tuple(d.chunk.offsets), tuple(d.chunk.sizes), tuple(d.size))
        for d in found
        if d is not None
    ]
