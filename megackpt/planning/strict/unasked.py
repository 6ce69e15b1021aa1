"""What a checkpoint holds and no rank asks for, in a few groups that a warning can name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from megackpt.planning.manifest import Manifest

GROUPS = 6
"""Groups that keys are put into at most, by the names with which they begin."""
_DEPTH = 8  # names of a key that are looked at
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a name that is a number


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
    tensors = manifest.tensors
    kinds: dict[
        str, list[int]
    ] = {}  # layers differ in numbers only, so there are few kinds of very many keys
    for i, entry in enumerate(tensors):
        if entry.key not in asked and not entry.is_common:
            kinds.setdefault(_NUMBER.sub("*", entry.key), []).append(i)
    groups: dict[str, list[int]] = {}
    for pattern, numbers in zip(_patterns(list(kinds)), kinds.values(), strict=True):
        groups.setdefault(pattern, []).extend(numbers)
    found = []
    for pattern, numbers in groups.items():
        metas = Counter(tensors[i].meta for i in numbers)
        objects = (
            [i for i in numbers if tensors[i].meta.is_object]
            if any(m.is_object for m in metas)
            else []
        )
        nbytes = sum(
            count * prod(meta.shape) * meta.itemsize for meta, count in metas.items()
        )
        if objects:
            nbytes += int(
                manifest.chunks.length[np.isin(manifest.chunks.tensor, objects)].sum()
            )
        name = tensors[numbers[0]].key if len(numbers) == 1 else pattern
        found.append(Unasked(name, len(numbers) - len(objects), len(objects), nbytes))
    return sorted(found, key=lambda group: (-group.nbytes, group.name))


def _patterns(keys: Sequence[str]) -> list[str]:
    """For each key the group that it is in: as many of its names as leave few groups, but one at least."""
    names = [key.split(".", _DEPTH) for key in keys]
    chosen: list[str] = []
    for depth in range(1, _DEPTH + 1):
        patterns = [
            ".".join(each[:depth]) + (".*" if len(each) > depth else "")
            for each in names
        ]
        if chosen and len(set(patterns)) > GROUPS:
            break
        chosen = patterns
    return chosen
