"""The disk (and, behind the same few verbs, object stores): durable writes, ranged reads, digests."""

from __future__ import annotations

from megackpt.runtime.storage.bucket import SINGLE_WRITER, BucketStorage, Version, conditional_puts
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
from megackpt.runtime.storage.roots import is_url, root_at
from megackpt.runtime.storage.single import SingleFile

__all__ = [
    "SINGLE_WRITER",
    "TEMPORARY",
    "Batch",
    "BucketStorage",
    "FileReader",
    "FileUpdater",
    "FileWriter",
    "LocalStorage",
    "SingleFile",
    "Storage",
    "Version",
    "allocate",
    "conditional_puts",
    "digest",
    "digest_blocks",
    "is_url",
    "read_digested",
    "root_at",
    "unsafe_names",
]
