"""Flat ranges of parameters, which ZeRO-1 distributes over data-parallel ranks, as boxes.

A range of a tensor's elements in C order is at most ``2 * ndim - 1`` boxes: part of a row, whole
rows, part of a row. Boxes do not depend on parallelism, so they can be loaded by any ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megackpt import tree
from megackpt.errors import ShardingError
from megackpt.planning.box import Box, Int64
from megackpt.state import (
    LocalNonpersistentObject,
    ReplicaId,
    ShardedTensor,
    ShardedTensorFactory,
)

ShardedParam = ShardedTensor | ShardedTensorFactory

_MAX_STRETCHES = 4096
"""Contiguous stretches that a factory may cut a parameter into. Each is at least one shard."""


def make_flat_range_shards(
    param: ShardedParam,
    data: torch.Tensor,
    flat_range: slice,
    prefix: str,
) -> list[ShardedTensor]:
    """Declare ``data``, elements ``flat_range`` of a tensor like ``param``.

    The key is ``{prefix}.{key of param}``. ``data`` is 1-dim; it has elements of the local
    parameter in C order. The shards' data are views of ``data``, which a load fills in place. An
    empty range has no shards. A parameter behind a factory is cut where the factory cuts it.

    The data-parallel ranks that hold the parameter declare different ranges, together all of it. So
    the last number of the replica id, the data-parallel one, becomes 0: each range is the main
    replica, unless the parameter is a replica for another reason. An int id is the data-parallel
    number. Raises ShardingError for a range outside the parameter, data of another shape, and
    factories that compute.
    """
    param = replace(param, key=f"{prefix}.{param.key}")
    check_flat_range(param, data, flat_range)
    return [shard for _, shard in _parts(param, data, flat_range, main=True)]


def check_flat_range(
    param: ShardedParam,
    data: torch.Tensor | None,
    flat_range: slice,
) -> None:
    """Raise ShardingError for a range outside the parameter, or data of another length."""
    start = flat_range.start
    stop = flat_range.stop
    shape = param_shape(param)
    size = math.prod(shape)
    is_range = None not in (start, stop) and 0 <= start <= stop <= size
    data_shape = None
    if data is not None:
        data_shape = tuple(data.shape)
    if not is_range or data_shape not in (None, (stop - start,)):
        raise ShardingError(
            f"{param.key!r}: data of shape {data_shape} is not elements {start}:{stop} of a "
            f"parameter of shape {shape}; a flat range is slice(start, stop) within its {size} "
            "elements, and data is 1-dim"
        )


def declare_flat_range(
    param: ShardedParam,
    data: torch.Tensor | None,
    flat_range: slice,
    *,
    main: bool = False,
) -> ShardedTensorFactory:
    """The range as one leaf of a state dict. A load returns ``data``, filled.

    An empty range is declared as empty boxes, so that a save notices a parameter without elements
    on any rank (except one without dimensions, which has no empty boxes). ``main``: no other
    data-parallel rank has the range; see ``make_flat_range_shards``.
    """

    def build(key: str, data: Any, replica_id: ReplicaId, *_: Any) -> list[Any]:
        named = replace(param, key=key, replica_id=replica_id)
        parts = _parts(named, data, flat_range, main=main)
        if parts:
            return [shard for _, shard in parts]
        empty: list[Any] = []
        view = None
        if data is not None:
            view = data[:0]
        for piece in built_tensors(named):
            if piece.local_shape:
                box = Box(_local_box(piece).offset, (0, *piece.local_shape[1:]))
                empty.append(_part(piece, box, view))
            else:
                # It has no empty boxes, and a replica of it might be chosen to be written.
                empty.append(LocalNonpersistentObject(data))
        return empty

    def merge(pieces: list[torch.Tensor]) -> Any:
        has_memory = data is not None and not data.is_meta
        if has_memory or not pieces or pieces[0] is data:
            return data
        length = flat_range.stop - flat_range.start
        whole = torch.zeros(length, dtype=pieces[0].dtype, device=pieces[0].device)
        parts = _parts(param, None, flat_range)
        for (start, _), piece in zip(parts, pieces, strict=False):
            whole[start : start + piece.numel()] = piece.reshape(-1)
        return whole

    return ShardedTensorFactory(param.key, data, build, merge, param.replica_id)


def declare_whole_by_range(
    param: ShardedParam, flat_range: slice
) -> list[ShardedTensor]:
    """The parts of a parameter on a rank with this range: its boxes, and all pieces as replicas."""
    shards = [shard for _, shard in _parts(param, None, flat_range, main=True)]
    return shards + [
        replace(piece, replica_id=_with_last(piece.replica_id, 1))
        for piece in built_tensors(param)
    ]


def _with_last(replica_id: ReplicaId, last: int) -> ReplicaId:
    if isinstance(replica_id, (tuple, list)):
        return (*replica_id[:-1], last)
    return last


def _parts(
    param: ShardedParam,
    data: torch.Tensor | None,
    flat_range: slice,
    *,
    main: bool = False,
) -> list[tuple[int, ShardedTensor]]:
    """(start in the range, the box that it fills), under the parameter's key and replica id.

    ``main``: as the only data-parallel rank that has the range.
    """
    if not math.prod(param_shape(param)):  # all ranks have the same empty boxes
        return [
            (0, _part(piece, _local_box(piece), data)) for piece in built_tensors(param)
        ]
    parts = []
    for piece, in_piece, in_param, length in _stretches(param):
        low = max(flat_range.start, in_param)
        stop = min(flat_range.stop, in_param + length)
        shift = in_piece - in_param
        for box in _local_box(piece).runs(low + shift, stop + shift):
            start = low - flat_range.start
            view = None
            if data is not None:
                view = data[start : start + box.volume]
            shard = _part(piece, box, view)
            if main:
                shard.replica_id = _with_last(shard.replica_id, 0)
            parts.append((start, shard))
            low += box.volume
    return parts


def _local_box(piece: ShardedTensor) -> Box:
    """The piece's box, without prepended axes."""
    offset = tuple(piece.global_offset)[piece.prepend_axis_num :]
    return Box(offset, tuple(piece.local_shape))


