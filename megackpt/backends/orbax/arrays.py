"""Arrays of one item, described and read by tensorstore.

A session has the endpoint of a checkpoint, and what tensorstore has opened. It ends soon after the
last read: converters and ``verify`` read cell by cell, and each session reads the tree of OCDBT.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.backends.base import first_user
from megackpt.backends.orbax.endpoint import Endpoint
from megackpt.backends.orbax.trees import MANIFEST, Item
from megackpt.errors import (
    BackendError,
    CheckpointingException,
    CorruptCheckpoint,
    StorageError,
)
from megackpt.planning.box import Box
from megackpt.storage import Storage

DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}
"""The file that describes an array, and the driver of tensorstore that reads it."""

_IDLE_SECONDS = 1.0
_CACHE_BYTES = 64 << 20
"""Bytes of the nodes of OCDBT that a session keeps."""
_CONTEXT = {
    "cache_pool#nodes": {"total_bytes_limit": _CACHE_BYTES},
    "http_request_concurrency": {"limit": 4},
    "http_request_retries": {"max_retries": 1},
    "data_copy_concurrency": {"limit": 2},
}
_ERRORS = (
    ValueError,
    LookupError,
    TypeError,
    RuntimeError,
    NotImplementedError,
    OSError,
    OverflowError,
    MemoryError,
)
"""What tensorstore raises, by the code of its status."""
_DEEPEST = 64


_lock = threading.Lock()
_sessions: dict[int, Session] = {}
"""By the identity of the storage, which a session keeps."""


class Session:
    """The arrays of one checkpoint while it is read. Thread-safe."""

    def __init__(self, root: Storage) -> None:
        # Here, because no other format needs it.
        import tensorstore

        self._tensorstore: Any = tensorstore
        self._root = root
        self.users = 0
        self.used_at = time.monotonic()
        self._context = tensorstore.Context(_CONTEXT)
        self._opened = lru_cache(maxsize=1024)(self._open)
        self.endpoint = Endpoint(root, self._is_needed)

    def _is_needed(self) -> bool:
        with _lock:
            is_kept = _sessions.get(id(self._root)) is self
            if time.monotonic() - self.used_at > _IDLE_SECONDS:
                is_kept = False
            if self.users or is_kept:
                return True
            self.forget()
            return False

    def forget(self) -> None:
        if _sessions.get(id(self._root)) is self:
            del _sessions[id(self._root)]

    def keys(self, item: Item) -> list[str]:
        """The names of all files of arrays in an item, relative to the item."""
        if not item.ocdbt:
            return list(_files_below(self._root, item.path, "", 0))
        with self._errors(f"{item.path}{MANIFEST}"):
            store = self._tensorstore.KvStore.open(
                self._store(item, ""), context=self._context
            ).result()
            return [key.decode() for key in store.list().result()]

    def begin(self, item: Item, name: str, fill: bool, driver: str) -> Any:
        """Begin to open an array: the future of its TensorStore.

        ``fill``: a chunk that is missing has the fill value of the array. False: it is an error.
        ``driver``: tensorstore's, or "" if it is not known.
        """
        with self._errors(f"{item.path}{name}"):
            return self._opened(item, name, fill, driver)

    def _open(self, item: Item, name: str, fill: bool, driver: str) -> Any:
        store = self._store(item, f"{name}/" if name else "")
        if not driver:
            found = self._tensorstore.KvStore.open(store, context=self._context)
            state = found.result().read(".zarray").result().state
            driver = "zarr" if state == "value" else "zarr3"
        spec = {
            "driver": driver,
            "kvstore": store,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
            "fill_missing_data_reads": fill,
        }
        return self._tensorstore.open(spec, context=self._context, read=True)

    def array(self, item: Item, name: str, fill: bool, driver: str) -> Any:
        """The TensorStore of an array. Its arguments are those of ``begin``."""
        opened = self.begin(item, name, fill, driver)
        with self._errors(f"{item.path}{name}"):
            return opened.result()

    def _store(self, item: Item, name: str) -> dict[str, Any]:
        base = {"driver": "http", "base_url": self.endpoint.url}
        if not item.ocdbt:
            return {**base, "path": f"{item.path}{name}"}
        return {
            "driver": "ocdbt",
            "base": {**base, "path": item.path},
            "path": name,
            "cache_pool": "cache_pool#nodes",
        }

    def read(self, array: Any, box: Box, what: str) -> NDArray[Any]:
        """The elements of a region."""
        with self._errors(what):
            found: NDArray[Any] = np.asarray(array[box.slices()].read().result())
            return found

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Raise errors of tensorstore as CorruptCheckpoint, errors of the storage as they are."""
        try:
            yield
        except _ERRORS as error:
            for cause in list(self.endpoint.errors):
                if isinstance(cause, CheckpointingException):
                    raise cause from error
                raise StorageError(
                    f"{self._root.location}: {what}: {cause!r}"
                ) from cause
            reason = str(error).partition(" [source")[0]
            reason = reason.replace(self.endpoint.url, f"{self._root.location}/")
            raise CorruptCheckpoint(
                f"{self._root.location}: {what} cannot be read: {reason:.500}"
            ) from error


@contextmanager
def session(root: Storage) -> Iterator[Session]:
    """The session of a checkpoint. It does not end in this block. An error ends it soon.

    Raises BackendError in a process that is forked from a user of tensorstore.
    """
    if first_user() != os.getpid():
        raise BackendError(
            f"{root.location}: tensorstore would end this process, because it is forked from one "
            "that has used tensorstore: start it by another method, such as spawn"
        )
    with _lock:
        if id(root) not in _sessions:
            _sessions[id(root)] = Session(root)
        one = _sessions[id(root)]
        one.users += 1
    try:
        yield one
    except BaseException:
        with _lock:
            one.forget()
        raise
    finally:
        with _lock:
            one.users -= 1
            one.used_at = time.monotonic()


def _files_below(root: Storage, item: str, folder: str, depth: int) -> Iterator[str]:
    if depth > _DEEPEST:
        raise CorruptCheckpoint(
            f"{root.location}/{item}{folder}: folders in folders, {depth} deep"
        )
    names = [f"{folder}{name}" for name in root.list(f"{item}{folder}".rstrip("/"))]
    sizes = root.sizes([f"{item}{name}" for name in names])
    for name, size in zip(names, sizes, strict=True):
        if size is None:
            yield from _files_below(root, item, f"{name}/", depth + 1)
        else:
            yield name
