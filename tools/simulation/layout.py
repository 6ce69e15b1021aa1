"""Where a save of torch_dist or zarr puts each chunk, computed without writing it.

A second description of both formats' layout. tests/tools/test_simulate.py compares it with real saves, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from megackpt.backends.archives import frame_lengths
from megackpt.backends.base import Backend
from megackpt.backends.object_files import shard_file
from megackpt.backends.torch_dist import TorchDist
from megackpt.backends.torch_dist.distcp_writer import distribute
from megackpt.backends.zarr import Zarr
from megackpt.backends.zarr.cell_writer import WrittenChunk, write_result
from megackpt.backends.zarr.grid import ArrayLayout, Cells, entry_name, fragments_file
from megackpt.checkpoint import encode_index
from megackpt.errors import CheckpointingException
from megackpt.planning.box import Int64
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    DIGEST_SIZE,
    ITEMSIZE,
    OBJECT,
    Location,
    Manifest,
    SavePlan,
    WriteResult,
)
from megackpt.serialization.archive import ALIGNMENT

NO_DIGESTS = np.zeros((0, DIGEST_SIZE), np.uint8)


def write_results(
    backend: Backend, plans: Sequence[SavePlan], planned: Manifest
) -> list[WriteResult]:
    """The results that each rank would return from writing, without digests.

    ``planned`` has the lengths of objects. Raises CheckpointingException for formats and options whose layout
    depends on the data.
    """
    chunks = planned.chunks
    bounds = np.searchsorted(chunks.writer, np.arange(len(plans) + 1)).tolist()
    results: list[WriteResult] = []
    for plan, (low, high) in zip(plans, pairwise(bounds), strict=True):
        lengths = chunks.length[low:high]
        if isinstance(backend, TorchDist):
            results.append(_torch_dist(backend, plan, lengths))
        elif isinstance(backend, Zarr) and backend.packing.compressor is None:
            results.append(_zarr(backend, plan, lengths))
        else:
            raise CheckpointingException(
                f"cannot simulate a save as {backend.properties.name}: "
                "only torch_dist and uncompressed zarr have a layout that is known before the save"
            )
    return results


def located(
    backend: Backend, planned: Manifest, results: Sequence[WriteResult]
) -> Manifest:
    """The manifest as a save would commit it, without digests."""
    written_by = backend.properties.name, backend.properties.version
    return replace(planned, backend=written_by, save_id="0" * 32).located(results)


def index_size(manifest: Manifest, small: Mapping[str, tuple[int, bytes]]) -> int:
    """Bytes of the index of a manifest without digests, plus the digests that a save adds to it."""
    blocks = int(digest_blocks(manifest.chunks.length).sum())
    return len(encode_index(manifest, small)) + blocks * DIGEST_SIZE


def digest_blocks(lengths: Int64) -> Int64:
    """How many digests chunks of these lengths have."""
    return -(-lengths // DIGEST_BLOCK)


def _torch_dist(backend: TorchDist, plan: SavePlan, lengths: Int64) -> WriteResult:
    """What ``TorchDist.write`` returns; ``lengths``: bytes of each row."""
    head, tail = np.zeros_like(lengths), np.zeros_like(lengths)
    kinds = [(entry.meta.dtype, len(entry.meta.shape)) for entry in plan.tensors]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    kind_of = np.array([numbers[kind] for kind in kinds], np.int64)[plan.tensor]
    size = lengths.copy()
    for (dtype, ndim), number in numbers.items():
        rows = np.flatnonzero(kind_of == number)
        # Objects have no record around them.
        if dtype != OBJECT and len(rows):
            head[rows], tail[rows] = frame_lengths(dtype, plan.boxes.shape[rows, :ndim])
            size[rows] = plan.boxes.take(rows).volume * ITEMSIZE[dtype]
    parts = distribute(plan, backend.files_per_rank, backend.separation_hint)
    file = np.zeros(len(plan), np.int32)
    start = np.zeros(len(plan), np.int64)
    for number, part in enumerate(parts):
        position, starts = 0, []
        for row in part.rows:
            # Records begin and payloads lie at multiples of ALIGNMENT; objects begin anywhere.
            if head[row]:
                position += -position % ALIGNMENT + int(head[row])
            starts.append(position)
            position += int(size[row] + tail[row])
        file[part.rows] = number
        start[part.rows] = starts
    names = [part.name for part in parts]
    return WriteResult.of_rows(plan.boxes, names, file, start, size, NO_DIGESTS)


def _zarr(backend: Zarr, plan: SavePlan, lengths: Int64) -> WriteResult:
    """What ``Zarr.write`` returns for uncompressed cells; ``lengths``: bytes of each row."""
    whole = Cells.of(plan.tensors, plan.grids, plan.tensor, plan.boxes).whole
    position = 0
    rows: list[list[WrittenChunk]] = []
    for row, item in enumerate(plan.rows()):
        entry, box = plan.tensors[plan.tensor[row]], item.shard.box
        layout = ArrayLayout.planned(item.meta, item.grid, backend.packing)
        if not whole[row]:
            # Pieces of cells that ranks share go into one file of this rank, back to back.
            place = Location(fragments_file(plan.rank), position, item.nbytes)
            rows.append([(box, place, b"")])
            position += item.nbytes
        elif item.meta.is_object:
            place = Location(shard_file(entry, box), 0, int(lengths[row]))
            rows.append([(box, place, b"")])
        elif not item.nbytes:
            first = layout.file((0,) * len(layout.shape))
            rows.append([(box, Location(f"{entry_name(entry)}/{first}", 0, 0), b"")])
        else:
            file = f"{entry_name(entry)}/{layout.file(layout.index(box))}"
            boxes = layout.chunks(box)
            found: list[WrittenChunk] = []
            for number in range(len(boxes)):
                chunk = boxes.row(number, len(layout.shape))
                start = number * (layout.stored_bytes or 0)
                size = chunk.volume * item.meta.itemsize
                found.append((chunk, Location(file, start, size), b""))
            rows.append(found)
    return write_result(rows, plan.boxes.width)
