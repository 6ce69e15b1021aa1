"""Finding: which steps a directory holds, which of them are complete, and which one is the latest.

The names are those that the field's trainers give: Megatron, torchtitan, transformers, Lightning, NeMo, DeepSpeed,
composer, orbax, plain numbers. Nothing but names, sizes and the formats' own signs of completeness is looked at.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

from megackpt import strategies
from megackpt.checkpoint import absolute, as_read_by, find_storage
from megackpt.checkpoint.index import INDEX
from megackpt.checkpoint.marker import PREFIX
from megackpt.checkpoint.ownership import find_format
from megackpt.checkpoint.records import RECORD
from megackpt.errors import CheckpointingException, NotACheckpoint
from megackpt.storage import (
    BucketStorage,
    LocalStorage,
    Storage,
    is_url,
    root_at,
)

_THREADS = 8  # steps that are looked at together: network file systems answer slowly
_LONGEST = 4096  # bytes of a tracker file


class Naming(NamedTuple):
    """How trainers of one kind name the checkpoint of a step; ``written``: and how we do, where we can."""

    style: str
    pattern: re.Pattern[str]
    written: str = ""

    def name(self, step: int) -> str:
        return self.written.format(step)


NAMINGS = tuple(
    Naming(style, re.compile(pattern), written)
    for style, pattern, written in (
        ("megatron", r"iter_(\d+)", "iter_{:07d}"),
        ("deepspeed", r"global_step_?(\d+)", "global_step{}"),  # verl, too
        ("torchtitan", r"step[-_](\d+)", "step-{}"),
        ("transformers", r"(?:tmp-)?checkpoint[-_](\d+)", "checkpoint-{}"),
        ("composer", r"ep\d+-ba(\d+)(?:[-.].*)?", ""),
        ("lightning", r"(?:.*[-_. ])?step=(\d+)(?!\d).*", ""),  # NeMo, too
        ("orbax", r"(\d+)\.orbax-checkpoint-tmp.*", ""),
        ("plain", r"(\d+)", "{}"),
    )
)
_INNER = re.compile(r"weights|pytorch_model_fsdp_\d+")
"""Where NeMo and transformers put the checkpoint in the directory of a step. Any other one there is something else."""
_SIBLING = re.compile(r"\.(.+)\.megackpt-[^./]+(?:\.old)?")
"""What a save that replaces a checkpoint puts beside it; where it died, the checkpoint itself may be in there."""
_LATEST = re.compile("latest|last")
TRACKERS = ("latest_checkpointed_iteration.txt", "latest")
"""Files that name the latest step: by its number (Megatron, verl), or by its directory (DeepSpeed)."""
_RELEASE = "release"
"""The directory that Megatron's converters write, and name in the tracker; a run begins from it, at step 0."""

_STRANGERS = (
    (re.compile(r"mp_rank_.*"), "DeepSpeed's or Megatron's own files of each rank"),
    (re.compile(r"zero_pp_rank_.*"), "DeepSpeed's own files of each rank"),
    (re.compile(r"_CHECKPOINT_METADATA|manifest\.ocdbt|default"), "orbax's own layout"),
)
"""Entries of formats that are not read here."""


@dataclass(frozen=True)
class Step:
    """One checkpoint of a run. ``complete`` is None where it is of a format that is not read here."""

    name: str  # relative to the run's directory
    style: str  # of the name; empty where it is in none of the known styles
    step: int | None
    complete: bool | None
    reason: str  # why not; empty if complete
    format: str = ""
    version: int = 0
    bytes: int = (
        0  # of all files; where these were not looked at, 0 like the two that follow
    )
    files: int = 0
    saved: float = 0.0  # when its newest file was written (seconds since 1970)


@dataclass(frozen=True)
class Tracker:
    """A file, or a link, that names the latest step. ``problem`` says what is not true about it, if anything."""

    name: str
    says: str
    step: str  # name of the step that is meant; empty where there is none
    problem: str

    @property
    def number(self) -> int | None:
        return 0 if self.says == _RELEASE else number_in(self.says)


@dataclass(frozen=True)
class Run:
    """What a directory holds: steps in order, and what its trackers say. ``itself``: it is a checkpoint, too."""

    location: str
    itself: Step | None
    steps: tuple[Step, ...]
    trackers: tuple[Tracker, ...]

    @property
    def latest(self) -> Step | None:
        """The complete checkpoint of the highest step."""
        return next(
            (s for s in reversed(self.steps) if s.complete and s.step is not None), None
        )


