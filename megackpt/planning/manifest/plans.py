"""The plans of one rank: of its part of a save, and of a load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megackpt.planning.box import Box, Boxes, Int64
from megackpt.planning.manifest.chunks import Chunk, Location, Manifest
from megackpt.planning.manifest.tensors import (
    Int32,
    ShardId,
    TensorEntry,
    TensorMeta,
    itemsizes,
)


@dataclass(frozen=True, slots=True)
class WriteItem:
    """One piece that one rank writes; the view of one row of a SavePlan.

    ``source`` is the row of the rank's Declarations that holds the data of ``shard.box``.
    """

    shard: ShardId
    meta: TensorMeta
    grid: tuple[int, ...] | None
    source: int

    @property
    def nbytes(self) -> int:
        """Size of the raw bytes (0 for objects, which are not serialised yet)."""
        return self.shard.box.volume * self.meta.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """One rank's part of a save, in the order of writing.

    ``places`` is for formats that keep each tensor whole in a file into which all ranks write:
    the location of each of ``tensors``, or None; see ``Backend.layout``.
    """

    rank: int
    tensors: tuple[TensorEntry, ...]
    grids: tuple[tuple[int, ...] | None, ...]  # one for each of `tensors`
    tensor: Int32
    boxes: Boxes
    source: Int32
    places: tuple[Location | None, ...] | None = None

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def nbytes(self) -> int:
        """Size of the raw bytes of all rows (0 for objects, which are not serialised yet)."""
        itemsize = itemsizes(self.tensors)[self.tensor]
        return int((itemsize * self.boxes.volume).sum())

    def placed(self, places: Mapping[str, Location]) -> SavePlan:
        """This plan with the places of its tensors, given by key."""
        return replace(
            self, places=tuple(places.get(entry.key) for entry in self.tensors)
        )

    def row(self, i: int) -> WriteItem:
        number = self.tensor[i]
        entry = self.tensors[number]
        box = self.boxes.row(i, len(entry.meta.shape))
        return WriteItem(
            ShardId(entry.key, box), entry.meta, self.grids[number], int(self.source[i])
        )

    def rows(self) -> Iterator[WriteItem]:
        return map(self.row, range(len(self)))


@dataclass(frozen=True, slots=True)
class ReadItem:
    """One region to fetch from one chunk; the view of one row of a LoadPlan.

    ``box`` (global coordinates) lies within the chunk's box and within the wanted one.
    ``target`` is the row of the rank's own Declarations that it belongs to.
    """

    entry: TensorEntry
    chunk: Chunk
    box: Box
    target: int


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """The regions that one rank reads, and the chunks that hold them."""

    manifest: Manifest
    chunk: Int64  # row in manifest.chunks
    boxes: Boxes
    target: Int64

    def __len__(self) -> int:
        return len(self.chunk)

    def rows(self) -> Iterator[ReadItem]:
        for i in range(len(self)):
            chunk = int(self.chunk[i])
            entry = self.manifest.tensors[self.manifest.chunks.tensor[chunk]]
            box = self.boxes.row(i, len(entry.meta.shape))
            yield ReadItem(entry, self.manifest.chunk(chunk), box, int(self.target[i]))

    def take(self, rows: Any) -> LoadPlan:
        """The part of the plan that consists of these rows (an index array or mask)."""
        return replace(
            self,
            chunk=self.chunk[rows],
            boxes=self.boxes.take(rows),
            target=self.target[rows],
        )
