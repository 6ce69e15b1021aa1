"""Planned regions fetched: byte ranges where a chunk's bytes lie as they are, all others through tensorstore."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from megackpt.backends.base import Target
from megackpt.backends.object_files import ConvertedObjects
from megackpt.backends.ranges import octets, read_raw
from megackpt.backends.zarr.layout import ArrayLayout, Cells, chunk_numbers
from megackpt.backends.zarr.names import MEGATRON, array_folder
from megackpt.backends.zarr.stores import (
    context,
    latest,
    layout_in,
    meaning,
    shard_index,
    share,
    to_read,
)
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Box, Boxes, Int64
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
from megackpt.storage import Storage, digest_blocks

_OVERHEAD = 1 << 16
"""Bytes that any codec may add to those of a chunk that it makes larger, beside as many again."""


def read_rows(root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
    """Fetch regions. Chunks without digests of ours are read by tensorstore if asked to verify: it checks crc32c."""
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
    """What tensorstore finds wrong, by the chunks' crc32c; None where there are arrays without."""
    reader = _Reader(root, manifest.backend[1], context())
    bounds = manifest.chunks.block_bounds
    problems = []
    for row in np.flatnonzero(~_is_object(manifest)[manifest.chunks.tensor]).tolist():
        entry = manifest.tensors[manifest.chunks.tensor[row]]
        chunk = manifest.chunk(row, bounds)
        try:
            checked = reader.checks(entry, chunk)
            if checked:
                reader.values(entry, chunk, [chunk.box])
        except CorruptCheckpoint as error:
            problems.append(str(error))
            continue
        if not checked:
            return None
    return problems


def _wrapped(plan: LoadPlan, where: str, target: int, data: bytes) -> bytes:
    """One of Megatron's objects in the form that ours have: in a list of one."""
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
    within = context()

    def work(numbers: Iterator[int]) -> None:
        reader = _Reader(root, plan.manifest.backend[1], within)
        for number in numbers:
            reader.read(list(plan.take(groups[number]).rows()), into, verify)

    share(len(groups), work)


class _Reader:
    """Fetches chunks through tensorstore, one after the other. One for each thread."""

    def __init__(self, root: Storage, version: int, within: ts.Context) -> None:
        self.root = root
        self.version = version
        self.within = within
        self._opened = latest(self._open)

    def read(self, items: list[ReadItem], into: Target, verify: bool) -> None:
        """Fetch regions of one chunk."""
        entry, chunk = items[0].entry, items[0].chunk
        checked = verify and len(chunk.digests) > 0
        values = self.values(
            entry, chunk, [chunk.box] if checked else [item.box for item in items]
        )
        if checked:
            _check(
                octets(np.ascontiguousarray(values[0])),
                chunk.digests,
                self._where(entry, chunk),
            )
            values = [
                values[0][item.box.relative_to(chunk.box).slices()] for item in items
            ]
        for item, found in zip(items, values, strict=True):
            filled = into.open(item.target, item.box)
            filled[...] = found.view(filled.dtype)
            into.close(item.target, item.box, filled)

    def values(
        self, entry: TensorEntry, chunk: Chunk, boxes: list[Box]
    ) -> list[NDArray[Any]]:
        """The elements of regions of one chunk. CorruptCheckpoint where it cannot be read."""
        where = self._where(entry, chunk)
        with meaning(CorruptCheckpoint, f"{where} cannot be read"):
            layout, store = self._opened(
                entry, array_folder(self.version, chunk.location.file, entry)
            )
            _check_stored(self.root, chunk.location.file, layout, chunk.box, where)
            return [store[box.slices()].read().result() for box in boxes]

    def checks(self, entry: TensorEntry, chunk: Chunk) -> bool:
        """Do the chunks of this array bear a crc32c?"""
        layout, _ = self._opened(
            entry, array_folder(self.version, chunk.location.file, entry)
        )
        return layout.checksum

    def _where(self, entry: TensorEntry, chunk: Chunk) -> str:
        return f"{ShardId(entry.key, chunk.box)} in {self.root.location}/{chunk.location.file}"

    def _open(
        self, entry: TensorEntry, folder: str
    ) -> tuple[ArrayLayout, ts.TensorStore]:
        where = f"{self.root.location}/{folder}"
        layout = layout_in(self.root, folder)
        if layout is None:
            raise CorruptCheckpoint(
                f"{where} tells of no array: its description is missing"
            )
        if (layout.shape, layout.dtype) != entry.meta:
            raise CorruptCheckpoint(
                f"{where} tells of {layout.dtype} {layout.shape}, not of {entry.meta}"
            )
        with meaning(CorruptCheckpoint, f"{where} describes no array that can be read"):
            return layout, to_read(self.root, folder, layout, self.within)


def _check_stored(
    root: Storage, file: str, layout: ArrayLayout, box: Box, where: str
) -> None:
    """Is the chunk there, and of a size that can be? tensorstore would give zeros for it, end the process where it
    has no memory for the file, and have blosc take as much as its header asks for.
    """
    start, length = 0, root.size(file)
    if length is None:
        raise CorruptCheckpoint(f"{where}: the file is missing, or no regular file")
    if layout.index is not None:
        starts, lengths = shard_index(root, file, layout.chunks_in_a_cell, layout.index)
        number = chunk_numbers(Boxes.of([box]), layout.cell, layout.inner)[0]
        start, length = int(starts[number]), int(lengths[number])
        if start < 0:
            raise CorruptCheckpoint(
                f"{where}: the index of the shard has no such chunk"
            )
    if length > 2 * layout.chunk_bytes + _OVERHEAD:
        raise CorruptCheckpoint(
            f"{where}: {length} bytes are stored of a chunk of {layout.chunk_bytes}"
        )
    if layout.blosc:
        header = bytearray(16)
        with root.open(file) as reader:
            reader.read_into(start, [memoryview(header)])
        told = int.from_bytes(header[4:8], "little")
        if told != layout.chunk_bytes:
            raise CorruptCheckpoint(
                f"{where}: blosc tells of {told} bytes in a chunk of {layout.chunk_bytes}"
            )


def _check(octets: memoryview, digests: Digests, where: str) -> None:
    found = np.frombuffer(digest_blocks(octets), np.uint8).reshape(-1, DIGEST_SIZE)
    if found.shape != digests.shape:
        raise CorruptCheckpoint(
            f"{where}: {len(octets)} bytes do not fit {len(digests)} digests"
        )
    damaged = np.flatnonzero((found != digests).any(axis=1)).tolist()
    if damaged:
        bounds = [
            (b * DIGEST_BLOCK, min((b + 1) * DIGEST_BLOCK, len(octets)))
            for b in damaged
        ]
        told = ", ".join(
            f"{block} (bytes {a}:{b})"
            for block, (a, b) in zip(damaged, bounds, strict=True)
        )
        raise CorruptCheckpoint(
            f"{where}: the bytes are not those that were saved; damaged blocks: {told}"
        )
