"""Declarations of all ranks -> one SavePlan per rank, and the Manifest of what will be stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megackpt.errors import BackendError
from megackpt.planning.box import Box, Boxes, Int64, regular_grids, runs
from megackpt.planning.coverage import check, shapes_table
from megackpt.planning.dedup import assign
from megackpt.planning.manifest import (
    DIGEST_SIZE,
    Bool,
    Chunks,
    Declarations,
    Int32,
    Manifest,
    SavePlan,
)

Grid = tuple[int, ...] | None
_TOLD = 8  # tensors and boxes named in an error
_UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """How a save is planned.

    ``balance``: spread the writing over the holders of each shard, by bytes; otherwise main replicas write.
    ``gridded``: the format stores whole cells of a regular grid, chosen here for each tensor.
    ``max_item_bytes``: cut tensors' items into pieces no larger than this (one element at the least).
    """

    balance: bool = True
    gridded: bool = False
    max_item_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.max_item_bytes is not None and self.max_item_bytes < 1:
            raise ValueError(f"max_item_bytes must be positive, not {self.max_item_bytes}")


@dataclass(frozen=True, slots=True, eq=False)
class _Items:
    """What will be written: the declared row that holds each piece, and the piece."""

    row: Int64
    boxes: Boxes

    def take(self, rows: Int64) -> _Items:
        return _Items(self.row[rows], self.boxes.take(rows))


def plan_save(
    parts: Sequence[Declarations], policy: SavePolicy | None = None, validate: bool = True
) -> tuple[list[SavePlan], Manifest]:
    """Who writes what, and what the checkpoint will hold; ``parts[i]`` are the declarations of rank i.

    Each distinct shard that has a main replica is written once. Empty shards of tensors with elements are
    not written; a tensor without elements keeps one empty chunk. Within a rank objects come first, then
    tensors by decreasing bytes. The manifest's chunks stand in plan order (rank 0's rows, rank 1's, ...), not
    yet located: file -1, lengths as the raw bytes will be (0 for objects).

    Raises CoverageError where the declarations are not an exact tiling; without ``validate`` only where a key
    would be lost or ambiguous. Raises BackendError where a gridded format meets shards that form no grid.
    """
    policy = SavePolicy() if policy is None else policy
    declared = Declarations.merge(parts)
    shards = declared.shards()
    check(declared, shards, thorough=validate)
    rows = _without_empty(declared, assign(declared, policy.balance, shards))
    items = _Items(rows, declared.boxes.take(rows))
    grids: list[Grid] = [None] * len(declared.tensors)
    pieces = None
    if policy.max_item_bytes is not None:
        pieces = _piece_shapes(declared, items, policy.max_item_bytes)
    if policy.gridded:
        grids, pieces = _grids(declared, items, policy.max_item_bytes)
    if pieces is not None:
        items = _cut(items, pieces)
    part = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
    items = items.take(_plan_order(declared, items, part[items.row]))
    return _plans(parts, declared, items, grids), _manifest(declared, items, part[items.row], grids)


def regular_grid(shape: Sequence[int], boxes: Iterable[Box]) -> tuple[int, ...] | None:
    """The cell of the regular grid over a tensor of this global shape whose cells the boxes are, or None."""
    column = Boxes.of(boxes, len(shape))
    solid = Boxes(column.offset, np.maximum(1, column.shape))
    whole = np.maximum(1, np.array([shape], np.int64).reshape(1, len(shape)))
    if not len(solid) or column.width > len(shape):
        return None
    cells, regular = regular_grids(solid, np.array([0, len(solid)]), whole)
    return tuple(cells[0].tolist()) if regular[0] else None


def _without_empty(declared: Declarations, rows: Int64) -> Int64:
    """The rows without empty shards, but for one of each tensor that has no elements at all."""
    empty = np.flatnonzero(declared.boxes.volume[rows] == 0)
    if not len(empty):
        return rows
    tensor = declared.tensor[rows[empty]]
    hollow = np.array([0 in declared.tensors[n].meta.shape for n in tensor], np.bool_)
    kept = np.zeros(len(empty), np.bool_)
    kept[np.unique(tensor, return_index=True)[1]] = True
    keep = np.ones(len(rows), np.bool_)
    keep[empty] = hollow & kept
    return rows[keep]


def _plan_order(declared: Declarations, items: _Items, part: Int64) -> Int64:
    """By rank; within a rank objects first, then by decreasing bytes, then as declared."""
    is_object = _is_object(declared)[declared.tensor[items.row]]
    weight = np.where(is_object, _UNBOUNDED, _raw_bytes(declared, items))
    return np.lexsort([-weight, part]).astype(np.int64)


def _plans(
    parts: Sequence[Declarations], declared: Declarations, items: _Items, grids: Sequence[Grid]
) -> list[SavePlan]:
    """The plans speak in each rank's own table of tensors and its own rows."""
    first = np.cumsum([0, *map(len, parts)])
    part = np.searchsorted(first, items.row, side="right") - 1
    bounds = np.searchsorted(part, np.arange(len(parts) + 1)).tolist()
    tensor = np.concatenate([p.tensor for p in parts])[items.row] if parts else items.row.astype(np.int32)
    source = (items.row - first[part]).astype(np.int32)
    chosen = {e: g for e, g in zip(declared.tensors, grids, strict=True) if g is not None}
    plans = []
    for rank, own in enumerate(parts):
        mine = slice(bounds[rank], bounds[rank + 1])
        cells = tuple(map(chosen.get, own.tensors)) if chosen else (None,) * len(own.tensors)
        plans.append(SavePlan(rank, own.tensors, cells, tensor[mine], items.boxes.take(mine), source[mine]))
    return plans


