"""A save and a load of thousands of ranks in one process, with the library's planner: times, bytes, files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from megackpt.backends.base import Backend, Target, plan_for_backend
from megackpt.backends.ranges import read_raw
from megackpt.checkpoint import decode_index, encode_index
from megackpt.distributed.wire_format import pack, unpack
from megackpt.planning.box import Box, Int64
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import Declarations, Manifest
from megackpt.planning.save_plan import SavePolicy
from megackpt.storage import FileReader, LocalStorage, Storage, digest
from simulation import wire
from simulation.layout import digest_blocks, index_size, located, write_results
from simulation.model import Model
from simulation.parallelism import Parallelism
from simulation.plan_reuse import Again, simulate_again

SAVE_COLLECTIVES = ("lowest", "gather", "scatter", "gather", "broadcast")
AGAIN_COLLECTIVES = ("lowest", "gather", "broadcast")
LOAD_COLLECTIVES = ("broadcast", "gather", "broadcast", "gather", "broadcast")
MOST_RANKS = 16_384


@dataclass
class Clock:
    """CPU seconds of this process by step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.process_time() - start


@dataclass(frozen=True, eq=False)
class Save:
    """A save as it would be. Bytes are of the data, without what frames it in files."""

    job: Parallelism
    format: str
    rows: int  # shards that ranks declare, replicas counted
    seconds: dict[str, float]
    gathered: Int64  # bytes of each rank's declarations, as they travel
    scattered: Int64  # bytes of each rank's plan
    written: Int64  # bytes that each rank writes
    files: Int64  # to how many files each rank writes
    manifest: Manifest  # what will be stored and where
    small: dict[
        str, int
    ]  # bytes of the small files of the table of contents; empty where ranks share zarr cells
    index: int | None  # bytes of megackpt.index; None: as above
    plain_index: int | None  # the same without digests
    chunks: int
    again: Again
    wires: dict[str, wire.Wire]  # by operation, by the same ranks
    opened: int | None  # bytes of what rank 0 sends to all in a load; None: as above

    @property
    def imbalance(self) -> float:
        return float(self.written.max() / max(1.0, self.written.mean()))

    @property
    def all_files(self) -> int:
        return len(self.manifest.files)


@dataclass(frozen=True, eq=False)
class Load:
    """A load as it would be, of the ranks that were looked at."""

    job: Parallelism
    ranks: tuple[int, ...]
    seconds: Int64 | Any  # CPU seconds of each rank's planning
    needed: Int64  # bytes of each rank's tensors
    read: Int64  # bytes that each rank reads, digests not checked; as ``needed`` where the format's reader reads
    requests: Int64  # calls that read them
    sends: wire.Wire | None


def simulate_save(
    model: Model,
    job: Parallelism,
    backend: Backend,
    common: int = 4096,
    validate: bool = True,
    milliseconds: int = 0,
) -> Save:
    """Plan a save with the common state of ``common`` bytes, as the coordinator does, from what the ranks send it.

    ``milliseconds``: how long the save takes, which its index says.
    """
    clock = Clock()
    with clock("declare"):
        parts = model.declared(job)
    with clock("send"):
        sent = [pack(part) for part in parts]
    del parts
    with clock("receive"):
        received: list[Declarations] = [unpack(message) for message in sent]
    gathered = np.array(list(map(len, sent)), np.int64)
    del sent
    with clock("plan"):
        plans, planned = plan_for_backend(backend, received, SavePolicy(), validate)
    with clock("pack"):
        packed = [replace(plan, tensors=()) for plan in plans]
        scattered = np.array([len(pack(plan)) for plan in packed], np.int64)
    planned = _with_common(planned, common)
    with clock("locate"):
        results = write_results(backend, plans, planned)
        manifest = replace(
            located(backend, planned, results), milliseconds=milliseconds
        )
    small, index, plain, opened = _contents(clock, backend, manifest)
    written = np.zeros(job.ranks, np.int64)
    np.add.at(written, planned.chunks.writer, planned.chunks.length)
    blocks = np.zeros(job.ranks, np.int64)
    np.add.at(blocks, manifest.chunks.writer, digest_blocks(manifest.chunks.length))
    messages = wire.messages_of(
        received[0], packed[0], gathered, scattered, results, blocks
    )
    wires = {
        "first save": wire.first_save(messages, int(written.sum())),
        "next save": wire.next_save(messages, int(written.sum())),
    }
    if opened is not None:
        wires["load"] = wire.load(received, gathered, opened)
    return Save(
        job=job,
        format=backend.properties.name,
        rows=sum(map(len, received)),
        seconds=clock.seconds,
        gathered=gathered,
        scattered=scattered,
        written=written,
        files=_files(manifest, job.ranks),
        manifest=manifest,
        small=small,
        index=index,
        plain_index=plain,
        chunks=len(manifest.chunks),
        again=simulate_again(backend, received),
        wires=wires,
        opened=opened,
    )


