"""torch_dist, version 1: torch DCP's own bytes (``__R_N.distcp`` and ``.metadata``) in Megatron's layout "B".

    common.pt            the common state, as the rank that was given it wrote it
    __{rank}_{n}.distcp  records: a torch.save archive each, back to back, payloads at multiples of 64
    .metadata            pickle of torch's Metadata: where each record is
    metadata.json        four fields; its appearance is the commit

Written so that ``torch.distributed.checkpoint.load``, ``dcp_to_torch_save`` and megatron-core 0.16 read it.
Reads its own, stock DCP's and all of Megatron's: with flattened optimizer state (up to 0.15, flattened.py), with
the common state among the objects (from 0.19 on, naming.py).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megackpt.backends.base import (
    CONFIG,
    Backend,
    Finished,
    Source,
    Target,
    read_config,
)
from megackpt.backends.ranges import read_raw
from megackpt.backends.torch_dist import checksums, foreign, table, writing
from megackpt.backends.torch_dist.listing import read_listing
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.manifest import LoadPlan, Manifest, SavePlan, WriteResult
from megackpt.storage import Storage

METADATA = ".metadata"
INTEGRITY = "integrity.json"
"""The digests of all files, which Megatron-Core keeps from 0.19 on if asked to."""


@dataclass(frozen=True)
class TorchDist(Backend):
    """Options: ``files_per_rank``, files (and threads) with which each rank writes; ``separation_hint``, a prefix:
    items whose key begins with it go into files of their own, named with it.
    """

    files_per_rank: int = 2
    separation_hint: str | None = None

    name: ClassVar[str] = "torch_dist"
    version: ClassVar[int] = 1
    reads: ClassVar[Collection[int]] = frozenset({1})

    def __post_init__(self) -> None:
        if type(self.files_per_rank) is not int or self.files_per_rank < 1:
            raise BackendError(
                f"files_per_rank is a whole number from 1 on, not {self.files_per_rank!r}"
            )
        hint = self.separation_hint
        if hint is not None and (
            not hint or "/" in hint or "\0" in hint or len(hint) > 200
        ):
            raise BackendError(
                f"separation_hint becomes part of file names, which {hint!r} cannot"
            )

    def files(self, ranks: int, manifest: Manifest) -> list[str]:  # noqa: ARG002 - any key may match the hint
        prefixes = [""] if self.separation_hint is None else ["", self.separation_hint]
        names = [
            writing.file_name(rank, number, prefix)
            for prefix in prefixes
            for rank in range(ranks)
            for number in range(self.files_per_rank)
        ]
        return [writing.COMMON_FILE, *names, METADATA, CONFIG]

    def unlisted(self, root: Storage, manifest: Manifest) -> Collection[str]:  # noqa: ARG002
        return [METADATA, *([INTEGRITY] if _is_integrity_manifest(root) else [])]

    def write(self, root: Storage, plan: SavePlan, data: Source) -> WriteResult:
        parts = writing.distribute(plan, self.files_per_rank, self.separation_hint)
        return writing.write_parts(root, plan, data, parts)

    def finish(self, root: Storage, manifest: Manifest) -> Finished:  # noqa: ARG002 - all data is in place
        common = np.array([entry.is_common for entry in manifest.tensors], np.bool_)
        return Finished(
            manifest, {METADATA: table.emit(manifest, common), **self.config()}
        )

    def renewed(
        self, files: Mapping[str, bytes], before: str, now: str
    ) -> Mapping[str, bytes] | None:
        data = table.renamed(files[METADATA], before, now)
        return None if data is None else {**files, METADATA: data}

    def recognises(self, root: Storage) -> bool:
        try:
            named = read_config(root) is not None
        except CorruptCheckpoint:
            return False
        return (
            super().recognises(root) if named else root.size(METADATA) is not None
        )  # stock DCP

    def read_manifest(self, root: Storage) -> Manifest:
        return foreign.read_manifest(root, METADATA, (self.name, self.version))

    def read(self, root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
        if plan.manifest.encoding == "raw":
            read_raw(root, plan, into, verify)
        else:
            from megackpt.backends.torch_dist import native  # brings torch

            native.read(root, plan, into, verify)

    def extended(self, root: Storage) -> Collection[str]:
        return {
            name for name, _, place in read_listing(root, METADATA) if place.through
        }

    def verify_native(self, root: Storage, manifest: Manifest) -> list[str] | None:
        return checksums.problems(root, manifest)


def _is_integrity_manifest(root: Storage) -> bool:
    """Is this Megatron's file, which tells of the files of the checkpoint, or another's that is called alike?"""
    if root.size(INTEGRITY) is None:
        return False
    try:
        fields = json.loads(root.get(INTEGRITY, limit=1 << 28))
        return isinstance(fields["algorithm"], str) and isinstance(
            fields["files"], dict
        )
    except (CorruptCheckpoint, ValueError, TypeError, KeyError, RecursionError):
        return False
