"""A local storage that records durable files and the bytes that were read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from megackpt.storage import Batch, FileUpdater, FileWriter, LocalStorage
from megackpt.storage.files import LocalReader

F = TypeVar("F", FileWriter, FileUpdater, Batch)


class WatchedStorage(LocalStorage):
    """Records durable files and reads.

    ``durable``: files that were closed or put. ``synced``: folders. ``read``: bytes.
    Files of a batch are durable when the batch is closed. What tensorstore writes through
    ``kvstore`` is not recorded: it makes each file durable with its name in its folder, and leaves
    the names of new folders to ``sync``.
    """

    def __init__(self, path: str | os.PathLike[str], create: bool = False) -> None:
        super().__init__(path, create)
        self.durable: set[str] = set()
        self.synced: set[str] = set()
        self.stores = False
        self.read = 0

    def lost(self) -> Iterator[str]:
        """Yield the files here that a power failure could take."""
        for path in sorted(Path(self.location).rglob("*")):
            name = path.relative_to(self.location).as_posix()
            if not path.is_file() or name in self.durable:
                continue
            folders = {str(folder) for folder in PurePosixPath(name).parent.parents}
            if not self.stores or not self.synced.issuperset(
                "" if folder == "." else folder for folder in folders
            ):
                yield name

    def kvstore(self, folder: str) -> dict[str, Any]:
        self.stores = True
        return super().kvstore(folder)

    def create(self, name: str) -> FileWriter:
        return _after_close(super().create(name), lambda: self.durable.add(name))

    def batch(self) -> Batch:
        batch = super().batch()
        create = batch.create
        closed: set[str] = set()

        def traced(name: str) -> FileWriter:
            return _after_close(create(name), lambda: closed.add(name))

        batch.create = traced  # type: ignore[method-assign]
        return _after_close(batch, lambda: self.durable.update(closed))

    def update(self, name: str) -> FileUpdater:
        return _after_close(super().update(name), lambda: self.durable.add(name))

    def put(self, name: str, data: bytes) -> None:
        super().put(name, data)
        self.durable.add(name)

    def sync(self, folders: Iterable[str]) -> None:
        folders = list(folders)
        super().sync(folders)
        self.synced.update(folders)

    def open(self, name: str) -> LocalReader:
        reader = super().open(name)
        read_into = reader.read_into

        def traced(start: int, buffers: Sequence[memoryview]) -> None:
            read_into(start, buffers)
            self.read += sum(buffer.nbytes for buffer in buffers)

        reader.read_into = traced  # type: ignore[method-assign]
        return reader


def _after_close(file: F, callback: Callable[[], object]) -> F:
    """Call ``callback`` each time the file, or batch, was closed without an error."""
    close = file.close

    def traced() -> None:
        close()
        callback()

    file.close = traced  # type: ignore[method-assign]
    return file
