"""What is asked for and not stored, or stored in another shape: the likely cause, and what to do about it."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from megackpt.planning.coverage.explain import likeness
from megackpt.planning.manifest import Manifest

ADVISED = 10  # keys of a message for which a similar stored one is looked for
NEIGHBOURS = (
    40  # stored keys that are compared in earnest, on each side of the alphabet
)
HINTS = 3  # causes told of one kind

Shape = tuple[int, ...]


class Stored:
    """The names that a checkpoint holds, ordered so that similar ones are found quickly."""

    def __init__(self, names: Collection[str], manifest: Manifest) -> None:
        self.names = set(names)
        self.metas = {
            entry.key: entry.meta for entry in manifest.tensors if not entry.is_common
        }
        self._known = sorted(names)
        self._backwards = sorted(name[::-1] for name in names)
        self._kinds = set(map(likeness, self._known))

    def note(self, name: str, asked: Collection[str]) -> str:
        """What to say behind one name that is not stored; empty where nothing is like it."""
        key = name if name in self.metas else name.rpartition("/shard_")[0]
        meta = self.metas.get(key)
        if meta is not None and meta.is_object:
            also = (
                "objects are not resharded"
                if key != name
                else "ask for them as ShardedObjects"
            )
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
        near = {
            *_around(self._known, name),
            *(n[::-1] for n in _around(self._backwards, name[::-1])),
        }
        free = get_close_matches(name, sorted(near.difference(asked)), 1, 0.7)
        return next(
            iter(
                free
                or get_close_matches(name, sorted(near.intersection(asked)), 1, 0.9)
            ),
            None,
        )

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
        if not self.metas:
            where = "megackpt.load({}, directory) returns it, with tensors that were saved without megackpt.sharded"
            return [
                f"nothing but common state is stored: was the sharded state saved at all? {where}"
            ]
        heads = {name.partition(".")[0] for name in self.metas}
        asked_heads = {name.partition(".")[0] for name in names}
        if heads.isdisjoint(asked_heads) and not any(
            self._nearest(name, asked) for name in names[:ADVISED]
        ):
            found = (
                f"{_listing(sorted(asked_heads))}, but with {_listing(sorted(heads))}"
            )
            return [
                f"nothing that is stored begins with {found}: was this part of the state saved at all?"
            ]
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
                    return (
                        None
                        if not set(asked).isdisjoint(there)
                        else _renaming(old, new, len(names))
                    )
        return None


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


def _around(names: list[str], name: str) -> list[str]:
    place = bisect_left(names, name)
    return names[max(0, place - NEIGHBOURS) : place + NEIGHBOURS]


class Difference(NamedTuple):
    """One tensor that is stored in another shape than it is asked for, and the shape of a piece of it."""

    key: str
    asked: Shape
    stored: Shape
    piece: Shape


def shape_hints(differences: Sequence[Difference]) -> list[str]:
    """The causes of these differences, the most frequent first."""
    return [cause for cause, _ in Counter(map(_cause, differences)).most_common(HINTS)]


def _cause(d: Difference) -> str:
    if len(d.asked) != len(d.stored):
        return "the number of axes differs: is prepend_axis_num another one than in the save?"
    axes = [
        axis
        for axis, (one, other) in enumerate(zip(d.asked, d.stored, strict=True))
        if one != other
    ]
    axis = axes[0]
    asked, stored = d.asked[axis], d.stored[axis]
    if len(axes) == 1 and asked and stored % asked == 0 and d.piece[axis] == asked:
        return (
            f"axis {axis}: {stored} stored, {asked} asked for, by ranks that do not cut it: is the tensor-parallel "
            f"rank missing from rank_offsets, as ({axis}, rank, {stored // asked})?"
        )
    if axes == [0] and re.search("embed|vocab|output_layer|lm_head", d.key):
        return (
            f"axis 0: {stored} stored, {asked} asked for. If this is a vocabulary padded for another parallelism, "
            "allow_shape_mismatch=True on the shard loads what both have, and zeros behind it"
        )
    return (
        "is it the checkpoint of a model of another size, or does rank_offsets name another axis or number of "
        "fragments than in the save?"
    )
