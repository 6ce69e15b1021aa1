"""One whole cell of an array, as a file: where its chunks lie, and their bytes, ours or (compressed) tensorstore's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import google_crc32c
import numpy as np
import xxhash

from megackpt.backends.object_files import encode_key
from megackpt.backends.zarr.documents import Packing
from megackpt.backends.zarr.layout import Grid, chunk_numbers, grid_of, inner_of
from megackpt.backends.zarr.names import cell_file
from megackpt.backends.zarr.stores import (
    ABSENT,
    context,
    latest,
    meaning,
    shard_index,
    to_write,
)
from megackpt.errors import BackendError, StorageError
from megackpt.planning.box import Box, Boxes, Int64, cut
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    DIGEST_SIZE,
    Digests,
    ShardId,
    TensorEntry,
)
from megackpt.storage import Batch, FileWriter, Storage, digest_blocks

_ZEROS = memoryview(bytes(1 << 18))


@dataclass(frozen=True, eq=False)
class Written:
    """Where one row landed: its pieces, all in one file. ``length`` counts the bytes of the pieces' own elements."""

    boxes: Boxes
    file: str
    start: Int64
    length: Int64
    digests: bytes

    @property
    def table(self) -> Digests:
        return np.frombuffer(self.digests, np.uint8).reshape(-1, DIGEST_SIZE)


@dataclass(frozen=True, eq=False)
class Cell:
    """A whole cell (up to the end of the tensor), cut into chunks: each a run of the elements of ``box`` in C order."""

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
            offset // extent
            for offset, extent in zip(self.box.offset, self.shape, strict=True)
        ]
        return cell_file(encode_key(self.entry.key), index)

    @property
    def lengths(self) -> Int64:
        """Bytes of the own elements of each chunk."""
        return self.boxes.volume * self.entry.meta.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the elements of a chunk as it is stored: at full size."""
        return math.prod(self.inner) * self.entry.meta.itemsize

    def starts(self, checksum: bool) -> Int64:
        """Where each chunk begins in the file that ``write_raw`` writes."""
        return np.arange(len(self.boxes)) * (self.chunk_bytes + 4 * checksum)

    @property
    def is_shard(self) -> bool:
        return self.inner != self.shape

    @property
    def count(self) -> int:
        """The chunks that a shard has room for."""
        return math.prod(self.shape) // math.prod(self.inner)

    @property
    def numbers(self) -> Int64:
        """Positions of the chunks in the shard's index."""
        return chunk_numbers(self.boxes, self.shape, self.inner)

    def __str__(self) -> str:
        return str(ShardId(self.entry.key, self.box))


CellWriter = Callable[[Cell, Iterator[memoryview]], Written]
"""Writes a cell whose bytes, in C order, come in these pieces; a piece is valid until the next one is taken."""


def cell_writer(root: Storage, batch: Batch, packing: Packing) -> CellWriter:
    """How one thread writes cells, one after the other. Compressed ones are not of the batch: tensorstore sees to
    their files, and to their names in their folders.
    """
    if packing.compression is None:
        return lambda cell, octets: write_raw(batch, cell, octets, packing.checksum)
    return _Compressing(root, packing).write


def write_raw(
    batch: Batch, cell: Cell, octets: Iterator[memoryview], checksum: bool
) -> Written:
    """The chunks in C order, each followed by its crc32c; then, in a shard, the index. As zarr's specification has it.

    Raises BackendError where there are fewer bytes than elements.
    """
    stream, full, lengths = _Stream(octets, cell), cell.chunk_bytes, cell.lengths
    digests = []
    with batch.create(cell.file) as writer:
        for shape, size in zip(
            cell.boxes.shape.tolist(), lengths.tolist(), strict=True
        ):
            if size != full and _has_gaps(shape, cell.inner):
                chunk, found = _padded(stream, tuple(shape), cell)
                _write_chunk(writer, chunk, full, full, checksum)
                digests.append(found)
            else:
                digests.append(_write_chunk(writer, stream, size, full, checksum))
        starts = cell.starts(checksum)
        if cell.is_shard:
            writer.write([memoryview(_index(cell, starts, full + 4 * checksum))])
    return Written(cell.boxes, cell.file, starts, lengths, b"".join(digests))


def _has_gaps(shape: list[int], inner: Grid) -> bool:
    """Does padding stand between the elements of a chunk, of which this much lies within the tensor?"""
    first = next((axis for axis, extent in enumerate(shape) if extent > 1), len(shape))
    return any(shape[axis] != inner[axis] for axis in range(first + 1, len(shape)))


