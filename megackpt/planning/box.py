"""Boxes: axis-aligned regions in a tensor's global coordinates.

``Box`` is a single region, ``Boxes`` is a column of regions (two int64 arrays). Boxes of tensors
with different numbers of dimensions share a column: missing axes are padded with offset 0 and
extent 1, which changes neither volumes nor intersections.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The region ``[offset, offset + shape)``, in elements, in global coordinates.

    A 0-dimensional box holds one element; a box with an extent of 0 is empty.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise ValueError(
                f"offset {self.offset} and shape {self.shape} differ in dimensions"
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common region, or None where the two share no element."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(
            min(a, b) - o for a, b, o in zip(self.stop, other.stop, offset, strict=True)
        )
        if any(s <= 0 for s in shape):
            return None
        return Box(offset, shape)

    def contains(self, other: Box) -> bool:
        return all(
            a <= b and b + t <= a + s
            for a, s, b, t in zip(
                self.offset, self.shape, other.offset, other.shape, strict=True
            )
        )

    def relative_to(self, outer: Box) -> Box:
        """The same region in coordinates local to ``outer``."""
        return Box(
            tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)),
            self.shape,
        )

    def slices(self) -> tuple[slice, ...]:
        return tuple(
            slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True)
        )

    def runs(self, start: int, stop: int) -> Iterator[Box]:
        """Boxes whose elements, joined, are elements [start, stop) of this box in C order."""
        if not self.shape:
            if start < stop:
                yield self
            return
        # A row is the part that one index of the first axis selects.
        row = Box(self.offset[1:], self.shape[1:])
        while start < stop:
            number, skipped = divmod(start, row.volume)
            first = self.offset[0] + number
            count = (stop - start) // row.volume
            if skipped == 0 and count > 0:
                yield Box((first, *row.offset), (count, *row.shape))
                start += count * row.volume
            else:
                end = min(stop - start + skipped, row.volume)
                for box in row.runs(skipped, end):
                    yield Box((first, *box.offset), (1, *box.shape))
                start += end - skipped

    def __str__(self) -> str:
        ranges = [f"{o}:{e}" for o, e in zip(self.offset, self.stop, strict=True)]
        return f"[{', '.join(ranges)}]"


def padded(rows: Sequence[tuple[int, ...]], fill: int, width: int = 0) -> Int64:
    """Rows of different lengths as an array (n, ``width`` or more), with ``fill`` behind them."""
    width = max([width, *map(len, rows)])
    pads = [(fill,) * (width - length) for length in range(width + 1)]
    flat = [row + pads[len(row)] for row in rows]
    return np.array(flat, np.int64).reshape(len(rows), width)


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """A column of boxes: ``offset`` and ``shape`` are int64 arrays of shape (n, width)."""

    offset: Int64
    shape: Int64

    @classmethod
    def of(cls, boxes: Iterable[Box], width: int = 0) -> Boxes:
        rows = list(boxes)
        offset = padded([box.offset for box in rows], 0, width)
        return cls(offset, padded([box.shape for box in rows], 1, width))

    @classmethod
    def concat(cls, parts: Sequence[Boxes]) -> Boxes:
        widths = {part.width for part in parts}
        if len(widths) == 1:
            return cls(
                np.concatenate([part.offset for part in parts]),
                np.concatenate([part.shape for part in parts]),
            )
        size = sum(map(len, parts)), max(widths, default=0)
        joined = cls(np.zeros(size, np.int64), np.ones(size, np.int64))
        start = 0
        for part in parts:
            rows = slice(start, start + len(part))
            joined.offset[rows, : part.width] = part.offset
            joined.shape[rows, : part.width] = part.shape
            start += len(part)
        return joined

    def __len__(self) -> int:
        return len(self.offset)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as 4-byte numbers where these are enough: most of a rank's message is boxes."""
        both = np.stack([self.offset, self.shape])
        small = both.astype(np.int32)
        return _received, (small if (small == both).all() else both,)

    @property
    def width(self) -> int:
        return int(self.offset.shape[1])

    @property
    def stop(self) -> Int64:
        return self.offset + self.shape

    @property
    def volume(self) -> Int64:
        volume = np.ones(len(self), np.int64)
        for axis in range(self.width):  # long columns are faster than many short rows
            volume *= self.shape[:, axis]
        return volume

    def widened(self, width: int) -> Boxes:
        """The same boxes padded to at least ``width`` axes."""
        extra = width - self.width
        if extra <= 0:
            return self
        pad = ((0, 0), (0, extra))
        return Boxes(
            np.pad(self.offset, pad, constant_values=0),
            np.pad(self.shape, pad, constant_values=1),
        )

    def take(self, rows: Any) -> Boxes:
        """The boxes of these rows (an index array, mask or slice)."""
        if isinstance(rows, np.ndarray) and rows.dtype != np.bool_:
            return Boxes(self.offset.take(rows, axis=0), self.shape.take(rows, axis=0))
        return Boxes(self.offset[rows], self.shape[rows])

    def row(self, i: int, ndim: int) -> Box:
        """Row ``i`` as a Box of a tensor with ``ndim`` dimensions."""
        return Box(
            tuple(self.offset[i, :ndim].tolist()), tuple(self.shape[i, :ndim].tolist())
        )


