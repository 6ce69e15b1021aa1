"""Exact geometry of tilings: do boxes cover each element of their tensors once?

The common cases, regular grids and ranges of contiguous elements, are decided for all tensors at
once, in columns. Other tensors are swept: the boxes' edges make a grid of cells, and each cell
counts the boxes that hold it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megackpt.planning.box import Box, Boxes, Int64, regular_grids

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
        start, stop = boxes.offset[:, axis], np.repeat(whole[:, axis], counts)
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
    """Which of the wanted runs are ranges of contiguous elements, one after the other?

    Of runs that are in bounds and of full volume.
    """
    run = np.repeat(np.arange(len(counts)), counts)
    rows = np.flatnonzero(wanted[run])
    run, part = run[rows], boxes.take(rows)
    strides = np.ones_like(whole)
    strides[:, :-1] = np.cumprod(whole[:, :0:-1], axis=1)[:, ::-1]
    start = (part.offset * strides[run]).sum(axis=1)
    stop = ((part.stop - 1) * strides[run]).sum(axis=1) + 1
    contiguous = stop - start == part.volume
    order = np.lexsort([start, run])
    run, start, stop = run[order], start[order], stop[order]
    first = np.append(True, run[1:] != run[:-1])
    follows = contiguous[order] & (start == np.where(first, 0, np.roll(stop, 1)))
    found = np.zeros(len(whole), np.bool_)
    found[run[first]] = np.logical_and.reduceat(follows, np.flatnonzero(first))
    return found


def miscounted(boxes: Boxes, whole: Sequence[int]) -> Iterator[tuple[Box, int]]:
    """The regions of a tensor that no box or several boxes cover, with the number of boxes.

    ``whole`` is the global shape. Regions are disjoint and found one by one. Parts of boxes
    outside the tensor are ignored. The cost is about boxes x 64 + CELLS for each CELLS of the
    grid.
    """
    ndim = len(whole)
    wide = boxes.widened(ndim)
    low, high = wide.offset[:, :ndim], wide.stop[:, :ndim]
    yield from _swept(low, high, np.zeros(ndim, np.int64), np.array(whole, np.int64))


def _swept(
    low: Int64, high: Int64, start: Int64, stop: Int64
) -> Iterator[tuple[Box, int]]:
    if (start >= stop).any():
        return
    low, high = np.maximum(low, start), np.minimum(high, stop)
    there = (low < high).all(axis=1)
    low, high = low[there], high[there]
    cuts = []
    for axis in range(len(start)):
        ends = [
            low[:, axis],
            high[:, axis],
            start[axis : axis + 1],
            stop[axis : axis + 1],
        ]
        cuts.append(np.unique(np.concatenate(ends)))
    lengths = [len(cut) - 1 for cut in cuts]
    if max(lengths, default=1) == 1:  # every box that is there holds all of the region
        if len(low) != 1:
            yield Box(tuple(start.tolist()), tuple((stop - start).tolist())), len(low)
        return
    if len(lengths) > _AXES or float(np.prod(lengths, dtype=np.float64)) > CELLS:
        axis = int(np.argmax(lengths))
        middle = cuts[axis][lengths[axis] // 2]
        left, right = stop.copy(), start.copy()
        left[axis] = right[axis] = middle
        yield from _swept(low, high, start, left)
        yield from _swept(low, high, right, stop)
        return

    # How many boxes hold each cell between the cuts: the running sum of their corners.
    counts = np.zeros([len(cut) for cut in cuts], np.int64)
    for corner in np.ndindex(*(2,) * len(cuts)):
        place = []
        for axis, is_end in enumerate(corner):
            corners = high if is_end else low
            place.append(np.searchsorted(cuts[axis], corners[:, axis]))
        np.add.at(counts, tuple(place), (-1) ** sum(corner))
    for axis in range(len(cuts)):
        np.cumsum(counts, axis=axis, out=counts)
    yield from _blocks(counts[(slice(-1),) * len(cuts)], cuts)


def _blocks(counts: Int64, cuts: Sequence[Int64]) -> Iterator[tuple[Box, int]]:
    """The cells whose count is not 1, joined to blocks of equal count."""
    left = counts != 1
    while left.any():
        first = tuple(map(int, np.unravel_index(left.argmax(), left.shape)))
        count = counts[first]
        alike = left & (counts == count)
        block = [slice(i, i + 1) for i in first]
        for axis in reversed(range(len(block))):  # as far as all cells are alike
            block[axis] = slice(block[axis].start, None)
            others = tuple(a for a in range(len(block)) if a != axis)
            line = alike[tuple(block)].all(axis=others)
            length = int(np.append(line, False).argmin())
            block[axis] = slice(block[axis].start, block[axis].start + length)
        left[tuple(block)] = False
        low, shape = [], []
        for cut, cells in zip(cuts, block, strict=True):
            low.append(int(cut[cells.start]))
            shape.append(int(cut[cells.stop]) - low[-1])
        yield Box(tuple(low), tuple(shape)), int(count)
