"""Small healthy checkpoints of every format, ours and others': what the corpus is made of by spoiling them."""

from __future__ import annotations

import io
import json
import pickle
import runpy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs
import numpy as np
import torch
import zarr
from safetensors.torch import save_file

import megackpt
import megackpt.zarr_dtypes
from megackpt import ShardedObject, ShardedTensor, Strategy
from tests.foreign import deepspeed_files
from tests.hostile import orbax_files

GOLDEN = Path(__file__).parent.parent / "golden"
DCP = runpy.run_path(str(GOLDEN / "make_layout_c.py"))

TENSORS = {
    "w": torch.arange(32, dtype=torch.float32).reshape(8, 4),
    "b": torch.arange(6).to(torch.bfloat16),
}
COMMON: Mapping[str, Any] = {"iteration": 100, "args": {"tp": 2, "betas": (0.9, 0.95)}}


def saved(
    folder: Path, backend: Any, *, index: bool = False, objects: bool = True
) -> None:
    state: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(key, tensor.clone())
        for key, tensor in TENSORS.items()
    }
    if objects:
        state |= {
            f"rng{i}": ShardedObject("rng", [i], (2,), (i,)) for i in range(2)
        } | dict(COMMON)
    megackpt.save(state, folder, backend)
    if not index:
        (folder / "megackpt.index").unlink()


def dcp(folder: Path, common: bool) -> None:
    """Stock DCP's bytes; the common state in a file of its own (Megatron up to 0.16) or among the objects."""
    piece = DCP["Piece"]
    pieces = [
        *(
            piece(i, "w", TENSORS["w"][4 * i : 4 * i + 4].clone(), (8, 4), (4 * i, 0))
            for i in range(2)
        ),
        piece(0, "b", TENSORS["b"], (6,), (0,)),
        *(piece(i, f"rng/shard_{i}_2", [[i]]) for i in range(2)),
    ]
    if not common:
        pieces.append(piece(0, "common_state/shard_0_1", [dict(COMMON)]))
    DCP["write"](folder, pieces)
    if common:
        torch.save(dict(COMMON), folder / "common.pt")
        config = json.loads((folder / "metadata.json").read_text())
        config |= {"common_backend": "torch", "common_backend_version": 1}
        (folder / "metadata.json").write_text(json.dumps(config))


def sharded(folder: Path) -> None:
    """A zarr array whose one file is a shard of four chunks."""
    saved(folder, "zarr")
    crc = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    document = json.loads((folder / "w/zarr.json").read_text())
    document["codecs"] = [
        {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [2, 4],
                "codecs": crc,
                "index_codecs": crc,
                "index_location": "end",
            },
        }
    ]
    (folder / "w/zarr.json").write_text(json.dumps(document))
    (folder / "w/c.0.0").write_bytes(shard([(36 * i, 36) for i in range(4)]))


def shard(index: list[tuple[int, int]], crc: int | None = None) -> bytes:
    rows = np.split(TENSORS["w"].numpy(), 4)
    told = np.array(index, np.uint64).tobytes()
    end = google_crc32c.value(told) if crc is None else crc
    parts = [
        row.tobytes() + google_crc32c.value(row.tobytes()).to_bytes(4, "little")
        for row in rows
    ]
    return b"".join(parts) + told + end.to_bytes(4, "little")


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
GZIP = {"name": "gzip", "configuration": {"level": 1}}
BLOSC = {
    "cname": "lz4",
    "clevel": 5,
    "shuffle": "shuffle",
    "typesize": 4,
    "blocksize": 0,
}
# No array of ours has a big-endian index, so a library decodes the whole shard.
BIG = {"name": "bytes", "configuration": {"endian": "big"}}
SHARDS = {
    "name": "sharding_indexed",
    "configuration": {
        "chunk_shape": [2, 4],
        "codecs": [LITTLE, GZIP],
        "index_codecs": [BIG, {"name": "crc32c"}],
    },
}


def foreign(codecs: list[dict[str, Any]]) -> Any:
    """Arrays of zarr v3 in a folder without the document of a group."""

    def make(folder: Path) -> None:
        for key, tensor in TENSORS.items():
            how = codecs if key == "w" else [LITTLE, GZIP]
            plain = tensor.view(torch.int16) if key == "b" else tensor
            name = str(tensor.dtype).removeprefix("torch.")
            document = {
                "zarr_format": 3,
                "node_type": "array",
                "shape": tensor.shape,
                "data_type": name,
                "chunk_grid": {
                    "name": "regular",
                    "configuration": {"chunk_shape": tensor.shape},
                },
                "chunk_key_encoding": {"name": "default"},
                "fill_value": 0,
                "codecs": how,
                "attributes": {},
            }
            (folder / key).mkdir(parents=True)
            (folder / key / "zarr.json").write_text(json.dumps(document))
            array = zarr.open_array(folder / key, mode="r+")
            array[...] = plain.numpy().view(array.dtype)

    return make


