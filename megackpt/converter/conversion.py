"""A conversion: open the source, plan, write cells in bounded memory, finish, verify, commit."""

from __future__ import annotations

import logging
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from megackpt import events, limits
from megackpt.backends.base import Backend, plan_for_backend
from megackpt.checkpoint import (
    INDEX,
    Opened,
    SaveSession,
    completed,
    encode_index,
)
from megackpt.checkpoint.transaction import CountedSource
from megackpt.converter.budget import worker_bytes, worker_count
from megackpt.converter.cells import (
    ConversionTask,
    declare_cells,
    split_tasks,
    task_count,
)
from megackpt.converter.conversion_workers import (
    JOURNAL,
    CellSource,
    Journal,
    TaskResult,
    TaskRunner,
    run_tasks,
)
from megackpt.errors import (
    BackendError,
    CorruptCheckpoint,
    RankLost,
    StorageError,
    join_truncated,
)
from megackpt.planning.manifest import Manifest, TensorEntry, TensorParts, inner_keys
from megackpt.planning.save_plan import SavePolicy
from megackpt.storage import SingleObject, digest, is_url, root_at

logger = logging.getLogger("megackpt.converter")

# Part of the save id. Increase it when the same request leads to other bytes or another journal.
_VERSION = 4

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Converted:
    """The result of a conversion. Sizes in bytes of the target's raw data.

    ``source``: the checkpoint that was read. ``resumed``: bytes that an earlier run had written.
    ``overflows``: key -> finite values beyond the range of the dtype that they were cast to.
    """

    source: str
    target: str
    format: str
    tensors: int
    objects: int
    bytes: int
    resumed: int = 0
    overflows: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ConversionOptions:
    """How a conversion runs; see ``convert``. The bytes of the target do not depend on it."""

    verify: bool = True
    verify_target: bool = False
    max_memory: int = limits.CONVERT_MAX_MEMORY
    workers: int | None = None
    progress: Progress | None = None
    resume: bool = True
    timeout: timedelta = timedelta(seconds=limits.RANK_TIMEOUT_SECONDS)

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be at least 1, not {self.workers}")


