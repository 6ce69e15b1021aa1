"""Columns of several ranks, joined to one column with one table; and columns as bytes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megackpt.planning.manifest.tensors import Int32, TensorEntry, TensorMeta

T = TypeVar("T")
_TABLES = 64  # received tables kept: ranks of one pipeline stage have the same


def renumbered(column: Int32, names: Sequence[Any], table: dict[Any, int]) -> Int32:
    return _numbers(names, table)[column]


def _numbers(names: Sequence[Any], table: dict[Any, int]) -> Int32:
    numbers = list(map(table.get, names))
    if None in numbers:  # rare: most ranks have names that another rank has
        numbers = [table.setdefault(name, len(table)) for name in names]
    return np.array(numbers, np.int32)


def merged_tables(
    tables: Sequence[tuple[T, ...]], columns: Sequence[Int32]
) -> tuple[tuple[T, ...], Int32]:
    """One table of the distinct entries of all, and one column of numbers in it.

    A table that several ranks share (the same object) is merged once.
    """
    whole: dict[T, int] = {}
    starts: dict[int, int] = {}  # id of a table -> where its numbers begin
    numbers: list[Int32] = []
    count = 0
    for table in tables:
        if id(table) not in starts:
            starts[id(table)] = count
            numbers.append(_numbers(table, whole))
            count += len(table)
    start = np.array([starts[id(table)] for table in tables], np.int64)
    own = joined(columns, np.int32)
    merged: Int32 = joined(numbers, np.int32)[
        own + np.repeat(start, [len(column) for column in columns])
    ]
    return tuple(whole), merged


def joined(columns: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(columns) if columns else np.zeros(0, dtype)


def pack(*columns: NDArray[Any]) -> tuple[str, bytes]:
    """Columns of integers, (n) or (n, m), as rows of 4-byte numbers, or 8-byte if needed."""
    wide = np.column_stack([column.astype(np.int64) for column in columns])
    small = wide.astype(np.int32)
    rows = small if (small == wide).all() else wide
    return rows.dtype.str, rows.tobytes()


def unpack(packed: tuple[str, bytes], width: int) -> NDArray[Any]:
    """The rows (n, width) of a result of ``pack``, read-only."""
    dtype, data = packed
    return np.frombuffer(data, dtype).reshape(-1, width)


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
