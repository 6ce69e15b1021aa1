"""Rules: how a tensor of ours is made of Hugging Face's, as pieces, boxes of the one that are boxes of the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megackpt.errors import ShardingError
from megackpt.planning.box import Box

Shape = tuple[int, ...]
Naming = Callable[[str], str]  # a name with * and # -> the one that is meant


@dataclass(frozen=True)
class Piece:
    """The region ``box`` of one tensor is the region ``there`` of ``key``, of ``shape``.

    ``axes`` tells for each axis over there which one here runs along it (None: none, its extent is 1; the axes here
    that are not named are of extent 1, too). ``tied``: another tensor of ours is the same one. ``exact``: theirs may
    not be of another shape, even where ours may (``allow_shape_mismatch``). ``stacked``: so many leading axes here are
    numbers in ``key`` (``link`` tells).
    """

    box: Box
    key: str
    shape: Shape
    there: Box
    axes: tuple[int | None, ...]
    tied: bool = False
    exact: bool = False
    stacked: int = 0

    def within(self, box: Box) -> Piece | None:
        """What of it lies in a box."""
        common = self.box.intersect(box)
        return (
            None
            if common is None
            else replace(self, box=common, there=self.maps(common))
        )

    def maps(self, box: Box) -> Box:
        """The region over there of a part of ``box``."""
        begins = zip(self.axes, self.there.offset, strict=True)
        offset = (
            o if a is None else o + box.offset[a] - self.box.offset[a]
            for a, o in begins
        )
        return Box(
            tuple(offset), tuple(1 if a is None else box.shape[a] for a in self.axes)
        )

    def swapped(self, key: str, shape: Shape) -> Piece:
        """The same, seen from over there; ``key`` and ``shape`` are those of the tensor here."""
        axes = tuple(
            self.axes.index(a) if a in self.axes else None
            for a in range(len(self.box.shape))
        )
        return Piece(self.there, key, shape, self.box, axes, self.tied)

    def view(self, array: Any) -> Any:
        """An array (or tensor) of a region here as it lies over there: the same memory."""
        kept = sorted(a for a in self.axes if a is not None)
        array = array[
            (*(slice(None) if a in kept else 0 for a in range(array.ndim)), ...)
        ]
        turn = array.permute if isinstance(array, torch.Tensor) else array.transpose
        array = turn([kept.index(a) for a in self.axes if a is not None])
        return array[(*(None if a is None else slice(None) for a in self.axes), ...)]


class Rule(ABC):
    """How a tensor of ours is made of theirs."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """What theirs are called, with ``*`` and ``#``."""

    @abstractmethod
    def pieces(self, shape: Shape, naming: Naming) -> list[Piece]:
        """All of a tensor of ours of this shape. ShardingError where it cannot have this shape."""


Theirs = str | Rule


@dataclass(frozen=True)
class Name(Rule):
    """The same tensor. (What a plain text means in a table.)"""

    name: str

    def names(self) -> Iterator[str]:
        yield self.name

    def pieces(self, shape: Shape, naming: Naming) -> list[Piece]:
        whole = Box.whole(shape)
        return [Piece(whole, naming(self.name), shape, whole, tuple(range(len(shape))))]


@dataclass(frozen=True)
class _OfOne(Rule):
    """Made of one of theirs, or of what another rule makes."""

    whole: Theirs

    def names(self) -> Iterator[str]:
        return as_rule(self.whole).names()

    def _made(self, shape: Shape, naming: Naming) -> list[Piece]:
        return as_rule(self.whole).pieces(shape, naming)


@dataclass(frozen=True)
class Transpose(_OfOne):
    """Theirs with the last two axes exchanged (as GPT-2 keeps its linear layers)."""

    def pieces(self, shape: Shape, naming: Naming) -> list[Piece]:
        if len(shape) < 2:
            raise ShardingError(f"shape {shape} has no two axes to exchange")
        turned = {len(shape) - 1: len(shape) - 2, len(shape) - 2: len(shape) - 1}
        return [
            replace(
                piece,
                box=Box(_turned(piece.box.offset), _turned(piece.box.shape)),
                axes=tuple(None if a is None else turned.get(a, a) for a in piece.axes),
            )
            for piece in self._made(_turned(shape), naming)
        ]


@dataclass(frozen=True)
class Padded(_OfOne):
    """Theirs has ``extent`` along ``axis``; what ours has beyond that is filled with zeros, and is not theirs."""

    extent: int
    axis: int = 0

    def pieces(self, shape: Shape, naming: Naming) -> list[Piece]:
        if not 0 <= self.axis < len(shape) or self.extent < 1:
            raise ShardingError(
                f"shape {shape} cannot be {self.extent}, and padding, along axis {self.axis}"
            )
        if self.extent > shape[self.axis]:
            raise ShardingError(
                f"shape {shape} is smaller than the {self.extent} of axis {self.axis}"
            )
        made = self._made(_with(shape, self.axis, self.extent), naming)
        return [replace(piece, exact=True) for piece in made]