def _received(both: NDArray[Any]) -> Boxes:
    offset, shape = both.astype(np.int64)
    return Boxes(offset, shape)


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Groups of rows: group ``g`` is ``order[bounds[g] : bounds[g + 1]]``, ascending."""

    order: Int64
    bounds: Int64

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def first(self) -> Int64:
        """The lowest row of each group."""
        return self.order[self.bounds[:-1]]

    @property
    def number(self) -> Int64:
        """The number of the group of each entry of ``order``."""
        return np.repeat(np.arange(len(self)), np.diff(self.bounds))

    def rows(self, group: int) -> Int64:
        return self.order[self.bounds[group] : self.bounds[group + 1]]


def distinct(column: NDArray[Any], count: int) -> tuple[Int64, Int64]:
    """The distinct numbers in a column, ascending, and for each element its number among these.

    Like ``np.unique``, but without a sort: all numbers are below ``count``.
    """
    is_there = np.zeros(count, np.bool_)
    is_there[column] = True
    place: Int64 = np.cumsum(is_there, dtype=np.int64) - 1
    return np.flatnonzero(is_there), place[column]


def runs(column: NDArray[Any]) -> Int64:
    """Bounds (n + 1 row numbers) of the n runs of equal values in a column."""
    if not len(column):
        return np.zeros(1, np.int64)
    inner = np.flatnonzero(column[1:] != column[:-1]) + 1
    return np.concatenate([[0], inner, [len(column)]]).astype(np.int64)


def c_strides(shape: Int64) -> Int64:
    """For rows of extents the number of elements from one index of an axis to the next."""
    strides = np.ones_like(shape)
    strides[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    return strides


def expand_ranges(starts: Int64, counts: Int64) -> tuple[Int64, Int64]:
    """All numbers of the ranges [start, start + count), and before them the rows of their ranges.

    Both have ``counts.sum()`` entries, range by range.
    """
    row = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return row, np.arange(len(row)) + (starts - before)[row]


def group(column: NDArray[Any]) -> Groups:
    """The rows with the same value, in order of values."""
    order = np.argsort(column, kind="stable")
    return Groups(order, runs(column[order]))


def group_equal(owner: NDArray[Any], boxes: Boxes) -> Groups:
    """The rows with the same box of the same owner (a small number >= 0), in order of owners.

    Sorts one 63-bit key a row instead of all its columns: the owner's number, then a hash of the
    box. If different boxes have equal keys, which is unlikely, the columns are sorted instead.
    """
    columns = [owner, *boxes.offset.T, *boxes.shape.T]
    key = _sorting_key(owner, columns[1:])
    order = np.argsort(key)
    bounds = runs(key[order])
    if len(bounds) > len(order):  # all differ
        return Groups(order, bounds)
    number = Groups(order, bounds).number
    # The fast sort is not stable: sorted once more by (group, row).
    order = np.sort((number << 32) | order) & 0xFFFFFFFF
    first = order[bounds[:-1]][number]
    if any((column[order] != column[first]).any() for column in columns):
        rows = np.stack(columns, axis=1)
        return group(np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1))
    return Groups(order, bounds)


def _sorting_key(owner: NDArray[Any], columns: Sequence[Int64]) -> Int64:
    bits = max(1, int(owner.max(initial=0)).bit_length())
    mixed = np.zeros(len(owner), np.uint64)
    weight = 0x9E3779B97F4A7C15
    for column in columns:
        mixed += column.astype(np.uint64) * np.uint64(weight)
        # Odd, and independent enough: the sums' high bits are used.
        weight = weight * 0xD1342543DE82EF95 % 2**64
    high = owner.astype(np.uint64) << np.uint64(63 - bits)
    return (high | (mixed >> np.uint64(1 + bits))).astype(np.int64)


def extents_within(shape: Int64, budget: Int64) -> Int64:
    """The largest pieces of these shapes, cut along leading axes, of ``budget`` elements."""
    pieces = np.empty_like(shape)
    for axis in reversed(range(shape.shape[1])):
        extent = np.maximum(1, shape[:, axis])
        pieces[:, axis] = np.minimum(extent, budget)
        budget = np.where(extent <= budget, budget // extent, 1)
    return pieces


def cut(boxes: Boxes, pieces: Int64, origin: Int64) -> tuple[Int64, Boxes]:
    """The pieces into which a grid cuts each box, in C order, and for each the row of its box.

    ``pieces`` and ``origin``, (n, width), are for each box the extents of the grid's cells and
    a corner of a cell. A box without elements has one piece.
    """
    lead = (boxes.offset - origin) % pieces
    counts = np.maximum(1, -(-(lead + boxes.shape) // pieces))
    counts[(boxes.shape == 0).any(axis=1)] = 1
    totals = np.prod(counts, axis=1, dtype=np.int64)
    row, place = expand_ranges(np.zeros_like(totals), totals)
    offset = boxes.offset[row]
    shape = boxes.shape[row]
    for axis in reversed(range(boxes.width)):
        place, number = np.divmod(place, counts[row, axis])
        start = number * pieces[row, axis] - lead[row, axis]
        stop = np.minimum(start + pieces[row, axis], shape[:, axis])
        start = np.maximum(start, 0)
        offset[:, axis] += start
        shape[:, axis] = stop - start
    return row, Boxes(offset, shape)


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of a positive number that is at most ``limit`` (at least 1).

    Takes at most ``limit`` steps, because the number may come from a file.
    """
    root = math.isqrt(number)
    # Divisors above the root, the largest first: each is the number by a small factor.
    for factor in range(max(1, -(-number // limit)), root + 1):
        if number % factor == 0:
            return number // factor
    divisor = min(limit, root)
    while number % divisor:
        divisor -= 1
    return divisor


def regular_grids(
    boxes: Boxes, bounds: Int64, whole: Int64
) -> tuple[Int64, NDArray[np.bool_]]:
    """For each run of non-empty boxes: the cell of their grid, and whether they form a grid.

    ``bounds`` are n + 1 row numbers (see ``runs``), ``whole`` the n global shapes, (n, width).
    The cell is the largest extent on each axis. The grid is regular if every box is one cell,
    which only the end of the tensor may cut off.
    """
    if len(bounds) < 2:
        return np.ones((0, boxes.width), np.int64), np.zeros(0, np.bool_)
    counts = np.diff(bounds)
    cells = np.ones_like(whole)
    fits = np.ones(len(boxes), np.bool_)
    for axis in range(boxes.width):
        offset = boxes.offset[:, axis]
        shape = boxes.shape[:, axis]
        cells[:, axis] = np.maximum.reduceat(shape, bounds[:-1])
        cell = np.repeat(cells[:, axis], counts)
        rest = np.repeat(whole[:, axis], counts) - offset
        fits &= (offset % cell == 0) & (shape == np.minimum(cell, rest))
    return cells, np.logical_and.reduceat(fits, bounds[:-1])
