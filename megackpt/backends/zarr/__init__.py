"""zarr v3: one array per tensor; objects and the common state as additional files."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from megackpt.backends import object_files
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
from megackpt.backends.zarr.array_metadata import metadata_files, refuse_unfit
from megackpt.backends.zarr.cell_writer import write_rows
from megackpt.backends.zarr.chunk_reader import (
    damage,
    missing_rows,
    raw_rows,
    read_rows,
)
from megackpt.backends.zarr.codecs import Packing
from megackpt.backends.zarr.discovery import discover, recognised
from megackpt.backends.zarr.fragments import assemble, described, fragment_names
from megackpt.backends.zarr.grid import (
    ARRAY,
    FOREIGN,
    MEGATRON,
    VERSION,
    entry_name,
)
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.box import Int64
from megackpt.planning.manifest import LoadPlan, Manifest, SavePlan, WriteResult
from megackpt.storage import Storage


class Zarr(Backend):
    """A directory that is a zarr group: any zarr reader opens it. Byte by byte: docs/zarr.md.

    ====================================  ======================================================
    ``zarr.json``                         the group, with consolidated metadata if all can read it
    ``<key>/zarr.json``                   an array; attribute ``key``: the tensor's key, unencoded
    ``<key>/c.0.1``                       one cell of the grid; a shard if it is large
    ``<key>.objects/shard_0.1_1.2.pt``    the blob of an object's shard at (0, 1) of shape (1, 2)
    ``common.pt``                         the blob of the common state
    ``metadata.json``                     last: the name of the format
    ``__fragments_3``                     during a save: rank 3's parts of cells that ranks share
    ====================================  ======================================================

    Keys are percent-encoded, and objects stored, as object_files.py describes. The chunks of the
    manifest are zarr's chunks. Those at the end of a tensor are padded to full size, as zarr
    demands. The length of their location is the number of bytes in the tensor. These bytes begin at
    the location, unless there is padding between them (``Cells.prefix``): then only this backend
    can read them.

    Version 1 is the format of this name in Megatron-Core up to 0.15, version 3 stands for arrays of
    other programs (discovery.py). Both are read, not written.

    ``compression`` is None, "zstd", "blosc", or one of these with a level ("zstd:5"). Digests are
    computed from the uncompressed bytes. ``checksum``: a crc32c ends each chunk, for readers that
    do not know our digests. A load needs neither option. ``missing_chunks`` is for the load of
    arrays of other programs: "fill", their chunks that are not stored have the fill value, as zarr
    specifies; "error", they are damage, as in version 1 and 2.
    """

    properties: ClassVar[Properties] = Properties(
        "zarr",
        VERSION,
        frozenset((MEGATRON, VERSION, FOREIGN)),
        gridded=True,
        max_item_bytes=128 << 20,
        reuses=True,
    )

    def __init__(
        self,
        compression: str | None = None,
        checksum: bool = True,
        missing_chunks: str = "fill",
    ) -> None:
        """Raises BackendError for an unknown compression, or other unknown values."""
        if missing_chunks not in ("fill", "error"):
            raise BackendError(
                f"missing_chunks must be 'fill' or 'error', not {missing_chunks!r}"
            )
        self.fills = missing_chunks == "fill"
        self.packing = Packing.chosen(compression, checksum)
        encoding = "native"
        if compression is None:
            encoding = "raw"
        properties = replace(type(self).properties, encoding=encoding)
        self.properties = properties  # type: ignore[misc] # see Backend.properties

    def layout(self, ranks: int, manifest: Manifest) -> Layout:  # noqa: ARG002
        """Raises BackendError if an array cannot hold a tensor, before anything is written."""
        refuse_unfit(manifest.tensors, manifest.grids)
        entries = map(entry_name, manifest.tensors)
        return Layout([*entries, *fragment_names(manifest), ARRAY, CONFIG])

    def write(self, root: Storage, plan: SavePlan, data: Source) -> WriteResult:
        return write_rows(root, plan, data, self.packing)

    def write_linking(
        self, root: Storage, plan: SavePlan, data: Source, links: Links
    ) -> WriteResult:
        return write_rows(root, plan, data, self.packing, links)

    def finish(self, root: Storage, manifest: Manifest) -> Finished:
        """The table of contents, after the cells that ranks share are assembled."""
        written = described(manifest)
        manifest = assemble(root, manifest, self.packing)
        files = object_files.key_files(manifest.tensors)
        files |= metadata_files(manifest, self.packing)
        return Finished(manifest, files | config_file(self.properties), written)

    def decoded_bytes(self, manifest: Manifest) -> Int64:
        chunks = manifest.chunks
        decoded = super().decoded_bytes(replace(manifest, encoding="native"))
        # A chunk at the end of a tensor is stored at full size, like all chunks.
        missing = missing_rows(manifest)
        largest = np.zeros(len(manifest.tensors), np.int64)
        np.maximum.at(largest, chunks.tensor[~missing], decoded[~missing])
        if not len(chunks.digests):
            largest *= 2  # a library has the bytes and the elements of a chunk, too
        raw = raw_rows(manifest, np.arange(len(chunks), dtype=np.int64))
        return np.where(raw | missing, 0, largest[chunks.tensor])

    def recognises(self, root: Storage) -> bool:
        """By metadata.json. Other directories by an array or a group in it."""
        if super().recognises(root):
            return True
        try:
            if read_config(root) is not None:
                return False
        except CorruptCheckpoint:
            return False
        return recognised(root)

    def read_manifest(self, root: Storage) -> Manifest:
        config = read_config(root)
        version = FOREIGN
        if config is not None:
            version = config.sharded_backend_version
        return discover(root, version, self.fills)

    def read(self, root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
        read_rows(root, plan, into, verify)

    def verify_native(self, root: Storage, manifest: Manifest) -> list[str] | None:
        return damage(root, manifest)
