"""Megatron's ``strategies.cached_metadata_filesystem_reader``: a storage reader for torch DCP."""

from __future__ import annotations

from megackpt import dcp


class CachedMetadataFileSystemReader(dcp.FileSystemReader):
    """``megackpt.dcp.FileSystemReader``, which opens a checkpoint once a load: a stale cache there cannot be."""

    @classmethod
    def clear_metadata_cache(cls) -> None:
        """There is none."""
