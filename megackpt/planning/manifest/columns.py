"""Columns of several ranks, joined to one column with one table; and tables as bytes."""

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
    return np.concatenate(columns) if columns else np.zeros(0, dtype)


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
