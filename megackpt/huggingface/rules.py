"""Rules: how one of our tensors consists of pieces of Hugging Face's."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megackpt.errors import ShardingError
from megackpt.planning.box import Box

Shape = tuple[int, ...]
Naming = Callable[[str], str]
"""Fills the ``*`` and ``#`` of a name."""


@dataclass(frozen=True)
class Piece:
    """The region ``box`` of one tensor is the region ``there`` of the tensor ``key``.

    "Here" is the first tensor. ``shape``: the shape of the tensor ``key``. ``axes``: for each axis
    of the tensor ``key`` the axis here that runs along it. None: no axis here does, and the extent
    is 1. An axis here that ``axes`` does not name has the extent 1, too. ``tied``: another one of
    our tensors has the same values. ``exact``: the stored tensor must have this shape, even with
    ``allow_shape_mismatch``. ``stacked``: how many leading axes here are numbers in ``key``.
    ``alternating``: the axis of MaxText's tensor whose even elements are the first half of the
    Hugging Face axis, and whose odd elements are the second half. ``factor``: how many times as
    large Hugging Face's values are.
    """

    box: Box
    key: str
    shape: Shape
    there: Box
    axes: tuple[int | None, ...]
    tied: bool = False
    exact: bool = False
    stacked: int = 0
    alternating: int | None = None
    factor: float = 1.0

    def within(self, box: Box) -> Piece | None:
        """The part of this piece in a box; None if the piece is outside the box."""
        common = self.box.intersect(box)
        if common is None:
            return None
        return replace(self, box=common, there=self.maps(common))

    def maps(self, box: Box) -> Box:
        """The region of the tensor ``key`` for a part of ``box``."""
        offset = []
        shape = []
        for axis, start in zip(self.axes, self.there.offset, strict=True):
            if axis is None:
                offset.append(start)
                shape.append(1)
            else:
                offset.append(start + box.offset[axis] - self.box.offset[axis])
                shape.append(box.shape[axis])
        return Box(tuple(offset), tuple(shape))

    def swapped(self, key: str, shape: Shape) -> Piece:
        """The piece in the opposite direction. ``key``, ``shape``: of the tensor here."""
        axes: list[int | None] = [None] * len(self.box.shape)
        for theirs, axis in enumerate(self.axes):
            if axis is not None:
                axes[axis] = theirs
        return Piece(
            self.there,
            key,
            shape,
            self.box,
            tuple(axes),
            self.tied,
            alternating=self.alternating,
            factor=self.factor,
        )

    def view(self, array: Any) -> Any:
        """View an array or tensor of a region here with the axes of the tensor ``key``."""
        mapped = [axis for axis in self.axes if axis is not None]
        kept = sorted(mapped)
        index = [slice(None) if axis in kept else 0 for axis in range(array.ndim)]
        array = array[(*index, ...)]
        order = [kept.index(axis) for axis in mapped]
        # A tensor of torch has both methods, and its transpose swaps two axes.
        array = getattr(array, "permute", array.transpose)(order)
        return array[(*(None if a is None else slice(None) for a in self.axes), ...)]


class Rule(ABC):
    """How one of our tensors is composed of Hugging Face tensors."""

    @abstractmethod
    def names(self) -> Iterator[str]:
        """The names of the Hugging Face tensors, with ``*`` and ``#``."""

    @abstractmethod
    def pieces(self, shape: Shape, naming: Naming) -> list[Piece]:
        """The pieces of our tensor of this shape. ShardingError for an impossible shape."""


Theirs = str | Rule


@dataclass(frozen=True)
class Name(Rule):
    """The same tensor, under this name. A str in a table means this."""

    name: str

    def names(self) -> Iterator[str]:
        yield self.name

    def pieces(self, shape: Shape, naming: Naming) -> list[Piece]:
        whole = Box.whole(shape)
        return [Piece(whole, naming(self.name), shape, whole, tuple(range(len(shape))))]


