"""tensorstore: arrays opened to be written and read, what its errors mean here; the indexes of shards; threads."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import google_crc32c
import ml_dtypes  # noqa: F401  (numpy learns bfloat16 and the float8 kinds)
import numpy as np
import tensorstore as ts

from megackpt import limits
from megackpt.backends.base import THREADS
from megackpt.backends.object_files import encode_key
from megackpt.backends.zarr.documents import (
    Packing,
    array_document,
    parse_array,
    parse_zarray,
)
from megackpt.backends.zarr.layout import ArrayLayout, Grid
from megackpt.backends.zarr.names import ARRAY, ZARRAY
from megackpt.errors import CheckpointingException, CorruptCheckpoint, StorageError
from megackpt.planning.box import Int64
from megackpt.planning.manifest import TensorEntry
from megackpt.storage import Storage, read_dense

T = TypeVar("T")

MISSING = -1
ABSENT = (1 << 64) - 1
"""How an index tells of a chunk that is not there: its start and its length."""

_REFUSALS = frozenset(
    (
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
        "UNAVAILABLE",
        "DEADLINE_EXCEEDED",
        "RESOURCE_EXHAUSTED",
        "ABORTED",
    )
)
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)

_PADDED, _PADDING = 64 << 20, 16
"""A chunk may be larger than its part of the tensor: by so many bytes, and beyond that so many times."""

_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def context() -> ts.Context:
    """No cache: a chunk is touched once."""
    return ts.Context(
        {
            "file_io_concurrency": {"limit": THREADS},
            "data_copy_concurrency": {"limit": THREADS},
            "cache_pool": {"total_bytes_limit": 0},
        }
    )


def to_write(
    root: Storage, entry: TensorEntry, cell: Grid, packing: Packing, within: ts.Context
) -> ts.TensorStore:
    """The array of a tensor, whose zarr.json need not be there yet: no rank waits for another to write it."""
    spec = {
        "driver": "zarr3",
        "kvstore": root.kvstore(encode_key(entry.key)),
        "metadata": json.loads(
            array_document(entry.meta.shape, entry.meta.dtype, cell, packing)
        ),
        "assume_metadata": True,
        "open": True,
        # Chunks of zeros are written too: a missing one is a loss that we want to notice.
        "store_data_equal_to_fill_value": True,
    }
    return ts.open(spec, context=within).result()


def layout_in(root: Storage, folder: str) -> ArrayLayout | None:
    """The array in a folder, by its zarr.json or .zarray; None where there is neither. Raises as parse_array."""
    for name, parse in ((ARRAY, parse_array), (ZARRAY, parse_zarray)):
        if root.size(f"{folder}/{name}") is not None:
            return parse(
                root.get(f"{folder}/{name}", limits.ZARR_DESCRIPTION_BYTES),
                f"{root.location}/{folder}/{name}",
            )
    return None


def to_read(
    root: Storage, folder: str, layout: ArrayLayout, within: ts.Context
) -> ts.TensorStore:
    """The array in a folder. CorruptCheckpoint for chunks that this machine cannot hold: they would end the process."""
    if layout.chunk_bytes > _MEMORY:
        raise CorruptCheckpoint(
            f"a chunk of {layout.chunk_bytes} bytes in {root.location}/{folder} is more than there is memory for"
        )
    if layout.chunk_bytes > _PADDED + _PADDING * layout.own_bytes:
        raise CorruptCheckpoint(
            f"{root.location}/{folder} has chunks of {layout.chunk_bytes} bytes, of which at most {layout.own_bytes} "
            "can be the tensor's"
        )
    spec = layout.spec | {
        "kvstore": root.kvstore(folder),
        "assume_metadata": True,
        "open": True,
    }
    return ts.open(spec, context=within).result()


def shard_index(
    root: Storage, file: str, count: int, index: tuple[str, bool]
) -> tuple[Int64, Int64]:
    """Start and length of each of the ``count`` chunks of a shard, as its index has it; MISSING where there is none.

    Raises CorruptCheckpoint where the file is missing, ends before its index, or its index is damaged or lies.
    """
    where = f"{root.location}/{file}"
    at, checked = index
    try:
        with root.open(file) as reader:
            size = 16 * count
            whole = size + 4 * checked
            if reader.size < whole:
                raise CorruptCheckpoint(
                    f"{where} has {reader.size} bytes, and its index alone should have {whole}"
                )
            data = read_dense(
                reader,
                0 if at == "start" else reader.size - whole,
                whole,
                f"the index of {where}",
            )
            end = reader.size
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{where} is missing") from None
    table = np.frombuffer(data, "<u8", 2 * count).reshape(count, 2)
    if (
        checked
        and google_crc32c.value(bytes(data[:size])).to_bytes(4, "little") != data[size:]
    ):
        raise CorruptCheckpoint(
            f"{where}: the index of the shard does not match its crc32c"
        )
    absent = (table == ABSENT).all(axis=1)
    starts, lengths = table[:, 0], table[:, 1]
    astray = ~absent & ((starts > end) | (lengths > end - np.minimum(starts, end)))
    if astray.any():
        number = int(np.flatnonzero(astray)[0])
        raise CorruptCheckpoint(
            f"{where}: by its index, chunk {number} is at byte {starts[number]}, {lengths[number]} bytes long, and "
            f"the file has {end}"
        )
    found = np.where(absent[:, None], np.uint64(ABSENT), table).astype(np.int64)
    return found[:, 0], found[:, 1]


@contextmanager
def meaning(kind: type[CheckpointingException], told: str) -> Iterator[None]:
    """tensorstore raises ValueError whatever happens: say what it means here. StorageError where the storage refused
    (no permission, input/output errors): tensorstore tells so by its code, or by the error of the operating system.
    """
    try:
        yield
    except ValueError as error:
        story = str(error).partition(" [tensorstore_spec=")[0]
        number = _OS_ERROR.search(str(error))
        refused = story.partition(":")[0] in _REFUSALS or (
            number and int(number[1]) not in _NOT_THERE
        )
        raise (StorageError if refused else kind)(f"{told}: {story}") from error


def latest(make: Callable[..., T]) -> Callable[..., T]:
    """``make``, keeping what was made last: rows of one tensor stand together."""
    kept: list[tuple[Any, T]] = []

    def made(*asked: Any) -> T:
        if not kept or kept[0][0] != asked:
            kept[:] = [(asked, make(*asked))]
        return kept[0][1]

    return made


def share(count: int, work: Callable[[Iterator[int]], None]) -> None:
    """Let THREADS threads take the numbers below ``count`` from one iterator; the first error stops all."""
    numbers = iter(range(count))  # taking from it is one step of the interpreter
    if count < 2:
        work(numbers)
        return

    def until_error() -> None:
        try:
            work(numbers)
        except BaseException:
            for _ in numbers:
                pass
            raise

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(until_error) for _ in range(THREADS)]:
            future.result()
