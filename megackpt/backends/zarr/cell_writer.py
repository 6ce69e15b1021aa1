"""The write pass of a rank.

Whole cells become zarr chunks, objects become files, and all parts of shared cells one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megackpt.backends.base import Links, Source, run_in_threads
from megackpt.backends.object_files import encode_key, write_object
from megackpt.backends.zarr.array_metadata import array_file
from megackpt.backends.zarr.codecs import (
    Octets,
    Packing,
    crc32c,
    crc_bytes,
    encode_index,
)
from megackpt.backends.zarr.grid import (
    ARRAY,
    ArrayLayout,
    Cells,
    entry_name,
    fragments_file,
)
from megackpt.errors import BackendError
from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    DIGEST_SIZE,
    ITEMSIZE,
    Location,
    SavePlan,
    ShardId,
    WriteResult,
    digest_rows,
)
from megackpt.planning.unchanged import StepBefore
from megackpt.storage import Batch, FileWriter, Storage, digest, digest_blocks

WrittenChunk = tuple[Box, Location, bytes]
"""A chunk's box, the location of the bytes of its elements in the tensor, and their digests."""


def write_rows(
    root: Storage,
    plan: SavePlan,
    data: Source,
    packing: Packing,
    links: Links | None = None,
) -> WriteResult:
    """Write every row of a plan, durably. Raises BackendError for rows in several cells.

    The first cell of an array comes with the array's description.
    """
    cells = Cells.of(plan.tensors, plan.grids, plan.tensor, plan.boxes)
    wrong = [str(plan.row(row).shard) for row in np.flatnonzero(~cells.within).tolist()]
    if wrong:
        raise BackendError(
            f"zarr stores cells of a regular grid, and these are in several: {'; '.join(wrong)}. "
            "hint: plan with SavePolicy(gridded=True), or save as torch_dist"
        )
    singles = np.flatnonzero(cells.whole).tolist()
    fragments = np.flatnonzero(~cells.whole).tolist()
    found: dict[int, list[WrittenChunk]] = {}

    def work(numbers: Iterator[int]) -> None:
        with root.batch() as batch:
            for number in numbers:
                if number == len(singles):
                    _write_fragments(batch, plan, data, fragments, found)
                else:
                    row = singles[number]
                    found[row] = _write_row(
                        root, batch, plan, data, row, packing, links
                    )

    run_in_threads(len(singles) + bool(fragments), work)
    return write_result([found[row] for row in range(len(plan))], plan.boxes.width)


def _write_row(
    root: Storage,
    batch: Batch,
    plan: SavePlan,
    data: Source,
    row: int,
    packing: Packing,
    links: Links | None,
) -> list[WrittenChunk]:
    item = plan.row(row)
    entry = plan.tensors[plan.tensor[row]]
    box = item.shard.box
    if item.meta.is_object:
        return [(box, *write_object(root, entry, box, data.blocks(row), batch))]
    layout = ArrayLayout.planned(item.meta, item.grid, packing)
    if not any(box.offset):
        with batch.create(f"{entry_name(entry)}/{ARRAY}") as writer:
            writer.write([memoryview(array_file(entry, layout))])
    if links and links.before and links.rows[row]:
        linked = _link_cell(batch, plan, data, row, layout, links, links.before)
        if linked:
            return linked
    if item.nbytes:
        return write_cell(batch, entry.key, layout, box, data.blocks(row))
    # An empty file in place of the first cell shows that the tensor was written.
    file = f"{entry_name(entry)}/{layout.file((0,) * len(layout.shape))}"
    with batch.create(file):
        pass
    return [(box, Location(file, 0, 0), b"")]


