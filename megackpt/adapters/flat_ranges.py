"""Flat ranges of parameters, as ZeRO-1 deals them out to data-parallel ranks, as boxes of the whole tensors.

A range of a tensor in C order is at most ``2 * ndim - 1`` boxes: part of a row, whole rows, part of a row. As boxes it
is free of parallelism: what another rank wants of it is an intersection, like everything else.
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

_MOST = 4096
"""Stretches of a parameter that a factory may make of it. Each is a shard at least; the planner has them all."""


def make_flat_range_shards(
    param: ShardedParam, data: torch.Tensor, flat_range: slice, prefix: str
) -> list[ShardedTensor]:
    """``data``, 1-dim, is elements ``flat_range`` of what belongs to ``param``: declared as ``{prefix}.{its key}``.

    The elements are those of the local parameter in C order. The shards' data are views of ``data``, which a load
    fills in place; an empty range has no shards. A parameter behind a factory is cut where the factory cuts it.

    Of the ranks that hold copies of the parameter each declares a range of its own, together all of it. So the last
    number of the replica id, the data-parallel one, becomes 0, whatever it is in ``param`` (an id that is an int is
    this number): each range is the main replica, unless the parameter is a copy for another reason.
    Raises ShardingError for a range outside the parameter, data of another shape, and factories that compute.
    """
    param = replace(param, key=f"{prefix}.{param.key}")
    check_flat_range(param, data, flat_range)
    return main_shards(param, data, flat_range)


def check_flat_range(
    param: ShardedParam, data: torch.Tensor | None, flat_range: slice
) -> None:
    """Raise ShardingError for a range outside the parameter, and for data that is not as long."""
    start, stop, size = flat_range.start, flat_range.stop, math.prod(param_shape(param))
    held = None if data is None else tuple(data.shape)
    if (
        None in (start, stop)
        or not 0 <= start <= stop <= size
        or held not in (None, (stop - start,))
    ):
        raise ShardingError(
            f"{param.key!r}: data of shape {held} is not elements {start}:{stop} of a parameter of shape "
            f"{param_shape(param)}; a flat range is slice(start, stop) within its {size} elements, and data is 1-dim"
        )


def flattened(
    param: ShardedParam,
    data: torch.Tensor | None,
    flat_range: slice,
    *,
    main: bool = False,
) -> ShardedTensorFactory:
    """The range as one leaf of a state dict: a load gives ``data`` back, filled.

    One of which nothing is stored is declared as empty boxes, so that a parameter of which nobody has an element is
    missed (but for one without dimensions, of which nothing is empty). With ``main`` no other data-parallel rank has
    a copy of the range, as in ``make_flat_range_shards``.
    """
    begins: list[int] = []
    cut = _main_parts if main else _parts

    def build(key: str, data: Any, replica_id: ReplicaId, _: slice | None) -> list[Any]:
        named = replace(param, key=key, replica_id=replica_id)
        parts = cut(named, data, flat_range)
        begins[:] = [begin for begin, _ in parts]
        return [shard for _, shard in parts] or [
            _nothing_of(piece, data) for piece in built(named)
        ]

    def merge(pieces: list[torch.Tensor]) -> Any:
        if not (data is None or data.is_meta) or not pieces or pieces[0] is data:
            return data
        length = flat_range.stop - flat_range.start
        whole = torch.zeros(length, dtype=pieces[0].dtype, device=pieces[0].device)
        for begin, piece in zip(begins, pieces, strict=False):
            whole[begin : begin + piece.numel()] = piece.reshape(-1)
        return whole

    return ShardedTensorFactory(param.key, data, build, merge, param.replica_id)


def known_by(param: ShardedParam, flat_range: slice) -> list[ShardedTensor]:
    """What a rank with this range knows the parameter by: its boxes, and all pieces, as replicas."""
    return main_shards(param, None, flat_range) + [
        replace(
            piece, replica_id=(*own[:-1], 1) if isinstance(own, (tuple, list)) else 1
        )
        for piece in built(param)
        for own in [piece.replica_id]
    ]


def _nothing_of(
    piece: ShardedTensor, data: torch.Tensor | None
) -> ShardedTensor | LocalNonpersistentObject:
    """An empty box of it. Without dimensions nothing is empty, and as a replica it could be asked to be written."""
    if not piece.local_shape:
        return LocalNonpersistentObject(data)
    box = Box(_cell(piece).offset, (0, *piece.local_shape[1:]))
    return _part(piece, box, None if data is None else data[:0])


def main_shards(
    param: ShardedParam, data: torch.Tensor | None, flat_range: slice
) -> list[ShardedTensor]:
    """The boxes that elements ``flat_range`` of ``param`` fill, views of ``data``; of data-parallel ranks this one
    alone has them, so each is the main replica among these."""
    return [shard for _, shard in _main_parts(param, data, flat_range)]


def _main_parts(
    param: ShardedParam, data: torch.Tensor | None, flat_range: slice
) -> list[tuple[int, ShardedTensor]]:
    parts = _parts(param, data, flat_range)
    # Of one without elements all ranks have the same.
    for _, shard in parts if math.prod(param_shape(param)) else ():
        copy = shard.replica_id
        shard.replica_id = (*copy[:-1], 0) if isinstance(copy, (tuple, list)) else 0
    return parts


def _parts(
    param: ShardedParam, data: torch.Tensor | None, flat_range: slice
) -> list[tuple[int, ShardedTensor]]:
    """(where it begins in the range, a box that is filled by it), under the parameter's key and replica id."""
    if not math.prod(
        param_shape(param)
    ):  # nobody has an element of it: it is declared as it stands
        return [(0, _part(piece, _cell(piece), data)) for piece in built(param)]
    parts = []
    for piece, at, first, length in _stretches(param):
        low, stop = max(flat_range.start, first), min(flat_range.stop, first + length)
        for box in _cell(piece).runs(at + low - first, at + stop - first):
            begin = low - flat_range.start
            parts.append(
                (
                    begin,
                    _part(
                        piece,
                        box,
                        None if data is None else data[begin : begin + box.volume],
                    ),
                )
            )
            low += box.volume
    return parts


