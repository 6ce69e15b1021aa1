"""What tests of torch_dist share: declared tensors and objects, saves and loads through the backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megackpt import serialization
from megackpt.backends.torch_dist import TorchDist
from megackpt.planning.box import Box, Boxes
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import (
    ITEMSIZE,
    OBJECT,
    Declaration,
    Declarations,
    Manifest,
    ShardId,
    TensorMeta,
)
from megackpt.planning.save_plan import plan_save
from megackpt.staging.source import TensorSource
from megackpt.staging.target import LoadTarget
from megackpt.storage import LocalStorage

DTYPES = [name for name in ITEMSIZE if name != OBJECT]
SAVE_ID = "00112233445566778899aabbccddeeff"

Blob = Callable[[], bytes]
Held = tuple[Declaration, "torch.Tensor | Blob | None"]


@dataclass(frozen=True)
class Saved:
    root: LocalStorage
    manifest: Manifest

    @property
    def path(self) -> Path:
        return Path(self.root.location)


def piece(key: str, whole: torch.Tensor, box: Box | None = None, rank: int = 0) -> Held:
    """A rank's own piece of a tensor, contiguous."""
    box = box or Box.whole(whole.shape)
    meta = TensorMeta(tuple(whole.shape), str(whole.dtype).removeprefix("torch."))
    data = whole[box.slices()].contiguous()
    return Declaration(ShardId(key, box), meta, 0, False, data.nbytes, rank), data


def thing(
    key: str,
    value: Any,
    offset: tuple[int, ...] = (),
    shape: tuple[int, ...] = (),
    rank: int = 0,
) -> Held:
    """A rank's shard of an object."""
    shard = ShardId(key, Box(offset, (1,) * len(shape)))
    return Declaration(
        shard, TensorMeta(shape, OBJECT), 0, False, 100, rank
    ), lambda: serialization.dump(value)


def save(
    path: Path, ranks: Sequence[Sequence[Held]], backend: TorchDist | None = None
) -> Saved:
    backend = backend or TorchDist()
    root = LocalStorage(path, create=True)
    plans, manifest = plan_save(
        [Declarations.of([d for d, _ in held]) for held in ranks]
    )
    results = []
    for plan, held in zip(plans, ranks, strict=True):
        source = TensorSource(
            plan, [value for _, value in held], Boxes.of(d.shard.box for d, _ in held)
        )  # type: ignore[misc]
        results.append(backend.write(root, plan, source))
    manifest = replace(
        manifest.located(results),
        save_id=SAVE_ID,
        backend=(backend.properties.name, backend.properties.version),
    )
    for name, data in backend.finish(root, manifest).files.items():
        root.put(name, data)
    return Saved(root, manifest)


def load(saved: Saved, wanted: Sequence[Held], verify: bool = True) -> dict[int, bytes]:
    declared = Declarations.of([d for d, _ in wanted])
    stored = [
        None if d.meta.is_object else getattr(torch, d.meta.dtype) for d, _ in wanted
    ]
    tensors = [
        value if isinstance(value, torch.Tensor) else None for _, value in wanted
    ]
    landing = LoadTarget(tensors, Boxes.of(d.shard.box for d, _ in wanted), stored, {})
    TorchDist().read(saved.root, plan_load(declared, saved.manifest), landing, verify)
    return landing.blobs


def load_all(
    saved: Saved,
) -> tuple[dict[str, torch.Tensor], dict[tuple[str, tuple[int, ...]], Any]]:
    """All tensors whole, and all objects by key and offset."""
    wanted: list[Held] = []
    for key, meta in saved.manifest.tensors:
        if meta.is_object:
            wanted += [
                thing(key, None, c.box.offset, meta.shape)
                for c in saved.manifest.chunks_of(key)
            ]
        else:
            wanted.append(
                piece(key, torch.empty(meta.shape, dtype=getattr(torch, meta.dtype)))
            )
    blobs = load(saved, wanted)
    tensors = {d.shard.key: t for d, t in wanted if isinstance(t, torch.Tensor)}
    shards = {
        (wanted[i][0].shard.key, wanted[i][0].shard.box.offset): serialization.load(b)
        for i, b in blobs.items()
    }
    return tensors, shards


def foreign(path: Path) -> Saved:
    root = LocalStorage(path)
    backend = TorchDist()
    assert backend.recognises(root)
    return Saved(root, backend.read_manifest(root))


def halves(rows: int, columns: int) -> list[Box]:
    return [
        Box((0, 0), (rows // 2, columns)),
        Box((rows // 2, 0), (rows - rows // 2, columns)),
    ]