def _link_cell(
    batch: Batch,
    plan: SavePlan,
    data: Source,
    row: int,
    layout: ArrayLayout,
    links: Links,
    before: StepBefore,
) -> list[WrittenChunk]:
    """The chunks of a cell whose file the step before has; none if it is not linked."""
    shard = plan.row(row).shard
    first, last = before.bounds[row : row + 2].tolist()
    written = before.written
    lengths = written.length[first:last].tolist()
    file = f"{encode_key(shard.key)}/{layout.file(layout.index(shard.box))}"

    def digests(_: int) -> bytes:
        stream = _Stream(data.blocks(row), shard)
        return b"".join(digest_blocks(stream.read(length)) for length in lengths)

    if first == last or links.link(batch, file, [row], digests) is None:
        return []
    known = before.digests(row)
    chunks = []
    for i, length in zip(range(first, last), lengths, strict=True):
        size = -(-length // DIGEST_BLOCK) * DIGEST_SIZE
        box = written.boxes.row(i, len(layout.shape))
        chunks.append(
            (box, Location(file, int(written.start[i]), length), known[:size])
        )
        known = known[size:]
    return chunks


def write_result(rows: Sequence[list[WrittenChunk]], width: int) -> WriteResult:
    """The report of a rank that wrote these rows.

    ``width``: the width of the plan's column of boxes.
    """
    files: dict[str, int] = {}
    boxes: list[Box] = []
    columns: list[tuple[int, int, int, int]] = []
    digests: list[bytes] = []
    for number, chunks in enumerate(rows):
        for box, place, found in chunks:
            file = files.setdefault(place.file, len(files))
            columns.append((number, file, place.start, place.length))
            boxes.append(box)
            digests.append(found)
    item, file_of, start, length = np.array(columns, np.int64).reshape(-1, 4).T
    return WriteResult(
        item,
        Boxes.of(boxes, width),
        tuple(files),
        file_of.astype(np.int32),
        start,
        length,
        digest_rows(b"".join(digests)),
    )


def _write_fragments(
    batch: Batch,
    plan: SavePlan,
    data: Source,
    rows: list[int],
    found: dict[int, list[WrittenChunk]],
) -> None:
    """Write consecutive parts of cells to the file of this rank."""
    name = fragments_file(plan.rank)
    with batch.create(name) as writer:
        for row in rows:
            start = writer.position
            digests = []
            for block in data.blocks(row):
                digests.append(digest_blocks(block))
                writer.write([block])
            place = Location(name, start, writer.position - start)
            found[row] = [(plan.row(row).shard.box, place, b"".join(digests))]


def write_cell(
    batch: Batch, key: str, layout: ArrayLayout, box: Box, blocks: Iterator[memoryview]
) -> list[WrittenChunk]:
    """Write the chunks of a whole cell, and the index of a shard behind them.

    ``box``: of the cell, up to the end of the tensor. ``blocks``: its bytes in C order; a block is
    valid until the next one is taken. Raises BackendError if there are fewer bytes than elements.
    """
    packing = layout.packing
    itemsize = ITEMSIZE[layout.dtype]
    parts = [box]
    if layout.sharded:
        boxes = layout.chunks(box)
        parts = [boxes.row(row, len(layout.shape)) for row in range(len(boxes))]
    stream = _Stream(blocks, ShardId(key, box))
    file = f"{encode_key(key)}/{layout.file(layout.index(box))}"
    chunks: list[WrittenChunk] = []
    stored = []
    with batch.create(file) as writer:
        for chunk in parts:
            start = writer.position
            length = chunk.volume * itemsize
            if packing.compressor is None and length == layout.chunk_bytes:
                digests = _write_raw(writer, stream, length, packing.checksum)
            else:
                own = np.frombuffer(stream.read(length), np.uint8)
                digests = digest_blocks(own.data)
                writer.write(packing.pack(_padded(own, chunk, layout), itemsize))
            chunks.append((chunk, Location(file, start, length), digests))
            stored.append((start, writer.position - start))
        if layout.sharded:
            numbers = layout.numbers(Boxes.of(parts))
            index = encode_index(layout.chunks_in_a_cell, numbers, stored)
            writer.write([memoryview(index)])
    return chunks


def _write_raw(
    writer: FileWriter, stream: _Stream, length: int, checksum: bool
) -> bytes:
    """Write a full chunk as it is. Returns its digests.

    Each block is hashed and written while it is in the processor's cache.
    """
    digests = []
    crc = 0
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


def _padded(own: Octets, box: Box, layout: ArrayLayout) -> Octets:
    """A chunk at full size. ``own``: the bytes of the elements in ``box``."""
    if box.shape == layout.inner:
        return own
    itemsize = ITEMSIZE[layout.dtype]
    values = np.zeros((*layout.inner, itemsize), np.uint8)
    values[tuple(map(slice, box.shape))] = own.reshape(*box.shape, itemsize)
    return values.reshape(-1)


class _Stream:
    """The bytes of a cell, which come in blocks of any size."""

    def __init__(self, blocks: Iterator[memoryview], name: ShardId) -> None:
        self._blocks = blocks
        self._name = name
        self._rest = memoryview(b"")

    def read(self, size: int) -> memoryview:
        """The next bytes, valid until more are read. Copied only if several blocks have them."""
        if not self._rest:
            self._rest = next(self._blocks, self._rest)
        if len(self._rest) >= size:
            part = self._rest[:size]
            self._rest = self._rest[size:]
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
