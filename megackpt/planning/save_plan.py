"""Planning of a save: from all declarations, a SavePlan for each rank and the Manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import numpy as np

from megackpt.errors import ShardingError, join_truncated
from megackpt.planning.box import (
    Boxes,
    Int64,
    cut,
    expand_ranges,
    extents_within,
    group,
    largest_divisor,
    regular_grids,
    runs,
)
from megackpt.planning.coverage import check, shapes_table
from megackpt.planning.manifest import (
    Bool,
    Chunks,
    Declarations,
    Int32,
    Manifest,
    SavePlan,
    TensorEntry,
    digest_rows,
    itemsizes,
    joined,
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
        limit = self.max_item_bytes
        if self.cell_bytes < 1 or (limit is not None and limit < 1):
            raise ValueError(f"max_item_bytes and cell_bytes must be positive: {self}")


def plan_save(
    parts: Sequence[Declarations],
    policy: SavePolicy | None = None,
    validate: bool = True,
) -> tuple[list[SavePlan], Manifest]:
    """The plan of each rank, and the manifest; ``parts[i]`` are the declarations of rank i.

    Each distinct shard with a main replica is written once. Empty shards of tensors with
    elements are not written; a tensor without elements keeps one empty chunk. Within a rank
    objects come first, then tensors by decreasing bytes (without ``balance``: as declared). The
    manifest's chunks are in plan order (rank 0's rows, rank 1's, ...) and have no location yet:
    file -1, lengths of the raw bytes (0 for objects).

    Raises ShardingError for keys and sizes that no index can hold, and CoverageError where the
    declarations are not an exact tiling. Without ``validate`` only keys that would be lost or
    ambiguous, and shards outside of their tensors, raise it.
    """
    if policy is None:
        policy = SavePolicy()
    declared = Declarations.merge(parts).numbered()
    tensors = declared.tensors
    refuse_unstorable(tensors)
    check(declared, thorough=validate)
    metas, number = declared.metas
    itemsize = np.array([meta.itemsize for meta in metas], np.int64)[number]
    row = assign(declared, policy.balance)
    keep = declared.boxes.volume[row] > 0
    if not keep.all():
        # Each tensor without elements keeps one empty shard.
        empty = np.flatnonzero(~keep)
        numbers, first = np.unique(declared.tensor[row[empty]], return_index=True)
        for number, place in zip(numbers.tolist(), empty[first].tolist(), strict=True):
            keep[place] = 0 in tensors[number].meta.shape
        row = row[keep]
    boxes = declared.boxes.take(row)
    grids: list[Grid] = [None] * len(tensors)
    if policy.gridded:
        grids, cells = _grids(tensors, declared.tensor[row], boxes, policy)
        if cells is not None:
            piece_of, boxes = cut(boxes, cells, np.zeros_like(cells))
            row = row[piece_of]
    elif policy.max_item_bytes is not None:
        budget = np.maximum(1, policy.max_item_bytes // np.maximum(1, itemsize))
        budget[itemsize == 0] = _UNBOUNDED
        pieces = extents_within(boxes.shape, budget[declared.tensor[row]])
        piece_of, boxes = cut(boxes, pieces, boxes.offset)
        row = row[piece_of]

    # By rank; within a rank objects first, then by decreasing bytes (for a balance of its threads),
    # then as declared.
    counts = [len(part.tensor) for part in parts]
    holder = np.repeat(np.arange(len(parts), dtype=np.int32), counts)
    size = itemsize[declared.tensor[row]]
    weight = np.where(size == 0, _UNBOUNDED, boxes.volume * size)
    if not policy.balance:
        weight[size > 0] = 0
    order = np.lexsort([-weight, holder[row]])
    row = row[order]
    boxes = boxes.take(order)
    size = size[order]
    chunks = Chunks(
        declared.tensor[row],
        boxes,
        holder[row],
        np.full(len(row), -1, np.int32),
        np.zeros(len(row), np.int64),
        boxes.volume * size,
        digest_rows(b""),
    )
    plans = _plans(parts, tensors, grids, row, chunks)
    records = tuple(fact for fact in declared.facts if fact[1].startswith("{"))
    return plans, Manifest(tensors, tuple(grids), chunks, subclasses=records)


def refuse_unstorable(tensors: Sequence[TensorEntry]) -> None:
    """Raise ShardingError naming the tensors that no index can hold."""
    sizes = {meta: size_problem(*meta) for meta in set(map(itemgetter(1), tensors))}
    ascii_only = "".join(map(itemgetter(0), tensors)).isascii()
    if ascii_only and not any(sizes.values()):
        return
    wrong = []
    for entry in tensors:
        problem = sizes[entry.meta] or key_problem(entry.key)
        if problem:
            wrong.append(f"{entry.key!r}: {problem}")
    if wrong:
        raise ShardingError(join_truncated(wrong, separator="\n"))


def _plans(
    parts: Sequence[Declarations],
    tensors: Sequence[TensorEntry],
    grids: Sequence[Grid],
    row: Int64,
    chunks: Chunks,
) -> list[SavePlan]:
    """The plan of each rank, in numbers of the rank's table of tensors and of the rank's rows.

    ``row`` is for each chunk the row of the merged declarations that holds it.
    """
    chosen: dict[TensorEntry, Grid] = {}
    if grids.count(None) < len(grids):
        chosen = dict(zip(tensors, grids, strict=True))
    grids_of: dict[int, tuple[Grid, ...]] = {}  # id of a table, which ranks may share
    bounds = np.searchsorted(chunks.writer, np.arange(len(parts) + 1)).tolist()
    columns = [own.tensor for own in parts]
    tensor = joined(columns, np.int32)[row]
    starts = np.cumsum([0, *map(len, columns)])
    source = (row - starts[chunks.writer]).astype(np.int32)
    plans = []
    for rank, own in enumerate(parts):
        table = id(own.tensors)
        if table not in grids_of:
            grids_of[table] = (None,) * len(own.tensors)
            if chosen:
                grids_of[table] = tuple(map(chosen.get, own.tensors))
        mine = slice(bounds[rank], bounds[rank + 1])
        boxes = Boxes(chunks.boxes.offset[mine], chunks.boxes.shape[mine])
        plans.append(
            SavePlan(
                rank, own.tensors, grids_of[table], tensor[mine], boxes, source[mine]
            )
        )
    return plans


def _grids(
    tensors: Sequence[TensorEntry], tensor: Int32, boxes: Boxes, policy: SavePolicy
) -> tuple[list[Grid], Int64 | None]:
    """A grid for each tensor (None for objects), and the cell of each item.

    The cells are None if all items are cells already.
    """
    groups = group(tensor)
    bounds = groups.bounds
    numbers = tensor[groups.first].tolist()
    present = [tensors[number] for number in numbers]
    itemsize = np.maximum(1, itemsizes(present))
    # Extents of 0 count as 1: no cell is empty.
    whole = np.maximum(1, shapes_table(present, boxes.width))
    held = boxes.take(groups.order).widened(whole.shape[1])
    held = Boxes(held.offset, np.maximum(1, held.shape))
    own, regular = regular_grids(held, bounds, whole)
    regular |= itemsizes(present) == 0
    cells = own.copy()
    if policy.max_item_bytes is not None:
        cells = _smaller(own, whole, policy.max_item_bytes // itemsize, own < whole)
    for run in np.flatnonzero(~regular).tolist():
        part = held.take(slice(bounds[run], bounds[run + 1]))
        cells[run] = _free_cell(part, whole[run], int(itemsize[run]), policy)
    grids: list[Grid] = [None] * len(tensors)
    by_tensor = np.ones((len(tensors), held.width), np.int64)
    by_tensor[numbers] = cells
    for number, entry, cell in zip(numbers, present, cells.tolist(), strict=True):
        if not entry.meta.is_object:
            grids[number] = tuple(cell[: len(entry.meta.shape)])
    if regular.all() and (cells == own).all():
        return grids, None
    return grids, by_tensor[tensor, : boxes.width]


def _smaller(cells: Int64, whole: Int64, budget: Int64, divided: Bool) -> Int64:
    """Cells of at most ``budget`` elements. Along ``divided`` axes they divide the larger ones.

    If an extent has no useful divisor, shards share the cells at their borders.
    """
    pieces = extents_within(cells, np.maximum(1, budget))
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
    mean = boxes.shape.mean(axis=0).astype(np.int64)
    cell = np.where(free, np.maximum(1, mean // _CELLS_OF_A_SHARD), largest)
    for axis in np.flatnonzero(free).tolist():
        nbytes = itemsize * int(np.prod(cell))
        times = max(1, -(-policy.cell_bytes // (_SMALLER_CELLS * nbytes)))
        cell[axis] = min(int(whole[axis]), int(cell[axis]) * times)
    limit = min(policy.cell_bytes, policy.max_item_bytes or policy.cell_bytes)
    budget = np.array([limit // itemsize])
    return _smaller(cell[None], whole[None], budget, ~free[None]).ravel()


_MANY = 16  # shards assigned in one turn from which on a turn is faster than a loop


def assign(declared: Declarations, balance: bool = True) -> Int64:
    """The rows of ``declared`` that write: one for each shard with a main replica, ascending.

    A tensor's candidates are the ranks that hold the shard in the domain of its main replica. An
    object is written by its main replica, as its copies often differ (the state of a random
    number generator). Without ``balance`` main replicas write everything. If there are several main
    replicas (which coverage refuses), the first one counts. The result depends on the declarations
    only. Objects weigh their nominal ``nbytes``.
    """
    shards = declared.shards
    rows = shards.order
    shard = shards.number
    # The first main replica of each shard that has one, as positions in ``rows``.
    main = np.flatnonzero(declared.main[rows])
    main = main[runs(shard[main])[:-1]]
    if not balance or len(shards) == len(rows):  # or each shard has one holder
        return np.sort(rows[main])

    # The candidates: in the domain of the main replica, of an object itself alone.
    rank = declared.rank[rows]
    domains = np.array(declared.domains, np.int64)
    # Declarations of a single rank have one domain, whatever the rank's number.
    domain = domains[np.minimum(rank, len(domains) - 1)]
    wanted = np.full(len(shards), -1, np.int64)
    wanted[shard[main]] = domain[main]
    is_object = itemsizes(declared.tensors) == 0
    fits = (domain == wanted[shard]) & (wanted[shard] >= 0)
    fits &= ~is_object[declared.tensor[rows]]
    fits[main] = True
    rows = rows[fits]
    rank = rank[fits]
    shard = shard[fits]
    # A rank that declares a shard several times is one candidate.
    again = np.zeros(len(rows), np.bool_)
    again[1:] = (shard[1:] == shard[:-1]) & (rank[1:] == rank[:-1])
    return np.sort(_balanced(declared, rows[~again], runs(shard[~again])))


def _balanced(declared: Declarations, candidates: Int64, bounds: Int64) -> Int64:
    """For each shard the row of its writer.

    The candidates of shard i are rows of ``declared``: ``candidates[bounds[i] : bounds[i + 1]]``.
    """
    count = np.diff(bounds)
    first = candidates[bounds[:-1]]
    nbytes = declared.nbytes[first]
    several = np.flatnonzero(count > 1)
    if not len(several):
        return first
    rank = declared.rank[candidates]
    alone = count == 1
    loads = np.zeros(int(rank.max()) + 1, np.int64)
    np.add.at(loads, declared.rank[first[alone]], nbytes[alone])

    # Key and box, the last criteria, only make the order deterministic.
    keys = np.array([entry.key for entry in declared.tensors], object)
    alphabetical = np.argsort(np.argsort(keys, kind="stable"))
    held = first[several]
    offsets = declared.boxes.offset[held].T[::-1]
    key = alphabetical[declared.tensor[held]]
    order = np.lexsort([*offsets, key, -nbytes[several], count[several]])
    order = several[order]
    chosen = bounds[:-1].copy()
    for begin, end in pairwise(runs(count[order]).tolist()):  # equally many candidates
        shards = order[begin:end]
        members = rank[bounds[shards][:, None] + np.arange(count[shards[0]])]
        chosen[shards] += _assign_each(members, nbytes[shards], loads)
    return candidates[chosen]


def _assign_each(members: Int32, nbytes: Int64, loads: Int64) -> Int64:
    """Which of its ``members`` (n, k) gets each shard; updates ``loads``."""
    winner = np.empty(len(members), np.int64)
    _, first, number = np.unique(members[:, 0], return_index=True, return_inverse=True)
    sets = members[first]
    apart = len(np.unique(sets)) == sets.size and bool((members == sets[number]).all())
    if not apart or len(number) < _MANY * np.bincount(number).max():
        for i, mine in enumerate(members):
            best = loads[mine].argmin()
            loads[mine[best]] += nbytes[i]
            winner[i] = best
        return winner
    # Disjoint sets of ranks do not depend on one another's assignments: the first shard of each
    # set is assigned at once, then the second, ...
    by_set = group(number)
    _, turn = expand_ranges(np.zeros_like(by_set.first), np.diff(by_set.bounds))
    turns = group(turn)
    for i in range(len(turns)):
        shards = by_set.order[turns.rows(i)]
        candidates = members[shards]
        best = loads[candidates].argmin(axis=1)
        loads[candidates[np.arange(len(shards)), best]] += nbytes[shards]
        winner[shards] = best
    return winner