class Conversion:
    """One conversion. It is planned when it is made; ``run`` carries it out.

    It is a save by virtual ranks: each task writes the items of one rank.
    """

    def __init__(
        self,
        opened: Opened,
        source: str,
        entries: Mapping[int, TensorEntry],
        backend: Backend,
        tasks: int | None,
        options: ConversionOptions | None = None,
        files: Mapping[str, bytes] | None = None,
        in_order: bool = False,
    ) -> None:
        """Plan it.

        Args:
            source: the path of ``opened``, for worker processes.
            entries: tensor number in the source -> name and dtype in the target.
            tasks: the number of tasks (None: by size).
            files: small files to commit together with the checkpoint.
            in_order: the target's storage writes files from front to back.

        Raises BackendError if the format or the memory limit does not allow it.
        """
        self.opened = opened
        self.source = source
        self.backend = backend
        self.options = options or ConversionOptions()
        self.files = files or {}
        stored = opened.manifest
        self.parts = TensorParts(stored)
        self.numbers = {entry.key: number for number, entry in entries.items()}
        self.casts = any(
            stored.tensors[number].meta != entry.meta
            for number, entry in entries.items()
        )
        decoded = opened.backend.decoded_bytes(stored)
        self.worker_bytes = worker_bytes(
            stored,
            [*entries],
            decoded,
            backend.properties.gridded or self.casts,
            self.options.max_memory,
        )
        self.contiguous = backend.properties.whole_tensors
        in_order = backend.properties.export_only or (in_order and self.contiguous)
        rows = declare_cells(stored, entries, decoded, self.contiguous, in_order)
        self.total = int(rows.nbytes.sum())
        count = tasks or task_count(self.total)
        if in_order:
            count = 1
        declared = split_tasks(rows, count)
        self.task_bytes = [int(part.nbytes.sum()) for part in declared]
        self.plans, self.manifest = plan_for_backend(
            backend, declared, SavePolicy(balance=False)
        )
        records = _kept_records(stored, entries, backend)
        self.manifest = replace(self.manifest, subclasses=records)
        reserved = {*backend.layout(count, self.manifest).files, INDEX}
        clash = reserved.intersection(name.partition("/")[0] for name in self.files)
        if clash:
            raise BackendError(
                f"{min(clash)!r} is a file of the format {backend.properties.name}: "
                "choose another name"
            )

    def save_id(self) -> str:
        """Return an id: the same whenever the same source is converted to the same target."""
        stored = self.opened.manifest
        backend = self.backend
        stamps: list[object] = []
        if not len(stored.chunks.digests):
            # Without digests, sizes and times of the files identify the content.
            storage = self.opened.storage
            sizes = storage.sizes(stored.files)
            for name, size in zip(stored.files, sizes, strict=True):
                stamps.append((name, size, storage.modified(name)))
        # Only mapped checkpoints have pieces. They count: two tables may lead to equal chunks.
        pieces = sorted(getattr(self.opened.backend, "pieces", {}).items())
        options = getattr(backend, "__dict__", backend)
        target = (backend.properties.name, backend.properties.version, options)
        files = [(name, digest(data)) for name, data in sorted(self.files.items())]
        described = (_VERSION, self.numbers, stamps, pieces, target, files)
        parts = (
            repr(described).encode(),
            encode_index(stored, {}),
            encode_index(self.manifest, {}),
        )
        return digest(b"".join(map(digest, parts))).hex()

    def run(self, target: str, overwrite: bool, called: str | None = None) -> Converted:
        """Write the target, or resume writing it, and commit it. ``called``: its name in events."""
        with events.operation("convert", called or target) as operation:
            operation.bytes = self.total
            return self._run(target, overwrite, operation)

    def _run(
        self, target: str, overwrite: bool, operation: events.Operation
    ) -> Converted:
        resume = self.options.resume
        who = f"converted from {self.source}"
        session = SaveSession(target, self.options.timeout, who)
        remote = is_url(target)  # conversions to object stores do not resume
        save_id = uuid.uuid4().hex
        done: dict[int, TaskResult] = {}
        try:
            if not remote:
                save_id = session.call("begin", self.save_id)
            operation.id = save_id
            if resume and session.call("begin", completed, target, save_id):
                session.end()
                return self.outcome(target, {}, self.total)
            session.begin(
                save_id,
                overwrite=overwrite,
                resume=resume,
                indexed=self.backend.properties.indexed,
            )
            journal = session.call("begin", self._begin, session, remote)
            done = journal.done
            resumed = sum(self.task_bytes[number] for number in done)
            self._run_tasks(session, save_id, journal, resumed)
            results = [done[number].result for number in range(len(self.plans))]
            manifest = self.manifest.located(results)
            session.commit(self.backend, manifest, reread=self.options.verify_target)
        except BaseException as error:
            # Kept only if the same call may succeed later: after an interruption, on a full disk,
            # without a worker. A damaged source or an unfit format would fail again.
            temporary = not isinstance(error, Exception) or isinstance(
                error, StorageError | RankLost
            )
            keep = bool(resume and done and temporary and not remote)
            session.end(keep)
            if keep:
                logger.warning(
                    "%d of %d parts are written, in %s: the same call (or command) resumes from "
                    "there, and any other save to this path removes them",
                    len(done),
                    len(self.plans),
                    target,
                )
            raise
        session.end()
        return self.outcome(target, done, resumed)

    def _begin(self, session: SaveSession, remote: bool) -> Journal:
        """Name the files of the target, keep an earlier run's files, and write the small ones."""
        begun = session.begun
        begun.announce(
            self.backend.layout(len(self.plans), self.manifest).files, [JOURNAL]
        )
        journal = Journal(None if remote else begun.storage, self.contiguous)
        if begun.resumed:
            done = journal.done.values()
            begun.keep_only({file for task in done for file in task.result.files})
        same = _identical_entries(session.directory, self.files)
        begun.announce(self.files, replaces=same)
        for name, data in self.files.items():
            begun.storage.put(name, data)
        return journal

    @events.stage("write")
    def _run_tasks(
        self, session: SaveSession, save_id: str, journal: Journal, resumed: int
    ) -> None:
        """Do the tasks that are not done yet, in this process or in worker processes."""
        options = self.options
        report = self._reporter(session, resumed)
        left = [n for n in range(len(self.plans)) if n not in journal.done]
        nbytes = sum(self.task_bytes[number] for number in left)
        workers = worker_count(
            options.max_memory, options.workers, len(left), nbytes, self.worker_bytes
        )
        tasks = self._tasks(left)
        runner = TaskRunner(
            self.source,
            self.opened.manifest.save_id,
            self.opened.backend,
            session.directory,
            save_id,
            self.backend,
            options.verify,
            self.casts,
        )

        def perform() -> None:
            if workers > 1:
                run_tasks(
                    runner,
                    workers,
                    tasks,
                    journal.add,
                    report,
                    session.check,
                    options.timeout.total_seconds(),
                )
                return
            runner.open()
            for task in tasks:
                journal.add(runner.perform(task, report))

        session.call("writing", perform)

    def _reporter(self, session: SaveSession, written: int) -> Callable[[int], None]:
        """Return what takes the bytes done, beyond those ``written`` before."""
        lock = threading.Lock()  # a backend writes with several threads
        stage = events.current()
        stage.todo = self.total

        def report(count: int) -> None:
            nonlocal written
            session.alive()
            with lock:
                written += count
                stage.done = written
                if self.options.progress is not None:
                    self.options.progress(written, self.total)

        report(0)
        return report

    def run_to_object(self, root: SingleObject) -> Converted:
        """Write the only file of the target as an object, which appears when it is complete."""
        target = root.location
        opened = self.opened
        who = f"converted from {self.source}"
        session = SaveSession(target, self.options.timeout, who)
        with events.operation("convert", target) as operation:
            operation.bytes = self.total
            [task] = self._tasks([0])
            cells = CellSource(
                opened.storage, opened.backend, task, self.options.verify
            )
            data = CountedSource(cells, self._reporter(session, 0))
            try:
                result = session.call(
                    "writing", self.backend.write, root, task.plan, data
                )
            finally:
                session.end()
        return self.outcome(target, {0: TaskResult(0, result, cells.overflows)}, 0)

    def _tasks(self, numbers: Sequence[int]) -> Iterator[ConversionTask]:
        for number in numbers:
            plan = self.plans[number]
            tensors = [self.numbers[entry.key] for entry in plan.tensors]
            yield ConversionTask(number, plan, self.parts.excerpt(tensors))

    def outcome(
        self, target: str, done: Mapping[int, TaskResult], resumed: int
    ) -> Converted:
        """Return the result."""
        overflows: Counter[str] = Counter()
        for task in done.values():
            overflows.update(task.overflows)
        if overflows:
            text = (
                "%d values are beyond the range of the dtype that they were cast to: %s"
            )
            keys = join_truncated([*overflows], 8, ", ")
            logger.warning(text, overflows.total(), keys)
        tensors = self.manifest.tensors
        objects = sum(entry.meta.is_object for entry in tensors)
        return Converted(
            self.source,
            target,
            self.backend.properties.name,
            len(tensors) - objects,
            objects,
            self.total,
            resumed,
            dict(overflows),
        )


