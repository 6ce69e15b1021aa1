"""Writes ``synthetic-layout-c`` and its ``.expected.pt``: what Megatron-Core 0.19 and later write, by torch alone.

SYNTHETIC: no release of Megatron-Core wrote it. It follows what is known of the layout: as 0.16 writes torch_dist,
but without common.pt; the common state is the object ``common_state/shard_0_1``, a list of one, of rank 0;
metadata.json has two fields. TP2 x DP2: ranks 0 and 1 hold the halves, ranks 2 and 3 are copies, of which some
write their part of the work. Tests borrow ``write`` for checkpoints of other shapes. Run it in this directory.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

NAME = "synthetic-layout-c"


class Piece(NamedTuple):
    """What one rank writes of one tensor (``size``: global), or an object (``size`` None, ``data`` its list)."""

    rank: int
    name: str
    data: Any
    size: tuple[int, ...] | None = None
    offset: tuple[int, ...] = ()


def write(
    folder: Path, pieces: Sequence[Piece], plan: type = SavePlan, **more: Any
) -> None:
    """Records and ``.metadata`` as torch DCP lays them out; ``more``: further attributes of the Metadata."""
    folder.mkdir()
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    files: dict[int, bytes] = {}
    items: dict[int, list[WriteItem]] = {
        rank: [] for rank in range(max(p.rank for p in pieces) + 1)
    }
    for piece in pieces:
        record = io.BytesIO()
        torch.save(piece.data, record)
        index = MetadataIndex(piece.name)
        kind, about = WriteItemType.BYTE_IO, None
        if piece.size is None:
            described[piece.name] = BytesStorageMetadata()
        else:
            index = MetadataIndex(piece.name, torch.Size(piece.offset))
            whole, properties = (
                torch.Size(piece.size),
                TensorProperties(piece.data.dtype),
            )
            chunk = ChunkStorageMetadata(torch.Size(piece.offset), piece.data.shape)
            described.setdefault(
                piece.name, TensorStorageMetadata(properties, whole, [])
            )
            described[piece.name].chunks.append(chunk)
            kind, about = WriteItemType.SHARD, TensorWriteData(chunk, properties, whole)
        written = files.get(piece.rank, b"")
        places[index] = _StorageInfo(
            f"__{piece.rank}_0.distcp", len(written), len(record.getvalue())
        )
        files[piece.rank] = written + record.getvalue()
        items[piece.rank].append(WriteItem(index, kind, tensor_data=about))
    metadata = Metadata(described, None, places, StorageMeta(save_id="synthetic"))
    metadata.version = "1.0.0"  # no argument of torch 2.8's
    metadata.all_local_plans = [plan(its, planner_data={}) for its in items.values()]  # type: ignore[attr-defined]
    vars(metadata).update(more)
    for rank, written in files.items():
        (folder / f"__{rank}_0.distcp").write_bytes(written)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, 4))
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(config))


def tensors() -> dict[str, torch.Tensor]:
    """Every tensor whole, by key."""
    made = torch.Generator().manual_seed(19)

    def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=made).to(dtype)

    return {
        "embedding.word_embeddings.weight": some(12, 8),
        "decoder.layers.self_attention.linear_qkv.weight": some(
            4, 24, 8, dtype=torch.bfloat16
        ),
        "decoder.layers.mlp.linear_fc1.weight": some(4, 16, 8, dtype=torch.bfloat16),
        "decoder.final_layernorm.weight": some(8, dtype=torch.bfloat16),
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": some(8),
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_0.bucket_idx_0.exp_avg": some(
            23
        ),
        "misc.fp8": some(8, 4).to(torch.float8_e4m3fn),
        "misc.step": torch.tensor(100),
    }


COMMON: Mapping[str, Any] = {
    "iteration": 100,
    "checkpoint_version": 3.0,
    "args": {"tensor_model_parallel_size": 2, "none": None, "dtype": torch.bfloat16},
    "optimizer": {"param_groups": [{"lr": 0.125, "betas": (0.9, 0.95)}]},
    "content_metadata": {
        "distrib_optim_sharding_type": "dp_reshardable",
        "singleton_local_shards": False,
    },
}


def pieces() -> list[Piece]:
    """What ranks 0 to 3 write."""
    full = tensors()
    found = [
        Piece(0, "common_state/shard_0_1", [dict(COMMON)]),
        *(
            Piece(
                t, f"rng_state/shard_0.{t}_1.2", [[{"tp": t, "state": torch.arange(4)}]]
            )
            for t in (0, 1)
        ),
        *(
            Piece(i, f"decoder.layers._extra_state/shard_{i}_4", [{"layer": i}])
            for i in range(4)
        ),
    ]
    for number, (key, tensor) in enumerate(full.items()):
        size = tuple(tensor.shape)
        if key.startswith(
            "decoder.layers."
        ):  # a leading axis for the layers, each split along its first axis
            rows = size[1] // 2
            for layer in range(4):
                for t in (0, 1):
                    data = tensor[layer : layer + 1, t * rows : t * rows + rows].clone()
                    found.append(
                        Piece(t + layer % 2 * 2, key, data, size, (layer, t * rows, 0))
                    )
        elif "bucket_idx" in key:  # runs of no common size
            for rank, (start, stop) in enumerate([(0, 5), (5, 6), (6, 20), (20, 23)]):
                found.append(
                    Piece(rank, key, tensor[start:stop].clone(), size, (start,))
                )
        elif len(size) == 2:
            rows = size[0] // 2
            found += [
                Piece(
                    t,
                    key,
                    tensor[t * rows : t * rows + rows].clone(),
                    size,
                    (t * rows, 0),
                )
                for t in (0, 1)
            ]
        else:
            found.append(Piece(number % 4, key, tensor, size, (0,) * len(size)))
    return found


if __name__ == "__main__":
    write(Path(NAME), pieces())
    torch.save(tensors(), f"{NAME}.expected.pt")
