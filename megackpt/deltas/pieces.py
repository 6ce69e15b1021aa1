"""Elements of boxes as words: the unsigned integers in which versions are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.deltas.codec import Bits, Changes, apply
from megackpt.planning.box import Box
from megackpt.planning.tensor_digest import in_words, word_dtype


def words(array: NDArray[Any]) -> NDArray[Any]:
    """A contiguous array of elements as words, in the shape of ``in_words``; no copy."""
    shape = in_words(Box.whole(array.shape), array.itemsize).shape
    return array.reshape(-1).view(word_dtype(array.itemsize)).reshape(shape)


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
