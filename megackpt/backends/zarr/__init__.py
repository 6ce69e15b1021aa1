"""zarr v3: one array per tensor; objects and the common state beside the arrays."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import ClassVar

import numpy as np

from megackpt.backends import object_files
from megackpt.backends.base import (
    CONFIG,
    Backend,
    Finished,
    Layout,
    Properties,
    Source,
    Target,
    config_file,
    read_config,
)
from megackpt.backends.zarr.assembling import assembled, fragment_names
from megackpt.backends.zarr.documents import Packing, refuse_unfit
from megackpt.backends.zarr.finding import discover, holds
from megackpt.backends.zarr.layout import grid_of, inner_of
from megackpt.backends.zarr.listing import contents
from megackpt.backends.zarr.names import ARRAY, MEGATRON, VERSION, ZARRAY, entry_name
from megackpt.backends.zarr.reading import damage, raw_rows, read_rows
from megackpt.backends.zarr.writing import write_rows
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Int64
from megackpt.planning.manifest import Bool, LoadPlan, Manifest, SavePlan, WriteResult
from megackpt.storage import Storage


class Zarr(Backend):
    """A directory that is a zarr group: any zarr reader opens it. Byte by byte: docs/zarr.md.

    ====================================  ==========================================================
    ``zarr.json``                         the group, with consolidated metadata where all can read it
    ``<key>/zarr.json``                   an array; attribute ``key``: the tensor's key, unencoded
    ``<key>/c.0.1``                       one cell of the grid, which is a shard where it is large
    ``<key>.objects/shard_0.1_1.2.pt``    the blob of an object's shard at (0, 1) of global shape (1, 2)
    ``common.pt``                         the blob of the common state
    ``metadata.json``                     last: which format this is
    ``__fragments_3``                     while a save goes on: rank 3's pieces of cells that ranks share
    ====================================  ==========================================================

    Keys are percent-encoded, objects and common state kept as object_files.py has it. The chunks of the manifest are
    zarr's own (inner) chunks. Those at the end of a tensor are padded to full size, as zarr demands. Their locations
    tell the length of the tensor's own bytes; these begin at the location unless padding stands between them
    (``Cells.prefix``), and then only this backend can read them: digests of such chunks are checked through ``read``.

    Version 1 is the format that Megatron-Core called so up to 0.15 (finding.py): read, not written.

    ``compression`` is None, "zstd", "blosc", or one of these with a level ("zstd:5"). Digests are those of what was
    compressed. ``checksum``: a crc32c ends each chunk, for readers that do not know our digests. A load needs neither.
    """

    properties: ClassVar[Properties] = Properties(
        "zarr",
        VERSION,
        frozenset((MEGATRON, VERSION)),
        gridded=True,
        max_item_bytes=128 << 20,
    )

    def __init__(self, compression: str | None = None, checksum: bool = True) -> None:
        """Raises BackendError for a compression that is unknown."""
        self.packing = Packing(compression, checksum)
        encoding = "raw" if compression is None else "native"
        properties = replace(type(self).properties, encoding=encoding)
        self.properties = properties  # type: ignore[misc] # see Backend.properties

    def layout(self, ranks: int, manifest: Manifest) -> Layout:  # noqa: ARG002 (the manifest knows the ranks)
        """Raises BackendError where an array cannot hold a tensor, before anything is written."""
        refuse_unfit(manifest.tensors, manifest.grids)
        return Layout(
            [
                *map(entry_name, manifest.tensors),
                *fragment_names(manifest),
                ARRAY,
                CONFIG,
            ]
        )

    def write(self, root: Storage, plan: SavePlan, data: Source) -> WriteResult:
        return write_rows(root, plan, data, self.packing)

    def finish(self, root: Storage, manifest: Manifest) -> Finished:
        """The table of contents, once the cells that ranks share are assembled."""
        manifest = assembled(root, manifest, self.packing)
        files = contents(manifest, self.packing) | config_file(self.properties)
        return Finished(manifest, files)

    def raw_chunks(self, manifest: Manifest) -> Bool:
        return raw_rows(manifest, np.arange(len(manifest.chunks), dtype=np.int64))

    def decoded_bytes(self, manifest: Manifest) -> Int64:
        chunks = manifest.chunks
        sizes = np.zeros(len(manifest.tensors), np.int64)
        for number, ((_, meta), grid) in enumerate(
            zip(manifest.tensors, manifest.grids, strict=True)
        ):
            cell = grid_of(meta.shape, grid)
            if not meta.is_object:
                inner = (
                    cell
                    if manifest.backend[1] == MEGATRON
                    else inner_of(cell, meta.itemsize)
                )
                sizes[number] = min(
                    float(np.prod(inner, dtype=np.float64)) * meta.itemsize, 1 << 62
                )
        return np.where(
            self.raw_chunks(manifest),
            0,
            np.maximum(sizes[chunks.tensor], chunks.length),
        )

    def recognises(self, root: Storage) -> bool:
        """Does metadata.json say so? Directories of Megatron's without one are known by an array in them."""
        if super().recognises(root):
            return True
        return self._unnamed(root) and any(
            holds(root, name, ZARRAY) for name in root.list()
        )

    def _unnamed(self, root: Storage) -> bool:
        """Is there no metadata.json that names a format?"""
        try:
            return read_config(root) is None
        except CorruptCheckpoint:
            return False

    def unlisted_files(self, root: Storage, manifest: Manifest) -> Collection[str]:  # noqa: ARG002
        keys = object_files.key_files(manifest)
        if manifest.backend[1] == MEGATRON:
            arrays = [
                entry.key for entry in manifest.tensors if not entry.meta.is_object
            ]
            return [f"{key}/{name}" for key in arrays for name in (ZARRAY, ".zattrs")]
        return [
            ARRAY,
            *(f"{entry_name(entry)}/{ARRAY}" for entry in manifest.tensors),
            *keys,
        ]

    def read_manifest(self, root: Storage) -> Manifest:
        config = read_config(root)
        return discover(
            root, MEGATRON if config is None else config.sharded_backend_version
        )

    def read(self, root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
        read_rows(root, plan, into, verify)

    def verify_native(self, root: Storage, manifest: Manifest) -> list[str] | None:
        return damage(root, manifest)
