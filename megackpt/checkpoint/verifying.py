"""Verifying: read all that a checkpoint holds, compare it with the digests, and report all problems."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt import events
from megackpt.backends.base import Backend
from megackpt.checkpoint.index import INDEX
from megackpt.checkpoint.opening import (
    Directory,
    as_read_by,
    shortfalls,
    small_file_problems,
    stored_manifest,
    unreplaced,
)
from megackpt.checkpoint.replacing import own_names
from megackpt.errors import CheckpointingException, NotACheckpoint
from megackpt.planning.box import Box, Int64
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    DIGEST_SIZE,
    Declaration,
    Declarations,
    LoadPlan,
    Manifest,
    ShardId,
    TensorParts,
    carried_dtype,
)
from megackpt.runtime.storage import FileReader, Storage, digest_blocks

_READ = 8 * DIGEST_BLOCK  # bytes read at once by one thread
_SHARE = 64  # chunks that one thread takes at a time


@dataclass(frozen=True)
class Report:
    """What was looked at and what is wrong. Printed, it is the answer for people."""

    location: str
    files: int
    tensors: int  # entries: tensors and objects
    bytes: int  # of all chunks
    checked: bool  # all bytes were compared with digests or checksums
    problems: tuple[str, ...]
    foreign: tuple[str, ...] = ()
    """Entries of the directory that do not belong to the checkpoint."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        what = f"{self.tensors} tensors and objects, {self.bytes} bytes in {self.files} files"
        unchecked = not self.checked and self.ok
        how = " (it has no digests: sizes were checked, not the content)" if unchecked else ""
        lines = [
            f"{self.location}: {what}: {'all good' if self.ok else f'{len(self.problems)} problems'}{how}"
        ]
        lines += [f"  {problem}" for problem in self.problems]
        if self.foreign:
            lines.append(f"  not part of the checkpoint: {', '.join(self.foreign)}")
        return "\n".join(lines)


_Told = Callable[[int], None]


def _nobody(_nbytes: int) -> None:
    """Nobody wants to know how far it is."""


def verify(
    directory: Directory,
    threads: int = 2,
    *,
    start: _Told = _nobody,
    advance: _Told = _nobody,
) -> Report:
    """Check all bytes of a checkpoint that has digests, in parallel, and all sizes.

    Checkpoints without digests are checked by the format's own means, where it has any (torch_dist: the
    checksums of its zip records). ``start`` is told how many bytes will be compared with digests, ``advance`` (by
    several threads) how many have been.

    One that is replaced meanwhile is checked anew. Raises NotACheckpoint where there is none, CheckpointReplaced
    where it is replaced again and again; what is wrong with one is reported, not raised.
    """
    with events.operation("verify", directory) as running:
        report = unreplaced(
            directory,
            lambda storage: _verified(storage, running, threads, start, advance),
            lambda report: report.ok,
        )
        running.bytes = report.bytes
        if not report.ok:
            running.problem = f"{len(report.problems)} problems: {report.problems[0]}"
        return report


def _verified(
    storage: Storage, running: events.Operation, threads: int, start: _Told, advance: _Told
) -> Report:
    try:
        with events.stage("open"):
            backend, manifest, small = stored_manifest(storage)
            running.id = manifest.save_id
    except NotACheckpoint:
        raise
    except CheckpointingException as error:
        return Report(storage.called, 0, 0, 0, False, (str(error),))
    with events.stage("read") as reading:

        def moved(count: int) -> None:
            reading.advance(count)
            advance(count)

        work = _Work(as_read_by(backend, storage), backend, manifest, moved)
        reading.todo = int(manifest.chunks.length.sum())
        report = work.report(small, threads, start)
        reading.done = report.bytes
        return report


def damage(storage: Storage, backend: Backend, manifest: Manifest, threads: int = 2) -> list[str]:
    """Read all chunks of a manifest with digests: what is wrong with any of them."""
    return _Work(storage, backend, manifest).run(threads)


def _uncovered(manifest: Manifest) -> list[str]:
    """Holes and overlaps among the stored chunks."""
    whole = [
        Declaration(ShardId(key, Box.whole(meta.shape)), meta, 0, False, 0, 0)
        for key, meta in manifest.tensors
        if not meta.is_object
    ]
    try:
        plan_load(Declarations.of(whole), manifest)
    except CheckpointingException as error:
        return [str(error)]
    return []