@dataclass(frozen=True)
class Tied(_OfOne):
    """The same as another tensor of ours, from which theirs is written; this one is read only."""

    def pieces(self, shape: Shape, naming: Naming) -> list[Piece]:
        return [replace(piece, tied=True) for piece in self._made(shape, naming)]


@dataclass(frozen=True)
class Fuse(Rule):
    """Several of theirs, one after the other along ``axis``, in this ``ratio`` (equal ones unless given).

    ``groups``: so many times a share of each. Query, key and value of 32 heads with 8 groups, each of 4 query heads, a
    key head and a value head: ``Fuse((q, k, v), ratio=(4, 1, 1), groups=8)``.
    """

    parts: tuple[Theirs, ...]
    ratio: tuple[int, ...] = ()
    groups: int = 1
    axis: int = 0

    def __post_init__(self) -> None:
        given: object = self.parts
        if not isinstance(given, tuple | list):
            raise ShardingError(
                f"the parts of a Fuse are a tuple, not {given!r}: is a comma missing?"
            )

    def names(self) -> Iterator[str]:
        for part in self.parts:
            yield from as_rule(part).names()

    def pieces(self, shape: Shape, naming: Naming) -> list[Piece]:
        ratio = self.ratio or (1,) * len(self.parts)
        if len(ratio) != len(self.parts):
            raise ShardingError(
                f"a ratio of {len(ratio)}, {ratio}, does not fit {len(self.parts)} parts"
            )
        unit = _unit(shape, self.axis, self.groups, ratio, sum(ratio))
        found: list[Piece] = []
        for number, (part, share) in enumerate(zip(self.parts, ratio, strict=True)):
            inner = as_rule(part).pieces(
                _with(shape, self.axis, self.groups * share * unit), naming
            )
            for group in range(self.groups):
                place = group * sum(ratio) + sum(ratio[:number])
                found += _moved(
                    inner, self.axis, group * share * unit, share * unit, place * unit
                )
        return found


@dataclass(frozen=True)
class Part(_OfOne):
    """Part ``number`` (from 0) of one of theirs that is fused, as ``Fuse`` tells it, of parts in this ``ratio``."""

    number: int
    ratio: tuple[int, ...]
    groups: int = 1
    axis: int = 0

    def pieces(self, shape: Shape, naming: Naming) -> list[Piece]:
        if not 0 <= self.number < len(self.ratio):
            raise ShardingError(
                f"a ratio of {len(self.ratio)}, {self.ratio}, has no part {self.number}"
            )
        share, total = self.ratio[self.number], sum(self.ratio)
        unit = _unit(shape, self.axis, self.groups, self.ratio, share)
        inner = self._made(_with(shape, self.axis, self.groups * total * unit), naming)
        found: list[Piece] = []
        for group in range(self.groups):
            place = group * total + sum(self.ratio[: self.number])
            found += _moved(
                inner, self.axis, place * unit, share * unit, group * share * unit
            )
        return found


def as_rule(theirs: Theirs) -> Rule:
    given: object = theirs  # callers without a type checker give anything
    if not isinstance(given, str | Rule):
        raise ShardingError(f"{given!r} is neither a name nor a rule")
    return Name(given) if isinstance(given, str) else given


def _unit(
    shape: Shape, axis: int, groups: int, ratio: tuple[int, ...], held: int
) -> int:
    """How much 1 in a ratio means along this axis, which holds ``held`` of each group."""
    if (
        not 0 <= axis < len(shape)
        or groups < 1
        or min(ratio, default=0) < 1
        or shape[axis] % (groups * held)
    ):
        raise ShardingError(
            f"axis {axis} of shape {shape} cannot be cut into {groups} groups of parts as {ratio}"
        )
    return shape[axis] // (groups * held)


def _moved(
    pieces: Iterable[Piece], axis: int, start: int, extent: int, to: int
) -> Iterator[Piece]:
    """What lies from ``start`` on along an axis, as it lies when ``start`` is moved ``to`` another place."""
    for piece in pieces:
        box = piece.box
        inside = piece.within(
            Box(_with(box.offset, axis, start), _with(box.shape, axis, extent))
        )
        if inside is not None:
            offset = _with(
                inside.box.offset, axis, inside.box.offset[axis] - start + to
            )
            yield replace(inside, box=Box(offset, inside.box.shape), exact=True)


def _with(values: Shape, place: int, value: int) -> Shape:
    return tuple(value if i == place else other for i, other in enumerate(values))


def _turned(values: Shape) -> Shape:
    return (*values[:-2], values[-1], values[-2])
