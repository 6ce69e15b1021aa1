"""Many new files of a local file system that become durable together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from megackpt.storage.files import LocalWriter, sync_written, write_parts
from megackpt.storage.interface import Batch, FileWriter

T = TypeVar("T")

_MAX_WAITING = 120
"""Files of a batch held open until they are synced. The first fsync on ext4 commits for all."""
_SMALL = 64 << 10
"""Bytes at the end of a file that are left to the fsync."""
_THREADS = 4
"""Threads that sync. A disk flushes its cache once for all waiting threads."""


class LocalBatch(Batch):
    """Many new files made durable together: one wait for the disk, not one for each file.

    ``open_folder`` opens the folder of a file, and creates it if absent. It returns a descriptor
    for the file's writer, the last part of the file's name, and the file's path. It keeps the
    folder's own descriptor, by path, in place of that of another folder: many files come folder by
    folder. ``sync`` makes the entries of a folder durable. ``moved``: see ``Storage.moved``.
    """

    def __init__(
        self,
        open_folder: Callable[[str, dict[str, int]], tuple[int, str, str]],
        sync: Callable[[str], None],
        moved: Callable[[], object],
    ) -> None:
        self._moved = moved
        self._open_folder = open_folder
        self._sync = sync
        self._waiting: list[tuple[int, str]] = []
        self._last_folder: dict[str, int] = {}  # its descriptor, by path
        self._folders: dict[str, None] = {}

    def create(self, name: str) -> FileWriter:
        writer = _BatchWriter(*self._open_folder(name, self._last_folder), self._moved)
        writer.batch = self
        while name:  # another writer may have made a folder above and not synced it yet
            name = name.rpartition("/")[0]
            self._folders[name] = None
        return writer

    def take(self, fd: int, path: str) -> None:
        """Make a written file durable, and close it, with others."""
        self._waiting.append((fd, path))
        if len(self._waiting) == _MAX_WAITING:
            self._sync_files()

    def _sync_files(self) -> None:
        try:
            # First: the fsync of one file may wait for the bytes of all.
            for file in self._waiting:
                write_parts(self._moved, file, leave=_SMALL)
            _each(partial(sync_written, self._moved), self._waiting)
        finally:
            self.abort()

    def close(self) -> None:
        self._sync_files()
        folders, self._folders = self._folders, {}
        _each(self._sync, list(folders))

    def abort(self) -> None:
        waiting, self._waiting = self._waiting, []
        for fd, _ in waiting:
            os.close(fd)
        while self._last_folder:
            os.close(self._last_folder.popitem()[1])


class _BatchWriter(LocalWriter):
    batch: LocalBatch

    def close(self) -> None:
        if self._fd >= 0:
            try:
                self._start_writeback(1)
            except BaseException:  # the save was given up
                self.abort()
                raise
            os.close(self._folder)
            fd, self._fd = self._fd, -1
            self.batch.take(fd, self._path)


def _each(work: Callable[[T], None], items: Sequence[T]) -> None:
    """Call ``work`` on each, in a few threads if there are many. Raise when all have ended."""

    def each(share: Sequence[T]) -> None:
        for item in share:
            work(item)

    if len(items) < 4 * _THREADS:
        each(items)
        return
    shares = [items[number::_THREADS] for number in range(_THREADS)]
    with ThreadPoolExecutor(_THREADS, "megackpt-sync") as pool:
        list(pool.map(each, shares))