def old(**how: Any) -> Any:
    """A group of zarr v2."""

    def make(folder: Path) -> None:
        group = zarr.create_group(folder, zarr_format=2)
        for key, tensor in TENSORS.items():
            values = tensor.view(torch.int16).numpy() if key == "b" else tensor.numpy()
            group.create_array(
                key,
                shape=tensor.shape,
                chunks=tensor.shape,
                dtype=values.dtype,
                fill_value=0,
                **how,
            )[...] = values

    return make


def torch_file(folder: Path) -> None:
    folder.mkdir()
    torch.save({**TENSORS, **COMMON}, folder / "model.pt")


def bins(folder: Path) -> None:
    """Hugging Face's older kind: several files and an index."""
    folder.mkdir()
    names = {
        key: f"pytorch_model-0000{i}-of-00002.bin" for i, key in enumerate(TENSORS, 1)
    }
    for key, name in names.items():
        torch.save({key: TENSORS[key]}, folder / name)
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": names})
    )


def one_safetensors(folder: Path) -> None:
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors", {"format": "pt"})


PARAMETERS = [{key: tensor.float() for key, tensor in TENSORS.items()}]


def deepspeed_run(folder: Path) -> None:
    deepspeed_files.write_zero3(folder / "global_step3", PARAMETERS, 2)
    (folder / "latest").write_text("global_step3")
    (folder / "zero_to_fp32.py").touch()


def copied(name: str) -> Any:
    return lambda folder: shutil.copytree(GOLDEN / name, folder)


MAKERS: Mapping[str, tuple[str, Any]] = {
    "ours": ("torch_dist", lambda folder: saved(folder, "torch_dist", index=True)),
    "dcp": ("torch_dist", lambda folder: dcp(folder, True)),
    "layout C": ("torch_dist", lambda folder: dcp(folder, False)),
    "flattened": ("torch_dist", copied("mcore-0.12.3-flat-tp2pp1dp2")),
    "zarr": ("zarr", lambda folder: saved(folder, "zarr")),
    "zarr with index": ("zarr", lambda folder: saved(folder, "zarr", index=True)),
    "zarr zstd": (
        "zarr",
        lambda folder: saved(folder, Strategy("zarr", options={"compression": "zstd"})),
    ),
    "zarr blosc": (
        "zarr",
        lambda folder: saved(
            folder, Strategy("zarr", options={"compression": "blosc"})
        ),
    ),
    "zarr shards": ("zarr", sharded),
    "megatron zarr": ("zarr", copied("mcore-0.12.3-zarr-tp2pp1dp2")),
    "other gzip": ("zarr", foreign([LITTLE, GZIP])),
    "other zstd": (
        "zarr",
        foreign(
            [BIG, {"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
        ),
    ),
    "other blosc": ("zarr", foreign([BIG, {"name": "blosc", "configuration": BLOSC}])),
    "other shards": ("zarr", foreign([SHARDS])),
    "numcodecs lz4": (
        "zarr",
        foreign([LITTLE, {"name": "numcodecs.lz4", "configuration": {}}]),
    ),
    "old bz2": ("zarr", old(compressors=numcodecs.BZ2())),
    "old blosc": ("zarr", old(compressors=numcodecs.Blosc(), order="F")),
    "old lz4": ("zarr", old(compressors=numcodecs.LZ4())),
    "old lzma": (
        "zarr",
        old(compressors=numcodecs.LZMA(), filters=[numcodecs.Shuffle(2)]),
    ),
    "safetensors": (
        "safetensors",
        lambda folder: saved(folder, Strategy("safetensors", options={"shards": 2})),
    ),
    "one safetensors": ("safetensors", one_safetensors),
    "orbax": ("orbax", copied("orbax-0.12.8-v0")),
    "orbax plain": ("orbax", copied("orbax-0.12.8-v0-plain")),
    "orbax made": ("orbax", orbax_files.made),
    "orbax msgpack": ("orbax", orbax_files.only_msgpack),
    "torch": ("torch", torch_file),
    "bins": ("torch", bins),
    "zero2": (
        "deepspeed",
        lambda folder: deepspeed_files.write_zero2(folder, PARAMETERS, 2),
    ),
    "zero3": (
        "deepspeed",
        lambda folder: deepspeed_files.write_zero3(folder, PARAMETERS, 2),
    ),
    "universal": (
        "deepspeed",
        lambda folder: deepspeed_files.write_universal(folder, PARAMETERS),
    ),
    "deepspeed run": ("deepspeed", deepspeed_run),
    "fsdp_dtensor": ("torch_dist", copied("fsdp-dtensor-mcore-0.16.1")),
    "torch_checkpointing": ("torch_checkpointing", copied("torch-checkpointing-0.1.1")),
}
"""Kind -> its format, and what writes it. Without an index of ours, unless said, for that is where trust ends."""


def told(kind: str, folder: Path) -> dict[str, Any]:
    """What readers need to know to ask for all that is there."""
    held = megackpt.load_sharded_metadata(folder)
    return {
        "format": MAKERS[kind][0],
        "healthy": str(folder),
        "tensors": {
            key: (str(value.dtype).removeprefix("torch."), list(value.global_shape))
            for key, value in held.items()
            if isinstance(value, ShardedTensor)
        },
        "objects": [
            key for key, value in held.items() if isinstance(value, ShardedObject)
        ],
    }


def table(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def record(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()
