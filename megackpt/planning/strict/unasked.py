"""What a checkpoint holds and no rank asks for, in a few groups that a warning can name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from megackpt.planning.manifest import Manifest

GROUPS = 6
"""Groups that keys are put into at most, by the names with which they begin."""
_DEPTH = 8  # names of a key that are looked at


class Unasked(NamedTuple):
    """Keys that begin alike: ``name`` is the key, or what they have in common, with * for numbers and for the rest."""

    name: str
    tensors: int
    objects: int
    nbytes: int


def unasked(asked: Collection[str], manifest: Manifest) -> list[Unasked]:
    """What is stored under keys that are not among those asked for, the largest group first; no common state.

    A tensor or object of which any part is asked for is not in it. ``nbytes`` is the size of whole tensors and
    of serialised objects.
    """
    left = [i for i, e in enumerate(manifest.tensors) if e.key not in asked and not e.is_common]
    if not left:
        return []
    chunks, tensors = manifest.chunks, manifest.tensors
    lengths = np.bincount(chunks.tensor, weights=chunks.length, minlength=len(tensors))
    groups: dict[str, list[int]] = {}
    for i, pattern in zip(left, _patterns([tensors[i].key for i in left]), strict=True):
        groups.setdefault(pattern, []).append(i)
    found = []
    for pattern, numbers in groups.items():
        metas = [tensors[i].meta for i in numbers]
        nbytes = sum(
            int(lengths[i]) if meta.is_object else prod(meta.shape) * meta.itemsize
            for i, meta in zip(numbers, metas, strict=True)
        )
        objects = sum(meta.is_object for meta in metas)
        name = tensors[numbers[0]].key if len(numbers) == 1 else pattern
        found.append(Unasked(name, len(numbers) - objects, objects, nbytes))
    return sorted(found, key=lambda group: (-group.nbytes, group.name))


def _patterns(keys: Sequence[str]) -> list[str]:
    """For each key the group that it is in: as many of its names as leave few groups, but one at least."""
    names = [["*" if name.isdigit() else name for name in key.split(".", _DEPTH)] for key in keys]
    chosen: list[str] = []
    for depth in range(1, _DEPTH + 1):
        patterns = [".".join(each[:depth]) + (".*" if len(each) > depth else "") for each in names]
        if chosen and len(set(patterns)) > GROUPS:
            break
        chosen = patterns
    return chosen
