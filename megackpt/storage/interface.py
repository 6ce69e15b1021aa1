"""The interface of all storage: durable writes, ranged reads, digests of bytes."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

import xxhash

from megackpt import limits
from megackpt.errors import CheckpointReplaced, CorruptCheckpoint, StorageError
from megackpt.planning.manifest import DIGEST_BLOCK

T = TypeVar("T")

_STRIDE = 256 << 10
"""Bytes to read before hashing them. Both copies are then still in the inner caches."""
_SMALL = 64 << 10
"""Bytes that take less time to hash than another thread to start."""
_SAFE = re.compile(r"(?!\.\.?(?:/|\Z))[^/\0]+(?:/(?!\.\.?(?:/|\Z))[^/\0]+)*")
"""Parts that are neither empty nor ``.`` nor ``..``, without NUL."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SPOILT = re.compile(r"(?:s3a?|gs|az|azure|abfss?):/[^/]")


def unsafe_names(names: Iterable[str]) -> list[str]:
    """Return the names that could lead out of a root.

    They are absolute, contain NUL, have an empty, ``.`` or ``..`` part, or cannot be encoded.
    """
    return [name for name in names if not is_safe_name(name)]


def is_url(place: str | os.PathLike[str]) -> bool:
    """Return whether this is a URL rather than a path. StorageError for a URL that Path damaged."""
    if _SPOILT.match(str(place)):
        raise StorageError(
            f"{str(place)!r} was a URL, and a Path has made one slash of two: "
            "give it as a str"
        )
    return isinstance(place, str) and _SCHEME.match(place) is not None


def is_safe_name(name: str) -> bool:
    """Return False if ``unsafe_names`` would return the name."""
    if not name.isascii():
        try:
            os.fsencode(name)
        except UnicodeEncodeError:
            return False
    return _SAFE.fullmatch(name) is not None


def allocate(size: int, where: str) -> bytearray:
    """Allocate memory for the size that a file claims.

    Raises CorruptCheckpoint if memory does not suffice: a sparse file can claim any size.
    """
    try:
        return bytearray(size)
    except (MemoryError, OverflowError) as error:
        raise CorruptCheckpoint(
            f"{where} has {size} bytes, more than there is memory for"
        ) from error


def read_dense(reader: FileReader, start: int, length: int, where: str) -> bytearray:
    """Read bytes that should not be sparse: tables, documents, pickles.

    A sparse file costs its author no disk space, and may claim more than fits into memory. Raises
    CorruptCheckpoint, before any allocation, if this range is larger than ``limits.HOLE_BYTES`` and
    less than one byte in ``limits.HOLE_RATIO`` of the excess is stored. Raises it also if memory
    does not suffice.
    """
    refuse_holes(reader, start, length, where)
    data = allocate(length, where)
    reader.read_into(start, [memoryview(data)])
    return data


