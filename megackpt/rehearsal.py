"""A save that does not happen: what a job of another shape would write, rank by rank, from a stored manifest alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from uuid import uuid4

import numpy as np

from megackpt.backends.base import Backend, plan_in_format
from megackpt.checkpoint import encode_index
from megackpt.planning.box import Box, Int64
from megackpt.planning.manifest import DIGEST_BLOCK, DIGEST_SIZE, Manifest, SavePlan, WriteResult
from megackpt.planning.resharding import Axes, Parallelism, reshard
from megackpt.planning.save_plan import SavePolicy


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """What the ranks of a job would write. Bytes are those of tensors, and of objects as they are stored now."""

    job: Parallelism
    format: str
    bytes: Int64  # of each rank
    files: Int64  # that each rank writes to
    all_files: int
    chunks: int
    index: int  # bytes of megackpt.index, but for the small files that it lists
    axes: dict[str, Axes]
    uneven: tuple[str, ...]  # keys whose cut axis does not divide evenly

    @property
    def imbalance(self) -> float:
        """The busiest rank's bytes over the mean: the factor by which the save takes longer than it could."""
        return float(self.bytes.max() / max(1.0, self.bytes.mean()))


def rehearse(manifest: Manifest, job: Parallelism, backend: Backend) -> Rehearsal:
    """Plan a save of what this manifest tells of. Reads nothing; 8,192 ranks take a few seconds.

    Raises BackendError where the format cannot hold it.
    """
    resharded = reshard(manifest, job)
    plans, planned = plan_in_format(backend, resharded.parts, SavePolicy())
    planned = _with_objects(planned, manifest)
    chunks = planned.chunks
    files = np.array([backend.count_files(plan) for plan in plans], np.int64)
    shared = {place.file for plan in plans for place in plan.places or () if place}
    written = np.zeros(job.ranks, np.int64)
    np.add.at(written, chunks.writer, chunks.length)
    return Rehearsal(
        job,
        backend.name,
        written,
        files,
        len(shared) if shared else int(files.sum()),
        len(chunks),
        index_size(located(backend, plans, planned) or _front_to_back(planned)),
        resharded.axes,
        resharded.uneven,
    )


def _with_objects(planned: Manifest, stored: Manifest) -> Manifest:
    """Objects with the bytes that they have now: a plan knows none before they are serialised."""
    length = planned.chunks.length.copy()
    sizes = {name: int(stored.chunks.length[row]) for row, name in _objects(stored)}
    for row, name in _objects(planned):
        length[row] = sizes[name]
    return replace(planned, chunks=replace(planned.chunks, length=length))


def _objects(manifest: Manifest) -> Iterator[tuple[int, tuple[str, Box]]]:
    """(row, key and box) of each chunk that is an object."""
    chunks = manifest.chunks
    is_object = np.array([entry.meta.is_object for entry in manifest.tensors], np.bool_)
    for row in np.flatnonzero(is_object[chunks.tensor]).tolist():
        key, meta = manifest.tensors[chunks.tensor[row]]
        yield row, (key, chunks.boxes.row(row, len(meta.shape)))


def located(backend: Backend, plans: Sequence[SavePlan], planned: Manifest) -> Manifest | None:
    """The manifest as a save would commit it, without digests; None where nobody can know before it is written.

    ``planned`` has the lengths of objects.
    """
    chunks = planned.chunks
    bounds = np.searchsorted(chunks.writer, np.arange(len(plans) + 1)).tolist()
    results: list[WriteResult] = []
    for plan, (low, high) in zip(plans, pairwise(bounds), strict=True):
        result = backend.foretold(plan, chunks.length[low:high])
        if result is None:
            return None
        results.append(result)
    named = replace(planned, backend=(backend.name, backend.version), encoding=backend.encoding)
    return replace(named, save_id=uuid4().hex).located(results)


def index_size(manifest: Manifest, small: Mapping[str, tuple[int, bytes]] | None = None) -> int:
    """Bytes of the index of a manifest without digests, with those that a save takes."""
    blocks = int((-(-manifest.chunks.length // DIGEST_BLOCK)).sum())
    return len(encode_index(manifest, small or {})) + blocks * DIGEST_SIZE


def _front_to_back(planned: Manifest) -> Manifest:
    """As if each rank wrote one file from front to back."""
    writers, file = np.unique(planned.chunks.writer, return_inverse=True)
    ends = np.cumsum(planned.chunks.length)
    first = ends - planned.chunks.length
    start = first - first[np.searchsorted(file, file)]
    chunks = replace(planned.chunks, file=file.astype(np.int32), start=start)
    return replace(planned, chunks=chunks, files=tuple(f"__{rank}_0.distcp" for rank in writers.tolist()))
