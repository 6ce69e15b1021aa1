"""Digests of tensors that do not depend on their layout: sums over their elements.

A digest is the sum modulo 2^128 of a hash of 128 bits of each element: of its index in the tensor
and its bits. Ranks add up the sums of their boxes. If elements change, their old hashes are
subtracted and the new ones added. A digest tells damage, and weights of another version. It is no
protection against forgery. docs/delta-format.md has the hash.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_intdigest

Key = tuple[int, int]
"""Two words of 64 bits, which begin the halves of each hash."""

MODULUS = 1 << 128
_AT_ONCE = 1 << 14  # elements: the arrays of a block stay in the processor's cache
# Odd words, for the low and the high half of a hash: the golden ratio and the square roots of 2, 3
# and 5, as fractions of 2^64. The last two are those of the finalizer of SplitMix64.
_INDEX = 0x9E3779B97F4A7C15, 0x6A09E667F3BCC909
_BITS = 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B
_MIX = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def key_of(name: str) -> Key:
    """The key of a tensor with this name: equal bits of two tensors have different digests."""
    number = xxh3_128_intdigest(name.encode())
    return number & (1 << 64) - 1, number >> 64


def digest(
    key: Key,
    indices: NDArray[np.uint64],
    bits: NDArray[Any],
    old: NDArray[Any] | None = None,
) -> int:
    """The sum over elements with these flat indices in the tensor and these bits (unsigned).

    ``old``: the sum less that of these bits at the same indices.
    """
    total = 0
    for start in range(0, len(bits), _AT_ONCE):
        block = slice(start, start + _AT_ONCE)
        for half in range(2):
            at = indices[block] * np.uint64(_INDEX[half])
            at += np.uint64(key[half])
            part = _hashed(at, bits[block], half)
            if old is not None:
                part -= _hashed(at, old[block], half)
            total += part << (64 * half)
    return total % MODULUS


def _hashed(at: NDArray[np.uint64], bits: NDArray[Any], half: int) -> int:
    """The sum of one half of the hashes: SplitMix64 of index, key and bits.

    Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014.
    """
    hashes = bits.astype(np.uint64)
    hashes *= np.uint64(_BITS[half])
    hashes += at
    hashes ^= hashes >> np.uint64(30)
    hashes *= np.uint64(_MIX[0])
    hashes ^= hashes >> np.uint64(27)
    hashes *= np.uint64(_MIX[1])
    hashes ^= hashes >> np.uint64(31)
    # The sum of 2^14 halves of 32 bits does not overflow.
    low = int((hashes & np.uint64(0xFFFFFFFF)).sum())
    high = int((hashes >> np.uint64(32)).sum())
    return low + (high << 32)
