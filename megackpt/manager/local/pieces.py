"""The pieces of local checkpoints in the directory of one host.

A piece is an ordinary checkpoint of one rank's shards. Its directory is complete as soon as it has
its name: ``step_<step>_<save id>/rank_<rank>_of_<size>``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from datetime import timedelta
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from megackpt.checkpoint import INDEX, open_checkpoint, verify
from megackpt.distributed import Group, Stream
from megackpt.errors import CheckpointingException, CorruptCheckpoint, StorageError
from megackpt.storage import Executor, LocalStorage, digest

P = ParamSpec("P")
T = TypeVar("T")

AGENT = ".agent"
"""The folder of the agent that drains the saves of the run on this host."""
READY = "ready"
"""A file in the folder of a save: all ranks have their pieces and copies of it."""

_STEP = re.compile("step_([0-9]+)_([0-9a-f]+)")
_RANK = re.compile("rank_([0-9]+)_of_([0-9]+)")
_LINE = 24  # characters of the id of a line
_PARTIAL = ".partial"
_BUFFER = 4 << 20  # bytes that are read or received at a time


class LocalSave(NamedTuple):
    """A save of all ranks, by which its pieces are sorted: later saves of a step are greater."""

    step: int
    id: str
    """The id of the save's line, and the number of the save in the line."""
    size: int
    """The number of ranks."""

    def counts(self, lines: Mapping[str, int]) -> bool:
        """Whether the save is one of these lines, and not after the last step of it."""
        return self.step <= lines.get(self.id[:_LINE], -1)

    @property
    def is_due(self) -> bool:
        """Whether the save is due in the storage, too, and is drained."""
        return int(self.id[-1], 16) % 2 == 1

    @property
    def folder(self) -> str:
        return f"step_{self.step}_{self.id}"


class Piece(NamedTuple):
    """The shards of one rank in a local save."""

    save: LocalSave
    rank: int

    @property
    def folder(self) -> str:
        """Relative to the folder of the save."""
        return f"rank_{self.rank}_of_{self.save.size}"

    @property
    def name(self) -> str:
        """Relative to the directory of the host."""
        return f"{self.save.folder}/{self.folder}"


class PieceFiles(NamedTuple):
    """The file sizes and the digest that a rank needs to receive a piece."""

    sizes: Mapping[str, int]
    digest: bytes
    """Digest of the index. The index has the digests of the remaining files."""

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())


def _bounded(
    work: Callable[Concatenate[HostPieces, P], T],
) -> Callable[Concatenate[HostPieces, P], T]:
    """Raise StorageError if the host's storage does not answer. For methods of HostPieces."""

    @wraps(work)
    def call(pieces: HostPieces, /, *args: P.args, **kwargs: P.kwargs) -> T:
        name = f"{work.__name__} of local pieces in {pieces.location} on this host"
        with closing(Executor(pieces.timeout)) as executor:
            return executor.call(name, work, pieces, *args, **kwargs)

    return call


