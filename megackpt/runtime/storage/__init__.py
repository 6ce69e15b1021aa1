"""The disk (and, behind the same few verbs, object stores): durable writes, ranged reads, digests."""

from __future__ import annotations

import os

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
    "open_storage",
    "unsafe_names",
]


def open_storage(path: str | os.PathLike[str]) -> Storage:
    """The storage at an existing place. FileNotFoundError or NotADirectoryError if there is none.

    The one place that will tell a URL of an object store from a directory.
    """
    return LocalStorage(path)