@dataclass(frozen=True)
class OfOne(Rule):
    """A rule over one Hugging Face tensor, or over another rule."""

    whole: Theirs

    def names(self) -> Iterator[str]:
        return as_rule(self.whole).names()


@dataclass(frozen=True)
class Transpose(OfOne):
    """The Hugging Face tensor with its last two axes exchanged (like GPT-2's linear layers)."""

    def pieces(self, shape: Shape, naming: Naming) -> list[Piece]:
        n = len(shape)
        if n < 2:
            raise ShardingError(f"shape {shape} has no two axes to exchange")
        exchanged = {n - 1: n - 2, n - 2: n - 1}
        result = []
        for piece in as_rule(self.whole).pieces(_exchange(shape), naming):
            box = Box(_exchange(piece.box.offset), _exchange(piece.box.shape))
            axes = tuple(None if a is None else exchanged.get(a, a) for a in piece.axes)
            result.append(replace(piece, box=box, axes=axes))
        return result


@dataclass(frozen=True)
class Padded(OfOne):
    """The Hugging Face tensor has ``extent`` along ``axis``; the rest of our tensor is padding.

    Padding is zero, and is not stored.
    """

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
        inner = _replace(shape, self.axis, self.extent)
        pieces = as_rule(self.whole).pieces(inner, naming)
        return [replace(piece, exact=True) for piece in pieces]


@dataclass(frozen=True)
class Tied(OfOne):
    """A tensor with the values of another one of our tensors. Only the other tensor is written."""

    def pieces(self, shape: Shape, naming: Naming) -> list[Piece]:
        pieces = as_rule(self.whole).pieces(shape, naming)
        return [replace(piece, tied=True) for piece in pieces]