def _write_chunk(
    writer: FileWriter, stream: _Stream, size: int, full: int, checksum: bool
) -> bytes:
    """``size`` bytes of the stream, zeros up to ``full``, the crc32c of all. Returns the digests of the former."""
    digests, crc = [], 0
    for first in range(0, size, DIGEST_BLOCK):
        left = min(size - first, DIGEST_BLOCK)
        hasher = xxhash.xxh3_128()
        while left:
            part = stream.take(left)
            left -= len(part)
            hasher.update(part)
            crc = _extended(crc, part) if checksum else 0
            behind = (
                _behind(crc, full - size, checksum)
                if first + DIGEST_BLOCK >= size and not left
                else ()
            )
            writer.write([part, *behind])  # while it is in the cache
        digests.append(hasher.digest())
    return b"".join(digests)


def _behind(crc: int, zeros: int, checksum: bool) -> Iterator[memoryview]:
    """What follows the elements of a chunk."""
    while zeros:
        some = _ZEROS[:zeros]
        zeros -= len(some)
        crc = _extended(crc, some) if checksum else 0
        yield some
    if checksum:
        yield memoryview(crc.to_bytes(4, "little"))


def _extended(crc: int, data: memoryview) -> int:
    # Of all that has no copy of its own, google_crc32c takes arrays of numpy.
    return google_crc32c.extend(crc, np.frombuffer(data, np.uint8))  # type: ignore[no-any-return]


def _padded(stream: _Stream, shape: Grid, cell: Cell) -> tuple[_Stream, bytes]:
    """The bytes of a chunk at full size, in memory, and the digests of the elements that are the tensor's."""
    itemsize = cell.entry.meta.itemsize
    own = np.empty(math.prod(shape) * itemsize, np.uint8)
    stream.fill(own.data)
    values = np.zeros((*cell.inner, itemsize), np.uint8)
    values[tuple(map(slice, shape))] = own.reshape(*shape, itemsize)
    return _Stream(iter([values.reshape(-1).data]), cell), digest_blocks(own.data)


def _index(cell: Cell, starts: Int64, length: int) -> bytes:
    table = np.full((cell.count, 2), ABSENT, "<u8")
    table[cell.numbers, 0] = starts
    table[cell.numbers, 1] = length
    index = table.tobytes()
    return index + int(google_crc32c.value(index)).to_bytes(4, "little")


class _Stream:
    """The bytes of a cell, taken one run after the other."""

    def __init__(self, octets: Iterator[memoryview], cell: Cell) -> None:
        self._octets = octets
        self._cell = cell
        self._rest = memoryview(b"")

    def take(self, most: int) -> memoryview:
        """The next bytes, at least one; valid until more are taken."""
        while not self._rest:
            more = next(self._octets, None)
            if more is None:
                size = self._cell.box.volume * self._cell.entry.meta.itemsize
                raise BackendError(
                    f"{self._cell} should have {size} bytes, and fewer came from the model"
                )
            self._rest = more
        part, self._rest = self._rest[:most], self._rest[most:]
        return part

    def fill(self, place: memoryview) -> None:
        while place:
            part = self.take(len(place))
            place[: len(part)] = part
            place = place[len(part) :]


class _Compressing:
    """Writes compressed cells: through tensorstore, whole."""

    def __init__(self, root: Storage, packing: Packing) -> None:
        within = context()
        self.root = root
        self._opened = latest(
            lambda entry, shape: to_write(root, entry, shape, packing, within)
        )

    def write(self, cell: Cell, octets: Iterator[memoryview]) -> Written:
        values, lengths = _whole(octets, cell), cell.lengths
        with meaning(
            StorageError, f"cannot write {cell} to {self.root.location}/{cell.file}"
        ):
            store = self._opened(cell.entry, cell.shape)
            # The memory may be referred to, instead of copied, because nothing reads through this handle later.
            written = store[cell.box.slices()].write(
                values.view(store.dtype.numpy_dtype).reshape(cell.box.shape),
                can_reference_source_data_indefinitely=True,
            )
            ends = np.cumsum(lengths).tolist()
            parts = zip([0, *ends[:-1]], ends, strict=True)
            digests = b"".join(
                digest_blocks(values.data[begin:end]) for begin, end in parts
            )
            written.result()
        starts = np.zeros(1, np.int64)
        if (
            cell.is_shard
        ):  # tensorstore puts the chunks where it likes: the shard's own index tells
            starts = shard_index(self.root, cell.file, cell.count, ("end", True))[0][
                cell.numbers
            ]
        return Written(cell.boxes, cell.file, starts, lengths, digests)


def _whole(
    octets: Iterator[memoryview], cell: Cell
) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """All bytes of a cell; no copy where they come in one piece."""
    size = cell.box.volume * cell.entry.meta.itemsize
    first = next(octets, memoryview(b""))
    if len(first) == size:
        return np.frombuffer(first, np.uint8)
    values = np.empty(size, np.uint8)
    values.data[: len(first)] = first
    _Stream(octets, cell).fill(values.data[len(first) :])
    return values
