"""A local storage that records durable files and the bytes that were read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from megackpt.storage import Batch, FileUpdater, FileWriter, LocalStorage
from megackpt.storage.files import LocalReader

F = TypeVar("F", FileWriter, FileUpdater, Batch)


class WatchedStorage(LocalStorage):
    """Records durable files and reads.

    ``durable``: files that were closed or put. ``read``: bytes. Files of a batch are durable when
    the batch is closed.
    """

    def __init__(self, path: str | os.PathLike[str], create: bool = False) -> None:
        super().__init__(path, create)
        self.durable: set[str] = set()
        self.read = 0

    def lost(self) -> Iterator[str]:
        """Yield the files here that a power failure could take."""
        for path in sorted(Path(self.location).rglob("*")):
            name = path.relative_to(self.location).as_posix()
            if path.is_file() and name not in self.durable:
                yield name

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

    def open(self, name: str) -> LocalReader:
        reader = super().open(name)
        read_into = reader.read_into

        def traced(start: int, buffers: Sequence[memoryview]) -> None:
            read_into(start, buffers)
            for buffer in buffers:
                self.read += buffer.nbytes

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