def _cell(piece: ShardedTensor) -> Box:
    return Box(
        tuple(piece.global_offset)[piece.prepend_axis_num :], tuple(piece.local_shape)
    )


def _part(piece: ShardedTensor, box: Box, data: torch.Tensor | None) -> ShardedTensor:
    """The box, which does not count prepended axes, of a tensor."""
    return replace(
        piece,
        data=None if data is None else data.detach().view(box.shape),
        dtype=piece.dtype if data is None else data.dtype,
        local_shape=box.shape,
        global_offset=(
            *tuple(piece.global_offset)[: piece.prepend_axis_num],
            *box.offset,
        ),
        axis_fragmentations=None,
    )


def param_shape(param: ShardedParam) -> tuple[int, ...]:
    return tuple(
        param.local_shape if isinstance(param, ShardedTensor) else param.data.shape
    )


def built(param: ShardedParam) -> list[ShardedTensor]:
    """The parameter, or the tensors that its factory builds in the end."""
    todo, pieces = [param], list[ShardedTensor]()
    while todo:
        shard = todo.pop(0)
        if isinstance(shard, ShardedTensor):
            pieces.append(shard)
        else:
            leaves = tree.nested_values(shard.build())
            todo += [
                leaf
                for leaf in leaves
                if isinstance(leaf, (ShardedTensor, ShardedTensorFactory))
            ]
    return pieces


def _stretches(param: ShardedParam) -> Iterator[tuple[ShardedTensor, int, int, int]]:
    """(piece, first element in it, first element in the parameter, length): in C order in both."""
    if isinstance(param, ShardedTensor):
        yield param, 0, 0, math.prod(param.local_shape)
        return
    blank = torch.empty(param_shape(param), dtype=param.data.dtype, device="meta")
    pieces = built(replace(param, data=blank))
    views = [
        piece.data
        for piece in pieces
        if piece.data is not None and _is_view(piece.data, blank)
    ]
    if len(views) == len(
        pieces
    ):  # the common case, for which nothing has to be computed
        _refuse_many(
            param.key, sum(math.prod(view.shape[: _row(view)[0]]) for view in views)
        )
        found = [_of_view(view) for view in views]
    else:
        numbers = torch.arange(blank.numel(), device="cpu").view(blank.shape)
        found = _of_copies(param.key, built(replace(param, data=numbers)), numbers)
    _refuse_many(param.key, sum(len(starts) for starts, _ in found))
    for piece, (starts, lengths) in zip(pieces, found, strict=True):
        ends = np.cumsum(lengths)
        rows = zip(
            (ends - lengths).tolist(), starts.tolist(), lengths.tolist(), strict=True
        )
        yield from ((piece, at, first, length) for at, first, length in rows)


def _refuse_many(key: str, count: int) -> None:
    if count > _MOST:
        raise ShardingError(
            f"{key!r}: its factory makes {count} stretches of it, and a flat range of it would be as many shards; "
            f"{_MOST} are allowed. Let build_fn cut along the first axes"
        )


def _is_view(piece: torch.Tensor, of: torch.Tensor) -> bool:
    return (
        piece.dtype == of.dtype
        and piece.untyped_storage()._cdata == of.untyped_storage()._cdata
    )


def _row(view: torch.Tensor) -> tuple[int, int]:
    """The axes before those that are one stretch; and the length of that."""
    axes, length = view.dim(), 1
    while axes and (view.shape[axes - 1] == 1 or view.stride(axes - 1) == length):
        axes -= 1
        length *= view.shape[axes]
    return (axes, length) if view.numel() else (0, 0)


def _of_view(view: torch.Tensor) -> tuple[Int64, Int64]:
    """Where the stretches of a view begin in what it is a view of, in C order; and their lengths."""
    axes, length = _row(view)
    starts = np.array([view.storage_offset()])
    for axis in range(axes):
        starts = np.add.outer(
            starts, np.arange(view.shape[axis]) * view.stride(axis)
        ).ravel()
    return starts, np.full(len(starts), length)


def _of_copies(
    key: str, pieces: list[ShardedTensor], numbers: torch.Tensor
) -> list[tuple[Int64, Int64]]:
    """The same of pieces that are copies, told by the numbers of the elements that are in them."""
    held = [
        piece.data
        for piece in pieces
        if piece.data is not None and piece.data.dtype == numbers.dtype
    ]
    flat = [data.reshape(-1).numpy() for data in held]
    every = np.concatenate([np.zeros(0, np.int64), *flat])
    inside = len(held) == len(pieces) and bool(
        ((every >= 0) & (every < numbers.numel())).all()
    )
    if not inside or np.bincount(every).max(initial=0) > 1:
        raise ShardingError(
            f"{key!r}: its factory does not only take it apart (it casts, pads or computes), so nobody can tell where "
            "a flat range of it goes. Let build_fn cut and reshape only"
        )
    bounds = [np.flatnonzero(np.diff(row, prepend=-2, append=-2) != 1) for row in flat]
    return [(row[b[:-1]], np.diff(b)) for row, b in zip(flat, bounds, strict=True)]
