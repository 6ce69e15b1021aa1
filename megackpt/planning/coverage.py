"""Do the main replicas of all ranks tile each tensor exactly?

Exactly means: in bounds, disjoint, and with volumes that add up. Columns decide for all tensors
together: regular grids, and ranges of contiguous elements. Other tensors are swept: the edges of
the boxes make a grid of cells, and each cell counts the boxes that hold it. Only tensors that are
wrong are examined one by one, for the error text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from megackpt.errors import CoverageError, join_truncated, name_ranks
from megackpt.planning.box import (
    Box,
    Boxes,
    Int64,
    c_strides,
    padded,
    regular_grids,
    runs,
)
from megackpt.planning.manifest import Declarations, TensorEntry, TensorMeta

EXPLAINED = 20
"""Kinds of keys with a paragraph, about the first key. Keys of a kind differ in numbers only."""
REGIONS = 4
"""Regions of one sort named for a tensor."""
BOXES = 6
"""Declared boxes named for a tensor."""
RANKS_SHOWN = 6
"""Spans of ranks named for a box."""
_SHARED_PREFIX = (
    "{} declared it more than once; does the state hold the key twice, or do two models share "
    "one prefix? Give each its own (add_prefix_for_sharding)"
)
CELLS = 1 << 18
"""Cells of the counting grid held at a time. Larger regions are halved first."""
_AXES = 6  # with more axes, the 2^axes corners of a box cost more than halving regions


def uncovered(declared: Declarations, thorough: bool = True) -> dict[str, str]:
    """All reasons why the declarations of all ranks do not tile exactly; empty if they do.

    A text a key: different shapes, dtypes or kinds, boxes out of bounds, holes, overlaps,
    and boxes with no or several main replicas. A box without elements may have any number of
    main replicas, but each key needs one. If not ``thorough``, only the problems that no save may
    ignore: keys that would be lost or are ambiguous, and shards to write outside of their tensors.
    """
    tensors = declared.tensors
    shards = declared.shards
    tensor = declared.tensor[shards.first]
    metas, meta_of = declared.metas
    rows = [meta.shape for meta in metas]
    shapes = padded(rows, 1, declared.boxes.width)[meta_of]
    whole = shapes[tensor]
    boxes = declared.boxes.take(shards.first).widened(whole.shape[1])
    volume = boxes.volume
    mains = declared.mains
    outside = np.zeros(len(boxes), np.bool_)
    for axis in range(boxes.width):  # long columns are faster than many short rows
        offset = boxes.offset[:, axis]
        shape = boxes.shape[:, axis]
        outside |= (offset < 0) | (shape < 0) | (offset + shape > whole[:, axis])

    # A key is lost if no main replica of it has data, or could have none.
    written = (mains > 0) & ((volume > 0) | (shapes == 0).any(axis=1)[tensor])
    wrong = np.zeros(len(tensors), np.bool_)
    wrong[tensor] = True
    wrong[tensor[written]] = False
    if thorough:
        wrong[tensor[outside | ((mains > 1) & (volume != 0))]] = True
        held = np.flatnonzero((mains > 0) & (volume > 0) & ~wrong[tensor])
        bounds = runs(tensor[held])
        present = tensor[held][bounds[:-1]]
        if len(held) < len(boxes):
            boxes = boxes.take(held)
        wrong[present] = ~tile_exactly(boxes, bounds, shapes[present])
    else:
        wrong[tensor[written & outside]] = True

    # Also wrong are keys with several metas, which are several tensors.
    keys = list(map(itemgetter(0), tensors))
    if not wrong.any() and len(set(keys)) == len(keys):
        return {}
    numbers: dict[str, list[int]] = {}
    for number, key in enumerate(keys):
        numbers.setdefault(key, []).append(number)
    for key, own in list(numbers.items()):
        if len(own) == 1 and not wrong[own[0]]:
            del numbers[key]
    return explain(declared, numbers)


def check(declared: Declarations, thorough: bool = True) -> None:
    """Raise CoverageError for all that ``uncovered`` finds."""
    problems = uncovered(declared, thorough)
    if problems:
        raise CoverageError(join_problems(problems))


def shapes_table(tensors: Sequence[TensorEntry], width: int) -> Int64:
    """The global shapes of a table of tensors, (n, width or more), padded with 1 as boxes are."""
    return padded([entry.meta.shape for entry in tensors], 1, width)


def tile_exactly(boxes: Boxes, bounds: Int64, whole: Int64) -> NDArray[np.bool_]:
    """For each run of boxes: is every element of its tensor in exactly one of them?

    The boxes of a run must be distinct and not empty. ``bounds`` holds n + 1 row numbers (see
    box.runs), ``whole`` the n global shapes, as an array (n, width of the boxes).
    """
    if len(bounds) < 2:
        return np.zeros(0, np.bool_)
    counts = np.diff(bounds)
    inside = np.ones(len(boxes), np.bool_)
    for axis in range(boxes.width):
        start = boxes.offset[:, axis]
        stop = np.repeat(whole[:, axis], counts)
        inside &= (start >= 0) & (start + boxes.shape[:, axis] <= stop)
    exact = np.logical_and.reduceat(inside, bounds[:-1])
    # In bounds and of the right volume in sum, boxes with a hole also overlap.
    exact &= np.add.reduceat(boxes.volume, bounds[:-1]) == np.prod(whole, axis=1)
    _, regular = regular_grids(boxes, bounds, whole)
    undecided = exact & ~regular
    if undecided.any():
        undecided &= ~_are_ranges(boxes, counts, whole, undecided)
    for run in np.flatnonzero(undecided):
        part = boxes.take(slice(bounds[run], bounds[run + 1]))
        exact[run] = next(miscounted(part, whole[run].tolist()), None) is None
    return exact


def _are_ranges(
    boxes: Boxes, counts: Int64, whole: Int64, wanted: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Which of the wanted runs are successive ranges of contiguous elements?

    The wanted runs are in bounds and of full volume.
    """
    run = np.repeat(np.arange(len(counts)), counts)
    rows = np.flatnonzero(wanted[run])
    run = run[rows]
    boxes = boxes.take(rows)
    strides = c_strides(whole)[run]
    # The first element of each box and the one behind its last, in C order.
    start = (boxes.offset * strides).sum(axis=1)
    stop = ((boxes.stop - 1) * strides).sum(axis=1) + 1
    contiguous = stop - start == boxes.volume

    order = np.lexsort([start, run])
    run = run[order]
    start = start[order]
    bounds = runs(run)[:-1]
    expected = np.roll(stop[order], 1)
    expected[bounds] = 0
    follows = contiguous[order] & (start == expected)
    found = np.zeros(len(whole), np.bool_)
    found[run[bounds]] = np.logical_and.reduceat(follows, bounds)
    return found