def refuse_holes(reader: FileReader, start: int, length: int, where: str) -> None:
    """Raise CorruptCheckpoint where ``read_dense`` would refuse this range as a hole."""
    needed = -(-(length - limits.HOLE_BYTES) // limits.HOLE_RATIO)
    if needed > 0 and (stored := reader.stored(start, length, needed)) < needed:
        raise CorruptCheckpoint(
            f"{where} claims {length} bytes, and has {stored}: the rest is a hole in the file"
        )


class Durable(ABC):
    """A write in progress. Leaving the ``with`` block without an error makes it durable."""

    @abstractmethod
    def close(self) -> None:
        """Make the written data durable (fsync). A failure fails the save; it is never retried."""

    @abstractmethod
    def abort(self) -> None:
        """Abandon the write."""

    def expect(self, size: int) -> None:  # noqa: B027  optional
        """Announce about how many bytes will follow. Call it before the first write.

        An object store chooses the size of its parts by it, and a disk whether the file is
        large enough to bypass the page cache.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()


class FileWriter(Durable):
    """A new file, written from front to back. ``abort`` removes it if possible."""

    @abstractmethod
    def write(self, buffers: Sequence[memoryview]) -> None:
        """Append the bytes of these buffers, in order. The caller may then change the buffers."""

    @property
    @abstractmethod
    def position(self) -> int:
        """Bytes written so far."""


class FileUpdater(Durable):
    """A file in which several writers fill disjoint ranges. ``abort`` keeps the file."""

    @abstractmethod
    def write_at(self, start: int, buffers: Sequence[memoryview]) -> None:
        """Write the buffers, in order, from ``start`` on. The file grows as needed."""


class Batch(Durable):
    """Many new files that one thread writes one by one, and that become durable together.

    Waiting for a file costs more than writing it, so a batch waits for many at a time. ``abort``
    keeps the files.
    """

    @abstractmethod
    def create(self, name: str) -> FileWriter:
        """Like ``Storage.create``, but a closed file becomes durable only with the batch."""

    def link(self, source: Storage, name: str, to: str, nbytes: int) -> str:  # noqa: ARG002
        """Make ``to`` another name of a file of another storage, of at least ``nbytes``.

        Nobody may write through a name: ``Storage.update`` refuses such a file. An object store
        makes a copy. Return why the file is not linked; empty if it is.
        """
        return "the storage has no hard links"


class FileReader(ABC):
    """An existing file. Any number of threads may read ranges of it."""

    size: int

    @abstractmethod
    def read_into(self, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, in order, with the bytes from ``start`` on.

        Raises CorruptCheckpoint if the file ends before they are full.
        """

    def stored(self, start: int, length: int, enough: int) -> int:  # noqa: ARG002
        """Count the bytes of this range outside of holes. The count may end at ``enough``.

        Returns ``length`` unless the storage has sparse files and reports their holes.
        """
        return length

    def expect(self, spans: Iterable[tuple[int, int]]) -> None:  # noqa: B027  optional
        """Announce that these ranges (start, stop) will be read, about in this order.

        The reads may be small. An object store fetches the ranges ahead with few large requests.
        Other storage ignores the call, and may leave ``spans`` unread.
        """

    @abstractmethod
    def close(self) -> None: ...

    def refetch(self) -> bool:
        """Drop all bytes that are held. False if a second read cannot give other bytes."""
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Storage(ABC):
    """The files under one root.

    Names are relative, with ``/`` between parts. Files may supply them, so a name that could lead
    out of the root (see unsafe_names) raises CorruptCheckpoint. A refusal by the storage (no space,
    no permission, input/output errors) raises StorageError, which names the file.
    """

    location: str
    """The path or URL of the root, for messages."""

    moved: Callable[[], object] = int
    """Called whenever bytes have reached the disk, and before each read, which it may prevent.

    ``int()`` has no effect. An argument of the constructors, and so is ``direct``.
    """

    direct: bool = False
    """Whether ``create`` makes files that bypass the page cache where that is supported."""

    in_order: bool = False
    """Whether one process writes a file, from front to back. True for object stores."""

    @property
    def called(self) -> str:
        """The name for messages: the root, or the single file that the caller opened in it."""
        return self.location

    @abstractmethod
    def create(self, name: str) -> FileWriter:
        """Create a file, and its parent folders. StorageError if the file exists."""

    @abstractmethod
    def batch(self) -> Batch:
        """Start a batch of small files that become durable together."""

    @abstractmethod
    def update(self, name: str) -> FileUpdater:
        """Open a file for writes at any offset. Create it if it is absent, else keep its content.

        Where files are written ``in_order``, the file is new, and a write raises StorageError
        unless it begins where the last one ended.
        """

    def following(self) -> Storage:
        """Return the same root with final links followed.

        A link that ends at a regular file, inside or outside the root, counts as that file.
        """
        return self

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a small file durably and atomically, replacing one of that name."""

    def put_new(self, files: Mapping[str, bytes]) -> None:
        """Write many small new files. All are durable when this returns."""
        with self.batch() as batch:
            for name, data in files.items():
                with batch.create(name) as writer:
                    writer.write([memoryview(data)])

    @abstractmethod
    def open(self, name: str) -> FileReader:
        """Open for ranged reads.

        Raises FileNotFoundError if the file is absent, and CorruptCheckpoint if it is not a regular
        file of this root.
        """

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return the size in bytes of a regular file, or None if the root has no such file."""

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return ``size`` of each of these files."""
        return [self.size(name) for name in names]

    @abstractmethod
    def modified(self, name: str) -> float | None:
        """Return when a regular file was written, or None if the root has no such file.

        The time is in seconds since 1970, by the storage's clock.
        """

    def is_remote(self) -> bool:
        """Return whether each reader fetches the bytes over a network.

        False: readers use a disk and a page cache of their machine.
        """
        return True

    def refetch(self) -> bool:
        """Return whether a second read may give other bytes: see ``read_again``."""
        return False

    def is_current(self) -> bool:
        """Return whether the path still leads to the opened storage. True for object stores."""
        return True

    @abstractmethod
    def list(self, name: str = "") -> list[str]:
        """Return the sorted names of the entries of a folder ("": the root); empty if absent."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a file, or a folder and its content. An absent one is not an error."""

    def contents(self, names: Sequence[str], limits: Sequence[int]) -> Iterator[bytes]:
        """Yield the content of each of these small files, as ``get`` returns it."""
        return map(self.get, names, limits)

    def get(self, name: str, limit: int = 1 << 32) -> bytes:
        """Return the content of a small file.

        Raises FileNotFoundError if the file is absent. Raises CorruptCheckpoint if it is larger
        than ``limit`` bytes, or large and mostly holes (see read_dense).
        """
        with self.open(name) as reader:
            if reader.size > limit:
                raise CorruptCheckpoint(
                    f"{self.location}/{name} has {reader.size} bytes: at most {limit} are valid"
                )
            data = read_dense(reader, 0, reader.size, f"{self.location}/{name}")
            try:
                return bytes(data)
            except MemoryError as error:
                raise CorruptCheckpoint(
                    f"memory does not suffice for {self.location}/{name}"
                ) from error


def read_again(source: Storage | FileReader, read: Callable[[], T]) -> T:
    """Return ``read()``. If it finds damage in an object of a bucket, call it once more.

    The bytes may have been damaged on their way. A second CorruptCheckpoint is raised.
    """
    try:
        return read()
    except CheckpointReplaced:
        raise
    except CorruptCheckpoint:
        if not source.refetch():
            raise
        return read()


def digest(data: bytes | memoryview) -> bytes:
    """Return the 16 bytes of xxh3-128, in canonical (big-endian) order."""
    if len(data) <= _SMALL:
        return xxhash.xxh3_128_digest(data)
    # The object form releases the GIL.
    return xxhash.xxh3_128(data).digest()


def digest_blocks(view: memoryview) -> bytes:
    """Return the joined digests of the DIGEST_BLOCKs of a C-contiguous view; b"" for no bytes."""
    if not view.nbytes:
        return b""
    flat = view.cast("B")
    blocks = range(0, len(flat), DIGEST_BLOCK)
    return b"".join(digest(flat[start : start + DIGEST_BLOCK]) for start in blocks)


def read_digested(reader: FileReader, start: int, place: memoryview) -> bytes:
    """Fill a flat view with the bytes from ``start`` on; return the joined digests of its blocks.

    Raises as ``read_into``.
    """
    digests = []
    for begin in range(0, len(place), DIGEST_BLOCK):
        block = place[begin : begin + DIGEST_BLOCK]
        hasher = xxhash.xxh3_128()
        for first in range(0, len(block), _STRIDE):
            part = block[first : first + _STRIDE]
            reader.read_into(start + begin + first, [part])
            hasher.update(part)
        digests.append(hasher.digest())
    return b"".join(digests)
