"""Small worlds of ranks: what they hold together, where a save gets it from, and where a load puts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    COMMON_KEY,
    DIGEST_BLOCK,
    ITEMSIZE,
    OBJECT,
    Declaration,
    Declarations,
    SavePlan,
    ShardId,
    TensorMeta,
    carried_dtype,
)

Blobs = Mapping[tuple[int, ...], bytes]


@dataclass(frozen=True, eq=False)
class Whole:
    """A tensor of an invented world: all its elements, and the shape of the shards that ranks hold."""

    dtype: str
    values: NDArray[Any]
    shard: tuple[int, ...]
    pieces: tuple[Box, ...] = ()
    """The shards themselves, where they form no grid."""

    @classmethod
    def random(
        cls, dtype: str, shape: Sequence[int], shard: Sequence[int], seed: int = 0
    ) -> Whole:
        """Any bits at all: a format keeps them, whatever they mean (a bool is 0 or 1)."""
        bits = np.random.default_rng(seed).integers(
            0, 2 if dtype == "bool" else 256, (*shape, ITEMSIZE[dtype]), np.uint8
        )
        return cls(
            dtype,
            bits.view(carried_dtype(ITEMSIZE[dtype])).reshape(shape),
            tuple(shard),
        )

    def cut(self, *pieces: Box) -> Whole:
        """The same tensor held in these shards."""
        return replace(self, pieces=pieces)

    def boxes(self) -> Iterator[Box]:
        if self.pieces:
            yield from self.pieces
            return
        if not self.values.size:
            yield Box.whole(self.values.shape)
            return
        counts = [
            -(-n // s) for n, s in zip(self.values.shape, self.shard, strict=True)
        ]
        for index in np.ndindex(*counts):
            offset = tuple(i * s for i, s in zip(index, self.shard, strict=True))
            ends = zip(self.shard, self.values.shape, offset, strict=True)
            yield Box(offset, tuple(min(s, n - o) for s, n, o in ends))


@dataclass(frozen=True)
class World:
    """What some ranks hold together: tensors, objects (offset -> blob), common state."""

    tensors: Mapping[str, Whole] = field(default_factory=dict)
    objects: Mapping[str, Blobs] = field(default_factory=dict)
    common: bytes | None = None

    def meta(self, key: str) -> TensorMeta:
        if key in self.tensors:
            return TensorMeta(self.tensors[key].values.shape, self.tensors[key].dtype)
        last = max(self.objects.get(key, {(): b""}))
        return TensorMeta(tuple(n + 1 for n in last), OBJECT)

    def shards(self) -> Iterator[ShardId]:
        for key, whole in self.tensors.items():
            yield from (ShardId(key, box) for box in whole.boxes())
        for key, blobs in self.objects.items():
            yield from (
                ShardId(key, Box(offset, (1,) * len(offset))) for offset in blobs
            )
        if self.common is not None:
            yield ShardId(COMMON_KEY, Box((), ()))

    def declared(self, shards: Sequence[ShardId], rank: int = 0) -> Declarations:
        return Declarations.of(
            [
                Declaration(
                    s,
                    self.meta(s.key),
                    0,
                    False,
                    s.box.volume * self.meta(s.key).itemsize,
                    rank,
                )
                for s in shards
            ]
        )

    def blob(self, key: str, offset: tuple[int, ...]) -> bytes:
        return (self.common or b"") if key == COMMON_KEY else self.objects[key][offset]


@dataclass(frozen=True, eq=False)
class MemorySource:
    """The Source of a plan's rows, cut out of a World. As strict as a Source may be: a piece's memory is used again
    for the next piece of its row.
    """

    world: World
    plan: SavePlan

    def blocks(self, row: int) -> Iterator[memoryview]:
        item = self.plan.row(row)
        if item.meta.is_object:
            data = memoryview(self.world.blob(item.shard.key, item.shard.box.offset))
        else:
            place: tuple[Any, ...] = item.shard.box.slices()
            data = memoryview(
                self.world.tensors[item.shard.key].values[(*place, ...)].tobytes()
            )
        buffer = memoryview(bytearray(min(len(data), 2 * DIGEST_BLOCK)))
        for start in range(0, max(len(data), 1), 2 * DIGEST_BLOCK):
            piece = data[start : start + 2 * DIGEST_BLOCK]
            buffer[: len(piece)] = piece
            yield buffer[: len(piece)]


@dataclass(frozen=True, eq=False)
class MemoryTarget:
    """A Target of arrays, one for each wanted row: every second element of a wider one, so strided.

    Rows of even numbers are filled in place, the others through memory that ``close`` takes the values from, as
    for tensors of a device or of another dtype. ``opened`` and ``closed`` tell which regions were.
    """

    wanted: Declarations
    arrays: dict[int, NDArray[Any]] = field(default_factory=dict)
    blobs: dict[int, bytes] = field(default_factory=dict)
    opened: list[tuple[int, Box]] = field(default_factory=list)
    closed: list[tuple[int, Box]] = field(default_factory=list)

    @classmethod
    def of(cls, wanted: Declarations) -> MemoryTarget:
        target = cls(wanted)
        for i, row in enumerate(wanted.rows()):
            if not row.meta.is_object:
                shape = (*row.shard.box.shape, 2)
                target.arrays[i] = np.zeros(shape, carried_dtype(row.meta.itemsize))[
                    ..., 0
                ]
        return target

    def open(self, target: int, box: Box) -> NDArray[Any]:
        self.opened.append((target, box))
        place = self._place(target, box)
        return np.zeros(box.shape, place.dtype) if target % 2 else place

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        self.closed.append((target, box))
        if target % 2:
            self._place(target, box)[...] = filled

    def blob(self, target: int, data: bytes) -> None:
        self.blobs[target] = bytes(data)

    def _place(self, target: int, box: Box) -> NDArray[Any]:
        place: tuple[Any, ...] = box.relative_to(
            self.wanted.row(target).shard.box
        ).slices()
        return self.arrays[target][
            (*place, ...)
        ]  # with "..." a view even of no dimensions
