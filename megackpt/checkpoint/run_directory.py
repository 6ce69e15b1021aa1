"""The steps in the directory of a run: their names, whether they are complete, the latest one.

The names follow the common trainers. Only names, sizes and each format's sign of completeness are
examined; the data is not read.
"""

from __future__ import annotations

import json
import logging
import operator
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from megackpt import strategies
from megackpt.backends.base import CONFIG
from megackpt.checkpoint.index import INDEX, decode_index
from megackpt.checkpoint.marker import PREFIX
from megackpt.checkpoint.opening import (
    Directory,
    absolute,
    as_read_by,
    find_storage,
    shared_bytes,
    shortfalls,
)
from megackpt.checkpoint.ownership import find_format
from megackpt.checkpoint.records import RECORD
from megackpt.errors import (
    CheckpointingException,
    CorruptCheckpoint,
    NotACheckpoint,
    StorageError,
    join_truncated,
)
from megackpt.events import format_size
from megackpt.storage import BucketStorage, LocalStorage, Storage, is_url, root_at

logger = logging.getLogger("megackpt.manager")

_THREADS = 8  # that examine steps: network file systems have a high latency
_MAX_TRACKER_BYTES = 4096
_MOST_STEPS = 10  # that a message lists
_MOST_EXAMINED = 100
"""Entries without a complete step that are examined: each lists the directory of the run."""
_OWN = frozenset((INDEX, CONFIG, RECORD, ".metadata"))
"""Files of a checkpoint."""


class Naming(NamedTuple):
    """How a kind of trainer names the directory of a step."""

    style: str
    pattern: re.Pattern[str]
    template: str = ""
    """The name that a manager gives; empty if it does not write this style."""

    def name(self, step: int) -> str:
        """The name for a step."""
        return self.template.format(step)


NamingStyle = Literal["megatron", "deepspeed", "torchtitan", "transformers", "plain"]
"""The styles in which a manager names steps."""
NAMINGS = (
    # Megatron's converters write "release", from which a run starts: it counts as step 0.
    Naming("megatron", re.compile(r"iter_(\d+)|release"), "iter_{:07d}"),
    # Also verl.
    Naming("deepspeed", re.compile(r"global_step_?(\d+)"), "global_step{}"),
    Naming("torchtitan", re.compile(r"step[-_](\d+)"), "step-{}"),
    Naming(
        "transformers", re.compile(r"(?:tmp-)?checkpoint[-_](\d+)"), "checkpoint-{}"
    ),
    Naming("composer", re.compile(r"ep\d+-ba(\d+)(?:[-.].*)?")),
    # Also NeMo and BioNeMo.
    Naming("lightning", re.compile(r"(?:.*[-_. ])?step=(\d+)(?!\d).*")),
    Naming("orbax", re.compile(r"(\d+)\.orbax-checkpoint-tmp.*")),
    # A chain of weights: megackpt.deltas.
    Naming("versions", re.compile(r"version_(\d{6,})")),
    Naming("plain", re.compile(r"(\d+)"), "{}"),
)

METRICS = "megackpt_metrics.json"
"""Step -> name -> metric, of the complete steps. Earlier versions: step -> metric."""
_MAX_METRICS_BYTES = 1 << 26
TRACKERS = ("latest_checkpointed_iteration.txt", "latest")
"""Files that name the latest step: by number (Megatron, verl) or by directory (DeepSpeed)."""
_TRACKER_LINK = re.compile("latest|last")
_UNFINISHED = "-unfinished"
"""The mark of Lightning and NeMo: a file next to the step."""
_INNER = re.compile(r"weights|pytorch_model_fsdp_\d+")
"""Directories of a step in which NeMo and transformers put the checkpoint."""
_SIBLING = re.compile(r"\.(.+)\.megackpt-[^./]+(?:\.[^./]+)?")
"""Directories of saves. If a save died while it replaced a checkpoint, one may hold the old one."""
_UNSUPPORTED = ((re.compile(r"mp_rank_.*"), "Megatron's own files of each rank"),)
"""Entries of formats that megackpt does not read."""