def miscounted(boxes: Boxes, whole: Sequence[int]) -> Iterator[tuple[Box, int]]:
    """The regions of a tensor that no box or several boxes cover, with the number of boxes.

    ``whole`` is the global shape. Regions are disjoint and found one by one. Parts of boxes
    outside the tensor are ignored. The cost is about boxes x 64 + CELLS for each CELLS of the
    grid.
    """
    ndim = len(whole)
    wide = boxes.widened(ndim)
    low = wide.offset[:, :ndim]
    high = wide.stop[:, :ndim]
    yield from _swept(low, high, np.zeros(ndim, np.int64), np.array(whole, np.int64))


def _swept(
    low: Int64, high: Int64, start: Int64, stop: Int64
) -> Iterator[tuple[Box, int]]:
    """``miscounted`` for the region [start, stop), and boxes [low, high)."""
    if (start >= stop).any():
        return
    low = np.maximum(low, start)
    high = np.minimum(high, stop)
    there = (low < high).all(axis=1)
    low = low[there]
    high = high[there]
    # Along each axis the edges of boxes cut the region. No edge is within a cell of this grid.
    cuts: list[Int64] = []
    for axis in range(len(start)):
        ends = np.array([start[axis], stop[axis]])
        edges = np.concatenate([ends, low[:, axis], high[:, axis]])
        cuts.append(np.unique(edges))
    cells = [len(cut) - 1 for cut in cuts]
    if all(count == 1 for count in cells):  # each of these boxes holds the whole region
        if len(low) != 1:
            yield Box(tuple(start.tolist()), tuple((stop - start).tolist())), len(low)
        return
    if len(cells) > _AXES or math.prod(cells) > CELLS:
        axis = int(np.argmax(cells))
        middle = cuts[axis][cells[axis] // 2]
        left = stop.copy()
        right = start.copy()
        left[axis] = middle
        right[axis] = middle
        yield from _swept(low, high, start, left)
        yield from _swept(low, high, right, stop)
        return

    # How many boxes hold each cell: the running sum of +1 and -1 at their corners.
    counts = np.zeros([len(cut) for cut in cuts], np.int64)
    for corner in np.ndindex(*(2,) * len(cuts)):
        place = []
        for axis, is_end in enumerate(corner):
            corners = low
            if is_end:
                corners = high
            place.append(np.searchsorted(cuts[axis], corners[:, axis]))
        np.add.at(counts, tuple(place), (-1) ** sum(corner))
    for axis in range(len(cuts)):
        np.cumsum(counts, axis=axis, out=counts)
    yield from _blocks(counts[(slice(-1),) * len(cuts)], cuts)


def _blocks(counts: Int64, cuts: Sequence[Int64]) -> Iterator[tuple[Box, int]]:
    """The cells whose count is not 1, joined to blocks of equal count."""
    left = counts != 1
    while left.any():
        first = np.unravel_index(left.argmax(), left.shape)
        alike = left & (counts == counts[first])
        block = [slice(i, i + 1) for i in map(int, first)]
        for axis in reversed(range(len(block))):  # as far as all cells have one count
            begin = block[axis].start
            block[axis] = slice(begin, None)
            others = tuple(other for other in range(len(block)) if other != axis)
            line = alike[tuple(block)].all(axis=others)
            block[axis] = slice(begin, begin + int(np.append(line, False).argmin()))
        left[tuple(block)] = False
        offset = []
        shape = []
        for cut, cells in zip(cuts, block, strict=True):
            offset.append(int(cut[cells.start]))
            shape.append(int(cut[cells.stop]) - offset[-1])
        yield Box(tuple(offset), tuple(shape)), int(counts[first])


def explain(
    declared: Declarations, wrong: Mapping[str, Sequence[int]]
) -> dict[str, str]:
    """A text for each key; ``wrong``: key -> the numbers of its tensors.

    A key with several tensors is declared in several ways. The first key of each of EXPLAINED
    kinds gets a paragraph.
    """
    problems = {}
    seen: set[str] = set()
    for key, numbers in wrong.items():
        text = f"{key!r} is not covered"
        pattern = key_pattern(key)
        if pattern not in seen and len(seen) < EXPLAINED:
            seen.add(pattern)
            if len(numbers) > 1:
                text = _explain_conflict(declared, numbers)
            else:
                text = _explain_tensor(declared, numbers[0])
        problems[key] = text
    return problems


def join_problems(problems: Mapping[str, str]) -> str:
    """One text: the first problem of each of EXPLAINED kinds of keys, and a count of the rest."""
    kinds: dict[str, list[str]] = {}
    for key in problems:
        kinds.setdefault(key_pattern(key), []).append(key)
    lines = []
    others = 0
    for number, (pattern, found) in enumerate(kinds.items()):
        if number >= EXPLAINED:
            others += len(found)
            continue
        lines.append(problems[found[0]])
        keys = list(map(repr, found[1:]))
        if keys:
            named = join_truncated(keys, 3, ", ")
            lines.append(f"and {len(keys)} more keys like {pattern!r}: {named}")
    if others:
        lines.append(f"and {others} more keys of other kinds")
    return "\n".join(lines)


def key_pattern(key: str) -> str:
    """``decoder.layers.*.mlp.fc1.weight``: the same for keys that differ in numbers only."""
    return re.sub(r"\b[0-9]+\b", "*", key)


def _explain_tensor(declared: Declarations, number: int) -> str:
    key, meta = declared.tensors[number]
    mine = declared.take(np.flatnonzero(declared.tensor == number))
    regions = list(islice(miscounted(mine.boxes.take(mine.main), meta.shape), 64))
    shards = mine.shards
    mains = mine.mains
    ndim = len(meta.shape)
    boxes = mine.boxes.take(shards.first).widened(ndim)
    boxes = Boxes(boxes.offset[:, :ndim], boxes.shape[:, :ndim])
    low = boxes.offset
    high = boxes.stop
    whole = np.array(meta.shape, np.int64)
    outside = ((low < 0) | (high < low) | (high > whole)).any(axis=1)
    near = np.zeros(len(boxes), np.int64)  # 2: meets one of the regions, 1: touches it
    for region, _ in regions[:REGIONS]:
        touches = ((low <= region.stop) & (high >= region.offset)).all(axis=1)
        meets = ((low < region.stop) & (high > region.offset)).all(axis=1)
        near = np.maximum(near, touches.astype(np.int64) + meets)
    order = np.lexsort([*low.T[::-1], mains == 0, -near, ~outside])

    shape = _shape_text(meta)
    leaving = []
    holes = []
    overlaps = []
    for i in np.flatnonzero(outside)[: REGIONS + 1].tolist():
        box = boxes.row(i, ndim)
        leaving.append(f"{box} lies outside of {shape}")
    for region, count in regions:
        if count:
            overlaps.append(f"{region} of {shape} has {count} main replicas")
        else:
            holes.append(f"{region} of {shape} has no main replica")
    findings = [*leaving[:REGIONS], *holes[:REGIONS], *overlaps[:REGIONS]]
    if not findings:
        findings.append(f"no rank holds any part of {shape} as main replica")
    if max(len(leaving), len(holes), len(overlaps)) > REGIONS:
        findings.append("and there are more such regions")

    holders = []
    for i in order[:BOXES].tolist():
        rows = shards.rows(i)
        if mains[i]:
            rows = rows[mine.main[rows]]
        text = (
            f"{name_ranks(mine.rank[rows].tolist(), RANKS_SHOWN)} {boxes.row(i, ndim)}"
        )
        if not mains[i]:
            ids = {str(mine.replica_ids[n]) for n in mine.replica[rows]}
            text += f" (replica_id {join_truncated(sorted(ids), 3, ', ')})"
        holders.append(text)
    if len(order) > BOXES:
        holders.append(f"and {len(order) - BOXES} more boxes")
    text = (
        f"{key!r} is not covered: {'; '.join(findings)}.\n"
        f"  declared: {'; '.join(holders)}"
    )
    if outside.any():
        hint = (
            "is the global shape that of one rank, or does rank_offsets hold the global rank "
            "instead of the rank within its group, or an index counted from 1?"
        )
    else:
        doubled = order[(mains > 1)[order] & (boxes.volume > 0)[order]]
        rows = doubled
        if len(doubled):
            rows = shards.rows(int(doubled[0]))
        hint = _cause(
            mine.rank[rows[mine.main[rows]]].tolist(), boxes.take(mains == 0), regions
        )
    if hint:
        return f"{text}\n  hint: {hint}"
    return text


def _cause(
    ranks: Sequence[int], copies: Boxes, regions: Sequence[tuple[Box, int]]
) -> str:
    """The likely cause, or "".

    ``ranks`` have the same box as main replica, ``copies`` are the boxes without one.
    """
    if len(set(ranks)) > 1:
        count = str(len(ranks))
        if len(ranks) == 2:
            count = "two"
        return (
            f"{count} ranks declare the same box as main replica; is the tensor-parallel rank "
            "missing from rank_offsets? If they hold copies, all but one need a non-zero "
            "replica_id"
        )
    if ranks:
        return _SHARED_PREFIX.format(name_ranks(ranks))
    if any(count for _, count in regions):
        return ""
    for hole, _ in regions:
        meets = (copies.offset < hole.stop) & (copies.stop > hole.offset)
        if not meets.all(axis=1).any():
            return (
                "no rank declares the region; is a rank or a pipeline stage missing, or is the "
                "global shape larger than what the ranks hold together?"
            )
    return (
        "every replica of the region has a non-zero replica_id; exactly one rank must declare "
        "it with replica_id 0 (or all zeros). Do only some ranks hold it, declared by "
        "megackpt.sharded without among=?"
    )


def _explain_conflict(declared: Declarations, numbers: Sequence[int]) -> str:
    """The paragraph about a key with several global shapes, dtypes or kinds."""
    variants = []
    for number in numbers:
        ranks = np.unique(declared.rank[declared.tensor == number]).tolist()
        if ranks:
            variants.append((declared.tensors[number].meta, ranks))
    texts = []
    for meta, ranks in variants:
        where = name_ranks(ranks, RANKS_SHOWN)
        texts.append(f"{where} {_shape_text(meta)} {meta.dtype}")
    text = (
        f"{declared.tensors[numbers[0]].key!r} is declared in {len(variants)} ways, where all "
        "ranks must agree on global shape and dtype.\n"
        f"  declared: {join_truncated(texts, BOXES)}"
    )
    # The variant of the fewest ranks is probably the wrong one; of equals, the last.
    variants.sort(key=lambda variant: -len(variant[1]))
    (one, most), (other, fewest) = variants[0], variants[-1]
    where = name_ranks(fewest, RANKS_SHOWN)
    if set(most) & set(fewest):
        return f"{text}\n  hint: {_SHARED_PREFIX.format(where)}"
    if one.shape == other.shape:
        return text
    return (
        f"{text}\n  hint: is the number of fragments, the axis or prepend_axis_num wrong on "
        f"{where}, or the local shape another one (a vocabulary that is not padded)? Pieces of "
        "different sizes need global_shape and global_offset, with axis_fragmentations=None"
    )


def _shape_text(meta: TensorMeta) -> str:
    shape = str(tuple(int(size) for size in meta.shape))
    if meta.is_object:
        return f"objects {shape}"
    return shape
