"""Cells that several ranks hold parts of: the coordinator assembles and writes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from megackpt.backends.base import run_in_threads
from megackpt.backends.zarr.cell_writer import WrittenChunk, write_cell, write_result
from megackpt.backends.zarr.codecs import Octets, Packing
from megackpt.backends.zarr.grid import (
    ARRAY,
    ArrayLayout,
    Cells,
    entry_name,
    fragments_file,
)
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.box import Box, Boxes, Int64
from megackpt.planning.manifest import (
    ITEMSIZE,
    Bool,
    Chunk,
    Chunks,
    Int32,
    Manifest,
    ShardId,
)
from megackpt.storage import Batch, Storage, digest_blocks

_COORDINATOR = 0


def fragment_names(manifest: Manifest) -> list[str]:
    """The temporary files of parts that a save of this (unwritten) manifest makes."""
    chunks = manifest.chunks
    cells = Cells.of(manifest.tensors, manifest.grids, chunks.tensor, chunks.boxes)
    ranks = np.unique(chunks.writer[~cells.whole]).tolist()
    return [fragments_file(rank) for rank in ranks]


def described(manifest: Manifest) -> list[str]:
    """The descriptions that ranks have written, with the first cells of their arrays."""
    chunks = manifest.chunks
    first = (chunks.boxes.offset == 0).all(axis=1) & ~_are_parts(manifest)
    entries = [manifest.tensors[n] for n in np.unique(chunks.tensor[first]).tolist()]
    return [f"{entry_name(e)}/{ARRAY}" for e in entries if not e.meta.is_object]


def assemble(root: Storage, manifest: Manifest, packing: Packing) -> Manifest:
    """Write the cells that ranks share, remove the parts, and return the manifest without them.

    Raises BackendError if parts do not fill their cell (holes that no check has found), and
    CorruptCheckpoint if a part differs from the bytes that its rank wrote.
    """
    chunks = manifest.chunks
    is_part = _are_parts(manifest)
    if not is_part.any():
        return manifest
    temporary = {manifest.files[n] for n in np.unique(chunks.file[is_part]).tolist()}
    layouts: dict[int, ArrayLayout] = {}
    parts_of: dict[tuple[int, Box], list[Chunk]] = {}
    for row in np.flatnonzero(is_part).tolist():
        number = int(chunks.tensor[row])
        part = manifest.chunk(row)
        if number not in layouts:
            meta = manifest.tensors[number].meta
            grid = manifest.grids[number]
            layouts[number] = ArrayLayout.planned(meta, grid, packing)
        layout = layouts[number]
        box = layout.box(layout.index(part.box))
        parts_of.setdefault((number, box), []).append(part)
    cells = list(parts_of.items())
    found: dict[int, list[WrittenChunk]] = {}

    def work(numbers: Iterator[int]) -> None:
        with root.batch() as batch:
            for i in numbers:
                (number, box), parts = cells[i]
                key = manifest.tensors[number].key
                layout = layouts[number]
                found[i] = _write(root, batch, key, layout, box, parts)

    run_in_threads(len(cells), work)
    for name in sorted(temporary):
        root.delete(name)
    written = [found[i] for i in range(len(cells))]
    tensors = np.array([number for number, _ in parts_of], np.int32)
    return _with_cells(manifest, np.flatnonzero(~is_part), tensors, written)


def _are_parts(manifest: Manifest) -> Bool:
    """Which chunks are parts of cells, in temporary files?"""
    ranks = np.unique(manifest.chunks.writer).tolist()
    temporary = {fragments_file(rank) for rank in ranks}
    is_temporary = np.array([name in temporary for name in manifest.files], np.bool_)
    return is_temporary[manifest.chunks.file]


def _write(
    root: Storage,
    batch: Batch,
    key: str,
    layout: ArrayLayout,
    box: Box,
    parts: list[Chunk],
) -> list[WrittenChunk]:
    name = f"{ShardId(key, box)}"
    if sum(part.box.volume for part in parts) != box.volume:
        raise BackendError(
            f"{name} is a cell of zarr's grid, which is stored whole, and not all of it was "
            "declared, or some of it twice"
        )
    values = np.empty((*box.shape, ITEMSIZE[layout.dtype]), np.uint8)
    for part in parts:
        region = values[part.box.relative_to(box).slices()]
        region[...] = _read_part(root, part, name).reshape(region.shape)
    return write_cell(batch, key, layout, box, iter([values.reshape(-1).data]))


def _read_part(root: Storage, part: Chunk, name: str) -> Octets:
    data: Octets = np.empty(part.location.length, np.uint8)
    where = f"{root.location}/{part.location.file}"
    try:
        with root.open(part.location.file) as reader:
            reader.read_into(part.location.start, [data.data])
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{name}: {where} has been removed") from None
    if digest_blocks(data.data) != part.digests.tobytes():
        raise CorruptCheckpoint(
            f"{name}: what rank {part.writer} wrote of it ({part.box}) is not what is read again "
            f"from {where}"
        )
    return data


def _with_cells(
    manifest: Manifest, kept: Int64, tensors: Int32, cells: list[list[WrittenChunk]]
) -> Manifest:
    """The manifest with the ``kept`` ones of its chunks, and the coordinator's cells."""
    old = manifest.chunks.take(kept)
    new = write_result(cells, old.boxes.width)
    used, file = np.unique(old.file, return_inverse=True)
    writer = np.full(len(new.item), _COORDINATOR, np.int32)
    chunks = Chunks(
        np.concatenate([old.tensor, tensors[new.item]]),
        Boxes.concat([old.boxes, new.boxes.widened(old.boxes.width)]),
        np.concatenate([old.writer, writer]),
        np.concatenate([file, new.file + len(used)]).astype(np.int32),
        np.concatenate([old.start, new.start]),
        np.concatenate([old.length, new.length]),
        np.concatenate([old.digests, new.digests]),
    )
    files = (*(manifest.files[number] for number in used.tolist()), *new.files)
    return replace(manifest, chunks=chunks, files=files)
