"""What is asked for and not stored, or stored in another shape: the likely cause, and what to do about it."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from megackpt.planning.coverage.explain import likeness
from megackpt.planning.manifest import Manifest

ADVISED = 10  # keys of a message for which a similar stored one is looked for
NEIGHBOURS = 40  # stored keys that are compared in earnest, on each side of the alphabet
HINTS = 3  # causes told of one kind

Shape = tuple[int, ...]


class Stored:
    """The names that a checkpoint holds, ordered so that similar ones are found quickly."""

    def __init__(self, names: Collection[str], manifest: Manifest) -> None:
        self.names = set(names)
        self.metas = {entry.key: entry.meta for entry in manifest.tensors if not entry.is_common}
        self._known = sorted(names)
        self._backwards = sorted(name[::-1] for name in names)
        self._kinds: dict[str, list[str]] = {}
        for name in self._known:
            self._kinds.setdefault(likeness(name), []).append(name)

    def note(self, name: str, asked: Collection[str]) -> str:
        """What to say behind one name that is not stored; empty where nothing is like it."""
        key = name if name in self.metas else name.rpartition("/shard_")[0]
        meta = self.metas.get(key)
        if meta is not None and meta.is_object:
            also = "objects are not resharded" if key != name else "ask for them as ShardedObjects"
            return f" (stored as objects of the grid {meta.shape}: {also})"
        if meta is not None:
            return f" (stored as a tensor {meta.shape} {meta.dtype}, asked for as an object)"
        near = self._nearest(name, asked)
        return f" (did you mean {near!r}?)" if near else ""

    def known_otherwise(self, name: str) -> bool:
        """Is there something of this key, in another grid or of another kind?"""
        return name in self.metas or name.rpartition("/shard_")[0] in self.metas

    def _nearest(self, name: str, asked: Collection[str]) -> str | None:
        """The most similar name of those that share the longest beginnings and endings.

        A name that differs in numbers only is another layer, not the same one misspelt. One that is asked for
        itself must be all but the same: the momentum of a weight is not that weight.
        """
        if likeness(name) in self._kinds:
            return None
        near = {*_around(self._known, name), *(n[::-1] for n in _around(self._backwards, name[::-1]))}
        free = get_close_matches(name, sorted(near.difference(asked)), 1, 0.7)
        return next(iter(free or get_close_matches(name, sorted(near.intersection(asked)), 1, 0.9)), None)

    def ending_in(self, tail: str) -> list[str]:
        place = bisect_left(self._backwards, tail[::-1])
        found = (name[::-1] for name in self._backwards[place : place + 4])
        return [name for name in found if name.endswith(tail)]

    def hints(self, names: Sequence[str], asked: Collection[str]) -> list[str]:
        """The causes that explain many names at once."""
        names = [name for name in names if not self.known_otherwise(name)]
        if not names:
            return []
        renamed = self._renamed(names, asked)
        if renamed:
            return [renamed]
        found = self._other_numbers(names)
        if found or any(self._nearest(name, asked) for name in names[:ADVISED]):
            return found
        asked_heads, heads = (sorted({n.partition(".")[0] for n in them}) for them in (names, self.metas))
        if not heads:
            where = "megackpt.load({}, directory) returns it, with tensors that were saved without megackpt.sharded"
            return [f"nothing but common state is stored: was the sharded state saved at all? {where}"]
        if set(asked_heads).isdisjoint(heads):
            told = f"{_listing(asked_heads)}, but with {_listing(heads)}"
            return [f"nothing that is stored begins with {told}: was this part of the state saved at all?"]
        return []

    def _renamed(self, names: Sequence[str], asked: Collection[str]) -> str | None:
        """The hint where one prefix in place of another makes all of these names stored ones."""
        name = names[0]
        for start in [0, *(m.end() for m in re.finditer(r"\.", name))]:
            old, tail = name[:start], name[start:]
            if start and "." not in tail and len(names) < 3:
                return None  # too little in common
            for other in self.ending_in(tail):
                new = other[: len(other) - len(tail)]
                there = [new + n[start:] for n in names if n.startswith(old)]
                if (
                    (not new or new.endswith("."))
                    and len(there) == len(names)
                    and self.names.issuperset(there)
                ):
                    return None if not set(asked).isdisjoint(there) else _renaming(old, new, len(names))
        return None

    def _other_numbers(self, names: Sequence[str]) -> list[str]:
        """The hints where names differ from stored ones in their numbers only: other layers, other experts."""
        kinds: dict[str, list[str]] = {}
        for name in names:
            if likeness(name) in self._kinds:
                kinds.setdefault(likeness(name), []).append(name)
        return [
            f"of {kind!r} the checkpoint holds {_numbered(self._kinds[kind])}; asked for beyond them: "
            f"{_numbered(found)}. Is it of a model with fewer layers (or experts)?"
            for kind, found in list(kinds.items())[:HINTS]
        ]


def _listing(words: Sequence[str]) -> str:
    return ", ".join(map(repr, words[:6])) + (", ..." if len(words) > 6 else "")


def _renaming(old: str, new: str, count: int) -> str:
    rename = f"key.removeprefix({old!r})" if old else "key"
    rename = f"{new!r} + {rename}" if new else rename
    what = (
        f"under {new!r} instead of {old!r}"
        if old and new
        else f"under {new!r}"
        if new
        else f"without {old!r}"
    )
    subject = "it is stored" if count == 1 else f"these {count} are stored"
    return f"{subject} {what}: ask for these names, or load with key_map=lambda key: {rename}"


def _numbered(names: Sequence[str]) -> str:
    """``0 to 3`` for names that differ in one number, else their count."""
    rows = [tuple(map(int, re.findall(r"[0-9]+", name))) for name in names]
    places = [column for column in zip(*rows, strict=True) if len(set(column)) > 1]
    if len(rows) == 1:
        return f"number {'.'.join(map(str, rows[0]))}"
    low, high = (min(places[0]), max(places[0])) if len(places) == 1 else (0, -1)
    return f"numbers {low} to {high}" if len(places) == 1 else f"{len(rows)} of them"


def _around(names: list[str], name: str) -> list[str]:
    place = bisect_left(names, name)
    return names[max(0, place - NEIGHBOURS) : place + NEIGHBOURS]


class Difference(NamedTuple):
    """One tensor that is stored in another shape than it is asked for, and the shape of a piece of it."""

    key: str
    asked: Shape
    stored: Shape
    piece: Shape

    @property
    def axes(self) -> list[int]:
        return [a for a, (one, other) in enumerate(zip(self.asked, self.stored, strict=True)) if one != other]


def shape_hints(differences: Sequence[Difference]) -> list[str]:
    """The causes of these differences, the most frequent first."""
    alike = [d for d in differences if len(d.asked) == len(d.stored) and 0 not in d.stored]
    ratios = {(d.asked[a], d.stored[a]) for d in alike for a in d.axes}
    if len(differences) > 1 and len(alike) == len(differences) and len({a / b for a, b in ratios}) == 1:
        layers = all(d.axes == [0] and d.piece[0] == 1 < len(d.piece) for d in alike)
        what = "another number of layers" if layers else "another size (its hidden size, say)"
        told = ", ".join(f"{stored} stored and {asked} asked for" for asked, stored in sorted(ratios)[:HINTS])
        return [
            f"these {len(alike)} differ by one factor ({told}): is it the checkpoint of a model of {what}?"
        ]
    return [cause for cause, _ in Counter(map(_cause, differences)).most_common(HINTS)]


def _cause(d: Difference) -> str:
    if len(d.asked) != len(d.stored):
        short, long = sorted((d.asked, d.stored), key=len)
        count = len(long) - len(short)
        if long == d.stored:
            return (
                f"the stored one has {count} axis more, of {long[:count]} in front (layers, say): is "
                f"prepend_axis_num={count} missing, with (0, number, {long[0]}) in rank_offsets?"
            )
        return f"the stored one has {count} axis less: was it saved without the prepended one (prepend_axis_num)?"
    if sorted(d.asked) == sorted(d.stored):
        return "one shape is the other transposed: are the axes of the weight swapped?"
    if math.prod(d.asked) == math.prod(d.stored):
        larger = [a for a in d.axes if d.asked[a] > d.stored[a]]
        smaller = [a for a in d.axes if d.asked[a] < d.stored[a]]
        return (
            f"as many elements, but axis {larger[0]} is too long and axis {smaller[0]} too short: do rank_offsets name "
            f"axis {larger[0]} where axis {smaller[0]} is cut (prepended axes count)?"
        )
    if len(d.axes) > 1 or not d.asked[d.axes[0]] or not d.stored[d.axes[0]]:
        return "several axes differ: is it the checkpoint of another model?"
    return _one_axis(d, d.axes[0])


def _one_axis(d: Difference, axis: int) -> str:
    asked, stored = d.asked[axis], d.stored[axis]
    there = f"axis {axis}: {stored} stored, {asked} asked for"
    vocabulary = axis == 0 and re.search("embed|vocab|output_layer|lm_head", d.key)
    if vocabulary and stored % asked and asked % stored:
        return (
            f"{there}. If this is a vocabulary padded for another parallelism, allow_shape_mismatch=True on the "
            "shard loads what both have, and zeros behind it"
        )
    if "expert" in d.key:
        return f"{there}. Is it the checkpoint of a model with another number of experts?"
    if axis == 0 and d.piece[0] == 1 < len(d.piece):
        return f"{there}. Is it the checkpoint of a model with another number of layers?"
    if stored % asked == 0 and d.piece[axis] == asked:
        return (
            f"{there}, by ranks that do not cut it: is a rank (the tensor-parallel one?) missing from rank_offsets, "
            f"as ({axis}, rank, {stored // asked})?"
        )
    if asked % stored == 0:
        return (
            f"{there}: is the number of fragments in rank_offsets {asked // stored} times too large (the world size "
            "for that of a group), or the model larger?"
        )
    return f"{there}. allow_shape_mismatch=True on the shard would load what both have, and zeros behind it"
