"""Digests: the xxh3-128 of bytes, whole and by blocks. What a digest protects is told elsewhere."""

from __future__ import annotations

import xxhash

from megackpt.planning.manifest import DIGEST_BLOCK
from megackpt.storage.interface import FileReader

_STRIDE = 256 << 10
"""Bytes that are read before they are hashed: both copies of them are still in the inner caches then."""


def digest(data: bytes | memoryview) -> bytes:
    """The 16 bytes of xxh3-128, in canonical (big-endian) order."""
    # The object form lets go of the GIL on large input.
    return xxhash.xxh3_128(data).digest()


def digest_blocks(view: memoryview) -> bytes:
    """The digests, one after the other, of each DIGEST_BLOCK of a C-contiguous view; nothing for no bytes."""
    flat = view.cast("B") if view.nbytes else memoryview(b"")
    blocks = range(0, len(flat), DIGEST_BLOCK)
    return b"".join(digest(flat[start : start + DIGEST_BLOCK]) for start in blocks)


def read_digested(reader: FileReader, start: int, place: memoryview) -> bytes:
    """Fill a flat view with the bytes from ``start`` on, and give their digest. Raises as ``read_into``."""
    hasher = xxhash.xxh3_128()
    for first in range(0, len(place), _STRIDE):
        part = place[first : first + _STRIDE]
        reader.read_into(start + first, [part])
        hasher.update(part)
    return hasher.digest()
