"""Metas of tensors, tables of them, and declarations: the shards that ranks hold."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from megackpt.errors import ShardingError
from megackpt.planning.box import Box, Boxes, Groups, Int64, group_equal

OBJECT = "object"
COMMON_KEY = "common_state"
NOMINAL_OBJECT = 1024  # bytes of an object in planning, when its size is not known yet
DIGEST_BLOCK = 1 << 20  # bytes of a chunk that share one digest
DIGEST_SIZE = 16  # xxh3-128

ITEMSIZE: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(
        (
            "float8_e4m3fn",
            "float8_e5m2",
            "float8_e4m3fnuz",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
        ),
        1,
    ),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
    OBJECT: 0,
}
"""Bytes per element of every dtype that can be stored, by torch's name for it."""
MOST_AXES = 64
"""The most dimensions of a tensor, or of a grid of objects. numpy has the same limit."""
LARGEST = 1 << 62
"""Sizes, offsets and volumes in bytes are below it: sums of two do not overflow 64 bits."""
_CARRIED = {
    size: np.dtype("c16" if size == 16 else f"u{size}") for size in (1, 2, 4, 8, 16)
}

T = TypeVar("T")
_TABLES = 64  # received tables kept: ranks of one pipeline stage have the same
_EXPANSION = 256  # bytes of a table for each of its packed ones, at most

ReplicaId = int | tuple[int, ...]
Int32 = NDArray[np.int32]
Bool = NDArray[np.bool_]
Digests = NDArray[np.uint8]  # (blocks, DIGEST_SIZE)


def carried_dtype(itemsize: int) -> np.dtype[Any]:
    """The numpy dtype for copying elements of this many bytes, whatever their dtype."""
    return _CARRIED[itemsize]


UNNUMBERED: Final = -(1 << 62)
"""The replica id, or part of it, of a shard whose rank does not know all holders.

No rank number, even a wrong one, has this value. See ``Declarations.numbered``.
"""


def is_main_replica(replica_id: ReplicaId) -> bool:
    """True for 0 and for tuples of zeros only."""
    if isinstance(replica_id, int):
        return replica_id == 0
    return not any(replica_id)


def is_unnumbered(replica_id: ReplicaId) -> bool:
    """True for ``UNNUMBERED`` and for tuples of it and zeros."""
    if isinstance(replica_id, int):
        return replica_id == UNNUMBERED
    return UNNUMBERED in replica_id and not any(
        n for n in replica_id if n != UNNUMBERED
    )


_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def size_problem(shape: Sequence[int], dtype: str) -> str:
    """Why no index can hold a tensor of this global shape and dtype; empty where it can."""
    if len(shape) > MOST_AXES:
        return f"it has {len(shape)} dimensions, and at most {MOST_AXES} can be stored"
    # Extents of 0 count as 1: pieces of an empty tensor have volumes, too, that must not overflow.
    if (
        math.prod(max(extent, 1) for extent in shape) * max(ITEMSIZE[dtype], 1)
        >= LARGEST
    ):
        return (
            f"{tuple(shape)} of {dtype} is too large: sizes must stay below 2^62 bytes, extents "
            "of 0 count as 1"
        )
    return ""


def key_problem(key: str) -> str:
    """Why this key cannot be stored; empty if it can."""
    found = None
    if not key.isascii():
        found = _PAIR.search(key)
    if found is None:
        return ""
    character = found.group().encode("utf-16", "surrogatepass").decode("utf-16")
    return (
        f"the key holds {character!r} as two surrogates, which JSON takes for that character: "
        "use the character itself"
    )