@dataclass(frozen=True)
class Names:
    """What a run's directory shows while nothing in it is opened but the trackers."""

    root: Storage
    entries: frozenset[str]
    trackers: tuple[Tracker, ...]  # judged as if there were no step

    @classmethod
    def of(cls, location: str) -> Names:
        """Raises FileNotFoundError or NotADirectoryError where there is no directory."""
        root = root_at(location)
        # Trackers first: what they name may be removed once there is a newer one.
        trackers = tuple(_trackers(root, root.list(), ()))
        return cls(root, frozenset(root.list()), trackers)

    def replaced(self) -> set[str]:
        """The names beside which saves that would replace them have left something; some may be away."""
        return {
            match[1] for entry in self.entries if (match := _SIBLING.fullmatch(entry))
        }

    def numbers(self) -> dict[int, list[str]]:
        """The names of each step, the highest first; none where only a tracker tells of it."""
        told = {tracker.says: tracker.number for tracker in self.trackers}
        found: dict[int, list[str]] = {
            number: [] for number in told.values() if number is not None
        }
        for name in sorted(self.entries | self.replaced()):
            if (number := told.get(name, number_in(name))) is not None:
                found.setdefault(number, []).append(name)
        return dict(sorted(found.items(), reverse=True))

    def steps(self, names: Iterable[str], weigh: bool = False) -> list[Step]:
        """What is found under these names, when they are looked at."""
        return [
            step
            for name in names
            for step in _step(self.root, self.entries, weigh, name)
        ]


def list_run(directory: str | os.PathLike[str], *, weigh: bool = True) -> Run:
    """Look at a run's directory (or at a single checkpoint), or at what is below a URL.

    Without ``weigh`` nobody looks at the files of the steps, for their bytes, number and time.
    Raises NotACheckpoint where there is no such directory; one that holds nothing is no error.
    """
    location = absolute(directory)
    try:
        names = Names.of(location)
    except FileNotFoundError as error:
        raise NotACheckpoint(
            f"directory {os.fspath(directory)} does not exist"
        ) from error
    except NotADirectoryError:
        return Run(location, _itself(location), (), ())
    if is_url(location) and not names.entries:
        raise NotACheckpoint(f"{location} does not exist: no object is there")
    if is_url(location) and RECORD in names.entries:
        return Run(location, _itself(location), (), ())  # what is below belongs to it
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(
            lambda name: names.steps([name], weigh), names.entries | names.replaced()
        )
        steps = [step for several in found for step in several]
    steps.sort(key=lambda s: (s.step is None, s.step or 0, s.name))
    trackers = tuple(_trackers(names.root, sorted(names.entries), steps))
    return Run(location, _itself(location), tuple(steps), trackers)


def _itself(location: str) -> Step | None:
    step, storage = _looked_at(location, Step(".", "", None, True, ""))
    return _weighed(step, storage) if step.complete else None


def was_complete(directory: str, step: Step) -> bool:
    """Does what is there of an incomplete step show that it once was complete? What a dead save leaves is marked."""
    try:
        entries = root_at(f"{directory.rstrip('/')}/{step.name}").list()
    except (NotADirectoryError, FileNotFoundError):
        return False
    marked = any(entry.startswith(PREFIX) for entry in entries)
    return not marked and any(
        entry == INDEX or entry.endswith(".distcp") for entry in entries
    )


def number_in(name: str) -> int | None:
    """The step that a name tells, in whatever style."""
    return next((int(m[1]) for n in NAMINGS if (m := n.pattern.fullmatch(name))), None)


def _kind(root: Storage, name: str) -> int:
    """What an entry is: stat's S_IFDIR, S_IFREG, S_IFLNK and others; 0 if it is gone."""
    if not isinstance(root, LocalStorage):
        return stat.S_IFDIR if root.size(name) is None else stat.S_IFREG
    status = root.stat(name)
    return stat.S_IFMT(status.st_mode) if status else 0


def _step(root: Storage, entries: frozenset[str], weigh: bool, name: str) -> list[Step]:
    """The step that an entry is, or those that are in it; none for what is something else."""
    # The name of what a replacement has set aside is away, and was a directory.
    kind = _kind(root, name) if name in entries else stat.S_IFDIR
    if name.startswith(".") or kind not in (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK):
        return []
    match = next(((n, m) for n in NAMINGS if (m := n.pattern.fullmatch(name))), None)
    if kind == stat.S_IFLNK and (match is None or _LATEST.match(name)):
        return []
    style, number = (match[0].style, int(match[1][1])) if match else ("", None)
    if kind == stat.S_IFREG and (
        match is None or name in TRACKERS or name.endswith("-unfinished")
    ):
        return []
    found, storage = _looked_at(
        f"{root.location}/{name}", Step(name, style, number, True, "")
    )
    if name not in entries and found.complete is False:
        return []
    if kind == stat.S_IFLNK and not found.complete:
        # A disk that is away?
        found = replace(
            found, complete=None, reason=f"a link; behind it: {found.reason}"
        )
    if f"{name}-unfinished" in entries:
        found = replace(
            found, complete=False, reason=f"{name}-unfinished stands beside it"
        )
    elif not found.complete and not found.format:
        # Of what we have not written to its end, or half removed, no part is a checkpoint by itself.
        marked = storage is None or any(
            entry.startswith(PREFIX) for entry in storage.list()
        )
        look_inside = kind == stat.S_IFDIR and not marked
        inner = list(_inside(root, name, style, number, weigh)) if look_inside else []
        if inner or match is None:
            return inner
    return [_weighed(found, storage) if weigh else found]


