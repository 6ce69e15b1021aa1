"""torch_dist, version 1: torch DCP's files (``__R_N.distcp`` and ``.metadata``) in Megatron's
layout "B".

    common.pt            the common state, written by the rank that holds it
    __{rank}_{n}.distcp  records: consecutive torch.save archives, with payloads aligned to 64
    .metadata            pickle of torch's Metadata: where each record is. Optional
    metadata.json        the name and version of the format

``torch.distributed.checkpoint.load``, ``dcp_to_torch_save`` and megatron-core 0.16 read its
checkpoints. The backend reads megackpt's checkpoints, stock DCP's, and all of Megatron's: with
flattened optimizer state (up to 0.15, flattened.py), and with the common state among the objects
(since 0.19, metadata_reader.py).
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from megackpt import limits
from megackpt.backends.base import (
    CONFIG,
    Backend,
    Finished,
    Layout,
    Links,
    Properties,
    Source,
    Target,
    config_file,
    read_config,
)
from megackpt.backends.object_files import COMMON_FILE
from megackpt.backends.ranges import read_raw
from megackpt.backends.torch_dist import foreign_manifest, metadata_writer
from megackpt.backends.torch_dist.distcp_writer import (
    distribute,
    file_name,
    unchanged_files,
    write_files,
)
from megackpt.backends.torch_dist.metadata_reader import read_listing
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.box import Int64
from megackpt.planning.manifest import LoadPlan, Manifest, SavePlan, WriteResult
from megackpt.storage import Storage

METADATA = ".metadata"
INTEGRITY = "integrity.json"
"""The digests of all files. Megatron-Core writes it on request since 0.19."""

_LONGEST_HINT = 200


@dataclass(frozen=True)
class TorchDist(Backend):
    """torch DCP's format.

    Options: ``files_per_rank``, the number of files (and threads) of each rank;
    ``separation_hint``, a prefix: items whose key begins with it go into separate files, named with
    it; ``torch_metadata``: False writes no ``.metadata``. Only megackpt reads such a checkpoint, by
    its index.
    """

    files_per_rank: int = 2
    separation_hint: str | None = None
    torch_metadata: bool = True

    properties: ClassVar[Properties] = Properties(
        "torch_dist", 1, frozenset({1}), reuses=True
    )

    def __post_init__(self) -> None:
        if type(self.files_per_rank) is not int or self.files_per_rank < 1:
            raise BackendError(
                f"files_per_rank must be an integer >= 1, not {self.files_per_rank!r}"
            )
        if type(self.torch_metadata) is not bool:
            raise BackendError(
                f"torch_metadata must be True or False, not {self.torch_metadata!r}"
            )
        hint = self.separation_hint
        if hint is None:
            return
        if not hint or "/" in hint or "\0" in hint or len(hint) > _LONGEST_HINT:
            raise BackendError(
                f"separation_hint becomes part of file names, which {hint!r} cannot"
            )

    def layout(self, ranks: int, manifest: Manifest) -> Layout:  # noqa: ARG002 - any key may match
        files = [COMMON_FILE, METADATA, CONFIG]
        for rank in range(ranks):
            for number in range(self.files_per_rank):
                files.append(file_name(rank, number))
                if self.separation_hint is not None:
                    files.append(file_name(rank, number, self.separation_hint))
        return Layout(files)

    def write(self, root: Storage, plan: SavePlan, data: Source) -> WriteResult:
        files = distribute(plan, self.files_per_rank, self.separation_hint)
        return write_files(root, plan, data, files)

    def write_linking(
        self, root: Storage, plan: SavePlan, data: Source, links: Links
    ) -> WriteResult:
        compared = set(np.flatnonzero(links.rows).tolist())
        files = distribute(plan, self.files_per_rank, self.separation_hint, compared)
        parts = [*files, *unchanged_files(plan, links)]
        return write_files(root, plan, data, parts, self.files_per_rank + 1)

    def finish(self, root: Storage, manifest: Manifest) -> Finished:  # noqa: ARG002
        if not self.torch_metadata:
            return Finished(manifest, config_file(self.properties))
        metadata = metadata_writer.emit(manifest, {})
        return Finished(manifest, {METADATA: metadata, **config_file(self.properties)})

    def recognises(self, root: Storage) -> bool:
        try:
            if read_config(root) is not None:
                return super().recognises(root)
        except CorruptCheckpoint:
            return False
        return root.size(METADATA) is not None  # stock DCP

    def read_manifest(self, root: Storage) -> Manifest:
        manifest = foreign_manifest.read_manifest(root, METADATA)
        tables = [METADATA]
        # Only a file with the fields that Megatron writes belongs to the checkpoint.
        if root.size(INTEGRITY) is not None:
            with suppress(
                CorruptCheckpoint, ValueError, TypeError, KeyError, RecursionError
            ):
                fields = json.loads(root.get(INTEGRITY, limit=limits.INTEGRITY_BYTES))
                algorithm, listed = fields["algorithm"], fields["files"]
                if isinstance(algorithm, str) and isinstance(listed, dict):
                    tables.append(INTEGRITY)
        backend = self.properties.name, self.properties.version
        return replace(manifest, tables=tuple(tables), backend=backend)

    def decoded_bytes(self, manifest: Manifest) -> Int64:
        if manifest.encoding == "raw":
            return np.zeros(len(manifest.chunks), np.int64)
        # Both ends of a record are read in full; the bytes between the ends are read by ranges.
        return np.full(len(manifest.chunks), 2 * foreign_manifest.EDGE, np.int64)

    def read(self, root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
        if plan.manifest.encoding == "raw":
            read_raw(root, plan, into, verify)
        else:
            from megackpt.backends.torch_dist import foreign_reader  # imports torch

            foreign_reader.read(root, plan, into, verify)

    def verify_native(self, root: Storage, manifest: Manifest) -> list[str] | None:
        return foreign_manifest.damage(root, manifest)


def extension_keys(root: Storage) -> set[str]:
    """The keys of the objects that DCP's extensions encoded: only they can decode them."""
    listing = read_listing(root, METADATA)
    return {item.name for item in listing if item.place.through}
