"""The figures that need one process: planning and indexes of thousands of ranks (P9, P10), and digests (P13).

Everything here is CPU time of one thread. P13 takes the write pass as it is, with one file and so one thread, on
tensors that are in no cache: the ``Backend.write`` of a save into files that drop their bytes. The remaining time is
for digests (and the framing, some microseconds a MiB). P13 compares it with one copy of the same bytes into memory that
was touched before.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import torch
from simulation.layout import located, write_results
from simulation.parallelism import Parallelism, Places, grid_pieces
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan as DcpPlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from benchmarks.states import Spec, pieces
from megackpt.backends.base import plan_for_backend
from megackpt.backends.torch_dist import METADATA, TorchDist
from megackpt.checkpoint.index import INDEX, decode_index, encode_index
from megackpt.distributed.wire_format import pack, unpack
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    Declaration,
    Declarations,
    Manifest,
    SavePlan,
    ShardId,
    TensorEntry,
    TensorMeta,
)
from megackpt.planning.save_plan import SavePolicy
from megackpt.staging.source import TensorSource
from megackpt.storage import FileWriter, LocalStorage
from megackpt.strategies import backend_named

SHARDS = 64  # that each rank holds
CUT = 8  # ranks that share the tensors of a stage
ROWS, COLUMNS = 1024, 512  # of a shard: 2 MiB


def plan_and_emit(
    format_name: str, ranks: int, copies: int, rounds: int
) -> dict[str, list[float]]:
    """CPU microseconds a shard: ``plan`` (merge, coverage, dedup) and, for torch_dist, ``emit`` (``.metadata``)."""
    backend = backend_named(format_name.removeprefix("megackpt "))
    parts = [unpack(pack(part)) for part in _world(ranks, copies)]
    shards = sum(map(len, parts))
    taken: dict[str, list[float]] = {"plan": []}
    for _ in range(rounds):
        start = time.process_time()
        plans, manifest = plan_for_backend(backend, parts, SavePolicy())
        taken["plan"].append((time.process_time() - start) / shards * 1e6)
        if isinstance(backend, TorchDist):
            landed = _located(plans, manifest)
            start = time.process_time()
            backend.finish(LocalStorage("/"), landed)
            taken.setdefault("emit", []).append(
                (time.process_time() - start) / shards * 1e6
            )
    return taken


def index(folder: str, ranks: int, rounds: int) -> dict[str, list[float]]:
    """P10: ``bytes`` a shard, ``open`` in CPU seconds; ``DCP bytes`` and ``DCP open`` of the same, as .metadata."""
    manifest = _located(*plan_for_backend(TorchDist(), _world(ranks, 1), SavePolicy()))
    storage = LocalStorage(folder)
    storage.put(INDEX, encode_index(manifest, {}))
    stock = TorchDist().finish(storage, manifest).files[METADATA]
    storage.put(METADATA, stock)
    shards = len(manifest.chunks)
    size = Path(folder, INDEX).stat().st_size
    return {
        "bytes": [size / shards],
        "open": _seconds(lambda: decode_index(storage.get(INDEX)), rounds),
        "DCP bytes": [len(stock) / shards],
        "DCP open": _seconds(
            lambda: pickle.loads(Path(folder, METADATA).read_bytes()), rounds
        ),
    }


def stock_plan(ranks: int, rounds: int) -> dict[str, list[float]]:
    """The same of torch DCP's default planner, without copies: ``plan`` and ``emit`` in CPU microseconds a shard."""
    parts = _world(ranks, 1)
    plans = [
        DcpPlan(
            [_dcp_item(row) for row in part.rows()],
            planner_data={entry.key: (entry.key,) for entry in part.tensors},
        )
        for part in parts
    ]
    shards = sum(map(len, parts))
    taken: dict[str, list[float]] = {"plan": [], "emit": []}
    for _ in range(rounds):
        planner = DefaultSavePlanner()
        planner.set_up_planner({}, None, is_coordinator=True)
        start = time.process_time()
        planned, metadata = planner.create_global_plan(plans)
        middle = time.process_time()
        metadata.storage_data = {
            item.index: _StorageInfo(f"__{rank}_0.distcp", i << 22, 1 << 21)
            for rank, plan in enumerate(planned)
            for i, item in enumerate(plan.items)
        }
        pickle.dumps(metadata)
        taken["plan"].append((middle - start) / shards * 1e6)
        taken["emit"].append((time.process_time() - middle) / shards * 1e6)
    return taken


