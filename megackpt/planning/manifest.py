"""The values of plan time: what ranks hold (declarations), do (plans), and a checkpoint holds (manifest).

Everything is frozen. Many shards travel as columns (numpy arrays, one row a shard); the small dataclasses
are the views of single rows. Keys and metas stand once in a table that the rows point into by number.

Two unifications keep the count of concepts low. An object is a tensor of blobs: a ShardedObject of global
shape (4, 2) at (1, 0) is the unit box at (1, 0) of a tensor with dtype ``"object"``. And the common state
is such an object too, with the reserved key ``COMMON_KEY`` and no dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megackpt.planning.box import Box, Boxes, Groups, Int64, group_equal

OBJECT = "object"
COMMON_KEY = "common_state"
DIGEST_BLOCK = 1 << 20  # bytes of a chunk that share one digest
DIGEST_SIZE = 16  # xxh3-128

ITEMSIZE: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1
    ),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
    OBJECT: 0,
}
"""Bytes per element of every dtype that can be stored, by torch's name for it."""

ReplicaId = int | tuple[int, ...]
Int32 = NDArray[np.int32]
Bool = NDArray[np.bool_]
Digests = NDArray[np.uint8]  # (blocks, DIGEST_SIZE)


def is_main_replica(replica_id: ReplicaId) -> bool:
    """True for 0 and for tuples of zeros only."""
    return replica_id == 0 if isinstance(replica_id, int) else not any(replica_id)


class TensorMeta(NamedTuple):
    """Global shape (in elements) and dtype (by torch's name) of a tensor, or ``"object"``.

    A tuple, as TensorEntry: tables of ten thousands of them are hashed, compared and sent for every rank.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def is_object(self) -> bool:
        return self.dtype == OBJECT


class TensorEntry(NamedTuple):
    """One line of a table of tensors."""

    key: str
    meta: TensorMeta

    @property
    def is_common(self) -> bool:
        return self.meta.is_object and self.key == COMMON_KEY


@dataclass(frozen=True, slots=True)
class ShardId:
    """Names one piece of one tensor, whoever holds it."""

    key: str
    box: Box

    def __str__(self) -> str:
        return f"{self.key!r} {self.box}"


@dataclass(frozen=True, slots=True)
class Declaration:
    """ "I hold this": a ShardedTensor (or object) without its data. The view of one row of Declarations."""

    shard: ShardId
    meta: TensorMeta
    replica_id: ReplicaId
    flexible: bool
    nbytes: int
    rank: int

    @property
    def main(self) -> bool:
        return is_main_replica(self.replica_id)


@dataclass(frozen=True, slots=True, eq=False)
class Declarations:
    """What one rank holds or, after ``merge``, what all ranks hold (then in rank order).

    ``flexible`` is ShardedTensor.allow_shape_mismatch. ``nbytes`` is the size of the shard's data (for
    objects, whose size is known only once they are serialised, a nominal one). ``domains`` names, for each
    rank in these columns, the group of ranks within which replicas may stand in for one another.
    """

    tensors: tuple[TensorEntry, ...]
    tensor: Int32  # number in `tensors`
    boxes: Boxes
    replica_ids: tuple[ReplicaId, ...]  # distinct ones
    replica: Int32  # number in `replica_ids`
    flexible: Bool
    nbytes: Int64
    rank: Int32
    domains: tuple[int, ...] = (0,)  # one for each rank, in rank order

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def main(self) -> Bool:
        table = np.array([is_main_replica(r) for r in self.replica_ids], dtype=np.bool_)
        return table[self.replica] if len(table) else np.zeros(0, np.bool_)

    def shards(self) -> Groups:
        """The distinct shards: rows that declare the same box of the same tensor, in the tensors' order."""
        return group_equal(self.tensor, self.boxes)

    def row(self, i: int) -> Declaration:
        entry = self.tensors[self.tensor[i]]
        return Declaration(
            ShardId(entry.key, self.boxes.row(i, len(entry.meta.shape))),
            entry.meta,
            self.replica_ids[self.replica[i]],
            bool(self.flexible[i]),
            int(self.nbytes[i]),
            int(self.rank[i]),
        )

    def rows(self) -> Iterator[Declaration]:
        return map(self.row, range(len(self)))

    def take(self, rows: Any) -> Declarations:
        """These rows (an index array or mask) with the same tables."""
        return replace(
            self,
            tensor=self.tensor[rows],
            boxes=self.boxes.take(rows),
            replica=self.replica[rows],
            flexible=self.flexible[rows],
            nbytes=self.nbytes[rows],
            rank=self.rank[rows],
        )

    @classmethod
    def of(cls, rows: Sequence[Declaration], domain: int = 0) -> Declarations:
        """The columns of one rank's declarations, in the order given."""
        tensors: dict[TensorEntry, int] = {}
        replicas: dict[ReplicaId, int] = {}
        number = [tensors.setdefault(TensorEntry(r.shard.key, r.meta), len(tensors)) for r in rows]
        replica = [replicas.setdefault(r.replica_id, len(replicas)) for r in rows]
        return cls(
            tuple(tensors),
            np.array(number, np.int32),
            Boxes.of(r.shard.box for r in rows),
            tuple(replicas),
            np.array(replica, np.int32),
            np.array([r.flexible for r in rows], np.bool_),
            np.array([r.nbytes for r in rows], np.int64),
            np.array([r.rank for r in rows], np.int32),
            (domain,),
        )

    @classmethod
    def merge(cls, parts: Sequence[Declarations]) -> Declarations:
        """All ranks' declarations in one: ``parts[i]`` are those of rank i. Tables are joined."""
        tensors: dict[TensorEntry, int] = {}
        replicas: dict[ReplicaId, int] = {}
        number: list[Int32] = []
        replica: list[Int32] = []
        for part in parts:
            number.append(_renumbered(part.tensor, part.tensors, tensors))
            replica.append(_renumbered(part.replica, part.replica_ids, replicas))
        return cls(
            tuple(tensors),
            _joined(number, np.int32),
            Boxes.concat([p.boxes for p in parts]),
            tuple(replicas),
            _joined(replica, np.int32),
            _joined([p.flexible for p in parts], np.bool_),
            _joined([p.nbytes for p in parts], np.int64),
            _joined([p.rank for p in parts], np.int32),
            tuple(d for p in parts for d in p.domains),
        )


