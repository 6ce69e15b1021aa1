"""The write pass of a rank: whole cells as zarr chunks, objects beside them, parts of shared cells in one file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from megackpt.backends.base import Source, run_in_threads
from megackpt.backends.object_files import encode_key, write_object
from megackpt.backends.zarr.array_metadata import refuse_unfit
from megackpt.backends.zarr.codecs import Octets, Packing, crc32c, encode_index
from megackpt.backends.zarr.grid import (
    Cells,
    Grid,
    cell_file,
    chunk_numbers,
    entry_name,
    fragments_file,
    grid_of,
    inner_of,
)
from megackpt.errors import BackendError
from megackpt.planning.box import Box, Boxes, Int64, cut
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    DIGEST_SIZE,
    SavePlan,
    ShardId,
    TensorEntry,
    WriteResult,
)
from megackpt.storage import Batch, FileWriter, Storage, digest_blocks

_ZEROS = memoryview(bytes(1 << 18))
_AT_FRONT = np.zeros(1, np.int64)


@dataclass(frozen=True, eq=False)
class CellResult:
    """Where one row was written: its chunks, all in one file. ``length`` counts the bytes of their own elements."""

    boxes: Boxes
    file: str
    start: Int64
    length: Int64
    digests: bytes


@dataclass(frozen=True, eq=False)
class Cell:
    """A whole cell (up to the end of the tensor), and its chunks: ``boxes``, runs of its elements in C order."""

    entry: TensorEntry
    box: Box
    shape: Grid
    inner: Grid
    boxes: Boxes

    @classmethod
    def of(cls, entry: TensorEntry, grid: Grid | None, box: Box) -> Cell:
        shape = grid_of(entry.meta.shape, grid)
        inner = inner_of(shape, entry.meta.itemsize)
        boxes = Boxes.of([box])
        if inner != shape and box.volume:
            extents = np.array([inner], np.int64)
            boxes = cut(boxes, extents, np.zeros_like(extents))[1]
        return cls(entry, box, shape, inner, boxes)

    @property
    def file(self) -> str:
        index = [
            o // extent for o, extent in zip(self.box.offset, self.shape, strict=True)
        ]
        return cell_file(encode_key(self.entry.key), index)

    @property
    def lengths(self) -> Int64:
        """Bytes of the own elements of each chunk."""
        return self.boxes.volume * self.entry.meta.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the elements of a chunk at full size, padding included."""
        return math.prod(self.inner) * self.entry.meta.itemsize

    def starts(self, checksum: bool) -> Int64:
        """Where each chunk begins in the file of an uncompressed cell."""
        return np.arange(len(self.boxes)) * (self.chunk_bytes + 4 * checksum)

    def __str__(self) -> str:
        return str(ShardId(self.entry.key, self.box))


def write_rows(
    root: Storage, plan: SavePlan, data: Source, packing: Packing
) -> WriteResult:
    """Write every row of a plan, durably."""
    refuse_unfit(plan.tensors, plan.grids)
    fragments = _fragment_rows(plan)
    singles = np.setdiff1d(np.arange(len(plan)), fragments).tolist()
    found: dict[int, CellResult] = {}

    def work(numbers: Iterator[int]) -> None:
        with root.batch() as batch:
            for number in numbers:
                if number == len(singles):
                    _write_fragments(batch, plan, data, fragments, found)
                else:
                    row = singles[number]
                    found[row] = _write_row(root, batch, plan, data, row, packing)

    run_in_threads(len(singles) + (len(fragments) > 0), work)
    return write_result([found[row] for row in range(len(plan))], plan.boxes.width)


def _write_row(
    root: Storage,
    batch: Batch,
    plan: SavePlan,
    data: Source,
    row: int,
    packing: Packing,
) -> CellResult:
    item, boxes = plan.row(row), plan.boxes.take([row])
    entry = plan.tensors[plan.tensor[row]]
    if item.meta.is_object:
        place, digests = write_object(
            root, entry, item.shard.box, data.blocks(row), batch
        )
        length = np.array([place.length], np.int64)
        return CellResult(boxes, place.file, _AT_FRONT, length, digests)
    if not item.nbytes:
        # An empty file in place of the first cell shows that the tensor was written.
        file = cell_file(entry_name(entry), (0,) * len(entry.meta.shape))
        with batch.create(file):
            pass
        return CellResult(boxes, file, _AT_FRONT, np.zeros(1, np.int64), b"")
    cell = Cell.of(entry, item.grid, item.shard.box)
    return write_cell(batch, cell, data.blocks(row), packing)


def write_result(rows: Sequence[CellResult], width: int) -> WriteResult:
    """The report of a rank that wrote these rows."""
    counts = [len(row.boxes) for row in rows]
    files: dict[str, int] = {}
    for row in rows:
        files.setdefault(row.file, len(files))
    numbers = np.array([files[row.file] for row in rows], np.int32)
    digests = np.frombuffer(b"".join(row.digests for row in rows), np.uint8)
    empty = np.zeros(0, np.int64)
    return WriteResult(
        np.repeat(np.arange(len(rows)), counts),
        Boxes.concat([Boxes.empty(width), *(row.boxes for row in rows)]),
        tuple(files),
        np.repeat(numbers, counts),
        np.concatenate([empty, *(row.start for row in rows)]),
        np.concatenate([empty, *(row.length for row in rows)]),
        digests.reshape(-1, DIGEST_SIZE),
    )


def _fragment_rows(plan: SavePlan) -> Int64:
    """The rows that are parts of cells. Raises BackendError for parts of several cells."""
    cells = Cells.of(plan.tensors, plan.grids, plan.tensor, plan.boxes)
    wrong = [str(plan.row(int(row)).shard) for row in np.flatnonzero(~cells.within)]
    if wrong:
        raise BackendError(
            f"zarr stores cells of a regular grid, and these are in several: {'; '.join(wrong)}. "
            "hint: plan with SavePolicy(gridded=True), or save as torch_dist"
        )
    return np.flatnonzero(~cells.whole).astype(np.int64)


