"""zarr v3 through tensorstore: one array per tensor; objects and the common state beside the arrays."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import ClassVar

import numpy as np

from megackpt.backends.base import Backend, Finished, Source, Target
from megackpt.backends.zarr import listing
from megackpt.backends.zarr.cells import raw_rows, read_rows, write_rows
from megackpt.backends.zarr.layout import refuse_unfit
from megackpt.backends.zarr.names import ARRAY, METADATA, folder
from megackpt.planning.manifest import Bool, LoadPlan, Manifest, SavePlan, WriteResult
from megackpt.runtime.storage import Storage


class Zarr(Backend):
    """A directory that is a zarr group: any zarr reader opens it.

    ====================================  =========================================================
    ``zarr.json``                         the group, with consolidated metadata where all can read it
    ``<key>/zarr.json``                   an array; attribute ``key``: the tensor's key, unencoded
    ``<key>/c/0/1``                       one cell of the grid: little-endian bytes in C order
    ``<key>.objects/shard_0.1_1.2.pt``    the blob of an object's shard at (0, 1) of global shape (1, 2)
    ``common.pt``                         the blob of the common state
    ``metadata.json``                     last: which format this is
    ====================================  =========================================================

    Keys are percent-encoded (see names.py). Cells are neither compressed nor sharded; those at the end of a
    tensor are padded to full size, as zarr demands. Their locations tell the length of the tensor's own
    bytes; these begin the file unless padding stands between them (``Cells.prefix``), and then only this
    backend can read them: digests of such cells are checked through ``read``.
    """

    name: ClassVar[str] = listing.NAME
    version: ClassVar[int] = listing.VERSION
    reads: ClassVar[Collection[int]] = frozenset((listing.VERSION,))
    gridded: ClassVar[bool] = True

    def files(self, ranks: int, manifest: Manifest) -> list[str]:  # noqa: ARG002 (same names for any number)
        """Raises BackendError where an array cannot hold a tensor, before anything is written."""
        refuse_unfit(manifest.tensors, manifest.grids)
        return [*map(folder, manifest.tensors), ARRAY, METADATA]

    def write(self, root: Storage, plan: SavePlan, data: Source) -> WriteResult:
        return write_rows(root, plan, data)

    def finish(self, root: Storage, manifest: Manifest) -> Finished:  # noqa: ARG002 (cells are whole)
        return Finished(manifest, listing.contents(manifest))

    def raw_chunks(self, manifest: Manifest) -> Bool:
        return raw_rows(manifest, np.arange(len(manifest.chunks), dtype=np.int64))

    def recognises(self, root: Storage) -> bool:
        if root.size(METADATA) is None:
            return False
        try:
            config = json.loads(root.get(METADATA, 1 << 20))
            return config["sharded_backend"] == self.name and config["sharded_backend_version"] in self.reads
        except (ValueError, KeyError, TypeError, RecursionError):
            return False

    def read_manifest(self, root: Storage) -> Manifest:
        return listing.discover(root)

    def read(self, root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
        read_rows(root, plan, into, verify)
