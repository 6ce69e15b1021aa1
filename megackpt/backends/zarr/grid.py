"""The layout of an array: the cells of its grid, the chunks in a cell, and their files."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from megackpt.backends.object_files import encode_key, folder
from megackpt.backends.zarr.codecs import Packing
from megackpt.planning.box import (
    Box,
    Boxes,
    Int64,
    cut,
    distinct,
    largest_divisor,
    padded,
)
from megackpt.planning.manifest import (
    ITEMSIZE,
    Bool,
    Int32,
    TensorEntry,
    TensorMeta,
    itemsizes,
)

Grid = tuple[int, ...]

VERSION = 2
"""The version of this format that we write."""
MEGATRON = 1
"""The version that Megatron-Core wrote up to 0.15: read, not written."""
FOREIGN = 3
"""Arrays that other programs wrote, in version 2 or 3 of zarr: read, not written."""

ARRAY = "zarr.json"
ZARRAY = ".zarray"
"""The description of an array in version 2 of zarr, which Megatron's old format uses."""
DESCRIPTIONS = (ARRAY, ZARRAY)

SEPARATOR = "."
"""Between the numbers of a cell in the name of its file. Folders would cost as much as files."""

LARGEST_CHUNK = 4 << 20
"""Bytes of a chunk in a shard, at most: a larger cell is cut, if it can be cut evenly."""
SMALLEST_CHUNK = 1 << 19
"""A cell is not cut into chunks of fewer bytes."""


def entry_name(entry: TensorEntry) -> str:
    """The name in the root of everything that belongs to this entry."""
    if entry.meta.is_object:
        return folder(entry)
    return encode_key(entry.key)


def join(folder: str, name: str) -> str:
    """The name of a file in a folder ("": the root)."""
    return f"{folder}/{name}".removeprefix("/")


def fragments_file(rank: int) -> str:
    """The file of a rank's parts of shared cells. The name of an array does not begin like it."""
    return f"__fragments_{rank}"


def cell_of(shape: Grid, grid: Grid | None) -> Grid:
    """The shape of a cell: the plan's grid without empty extents, which zarr does not have."""
    return tuple(max(1, extent) for extent in (shape if grid is None else grid))