class HostPieces:
    """The pieces of one run on this host, whose ranks share them.

    Args:
        path: of the tier.
        root: identifies the directory of the run.
        timeout: how long the storage of the host may not answer in one call.
    """

    def __init__(self, path: str, root: str, timeout: timedelta) -> None:
        self.location = f"{path}/{root}"
        self.timeout = timeout

    def path(self, piece: Piece) -> str:
        return f"{self.location}/{piece.name}"

    @_bounded
    def held(self) -> list[Piece]:
        """All complete pieces, sorted. A folder with another form of name is not a piece.

        Raises StorageError if the host refuses to list them.
        """
        pieces = []
        with suppress(FileNotFoundError, NotADirectoryError):
            storage = LocalStorage(self.location)
            for folder in filter(_STEP.fullmatch, storage.list()):
                with suppress(CorruptCheckpoint):  # not a directory
                    pieces += [_piece(folder, name) for name in storage.list(folder)]
        return sorted(filter(None, pieces))

    @_bounded
    def mark(self, name: str) -> None:
        """Leave a file of this name, which ``clear`` removes."""
        self._made().put(name, b"")

    @_bounded
    def marks(self, prefix: str) -> set[str]:
        """The files that the ranks of this directory have left."""
        names = LocalStorage(self.location).list()
        return {name for name in names if name.startswith(prefix)}

    def clear(self, keep: Iterable[LocalSave]) -> None:
        """Remove everything but these saves, such as unfinished pieces."""

        def remove() -> None:
            storage = self._made()
            for name in _superfluous(storage, keep):
                executor.alive()  # given up, it must not remove a later save
                storage.delete(name)

        with closing(Executor(self.timeout)) as executor:
            executor.call(f"removal of older steps in {self.location}", remove)

    @_bounded
    def put(self, name: str, data: bytes) -> None:
        """Write a small file. ``name``: relative to the directory of the run."""
        LocalStorage(self.location).put(name, data)

    @_bounded
    def free_bytes(self, keep: Iterable[LocalSave]) -> int:
        """The space in the file system as soon as everything but these saves is removed."""
        names = _superfluous(self._made(), keep)
        space = os.statvfs(self.location)
        removed = 0
        for name in names:
            for folder, _, files in os.walk(f"{self.location}/{name}"):
                for file in files:
                    removed += 512 * os.lstat(f"{folder}/{file}").st_blocks
        return space.f_bavail * space.f_frsize + removed

    def _made(self) -> LocalStorage:
        """Make the directory of the run, and return it.

        Raises CorruptCheckpoint if it is a link, which may lead to files of other users.
        """
        above, name = os.path.split(self.location)
        tier = LocalStorage(above, create=True)
        tier.make_folder(name)
        return tier.folder(name)

    @_bounded
    def describe(self, piece: Piece) -> PieceFiles:
        """The files of a piece that are sent."""
        storage = LocalStorage(self.path(piece))
        sizes = {name: storage.size(name) or 0 for name in storage.list()}
        return PieceFiles(sizes, digest(storage.get(INDEX)))

    def outgoing(self, piece: Piece, files: PieceFiles) -> Stream:
        """The bytes of a piece."""

        def read() -> Iterator[memoryview]:
            storage = LocalStorage(self.path(piece))
            buffer = memoryview(bytearray(_BUFFER))
            for name, size in files.sizes.items():
                with storage.open(name) as reader:
                    for start in range(0, size, _BUFFER):
                        part = buffer[: min(_BUFFER, size - start)]
                        reader.read_into(start, [part])
                        yield part

        return Stream(files.nbytes, read())

    def incoming(self, piece: Piece, files: PieceFiles) -> Stream:
        """Receives a piece, which ``accept`` completes."""

        def write() -> Iterator[memoryview]:
            storage = LocalStorage(self.location, create=True)
            storage.delete(piece.name + _PARTIAL)
            buffer = memoryview(bytearray(_BUFFER))
            for name, size in files.sizes.items():
                with storage.create(f"{piece.name}{_PARTIAL}/{name}") as writer:
                    for start in range(0, size, _BUFFER):
                        part = buffer[: min(_BUFFER, size - start)]
                        yield part
                        writer.write([part])

        return Stream(files.nbytes, write())

    def accept(self, piece: Piece, files: PieceFiles) -> None:
        """Complete a piece that was received.

        Raises CorruptCheckpoint if it is not as it was, StorageError if it cannot be read.
        """
        storage = LocalStorage(self.location)
        partial = piece.name + _PARTIAL
        if digest(storage.get(f"{partial}/{INDEX}")) != files.digest:
            raise CorruptCheckpoint(
                f"{self.location}/{partial}: {INDEX} was changed on its way from another host"
            )
        if problem := find_problem(f"{self.location}/{partial}", self.timeout):
            raise type(problem)(
                f"{self.location}/{partial}, received from another host: {problem}"
            )
        storage.delete(piece.name)
        storage.rename(partial, piece.name)


def transfer(
    group: Group,
    pieces: HostPieces,
    sent: Mapping[int, Piece],
    received: Mapping[int, Piece],
) -> None:
    """Send pieces to other ranks, and complete the received pieces. Collective.

    Args:
        sent: the piece for each receiving rank.
        received: the piece from each sending rank.
    """

    def describe() -> dict[int, PieceFiles]:
        return {to: pieces.describe(piece) for to, piece in sent.items()}

    described = group.reduce_broadcast("describe local pieces", describe, list)
    files = {source: described[source][group.rank] for source in received}

    def streams() -> tuple[dict[int, Stream], dict[int, Stream]]:
        own = described[group.rank]
        out = {to: pieces.outgoing(piece, own[to]) for to, piece in sent.items()}
        into = {
            source: pieces.incoming(piece, files[source])
            for source, piece in received.items()
        }
        return out, into

    def accept() -> None:
        for source, piece in received.items():
            pieces.accept(piece, files[source])

    group.exchange("local pieces", streams)
    group.reduce_broadcast("check local pieces", accept, len)


def find_problem(
    path: str, timeout: timedelta | None, finite: bool = False
) -> StorageError | CorruptCheckpoint | None:
    """Read all of the piece at a path, and return the error that describes its damage.

    StorageError: the host refuses to read the piece now, and it may be whole. ``finite``: NaN or
    infinite values that the save of the piece has noted count as damage as well.
    """
    try:
        report = verify(path, whole=False, timeout=timeout)
        problems = list(report.problems)
        if report.unread and not problems:
            return StorageError("; ".join(report.unread[:3]))
        if finite:
            problems += filter(None, [open_checkpoint(path).manifest.nonfinite()])
    except StorageError as error:
        return error
    except (CheckpointingException, FileNotFoundError) as error:
        problems = [str(error)]
    return CorruptCheckpoint("; ".join(problems[:3])) if problems else None


def parse_save(folder: str, size: int = 0) -> LocalSave | None:
    """The save whose folder has this name; None for other names."""
    found = _STEP.fullmatch(folder)
    if found is None:
        return None
    save = LocalSave(int(found[1]), found[2], size)
    return save if save.folder == folder else None


def _piece(folder: str, name: str) -> Piece | None:
    """The piece at this place; None for other names."""
    rank = _RANK.fullmatch(name)
    save = parse_save(folder, int(rank[2])) if rank else None
    if save and rank:
        piece = Piece(save, int(rank[1]))
        if piece.rank < piece.save.size and piece.folder == name:
            return piece
    return None


def _superfluous(storage: LocalStorage, keep: Iterable[LocalSave]) -> list[str]:
    """The entries that are none of these saves."""
    kept = {AGENT, *(save.folder for save in keep)}
    return [name for name in storage.list() if name not in kept]
