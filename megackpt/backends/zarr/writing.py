"""A rank's rows written: whole cells, objects beside them, pieces of shared cells in one file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

import numpy as np

from megackpt.backends.base import Source
from megackpt.backends.object_files import write_object
from megackpt.backends.zarr.cells import Cell, Written, cell_writer
from megackpt.backends.zarr.documents import Packing, refuse_unfit
from megackpt.backends.zarr.layout import Cells
from megackpt.backends.zarr.names import cell_file, entry_name, fragments_file
from megackpt.backends.zarr.stores import share
from megackpt.errors import BackendError
from megackpt.planning.box import Boxes, Int64
from megackpt.planning.manifest import DIGEST_SIZE, SavePlan, TensorEntry, WriteResult
from megackpt.storage import Batch, Storage, digest_blocks

_AT_FRONT = np.zeros(1, np.int64)


def write_rows(
    root: Storage, plan: SavePlan, data: Source, packing: Packing
) -> WriteResult:
    """Write every row durably: cells as zarr chunks, objects as blobs, pieces of cells into one file of this rank."""
    refuse_unfit(plan.tensors, plan.grids)
    fragments = _fragments(plan)
    singles = np.setdiff1d(np.arange(len(plan)), fragments).tolist()
    found: dict[int, Written] = {}

    def work(numbers: Iterator[int]) -> None:
        with root.batch() as batch:
            write_cell = cell_writer(root, batch, packing)
            for number in numbers:
                if number == len(singles):
                    found.update(_write_fragments(batch, plan, data, fragments))
                    continue
                row = singles[number]
                item = plan.row(row)
                entry = plan.tensors[plan.tensor[row]]
                if item.meta.is_object:
                    place, digests = write_object(
                        root, entry, item.shard.box, data.blocks(row), batch
                    )
                    length = np.array([place.length], np.int64)
                    found[row] = Written(
                        plan.boxes.take([row]), place.file, _AT_FRONT, length, digests
                    )
                elif not item.nbytes:
                    found[row] = _write_empty(batch, entry, plan.boxes.take([row]))
                else:
                    found[row] = write_cell(
                        Cell.of(entry, item.grid, item.shard.box), data.blocks(row)
                    )

    share(len(singles) + (len(fragments) > 0), work)
    rows = [found[row] for row in range(len(plan))]
    sync_folders(root, rows, packing)
    return result_of(rows, plan.boxes.width)


def result_of(rows: Sequence[Written], width: int) -> WriteResult:
    """What is reported of these rows."""
    counts = [len(row.boxes) for row in rows]
    files = {
        name: number
        for number, name in enumerate(dict.fromkeys(row.file for row in rows))
    }
    empty = np.zeros(0, np.int64)
    return WriteResult(
        np.repeat(np.arange(len(rows)), counts),
        Boxes.concat([Boxes.empty(width), *(row.boxes for row in rows)]),
        tuple(files),
        np.repeat(np.array([files[row.file] for row in rows], np.int32), counts),
        np.concatenate([empty, *(row.start for row in rows)]),
        np.concatenate([empty, *(row.length for row in rows)]),
        np.concatenate(
            [np.zeros((0, DIGEST_SIZE), np.uint8), *(row.table for row in rows)]
        ),
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
    batch: Batch, plan: SavePlan, data: Source, rows: Int64
) -> Iterator[tuple[int, Written]]:
    name = fragments_file(plan.rank)
    with batch.create(name) as writer:
        for row in rows.tolist():
            start, digests = writer.position, []
            for block in data.blocks(row):
                digests.append(digest_blocks(block))
                writer.write([block])
            size = np.array([writer.position - start], np.int64)
            yield (
                row,
                Written(
                    plan.boxes.take([row]),
                    name,
                    np.array([start]),
                    size,
                    b"".join(digests),
                ),
            )


def _write_empty(batch: Batch, entry: TensorEntry, boxes: Boxes) -> Written:
    """The mark of a tensor without elements: an empty file, where its first cell would be, whichever piece it is."""
    file = _first_cell(entry)
    with batch.create(file):
        pass
    return Written(boxes, file, _AT_FRONT, np.zeros(1, np.int64), b"")


def _first_cell(entry: TensorEntry) -> str:
    return cell_file(entry_name(entry), (0,) * len(entry.meta.shape))


def sync_folders(root: Storage, rows: Sequence[Written], packing: Packing) -> None:
    """Make durable what neither a batch nor tensorstore does: the names of the folders that the latter made."""
    if packing.compression is not None:
        folders = (
            above.as_posix()
            for row in rows
            for above in [*PurePosixPath(row.file).parents][1:]
        )
        root.sync(dict.fromkeys("" if folder == "." else folder for folder in folders))
