"""Digests of tensors that do not depend on their layout: sums over their elements.

A digest is the sum modulo 2^128 of a hash of 128 bits of each element: of its index in the tensor
and its bits. Ranks add up the sums of their boxes. If elements change, their old hashes are
subtracted and the new ones added. A digest tells damage, and weights of another version. It is no
protection against forgery. docs/delta-format.md has the hash.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_intdigest

from megackpt.planning.box import Box
from megackpt.planning.manifest import TensorEntry

Key = tuple[int, int]
"""Two words of 64 bits, which begin the halves of each hash."""

MODULUS = 1 << 128
_AT_ONCE = 1 << 14  # elements: the arrays of a block stay in the processor's cache
_INDICES = 1 << 18  # elements whose indices are made at once
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


def word_dtype(itemsize: int) -> np.dtype[Any]:
    """The dtype of the words of elements of this size. An element of 16 bytes has two words."""
    return np.dtype(f"<u{min(itemsize, 8)}")


def in_words(box: Box, itemsize: int) -> Box:
    """The box, with an axis for the words of an element if there are several."""
    if itemsize <= 8:
        return box
    return Box((*box.offset, 0), (*box.shape, itemsize // 8))


def flat_indices(
    places: NDArray[np.int64], box: Box, whole: tuple[int, ...]
) -> NDArray[np.uint64]:
    """Places in a box as places in a tensor of shape ``whole``, both in row-major order."""
    axis = len(whole)
    # Trailing axes that the box fills belong to one run, and so does the axis before them.
    while axis and box.shape[axis - 1] == whole[axis - 1]:
        axis -= 1
    outer = max(axis - 1, 0)
    run = max(1, math.prod(box.shape[outer:]))
    strides = [math.prod(whole[axis + 1 :]) for axis in range(len(whole))]
    first = sum(a * b for a, b in zip(box.offset, strides, strict=True))
    starts = np.array([first])
    for extent, stride in zip(box.shape[:outer], strides, strict=False):
        starts = np.add.outer(starts, np.arange(extent) * stride).reshape(-1)
    if len(starts) == 1:
        return (places + first).astype(np.uint64)
    number, rest = np.divmod(places, run)
    return (starts[number] + rest).astype(np.uint64)


def digest_of(
    entry: TensorEntry,
    box: Box,
    bits: NDArray[Any],
    places: Any = None,
    old: NDArray[Any] | None = None,
    first: int = 0,
) -> int:
    """The part of a tensor's digest from the words of a box: ``bits[i]`` is at ``places[i]``.

    ``places`` None: consecutive words of the box, from the word ``first`` on. ``old``: less the
    part of these words at the places.
    """
    itemsize = entry.meta.itemsize
    if places is None:
        # Not all at a time: the indices of words of 2 bytes take four times their memory.
        total = 0
        for start in range(0, len(bits), _INDICES):
            part = bits[start : start + _INDICES]
            inner = np.arange(len(part)) + (first + start)
            total += digest_of(entry, box, part, inner)
        return total % MODULUS
    whole = in_words(Box.whole(entry.meta.shape), itemsize).shape
    indices = flat_indices(places, in_words(box, itemsize), whole)
    return digest(key_of(entry.key), indices, bits, old)
