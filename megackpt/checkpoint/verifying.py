"""Verify a checkpoint: read all its bytes, compare them with digests, report all problems."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megackpt import events, serialization, strategies
from megackpt.backends.base import CONFIG
from megackpt.backends.object_files import COMMON_FILE
from megackpt.backends.torch_dist import extension_keys
from megackpt.checkpoint.chunk_checks import (
    ChunkChecks,
    Count,
    Nowhere,
    ignore_progress,
    shares,
)
from megackpt.checkpoint.opening import (
    Directory,
    Shortfall,
    as_read_by,
    shortfalls,
    stored_manifest,
    unreplaced,
)
from megackpt.checkpoint.ownership import files_of, foreign_entries
from megackpt.checkpoint.tables import small_file_problems
from megackpt.errors import (
    CheckpointingException,
    CorruptCheckpoint,
    UntrustedClass,
)
from megackpt.planning.box import Box, Int64
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import (
    COMMON_KEY,
    Declaration,
    Declarations,
    Manifest,
    ShardId,
)
from megackpt.storage import Storage


@dataclass(frozen=True)
class Report:
    """The problems of a checkpoint, and its sizes. ``str()`` gives the text for users."""

    location: str
    files: int
    tensors: int  # entries: tensors and objects
    bytes: int  # of all chunks
    checked: bool  # all bytes were compared with digests or checksums
    problems: tuple[str, ...]
    foreign: tuple[str, ...] = ()
    """Entries of the directory that do not belong to the checkpoint."""
    unread: tuple[str, ...] = ()
    """Parts that the storage refused to read (no permission, input/output errors), or that this
    installation cannot decode. It is not known whether they are damaged."""
    untrusted: tuple[str, ...] = ()
    """Objects that a load restores only if their classes are trusted, or with an extension of DCP.

    They are not damaged. ``verify`` runs none of their code, so it did not open them."""

    @property
    def ok(self) -> bool:
        """Everything could be read and nothing is damaged.

        A load works, with ``trusted=`` for the objects in ``untrusted``.
        """
        return not self.problems and not self.unread

    def __str__(self) -> str:
        what = f"{self.tensors} tensors and objects, {self.bytes} bytes in {self.files} files"
        unchecked = not self.checked and self.ok
        how = (
            " (it has no digests: sizes were checked, not the content)"
            if unchecked
            else ""
        )
        counts = [
            (len(self.problems), "problems"),
            (len(self.unread), "parts that could not be read"),
        ]
        verdict = (
            ", ".join(f"{count} {name}" for count, name in counts if count)
            or "all good"
        )
        lines = [f"{self.location}: {what}: {verdict}{how}"]
        lines += [f"  {problem}" for problem in self.problems]
        lines += [f"  could not be read: {part}" for part in self.unread]
        lines += [f"  needs trusted=: {one}" for one in self.untrusted]
        if self.foreign:
            lines.append(f"  not part of the checkpoint: {', '.join(self.foreign)}")
        return "\n".join(lines)


def verify(
    directory: Directory,
    threads: int = 2,
    *,
    start: Count = ignore_progress,
    advance: Count = ignore_progress,
) -> Report:
    """Check that a load of all tensors and objects would work.

    Compares all bytes with their digests, in parallel, checks all file sizes, and opens all
    objects, including the common state. A checkpoint without digests is checked by its format's
    own checksums, if it has any (torch_dist: those of its zip records), and encoded chunks are
    decoded. A checkpoint that is replaced meanwhile is checked again.

    Problems of a checkpoint are reported, not raised. So are parts that cannot be read, if the
    checkpoint could be opened.

    Args:
        start: called with the number of bytes to compare with digests.
        advance: called with the number of bytes just compared, from several threads.

    Raises:
        NotACheckpoint: no checkpoint is there.
        CheckpointReplaced: other saves replace the checkpoint at every attempt.
        StorageError: the checkpoint cannot be opened.
        BackendError: the format is unknown or needs a missing package.
    """
    with events.operation("verify", directory) as running:
        report = unreplaced(
            directory,
            lambda storage: _verified(storage, running, threads, start, advance),
            lambda report: report.ok,
        )
        running.bytes = report.bytes
        if report.problems:
            running.problem = f"{len(report.problems)} problems: {report.problems[0]}"
        elif report.unread:
            running.problem = (
                f"{len(report.unread)} parts could not be read: {report.unread[0]}"
            )
        return report


def _verified(
    storage: Storage,
    running: events.Operation,
    threads: int,
    start: Count,
    advance: Count,
) -> Report:
    try:
        with events.stage("open"):
            backend, manifest, small = stored_manifest(storage)
            running.id = manifest.save_id
    except CorruptCheckpoint as error:
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


class _Work(ChunkChecks):
    """Reads, compares and opens all of one checkpoint with several threads."""

    def report(
        self, small: Mapping[str, tuple[int, bytes]], threads: int, start: Count
    ) -> Report:
        """Run all checks. ``small``: the small files that the index names."""
        storage, manifest, chunks = self.storage, self.manifest, self.manifest.chunks
        problems = self.looked(lambda: small_file_problems(storage, small))
        short: list[Shortfall] = []
        problems += self.looked(lambda: short.extend(shortfalls(storage, manifest)))
        problems += [f"{storage.location}/{file}" for file in short]
        problems += _uncovered(manifest)
        total = int(chunks.length.sum())
        checked = len(chunks.digests) > 0 or total == 0
        # Without digests, reading raw bytes proves nothing, but decoding native chunks does.
        rows = np.arange(len(chunks), dtype=np.int64)
        if not checked:
            native: list[list[str] | None] = []
            problems += self.looked(
                lambda: native.append(self.backend.verify_native(storage, manifest))
            )
            checked = native != [None]
            damaged = [problem for found in native for problem in found or []]
            problems += damaged
            self.bad.update(self.rows_named_in(damaged))
            rows = rows[
                (self.backend.decoded_bytes(manifest) > 0)
                & ~np.isin(rows, list(self.bad))
            ]
        start(int(chunks.length[rows].sum()))
        problems += self.run(threads, [file.name for file in short], rows)
        problems += self.open_objects(threads)
        own = {*files_of(manifest, small)}
        if not small and strategies.read_config(storage) is not None:
            own.add(CONFIG)
        foreign = tuple(foreign_entries(storage, own))
        files = len(manifest.files) + len(small)
        return Report(
            storage.called,
            files,
            len(manifest.tensors),
            total,
            checked,
            tuple(dict.fromkeys(problems)),
            foreign,
            tuple(self.unread),
            tuple(sorted(self.untrusted)),
        )

    def looked(self, look: Callable[[], list[str] | None]) -> list[str]:
        """The problems that ``look`` returns, or the one that it raises."""
        try:
            return look() or []
        except (CheckpointingException, OSError) as error:
            return self.problem(error)

    def rows_named_in(self, problems: Sequence[str]) -> set[int]:
        """The chunks whose names begin these problems.

        Their problems are already reported.
        """
        if not problems:
            return set()
        names = {self.name(row): row for row in range(len(self.manifest.chunks))}
        heads = (
            problem[: at.start()]
            for problem in problems
            for at in re.finditer(": ", problem)
        )
        return {names[head] for head in heads if head in names}

    def open_objects(self, threads: int) -> list[str]:
        """Open every object with intact bytes, as a load does."""
        chunks, tensors = self.manifest.chunks, self.manifest.tensors
        is_object = np.array([entry.meta.is_object for entry in tensors], np.bool_)
        rows = np.flatnonzero(is_object[chunks.tensor])
        files = [
            file
            for file, name in enumerate(self.manifest.files)
            if name in self.missing
        ]
        rows = rows[~np.isin(rows, list(self.bad)) & ~np.isin(chunks.file[rows], files)]
        with ThreadPoolExecutor(threads) as pool:
            return [
                problem
                for found in pool.map(self.object_share, shares(rows))
                for problem in found
            ]

    @cached_property
    def extension_keys(self) -> Collection[str]:
        if self.backend.properties.name != "torch_dist":
            return ()
        try:
            return extension_keys(self.storage)
        except (CheckpointingException, FileNotFoundError):
            return ()  # another check reports the damaged table

    def object_share(self, rows: Int64) -> list[str]:
        problems = []
        for row in rows.tolist():
            key = self.manifest.tensors[self.manifest.chunks.tensor[row]].key
            where = f"{self.storage.location}: {self.name(row)}"
            try:
                blobs = Nowhere(0)
                self.backend.read(self.storage, self.plan(row), blobs, False)
                value = serialization.load(b"".join(blobs.blobs), where=where)
                file = self.manifest.files[self.manifest.chunks.file[row]]
                # In a torch_dist .distcp file an object is a list of one, as DCP's planner got it.
                listed = (
                    self.backend.properties.name == "torch_dist" and file != COMMON_FILE
                )
                listed = listed and isinstance(value, list) and len(value) == 1
                if key == COMMON_KEY and not isinstance(
                    value[0] if listed else value, dict
                ):
                    raise CorruptCheckpoint(
                        f"{where} is a {type(value).__name__}, not a dict"
                    )
            except UntrustedClass as error:
                self.untrusted[str(error).split("\n")[0]] = None
            except FileNotFoundError:
                continue  # the check of the sizes has reported it
            except CorruptCheckpoint as error:
                if key in self.extension_keys:
                    needs = (
                        f"{where} went through an extension of DCP's, which has to be "
                        "registered"
                    )
                    self.untrusted[needs] = None
                else:
                    problems += self.problem(error)
            except (CheckpointingException, OSError) as error:
                problems += self.problem(error)
        return problems