class TensorMeta(NamedTuple):
    """Global shape (in elements) and dtype (by torch's name) of a tensor, or ``"object"``.

    A tuple, as TensorEntry is: these hash and compare fast, in tables of ten thousands.
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


COMMON = TensorEntry(COMMON_KEY, TensorMeta((), OBJECT))
"""The common state."""


@dataclass(frozen=True, slots=True)
class ShardId:
    """One shard of one tensor, whichever ranks hold it."""

    key: str
    box: Box

    def __str__(self) -> str:
        if self.key == COMMON_KEY:
            return "the common state"
        return f"{self.key!r} {self.box}"


def unique_key(key: str, offset: Sequence[int], shape: Sequence[int]) -> str:
    """The name of one object of a grid, in Megatron's form ``rng_state/shard_0.1_4.2``.

    The object is at ``offset`` of global shape ``shape``. Without a grid (shape ()) it is the
    key.
    """
    if not shape:
        return key
    return f"{key}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"


def itemsizes(tensors: Sequence[TensorEntry]) -> Int64:
    """Bytes of an element of each tensor, 0 of objects."""
    return np.array([ITEMSIZE[entry.meta.dtype] for entry in tensors], np.int64)


def digest_rows(digests: bytes | memoryview) -> Digests:
    """The concatenated digests of blocks, as rows."""
    return np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_SIZE)


def table_of(values: Iterable[T]) -> tuple[tuple[T, ...], Int32]:
    """The distinct values in order of their first use, and for each value its number in them."""
    rows = list(values)
    table = tuple(dict.fromkeys(rows))
    if len(table) == len(rows):
        return table, np.arange(len(rows), dtype=np.int32)
    numbers = dict(zip(table, range(len(table)), strict=True))
    column = np.fromiter(map(numbers.__getitem__, rows), np.int32, len(rows))
    return table, column


def merged_tables(
    tables: Sequence[tuple[T, ...]], columns: Sequence[Int32]
) -> tuple[tuple[T, ...], Int32]:
    """One table of the distinct entries of all, and one column of numbers in it.

    A table that several ranks share (the same object) is merged once.
    """
    starts: dict[int, int] = {}  # id of a table -> where its entries begin
    entries: list[T] = []
    for table in tables:
        if id(table) not in starts:
            starts[id(table)] = len(entries)
            entries += table
    start = np.array([starts[id(table)] for table in tables], np.int32)
    own = joined(columns, np.int32) + np.repeat(start, list(map(len, columns)))
    whole, numbers = table_of(entries)
    return whole, numbers[own]


def joined(columns: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    if columns:
        return np.concatenate(columns)
    return np.zeros(0, dtype)


def pack_table(tensors: Sequence[TensorEntry]) -> bytes:
    """Equal tables give equal bytes."""
    # Not escaped: two escaped surrogates would be decoded as one character.
    text = json.dumps(tensors, separators=(",", ":"), ensure_ascii=False)
    return zlib.compress(text.encode("utf-8", "surrogatepass"), 1)


@lru_cache(maxsize=_TABLES)
def unpack_table(packed: bytes) -> tuple[TensorEntry, ...]:
    """The table of ``pack_table``, usually the same object for the same bytes.

    A coordinator receives a table from every rank. Raises ValueError for malformed bytes.
    """
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(packed, _EXPANSION * len(packed) + (1 << 20))
    if not unpacker.eof:
        raise ValueError(
            f"a table of {len(packed)} bytes is cut off, or expands to too many"
        )
    rows = json.loads(text.decode("utf-8", "surrogatepass"))
    return tuple(
        TensorEntry(key, TensorMeta(tuple(shape), dtype))
        for key, (shape, dtype) in rows
    )


@dataclass(frozen=True, slots=True)
class Declaration:
    """A ShardedTensor (or object) without its data: the view of one row of Declarations."""

    shard: ShardId
    meta: TensorMeta
    replica_id: ReplicaId
    flexible: bool
    nbytes: int
    rank: int

    @property
    def main(self) -> bool:
        return is_main_replica(self.replica_id)


@dataclass(frozen=True, eq=False)
class Declarations:
    """The shards of one rank or, after ``merge``, of all ranks in rank order.

    ``flexible`` is ShardedTensor.allow_shape_mismatch. ``nbytes`` is the size of the shard's
    data, for objects a nominal one. ``domains`` numbers, for each rank in these columns, the
    group of ranks in which one replica may be written for another. ``facts`` are names and texts
    on which all ranks must agree: the records of tensors that wrap others, and digests.
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
    facts: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.tensor)

    @cached_property
    def main(self) -> Bool:
        table = np.array([is_main_replica(r) for r in self.replica_ids], dtype=np.bool_)
        return table[self.replica]

    @cached_property
    def metas(self) -> tuple[tuple[TensorMeta, ...], Int32]:
        """The distinct metas, and for each of ``tensors`` the number of its meta."""
        return table_of(map(itemgetter(1), self.tensors))

    @cached_property
    def shards(self) -> Groups:
        """The distinct shards: groups of rows with one box of one tensor, in tensors' order."""
        return group_equal(self.tensor, self.boxes)

    @property
    def mains(self) -> Int64:
        """The number of main replicas of each of ``shards``."""
        main = self.main[self.shards.order].astype(np.int64)
        return np.add.reduceat(main, self.shards.bounds[:-1])

    def numbered(self) -> Declarations:
        """All ranks' declarations, with a main replica for shards of unnumbered replicas only.

        It is the replica of the lowest rank. A shard with a main replica keeps it.
        """
        table = np.array([is_unnumbered(r) for r in self.replica_ids], dtype=np.bool_)
        if not table.any() or not len(self):
            return self
        shards = self.shards
        has_main = np.logical_or.reduceat(self.main[shards.order], shards.bounds[:-1])
        open_rows = table[self.replica[shards.order]] & ~has_main[shards.number]
        # Rows of a shard ascend, and ranks with them: the first one is the lowest rank's.
        _, first = np.unique(shards.number[open_rows], return_index=True)
        replica = self.replica.copy()
        replica[shards.order[open_rows][first]] = len(self.replica_ids)
        return replace(self, replica_ids=(*self.replica_ids, 0), replica=replica)

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
        tensors, number = table_of(TensorEntry(r.shard.key, r.meta) for r in rows)
        replicas, replica = table_of(r.replica_id for r in rows)
        return cls(
            tensors,
            number,
            Boxes.of(r.shard.box for r in rows),
            replicas,
            replica,
            np.array([r.flexible for r in rows], np.bool_),
            np.array([r.nbytes for r in rows], np.int64),
            np.array([r.rank for r in rows], np.int32),
            (domain,),
        )

    @classmethod
    def of_boxes(
        cls,
        tensors: tuple[TensorEntry, ...],
        tensor: Int32,
        boxes: Boxes,
        nbytes: Int64,
        rank: Int32 | None = None,
    ) -> Declarations:
        """Each of these boxes declared once, by a main replica; without ``rank``, by rank 0."""
        zero = np.zeros(len(boxes), np.int32)
        if rank is None:
            rank = zero
        is_flexible = zero.astype(np.bool_)
        return cls(tensors, tensor, boxes, (0,), zero, is_flexible, nbytes, rank)

    @classmethod
    def merge(cls, parts: Sequence[Declarations]) -> Declarations:
        """All ranks' declarations in one: ``parts[i]`` belongs to rank i. Tables are joined."""
        if len(parts) == 1:
            return parts[0]
        tensors, number = merged_tables(
            [p.tensors for p in parts], [p.tensor for p in parts]
        )
        replicas, replica = merged_tables(
            [p.replica_ids for p in parts], [p.replica for p in parts]
        )
        return cls(
            tensors,
            number,
            Boxes.concat([p.boxes for p in parts]),
            replicas,
            replica,
            joined([p.flexible for p in parts], np.bool_),
            joined([p.nbytes for p in parts], np.int64),
            joined([p.rank for p in parts], np.int32),
            tuple(d for p in parts for d in p.domains),
            _agreed(parts) if any(p.facts for p in parts) else (),
        )


def _agreed(
    parts: Sequence[Declarations],
) -> tuple[tuple[str, str], ...]:
    """The facts of all ranks. Raises ShardingError where ranks contradict one another."""
    known: dict[str, tuple[int, str]] = {}
    for rank, part in enumerate(parts):
        for name, text in part.facts:
            first, said = known.setdefault(name, (rank, text))
            if said != text:
                raise ShardingError(
                    f"{name}: rank {first} has {said}, and rank {rank} has {text}. Parts of one "
                    "tensor must be quantised alike, and what they share must be equal: quantise "
                    "the whole tensor and cut it, or give the parts keys of their own"
                )
    return tuple((name, text) for name, (_, text) in known.items())