def _manifest(declared: Declarations, items: _Items, part: Int64, grids: Sequence[Grid]) -> Manifest:
    count = len(items.row)
    chunks = Chunks(
        declared.tensor[items.row],
        items.boxes,
        part.astype(np.int32),
        np.full(count, -1, np.int32),
        np.zeros(count, np.int64),
        _raw_bytes(declared, items),
        np.zeros((0, DIGEST_SIZE), np.uint8),
    )
    return Manifest(declared.tensors, tuple(grids), chunks)


def _raw_bytes(declared: Declarations, items: _Items) -> Int64:
    itemsize = np.array([entry.meta.itemsize for entry in declared.tensors], np.int64)
    return items.boxes.volume * itemsize[declared.tensor[items.row]]


def _is_object(declared: Declarations) -> Bool:
    return np.array([entry.meta.is_object for entry in declared.tensors], np.bool_)


def _piece_shapes(declared: Declarations, items: _Items, limit: int) -> Int64:
    """For each item the shape of the pieces, cut along the leading axes, that stay within the limit."""
    itemsize = np.array([entry.meta.itemsize for entry in declared.tensors], np.int64)
    budget = np.maximum(1, limit // np.maximum(1, itemsize))[declared.tensor[items.row]]
    budget[_is_object(declared)[declared.tensor[items.row]]] = _UNBOUNDED
    return _within(items.boxes.shape, budget)


def _within(shape: Int64, budget: Int64) -> Int64:
    """The largest leading-axis pieces of boxes of these shapes that hold at most ``budget`` elements."""
    pieces = np.empty_like(shape)
    for axis in reversed(range(shape.shape[1])):
        extent = np.maximum(1, shape[:, axis])
        pieces[:, axis] = np.minimum(extent, budget)
        budget = np.where(extent <= budget, budget // extent, 1)
    return pieces


def _cut(items: _Items, pieces: Int64) -> _Items:
    """Each item as its pieces, in C order."""
    counts = np.maximum(1, -(-items.boxes.shape // pieces))
    totals = np.prod(counts, axis=1, dtype=np.int64)
    item = np.repeat(np.arange(len(totals)), totals)
    place = np.arange(len(item)) - np.repeat(np.cumsum(totals) - totals, totals)
    offset, shape = items.boxes.offset[item], items.boxes.shape[item]
    for axis in reversed(range(offset.shape[1])):
        place, within = np.divmod(place, counts[item, axis])
        skipped = within * pieces[item, axis]
        offset[:, axis] += skipped
        shape[:, axis] = np.minimum(pieces[item, axis], shape[:, axis] - skipped)
    return _Items(items.row[item], Boxes(offset, shape))


def _grids(declared: Declarations, items: _Items, limit: int | None) -> tuple[list[Grid], Int64 | None]:
    """A grid for each tensor (None for objects), and the shape of the items' pieces where they are cut."""
    tensor = declared.tensor[items.row]
    order = np.argsort(tensor, kind="stable")
    bounds = runs(tensor[order])
    numbers = tensor[order][bounds[:-1]]
    whole = np.maximum(1, shapes_table([declared.tensors[n] for n in numbers], items.boxes.width))
    boxes = items.boxes.take(order).widened(whole.shape[1])
    boxes = Boxes(boxes.offset, np.maximum(1, boxes.shape))
    cells, regular = regular_grids(boxes, bounds, whole)
    regular |= _is_object(declared)[numbers]
    if not regular.all():
        raise BackendError(_irregular(declared, boxes, bounds, numbers, np.flatnonzero(~regular)))
    if limit is not None:
        cells = _divided(declared, cells, numbers, whole, limit)
    grids: list[Grid] = [None] * len(declared.tensors)
    row_cells = np.ones((len(declared.tensors), boxes.width), np.int64)
    for number, cell in zip(numbers.tolist(), cells, strict=True):
        meta = declared.tensors[number].meta
        row_cells[number] = cell
        if not meta.is_object:
            grids[number] = tuple(cell[: len(meta.shape)].tolist())
    return grids, None if limit is None else row_cells[tensor, : items.boxes.width]


def _divided(declared: Declarations, cells: Int64, numbers: Int32, whole: Int64, limit: int) -> Int64:
    """Smaller cells within the limit, of which the given ones are made up."""
    itemsize = np.array([declared.tensors[n].meta.itemsize or 1 for n in numbers], np.int64)
    pieces = _within(cells, np.maximum(1, limit // itemsize))
    # Of several cells along an axis the smaller ones must be divisors; a single one may end anywhere.
    for i, axis in np.argwhere((pieces < cells) & (cells < whole)).tolist():
        piece = int(pieces[i, axis])
        while cells[i, axis] % piece:
            piece -= 1
        pieces[i, axis] = piece
    return pieces


def _irregular(declared: Declarations, boxes: Boxes, bounds: Int64, numbers: Int32, wrong: Int64) -> str:
    told = []
    for run in wrong[:_TOLD].tolist():
        key, meta = declared.tensors[numbers[run]]
        rows = range(int(bounds[run]), int(bounds[run + 1]))
        some = ", ".join(str(boxes.row(i, len(meta.shape))) for i in rows[:_TOLD])
        told.append(f"{key!r} of {meta.shape}: {some}" + (", ..." if len(rows) > _TOLD else ""))
    if len(wrong) > _TOLD:
        told.append(f"and {len(wrong) - _TOLD} more tensors")
    return (
        "this format stores regular grids, and the shards of these tensors form none:\n  "
        + "\n  ".join(told)
        + "\n  hint: save them as torch_dist, which holds any sharding"
    )