def _with_common(planned: Manifest, size: int) -> Manifest:
    length = planned.chunks.length.copy()
    is_common = np.array([entry.is_common for entry in planned.tensors], np.bool_)
    length[is_common[planned.chunks.tensor]] = size
    return replace(planned, chunks=replace(planned.chunks, length=length))


def _files(manifest: Manifest, ranks: int) -> Int64:
    pairs = np.unique(
        manifest.chunks.writer.astype(np.int64) << 32 | manifest.chunks.file
    )
    return np.bincount(pairs >> 32, minlength=ranks).astype(np.int64)


def _contents(
    clock: Clock, backend: Backend, manifest: Manifest
) -> tuple[dict[str, int], int | None, int | None, int | None]:
    """Sizes of the small files, of the index with and without digests, and of the manifest as it travels.

    None where cells have to be assembled.
    """
    if any(name.startswith("__fragments_") for name in manifest.files):
        return {}, None, None, None
    with clock("emit"):
        files = backend.finish(
            cast(Storage, LocalStorage("/")), manifest
        ).files  # looks at no storage then
    small = {name: (len(data), digest(data)) for name, data in files.items()}
    with clock("index"):
        encoded = encode_index(manifest, small)
    with clock("open"):
        opened, _ = decode_index(encoded)
    sizes = {name: size for name, (size, _) in small.items()}
    blocks = int(digest_blocks(manifest.chunks.length).sum())
    travels = wire.opened_size(opened, blocks)
    return sizes, index_size(manifest, small), len(encoded), travels


def simulate_load(model: Model, job: Parallelism, save: Save, sample: int = 64) -> Load:
    """Plan a load of the model by the ranks of this job, or by ``sample`` of them at even distances."""
    parts = model.declared(job)
    ranks = tuple(
        np.unique(
            np.linspace(0, job.ranks - 1, min(sample, job.ranks)).astype(int)
        ).tolist()
    )
    rows = [_one_rank(parts[rank], save.manifest) for rank in ranks]
    seconds, needed, read, requests = map(np.array, zip(*rows, strict=True))
    sends = None
    if save.opened is not None:
        sent = [len(pack(part)) for part in parts]
        sends = wire.load(parts, np.array(sent, np.int64), save.opened)
    return Load(job, ranks, seconds, needed, read, requests, sends)


def _one_rank(part: Declarations, manifest: Manifest) -> tuple[float, int, int, int]:
    is_object = np.array([entry.meta.is_object for entry in part.tensors], np.bool_)
    wanted = part.take(~is_object[part.tensor])
    start = time.process_time()
    plan = plan_load(wanted, manifest)
    seconds = time.process_time() - start
    needed = int(wanted.nbytes.sum())
    storage = CountingStorage()
    read_raw(cast(Storage, storage), plan, Nowhere(wanted), verify=False)
    return seconds, needed, storage.bytes, storage.requests


class CountingStorage:
    """Files of any length that are read without being there."""

    location = "a simulated checkpoint"
    called = location

    def __init__(self) -> None:
        self.bytes = 0
        self.requests = 0

    def open(self, _: str) -> FileReader:
        return _CountingReader(self)


class _CountingReader(FileReader):
    size = 1 << 62

    def __init__(self, storage: CountingStorage) -> None:
        self._storage = storage

    def read_into(self, start: int, buffers: Sequence[memoryview]) -> None:  # noqa: ARG002 - the file has no bytes
        self._storage.bytes += sum(map(len, buffers))
        self._storage.requests += 1

    def close(self) -> None:
        pass


class Nowhere(Target):
    """A target whose bytes are never touched: memory that was never used takes none."""

    def __init__(self, wanted: Declarations) -> None:
        self._wanted = wanted

    def open(self, target: int, box: Box) -> np.ndarray[Any, Any]:
        row = self._wanted.row(target)
        size = row.meta.itemsize
        whole = np.empty(
            row.shard.box.shape, np.complex128 if size == 16 else f"u{size}"
        )
        place: tuple[Any, ...] = box.relative_to(row.shard.box).slices()
        return whole[(*place, ...)]

    def close(self, target: int, box: Box, filled: np.ndarray[Any, Any]) -> None:
        pass

    def blob(self, target: int, data: bytes) -> None:
        pass


def per_shard(save: Save) -> dict[str, float]:
    """CPU microseconds a declared shard of the coordinator's steps."""
    return {what: seconds / save.rows * 1e6 for what, seconds in save.seconds.items()}
