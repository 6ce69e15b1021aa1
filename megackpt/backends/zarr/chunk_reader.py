"""Planned regions read: byte ranges where the bytes of a chunk are its elements, else by decoding whole chunks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.backends.base import Target, run_in_threads
from megackpt.backends.object_files import ConvertedObjects
from megackpt.backends.ranges import octets, read_raw
from megackpt.backends.zarr.array_metadata import read_layout
from megackpt.backends.zarr.codecs import decode_chunk, shard_index
from megackpt.backends.zarr.grid import MEGATRON, ArrayLayout, Cells, chunk_numbers
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Boxes, Int64
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    DIGEST_SIZE,
    Bool,
    Chunk,
    Digests,
    LoadPlan,
    Manifest,
    ReadItem,
    ShardId,
    TensorEntry,
)
from megackpt.serialization.list_of_one import wrapped
from megackpt.storage import Storage, allocate, digest_blocks, read_dense

_OVERHEAD = 1 << 16
"""A codec may make a chunk twice as large, and larger by so many bytes."""
_PADDED, _PADDING = 64 << 20, 16
"""A chunk may be larger than its part of the tensor: by so many bytes, and beyond that so many times."""
_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read_rows(root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
    """Read the regions of a plan. With ``verify``, chunks without our digests are decoded: that checks their crc32c."""
    ranged = raw_rows(plan.manifest, plan.chunk)
    if plan.manifest.backend[1] == MEGATRON:
        into = ConvertedObjects(into, partial(_wrapped, plan, root.location))
    elif verify and not len(plan.manifest.chunks.digests):
        ranged &= _is_object(plan.manifest)[plan.manifest.chunks.tensor[plan.chunk]]
    if ranged.any():
        read_raw(root, plan.take(ranged), into, verify)
    if not ranged.all():
        _read_chunks(root, plan.take(~ranged), into, verify)


def raw_rows(manifest: Manifest, rows: Int64) -> Bool:
    """For each of these chunks: are the bytes at its location those of its box?"""
    chunks = manifest.chunks
    cells = Cells.of(
        manifest.tensors, manifest.grids, chunks.tensor[rows], chunks.boxes.take(rows)
    )
    return cells.is_object | (cells.prefix & (manifest.encoding == "raw"))


def damage(root: Storage, manifest: Manifest) -> list[str] | None:
    """The problems that the crc32c of the chunks show. None if there are arrays without."""
    reader = _ChunkReader(root, manifest.backend[1])
    problems = []
    for row in np.flatnonzero(~_is_object(manifest)[manifest.chunks.tensor]).tolist():
        entry = manifest.tensors[manifest.chunks.tensor[row]]
        chunk = manifest.chunk(row)
        try:
            if not reader.layout_of(entry, chunk).checksum:
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
    try:
        return data if entry.is_common else wrapped(data)
    except CorruptCheckpoint as error:
        file = plan.manifest.files[chunks.file[plan.chunk[row]]]
        raise CorruptCheckpoint(f"{entry.key!r} in {where}/{file}: {error}") from error


def _is_object(manifest: Manifest) -> Bool:
    return np.array([entry.meta.is_object for entry in manifest.tensors], np.bool_)


def _read_chunks(root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
    order = np.argsort(plan.chunk, kind="stable")
    starts = np.flatnonzero(np.diff(plan.chunk[order], prepend=-1))
    groups = np.split(order, starts[1:])

    def work(numbers: Iterator[int]) -> None:
        reader = _ChunkReader(root, plan.manifest.backend[1])
        for number in numbers:
            reader.read(list(plan.take(groups[number]).rows()), into, verify)

    run_in_threads(len(groups), work)


class _ChunkReader:
    """Reads and decodes chunks, one after the other. Each thread has its own.

    It keeps the description of the last array and the index of the last shard: plans list the
    chunks of one tensor one after the other.
    """

    def __init__(self, root: Storage, version: int) -> None:
        self.root = root
        self.version = version
        self._array: tuple[tuple[TensorEntry, str], ArrayLayout] | None = None
        self._index: tuple[str, tuple[Int64, Int64]] | None = None

    def read(self, items: list[ReadItem], into: Target, verify: bool) -> None:
        """Read regions of one chunk."""
        entry, chunk = items[0].entry, items[0].chunk
        values = self.elements(entry, chunk)
        if verify and len(chunk.digests):
            data = octets(np.ascontiguousarray(values))
            _check(data, chunk.digests, self._name(entry, chunk))
        for item in items:
            filled = into.open(item.target, item.box)
            index: Any = (*item.box.relative_to(chunk.box).slices(), ...)
            region = values[index]
            filled[...] = region.view(filled.dtype)
            into.close(item.target, item.box, filled)

    def elements(self, entry: TensorEntry, chunk: Chunk) -> NDArray[Any]:
        """The elements of a chunk in its box. Raises CorruptCheckpoint if they cannot be decoded."""
        name = self._name(entry, chunk)
        layout = self.layout_of(entry, chunk)
        if 0 in layout.shape:
            return np.zeros(chunk.box.shape, f"V{entry.meta.itemsize}")
        file = chunk.location.file
        start, length = self._stored(layout, chunk, name)
        if length > 2 * layout.chunk_bytes + _OVERHEAD:
            raise CorruptCheckpoint(
                f"{name}: {length} bytes are stored of a chunk of {layout.chunk_bytes}"
            )
        with self.root.open(file) as reader:
            if set(layout.codecs) <= {"crc32c"}:
                # Elements may be a hole in a sparse file: zeros.
                data = allocate(length, name)
                reader.read_into(start, [memoryview(data)])
            else:
                data = read_dense(reader, start, length, name)
        whole = decode_chunk(data, layout, name)
        # A chunk at the end of the tensor is stored at full size.
        index: Any = (*map(slice, chunk.box.shape), ...)
        values: NDArray[Any] = whole[index]
        return values

    def layout_of(self, entry: TensorEntry, chunk: Chunk) -> ArrayLayout:
        folder = chunk.location.file.partition("/")[0]
        if self.version == MEGATRON:
            folder = entry.key
        if self._array is None or self._array[0] != (entry, folder):
            self._array = (entry, folder), self._read_layout(entry, folder)
        return self._array[1]

    def _read_layout(self, entry: TensorEntry, folder: str) -> ArrayLayout:
        where = f"{self.root.location}/{folder}"
        layout = read_layout(self.root, folder)
        if layout is None:
            raise CorruptCheckpoint(f"{where}: the description of the array is missing")
        if (layout.shape, layout.dtype) != entry.meta:
            raise CorruptCheckpoint(
                f"{where} describes {layout.dtype} {layout.shape}, not {entry.meta}"
            )
        if layout.chunk_bytes > _MEMORY:
            raise CorruptCheckpoint(
                f"a chunk of {layout.chunk_bytes} bytes in {where} is more than there is memory for"
            )
        if layout.chunk_bytes > _PADDED + _PADDING * layout.own_bytes:
            raise CorruptCheckpoint(
                f"{where} has chunks of {layout.chunk_bytes} bytes, of which at most "
                f"{layout.own_bytes} can be the tensor's"
            )
        return layout

    def _stored(self, layout: ArrayLayout, chunk: Chunk, name: str) -> tuple[int, int]:
        """Start and length of the stored bytes of a chunk."""
        file = chunk.location.file
        if layout.index is None:
            size = self.root.size(file)
            if size is None:
                raise CorruptCheckpoint(
                    f"{name}: the file is missing, or is not a regular file"
                )
            return 0, size
        if self._index is None or self._index[0] != file:
            count = layout.chunks_in_a_cell
            self._index = file, shard_index(self.root, file, count, layout.index)
        starts, lengths = self._index[1]
        number = chunk_numbers(Boxes.of([chunk.box]), layout.cell, layout.inner)[0]
        start, length = int(starts[number]), int(lengths[number])
        if start < 0:
            raise CorruptCheckpoint(f"{name}: the index of the shard has no such chunk")
        return start, length

    def _name(self, entry: TensorEntry, chunk: Chunk) -> str:
        shard = ShardId(entry.key, chunk.box)
        return f"{shard} in {self.root.location}/{chunk.location.file}"


def _check(data: memoryview, digests: Digests, name: str) -> None:
    found = np.frombuffer(digest_blocks(data), np.uint8).reshape(-1, DIGEST_SIZE)
    if found.shape != digests.shape:
        raise CorruptCheckpoint(
            f"{name}: {len(data)} bytes do not fit {len(digests)} digests"
        )
    damaged = []
    for block in np.flatnonzero((found != digests).any(axis=1)).tolist():
        start = block * DIGEST_BLOCK
        damaged.append(
            f"{block} (bytes {start}:{min(start + DIGEST_BLOCK, len(data))})"
        )
    if damaged:
        raise CorruptCheckpoint(
            f"{name}: the bytes are not those that were saved; damaged blocks: {', '.join(damaged)}"
        )
