"""Exact geometry of tilings: do boxes cover each element of their tensors once?

The common cases, regular grids and slabs along one axis, are decided for all tensors at once, in
columns. Other tensors are swept: the boxes' edges make a grid of cells, and each cell counts the
boxes that hold it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megackpt.planning.box import Box, Boxes, Int64, regular_grids

CELLS = 1 << 18
"""Cells of the counting grid held at a time. Larger regions are halved first."""
_EXACT = float(1 << 60)  # sums of volumes from here on may not fit in 64 bits
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
        offset = boxes.offset[:, axis]
        inside &= (offset >= 0) & (
            offset + boxes.shape[:, axis] <= np.repeat(whole[:, axis], counts)
        )
    exact = np.logical_and.reduceat(inside, bounds[:-1])
    # In bounds and of the right volume in sum, boxes with a hole also overlap.
    exact &= np.add.reduceat(boxes.volume, bounds[:-1]) == np.prod(whole, axis=1)
    # Large volumes, found in floating point, may overflow: Python's integers sum them again.
    large = exact & (np.prod(whole.astype(np.float64), axis=1) >= _EXACT)
    for row in np.flatnonzero(large).tolist():
        shapes = boxes.shape[bounds[row] : bounds[row + 1]].tolist()
        exact[row] = sum(map(math.prod, shapes)) == math.prod(whole[row].tolist())
    _, regular = regular_grids(boxes, bounds, whole)
    undecided = exact & ~regular
    if undecided.any():
        undecided &= ~_slabs(boxes, bounds, whole, undecided)
    for run in np.flatnonzero(undecided):
        part = boxes.take(slice(bounds[run], bounds[run + 1]))
        exact[run] = next(miscounted(part, whole[run].tolist()), None) is None
    return exact


def _slabs(
    boxes: Boxes, bounds: Int64, whole: Int64, wanted: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Which of the wanted runs are seamless rows of slabs, cut along a single axis?"""
    seamless = np.zeros(len(whole), np.bool_)
    number = np.repeat(np.arange(len(whole)), np.diff(bounds))
    cut = np.logical_or.reduceat(boxes.shape != whole[number], bounds[:-1], axis=0)
    wanted = wanted & (cut.sum(axis=1) == 1)
    rows = np.flatnonzero(wanted[number])
    if not len(rows):
        return seamless
    number, axis = number[rows], cut.argmax(axis=1)[number[rows]]
    start = boxes.offset[rows, axis]
    order = np.lexsort([start, number])
    number, start, stop = (
        number[order],
        start[order],
        (start + boxes.shape[rows, axis])[order],
    )
    first = np.concatenate([[True], number[1:] != number[:-1]])
    meets = start == np.where(first, 0, np.roll(stop, 1))
    # In bounds and of full volume, slabs that meet one another also end at the end.
    seamless[number[first]] = np.logical_and.reduceat(meets, np.flatnonzero(first))
    return seamless


def miscounted(boxes: Boxes, whole: Sequence[int]) -> Iterator[tuple[Box, int]]:
    """The regions of a tensor that no box or several boxes cover, with the number of boxes.

    ``whole`` is the global shape. Regions are disjoint and found one by one. Parts of boxes
    outside the tensor are ignored. The cost is about boxes x 64 + CELLS for each CELLS of the
    grid.
    """
    if 0 in whole:
        return
    if not whole:  # one element, which every box holds
        if len(boxes) != 1:
            yield Box((), ()), len(boxes)
        return
    ndim = len(whole)
    wide = boxes.widened(ndim)
    low, high = wide.offset[:, :ndim], wide.stop[:, :ndim]
    yield from _swept(low, high, np.zeros(ndim, np.int64), np.array(whole, np.int64))


def _swept(
    low: Int64, high: Int64, start: Int64, stop: Int64
) -> Iterator[tuple[Box, int]]:
    low, high = np.maximum(low, start), np.minimum(high, stop)
    there = (low < high).all(axis=1)
    low, high = low[there], high[there]
    cuts = [
        np.unique(np.concatenate([low[:, a], high[:, a], [start[a], stop[a]]]))
        for a in range(len(start))
    ]
    lengths = [len(c) - 1 for c in cuts]
    if max(lengths) == 1:  # every box that is there holds all of the region
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
    counts = _counts(low, high, cuts)
    yield from _blocks(counts, cuts)


def _counts(low: Int64, high: Int64, cuts: list[Int64]) -> Int64:
    """How many boxes hold each cell between the cuts: the running sum of their corners."""
    ndim = len(cuts)
    ends = [
        (np.searchsorted(cuts[a], low[:, a]), np.searchsorted(cuts[a], high[:, a]))
        for a in range(ndim)
    ]
    change = np.zeros([len(c) for c in cuts], np.int64)
    for corner in np.ndindex(*(2,) * ndim):
        at = tuple(ends[a][side] for a, side in enumerate(corner))
        np.add.at(change, at, -1 if sum(corner) % 2 else 1)
    for axis in range(ndim):
        np.cumsum(change, axis=axis, out=change)
    return change[tuple(slice(0, -1) for _ in cuts)]


def _blocks(counts: Int64, cuts: list[Int64]) -> Iterator[tuple[Box, int]]:
    """The cells whose count is not 1, joined to blocks of equal count."""
    left = np.ascontiguousarray(counts != 1)
    flat = left.ravel()
    at = 0
    while at < flat.size:
        at += int(flat[at:].argmax())
        if not flat[at]:
            return
        first = tuple(int(i) for i in np.unravel_index(at, counts.shape))
        count = int(counts[first])
        alike = left & (counts == count)
        last = [i + 1 for i in first]
        for axis in reversed(range(len(first))):
            block = tuple(slice(i, e) for i, e in zip(first, last, strict=True))
            while last[axis] < counts.shape[axis]:
                layer = (
                    *block[:axis],
                    slice(last[axis], last[axis] + 1),
                    *block[axis + 1 :],
                )
                if not alike[layer].all():
                    break
                last[axis] += 1
            block = tuple(slice(i, e) for i, e in zip(first, last, strict=True))
        left[tuple(slice(i, e) for i, e in zip(first, last, strict=True))] = False
        low = tuple(int(c[i]) for c, i in zip(cuts, first, strict=True))
        high = tuple(int(c[i]) for c, i in zip(cuts, last, strict=True))
        yield Box(low, tuple(h - s for h, s in zip(high, low, strict=True))), count
