"""Metas and names of tensors and shards; the dtypes that can be stored; tables of tensors."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from megackpt.planning.box import Box, Int64

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
"""The most dimensions of a tensor, or of a grid of objects: as many as in numpy."""
LARGEST = 1 << 62
"""Sizes, offsets and volumes in bytes are below it: sums of two do not overflow 64 bits."""
_CARRIED = {
    size: np.dtype("c16" if size == 16 else f"u{size}") for size in (1, 2, 4, 8, 16)
}

T = TypeVar("T")
_TABLES = 64  # received tables kept: ranks of one pipeline stage have the same

ReplicaId = int | tuple[int, ...]
Int32 = NDArray[np.int32]
Bool = NDArray[np.bool_]
Digests = NDArray[np.uint8]  # (blocks, DIGEST_SIZE)


def carried_dtype(itemsize: int) -> np.dtype[Any]:
    """The numpy dtype for copying elements of this many bytes, whatever their dtype."""
    return _CARRIED[itemsize]


UNNUMBERED: Final = -(1 << 62)
"""The replica id, or part of it, of a shard whose rank does not know the other holders.

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
    """Why nothing can be stored under this key; empty where it can."""
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
    """The name of one object of a grid, as in Megatron's formats: ``rng_state/shard_0.1_4.2``.

    The object is at ``offset`` of global shape ``shape``. Without a grid (shape ()) it is the
    key.
    """
    if not shape:
        return key
    return f"{key}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"


def itemsizes(tensors: Sequence[TensorEntry]) -> Int64:
    """Bytes of an element of each tensor, 0 of objects."""
    return np.array([ITEMSIZE[entry.meta.dtype] for entry in tensors], np.int64)


def merged_tables(
    tables: Sequence[tuple[T, ...]], columns: Sequence[Int32]
) -> tuple[tuple[T, ...], Int32]:
    """One table of the distinct entries of all, and one column of numbers in it.

    A table that several ranks share (the same object) is merged once.
    """
    whole: dict[T, int] = {}
    starts: dict[int, int] = {}  # id of a table -> where its numbers begin
    numbers: list[int] = []
    for table in tables:
        if id(table) not in starts:
            starts[id(table)] = len(numbers)
            numbers.extend(whole.setdefault(entry, len(whole)) for entry in table)
    start = np.array([starts[id(table)] for table in tables], np.int64)
    own = joined(columns, np.int32) + np.repeat(start, list(map(len, columns)))
    return tuple(whole), np.array(numbers, np.int32)[own]


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

    A coordinator receives a table from every rank.
    """
    rows = json.loads(zlib.decompress(packed).decode("utf-8", "surrogatepass"))
    return tuple(
        TensorEntry(key, TensorMeta(tuple(shape), dtype))
        for key, (shape, dtype) in rows
    )
