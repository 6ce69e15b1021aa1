"""A rank's rows written: whole cells through tensorstore, objects beside them, pieces of shared cells in one file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.backends.base import Source
from megackpt.backends.sidecars import encode_key, write_object
from megackpt.backends.zarr.documents import Packing, refuse_unfit
from megackpt.backends.zarr.layout import Cells, Grid, chunk_numbers, grid_of, inner_of
from megackpt.backends.zarr.names import cell_file, fragments_file
from megackpt.backends.zarr.stores import context, latest, meaning, shard_index, share, to_write
from megackpt.errors import BackendError, StorageError
from megackpt.planning.box import Box, Boxes, Int64, cut
from megackpt.planning.manifest import DIGEST_SIZE, Digests, SavePlan, TensorEntry, WriteResult
from megackpt.runtime.storage import Storage, digest_blocks


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


class CellWriter:
    """Writes whole cells of arrays, one after the other. One for each thread."""

    def __init__(self, root: Storage, packing: Packing) -> None:
        within = context()
        self.root = root
        self.packing = packing
        self._opened = latest(lambda entry, cell: to_write(root, entry, cell, packing, within))

    def write(self, entry: TensorEntry, grid: Grid | None, box: Box, values: NDArray[Any]) -> Written:
        """``values``: the elements of ``box``, which is a whole cell (up to the end of the tensor)."""
        cell = grid_of(entry.meta.shape, grid)
        inner = inner_of(cell, entry.meta.itemsize)
        index = [offset // extent for offset, extent in zip(box.offset, cell, strict=True)]
        file = cell_file(encode_key(entry.key), index)
        values = np.ascontiguousarray(values).reshape(box.shape)
        boxes = _chunks(box, inner) if inner != cell else Boxes.of([box])
        sizes = boxes.volume * entry.meta.itemsize
        with meaning(StorageError, f"cannot write {entry.key!r} {box} to {self.root.location}/{file}"):
            store = self._opened(entry, cell)
            # The memory may be referred to, instead of copied, because nothing reads through this handle later.
            written = store[box.slices()].write(
                values.view(store.dtype.numpy_dtype), can_reference_source_data_indefinitely=True
            )
            octets, ends = values.reshape(-1).view(np.uint8).data, np.cumsum(sizes).tolist()
            parts = zip([0, *ends[:-1]], ends, strict=True)
            digests = b"".join(digest_blocks(octets[begin:end]) for begin, end in parts)
            written.result()
        starts = np.zeros(1, np.int64)
        if inner != cell:  # tensorstore puts the chunks where it likes: the shard's own index tells
            count = int(np.prod(np.array(cell) // inner))
            starts, _ = shard_index(self.root, file, count, ("end", True))
            starts = starts[chunk_numbers(boxes, cell, inner)]
        return Written(boxes, file, starts, sizes, digests)


def _chunks(box: Box, inner: Grid) -> Boxes:
    """The chunks that tensorstore cuts a cell into: runs of its bytes, one after the other."""
    extents = np.array([inner], np.int64)
    return cut(Boxes.of([box]), extents, np.zeros_like(extents))[1]


def write_rows(root: Storage, plan: SavePlan, data: Source, packing: Packing) -> WriteResult:
    """Write every row durably: cells as zarr chunks, objects as blobs, pieces of cells into one file of this rank."""
    refuse_unfit(plan.tensors, plan.grids)
    fragments = _fragments(plan)
    singles = np.setdiff1d(np.arange(len(plan)), fragments).tolist()
    found: dict[int, Written] = {}

    def work(numbers: Iterator[int]) -> None:
        writer = CellWriter(root, packing)
        for number in numbers:
            if number == len(singles):
                found.update(_write_fragments(root, plan, data, fragments))
                continue
            row = singles[number]
            item = plan.row(row)
            if item.meta.is_object:
                found[row] = _write_object(root, plan, row, data)
            elif not item.nbytes:
                found[row] = _write_empty(root, plan, row)
            else:
                entry = plan.tensors[plan.tensor[row]]
                found[row] = writer.write(entry, item.grid, item.shard.box, data.array(row))

    share(len(singles) + (len(fragments) > 0), work)
    rows = [found[row] for row in range(len(plan))]
    sync_folders(root, [row.file for row in rows])
    return result_of(rows, plan.boxes.width)


def result_of(rows: Sequence[Written], width: int) -> WriteResult:
    """What is reported of these rows."""
    counts = [len(row.boxes) for row in rows]
    files = {name: number for number, name in enumerate(dict.fromkeys(row.file for row in rows))}
    empty = np.zeros(0, np.int64)
    return WriteResult(
        np.repeat(np.arange(len(rows)), counts),
        Boxes.concat([Boxes.empty(width), *(row.boxes for row in rows)]),
        tuple(files),
        np.repeat(np.array([files[row.file] for row in rows], np.int32), counts),
        np.concatenate([empty, *(row.start for row in rows)]),
        np.concatenate([empty, *(row.length for row in rows)]),
        np.concatenate([np.zeros((0, DIGEST_SIZE), np.uint8), *(row.table for row in rows)]),
    )


def _fragments(plan: SavePlan) -> Int64:
    """The rows that are pieces of cells. BackendError for those of several cells, which nobody could assemble."""
    cells = Cells.of(plan.tensors, plan.grids, plan.tensor, plan.boxes)
    astray = [str(plan.row(int(row)).shard) for row in np.flatnonzero(~cells.within)]
    if astray:
        raise BackendError(
            f"zarr stores cells of a regular grid, and these lie in several: {'; '.join(astray)}. "
            "hint: plan with SavePolicy(gridded=True), or save as torch_dist"
        )
    return np.flatnonzero(~cells.whole).astype(np.int64)


def _write_fragments(
    root: Storage, plan: SavePlan, data: Source, rows: Int64
) -> Iterator[tuple[int, Written]]:
    name = fragments_file(plan.rank)
    with root.create(name) as writer:
        for row in rows.tolist():
            start, digests = writer.position, []
            for block in data.blocks(row):
                digests.append(digest_blocks(block))
                writer.write([block])
            size = np.array([writer.position - start], np.int64)
            yield row, Written(plan.boxes.take([row]), name, np.array([start]), size, b"".join(digests))


def _write_empty(root: Storage, plan: SavePlan, row: int) -> Written:
    """The mark of a tensor without elements: an empty file, where its first cell would be."""
    entry = plan.tensors[plan.tensor[row]]
    file = cell_file(encode_key(entry.key), [0] * len(entry.meta.shape))
    with root.create(file):
        pass
    return Written(plan.boxes.take([row]), file, np.zeros(1, np.int64), np.zeros(1, np.int64), b"")


def _write_object(root: Storage, plan: SavePlan, row: int, data: Source) -> Written:
    entry = plan.tensors[plan.tensor[row]]
    box = plan.boxes.row(row, len(entry.meta.shape))
    place, digests = write_object(root, entry, box, data.blocks(row))
    length = np.array([place.length], np.int64)
    return Written(plan.boxes.take([row]), place.file, np.zeros(1, np.int64), length, digests)


def sync_folders(root: Storage, files: Sequence[str]) -> None:
    """Make the entries of new folders durable. The folder that a file is in was synced with the file."""
    folders = {""}
    for file in files:
        above = file.rpartition("/")[0].rpartition("/")[0]
        while above not in folders:
            folders.add(above)
            above = above.rpartition("/")[0]
    root.sync(folders)
