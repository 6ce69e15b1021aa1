"""Read the chunks of a checkpoint and compare them with their digests.

Damaged chunks and chunks that the storage refuses to read are reported apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.backends.base import Backend
from megackpt.errors import BackendError, CheckpointingException, StorageError
from megackpt.planning.box import Box, Int64
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    DIGEST_SIZE,
    Chunk,
    LoadPlan,
    Manifest,
    ShardId,
    TensorParts,
    carried_dtype,
)
from megackpt.storage import FileReader, Storage, digest_blocks

_READ = 8 * DIGEST_BLOCK  # bytes that one thread reads at once
_SHARE = 64  # chunks that one thread takes at a time

Count = Callable[[int], None]


def ignore_progress(_nbytes: int) -> None:
    """The default ``Count``: ignores the progress."""


def damage(
    storage: Storage, backend: Backend, manifest: Manifest, threads: int = 2
) -> list[str]:
    """Compare all chunks of a manifest with their digests. Returns the problems.

    Raises StorageError if the storage refuses to read some chunks and all others are intact.
    """
    work = ChunkChecks(storage, backend, manifest)
    problems = work.run(threads)
    if work.unread and not problems:
        raise StorageError("; ".join(work.unread))
    return problems


class ChunkChecks:
    """The chunks of one checkpoint, read and compared with their digests by several threads."""

    def __init__(
        self,
        storage: Storage,
        backend: Backend,
        manifest: Manifest,
        advance: Count = ignore_progress,
    ) -> None:
        self.storage = storage
        self.advance = advance
        self.backend = backend
        self.manifest = manifest
        self.parts = TensorParts(manifest)
        self.missing: set[str] = set()  # files that do not exist
        self.bad: set[int] = set()  # rows of chunks with problems
        self.unread: dict[str, None] = {}  # error messages, each once
        self.untrusted: dict[str, None] = {}

    def problem(self, error: Exception, what: str = "") -> list[str]:
        """The message of an error that shows damage.

        An error of the storage or of the backend shows none: its message goes to ``unread``.
        """
        text = f"{what}: {error}" if what else str(error)
        refused = isinstance(error, OSError) and not isinstance(
            error, FileNotFoundError
        )
        if refused or isinstance(error, (StorageError, BackendError)):
            self.unread[text] = None
            return []
        return [text]

    def run(
        self, threads: int, reported: Collection[str] = (), rows: Int64 | None = None
    ) -> list[str]:
        """Compare these rows (by default all) with their digests. Returns the problems.

        ``reported``: files that the caller has already reported as missing or truncated.
        """
        chunks = self.manifest.chunks
        order = np.lexsort((chunks.start, chunks.file))
        if rows is not None:
            order = order[np.isin(order, rows)]
        raw = self.backend.decoded_bytes(self.manifest)[order] == 0
        with ThreadPoolExecutor(threads) as pool:
            found = [
                pool.map(self.raw_share, shares(order[raw])),
                pool.map(self.native_share, shares(order[~raw])),
            ]
            problems = [problem for problems in chain(*found) for problem in problems]
        gone = sorted(self.missing.difference(reported))
        return [
            *(f"{self.storage.location}/{name} is missing" for name in gone),
            *problems,
        ]

    def plan(self, row: int) -> LoadPlan:
        """The plan that reads one chunk."""
        chunks = self.manifest.chunks
        number = int(chunks.tensor[row])
        within = np.flatnonzero(self.parts.rows(number) == row)
        return LoadPlan(
            self.parts.excerpt([number]),
            within,
            chunks.boxes.take([row]),
            np.zeros(1, np.int64),
        )

    def raw_share(self, rows: Int64) -> list[str]:
        """Check chunks whose files hold their bytes unencoded."""
        buffer = memoryview(bytearray(_READ))
        problems: list[str] = []
        number = -1
        with ExitStack() as files:
            reader: FileReader | None = None
            for row in rows.tolist():
                if int(self.manifest.chunks.file[row]) != number:
                    number = int(self.manifest.chunks.file[row])
                    reader = self.opened(number, files, problems)
                if reader is not None:
                    problems += self.bad_blocks(row, reader, buffer)
        return problems

    def opened(
        self, number: int, files: ExitStack, problems: list[str]
    ) -> FileReader | None:
        files.close()
        if number < 0:
            return None  # an empty chunk
        name = self.manifest.files[number]
        try:
            return files.enter_context(self.storage.open(name))
        except FileNotFoundError:
            # Reported once for the file, not for each of its chunks.
            self.missing.add(name)
            return None
        except (CheckpointingException, OSError) as error:
            problems += self.problem(error)
            return None

    def bad_blocks(
        self, row: int, reader: FileReader, buffer: memoryview
    ) -> Iterator[str]:
        """A problem for each block of this chunk that does not match its digest."""
        chunk = self.manifest.chunk(row)
        start, length = chunk.location.start, chunk.location.length
        for done in range(0, length, _READ):
            part = buffer[: min(_READ, length - done)]
            first = done // DIGEST_BLOCK
            try:
                reader.read_into(start + done, [part])
                wrong = self.wrong_blocks(chunk, first, part)
                if wrong.any() and reader.refetch():
                    reader.read_into(start + done, [part])
                    wrong = self.wrong_blocks(chunk, first, part)
            except (CheckpointingException, OSError) as error:
                self.bad.add(row)
                yield from self.problem(error, self.name(row))
                return
            self.advance(len(part))
            self.bad |= {row} if wrong.any() else set()
            for block in (np.flatnonzero(wrong) + first).tolist():
                at = start + block * DIGEST_BLOCK
                end = min(at + DIGEST_BLOCK, start + length)
                yield (
                    f"{self.name(row)}: block {block} of {len(chunk.digests)} is damaged: "
                    f"{self.storage.location}/{chunk.location.file}, bytes {at} to {end}"
                )

    def wrong_blocks(self, chunk: Chunk, first: int, part: memoryview) -> Any:
        """For each block of ``part``, from the block ``first`` on: has it another digest?"""
        found = np.frombuffer(digest_blocks(part), np.uint8).reshape(-1, DIGEST_SIZE)
        return (found != chunk.digests[first : first + len(found)]).any(axis=1)

    def native_share(self, rows: Int64) -> list[str]:
        """Check chunks that only the backend can read. It compares digests as in a load."""
        problems = []
        chunks = self.manifest.chunks
        for row in rows.tolist():
            itemsize = self.manifest.tensors[chunks.tensor[row]].meta.itemsize
            try:
                self.backend.read(self.storage, self.plan(row), Nowhere(itemsize), True)
            except (CheckpointingException, OSError) as error:
                self.bad.add(row)
                problems += self.problem(error, self.name(row))
            self.advance(int(chunks.length[row]))
        return problems

    def name(self, row: int) -> str:
        chunks = self.manifest.chunks
        key, meta = self.manifest.tensors[chunks.tensor[row]]
        return str(ShardId(key, chunks.boxes.row(row, len(meta.shape))))


def shares(rows: Int64) -> list[Int64]:
    return [rows[i : i + _SHARE] for i in range(0, len(rows), _SHARE)]


@dataclass(frozen=True)
class Nowhere:
    """A Target that discards tensors and keeps blobs."""

    itemsize: int
    blobs: list[bytes] = field(default_factory=list)

    def open(self, target: int, box: Box) -> NDArray[Any]:  # noqa: ARG002
        return np.empty(box.shape, carried_dtype(self.itemsize))

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None: ...

    def blob(self, target: int, data: bytes) -> None:  # noqa: ARG002
        self.blobs.append(data)
