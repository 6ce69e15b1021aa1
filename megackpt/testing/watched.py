"""A directory that remembers what was made durable in it, and how many bytes were read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from megackpt.storage import (
    Batch,
    FileReader,
    FileUpdater,
    FileWriter,
    LocalStorage,
)


class WatchedStorage(LocalStorage):
    """``durable``: files that were closed (those of a batch: with it), or put whole; ``synced``: folders whose entries
    were; ``read``: bytes.

    What tensorstore writes through ``kvstore`` is not seen. It makes each file durable with its name in its folder,
    and leaves the names of new folders to ``sync``.
    """

    def __init__(self, path: str | os.PathLike[str], create: bool = False) -> None:
        super().__init__(path, create)
        self.durable: set[str] = set()
        self.synced: set[str] = set()
        self.stores = False
        self.read = 0

    def lost(self) -> Iterator[str]:
        """The files here that a power cut could take: nobody has made them durable."""
        for path in sorted(Path(self.location).rglob("*")):
            name = path.relative_to(self.location).as_posix()
            if (
                path.is_file()
                and name not in self.durable
                and not (self.stores and self._is_reachable(name))
            ):
                yield name

    def _is_reachable(self, name: str) -> bool:
        """Are the names of all folders above this file's durable?"""
        above = [folder.as_posix() for folder in PurePosixPath(name).parents][1:]
        return self.synced.issuperset(
            "" if folder == "." else folder for folder in above
        )

    def kvstore(self, folder: str) -> dict[str, Any]:
        self.stores = True
        return super().kvstore(folder)

    def create(self, name: str) -> FileWriter:
        return _Writer(super().create(name), self.durable, name)

    def batch(self) -> Batch:
        return _Batch(super().batch(), self.durable)

    def update(self, name: str) -> FileUpdater:
        return _Updater(super().update(name), self.durable, name)

    def put(self, name: str, data: bytes) -> None:
        super().put(name, data)
        self.durable.add(name)

    def sync(self, folders: Iterable[str]) -> None:
        folders = list(folders)
        super().sync(folders)
        self.synced.update(folders)

    def open(self, name: str) -> FileReader:  # type: ignore[override] # what commits do with a reader is not asked here
        return _Reader(super().open(name), self)


class _Writer(FileWriter):
    def __init__(self, file: FileWriter, durable: set[str], name: str) -> None:
        self._file, self._durable, self._name = file, durable, name

    def write(self, buffers: Sequence[memoryview]) -> None:
        self._file.write(buffers)

    @property
    def position(self) -> int:
        return self._file.position

    def close(self) -> None:
        self._file.close()
        self._durable.add(self._name)

    def abort(self) -> None:
        self._file.abort()


class _Batch(Batch):
    """Its files are durable when it is closed, and not before."""

    def __init__(self, batch: Batch, durable: set[str]) -> None:
        self._batch, self._durable = batch, durable
        self._written: set[str] = set()

    def create(self, name: str) -> FileWriter:
        return _Writer(self._batch.create(name), self._written, name)

    def close(self) -> None:
        self._batch.close()
        self._durable |= self._written

    def abort(self) -> None:
        self._batch.abort()


class _Updater(FileUpdater):
    def __init__(self, file: FileUpdater, durable: set[str], name: str) -> None:
        self._file, self._durable, self._name = file, durable, name

    def write_at(self, start: int, buffers: Sequence[memoryview]) -> None:
        self._file.write_at(start, buffers)

    def close(self) -> None:
        self._file.close()
        self._durable.add(self._name)

    def abort(self) -> None:
        self._file.abort()


class _Reader(FileReader):
    def __init__(self, file: FileReader, root: WatchedStorage) -> None:
        self._file, self._root, self.size = file, root, file.size

    def read_into(self, start: int, buffers: Sequence[memoryview]) -> None:
        self._file.read_into(start, buffers)
        self._root.read += sum(buffer.nbytes for buffer in buffers)

    def close(self) -> None:
        self._file.close()
