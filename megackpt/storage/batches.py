"""Many new local files made durable together: one wait for the disk, not one for each file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from megackpt.storage.files import LocalWriter, failure
from megackpt.storage.interface import Batch, FileWriter

_OPEN = 120
"""Files held open until they are synced. On ext4, the first fsync commits for all of them."""
_THREADS = 4
"""Threads that sync. A disk flushes its cache once for all waiting threads."""

T = TypeVar("T")


class LocalBatch(Batch):
    """A batch of local files.

    ``open_folder`` opens the folder of a file, and creates it if absent. It returns the descriptor,
    the last part of the file's name, and the file's path. ``sync`` makes the entries of folders
    durable.
    """

    def __init__(
        self,
        open_folder: Callable[[str], tuple[int, str, str]],
        sync: Callable[[Iterable[str]], None],
    ) -> None:
        self._open_folder = open_folder
        self._sync = sync
        self._waiting: list[tuple[int, str]] = []
        self._folders: dict[str, None] = {}

    def create(self, name: str) -> FileWriter:
        writer = LocalWriter(*self._open_folder(name), self._take)
        self._folders.update(dict.fromkeys(_folders_above(name)))
        return writer

    def _take(self, fd: int, path: str) -> None:
        self._waiting.append((fd, path))
        if len(self._waiting) == _OPEN:
            self._sync_files()

    def _sync_files(self) -> None:
        try:
            _each(_sync_file, self._waiting)
        finally:
            self.abort()

    def close(self) -> None:
        self._sync_files()
        folders, self._folders = self._folders, {}
        _each(lambda folder: self._sync([folder]), list(folders))

    def abort(self) -> None:
        waiting, self._waiting = self._waiting, []
        for fd, _ in waiting:
            os.close(fd)


def _sync_file(file: tuple[int, str]) -> None:
    fd, path = file
    try:
        os.fsync(fd)
    except OSError as error:
        raise failure("make durable", path, error) from error


def _each(work: Callable[[T], None], items: Sequence[T]) -> None:
    """Call ``work`` on each, in a few threads if there are many. Raise when all have ended."""

    def each(part: Sequence[T]) -> None:
        for item in part:
            work(item)

    if len(items) < 4 * _THREADS:
        each(items)
    else:
        with ThreadPoolExecutor(_THREADS, "megackpt-sync") as pool:
            list(
                pool.map(each, [items[number::_THREADS] for number in range(_THREADS)])
            )


def _folders_above(name: str) -> Iterator[str]:
    """Yield all folders above: another writer may have made one and not synced it yet."""
    while name:
        name = name.rpartition("/")[0]
        yield name
