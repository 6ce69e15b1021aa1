"""Elements of boxes as words: the unsigned integers in which versions are compared."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.deltas.codec import Bits, Changes, apply
from megackpt.deltas.tensor_digest import MODULUS, digest, key_of
from megackpt.planning.box import Box
from megackpt.planning.manifest import TensorEntry

_AT_ONCE = 1 << 18  # elements


def word_dtype(itemsize: int) -> np.dtype[Any]:
    """The dtype of the words of elements of this size. An element of 16 bytes has two words."""
    return np.dtype(f"<u{min(itemsize, 8)}")


def in_words(box: Box, itemsize: int) -> Box:
    """The box, with an axis for the words of an element if there are several."""
    if itemsize <= 8:
        return box
    return Box((*box.offset, 0), (*box.shape, itemsize // 8))


def words(array: NDArray[Any]) -> NDArray[Any]:
    """A contiguous array of elements as words, in the shape of ``in_words``; no copy."""
    shape = in_words(Box.whole(array.shape), array.itemsize).shape
    return array.reshape(-1).view(word_dtype(array.itemsize)).reshape(shape)


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
    bits: Bits,
    places: Any = None,
    old: Bits | None = None,
) -> int:
    """The part of a tensor's digest from the words of a box: ``bits[i]`` is at ``places[i]``.

    ``places`` None: all words of the box. ``old``: less the part of these words at the places.
    """
    itemsize = entry.meta.itemsize
    if places is None:
        # Not all at a time: the indices of words of 2 bytes take four times their memory.
        total = 0
        for start in range(0, len(bits), _AT_ONCE):
            part = bits[start : start + _AT_ONCE]
            inner = np.arange(start, start + len(part))
            total += digest_of(entry, box, part, inner)
        return total % MODULUS
    whole = in_words(Box.whole(entry.meta.shape), itemsize).shape
    indices = flat_indices(places, in_words(box, itemsize), whole)
    return digest(key_of(entry.key), indices, bits, old)


def change(array: NDArray[Any], region: Box, found: Changes | Bits, piece: Box) -> None:
    """Turn words of a region into the words of the next version, as far as a piece has them.

    ``found``: the decoded words of the piece.
    """
    if array.size == 0:
        return
    if array.shape == piece.shape and region == piece and array.flags.c_contiguous:
        apply(found, array.reshape(-1))
        return
    common = region.intersect(piece)
    if common is None:
        return
    if not isinstance(found, Changes):
        values = found.reshape(piece.shape)[common.relative_to(piece).slices()]
        array[common.relative_to(region).slices()] = values
        return
    axes = np.unravel_index(found.places, piece.shape)
    inside = np.ones(len(found.places), np.bool_)
    index = []
    for axis, coordinate in enumerate(axes):
        local = coordinate + (piece.offset[axis] - region.offset[axis])
        inside &= (local >= 0) & (local < region.shape[axis])
        index.append(local)
    array[tuple(local[inside] for local in index)] += found.differences[inside]
