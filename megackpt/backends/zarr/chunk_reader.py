"""Reads planned regions.

Byte ranges are read where the bytes of a chunk are its elements; other chunks are decoded whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.backends.base import Target, run_in_threads
from megackpt.backends.object_files import ConvertedObjects
from megackpt.backends.ranges import PIECE, hand_out, octets, read_raw
from megackpt.backends.zarr.array_metadata import read_layout
from megackpt.backends.zarr.codecs import TENSORSTORE, shard_index
from megackpt.backends.zarr.grid import (
    DESCRIPTIONS,
    MEGATRON,
    VERSION,
    ArrayLayout,
    Cells,
)
from megackpt.backends.zarr.library_decoders import decode
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Boxes, Int64, cut, extents_within, group
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    Bool,
    Chunk,
    LoadPlan,
    Manifest,
    ReadItem,
    ShardId,
    TensorEntry,
    carried_dtype,
    digest_rows,
    itemsizes,
)
from megackpt.serialization.list_of_one import wrapped
from megackpt.storage import Storage, allocate, digest_blocks, read_again, read_dense

_OVERHEAD = 1 << 16
"""A codec may make a chunk twice as large, plus this number of bytes."""
_PADDED = 64 << 20
_PADDING = 16
"""A chunk may have _PADDED bytes more than _PADDING times the bytes of its part of the tensor."""
_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read_rows(root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
    """Read the regions of a plan.

    With ``verify``, chunks without our digests are decoded, because that checks their crc32c.
    """
    manifest = plan.manifest
    ranged = raw_rows(manifest, plan.chunk)
    if manifest.backend[1] == MEGATRON:
        into = ConvertedObjects(into, partial(_wrapped, plan, root.location))
    elif verify and not len(manifest.chunks.digests):
        ranged &= itemsizes(manifest.tensors)[manifest.chunks.tensor[plan.chunk]] == 0
    if ranged.any():
        read_raw(root, plan.take(ranged), into, verify)
    decoded = plan.take(~ranged)
    regions = group(decoded.chunk)  # of each chunk

    def work(numbers: Iterator[int]) -> None:
        reader = _ChunkReader(root, manifest.backend[1])
        for number in numbers:
            items = decoded.take(regions.rows(number)).rows()
            reader.read(list(items), into, verify)

    run_in_threads(len(regions), work)


def raw_rows(manifest: Manifest, rows: Int64) -> Bool:
    """For each of these chunks: are the bytes at its location the bytes of its box?"""
    chunks = manifest.chunks
    boxes = chunks.boxes.take(rows)
    cells = Cells.of(manifest.tensors, manifest.grids, chunks.tensor[rows], boxes)
    return cells.is_object | (cells.prefix & (manifest.encoding == "raw"))


def missing_rows(manifest: Manifest) -> Bool:
    """Which chunks are not stored? Their place is the description with the fill value."""
    descriptions = [is_description(name) for name in manifest.files]
    # Empty chunks have the number -1.
    missing: Bool = np.array([*descriptions, False])[manifest.chunks.file]
    return missing


def is_description(file: str) -> bool:
    return file.rpartition("/")[2] in DESCRIPTIONS


def damage(root: Storage, manifest: Manifest) -> list[str] | None:
    """The problems that the crc32c of the chunks show. None if there are arrays without."""
    reader = _ChunkReader(root, manifest.backend[1])
    problems = []
    itemsize = itemsizes(manifest.tensors)[manifest.chunks.tensor]
    for row in np.flatnonzero((itemsize > 0) & ~missing_rows(manifest)).tolist():
        entry = manifest.tensors[manifest.chunks.tensor[row]]
        chunk = manifest.chunk(row)
        try:
            if not reader.layout_of(entry, chunk).packing.checksum:
                return None
            reader.elements(entry, chunk)
        except CorruptCheckpoint as error:
            problems.append(str(error))
    return problems


def _wrapped(plan: LoadPlan, where: str, target: int, data: bytes) -> bytes:
    """One of Megatron's objects as we store it: in a list of one."""
    row = int(np.flatnonzero(plan.target == target)[0])
    chunks = plan.manifest.chunks
    entry = plan.manifest.tensors[chunks.tensor[plan.chunk[row]]]
    if entry.is_common:
        return data
    try:
        return wrapped(data)
    except CorruptCheckpoint as error:
        file = plan.manifest.files[chunks.file[plan.chunk[row]]]
        raise CorruptCheckpoint(f"{entry.key!r} in {where}/{file}: {error}") from error


