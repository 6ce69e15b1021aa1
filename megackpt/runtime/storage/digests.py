"""Digests: the xxh3-128 of bytes, whole and by blocks. What a digest protects is told elsewhere."""

from __future__ import annotations

import xxhash

from megackpt.planning.manifest import DIGEST_BLOCK


def digest(data: bytes | memoryview) -> bytes:
    """The 16 bytes of xxh3-128, in canonical (big-endian) order."""
    # The object form lets go of the GIL on large input.
    return xxhash.xxh3_128(data).digest()


def digest_blocks(view: memoryview) -> bytes:
    """The digests, one after the other, of each DIGEST_BLOCK of a C-contiguous view; nothing for no bytes."""
    flat = view.cast("B") if view.nbytes else memoryview(b"")
    blocks = range(0, len(flat), DIGEST_BLOCK)
    return b"".join(digest(flat[start : start + DIGEST_BLOCK]) for start in blocks)