@dataclass(frozen=True)
class Step:
    """One checkpoint of a run."""

    name: str
    """Relative to the directory of the run."""
    style: str
    """The style of the name; empty if it is of no known style."""
    step: int | None
    complete: bool | None
    """None if the format is not supported."""
    reason: str
    """Why it is not complete."""
    format: str = ""
    version: int | None = 0
    """None if only reading the table of contents would tell."""
    bytes: int = 0
    shared: int = 0
    """Bytes of the files that other checkpoints have, too: see ``Strategy.reuse_unchanged``."""
    files: int = 0
    saved: float = 0.0
    """When its newest file was written, in seconds since 1970."""
    read_only: bool = False
    """Whether another library has written it, in a format that megackpt only reads."""
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    """The ``metrics`` given to the manager's ``save``, and its ``metric`` by this name."""
    seconds: float | None = None
    """How long the save took up to its commit; None if the checkpoint does not record it."""

    def __repr__(self) -> str:
        state = self.reason or "complete"
        metrics = [f", {name} {value:g}" for name, value in self.metrics.items()]
        return (
            f"<Step {self.name}: {state}, {format_size(self.bytes)}{''.join(metrics)}>"
        )


class Restored(NamedTuple):
    """A loaded step.

    ``state`` is what ``megackpt.load`` returns: with a strictness of RETURN_* a tuple of three.
    ``skipped`` has the newer steps that are incomplete or damaged, each with its ``reason``.
    ``source`` says whether it was loaded from the run's directory or from a ``LocalTier``.
    """

    step: int
    state: Any
    skipped: tuple[Step, ...]
    source: Literal["storage", "local"] = "storage"

    def __repr__(self) -> str:
        # Without the values of the state, which would fill the screen.
        skipped = len(self.skipped)
        return (
            f"<Restored: step {self.step} from {self.source}, {skipped} newer skipped>"
        )


@dataclass(frozen=True)
class SaveStatus:
    """What ``save_if_due`` has done; the same on all ranks."""

    saved: bool
    """Whether the step was saved, or an asynchronous save of it has begun."""
    should_stop: bool
    """Whether a signal has announced the end of a rank. All saves are complete then."""


@dataclass(frozen=True)
class Tracker:
    """A file or link that names the latest step."""

    name: str
    says: str
    step: str
    """The name of the step that it means; empty if there is none."""
    problem: str
    """Why it is wrong; empty if it is correct."""

    @property
    def number(self) -> int | None:
        """The number of the step that it names."""
        return parse_name(self.says)[1]


@dataclass(frozen=True)
class Run:
    """The content of a directory. ``itself`` is set if the directory is a checkpoint."""

    location: str
    itself: Step | None
    steps: tuple[Step, ...]
    trackers: tuple[Tracker, ...]

    @property
    def latest(self) -> Step | None:
        """The complete checkpoint of the highest step."""
        for step in reversed(self.steps):
            if step.complete and step.step is not None:
                return step
        return None


def list_run(directory: Directory, has_sizes: bool = True) -> Run:
    """Examine all steps of a run (or a single checkpoint), in a directory or below a URL.

    ``has_sizes``: a step with a file that is missing or cut off is not complete.

    Raises NotACheckpoint if the directory does not exist; an empty one is not an error.
    """
    location = absolute(directory)
    try:
        run = RunDirectory(location, has_sizes)
    except FileNotFoundError as error:
        name = os.fspath(directory)
        raise NotACheckpoint(f"directory {name} does not exist") from error
    except NotADirectoryError:
        return Run(location, _examine_itself(location), (), ())
    if is_url(location) and not run.entries:
        raise NotACheckpoint(f"{location} does not exist: no object is there")
    if is_url(location) and RECORD in run.entries:
        # Everything below belongs to the checkpoint.
        return Run(location, _examine_itself(location), (), ())
    with ThreadPoolExecutor(_THREADS, "megackpt-list") as pool:
        found = pool.map(run.examine, run.names())
        steps = [step for steps in found for step in steps]
    metrics = {}
    try:
        metrics = read_metrics(run.storage)
    except StorageError as error:
        logger.warning("%s", error)
    steps = [
        replace(s, metrics=metrics.get(-1 if s.step is None else s.step, {}))
        for s in steps
    ]
    steps.sort(key=lambda s: (s.step is None, s.step or 0, s.name))
    trackers = [_judge(tracker, steps) for tracker in run.trackers]
    return Run(location, _examine_itself(location), tuple(steps), tuple(trackers))


