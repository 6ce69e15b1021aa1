"""Likely causes of a load that does not fit: similar stored keys, and other global shapes."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from megackpt.planning.coverage_report import key_pattern
from megackpt.planning.manifest import Manifest

ADVISED = 10
"""Keys of a message for which a similar stored key is searched."""
HINTS = 3
"""Causes named for different shapes."""
_NEIGHBOURS = 40  # stored keys to compare, on each side in alphabetical order

Shape = tuple[int, ...]


class StoredNames:
    """The names that a checkpoint holds, ordered so that similar ones are found quickly."""

    def __init__(self, names: Collection[str], manifest: Manifest) -> None:
        self._names = set(names)
        self._metas = {e.key: e.meta for e in manifest.tensors if not e.is_common}
        self._sorted = sorted(names)
        self._sorted_reversed = sorted(name[::-1] for name in names)
        self._patterns = set(map(key_pattern, names))

    def note(self, name: str, asked: Collection[str]) -> str:
        """A remark on a name that is not stored; "" if nothing stored is similar."""
        key = self._stored_key(name)
        if key is None:
            near = self._nearest(name, asked)
            return f" (did you mean {near!r}?)" if near else ""
        meta = self._metas[key]
        if not meta.is_object:
            return f" (stored as a tensor {meta.shape} {meta.dtype}, asked for as an object)"
        advice = "ask for them as ShardedObjects"
        if key != name:
            advice = "objects are not resharded"
        return f" (stored as objects of the grid {meta.shape}: {advice})"

    def hint(self, names: Sequence[str], asked: Collection[str]) -> str:
        """A cause of all of these names: another prefix, or no sharded state; "" if unknown."""
        names = [name for name in names if self._stored_key(name) is None]
        if not names:
            return ""
        if not self._metas:
            return (
                "nothing but common state is stored: was the sharded state saved at all? "
                "megackpt.load({}, directory) returns it, with tensors that were saved without "
                "megackpt.sharded"
            )
        first = names[0]
        for start in [0, *(match.end() for match in re.finditer(r"\.", first))]:
            old, rest = first[:start], first[start:]
            if start and "." not in rest and len(names) < 3:
                return ""  # too little in common
            for stored in self._ending_in(rest):
                new = stored[: len(stored) - len(rest)]
                if new and not new.endswith("."):
                    continue
                renamed = {new + n[start:] for n in names if n.startswith(old)}
                if len(renamed) == len(names) and self._names.issuperset(renamed):
                    if renamed.isdisjoint(asked):
                        return _rename_hint(old, new, len(names))
                    return ""
        return ""

    def _stored_key(self, name: str) -> str | None:
        """The key of this name, if it is stored in another grid or kind."""
        for key in (name, name.rpartition("/shard_")[0]):
            if key in self._metas:
                return key
        return None

    def _nearest(self, name: str, asked: Collection[str]) -> str | None:
        """The most similar name among those with the longest common beginnings and endings.

        Names that differ in numbers only are of other layers. A name that is asked for itself
        must be almost equal: the momentum of a weight is not that weight.
        """
        if key_pattern(name) in self._patterns:
            return None
        near = set(_around(self._sorted, name))
        near.update(n[::-1] for n in _around(self._sorted_reversed, name[::-1]))
        found = get_close_matches(name, sorted(near.difference(asked)), 1, 0.7)
        if not found:
            found = get_close_matches(name, sorted(near.intersection(asked)), 1, 0.9)
        return found[0] if found else None

    def _ending_in(self, rest: str) -> list[str]:
        place = bisect_left(self._sorted_reversed, rest[::-1])
        found = [n[::-1] for n in self._sorted_reversed[place : place + 4]]
        return [name for name in found if name.endswith(rest)]


def _around(names: list[str], name: str) -> list[str]:
    place = bisect_left(names, name)
    return names[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS]


def _rename_hint(old: str, new: str, count: int) -> str:
    if old and new:
        change = f"under {new!r} instead of {old!r}"
    else:
        change = f"under {new!r}" if new else f"without {old!r}"
    code = f"key.removeprefix({old!r})" if old else "key"
    if new:
        code = f"{new!r} + {code}"
    subject = "it is stored" if count == 1 else f"these {count} are stored"
    return (
        f"{subject} {change}: ask for these names, or load with "
        f"key_map=lambda key: {code}"
    )


class ShapeDifference(NamedTuple):
    """A tensor whose stored global shape differs, and the local shape that a rank asks for."""

    key: str
    asked: Shape
    stored: Shape
    local: Shape


def shape_hints(differences: Sequence[ShapeDifference]) -> list[str]:
    """The causes of these differences, the most frequent first."""
    causes = Counter(map(_cause, differences))
    return [cause for cause, _ in causes.most_common(HINTS)]


def _cause(found: ShapeDifference) -> str:
    if len(found.asked) != len(found.stored):
        return "the number of axes differs: is prepend_axis_num another one than in the save?"
    axes = [i for i, n in enumerate(found.asked) if n != found.stored[i]]
    axis = axes[0]
    asked, stored = found.asked[axis], found.stored[axis]
    uncut = asked and found.local[axis] == asked
    if len(axes) == 1 and uncut and stored % asked == 0:
        return (
            f"axis {axis}: {stored} stored, {asked} asked for, by ranks that do not cut it: is "
            "the tensor-parallel rank missing from rank_offsets, as "
            f"({axis}, rank, {stored // asked})?"
        )
    if axes == [0] and re.search("embed|vocab|output_layer|lm_head", found.key):
        return (
            f"axis 0: {stored} stored, {asked} asked for. If this is a vocabulary padded for "
            "another parallelism, allow_shape_mismatch=True on the shard loads what both "
            "have, and zeros behind it"
        )
    return (
        "is it the checkpoint of a model of another size, or does rank_offsets name another "
        "axis or number of fragments than in the save?"
    )