def _renumbered(column: Int32, names: Sequence[Any], table: dict[Any, int]) -> Int32:
    numbers = list(map(table.get, names))
    if None in numbers:  # seldom: most ranks bring names that another one brought
        numbers = [table.setdefault(name, len(table)) for name in names]
    return np.array(numbers, np.int32)[column]


def _joined(columns: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(columns) if columns else np.zeros(0, dtype)


@dataclass(frozen=True, slots=True)
class WriteItem:
    """One piece that one rank writes; the view of one row of a SavePlan.

    ``source`` is the row of the rank's own Declarations that holds the data; ``shard.box`` lies within it.
    """

    shard: ShardId
    meta: TensorMeta
    grid: tuple[int, ...] | None
    source: int

    @property
    def nbytes(self) -> int:
        """Size of the raw bytes (0 for objects, which nobody has serialised yet)."""
        return self.shard.box.volume * self.meta.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """One rank's part of a save. Rows stand in the order in which the rank should write them."""

    rank: int
    tensors: tuple[TensorEntry, ...]
    grids: tuple[tuple[int, ...] | None, ...]  # one for each of `tensors`
    tensor: Int32
    boxes: Boxes
    source: Int32

    def __len__(self) -> int:
        return len(self.tensor)

    def row(self, i: int) -> WriteItem:
        number = self.tensor[i]
        entry = self.tensors[number]
        box = self.boxes.row(i, len(entry.meta.shape))
        return WriteItem(ShardId(entry.key, box), entry.meta, self.grids[number], int(self.source[i]))

    def rows(self) -> Iterator[WriteItem]:
        return map(self.row, range(len(self)))


@dataclass(frozen=True, slots=True, eq=False)
class WriteResult:
    """Where the rows of one rank's SavePlan landed, in the plan's order.

    ``digests`` holds ceil(length / DIGEST_BLOCK) rows for each item, in order: xxh3-128 of each block of
    its raw bytes (for objects: of the blob's bytes).
    """

    files: tuple[str, ...]
    file: Int32
    start: Int64
    length: Int64
    digests: Digests


@dataclass(frozen=True, slots=True)
class Location:
    """Bytes ``[start, start + length)`` of a file named relative to the checkpoint's directory."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored piece; the view of one row of Chunks. ``digests`` is empty where none were taken."""

    box: Box
    location: Location
    digests: Digests = field(repr=False)
    writer: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The stored pieces of all tensors. ``file`` is -1 before they are written.

    Invariant: either ``digests`` has exactly the rows that ``block_bounds`` tells, or it is empty.
    """

    tensor: Int32
    boxes: Boxes
    writer: Int32  # rank that wrote it
    file: Int32
    start: Int64
    length: Int64
    digests: Digests

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def block_bounds(self) -> Int64:
        """n + 1 row numbers into ``digests``: those of chunk i are ``bounds[i]:bounds[i + 1]``."""
        counts = -(-self.length // DIGEST_BLOCK)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """What a checkpoint holds: every tensor's meta, grid and chunks.

    ``encoding`` tells how a chunk's location is to be understood: ``"raw"`` = the C-order bytes of its box
    (for objects: of the blob); ``"native"`` = however the format keeps it (only its backend can tell).
    ``save_id`` is the uuid (hex) of the save that wrote it, or empty for foreign checkpoints.
    """

    tensors: tuple[TensorEntry, ...]
    grids: tuple[tuple[int, ...] | None, ...]
    chunks: Chunks
    files: tuple[str, ...] = ()
    encoding: str = "raw"
    backend: tuple[str, int] = ("", 0)
    save_id: str = ""

    def numbers(self) -> dict[str, int]:
        """Key -> number in ``tensors``."""
        return {entry.key: i for i, entry in enumerate(self.tensors)}

    def chunk(self, i: int, bounds: Int64 | None = None) -> Chunk:
        """Row ``i``; pass ``chunks.block_bounds`` when asking for many."""
        c = self.chunks
        bounds = c.block_bounds if bounds is None else bounds
        digests = c.digests[bounds[i] : bounds[i + 1]] if len(c.digests) else c.digests
        file = self.files[c.file[i]] if c.file[i] >= 0 else ""
        return Chunk(
            c.boxes.row(i, len(self.tensors[c.tensor[i]].meta.shape)),
            Location(file, int(c.start[i]), int(c.length[i])),
            digests,
            int(c.writer[i]),
        )

    def chunks_of(self, key: str) -> list[Chunk]:
        number = self.numbers()[key]
        bounds = self.chunks.block_bounds
        return [self.chunk(int(i), bounds) for i in np.flatnonzero(self.chunks.tensor == number)]

    def located(self, results: Sequence[WriteResult]) -> Manifest:
        """This manifest with the locations that the ranks report.

        The chunks must stand in the order of plan_save: rank by rank, and within a rank in the plan's order.
        """
        files: dict[str, int] = {}
        file = [_renumbered(r.file, r.files, files) for r in results]
        chunks = replace(
            self.chunks,
            file=_joined(file, np.int32),
            start=_joined([r.start for r in results], np.int64),
            length=_joined([r.length for r in results], np.int64),
            digests=np.concatenate([r.digests for r in results] or [np.zeros((0, DIGEST_SIZE), np.uint8)]),
        )
        return replace(self, chunks=chunks, files=tuple(files))


@dataclass(frozen=True, slots=True)
class ReadItem:
    """One region to fetch from one chunk; the view of one row of a LoadPlan.

    ``box`` (global coordinates) lies within the chunk's box and within what was wanted.
    ``target`` is the row of the rank's own Declarations that it belongs to.
    """

    entry: TensorEntry
    chunk: Chunk
    box: Box
    target: int


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """What one rank reads from where."""

    manifest: Manifest
    chunk: Int64  # row in manifest.chunks
    boxes: Boxes
    target: Int64

    def __len__(self) -> int:
        return len(self.chunk)

    def rows(self) -> Iterator[ReadItem]:
        bounds = self.manifest.chunks.block_bounds
        for i in range(len(self)):
            chunk = int(self.chunk[i])
            entry = self.manifest.tensors[self.manifest.chunks.tensor[chunk]]
            box = self.boxes.row(i, len(entry.meta.shape))
            yield ReadItem(entry, self.manifest.chunk(chunk, bounds), box, int(self.target[i]))

    def take(self, rows: Any) -> LoadPlan:
        """The part of the plan that consists of these rows (an index array or mask)."""
        return replace(self, chunk=self.chunk[rows], boxes=self.boxes.take(rows), target=self.target[rows])
