"""The write pass of a rank: whole cells as zarr chunks, objects beside them, parts of shared cells in one file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megackpt.backends.base import Source, run_in_threads
from megackpt.backends.object_files import encode_key, write_object
from megackpt.backends.zarr.codecs import (
    Octets,
    Packing,
    crc32c,
    crc_bytes,
    encode_index,
)
from megackpt.backends.zarr.grid import ArrayLayout, Cells, entry_name, fragments_file
from megackpt.errors import BackendError
from megackpt.planning.box import Box, Boxes, Int64
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    DIGEST_SIZE,
    ITEMSIZE,
    SavePlan,
    ShardId,
    WriteResult,
)
from megackpt.storage import Batch, FileWriter, Storage, digest, digest_blocks

_AT_FRONT = np.zeros(1, np.int64)


@dataclass(frozen=True, eq=False)
class RowResult:
    """Where one row was written: its chunks, all in one file. ``length`` counts the bytes of their own elements."""

    boxes: Boxes
    file: str
    start: Int64
    length: Int64
    digests: bytes


def write_rows(
    root: Storage, plan: SavePlan, data: Source, packing: Packing
) -> WriteResult:
    """Write every row of a plan, durably. Raises BackendError for rows in several cells."""
    cells = Cells.of(plan.tensors, plan.grids, plan.tensor, plan.boxes)
    wrong = [str(plan.row(row).shard) for row in np.flatnonzero(~cells.within).tolist()]
    if wrong:
        raise BackendError(
            f"zarr stores cells of a regular grid, and these are in several: {'; '.join(wrong)}. "
            "hint: plan with SavePolicy(gridded=True), or save as torch_dist"
        )
    singles = np.flatnonzero(cells.whole).tolist()
    fragments = np.flatnonzero(~cells.whole).tolist()
    found: dict[int, RowResult] = {}

    def work(numbers: Iterator[int]) -> None:
        with root.batch() as batch:
            for number in numbers:
                if number == len(singles):
                    _write_fragments(batch, plan, data, fragments, found)
                else:
                    row = singles[number]
                    found[row] = _write_row(root, batch, plan, data, row, packing)

    run_in_threads(len(singles) + bool(fragments), work)
    return write_result([found[row] for row in range(len(plan))], plan.boxes.width)


def _write_row(
    root: Storage,
    batch: Batch,
    plan: SavePlan,
    data: Source,
    row: int,
    packing: Packing,
) -> RowResult:
    item, boxes = plan.row(row), plan.boxes.take([row])
    entry = plan.tensors[plan.tensor[row]]
    if item.meta.is_object:
        place, digests = write_object(
            root, entry, item.shard.box, data.blocks(row), batch
        )
        length = np.array([place.length], np.int64)
        return RowResult(boxes, place.file, _AT_FRONT, length, digests)
    layout = ArrayLayout.planned(item.meta, item.grid, packing)
    if item.nbytes:
        return write_cell(batch, entry.key, layout, item.shard.box, data.blocks(row))
    # An empty file in place of the first cell shows that the tensor was written.
    file = f"{entry_name(entry)}/{layout.file((0,) * len(layout.shape))}"
    with batch.create(file):
        pass
    return RowResult(boxes, file, _AT_FRONT, np.zeros(1, np.int64), b"")


def write_result(rows: Sequence[RowResult], width: int) -> WriteResult:
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


def _write_fragments(
    batch: Batch,
    plan: SavePlan,
    data: Source,
    rows: list[int],
    found: dict[int, RowResult],
) -> None:
    """Write parts of cells, one after the other, to the file of this rank."""
    name = fragments_file(plan.rank)
    with batch.create(name) as writer:
        for row in rows:
            start, digests = writer.position, []
            for block in data.blocks(row):
                digests.append(digest_blocks(block))
                writer.write([block])
            size = np.array([writer.position - start], np.int64)
            boxes, at = plan.boxes.take([row]), np.array([start])
            found[row] = RowResult(boxes, name, at, size, b"".join(digests))


def write_cell(
    batch: Batch, key: str, layout: ArrayLayout, box: Box, blocks: Iterator[memoryview]
) -> RowResult:
    """Write the chunks of a whole cell, and the index of a shard behind them.

    ``box``: of the cell, up to the end of the tensor. ``blocks``: its bytes in C order; a block is
    valid until the next one is taken. Raises BackendError if there are fewer bytes than elements.
    """
    packing, itemsize = layout.packing, ITEMSIZE[layout.dtype]
    chunks = layout.chunks(box)
    lengths = chunks.volume * itemsize
    stream = _Stream(blocks, f"{ShardId(key, box)}")
    digests, starts, stored = [], [], []
    file = f"{encode_key(key)}/{layout.file(layout.index(box))}"
    with batch.create(file) as writer:
        rows = zip(chunks.shape.tolist(), lengths.tolist(), strict=True)
        for shape, length in rows:
            starts.append(writer.position)
            if packing.compressor is None and length == layout.chunk_bytes:
                found = _write_raw(writer, stream, length, packing.checksum)
            else:
                own = np.frombuffer(stream.read(length), np.uint8)
                found = digest_blocks(own.data)
                chunk = _padded(own, tuple(shape), layout)
                writer.write(packing.pack(chunk, itemsize))
            digests.append(found)
            stored.append(writer.position - starts[-1])
        start = np.array(starts, np.int64)
        if layout.sharded:
            count, numbers = layout.chunks_in_a_cell, layout.numbers(chunks)
            index = encode_index(count, numbers, start, np.array(stored, np.int64))
            writer.write([memoryview(index)])
    return RowResult(chunks, file, start, lengths, b"".join(digests))


def _write_raw(
    writer: FileWriter, stream: _Stream, length: int, checksum: bool
) -> bytes:
    """Write a full chunk as it is. Returns its digests.

    Each block is hashed and written while it is in the processor's cache.
    """
    digests, crc = [], 0
    for first in range(0, length, DIGEST_BLOCK):
        block = stream.read(min(length - first, DIGEST_BLOCK))
        digests.append(digest(block))
        buffers = [block]
        if checksum:
            crc = crc32c(block, crc)
            if first + len(block) == length:
                buffers.append(crc_bytes(crc))
        writer.write(buffers)
    return b"".join(digests)


def _padded(own: Octets, shape: tuple[int, ...], layout: ArrayLayout) -> Octets:
    """A chunk at full size. ``own``: the bytes of its elements in the tensor, which have this shape."""
    if shape == layout.inner:
        return own
    itemsize = ITEMSIZE[layout.dtype]
    values = np.zeros((*layout.inner, itemsize), np.uint8)
    values[tuple(map(slice, shape))] = own.reshape(*shape, itemsize)
    return values.reshape(-1)


class _Stream:
    """The bytes of a cell, which come in blocks of any size."""

    def __init__(self, blocks: Iterator[memoryview], name: str) -> None:
        self._blocks = blocks
        self._name = name
        self._rest = memoryview(b"")

    def read(self, size: int) -> memoryview:
        """The next bytes, valid until more are read. They are copied only if several blocks have them."""
        if not self._rest:
            self._rest = next(self._blocks, self._rest)
        if len(self._rest) >= size:
            part, self._rest = self._rest[:size], self._rest[size:]
            return part
        found = np.empty(size, np.uint8).data
        filled = 0
        while filled < size:
            if not self._rest:
                block = next(self._blocks, None)
                if block is None:
                    raise BackendError(f"{self._name}: the model gave too few bytes")
                self._rest = block
            part = self._rest[: size - filled]
            found[filled : filled + len(part)] = part
            filled += len(part)
            self._rest = self._rest[len(part) :]
        return found
