"""Whose memory a planner resolves an item to: the state dict's own, or what it fills anew for the next item."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import (
    LoadPlanner as AnyLoadPlanner,
    SavePlanner,
    WriteItem,
)

from megackpt.dcp.planner import LoadPlanner
from megackpt.loader.comparison import overlapping

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types whose memory is their elements."""

Resolved = torch.Tensor | io.BytesIO

_RESOLVING = "resolve_tensor", "lookup_tensor", "transform_tensor"
_KNOWN = {
    getattr(kind, name)
    for kind in (DefaultLoadPlanner, LoadPlanner)
    for name in _RESOLVING
}


class Lasting:
    """A planner of which one item is asked while others are still being written: what it gives stays as it is."""

    def __init__(self, planner: SavePlanner) -> None:
        self._planner = planner
        state = getattr(planner, "state_dict", None)
        self._state: dict[str, Any] = state if isinstance(state, dict) else {}

    def resolve_data(self, item: WriteItem) -> Resolved:
        data: Resolved = self._planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            return copied(data)
        # What is no plain tensor is pickled at once.
        return (
            copied(data)
            if _is_plain(data) and not self._is_states(data, item.index.fqn)
            else data
        )

    def _is_states(self, data: torch.Tensor, key: str) -> bool:
        own = [
            piece.untyped_storage().data_ptr()
            for piece in _pieces(self._state.get(key))
        ]
        return data.untyped_storage().data_ptr() in own


def copied(data: Resolved) -> Resolved:
    """On the host, in memory that nobody else has. (Streams share theirs until one of the two is written to.)"""
    if isinstance(data, io.BytesIO):
        return io.BytesIO(data.getvalue())
    copy: Resolved = (
        data.detach().to("cpu", copy=True) if hasattr(data, "detach") else data
    )
    return (
        copy  # (of a planner's mistake, which is told where it is to be written, none)
    )


def own_keys(planner: AnyLoadPlanner) -> set[str]:
    """The keys whose items may be filled all at once and in pieces: each has memory of its own, the state dict's."""
    state = getattr(planner, "state_dict", None)
    known = all(getattr(type(planner), name, None) in _KNOWN for name in _RESOLVING)
    if not known or not isinstance(state, dict):
        return set()
    pieces = [(key, piece) for key, value in state.items() for piece in _pieces(value)]
    shared = {
        pieces[row][0] for row in overlapping([piece for _, piece in pieces]).tolist()
    }
    return {key for key, _ in pieces} - shared


def _pieces(value: object) -> list[torch.Tensor]:
    """The plain tensors that a value of a state dict has on this rank."""
    if not isinstance(value, torch.Tensor):
        return []
    sharded: Any = value  # perhaps a ShardedTensor, or a DTensor
    if hasattr(sharded, "local_shards"):
        return [shard.tensor for shard in sharded.local_shards()]
    found: torch.Tensor = sharded.to_local() if hasattr(sharded, "to_local") else value
    return [found] if _is_plain(found) else []


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN and tensor.layout is torch.strided
