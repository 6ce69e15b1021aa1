"""A process in which zarr-python decodes chunks, within limits of memory and of processor time."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

ELEMENTS = b"="
"""Begins an answer with elements. Other answers are errors."""
_SPARE_BYTES = 128 << 20
"""Address space for zarr-python's threads and tables."""
_COPIES = 8
"""A chain of codecs has a few copies of a chunk in memory."""
_SECONDS = 5
_RATE = 1 << 20
"""Seconds of processor time for a chunk: _SECONDS, and one for each _RATE of its bytes."""


def store_names(array: Mapping[str, Any]) -> tuple[str, str]:
    """The names of the description and of the only chunk of an array, in its store."""
    zeros = ["0"] * len(array["shape"])
    if array["zarr_format"] == 2:
        return ".zarray", ".".join(zeros) or "0"
    return "zarr.json", "/".join(["c", *zeros])


def main(descriptor: int) -> None:
    """What the process runs until its parent closes the connection."""
    connection = Connection(descriptor)
    while True:
        try:
            document = connection.recv_bytes()
            data = connection.recv_bytes()
        except EOFError:
            return
        try:
            answer = ELEMENTS + _decoded(document, data)
        except Exception as error:  # noqa: BLE001 - raised in the parent
            answer = f"{type(error).__name__}: {error}".encode()[:1000]
        connection.send_bytes(answer)


def _decoded(document: bytes, data: bytes) -> bytes:
    """The elements of a chunk. Without data: the fill value."""
    import zarr
    from zarr.buffer.cpu import Buffer
    from zarr.storage import MemoryStore

    import megackpt.zarr_dtypes  # noqa: F401 - registers bfloat16 and float8

    array = json.loads(document)
    description, chunk = store_names(array)
    files: dict[str, Any] = {description: Buffer.from_bytes(document)}
    place: Any = (0,) * len(array["shape"])
    size = 0
    if data:
        files[chunk] = Buffer.from_bytes(data)
        place = ...
        size = 16 * int(np.prod(array["shape"], dtype=np.int64)) + len(data)
    _limit(size)
    opened = zarr.open_array(
        MemoryStore(files), mode="r", zarr_format=array["zarr_format"]
    )
    values = np.asarray(opened[place])
    return values.astype(values.dtype.newbyteorder("=")).tobytes()


def _limit(size: int) -> None:
    """Limit what the next chunk may take, beyond what the process has now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    memory = pages * os.sysconf("SC_PAGE_SIZE") + _SPARE_BYTES + _COPIES * size
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + _SECONDS + size // _RATE
    for kind, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
    ):
        _, most = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY:
            limit = min(limit, most)
        resource.setrlimit(kind, (limit, most))
