"""Chunks that tensorstore or zarr-python decodes, one at a time.

A library gets an array that is one chunk, in a store in memory: its description, and the bytes that
our Storage has read. So a library opens no file, and knows the size of the elements beforehand.
tensorstore stops decoding at this size. Codecs of zarr-python have no such bound, so zarr-python
runs in a process with limits (decoding_process.py).
"""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from multiprocessing.connection import Connection, Pipe
from threading import Lock, get_ident
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.backends.base import first_user
from megackpt.backends.zarr.codecs import TENSORSTORE, ZARR_PYTHON
from megackpt.backends.zarr.decoding_process import ELEMENTS, store_names
from megackpt.errors import BackendError, CorruptCheckpoint

_COMPRESSORS = frozenset(("gzip", "zstd", "blosc"))
_FLAT = _COMPRESSORS | {"transpose", "bytes", "crc32c"}
_V2 = frozenset((None, "blosc", "bz2", "gzip", "zlib", "zstd"))
_NUMERIC = re.compile(
    "bytes|transpose|sharding_indexed|(numcodecs[.])?(adler32|astype|bitround|blosc|bz2|crc32c?|"
    "delta|fixedscaleoffset|fletcher32|gzip|jenkins_lookup3|lz4|lzma|packbits|pcodec|quantize|"
    "shuffle|zfpy|zlib|zstd)"
)
"""Codecs that decode numbers. The codecs of numcodecs for objects may run code (pickle)."""
_MOST_CODECS = 32
_SPARE = 1 << 16
_PATIENCE = 120
_RATE = 1 << 18
"""Seconds that zarr-python has for a chunk: _PATIENCE, and one for each _RATE of its bytes."""

Data = bytes | bytearray | None
"""The bytes of a chunk; None: it is not stored, and consists of the fill value."""


def library_of_v3(codecs: Sequence[Mapping[str, Any]]) -> str:
    """The library that decodes this chain; "" if none may.

    tensorstore does not know the size of what lies between two compressors, or in shards, and
    decodes it without a bound.
    """
    names = [codec["name"] for codec in codecs]
    packed = [name for name in names if name in _COMPRESSORS]
    if _FLAT.issuperset(names) and len(packed) <= 1:
        return TENSORSTORE
    return _by_zarr_python(list(_names(codecs)))


def library_of_v2(compressor: str | None, filters: Sequence[Mapping[str, Any]]) -> str:
    """The library that decodes this compressor and these filters; "" if none may."""
    if compressor in _V2 and not filters:
        return TENSORSTORE
    names = [codec["id"] for codec in filters]
    if compressor is not None:
        names.append(compressor)
    return _by_zarr_python(names)


def _by_zarr_python(names: list[str]) -> str:
    if all(map(_NUMERIC.fullmatch, names)) and len(names) <= _MOST_CODECS:
        return ZARR_PYTHON
    return ""


def _names(codecs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for codec in codecs:
        yield codec["name"]
        for inner in ("codecs", "index_codecs"):
            yield from _names(codec.get("configuration", {}).get(inner, ()))


def decode(library: str | None, document: str, data: Data, where: str) -> NDArray[Any]:
    """The elements of a chunk, in C order; one element of a chunk that is not stored.

    Raises CorruptCheckpoint for bytes that do not decode to a chunk, BackendError for a document
    that the library refuses.
    """
    try:
        # tensorstore ends a process that is forked from a user of tensorstore.
        if library == TENSORSTORE and first_user() == os.getpid():
            return _by_tensorstore(document, data)
        return _process_of(os.getpid()).decode(document, data)
    except (ImportError, OSError) as error:
        raise BackendError(
            f"{where}: {library} decodes this array, and cannot be started: {error}"
        ) from error
    except Exception as error:  # of the library
        if data is None:
            raise BackendError(
                f"{where}: {library} does not take the description of the array: {error}"
            ) from error
        raise CorruptCheckpoint(
            f"{where}: {library} cannot decode the chunk: {error}"
        ) from error


@lru_cache(maxsize=16)
def _opened(document: str, _thread: int) -> tuple[Any, str]:
    """tensorstore's array for one thread, and the name of the chunk in its store."""
    import tensorstore as ts

    parsed = json.loads(document)
    description, chunk = store_names(parsed)
    # Each decoded chunk goes to the caller, so tensorstore keeps none.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    spec = {
        "driver": {2: "zarr", 3: "zarr3"}[parsed["zarr_format"]],
        "kvstore": "memory://",
    }
    files = ts.KvStore.open("memory://", context=context).result()
    files.write(description, document.encode()).result()
    return ts.open(spec, context=context, open=True, read=True).result(), chunk


def _by_tensorstore(document: str, data: Data) -> NDArray[Any]:
    array, chunk = _opened(document, get_ident())
    if data is None:
        element: NDArray[Any] = array[(0,) * array.ndim].read().result()
        return element
    claimed = int.from_bytes(data[4:8], "little")
    most = 2 * array.size * array.dtype.numpy_dtype.itemsize + _SPARE
    if '"blosc"' in document and claimed > most:
        # tensorstore takes the memory that a header of blosc claims.
        raise ValueError(f"blosc claims {claimed} bytes of at most {most}")
    array.kvstore.write(chunk, bytes(data)).result()
    try:
        found: NDArray[Any] = array.read().result()
    finally:
        # The next chunk may be one that is not stored.
        array.kvstore.write(chunk, None).result()
    return found


class _Process:
    """zarr-python in another process. It starts with the first chunk, and serves one at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None

    def decode(self, document: str, data: Data) -> NDArray[Any]:
        if data is not None and not data:
            raise ValueError("it has no bytes")
        shape = json.loads(document)["shape"]
        if data is None:
            shape = ()
        size = math.prod(shape)
        with self._lock:
            self._running = self._running or _start()
            connection = self._running[1]
            try:
                connection.send_bytes(document.encode())
                connection.send_bytes(data or b"")
                # Its limit is of processor time, which a process that stands still does not use.
                if not connection.poll(_PATIENCE + 16 * size // _RATE):
                    raise EOFError
                # Items have at most 16 bytes.
                answer = connection.recv_bytes(16 * size + _SPARE)
            except (OSError, EOFError) as error:
                self.stop()
                raise ValueError(
                    "it took more memory or time than a chunk should"
                ) from error
        if answer[:1] != ELEMENTS:
            raise ValueError(answer.decode())
        return np.frombuffer(answer[1:], f"V{(len(answer) - 1) // size}").reshape(shape)

    def stop(self) -> None:
        if self._running is None:
            return
        process, connection = self._running
        self._running = None
        with process, connection:
            process.kill()


@cache
def _process_of(_parent: int) -> _Process:
    """A fork has a process of its own."""
    return _Process()


@atexit.register
def _stop() -> None:
    _process_of(os.getpid()).stop()


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from megackpt.backends.zarr.decoding_process import main; "
        f"main({theirs.fileno()})"
    )
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,  # an interrupt at the terminal is for the caller
        )
    return process, ours
