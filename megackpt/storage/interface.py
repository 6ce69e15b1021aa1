"""The few verbs of storage, whatever is behind them: durable writes, ranged reads."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from megackpt import limits
from megackpt.errors import CorruptCheckpoint

_SAFE = re.compile(r"(?!\.\.?(?:/|\Z))[^/\0]+(?:/(?!\.\.?(?:/|\Z))[^/\0]+)*")
"""Parts that are neither empty nor ``.`` nor ``..``, without NUL."""


def unsafe_names(names: Iterable[str]) -> list[str]:
    """Those that could lead out of a root: absolute, with ``.``, ``..``, NUL or empty parts, or no text."""
    return [name for name in names if not _is_safe(name)]


def _is_safe(name: str) -> bool:
    if not name.isascii():
        try:
            os.fsencode(name)
        except UnicodeEncodeError:
            return False
    return _SAFE.fullmatch(name) is not None


def allocate(size: int, where: str) -> bytearray:
    """Memory for what a file is said to hold. CorruptCheckpoint if there is not so much: files may have holes."""
    try:
        return bytearray(size)
    except (MemoryError, OverflowError) as error:
        raise CorruptCheckpoint(
            f"{where} has {size} bytes, more than there is memory for"
        ) from error


def read_dense(reader: FileReader, start: int, length: int, where: str) -> bytearray:
    """Bytes that say something, and so cannot be holes, for the most part: tables, documents, pickles.

    A sparse file costs its author nothing, and may claim more than there is memory for. CorruptCheckpoint if this range
    is larger than ``limits.HOLE_BYTES`` and less than one byte in ``limits.HOLE_RATIO`` of it is stored, before any
    memory is taken; and if there is no memory for it.
    """
    refuse_holes(reader, start, length, where)
    data = allocate(length, where)
    reader.read_into(start, [memoryview(data)])
    return data


def refuse_holes(reader: FileReader, start: int, length: int, where: str) -> None:
    """CorruptCheckpoint where ``read_dense`` would not read this range."""
    needed = -(-(length - limits.HOLE_BYTES) // limits.HOLE_RATIO)
    if needed > 0 and (stored := reader.stored(start, length, needed)) < needed:
        raise CorruptCheckpoint(
            f"{where} claims {length} bytes, and has {stored}: the rest is a hole in the file"
        )


class Durable(ABC):
    """What is being written. Leaving the ``with`` block without error makes it durable."""

    @abstractmethod
    def close(self) -> None:
        """Make what was written durable (fsync). A failure here is a failed save: never retried."""

    @abstractmethod
    def abort(self) -> None:
        """Give up."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close() if error is None else self.abort()


class FileWriter(Durable):
    """One new file, written from front to back; ``abort`` removes it if it can be."""

    @abstractmethod
    def write(self, buffers: Sequence[memoryview]) -> None:
        """Append these bytes, gathered straight from the memory given."""

    @property
    @abstractmethod
    def position(self) -> int:
        """Bytes written so far."""

    def expect(self, size: int) -> None:
        """About so many bytes will come: asked before the first, it lets an object store choose its parts."""


class FileUpdater(Durable):
    """One file of which several writers fill disjoint parts; ``abort`` lets it stay."""

    @abstractmethod
    def write_at(self, start: int, buffers: Sequence[memoryview]) -> None:
        """Put these bytes, one buffer after the other, at ``start`` and on; the file grows as needed."""


class Batch(Durable):
    """Many new files, written one after the other by one thread, and made durable together; ``abort`` lets them stay.

    A file costs more to be waited for than to be written. Here the disk works on many at a time.
    """

    @abstractmethod
    def create(self, name: str) -> FileWriter:
        """As ``Storage.create``, but that what is closed is durable only when the batch is."""