def latest_step(
    directory: Directory, problem: NotACheckpoint, moved: Callable[[], object] = int
) -> str:
    """The latest complete step of the run in a directory that is not a checkpoint itself.

    Calls ``moved`` after each step that is not. Raises ``problem`` if no step is there,
    NotACheckpoint with the steps if none is complete.
    """
    location = absolute(directory)
    try:
        run = RunDirectory(location, has_sizes=True)
    except (CheckpointingException, OSError):
        raise problem from None
    # Parts of a failed save: a folder in them is not a step.
    if any(e in _OWN or e.startswith(PREFIX) for e in run.entries):
        raise problem
    names = [n for names in run.names_by_step().values() for n in reversed(names)]
    names += sorted(run.names().difference(names))
    others: list[str] = []
    for name in names[:_MOST_EXAMINED]:
        for step in run.examine(name):
            if step.complete and step.step is not None:
                logger.warning(
                    "%s is the directory of a run: its latest complete step, %s, is read (newer, "
                    "but not complete: %s)",
                    directory,
                    step.name,
                    join_truncated(others, _MOST_STEPS) or "none",
                )
                return f"{location}/{step.name}"
            others.append(f"{step.name} ({step.reason or 'complete'})")
        moved()
    if not others:
        raise problem
    raise NotACheckpoint(
        f"{problem}; it contains {join_truncated(others, _MOST_STEPS)}: is one meant?"
    ) from problem


class RunDirectory:
    """The names in the directory of a run; a step is examined when it is asked for."""

    def __init__(self, location: str, has_sizes: bool = False) -> None:
        """``has_sizes``: a step with a file that is missing or cut off is not complete.

        Raises FileNotFoundError or NotADirectoryError.
        """
        self.storage = root_at(location)
        self._has_sizes = has_sizes
        # Trackers first: the step that one names may be removed as soon as there is a newer one.
        self.trackers = list(_read_trackers(self.storage))
        self.entries = frozenset(self.storage.list())

    def replaced_names(self) -> set[str]:
        """Names next to which saves have left directories; the names themselves may be missing."""
        matches = map(_SIBLING.fullmatch, self.entries)
        return {match[1] for match in matches if match}

    def names(self) -> set[str]:
        """All names that may be steps."""
        return self.replaced_names().union(self.entries)

    def names_by_step(self) -> dict[int, list[str]]:
        """The names of each step, the highest first; none if only a tracker names the step."""
        found: dict[int, list[str]] = {}
        for tracker in self.trackers:
            if tracker.number is not None:
                found[tracker.number] = []
        for name in sorted(self.names()):
            number = parse_name(name)[1]
            if number is not None:
                found.setdefault(number, []).append(name)
        return dict(sorted(found.items(), reverse=True))

    def examine(self, name: str) -> list[Step]:
        """The step of this name, or the checkpoints in its directory. Empty for other entries."""
        style, number = parse_name(name)
        kind = stat.S_IFDIR
        # A missing name belonged to a directory that a save has replaced.
        if name in self.entries:
            kind = _kind_of(self.storage, name)
        if kind in (stat.S_IFLNK, stat.S_IFREG):
            is_candidate = number is not None and not name.endswith(_UNFINISHED)
        else:
            is_candidate = kind == stat.S_IFDIR and not name.startswith(".")
        if not is_candidate:
            return []
        path = f"{self.storage.location}/{name}"
        step, storage = _examine(path, Step(name, style, number, True, ""))
        if kind == stat.S_IFLNK and not step.complete:
            # The file system that it leads to may be unmounted.
            step = replace(step, complete=None, reason=f"a link to: {step.reason}")
        if name + _UNFINISHED in self.entries:
            reason = f"{name}{_UNFINISHED} exists"
            step = replace(step, complete=False, reason=reason)
        elif not step.complete:
            if number is None:
                return []
            inner = []
            if kind == stat.S_IFDIR and storage is not None:
                inner = self._examine_inner(name, style, number, storage.list())
            if inner:
                return inner
        return [_with_sizes(step, storage, self._has_sizes)]

    def _examine_inner(
        self, name: str, style: str, number: int, entries: Sequence[str]
    ) -> list[Step]:
        found: list[Step] = []
        # A directory that megackpt has written in part, or removed in part, holds no complete step.
        if any(entry.startswith(PREFIX) for entry in entries):
            return found
        for entry in filter(_INNER.fullmatch, entries):
            inner = f"{name}/{entry}"
            if _kind_of(self.storage, inner) == stat.S_IFDIR:
                path = f"{self.storage.location}/{inner}"
                step, storage = _examine(path, Step(inner, style, number, True, ""))
                if step.complete:
                    found.append(_with_sizes(step, storage, self._has_sizes))
        return found


