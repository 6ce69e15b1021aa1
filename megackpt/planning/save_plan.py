"""The plan of a save: of the declarations of all ranks a SavePlan for each, and the Manifest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from megackpt.errors import ShardingError, join_truncated
from megackpt.planning.box import (
    Boxes,
    Int64,
    cut,
    largest_divisor,
    regular_grids,
    runs,
)
from megackpt.planning.coverage import check, shapes_table
from megackpt.planning.dedup import assign
from megackpt.planning.manifest import (
    DIGEST_SIZE,
    Bool,
    Chunks,
    Declarations,
    Manifest,
    SavePlan,
    TensorEntry,
    key_problem,
    size_problem,
)

Grid = tuple[int, ...] | None
# Cells along an axis of a shard, where shards form no grid: the cells that several shards share
# hold about one eighth of it.
_CELLS_OF_A_SHARD = 8
# Such cells hold at least cell_bytes / 16, so that tiny shards do not make tiny files.
_SMALLER_CELLS = 16
_USEFUL = 4  # a divisor that yields more than 4 times the pieces needed is ignored
_UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """How a save is planned.

    Attributes:
        balance: spread the writing of tensors over the holders of each shard, by bytes;
            otherwise main replicas write. Main replicas always write objects.
        gridded: the format stores the cells of a regular grid, chosen here for each tensor.
            Shards are the cells if they form a grid. Otherwise an item is a cell, or the part
            of one that lies in a shard.
        max_item_bytes: cut tensors' items into pieces of at most this size, or one element.
        cell_bytes: the most that a cell holds if it is not a shard.
    """

    balance: bool = True
    gridded: bool = False
    max_item_bytes: int | None = None
    cell_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        limit = 1 if self.max_item_bytes is None else self.max_item_bytes
        if min(self.cell_bytes, limit) < 1:
            raise ValueError(f"max_item_bytes and cell_bytes must be positive: {self}")


@dataclass(frozen=True, slots=True, eq=False)
class _Items:
    """The items to write: the declared row that holds each box, and the box."""

    row: Int64
    boxes: Boxes

    def take(self, rows: Int64) -> _Items:
        return _Items(self.row[rows], self.boxes.take(rows))


def plan_save(
    parts: Sequence[Declarations],
    policy: SavePolicy | None = None,
    validate: bool = True,
) -> tuple[list[SavePlan], Manifest]:
    """The plan of each rank, and the manifest; ``parts[i]`` are the declarations of rank i.

    Each distinct shard with a main replica is written once. Empty shards of tensors with
    elements are not written; a tensor without elements keeps one empty chunk. Within a rank
    objects come first, then tensors by decreasing bytes. The manifest's chunks are in plan order
    (rank 0's rows, rank 1's, ...) and have no location yet: file -1, lengths of the raw bytes (0
    for objects).

    Raises ShardingError for keys and sizes that no index can hold, and CoverageError where the
    declarations are not an exact tiling. Without ``validate`` only keys that would be lost or
    ambiguous, and shards outside of their tensors, raise it.
    """
    policy = SavePolicy() if policy is None else policy
    declared = Declarations.merge(parts).numbered()
    shards = declared.shards()
    refuse_unstorable(declared.tensors)
    check(declared, shards, thorough=validate)
    rows = _without_empty(declared, assign(declared, policy.balance, shards))
    items = _Items(rows, declared.boxes.take(rows))
    grids: list[Grid] = [None] * len(declared.tensors)
    if policy.gridded:
        grids, cells = _grids(declared, items, policy)
        if cells is not None:
            items = _cut(items, cells, np.zeros_like(cells))
    elif policy.max_item_bytes is not None:
        pieces = _piece_shapes(declared, items, policy.max_item_bytes)
        items = _cut(items, pieces, items.boxes.offset)
    part = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
    items = items.take(_plan_order(declared, items, part[items.row]))
    writer = part[items.row]
    return _plans(parts, declared, items, writer, grids), _manifest(
        declared, items, writer, grids
    )


def refuse_unstorable(tensors: Sequence[TensorEntry]) -> None:
    """Raise ShardingError naming the tensors that no index can hold."""
    sizes = {meta: size_problem(*meta) for meta in {entry.meta for entry in tensors}}
    wrong = [
        f"{entry.key!r}: {problem}"
        for entry in tensors
        if (problem := sizes[entry.meta] or key_problem(entry.key))
    ]
    if wrong:
        raise ShardingError(join_truncated(wrong, separator="\n"))


def _without_empty(declared: Declarations, rows: Int64) -> Int64:
    """The rows without empty shards, except one of each tensor that has no elements."""
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
    parts: Sequence[Declarations],
    declared: Declarations,
    items: _Items,
    part: Int64,
    grids: Sequence[Grid],
) -> list[SavePlan]:
    """The plan of each rank, in numbers of its own table of tensors and of its own rows."""
    first = np.cumsum([0, *map(len, parts)])
    bounds = np.searchsorted(part, np.arange(len(parts) + 1)).tolist()
    tensor = (
        np.concatenate([p.tensor for p in parts])[items.row]
        if parts
        else items.row.astype(np.int32)
    )
    source = (items.row - first[part]).astype(np.int32)
    chosen = {
        e: g for e, g in zip(declared.tensors, grids, strict=True) if g is not None
    }
    cells = {
        id(own.tensors): tuple(map(chosen.get, own.tensors))
        for own in _different(parts)
    }
    plans = []
    for rank, own in enumerate(parts):
        mine = slice(bounds[rank], bounds[rank + 1])
        boxes = items.boxes.take(mine)
        plans.append(
            SavePlan(
                rank,
                own.tensors,
                cells[id(own.tensors)],
                tensor[mine],
                boxes,
                source[mine],
            )
        )
    return plans


def _different(parts: Sequence[Declarations]) -> Collection[Declarations]:
    """One of the ranks for each table of tensors: ranks may have the same object."""
    return {id(part.tensors): part for part in parts}.values()


def _manifest(
    declared: Declarations, items: _Items, part: Int64, grids: Sequence[Grid]
) -> Manifest:
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
    """For each item the shape of pieces, cut along leading axes, of at most ``limit`` bytes."""
    itemsize = np.array([entry.meta.itemsize for entry in declared.tensors], np.int64)
    budget = np.maximum(1, limit // np.maximum(1, itemsize))[declared.tensor[items.row]]
    budget[_is_object(declared)[declared.tensor[items.row]]] = _UNBOUNDED
    return _within(items.boxes.shape, budget)


def _within(shape: Int64, budget: Int64) -> Int64:
    """The largest pieces of these shapes, cut along leading axes, of ``budget`` elements."""
    pieces = np.empty_like(shape)
    for axis in reversed(range(shape.shape[1])):
        extent = np.maximum(1, shape[:, axis])
        pieces[:, axis] = np.minimum(extent, budget)
        budget = np.where(extent <= budget, budget // extent, 1)
    return pieces


def _cut(items: _Items, pieces: Int64, origin: Int64) -> _Items:
    row, boxes = cut(items.boxes, pieces, origin)
    return _Items(items.row[row], boxes)


def _grids(
    declared: Declarations, items: _Items, policy: SavePolicy
) -> tuple[list[Grid], Int64 | None]:
    """A grid for each tensor (None for objects), and the cell of each item.

    The cells are None if all items are cells already.
    """
    tensor = declared.tensor[items.row]
    order = np.argsort(tensor, kind="stable")
    bounds = runs(tensor[order])
    numbers = tensor[order][bounds[:-1]]
    metas = [declared.tensors[n].meta for n in numbers]
    itemsize = np.array([meta.itemsize or 1 for meta in metas], np.int64)
    whole = np.maximum(
        1, shapes_table([declared.tensors[n] for n in numbers], items.boxes.width)
    )
    boxes = items.boxes.take(order).widened(whole.shape[1])
    boxes = Boxes(boxes.offset, np.maximum(1, boxes.shape))
    own, regular = regular_grids(boxes, bounds, whole)
    regular |= _is_object(declared)[numbers]
    cells = own.copy()
    if policy.max_item_bytes is not None:
        cells = _smaller(own, whole, policy.max_item_bytes // itemsize, own < whole)
    for run in np.flatnonzero(~regular).tolist():
        part = boxes.take(slice(bounds[run], bounds[run + 1]))
        cells[run] = _free_cell(part, whole[run], int(itemsize[run]), policy)
    grids: list[Grid] = [None] * len(declared.tensors)
    row_cells = np.ones((len(declared.tensors), boxes.width), np.int64)
    for number, meta, cell in zip(numbers.tolist(), metas, cells, strict=True):
        row_cells[number] = cell
        if not meta.is_object:
            grids[number] = tuple(cell[: len(meta.shape)].tolist())
    are_cells = regular.all() and (cells == own).all()
    return grids, None if are_cells else row_cells[tensor, : items.boxes.width]


def _smaller(cells: Int64, whole: Int64, budget: Int64, divided: Bool) -> Int64:
    """Cells of at most ``budget`` elements. Along ``divided`` axes they divide the larger ones.

    If an extent has no useful divisor, shards share the cells at their borders.
    """
    pieces = _within(cells, np.maximum(1, budget))
    for i, axis in np.argwhere((pieces < cells) & (cells < whole) & divided).tolist():
        divisor = largest_divisor(int(cells[i, axis]), int(pieces[i, axis]))
        if divisor * _USEFUL >= pieces[i, axis]:
            pieces[i, axis] = divisor
    return pieces


def _free_cell(boxes: Boxes, whole: Int64, itemsize: int, policy: SavePolicy) -> Int64:
    """The cell for a tensor whose shards form no grid.

    Along axes on which shards are regular the cell is as long as a shard. Along other axes it is
    so small that most of each shard consists of whole cells.
    """
    largest = boxes.shape.max(axis=0)
    rest = np.minimum(largest, whole - boxes.offset)
    free = ((boxes.offset % largest != 0) | (boxes.shape != rest)).any(axis=0)
    mean = np.maximum(1, boxes.shape.mean(axis=0).astype(np.int64) // _CELLS_OF_A_SHARD)
    cell = np.where(free, mean, largest)
    for axis in np.flatnonzero(free).tolist():
        least = -(
            -policy.cell_bytes // (_SMALLER_CELLS * itemsize * int(np.prod(cell)))
        )
        cell[axis] = min(int(whole[axis]), int(cell[axis]) * max(1, least))
    limit = min(policy.cell_bytes, policy.max_item_bytes or policy.cell_bytes)
    return _smaller(
        cell[None], whole[None], np.array([limit // itemsize]), ~free[None]
    ).ravel()