def digests(folder: str, nbytes: int, rounds: int) -> list[float]:
    """P13: CPU seconds of a write pass into files that drop their bytes, over CPU seconds of a copy."""
    held = pieces(Spec.large(nbytes), 0, 1, 0)
    rows = [
        Declaration(
            ShardId(p.key, Box.whole(p.shape)),
            TensorMeta(p.shape, "float32"),
            0,
            False,
            p.data.nbytes,
            0,
        )
        for p in held
    ]
    backend = TorchDist(files_per_rank=1)
    declared = Declarations.of(rows)
    (plan,), _ = plan_for_backend(backend, [declared], SavePolicy())
    staged = TensorSource(plan, [p.data for p in held], declared.boxes)
    copies = [torch.zeros_like(p.data) for p in held]
    ratios = []
    for _ in range(rounds + 1):
        start = time.process_time()
        backend.write(_Nowhere(folder), plan, staged)
        middle = time.process_time()
        for copy, p in zip(copies, held, strict=True):
            copy.copy_(p.data)
        ratios.append((middle - start) / (time.process_time() - middle))
    return ratios[1:]


class _Nowhere(LocalStorage):
    """Files that drop their bytes."""

    def create(self, name: str) -> FileWriter:  # noqa: ARG002
        return _Lost()


class _Lost(FileWriter):
    def __init__(self) -> None:
        self._written = 0

    def write(self, buffers: Sequence[memoryview]) -> None:
        self._written += sum(buffer.nbytes for buffer in buffers)

    @property
    def position(self) -> int:
        return self._written

    def close(self) -> None: ...

    def abort(self) -> None: ...


def _world(ranks: int, copies: int) -> list[Declarations]:
    """``ranks`` ranks with 64 shards each; a stage is cut over 8 ranks, and the whole is repeated ``copies`` times."""
    cut = min(CUT, ranks // copies)
    job = Parallelism(tensor=cut, pipeline=ranks // copies // cut, data=copies)
    meta, places = TensorMeta((ROWS * cut, COLUMNS), "bfloat16"), Places(job)
    boxes, which = grid_pieces(meta.shape, (cut, 1))
    tensors: list[TensorEntry] = []
    for stage, layer in product(range(job.pipeline), range(SHARDS)):
        places.add(
            len(tensors),
            boxes,
            boxes.volume * meta.itemsize,
            stage=stage,
            tensor=which[0],
        )
        tensors.append(TensorEntry(f"stages.{stage}.layers.{layer}.weight", meta))
    return places.parts(tensors)


def _located(plans: Sequence[SavePlan], manifest: Manifest) -> Manifest:
    """As torch_dist would have written it."""
    results = write_results(TorchDist(), plans, manifest)
    return located(TorchDist(), manifest, results)


def _dcp_item(row: Declaration) -> WriteItem:
    offset, shape = torch.Size(row.shard.box.offset), torch.Size(row.shard.box.shape)
    data = TensorWriteData(
        ChunkStorageMetadata(offset, shape),
        TensorProperties(torch.bfloat16),
        torch.Size(row.meta.shape),
    )
    return WriteItem(
        MetadataIndex(row.shard.key, offset), WriteItemType.SHARD, tensor_data=data
    )


def _seconds(step: Callable[[], object], rounds: int) -> list[float]:
    """CPU seconds of each round; the process is idle otherwise."""
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        step()
        taken.append(time.process_time() - start)
    return taken
