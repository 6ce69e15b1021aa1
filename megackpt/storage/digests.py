"""Digests: the xxh3-128 of bytes, whole and by blocks."""

from __future__ import annotations

import xxhash

from megackpt.planning.manifest import DIGEST_BLOCK
from megackpt.storage.interface import FileReader

_STRIDE = 256 << 10
"""Bytes to read before hashing them. Both copies are then still in the inner caches."""


def digest(data: bytes | memoryview) -> bytes:
    """Return the 16 bytes of xxh3-128, in canonical (big-endian) order."""
    # The object form releases the GIL on large input.
    return xxhash.xxh3_128(data).digest()


def digest_blocks(view: memoryview) -> bytes:
    """Return the joined digests of the DIGEST_BLOCKs of a C-contiguous view; b"" for no bytes."""
    if not view.nbytes:
        return b""
    flat = view.cast("B")
    blocks = range(0, len(flat), DIGEST_BLOCK)
    return b"".join(digest(flat[start : start + DIGEST_BLOCK]) for start in blocks)


def read_digested(reader: FileReader, start: int, place: memoryview) -> bytes:
    """Fill a flat view with the bytes from ``start`` on; return their digest.

    Raises as ``read_into``.
    """
    hasher = xxhash.xxh3_128()
    for first in range(0, len(place), _STRIDE):
        part = place[first : first + _STRIDE]
        reader.read_into(start + first, [part])
        hasher.update(part)
    return hasher.digest()
