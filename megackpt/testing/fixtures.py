"""Small distributed states in memory: sources of saves, and targets of loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.backends.base import Source, Target
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
    """A whole tensor and the shape of its shards (or ``pieces``, if they form no grid)."""

    dtype: str
    values: NDArray[Any]
    shard: tuple[int, ...]
    pieces: tuple[Box, ...] = ()

    @classmethod
    def random(
        cls, dtype: str, shape: Sequence[int], shard: Sequence[int], seed: int = 0
    ) -> Whole:
        """Return a tensor of random bits, whatever they mean in this dtype (a bool is 0 or 1)."""
        itemsize = ITEMSIZE[dtype]
        high = 256
        if dtype == "bool":
            high = 2
        random = np.random.default_rng(seed)
        bits = random.integers(0, high, (*shape, itemsize), np.uint8)
        values = bits.view(carried_dtype(itemsize)).reshape(shape)
        return cls(dtype, values, tuple(shard))

    def cut(self, *pieces: Box) -> Whole:
        """Return the same tensor with these shards."""
        return replace(self, pieces=pieces)

    def boxes(self) -> Iterator[Box]:
        """Yield the boxes of the shards."""
        if self.pieces:
            yield from self.pieces
            return
        if not self.values.size:
            yield Box.whole(self.values.shape)
            return
        shape = np.array(self.values.shape, np.int64)
        shard = np.array(self.shard, np.int64)
        for index in np.ndindex(*(-(-shape // shard)).tolist()):
            offset = np.array(index, np.int64) * shard
            extent = np.minimum(shard, shape - offset)
            yield Box(tuple(offset.tolist()), tuple(extent.tolist()))


@dataclass(frozen=True)
class World:
    """The state that all ranks hold: tensors, objects (offset -> blob) and the common state."""

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
            for box in whole.boxes():
                yield ShardId(key, box)
        for key, blobs in self.objects.items():
            for offset in blobs:
                yield ShardId(key, Box(offset, (1,) * len(offset)))
        if self.common is not None:
            yield ShardId(COMMON_KEY, Box((), ()))

    def declared(self, shards: Sequence[ShardId], rank: int = 0) -> Declarations:
        rows = []
        for shard in shards:
            meta = self.meta(shard.key)
            nbytes = shard.box.volume * meta.itemsize
            rows.append(Declaration(shard, meta, 0, False, nbytes, rank))
        return Declarations.of(rows)

    def declared_all(self) -> Declarations:
        return self.declared(list(self.shards()))

    def blob(self, key: str, offset: tuple[int, ...]) -> bytes:
        if key == COMMON_KEY:
            return self.common or b""
        return self.objects[key][offset]


@dataclass(frozen=True, eq=False)
class MemorySource(Source):
    """The ``Source`` of a plan's rows, from a World. A row's blocks share their memory."""

    world: World
    plan: SavePlan

    def blocks(self, row: int) -> Iterator[memoryview]:
        item = self.plan.row(row)
        key, box = item.shard.key, item.shard.box
        if item.meta.is_object:
            data = self.world.blob(key, box.offset)
        else:
            region: tuple[Any, ...] = (*box.slices(), ...)
            data = self.world.tensors[key].values[region].tobytes()
        size = 2 * DIGEST_BLOCK
        buffer = memoryview(bytearray(min(len(data), size)))
        for start in range(0, max(len(data), 1), size):
            block = data[start : start + size]
            buffer[: len(block)] = block
            yield buffer[: len(block)]


@dataclass(frozen=True, eq=False)
class MemoryTarget(Target):
    """A ``Target`` of strided arrays, one for each wanted row: every second element of a wide one.

    Rows of even numbers are filled in place. Rows of odd numbers are filled through memory from
    which ``close`` takes the values, like tensors of a device or of another dtype. ``opened`` and
    ``closed`` list the regions.
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
                wide = (*row.shard.box.shape, 2)
                array = np.zeros(wide, carried_dtype(row.meta.itemsize))
                target.arrays[i] = array[..., 0]
        return target

    def open(self, target: int, box: Box) -> NDArray[Any]:
        self.opened.append((target, box))
        region = self._region(target, box)
        if target % 2:
            return np.zeros(box.shape, region.dtype)
        return region

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        self.closed.append((target, box))
        if target % 2:
            self._region(target, box)[...] = filled

    def blob(self, target: int, data: bytes) -> None:
        self.blobs[target] = bytes(data)

    def _region(self, target: int, box: Box) -> NDArray[Any]:
        inside = box.relative_to(self.wanted.row(target).shard.box)
        slices: tuple[Any, ...] = inside.slices()
        return self.arrays[target][(*slices, ...)]  # "...": a view also of 0 dimensions
