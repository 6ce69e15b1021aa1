"""Wanted rows and the tensors that they land in: planned, read, and objects opened. On this rank alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megackpt import events, serialization
from megackpt.backends.base import Backend
from megackpt.checkpoint import open_same
from megackpt.errors import (
    CheckpointingException,
    CheckpointReplaced,
    CorruptCheckpoint,
)
from megackpt.planning.box import Box
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import (
    COMMON_KEY,
    OBJECT,
    Declaration,
    Declarations,
    LoadPlan,
    Manifest,
    ShardId,
)
from megackpt.staging.progress import counted_target
from megackpt.staging.source import synchronize
from megackpt.staging.target import LoadTarget
from megackpt.state import ShardedTensor, dtype_named
from megackpt.storage import Storage


@dataclass(frozen=True)
class Reading:
    """How bytes are read (``verify``: against their digests) and objects opened (``trusted`` classes)."""

    verify: bool = True
    trusted: Sequence[type] = ()

    def __post_init__(self) -> None:
        given: object = self.trusted  # callers without a type checker give anything
        if isinstance(given, str | type) or not isinstance(given, Iterable):
            raise ValueError(f"trusted takes a tuple of classes, not {given!r}")
        classes = tuple(given)
        object.__setattr__(self, "trusted", classes)
        wrong = [
            one for one in classes if not callable(one) and not isinstance(one, tuple)
        ]
        if wrong:
            raise ValueError(f"trusted takes classes, not {wrong[0]!r}")

    def rows(
        self,
        root: Storage,
        backend: Backend,
        manifest: Manifest,
        wanted: Declarations,
        tensors: Sequence[torch.Tensor | None],
    ) -> list[Any]:
        """Fetch every wanted row: into ``tensors[i]``, or (where that is None) the content of an object's blob."""
        landing = landing_of(wanted, manifest, tensors)
        self.fetch(root, backend, plan_load(wanted, manifest), landing)
        return self.values(root, wanted, landing)

    def fetch(
        self, root: Storage, backend: Backend, plan: LoadPlan, landing: LoadTarget
    ) -> None:
        """Read what is planned: all of this rank's wanted rows, or its share of what several ranks want."""
        tensors, manifest = landing.tensors, plan.manifest
        synchronize(tensors)
        mine = np.unique(plan.target).tolist()
        todo = sum(
            tensor.nbytes
            for tensor in map(tensors.__getitem__, mine)
            if tensor is not None
        )
        try:
            backend.read(root, plan, counted_target(landing, todo), self.verify)
        except (CheckpointingException, OSError) as error:
            replaced = replacement(root, manifest)
            if replaced is not None:
                raise replaced from error
            raise
        synchronize(tensors)
        events.current().done = todo + sum(map(len, landing.blobs.values()))

    def values(
        self, root: Storage, wanted: Declarations, landing: LoadTarget
    ) -> list[Any]:
        """For each wanted row its tensor, or the object that its blob holds."""
        values: list[Any] = list(landing.tensors)
        for row, blob in landing.blobs.items():
            where = f"{root.location}: {wanted.row(row).shard}"
            values[row] = serialization.load(blob, trusted=self.trusted, where=where)
            if wanted.row(row).shard.key == COMMON_KEY and not isinstance(
                values[row], dict
            ):
                raise CorruptCheckpoint(
                    f"{where} is a {type(values[row]).__name__}, not a dict"
                )
        return values


def replacement(root: Storage, manifest: Manifest) -> CheckpointReplaced | None:
    """Was a failure to read due to an overwrite under our feet?"""
    try:
        if manifest.save_id:
            open_same(root.called, manifest.save_id)
    except CheckpointReplaced as error:
        return error
    except (CheckpointingException, OSError):
        return None  # what went wrong first tells more
    return None


def landing_of(
    wanted: Declarations, manifest: Manifest, tensors: Sequence[torch.Tensor | None]
) -> LoadTarget:
    return LoadTarget(tensors, wanted.boxes, _stored(wanted, manifest), {})


def _stored(wanted: Declarations, manifest: Manifest) -> list[torch.dtype | None]:
    """For each wanted row the dtype that is stored (None for objects)."""
    numbers = manifest.numbers()
    rows = (numbers.get(entry.key) for entry in wanted.tensors)
    names = ["" if row is None else manifest.tensors[row].meta.dtype for row in rows]
    dtypes = {
        name: None if name in ("", OBJECT) else dtype_named(name) for name in set(names)
    }
    table = [dtypes[name] for name in names]
    return [table[number] for number in wanted.tensor.tolist()]


def common_row(manifest: Manifest, rank: int = 0) -> Declarations:
    """The common state as a wanted row; no row where none is stored."""
    entry = next((e for e in manifest.tensors if e.is_common), None)
    shard = ShardId(COMMON_KEY, Box((), ()))
    return Declarations.of(
        [] if entry is None else [Declaration(shard, entry.meta, 0, False, 0, rank)]
    )


def destination(shard: ShardedTensor) -> torch.Tensor:
    """The caller's own tensor, or a new one on the CPU; zeroed where the stored one may be smaller."""
    tensor = shard.data
    if tensor is None or tensor.is_meta:
        try:
            tensor = torch.empty(shard.local_shape, dtype=shard.dtype, device="cpu")
        except RuntimeError as error:
            raise CheckpointingException(
                f"there is no memory for {shard.key!r}, {tuple(shard.local_shape)} of {shard.dtype}"
            ) from error
    tensor = tensor.detach()
    return tensor.zero_() if shard.allow_shape_mismatch else tensor