def read_metrics(root: Storage) -> dict[int, dict[str, float]]:
    """The metrics of a run's steps. Raises StorageError if the file cannot be read."""
    metrics: dict[int, dict[str, float]] = {}
    if root.size(METRICS) is None:
        return metrics
    try:
        found = json.loads(root.get(METRICS, _MAX_METRICS_BYTES))
        for step, given in found.items():
            named = given if isinstance(given, dict) else {"metric": given}
            metrics[int(step)] = {name: float(value) for name, value in named.items()}
    except (ValueError, TypeError, AttributeError) as error:
        path = f"{root.location}/{METRICS}"
        raise StorageError(
            f"{path} holds no metrics of steps: {error}; move it away"
        ) from error
    return metrics


def naming_of(style: str) -> Naming:
    """The naming of a manager. Raises ValueError for a style that it does not write."""
    known = {naming.style: naming for naming in NAMINGS if naming.template}
    if style not in known:
        raise ValueError(
            f"naming is one of {', '.join(map(repr, known))}, not {style!r}"
        )
    return known[style]


def step_number(step: int) -> int:
    """The step as an int. Raises ValueError if it is negative, TypeError if it is not a number."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"step={step!r:.60} is not a step: give an int, step=int(...)")
    number = int(operator.index(step))
    if number < 0:
        raise ValueError(f"step={number}: a step is 0 or more")
    return number


def parse_name(name: str) -> tuple[str, int | None]:
    """The style of a name, and the number of its step."""
    for naming in NAMINGS:
        if match := naming.pattern.fullmatch(name):
            return naming.style, int(match[1] or 0)
    return "", None


def _kind_of(root: Storage, name: str) -> int:
    """S_IFDIR, S_IFREG, S_IFLNK ...; 0 if the entry is gone."""
    if not isinstance(root, LocalStorage):
        if root.size(name) is None:
            return stat.S_IFDIR
        return stat.S_IFREG
    status = root.stat(name)
    if status:
        return stat.S_IFMT(status.st_mode)
    return 0


def _examine_itself(location: str) -> Step | None:
    step, storage = _examine(location, Step(".", "", None, True, ""))
    if step.complete:
        return _with_sizes(step, storage, compares=True)
    return None


def _examine(path: str, step: Step) -> tuple[Step, Storage | None]:
    """The step with its format and completeness, and where its files are."""
    storage = None
    try:
        storage = find_storage(path)
        backend = find_format(storage)
        config = strategies.read_config(storage)
    except FileNotFoundError:
        return replace(step, complete=False, reason="it was removed meanwhile"), None
    except NotACheckpoint as error:
        return _examine_incomplete(path, replace(step, complete=False), str(error))
    except CheckpointingException as error:
        return replace(step, complete=None, reason=str(error)), storage
    name = backend.properties.name
    version: int | None = None
    if len(backend.properties.reads) == 1:
        version = backend.properties.version
    if config is not None and config.sharded_backend == name:
        version = config.sharded_backend_version
    read_only = backend.properties.read_only
    step = replace(step, format=name, version=version, read_only=read_only)
    return step, as_read_by(backend, storage)


def _examine_incomplete(
    path: str, step: Step, reason: str
) -> tuple[Step, Storage | None]:
    storage = None
    is_complete: bool | None = False
    try:
        storage = root_at(path)
        entries = storage.list()
    except (CheckpointingException, OSError):
        entries = []
    if any(entry.endswith(".distcp") for entry in entries):
        reason = "data files without a table of contents: the save is running, or died"
    for pattern, description in _UNSUPPORTED:
        if any(map(pattern.fullmatch, entries)):
            reason = f"{description}, which megackpt does not read"
            is_complete = None
    return replace(step, complete=is_complete, reason=reason), storage


def _with_sizes(step: Step, storage: Storage | None, compares: bool) -> Step:
    """The step with the bytes, number and newest time of its files.

    The index of a complete step has these values: zarr has two files or more for each tensor.
    ``compares`` asks the storage for the sizes as well.
    """
    files: list[tuple[int, float]] = []
    try:
        if step.complete and storage is not None and storage.size(INDEX) is not None:
            with suppress(CorruptCheckpoint, FileNotFoundError):
                data = storage.get(INDEX)
                manifest, small = decode_index(data)
                total = int(manifest.chunks.length.sum()) + len(data)
                total += sum(size for size, _ in small.values())
                count = len(manifest.files) + len(small) + 1
                saved = storage.modified(INDEX) or 0.0
                seconds = manifest.milliseconds / 1000 or None
                step = replace(
                    step, bytes=total, files=count, saved=saved, seconds=seconds
                )
                if compares:
                    step = replace(step, shared=shared_bytes(storage, manifest))
                short = compares and shortfalls(storage, manifest)
                if short:
                    step = replace(step, complete=False, reason=str(short[0]))
                return step
        if isinstance(storage, BucketStorage):
            files = list(storage.objects().values())
        elif isinstance(storage, LocalStorage):
            files = list(_local_files(storage, ""))
    except CheckpointingException as error:
        return replace(step, complete=None, reason=str(error))
    total = sum(size for size, _ in files)
    newest = max((time for _, time in files), default=0.0)
    return replace(step, bytes=total, files=len(files), saved=newest)


def _local_files(storage: LocalStorage, folder: str) -> Iterator[tuple[int, float]]:
    """Size and time of each file. Links to directories are not followed."""
    unfollowed = storage.folder("")
    for entry in storage.list(folder):
        name = entry
        if folder:
            name = f"{folder}/{entry}"
        status = unfollowed.stat(name)
        if status is not None and stat.S_ISDIR(status.st_mode):
            yield from _local_files(storage, name)
        elif status is not None:
            yield storage.size(name) or 0, status.st_mtime


def _read_trackers(root: Storage) -> Iterator[Tracker]:
    for name in root.list():
        if _kind_of(root, name) == stat.S_IFLNK and _TRACKER_LINK.match(name):
            target = os.readlink(f"{root.location}/{name}")
            yield Tracker(name, os.path.normpath(target), "", "")
        elif name in TRACKERS and root.size(name) is not None:
            try:
                data = root.get(name, _MAX_TRACKER_BYTES)
            except CheckpointingException as error:
                yield Tracker(name, "", "", str(error))
            else:
                yield Tracker(name, data.decode("utf-8", "replace").strip(), "", "")


def _judge(tracker: Tracker, steps: Sequence[Step]) -> Tracker:
    """Compare the step that a tracker names with the steps that exist."""
    if tracker.problem:
        return tracker
    for step in steps:
        has_number = step.step is not None and step.step == tracker.number
        if has_number or step.name.split("/")[0] == tracker.says:
            break
    else:
        return replace(tracker, problem="there is no such step")
    newer = [s for s in steps if s.complete and (s.step or 0) > (step.step or 0)]
    problem = ""
    if step.complete is False:
        problem = f"{step.name} is not complete"
    elif newer and step.step is not None:
        problem = f"{newer[-1].name} is newer, and complete"
    return replace(tracker, step=step.name, problem=problem)
