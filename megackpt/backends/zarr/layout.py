"""How an array is laid out: its grid, its cells, the inner chunks within them. Knows no files' content."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megackpt.planning.box import Box, Boxes, Int64, largest_divisor
from megackpt.planning.manifest import ITEMSIZE, Bool, Int32, TensorEntry

Grid = tuple[int, ...]

LARGEST_CHUNK, SMALLEST_CHUNK = 4 << 20, 1 << 19
"""Bytes of an inner chunk: a larger cell is cut into such ones, if it can be cut evenly."""


def grid_of(shape: Grid, grid: Grid | None) -> Grid:
    """The cell shape that is written down: that of the plan, without empty extents (zarr knows none)."""
    return tuple(max(1, extent) for extent in (shape if grid is None else grid))


def inner_of(cell: Grid, itemsize: int) -> Grid:
    """The inner chunk of cells that we write: slices along the outermost axis that gives slices small enough.

    So it is a run of the cell's bytes in C order. The cell itself, where it is small or has no useful divisor.
    """
    if math.prod(cell) * itemsize <= LARGEST_CHUNK:
        return cell
    axis = next(
        i
        for i in range(len(cell))
        if math.prod(cell[i + 1 :]) * itemsize <= LARGEST_CHUNK
    )
    below = math.prod(cell[axis + 1 :]) * itemsize
    step = largest_divisor(cell[axis], LARGEST_CHUNK // below)
    return (
        (*(1,) * axis, step, *cell[axis + 1 :])
        if step * below >= SMALLEST_CHUNK
        else cell
    )


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """An array as its metadata describe it.

    ``cell`` is the shape of a grid cell, which is a file; ``inner`` that of the chunks that it is a shard of, or
    the cell's own. ``raw``: a chunk's bytes are its elements, little-endian, in C order, and nothing but their
    crc32c (where ``checksum``) behind them. ``blosc``: they begin with blosc's header. ``index``: where the index
    of a shard is ("start", "end"), and whether a crc32c follows it. ``prefix`` and ``separator`` make the name of
    a cell's file of the cell's numbers. ``spec`` is what tensorstore has to be told.
    """

    shape: Grid
    dtype: str
    cell: Grid
    spec: dict[str, Any]
    raw: bool
    prefix: str
    separator: str
    key: str | None = None
    inner: Grid = ()
    checksum: bool = False
    blosc: bool = False
    index: tuple[str, bool] | None = None

    @property
    def counts(self) -> Grid:
        """Cells along each axis."""
        return tuple(
            -(-extent // cell)
            for extent, cell in zip(self.shape, self.cell, strict=True)
        )

    @property
    def chunks_in_a_cell(self) -> int:
        return math.prod(
            extent // step for extent, step in zip(self.cell, self.inner, strict=True)
        )

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the elements of one chunk, padding included."""
        return math.prod(self.inner) * ITEMSIZE[self.dtype]

    @property
    def own_bytes(self) -> int:
        """Bytes of a chunk that can be the tensor's: where chunks are larger than it, the rest is padding."""
        extents = (
            min(step, extent)
            for step, extent in zip(self.inner, self.shape, strict=True)
        )
        return math.prod(extents) * ITEMSIZE[self.dtype]

    @property
    def stored_bytes(self) -> int | None:
        """Bytes that each chunk takes; None where this differs."""
        return self.chunk_bytes + 4 * self.checksum if self.raw else None

    def indices(self) -> Iterator[Grid]:
        """The numbers of all cells, one after the other: there may be absurdly many in a file that lies."""
        counts = self.counts
        for number in range(math.prod(counts)):
            index = []
            for count in reversed(counts):
                number, i = divmod(number, count)
                index.append(i)
            yield tuple(reversed(index))

    def box(self, index: Grid) -> Box:
        """What a cell holds of the tensor."""
        offset = tuple(i * extent for i, extent in zip(index, self.cell, strict=True))
        ends = zip(self.cell, self.shape, offset, strict=True)
        return Box(
            offset, tuple(min(extent, end - start) for extent, end, start in ends)
        )

    def file(self, index: Sequence[int]) -> str:
        """The chunk key of a cell, relative to the array's folder."""
        numbers = [str(i) for i in index]
        if self.prefix:
            return self.separator.join([self.prefix, *numbers])
        return self.separator.join(numbers) or "0"


def chunk_numbers(boxes: Boxes, cell: Grid, inner: Grid) -> Int64:
    """Which chunks of their shard these boxes are: positions in the shard's index."""
    numbers = np.zeros(len(boxes), np.int64)
    for axis, (extent, step) in enumerate(zip(cell, inner, strict=True)):
        numbers = numbers * (extent // step) + boxes.offset[:, axis] % extent // step
    return numbers


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Boxes seen as cells of their tensors' grids: columns of shape (n, width).

    An object's box is its own cell.
    """

    grid: Int64
    shape: Int64
    index: Int64
    is_object: Bool
    whole: Bool
    """The box starts at a border of the grid and is the whole cell (up to the end of the tensor), or is empty."""
    within: Bool
    """The box lies in a single cell, or is empty."""

    @classmethod
    def of(
        cls,
        tensors: Sequence[TensorEntry],
        grids: Sequence[Grid | None],
        tensor: Int32,
        boxes: Boxes,
    ) -> Cells:
        width = boxes.width
        used, number = np.unique(
            tensor, return_inverse=True
        )  # of a large table a plan may use a few
        shapes, cells = (
            np.ones((len(used), width), np.int64),
            np.ones((len(used), width), np.int64),
        )
        is_object = np.zeros(len(used), np.bool_)
        for i, t in enumerate(used.tolist()):
            meta = tensors[t].meta
            shapes[i, : len(meta.shape)] = meta.shape
            cells[i, : len(meta.shape)] = grid_of(meta.shape, grids[t])
            is_object[i] = meta.is_object
        is_object = is_object[number]
        grid = np.where(is_object[:, None], boxes.shape, cells[number])
        index = boxes.offset // np.maximum(grid, 1)
        end = np.minimum(index * grid + grid, shapes[number])
        whole = ((index * grid == boxes.offset) & (boxes.stop == end)).all(axis=1)
        within = (boxes.stop <= index * grid + grid).all(axis=1)
        # Of a tensor without elements any piece will do: there is nothing to put together.
        alone = is_object | (boxes.shape == 0).any(axis=1)
        return cls(grid, boxes.shape, index, is_object, whole | alone, within | alone)

    @property
    def prefix(self) -> Bool:
        """True where the bytes of a cell, or of an inner chunk of it, stand in its file without gaps.

        Chunks at the end of a tensor are stored at full size: padding along an axis parts the bytes if the box
        has an extent along an earlier one. (Inner chunks have none along the axes before the one they cut, and
        all of the cell's along those behind.)
        """
        extended = (
            np.cumsum(self.shape > 1, axis=1) - (self.shape > 1) > 0
        )  # along an earlier axis
        gaps: Bool = ((self.grid != self.shape) & extended).any(axis=1)
        return ~gaps
