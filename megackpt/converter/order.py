"""The order of a conversion, and nothing but the order: open, choose, cut, plan, begin, do the tasks, commit."""

from __future__ import annotations

import json
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from megackpt.backends.base import Backend, plan_in_format
from megackpt.checkpoint import INDEX, Opened, Place, begin, commit, encode_index
from megackpt.checkpoint.committing import completed
from megackpt.converter.budget import DEFAULT, worker_bytes, workers_within
from megackpt.converter.crew import run_tasks
from megackpt.converter.cutting import Task, declared, parts_of, shared_out, task_count
from megackpt.converter.journal import JOURNAL, Done, Journal
from megackpt.converter.working import Assignment, Bench
from megackpt.errors import BackendError, CorruptCheckpoint, RankLost, StorageError
from megackpt.planning.manifest import Manifest, SavePlan, TensorEntry, TensorParts
from megackpt.planning.save_plan import SavePolicy
from megackpt.storage import Storage, is_url, root_at

logger = logging.getLogger("megackpt.converter")

_CUTTING = 1  # changes when the same wishes lead to other bytes

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Converted:
    """What a conversion has done. Sizes in bytes of the target's raw data.

    ``resumed``: bytes that an earlier run had written. ``overflows``: key -> finite values beyond the range of the
    dtype that they were cast to.
    """

    target: str
    format: str
    tensors: int
    objects: int
    bytes: int
    resumed: int = 0
    overflows: Mapping[str, int] = field(default_factory=dict)

    def at(self, target: str) -> Converted:
        return replace(self, target=target)


@dataclass(frozen=True)
class Limits:
    """How a conversion runs; what comes out does not depend on it."""

    verify: bool = True
    reread: bool = False
    max_memory: int = DEFAULT
    workers: int | None = None
    progress: Progress = lambda done, total: None  # noqa: ARG005
    resume: bool = True

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be at least 1, not {self.workers}")