class _Work:
    """The chunks of one checkpoint, read and compared with their digests by several threads."""

    def __init__(
        self,
        storage: Storage,
        backend: Backend,
        manifest: Manifest,
        advance: Callable[[int], None] = _nobody,
    ) -> None:
        self.storage = storage
        self.advance = advance
        self.backend = backend
        self.manifest = manifest
        self.bounds = manifest.chunks.block_bounds
        self.parts = TensorParts(manifest)
        self.missing: set[str] = set()  # files that were to be opened

    def report(self, small: Mapping[str, tuple[int, bytes]], threads: int, start: _Told) -> Report:
        """Compare everything that there is to compare; ``small`` are the small files of the index."""
        storage, backend, manifest = self.storage, self.backend, self.manifest
        problems = small_file_problems(storage, small)
        short = shortfalls(storage, manifest)
        problems += [f"{storage.location}/{file}" for file in short]
        problems += _uncovered(manifest)
        total = int(manifest.chunks.length.sum())
        checked = len(manifest.chunks.digests) > 0 or total == 0
        if checked:
            start(total)
            problems += self.run(threads, [file.name for file in short])
        else:
            native = backend.verify_native(storage, manifest)
            checked = native is not None
            problems += native or []
        own = {*own_names(storage), INDEX}
        foreign = tuple(entry for entry in storage.list() if entry not in own)
        files = len(manifest.files) + len(small)
        return Report(storage.called, files, len(manifest.tensors), total, checked, tuple(problems), foreign)

    def run(self, threads: int, told: Collection[str] = ()) -> list[str]:
        """``told``: files of which it is known already that something of them is missing."""
        chunks = self.manifest.chunks
        order = np.lexsort((chunks.start, chunks.file))
        raw = self.backend.raw_chunks(self.manifest)[order]
        with ThreadPoolExecutor(threads) as pool:
            found = [
                pool.map(self.raw_share, _shares(order[raw])),
                pool.map(self.native_share, _shares(order[~raw])),
            ]
            problems = [problem for problems in chain(*found) for problem in problems]
        gone = sorted(self.missing.difference(told))
        return [*(f"{self.storage.location}/{name} is missing" for name in gone), *problems]

    def raw_share(self, rows: Int64) -> list[str]:
        """Chunks whose bytes lie as they are in files."""
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

    def opened(self, number: int, files: ExitStack, problems: list[str]) -> FileReader | None:
        files.close()
        if number < 0:
            return None  # an empty chunk
        name = self.manifest.files[number]
        try:
            return files.enter_context(self.storage.open(name))
        except FileNotFoundError:
            self.missing.add(name)  # to be told once for the file, not for each chunk of it
            return None
        except CheckpointingException as error:
            problems.append(str(error))
            return None

    def bad_blocks(self, row: int, reader: FileReader, buffer: memoryview) -> Iterator[str]:
        """A problem for each block of this chunk that is not what its digest says."""
        chunk = self.manifest.chunk(row, self.bounds)
        start, length = chunk.location.start, chunk.location.length
        for done in range(0, length, _READ):
            part = buffer[: min(_READ, length - done)]
            try:
                reader.read_into(start + done, [part])
            except CheckpointingException as error:
                yield f"{self.name(row)}: {error}"
                return
            self.advance(len(part))
            found = np.frombuffer(digest_blocks(part), np.uint8).reshape(-1, DIGEST_SIZE)
            first = done // DIGEST_BLOCK
            wrong = (found != chunk.digests[first : first + len(found)]).any(axis=1)
            for block in (np.flatnonzero(wrong) + first).tolist():
                at = start + block * DIGEST_BLOCK
                end = min(at + DIGEST_BLOCK, start + length)
                yield (
                    f"{self.name(row)}: block {block} of {len(chunk.digests)} is damaged: "
                    f"{self.storage.location}/{chunk.location.file}, bytes {at} to {end}"
                )

    def native_share(self, rows: Int64) -> list[str]:
        """Chunks that only the format itself can read; it compares the digests as it does in a load."""
        problems = []
        chunks = self.manifest.chunks
        for row in rows.tolist():
            number = int(chunks.tensor[row])
            within = np.flatnonzero(self.parts.rows(number) == row)
            plan = LoadPlan(self.parts.part(number), within, chunks.boxes.take([row]), np.zeros(1, np.int64))
            itemsize = self.manifest.tensors[number].meta.itemsize
            try:
                self.backend.read(self.storage, plan, _Nowhere(itemsize), True)
            except (CheckpointingException, FileNotFoundError) as error:
                problems.append(f"{self.name(row)}: {error}")
            self.advance(int(chunks.length[row]))
        return problems

    def name(self, row: int) -> str:
        chunks = self.manifest.chunks
        key, meta = self.manifest.tensors[chunks.tensor[row]]
        return str(ShardId(key, chunks.boxes.row(row, len(meta.shape))))


def _shares(rows: Int64) -> list[Int64]:
    return [rows[i : i + _SHARE] for i in range(0, len(rows), _SHARE)]


@dataclass(frozen=True)
class _Nowhere:
    """A Target that forgets what it is given."""

    itemsize: int

    def open(self, target: int, box: Box) -> NDArray[Any]:  # noqa: ARG002
        return np.empty(box.shape, carried_dtype(self.itemsize))

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None: ...

    def blob(self, target: int, data: bytes) -> None: ...