class _ChunkReader:
    """Reads and decodes chunks, one by one. Each thread has a separate reader.

    It keeps the description of the last array and the index of the last shard: plans list the
    chunks of one tensor in succession.
    """

    def __init__(self, root: Storage, version: int) -> None:
        self.root = root
        self.version = version
        self._read_layout = lru_cache(maxsize=1)(partial(_sound_layout, root))
        self._read_index = lru_cache(maxsize=1)(partial(shard_index, root))

    def read(self, items: list[ReadItem], into: Target, verify: bool) -> None:
        """Read regions of one chunk."""
        entry = items[0].entry
        chunk = items[0].chunk
        if is_description(chunk.location.file):
            self._fill(items, into)
            return
        checked = partial(self._checked_elements, entry, chunk, verify)
        values = read_again(self.root, checked)
        hand_out(values, chunk.box, items, into)

    def _fill(self, items: list[ReadItem], into: Target) -> None:
        """Fill regions of a missing chunk."""
        chunk = items[0].chunk
        layout = self.layout_of(items[0].entry, chunk)
        library = layout.packing.library(bytearray()) or TENSORSTORE
        value = decode(library, layout.document, None, chunk.location.file)
        for item in items:
            boxes = Boxes.of([item.box])
            extents = extents_within(boxes.shape, np.array([PIECE // value.itemsize]))
            pieces = cut(boxes, extents, boxes.offset)[1]
            for row in range(len(pieces)):
                box = pieces.row(row, len(item.box.shape))
                filled = into.open(item.target, box)
                filled[...] = value.view(filled.dtype)
                into.close(item.target, box, filled)

    def layout_of(self, entry: TensorEntry, chunk: Chunk) -> ArrayLayout:
        folder = entry.key
        file = chunk.location.file
        if self.version == VERSION:
            folder = file.partition("/")[0]
        elif not file.startswith(f"{folder}/"):
            folder = ""  # the directory is the array
        return self._read_layout(folder, entry)

    def _checked_elements(
        self, entry: TensorEntry, chunk: Chunk, verify: bool
    ) -> NDArray[Any]:
        """The elements of a chunk, compared with its digests if it has any."""
        values = self.elements(entry, chunk)
        if not verify or not len(chunk.digests):
            return values
        name = self._name(entry, chunk)
        data = octets(np.ascontiguousarray(values))
        found = digest_rows(digest_blocks(data))
        if found.shape != chunk.digests.shape:
            raise CorruptCheckpoint(
                f"{name}: {len(data)} bytes do not fit {len(chunk.digests)} digests"
            )
        damaged = []
        for block in np.flatnonzero((found != chunk.digests).any(axis=1)).tolist():
            start = block * DIGEST_BLOCK
            end = min(start + DIGEST_BLOCK, len(data))
            damaged.append(f"{block} (bytes {start}:{end})")
        if damaged:
            raise CorruptCheckpoint(
                f"{name}: the bytes are not those that were saved; damaged blocks: "
                f"{', '.join(damaged)}"
            )
        return values

    def elements(self, entry: TensorEntry, chunk: Chunk) -> NDArray[Any]:
        """The elements of a chunk in its box.

        Raises CorruptCheckpoint if they cannot be decoded.
        """
        name = self._name(entry, chunk)
        file = chunk.location.file
        layout = self.layout_of(entry, chunk)
        dtype = carried_dtype(entry.meta.itemsize)
        if 0 in layout.shape:
            return np.zeros(chunk.box.shape, dtype)
        try:
            with self.root.open(file) as reader:
                start = 0
                length = reader.size
                if layout.sharded:
                    index = self._read_index(
                        file, layout.chunks_in_a_cell, *layout.index_form
                    )
                    number = layout.numbers(Boxes.of([chunk.box]))[0]
                    start = int(index[0][number])
                    length = int(index[1][number])
                if start < 0:
                    raise CorruptCheckpoint(f"{name}: its shard has no such chunk")
                if length > 2 * layout.chunk_bytes + _OVERHEAD:
                    raise CorruptCheckpoint(
                        f"{name}: {length} bytes are stored of a chunk of {layout.chunk_bytes}"
                    )
                if layout.packing.compressor is None:
                    # Elements may be a hole in a sparse file: zeros.
                    data = allocate(length, name)
                    reader.read_into(start, [memoryview(data)])
                else:
                    data = read_dense(reader, start, length, name)
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{name}: the file is missing") from None
        library = layout.packing.library(data)
        if library:
            found = decode(library, layout.document, data, name)
        else:
            found = layout.packing.unpack(data, layout.chunk_bytes, name)
        # A chunk at the end of the tensor is stored at full size.
        index_of_box: Any = (*map(slice, chunk.box.shape), ...)
        values: NDArray[Any] = found.view(dtype).reshape(layout.inner)[index_of_box]
        return values

    def _name(self, entry: TensorEntry, chunk: Chunk) -> str:
        shard = ShardId(entry.key, chunk.box)
        return f"{shard} in {self.root.location}/{chunk.location.file}"


def _sound_layout(root: Storage, folder: str, entry: TensorEntry) -> ArrayLayout:
    """The description of an array.

    Raises CorruptCheckpoint if it is another array's, or claims absurd chunks.
    """
    where = f"{root.location}/{folder}"
    layout = read_layout(root, folder)
    if layout is None:
        raise CorruptCheckpoint(f"{where}: the description of the array is missing")
    if (layout.shape, layout.dtype) != entry.meta:
        raise CorruptCheckpoint(
            f"{where} describes {layout.dtype} {layout.shape}, not {entry.meta}"
        )
    if layout.chunk_bytes > min(_MEMORY, _PADDED + _PADDING * layout.own_bytes):
        raise CorruptCheckpoint(
            f"{where} has chunks of {layout.chunk_bytes} bytes, of which at most "
            f"{layout.own_bytes} can be the tensor's; memory has {_MEMORY}"
        )
    return layout