class Conversion:
    """One checkpoint on its way into another, planned; ``run`` does it."""

    def __init__(
        self,
        opened: Opened,
        source: str,
        carried: Mapping[int, TensorEntry],
        backend: Backend,
        tasks: int | None,
        limits: Limits,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        self.opened = opened
        self.source = source
        self.backend = backend
        self.limits = limits
        self.beside = beside or {}
        self.parts = TensorParts(opened.manifest)
        self.numbers = {entry.key: number for number, entry in carried.items()}
        taken = self.parts.excerpt([*carried])
        decoded = opened.backend.decoded(taken)
        self.casts = any(
            opened.manifest.tensors[n].meta != entry.meta
            for n, entry in carried.items()
        )
        copying = backend.gridded or self.casts
        self.each = worker_bytes(taken, decoded, copying, limits.max_memory)
        # A format that keeps whole tensors shows it when it is asked for places.
        self.whole = type(backend).layout is not Backend.layout
        rows = declared(
            opened.manifest,
            carried,
            opened.backend.decoded(opened.manifest),
            self.whole,
        )
        self.total = int(rows.nbytes.sum())
        count = 1 if backend.export_only else tasks or task_count(self.total)
        shares = shared_out(rows, count)
        self.bytes = [int(rows.nbytes[own].sum()) for own in shares]
        self.plans: list[SavePlan]
        self.manifest: Manifest
        self.plans, self.manifest = plan_in_format(
            backend, parts_of(rows, shares), SavePolicy(balance=False)
        )
        own = {*backend.files(len(self.plans), self.manifest), backend.last_file, INDEX}
        if clash := sorted(
            own.intersection(name.partition("/")[0] for name in self.beside)
        ):
            raise BackendError(
                f"{clash[0]!r} is a file of the format {backend.name}: nothing else can be called so"
            )

    def save_id(self) -> str:
        """What this conversion is called: the same whenever the same is to be made of the same source."""
        opened, manifest = self.opened, self.opened.manifest
        told: list[object] = [_CUTTING, self.numbers]
        if not len(
            manifest.chunks.digests
        ):  # then nothing else tells one content from another
            sizes = opened.storage.sizes(manifest.files)
            told += [
                (*pair, opened.storage.modified(pair[0]))
                for pair in zip(manifest.files, sizes, strict=True)
            ]
        # A conversion by another table of names is another one, even where the chunks are alike.
        told.append(repr(sorted(getattr(opened.backend, "made_of", {}).items())))
        told += [
            self.backend.name,
            self.backend.version,
            repr(getattr(self.backend, "__dict__", self.backend)),
        ]
        parts = [json.dumps(told).encode(), encode_index(manifest, {})]
        parts += [
            part
            for name, data in sorted(self.beside.items())
            for part in (name.encode(), data)
        ]
        parts += [json.dumps(plan.tensors).encode() for plan in self.plans]
        parts += [
            column.tobytes()
            for p in self.plans
            for column in (p.tensor, p.boxes.offset, p.boxes.shape)
        ]
        digest = blake2b(digest_size=16)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    def run(self, target: str, overwrite: bool) -> Converted:
        """Write the target, or go on with writing it, and commit it."""
        remote = is_url(target)  # there nothing is gone on with
        save_id = uuid.uuid4().hex if remote else self.save_id()
        if self.limits.resume and completed(target, save_id):
            return self.outcome(target, {}, self.total)
        place = begin(
            target, save_id=save_id, overwrite=overwrite, resume=self.limits.resume
        )
        journal = None
        try:
            place.announce(
                self.backend.files(len(self.plans), self.manifest),
                () if remote else [JOURNAL],
            )
            journal = Journal(None if remote else place.storage, reread=self.whole)
            journal.done = {
                n: done for n, done in journal.done.items() if 0 <= n < len(self.plans)
            }
            if place.resumed:
                place.keep_only(journal.files())
            resumed = sum(self.bytes[number] for number in journal.done)
            beside = self.announced(place, target)
            self.work(place, journal, resumed)
            results = [journal.done[number].result for number in range(len(self.plans))]
            for name, data in beside.items():
                place.storage.put(name, data)
            commit(
                place, self.backend, self.manifest.located(results), self.limits.reread
            )
        except BaseException as error:
            self.end(place, journal, error)
            raise
        return self.outcome(target, journal.done, resumed)

    def work(self, place: Place, journal: Journal, resumed: int) -> None:
        """Do all tasks that are not done yet, here or in processes of their own."""
        limits, opened = self.limits, self.opened
        moved = _Moved(limits.progress, resumed, self.total)
        left = [n for n in range(len(self.plans)) if n not in journal.done]
        todo = sum(self.bytes[number] for number in left)
        workers = workers_within(
            limits.max_memory, limits.workers, len(left), todo, self.each
        )
        tasks = self.tasks(left)
        if workers > 1:
            save_id = opened.manifest.save_id
            about = (
                self.source,
                save_id,
                opened.backend,
                place.path,
                self.backend,
                limits.verify,
                self.casts,
            )
            run_tasks(Assignment(*about), workers, tasks, journal.add, moved)
            return
        bench = Bench(
            opened.storage,
            opened.backend,
            place.storage,
            self.backend,
            limits.verify,
            self.casts,
        )
        for task in tasks:
            journal.add(bench.perform(task, moved))

    def announced(self, place: Place, target: str) -> dict[str, bytes]:
        """The files beside that are to be put. What is in the target with the same bytes stays there."""
        standing = self.standing(place.storage)
        new = {
            name: data
            for name, data in self.beside.items()
            if name.partition("/")[0] not in standing
        }
        if new:
            place.announce(new, replaces=self.standing(root_at(target)))
        return new

    def standing(self, root: Storage) -> set[str]:
        """The top-level entries beside that are there already, with nothing else in them."""
        folders: dict[str, set[str]] = {}
        for name in self.beside:
            folders.setdefault(name.partition("/")[0], set()).add(name)

        def alike(entry: str, names: set[str]) -> bool:
            try:
                return all(
                    root.size(n) == len(self.beside[n])
                    and root.get(n) == self.beside[n]
                    for n in names
                ) and (
                    entry in names
                    or {f"{entry}/{inside}" for inside in root.list(entry)} == names
                )
            except CorruptCheckpoint:  # a file in the place of a folder
                return False

        return {entry for entry, names in folders.items() if alike(entry, names)}

    def tasks(self, numbers: list[int]) -> Iterator[Task]:
        for number in numbers:
            plan = self.plans[number]
            yield Task(
                number,
                plan,
                self.parts.excerpt([self.numbers[entry.key] for entry in plan.tensors]),
            )

    def end(self, place: Place, journal: Journal | None, error: BaseException) -> None:
        """Of a run that failed keep what is worth going on with, where the cause may be gone the next time."""
        passing = isinstance(error, StorageError | RankLost) or not isinstance(
            error, Exception
        )
        resumable = self.limits.resume and not is_url(place.path)
        if not (resumable and passing and journal is not None and journal.done):
            place.abort()
            return
        place.abandon()
        logger.warning(
            "%d of %d parts are written, in %s: the same call (or command) goes on from there, and any other save "
            "to this place removes them", len(journal.done), len(self.plans), place.path,
        )  # fmt: skip

    def outcome(self, target: str, done: Mapping[int, Done], resumed: int) -> Converted:
        overflows: Counter[str] = Counter()
        for one in done.values():
            overflows.update(one.overflows)
        told = ", ".join(f"{key!r} {count}" for key, count in overflows.most_common(8))
        if overflows:
            logger.warning(
                "%d values are beyond the range of the dtype that they were cast to: %s%s",
                overflows.total(), told, ", ..." if len(overflows) > 8 else "",
            )  # fmt: skip
        objects = sum(entry.meta.is_object for entry in self.manifest.tensors)
        tensors = len(self.manifest.tensors) - objects
        return Converted(
            target,
            self.backend.name,
            tensors,
            objects,
            self.total,
            resumed,
            dict(overflows),
        )


class _Moved:
    """Tells a caller how far a conversion is."""

    def __init__(self, progress: Progress, done: int, total: int) -> None:
        self._progress, self._done, self._total = progress, done, total
        progress(done, total)

    def __call__(self, count: int) -> None:
        self._done += count
        self._progress(self._done, self._total)