@dataclass(frozen=True)
class Fuse(Rule):
    """Several Hugging Face tensors, joined along ``axis`` in this ``ratio`` (default: equal).

    ``groups``: how many times the ratio repeats; each group has a share of each tensor. Query, key
    and value of 32 heads in 8 groups, each of 4 query heads, a key head and a value head:
    ``Fuse((q, k, v), ratio=(4, 1, 1), groups=8)``.
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
        result: list[Piece] = []
        for number, part in enumerate(self.parts):
            extent = self.groups * ratio[number] * unit
            inner = as_rule(part).pieces(_replace(shape, self.axis, extent), naming)
            result += _move_shares(inner, self.axis, ratio, number, self.groups, unit)
        return result


@dataclass(frozen=True)
class Part(OfOne):
    """Part ``number`` (from 0) of one Hugging Face tensor that is fused in the way of ``Fuse``."""

    number: int
    ratio: tuple[int, ...]
    groups: int = 1
    axis: int = 0

    def pieces(self, shape: Shape, naming: Naming) -> list[Piece]:
        if not 0 <= self.number < len(self.ratio):
            raise ShardingError(
                f"a ratio of {len(self.ratio)}, {self.ratio}, has no part {self.number}"
            )
        share = self.ratio[self.number]
        unit = _unit(shape, self.axis, self.groups, self.ratio, share)
        extent = self.groups * sum(self.ratio) * unit
        inner = as_rule(self.whole).pieces(_replace(shape, self.axis, extent), naming)
        return _move_shares(
            inner, self.axis, self.ratio, self.number, self.groups, unit, out=True
        )


@dataclass(frozen=True)
class LayerKernel(Rule):
    """Our tensor has the kernels of ``layers`` layers, along axis 1, as MaxText stacks them.

    Each kernel is a Hugging Face tensor, of the ``name`` with the layer's number in place of ``#``.
    ``axes``: for each of its axes the axis of a kernel, or the two axes that are joined in it, such
    as heads and the elements of a head. ``layers`` 0: our tensor is one kernel, and has no axis of
    layers. ``alternating`` and ``factor``: see ``Piece``; for the last axis of a kernel.
    """

    name: str
    axes: tuple[tuple[int, ...], ...]
    layers: int = 0
    alternating: bool = False
    factor: float = 1.0

    def names(self) -> Iterator[str]:
        for layer in range(self.layers):
            yield self.name.replace("#", str(layer))
        if not self.layers:
            yield self.name

    def pieces(self, shape: Shape, naming: Naming) -> list[Piece]:
        # The axes of our tensor that a kernel has.
        own = [axis for axis in range(len(shape)) if axis != 1 or not self.layers]
        rank = sum(map(len, self.axes))
        if len(own) != rank or (self.layers and shape[1:2] != (self.layers,)):
            raise ShardingError(
                f"shape {shape} is not of {self.layers} layers of {rank} axes"
            )
        axes = [[own[axis] for axis in joined] for joined in self.axes]
        theirs = tuple(math.prod(shape[axis] for axis in joined) for joined in axes)
        outer = [joined[0] for joined in axes if len(joined) > 1]
        inner = tuple(joined[-1] for joined in axes)
        result = []
        for layer, name in enumerate(self.names()):
            for index in product(*(range(shape[axis]) for axis in outer)):
                offset = [0] * len(shape)
                extent = list(shape)
                if self.layers:
                    offset[1] = layer
                    extent[1] = 1
                for axis, number in zip(outer, index, strict=True):
                    offset[axis] = number
                    extent[axis] = 1
                begin = tuple(offset[joined[0]] * shape[joined[-1]] for joined in axes)
                piece = Piece(
                    Box(tuple(offset), tuple(extent)),
                    naming(name),
                    theirs,
                    Box(begin, tuple(shape[axis] for axis in inner)),
                    inner,
                    exact=True,
                    alternating=own[-1] if self.alternating else None,
                    factor=self.factor,
                )
                result.append(piece)
        return result


def as_rule(theirs: Theirs) -> Rule:
    given: object = theirs  # Callers without a type checker pass anything.
    if not isinstance(given, str | Rule):
        raise ShardingError(f"{given!r} is neither a name nor a rule")
    if isinstance(given, str):
        return Name(given)
    return given


def _unit(
    shape: Shape,
    axis: int,
    groups: int,
    ratio: tuple[int, ...],
    held: int,
) -> int:
    """The extent of 1 in a ratio, along an axis that has ``held`` of each group."""
    valid = 0 <= axis < len(shape) and groups >= 1 and min(ratio, default=0) >= 1
    if not valid or shape[axis] % (groups * held):
        raise ShardingError(
            f"axis {axis} of shape {shape} cannot be cut into {groups} groups of parts as {ratio}"
        )
    return shape[axis] // (groups * held)


def _move_shares(
    pieces: Iterable[Piece],
    axis: int,
    ratio: tuple[int, ...],
    number: int,
    groups: int,
    unit: int,
    *,
    out: bool = False,
) -> list[Piece]:
    """The pieces of a part, moved into its share of each group in the whole, or ``out`` of it."""
    moved = []
    extent = ratio[number] * unit
    for group in range(groups):
        start = group * extent
        to = (group * sum(ratio) + sum(ratio[:number])) * unit
        if out:
            start, to = to, start
        for piece in pieces:
            offset = _replace(piece.box.offset, axis, start)
            window = Box(offset, _replace(piece.box.shape, axis, extent))
            inside = piece.within(window)
            if inside is not None:
                shifted = inside.box.offset[axis] - start + to
                box = Box(_replace(inside.box.offset, axis, shifted), inside.box.shape)
                moved.append(replace(inside, box=box, exact=True))
    return moved


def _replace(
    values: Shape,
    position: int,
    value: int,
) -> Shape:
    return (*values[:position], value, *values[position + 1 :])


def _exchange(values: Shape) -> Shape:
    return (*values[:-2], values[-1], values[-2])
