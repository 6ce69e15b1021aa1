"""Exact geometry of tilings: do boxes cover each element of their tensors once?

The common cases, regular grids and ranges of contiguous elements, are decided for all tensors at
once, in columns. Other tensors are swept: the boxes' edges make a grid of cells, and each cell
counts the boxes that hold it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megackpt.planning.box import Box, Boxes, Int64, c_strides, regular_grids, runs

CELLS = 1 << 18
"""Cells of the counting grid held at a time. Larger regions are halved first."""
_AXES = 6  # with more axes, the 2^axes corners of a box cost more than halving regions


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