def _write_fragments(
    batch: Batch,
    plan: SavePlan,
    data: Source,
    rows: Int64,
    found: dict[int, CellResult],
) -> None:
    name = fragments_file(plan.rank)
    with batch.create(name) as writer:
        for row in rows.tolist():
            start, digests = writer.position, []
            for block in data.blocks(row):
                digests.append(digest_blocks(block))
                writer.write([block])
            size = np.array([writer.position - start], np.int64)
            boxes, at = plan.boxes.take([row]), np.array([start])
            found[row] = CellResult(boxes, name, at, size, b"".join(digests))


def write_cell(
    batch: Batch, cell: Cell, blocks: Iterator[memoryview], packing: Packing
) -> CellResult:
    """Write the chunks of a cell in C order, each with its crc32c, and the index of a shard behind them.

    ``blocks``: the bytes of the cell in C order; a block is valid until the next one is taken. Raises
    BackendError if there are fewer bytes than elements.
    """
    stream, full, lengths = _Stream(blocks, cell), cell.chunk_bytes, cell.lengths
    digests, starts, stored = [], [], []
    with batch.create(cell.file) as writer:
        rows = zip(cell.boxes.shape.tolist(), lengths.tolist(), strict=True)
        for shape, size in rows:
            start = writer.position
            compressed = packing.compression is not None
            if compressed or (size != full and _has_gaps(shape, cell.inner)):
                chunk, found = _full_chunk(stream, tuple(shape), cell)
                _write_packed(writer, chunk, cell, packing)
            else:
                found = _write_raw(writer, stream, size, full, packing.checksum)
            digests.append(found)
            starts.append(start)
            stored.append(writer.position - start)
        columns = np.array(starts, np.int64), np.array(stored, np.int64)
        if cell.inner != cell.shape:
            count = math.prod(cell.shape) // math.prod(cell.inner)
            numbers = chunk_numbers(cell.boxes, cell.shape, cell.inner)
            writer.write([memoryview(encode_index(count, numbers, *columns))])
    return CellResult(cell.boxes, cell.file, columns[0], lengths, b"".join(digests))


def _has_gaps(shape: list[int], inner: Grid) -> bool:
    """Is there padding between the elements of a chunk with this part in the tensor?"""
    first = next((axis for axis, extent in enumerate(shape) if extent > 1), len(shape))
    return any(shape[axis] != inner[axis] for axis in range(first + 1, len(shape)))


def _write_raw(
    writer: FileWriter, stream: _Stream, size: int, full: int, checksum: bool
) -> bytes:
    """Write ``size`` bytes of the stream, zeros up to ``full``, and the crc32c. Returns the digests of the bytes.

    Each part is hashed and written while it is in the processor's cache.
    """
    digests, crc = [], 0
    for first in range(0, size, DIGEST_BLOCK):
        left = min(size - first, DIGEST_BLOCK)
        hasher = xxhash.xxh3_128()
        while left:
            part = stream.take(left)
            left -= len(part)
            hasher.update(part)
            views = [part]
            if checksum:
                crc = crc32c(part, crc)
            if not left and first + DIGEST_BLOCK >= size:
                # The end of the chunk goes into the same write as its last bytes.
                padding = full - size
                while padding:
                    zeros = _ZEROS[:padding]
                    padding -= len(zeros)
                    crc = crc32c(zeros, crc) if checksum else 0
                    views.append(zeros)
                if checksum:
                    views.append(memoryview(crc.to_bytes(4, "little")))
            writer.write(views)
        digests.append(hasher.digest())
    return b"".join(digests)


def _write_packed(
    writer: FileWriter, chunk: Octets, cell: Cell, packing: Packing
) -> None:
    """Write a chunk that is in memory at full size: compressed if asked for, and with its crc32c."""
    body = chunk.data
    if packing.compression is not None:
        body = memoryview(packing.compress(chunk, cell.entry.meta.itemsize))
    end = []
    if packing.checksum:
        end = [memoryview(crc32c(body).to_bytes(4, "little"))]
    writer.write([body, *end])


def _full_chunk(stream: _Stream, shape: Grid, cell: Cell) -> tuple[Octets, bytes]:
    """The bytes of a chunk at full size, and the digests of the elements that are in the tensor."""
    itemsize = cell.entry.meta.itemsize
    own = np.empty(math.prod(shape) * itemsize, np.uint8)
    place = own.data
    while place:
        part = stream.take(len(place))
        place[: len(part)] = part
        place = place[len(part) :]
    digests = digest_blocks(own.data)
    if shape == cell.inner:
        return own, digests
    values = np.zeros((*cell.inner, itemsize), np.uint8)
    values[tuple(map(slice, shape))] = own.reshape(*shape, itemsize)
    return values.reshape(-1), digests


class _Stream:
    """The bytes of a cell, taken one run after the other."""

    def __init__(self, blocks: Iterator[memoryview], cell: Cell) -> None:
        self._blocks = blocks
        self._cell = cell
        self._rest = memoryview(b"")

    def take(self, limit: int) -> memoryview:
        """The next bytes, at least one and at most ``limit``; valid until more are taken."""
        while not self._rest:
            more = next(self._blocks, None)
            if more is None:
                size = self._cell.box.volume * self._cell.entry.meta.itemsize
                raise BackendError(
                    f"{self._cell} should have {size} bytes, and fewer came from the model"
                )
            self._rest = more
        part, self._rest = self._rest[:limit], self._rest[limit:]
        return part
