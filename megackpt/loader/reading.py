"""Wanted rows and the tensors that they land in: planned, read, and objects opened. On this rank alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megackpt import objects
from megackpt.backends.base import Backend
from megackpt.checkpoint import open_same
from megackpt.errors import CheckpointingException
from megackpt.planning.box import Box
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import COMMON_KEY, Declaration, Declarations, Manifest, ShardId
from megackpt.runtime.staging import Landing
from megackpt.runtime.storage import Storage
from megackpt.sharded import ShardedTensor, dtype_named


@dataclass(frozen=True)
class Reading:
    """How bytes are read (``verify``: against their digests) and objects opened (``trusted`` classes)."""

    verify: bool = True
    trusted: tuple[type, ...] = ()

    def rows(
        self,
        root: Storage,
        backend: Backend,
        manifest: Manifest,
        wanted: Declarations,
        tensors: Sequence[torch.Tensor | None],
    ) -> list[Any]:
        """Fetch every wanted row: into ``tensors[i]``, or (where that is None) the content of an object's blob."""
        landing = Landing(tensors, wanted.held(), _stored(wanted, manifest), {})
        try:
            backend.read(root, plan_load(wanted, manifest), landing, self.verify)
        except (CheckpointingException, OSError):
            if manifest.save_id:
                open_same(root.location, manifest.save_id)  # an overwrite under our feet is told as such
            raise
        values: list[Any] = list(tensors)
        for row, blob in landing.blobs.items():
            where = f"{root.location}: {wanted.row(row).shard}"
            values[row] = objects.load(blob, trusted=self.trusted, where=where)
        return values


def _stored(wanted: Declarations, manifest: Manifest) -> list[torch.dtype | None]:
    """For each wanted row the dtype that is stored (None for objects)."""
    numbers = manifest.numbers()
    metas = {e.key: manifest.tensors[numbers[e.key]].meta for e in wanted.tensors if e.key in numbers}
    dtypes = {key: None if meta.is_object else dtype_named(meta.dtype) for key, meta in metas.items()}
    return [dtypes[wanted.tensors[number].key] for number in wanted.tensor]


def common_row(manifest: Manifest, rank: int = 0) -> Declarations:
    """The common state as a wanted row; no row where none is stored."""
    entry = next((e for e in manifest.tensors if e.is_common), None)
    shard = ShardId(COMMON_KEY, Box((), ()))
    return Declarations.of([] if entry is None else [Declaration(shard, entry.meta, 0, False, 0, rank)])


def destination(shard: ShardedTensor) -> torch.Tensor:
    """The caller's own tensor, or a new one on the CPU; zeroed where the stored one may be smaller."""
    tensor = shard.data
    if tensor is None or tensor.is_meta:
        tensor = torch.empty(shard.local_shape, dtype=shard.dtype)
    tensor = tensor.detach()
    return tensor.zero_() if shard.allow_shape_mismatch else tensor