def inner_of(cell: Grid, itemsize: int) -> Grid:
    """The shape of the chunks of a cell that we write.

    They are slices along the outermost axis whose slices are small enough, so that a chunk is a run
    of the cell's bytes in C order. It is the cell itself if that is small, or if the axis has no
    useful divisor.
    """
    if math.prod(cell) * itemsize <= LARGEST_CHUNK:
        return cell
    axis = 0
    while math.prod(cell[axis + 1 :]) * itemsize > LARGEST_CHUNK:
        axis += 1
    slice_bytes = math.prod(cell[axis + 1 :]) * itemsize
    step = largest_divisor(cell[axis], LARGEST_CHUNK // slice_bytes)
    if step * slice_bytes < SMALLEST_CHUNK:
        return cell
    return (*(1,) * axis, step, *cell[axis + 1 :])


@dataclass(frozen=True)
class ArrayLayout:
    """An array as its description has it.

    Attributes:
        cell: the shape of a cell of the grid, which is one file.
        inner: the shape of the chunks in a cell; each has C order and is little-endian.
        sharded: whether the file of a cell is a shard: chunks, and then their index. Otherwise it
            is a single chunk.
        index_form: of the index of a shard. Is it in front of the chunks? Does a crc32c end it?
        prefix, separator: of the names of files.
        key: the tensor's key, if the description has it.
        description: the name of the file that describes the array.
        document: of an array that consists of one such chunk, as JSON, for a library that decodes
            the chunk, or a missing chunk to the fill value.
    """

    shape: Grid
    dtype: str
    cell: Grid
    inner: Grid
    sharded: bool
    packing: Packing
    prefix: str = "c"
    separator: str = SEPARATOR
    key: str | None = None
    index_form: tuple[bool, bool] = (False, True)
    description: str = ARRAY
    document: str = field(default="", compare=False)

    @classmethod
    @lru_cache(maxsize=4096)
    def planned(
        cls, meta: TensorMeta, grid: Grid | None, packing: Packing
    ) -> ArrayLayout:
        """The layout in which we write a tensor."""
        cell = cell_of(meta.shape, grid)
        inner = inner_of(cell, meta.itemsize)
        return cls(meta.shape, meta.dtype, cell, inner, inner != cell, packing)

    @property
    def counts(self) -> Grid:
        """Cells along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.cell, strict=True))

    @property
    def chunks_in_a_cell(self) -> int:
        return math.prod(self.cell) // math.prod(self.inner)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the elements of one chunk, padding included."""
        return math.prod(self.inner) * ITEMSIZE[self.dtype]

    @property
    def own_bytes(self) -> int:
        """Bytes of a chunk that can belong to the tensor. The rest is padding."""
        return math.prod(map(min, self.inner, self.shape)) * ITEMSIZE[self.dtype]

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of each stored chunk. None: compressed chunks differ."""
        if self.packing.compressor is not None:
            return None
        return self.chunk_bytes + 4 * self.packing.checksum

    def box(self, index: Grid) -> Box:
        """The region of the tensor that a cell holds."""
        return self.region(Box(index, (1,) * len(index)))

    def region(self, cells: Box) -> Box:
        """The region of the tensor that a box of cells holds."""
        offset = tuple(map(operator.mul, cells.offset, self.cell))
        stop = map(min, map(operator.mul, cells.stop, self.cell), self.shape)
        return Box(offset, tuple(map(operator.sub, stop, offset)))

    def index(self, box: Box) -> Grid:
        """The numbers of the cell that this box begins in."""
        pairs = zip(box.offset, self.cell, strict=True)
        return tuple(start // extent for start, extent in pairs)

    def file(self, index: Grid) -> str:
        """The file of a cell, relative to the folder of the array."""
        numbers = [str(i) for i in index]
        if self.prefix:
            numbers.insert(0, self.prefix)
        return self.separator.join(numbers) or "0"

    def index_in(self, file: str) -> Grid | None:
        """The index of the cell in this file; None if the file is no cell's."""
        numbers = file.split(self.separator)
        if self.prefix:
            del numbers[0]
        index = tuple(int(text) for text in numbers if text.isdecimal())
        index = index[: len(self.shape)]
        within = all(map(operator.lt, index, self.counts))
        if len(index) == len(self.shape) and within and self.file(index) == file:
            return index
        return None

    def chunks(self, box: Box) -> Boxes:
        """The chunks of the cell with this box, in C order, without chunks beyond the tensor."""
        extents = np.array([self.inner], np.int64)
        return cut(Boxes.of([box]), extents, np.zeros_like(extents))[1]

    def numbers(self, chunks: Boxes) -> Int64:
        """The positions of these chunks in the index of their shard."""
        numbers = np.zeros(len(chunks), np.int64)
        for axis, (extent, step) in enumerate(zip(self.cell, self.inner, strict=True)):
            place = chunks.offset[:, axis] % extent // step
            numbers = numbers * (extent // step) + place
        return numbers


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Boxes in the grids of their tensors, as columns of shape (n, width).

    The box of an object is the object's cell.
    """

    grid: Int64
    shape: Int64
    index: Int64
    is_object: Bool
    whole: Bool
    """The box is a whole cell (up to the end of the tensor), or is empty."""
    within: Bool
    """The box is in a single cell, or is empty."""

    @classmethod
    def of(
        cls,
        tensors: Sequence[TensorEntry],
        grids: Sequence[Grid | None],
        tensor: Int32,
        boxes: Boxes,
    ) -> Cells:
        # A plan may use a few tensors of a large table.
        used, number = distinct(tensor, len(tensors))
        present = [tensors[t] for t in used.tolist()]
        extents = [cell_of(tensors[t].meta.shape, grids[t]) for t in used.tolist()]
        cells = padded(extents, 1, boxes.width)
        shapes = padded([entry.meta.shape for entry in present], 1, boxes.width)
        is_object = (itemsizes(present) == 0)[number]
        grid = np.where(is_object[:, None], boxes.shape, cells[number])
        index = boxes.offset // np.maximum(grid, 1)
        end = np.minimum(index * grid + grid, shapes[number])
        whole = ((index * grid == boxes.offset) & (boxes.stop == end)).all(axis=1)
        within = (boxes.stop <= index * grid + grid).all(axis=1)
        # Parts of a tensor without elements need not be assembled.
        alone = is_object | (boxes.shape == 0).any(axis=1)
        return cls(grid, boxes.shape, index, is_object, whole | alone, within | alone)

    @property
    def prefix(self) -> Bool:
        """True if the bytes of a cell, or of a chunk in it, are in the file without gaps.

        Chunks at the end of a tensor are padded to full size. Padding along an axis separates the
        bytes if the box has an extent along an earlier axis. Chunks in a shard have no extent along
        the axes before the one that they are cut along, and all of the cell's after it.
        """
        extended = self.shape > 1
        earlier = np.cumsum(extended, axis=1) - extended > 0
        gaps: Bool = ((self.grid != self.shape) & earlier).any(axis=1)
        return ~gaps