def _inside(
    root: Storage, name: str, style: str, number: int | None, weigh: bool
) -> Iterator[Step]:
    """Complete checkpoints one level below an entry: "weights" (NeMo), "pytorch_model_fsdp_0" (transformers)."""
    if number is None:
        return
    for below in filter(_INNER.fullmatch, root.list(name)):
        if _kind(root, f"{name}/{below}") == stat.S_IFDIR:
            path, below = f"{root.location}/{name}/{below}", f"{name}/{below}"
            found, storage = _looked_at(path, Step(below, style, number, True, ""))
            if found.complete:
                yield _weighed(found, storage) if weigh else found


def _looked_at(path: str, step: Step) -> tuple[Step, Storage | None]:
    """The step with what is known of it but for its weight, and where its files are."""
    storage = None
    try:
        storage = find_storage(path)
        config = strategies.read_config(storage)
        if config is not None:
            step = replace(
                step,
                format=config.sharded_backend,
                version=config.sharded_backend_version,
            )
        backend = find_format(storage)
    except FileNotFoundError:
        return replace(
            step, complete=False, reason="it was removed at this very moment"
        ), None
    except CheckpointingException as error:
        known = False if isinstance(error, NotACheckpoint) else None
        step = replace(step, complete=known, reason=_short(error, path))
        return (step, storage) if known is None else _incomplete(path, step)
    if (config.sharded_backend if config else "") != backend.properties.name:
        step = replace(
            step, format=backend.properties.name, version=backend.properties.version
        )
    return step, as_read_by(backend, storage)


def _incomplete(path: str, step: Step) -> tuple[Step, Storage | None]:
    """What is known of something that is no checkpoint for us."""
    try:
        storage = root_at(path)
        entries = storage.list()
    except (CheckpointingException, OSError):
        return step, None
    if "no known format" not in step.reason:
        return step, storage
    stranger = next(
        (what for name, what in _STRANGERS if any(map(name.fullmatch, entries))), ""
    )
    if stranger:
        step = replace(
            step, complete=None, reason=f"{stranger}, which megackpt does not read"
        )
    elif any(entry.endswith(".distcp") for entry in entries):
        step = replace(
            step,
            reason="data files without their table of contents: the save goes on, or died",
        )
    return step, storage


def _short(error: object, path: str) -> str:
    """A reason without the path, which stands beside it."""
    place = path if is_url(path) else os.path.realpath(path)
    return re.sub(
        rf"^{re.escape(place)}(?: is not a distributed checkpoint)?: ", "", str(error)
    )


def _weighed(step: Step, storage: Storage | None) -> Step:
    """The step with the bytes, the number and the newest time of all its files."""
    weights: list[tuple[int, float]] = []
    try:
        if isinstance(storage, BucketStorage):
            weights = list(storage.objects().values())
        elif isinstance(storage, LocalStorage):
            weights = list(_files(storage))
    except CheckpointingException as error:
        return replace(step, complete=None, reason=str(error))
    newest = max((moment for _, moment in weights), default=0.0)
    return replace(
        step, bytes=sum(size for size, _ in weights), files=len(weights), saved=newest
    )


def _files(storage: LocalStorage) -> Iterator[tuple[int, float]]:
    """The size and the time of each file, and of what else is no folder. Links are not descended into."""
    itself = storage.folder("")  # in which links are links
    folders = [""]
    while folders:
        folder = folders.pop()
        for entry in storage.list(folder):
            name = f"{folder}/{entry}" if folder else entry
            status = itself.stat(name)
            if status is not None and stat.S_ISDIR(status.st_mode):
                folders.append(name)
            elif status is not None:
                yield storage.size(name) or 0, status.st_mtime


def _trackers(
    root: Storage, entries: Sequence[str], steps: Sequence[Step]
) -> Iterator[Tracker]:
    for name in entries:
        if isinstance(root, LocalStorage) and _kind(root, name) == stat.S_IFLNK:
            target = os.path.normpath(os.readlink(f"{root.location}/{name}"))
            if _LATEST.match(name):
                yield _judged(name, target, steps)
        elif name in TRACKERS and root.size(name) is not None:
            try:
                said = root.get(name, _LONGEST).decode("utf-8", "replace").strip()
            except CheckpointingException as error:
                yield Tracker(name, "", "", str(error))
                continue
            yield _judged(name, said, steps)


def _judged(name: str, said: str, steps: Sequence[Step]) -> Tracker:
    number = int(said) if said.isdecimal() and len(said) < 20 else None
    meant = [
        s
        for s in steps
        if s.name.split("/")[0] == said or (number is not None and s.step == number)
    ]
    if not meant:
        return Tracker(name, said, "", "there is no such step")
    step = meant[0]
    newer = [s for s in steps if s.complete and (s.step or 0) > (step.step or 0)]
    problem = ""
    if step.complete is False:
        problem = f"{step.name} is not complete"
    elif newer and step.step is not None:
        problem = f"{newer[-1].name} is newer, and complete"
    return Tracker(name, said, step.name, problem)
