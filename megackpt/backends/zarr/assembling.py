"""Cells that several ranks hold pieces of: put together on the coordinator, one at a time, and written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from megackpt.backends.zarr.cells import Cell, CellWriter, Written, cell_writer
from megackpt.backends.zarr.documents import Packing
from megackpt.backends.zarr.layout import Cells
from megackpt.backends.zarr.names import fragments_file
from megackpt.backends.zarr.stores import share
from megackpt.backends.zarr.writing import result_of, sync_folders
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.box import Box, Boxes, Int64
from megackpt.planning.manifest import Chunk, Chunks, Int32, Manifest, ShardId
from megackpt.storage import Storage, digest_blocks

COORDINATOR = 0


def fragment_names(manifest: Manifest) -> list[str]:
    """The files of pieces that a save of this (unwritten) manifest makes for a while."""
    chunks = manifest.chunks
    cells = Cells.of(manifest.tensors, manifest.grids, chunks.tensor, chunks.boxes)
    return [
        fragments_file(rank) for rank in np.unique(chunks.writer[~cells.whole]).tolist()
    ]


def assembled(root: Storage, manifest: Manifest, packing: Packing) -> Manifest:
    """The manifest with whole cells in place of the pieces, once these cells are written and the pieces removed.

    Raises BackendError where pieces do not make up their cell (holes that nobody checked for), CorruptCheckpoint
    where a piece is not what its rank wrote.
    """
    temporary = {
        fragments_file(rank) for rank in np.unique(manifest.chunks.writer).tolist()
    }
    temporary &= set(manifest.files)
    if not temporary:
        return manifest
    is_piece = np.array([name in temporary for name in manifest.files], np.bool_)[
        manifest.chunks.file
    ]
    groups = _by_cell(manifest, np.flatnonzero(is_piece))
    found: dict[int, Written] = {}
    bounds = manifest.chunks.block_bounds

    def work(numbers: Iterator[int]) -> None:
        with root.batch() as batch:
            write_cell = cell_writer(root, batch, packing)
            for number in numbers:
                tensor = int(manifest.chunks.tensor[groups[number][0]])
                pieces = [
                    manifest.chunk(row, bounds) for row in groups[number].tolist()
                ]
                found[number] = _write(root, write_cell, manifest, tensor, pieces)

    share(len(groups), work)
    rows = [found[number] for number in range(len(groups))]
    sync_folders(root, rows, packing)
    for name in sorted(temporary):
        root.delete(name)
    tensors = np.array([manifest.chunks.tensor[group[0]] for group in groups], np.int32)
    return _with_cells(manifest, np.flatnonzero(~is_piece), tensors, rows)


def _by_cell(manifest: Manifest, rows: Int64) -> list[Int64]:
    """These chunks in groups, each of one cell of one tensor."""
    chunks = manifest.chunks
    cells = Cells.of(
        manifest.tensors, manifest.grids, chunks.tensor[rows], chunks.boxes.take(rows)
    )
    columns = [*cells.index.T[::-1], chunks.tensor[rows]]
    order = np.lexsort(columns)
    changes = np.any([np.diff(column[order]) != 0 for column in columns], axis=0)
    return np.split(rows[order], np.flatnonzero(changes) + 1)


def _write(
    root: Storage,
    write_cell: CellWriter,
    manifest: Manifest,
    tensor: int,
    pieces: list[Chunk],
) -> Written:
    entry, grid = manifest.tensors[tensor], manifest.grids[tensor] or ()
    offset = tuple(o // g * g for o, g in zip(pieces[0].box.offset, grid, strict=True))
    extents = zip(grid, entry.meta.shape, offset, strict=True)
    cell = Box(
        offset, tuple(min(extent, end - start) for extent, end, start in extents)
    )
    told = f"{ShardId(entry.key, cell)}"
    if sum(piece.box.volume for piece in pieces) != cell.volume:
        raise BackendError(
            f"{told} is a cell of zarr's grid, stored whole, and not all of it was declared, or some of it twice"
        )
    values = np.empty((*cell.shape, entry.meta.itemsize), np.uint8)
    for piece in pieces:
        values[piece.box.relative_to(cell).slices()] = _fetched(
            root, piece, told
        ).reshape(*piece.box.shape, -1)
    return write_cell(Cell.of(entry, grid, cell), iter([values.reshape(-1).data]))


def _fetched(
    root: Storage, piece: Chunk, told: str
) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    data = np.empty(piece.location.length, np.uint8)
    try:
        with root.open(piece.location.file) as reader:
            reader.read_into(piece.location.start, [data.data])
    except FileNotFoundError:
        raise CorruptCheckpoint(
            f"{told}: {root.location}/{piece.location.file} has been removed"
        ) from None
    if digest_blocks(data.data) != piece.digests.tobytes():
        raise CorruptCheckpoint(
            f"{told}: what rank {piece.writer} wrote of it ({piece.box}) is not what is read again from "
            f"{root.location}/{piece.location.file}"
        )
    return data


def _with_cells(
    manifest: Manifest, kept: Int64, tensors: Int32, rows: list[Written]
) -> Manifest:
    """The manifest with these chunks of its own, and cells that the coordinator wrote."""
    old = manifest.chunks.take(kept, manifest.chunks.block_bounds)
    new = result_of(rows, old.boxes.width)
    used, file = np.unique(old.file, return_inverse=True)
    chunks = Chunks(
        np.concatenate([old.tensor, tensors[new.item]]),
        Boxes.concat([old.boxes, new.boxes.widened(old.boxes.width)]),
        np.concatenate([old.writer, np.full(len(new.item), COORDINATOR, np.int32)]),
        np.concatenate([file, new.file + len(used)]).astype(np.int32),
        np.concatenate([old.start, new.start]),
        np.concatenate([old.length, new.length]),
        np.concatenate([old.digests, new.digests]),
    )
    files = (*(manifest.files[number] for number in used.tolist()), *new.files)
    return replace(manifest, chunks=chunks, files=files)
