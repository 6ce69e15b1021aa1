"""The disk (and, behind the same few verbs, object stores): durable writes, ranged reads, digests."""

from __future__ import annotations

from megackpt.runtime.storage.digests import digest, digest_blocks
from megackpt.runtime.storage.interface import FileReader, FileWriter, Storage, allocate, unsafe_names
from megackpt.runtime.storage.local import TEMPORARY, LocalStorage

__all__ = [
    "TEMPORARY",
    "FileReader",
    "FileWriter",
    "LocalStorage",
    "Storage",
    "allocate",
    "digest",
    "digest_blocks",
    "unsafe_names",
]