class FileReader(ABC):
    """One existing file, read by ranges, from any number of threads."""

    size: int

    @abstractmethod
    def read_into(self, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, one after the other, with the bytes from ``start`` on.

        Raises CorruptCheckpoint if the file ends before they are full.
        """

    def stored(self, start: int, length: int, enough: int) -> int:  # noqa: ARG002
        """How many bytes of this range are no hole; no more than ``enough`` of them need be counted.

        All of them, unless the storage has sparse files and tells of their holes.
        """
        return length

    def expect(self, spans: Iterable[tuple[int, int]]) -> None:  # noqa: B027  nothing, unless it is of use
        """These bytes (starts and stops) will be read, about in this order, in whatever small pieces: an object store
        fetches them ahead, by few large requests. Where reading costs nothing, nobody looks at them.
        """

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Storage(ABC):
    """The files under one root.

    Names are relative, with ``/`` between parts. A name that could lead out of the root (see unsafe_names)
    is CorruptCheckpoint, for such names come from files. What the storage refuses (no space, no permission,
    input/output errors) is StorageError, naming the file.
    """

    location: str
    """Where the root is, for messages."""

    @property
    def called(self) -> str:
        """What somebody who opened it calls it: the root, or the one file in it that is meant."""
        return self.location

    @abstractmethod
    def create(self, name: str) -> FileWriter:
        """A new file; StorageError if one of that name exists. Parents are made."""

    @abstractmethod
    def batch(self) -> Batch:
        """Many small files to be made durable together."""

    @abstractmethod
    def update(self, name: str) -> FileUpdater:
        """A file to fill at any place, made where it is absent, else as it is.

        StorageError where a storage has no such files (object stores).
        """

    def following(self) -> Storage:
        """The same root, in which a link that ends at a regular file, wherever that is, counts as that file."""
        return self

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a small file durably and atomically, replacing one of that name."""

    def put_new(self, files: Mapping[str, bytes]) -> None:
        """Write many small files, none of which is there yet, all durable when this returns."""
        with self.batch() as batch:
            for name, data in files.items():
                with batch.create(name) as writer:
                    writer.write([memoryview(data)])

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Like ``put``, but False, and nothing done, if there is one already."""

    @abstractmethod
    def open(self, name: str) -> FileReader:
        """Open for ranged reads.

        FileNotFoundError if absent; CorruptCheckpoint if it is no regular file of this root.
        """

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Size in bytes of a regular file, or None if there is none."""

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Of each of these files, what ``size`` tells."""
        return [self.size(name) for name in names]

    @abstractmethod
    def modified(self, name: str) -> float | None:
        """When a regular file was written (seconds since 1970, by the storage's clock), or None if there is none."""

    def is_remote(self) -> bool:
        """Does each reader fetch the bytes over a network? (False: from a disk and a page cache of its machine.)"""
        return True

    def is_current(self) -> bool:
        """Does what this was opened by still lead to the same? Object stores open nothing: True."""
        return True

    @abstractmethod
    def list(self, name: str = "") -> list[str]:
        """Sorted names of the entries of the root, or of this folder in it (none if it is absent)."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; no error if absent."""

    def contents(self, names: Sequence[str]) -> Iterator[bytes]:
        """Of each of these small files, what ``get`` gives."""
        return map(self.get, names)

    def get(self, name: str, limit: int = 1 << 32) -> bytes:
        """The whole of a small file.

        FileNotFoundError if absent, CorruptCheckpoint if it is larger than ``limit`` bytes, or is large and consists
        of holes (see read_dense).
        """
        with self.open(name) as reader:
            if reader.size > limit:
                raise CorruptCheckpoint(
                    f"{self.location}/{name} has {reader.size} bytes: at most {limit} can be right there"
                )
            data = read_dense(reader, 0, reader.size, f"{self.location}/{name}")
            try:
                return bytes(data)
            except MemoryError as error:
                raise CorruptCheckpoint(
                    f"there is no memory for {self.location}/{name}"
                ) from error