def _part(
    piece: ShardedTensor,
    box: Box,
    data: torch.Tensor | None,
) -> ShardedTensor:
    prepended = tuple(piece.global_offset)[: piece.prepend_axis_num]
    return replace(
        piece,
        data=None if data is None else data.detach().view(box.shape),
        dtype=piece.dtype if data is None else data.dtype,
        local_shape=box.shape,
        global_offset=(*prepended, *box.offset),
        axis_fragmentations=None,
    )


def param_shape(param: ShardedParam) -> tuple[int, ...]:
    """The local shape."""
    if isinstance(param, ShardedTensor):
        return tuple(param.local_shape)
    return tuple(param.data.shape)


def built_tensors(param: ShardedParam) -> list[ShardedTensor]:
    """The parameter, or the tensors that its factory, and factories in it, build."""
    if isinstance(param, ShardedTensor):
        return [param]
    tensors = []
    for leaf in tree.nested_values(param.build()):
        if isinstance(leaf, (ShardedTensor, ShardedTensorFactory)):
            tensors += built_tensors(leaf)
    return tensors


def _stretches(param: ShardedParam) -> Iterator[tuple[ShardedTensor, int, int, int]]:
    """(piece, start in it, start in the parameter, length), contiguous in both."""
    if isinstance(param, ShardedTensor):
        yield param, 0, 0, math.prod(param.local_shape)
        return
    # The factory is a function: a call with a tensor without data shows its effect.
    blank = torch.empty(param_shape(param), dtype=param.data.dtype, device="meta")
    pieces = built_tensors(replace(param, data=blank))
    storage = blank.untyped_storage()._cdata
    views = []
    for piece in pieces:
        view = piece.data
        if view is None or view.dtype != blank.dtype:
            continue
        if view.untyped_storage()._cdata == storage:
            views.append(view)
    if len(views) == len(pieces):
        count = sum(math.prod(view.shape[: _trailing_row(view)[0]]) for view in views)
        _check_count(param.key, count)
        found = [_stretches_of_view(view) for view in views]
    else:
        # It copies: give it the numbers of the elements instead.
        numbers = torch.arange(blank.numel(), device="cpu").view(blank.shape)
        copies = built_tensors(replace(param, data=numbers))
        found = _stretches_of_copies(param.key, copies, numbers)
    _check_count(param.key, sum(len(starts) for starts, _ in found))
    for piece, (starts, lengths) in zip(pieces, found, strict=True):
        in_piece = 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            yield piece, in_piece, start, length
            in_piece += length


def _check_count(key: str, count: int) -> None:
    if count > _MAX_STRETCHES:
        raise ShardingError(
            f"{key!r}: its factory makes {count} stretches of it, and a flat range of it would be "
            f"as many shards; {_MAX_STRETCHES} are allowed. Let build_fn cut along the first axes"
        )


def _trailing_row(view: torch.Tensor) -> tuple[int, int]:
    """The number of axes before the contiguous trailing axes, and the length of the latter."""
    if not view.numel():
        return 0, 0
    axes = view.dim()
    length = 1
    while axes and (view.shape[axes - 1] == 1 or view.stride(axes - 1) == length):
        axes -= 1
        length *= view.shape[axes]
    return axes, length


def _stretches_of_view(view: torch.Tensor) -> tuple[Int64, Int64]:
    """Starts and lengths in the storage of a view's contiguous stretches, in the view's order."""
    axes, length = _trailing_row(view)
    starts = np.array([view.storage_offset()])
    for axis in range(axes):
        steps = np.arange(view.shape[axis]) * view.stride(axis)
        starts = np.add.outer(starts, steps).ravel()
    return starts, np.full(len(starts), length)


def _stretches_of_copies(
    key: str,
    pieces: list[ShardedTensor],
    numbers: torch.Tensor,
) -> list[tuple[Int64, Int64]]:
    """The same for pieces that are copies of ``numbers``: runs of consecutive values."""
    rows = [
        piece.data.reshape(-1).numpy()
        for piece in pieces
        if piece.data is not None and piece.data.dtype == numbers.dtype
    ]
    every = np.concatenate([np.zeros(0, np.int64), *rows])
    inside = bool(((every >= 0) & (every < numbers.numel())).all())
    complete = len(rows) == len(pieces)
    if not complete or not inside or np.bincount(every).max(initial=0) > 1:
        raise ShardingError(
            f"{key!r}: its factory does not only take it apart (it casts, pads or computes), so "
            "the place of a flat range is unknown. Let build_fn cut and reshape only"
        )
    result = []
    for row in rows:
        bounds = np.flatnonzero(np.diff(row, prepend=-2, append=-2) != 1)
        result.append((row[bounds[:-1]], np.diff(bounds)))
    return result
