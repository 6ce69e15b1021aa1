"""The disk (and, behind the same few verbs, object stores): durable writes, ranged reads, digests."""

from __future__ import annotations

from megackpt.runtime.storage.digests import digest, digest_blocks, read_digested
from megackpt.runtime.storage.files import TEMPORARY
from megackpt.runtime.storage.interface import (
    Batch,
    FileReader,
    FileUpdater,
    FileWriter,
    Storage,
    allocate,
    unsafe_names,
)
from megackpt.runtime.storage.local import LocalStorage
from megackpt.runtime.storage.single import SingleFile

__all__ = [
    "TEMPORARY",
    "Batch",
    "FileReader",
    "FileUpdater",
    "FileWriter",
    "LocalStorage",
    "SingleFile",
    "Storage",
    "allocate",
    "digest",
    "digest_blocks",
    "read_digested",
    "unsafe_names",
]