def _kept_records(
    stored: Manifest, entries: Mapping[int, TensorEntry], backend: Backend
) -> tuple[tuple[str, str], ...]:
    """The records of tensors that wrap others, whose parts all stay as they are.

    Raises BackendError where a part would be left without its record.
    """
    numbers = stored.numbers()
    kept = []
    for key, record in stored.subclasses:
        inner = inner_keys([(key, record)])
        found = [numbers[name] for name in inner if name in numbers]
        taken = {entries[number] for number in found if number in entries}
        form = backend.properties
        has_index = form.indexed and not form.export_only
        is_whole = len(found) == len(inner) and has_index
        if is_whole and taken == {stored.tensors[number] for number in found}:
            kept.append((key, record))
        elif taken or not is_whole:
            raise BackendError(
                f"{key!r} wraps {sorted(inner)}: these are converted together, under their names "
                "and with their dtypes, to a format with an index. Or load the checkpoint into "
                "plain tensors, and save these"
            )
    return tuple(kept)


def _identical_entries(target: str, files: Mapping[str, bytes]) -> set[str]:
    """Return the top-level entries of ``files`` that ``target`` has with exactly these bytes."""
    entries = {name.partition("/")[0] for name in files}
    try:
        root = root_at(target)
    except FileNotFoundError:
        return set()
    for name, data in files.items():
        entry, _, inner = name.partition("/")
        try:
            same = root.size(name) == len(data) and root.get(name) == data
            if same and inner:
                same = all(f"{entry}/{other}" in files for other in root.list(entry))
        except CorruptCheckpoint:
            same = False  # a file where a folder is expected
        if not same:
            entries.discard(entry)
    return entries
