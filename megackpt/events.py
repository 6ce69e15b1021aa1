"""Events: the one mechanism behind logs, metrics, callbacks and the progress line.

An operation (a save, load, verification or conversion) consists of stages. Each stage that ends
makes one ``Event`` on each rank; the last event of an operation has the stage "total". It is logged
and passed to every observer: a callback of ``watching``, or the progress line.

The current stage is a context variable, so a stage of a save needs no parameter for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field

logger = logging.getLogger("megackpt.events")

TOTAL = "total"
"""The stage of the last event of an operation."""

_MAX_ERROR_LENGTH = 300


@dataclass(frozen=True, slots=True)
class Event:
    """A stage of an operation has ended on one rank; "total" is the whole operation."""

    operation: str
    """"save", "load", "verify"; on the command line also "diff" and "convert"."""
    stage: str
    """declare, begin, plan, stage, audit, write, commit; open, compare, share, read, exchange;
    total."""
    id: str
    """The id of the save that wrote the checkpoint. Empty if unknown or if there is none."""
    rank: int
    ranks: int
    bytes: int
    """Bytes that this rank wrote, read or compared in this stage; in "total", of all ranks.

    0 after a failure.
    """
    seconds: float
    path: str
    error: str | None = None
    retries: int = 0
    """How often this process repeated calls of the file system meanwhile: see docs/limits.md."""

    def __str__(self) -> str:
        text = f"{self.operation} {self.path}"
        if self.id:
            text += f" ({self.id})"
        text += f": {self.stage}, rank {self.rank} of {self.ranks}: "
        if self.error is not None:
            return f"{text}failed after {self.seconds:.3f} s: {self.error}"
        if not self.bytes:
            return f"{text}{self.seconds:.3f} s"
        rate = format_size(self.bytes / max(self.seconds, 1e-9))
        return f"{text}{format_size(self.bytes)} in {self.seconds:.3f} s, {rate}/s"


@dataclass(eq=False)
class Operation:
    """A save, load, verification or conversion that is running on this rank."""

    name: str
    path: str
    rank: int = 0
    ranks: int = 1
    id: str = ""
    bytes: int = 0
    """Bytes of all ranks; set at the end."""
    problem: str | None = None
    """What the operation found wrong, if it reports that without an exception."""


@dataclass(eq=False)
class Stage:
    """A running stage. Any thread may read it; threads that move data call ``advance``."""

    name: str
    operation: Operation
    todo: int = 0
    done: int = 0
    counts_bytes: bool = False
    """Whether progress is shown. If not, only the final number of bytes has to be set."""
    ended: str = ""
    """Empty while the stage is running, then "done" or "failed"."""
    started_at: float = field(default_factory=time.perf_counter)
    retries_before: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def advance(self, count: int) -> None:
        """Add ``count`` bytes to ``done``."""
        with self._lock:
            self.done += count
            if self.todo:
                self.done = min(self.done, self.todo)


class Observer:
    """Base class of callbacks at the start and the end of stages, on the thread that works.

    An exception that an observer raises is logged once per observer, and has no further effect.
    """

    shows_progress = False
    _failed = False

    def stage_started(self, stage: Stage) -> None:
        """A stage, or an operation (a stage with the name "total"), starts."""

    def stage_ended(self, stage: Stage, event: Event) -> None:
        """The same stage has ended."""


_lock = threading.Lock()
_retries = 0  # of this process: threads that read are in no operation
_observers: tuple[Observer, ...] = ()
_current: ContextVar[Stage] = ContextVar("megackpt_stage")


def count_retry() -> None:
    """A call of the file system is repeated, or a file is looked at again."""
    global _retries  # noqa: PLW0603
    with _lock:
        _retries += 1


def add_observer(observer: Observer) -> None:
    """Call ``observer`` for all stages of this process, until ``remove_observer``."""
    global _observers  # noqa: PLW0603
    with _lock:
        _observers = (*_observers, observer)


def remove_observer(observer: Observer) -> None:
    """Stop calling ``observer``; no effect if it is not registered."""
    global _observers  # noqa: PLW0603
    with _lock:
        _observers = tuple(other for other in _observers if other is not observer)


class Watch(Observer):
    """A registered callback. ``stop``, or the end of the ``with`` block, removes it."""

    def __init__(self, callback: Callable[[Event], None]) -> None:
        self._callback = callback
        add_observer(self)

    def stage_ended(self, stage: Stage, event: Event) -> None:  # noqa: ARG002
        """Call the callback."""
        self._callback(event)

    def stop(self) -> None:
        """Do not call the callback any more."""
        remove_observer(self)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"callback {self._callback!r}"


def watching(callback: Callable[[Event], None]) -> Watch:
    """Call ``callback`` with an ``Event`` at the end of each stage in this process.

    The calls last until ``stop`` of the returned object, or until the end of a ``with`` block.
    The callback runs on the thread that works, which waits for it, so it should return soon.
    Its exceptions are logged once, and have no further effect.
    """
    return Watch(callback)


@contextmanager
def operation(
    name: str, path: object, rank: int = 0, ranks: int = 1
) -> Iterator[Operation]:
    """Run the block as one operation on this thread."""
    whole = start(TOTAL, Operation(name, str(path), rank, ranks))
    with _finishing(whole), use(whole):
        yield whole.operation


@contextmanager
def stage(name: str) -> Iterator[Stage]:
    """Run the block as a stage of the current operation. Also usable as a decorator."""
    started = start(name, current().operation)
    with _finishing(started), use(started):
        yield started


def current() -> Stage:
    """The current stage of this thread. Outside of an operation, one without observers."""
    return _current.get(None) or Stage(TOTAL, Operation("", ""))


def start(name: str, operation: Operation) -> Stage:
    """Start a stage that may run on other threads. The caller has to call ``finish``."""
    started = Stage(name, operation, retries_before=_retries)
    if operation.name:
        started.counts_bytes = any(o.shows_progress for o in _observers)
        for observer in _observers:
            _notify(observer, lambda o: o.stage_started(started))
    return started


@contextmanager
def use(stage: Stage) -> Iterator[None]:
    """Make ``stage`` the current stage of this thread within the block."""
    token = _current.set(stage)
    try:
        yield
    finally:
        _current.reset(token)


def finish(stage: Stage, raised: BaseException | None = None) -> None:
    """End a stage, successfully or with the exception ``raised``. A second call has no effect."""
    if stage.ended:
        return
    running = stage.operation
    error = None
    if raised is not None:
        error = f"{type(raised).__name__}: {format_error(raised)}".rstrip(": ")
    if stage.name == TOTAL:
        stage.done = running.bytes
        error = error or running.problem
    stage.ended = "done" if error is None else "failed"
    retries = _retries - stage.retries_before
    if retries and stage.name == TOTAL and running.name:
        logger.warning(
            "%s %s: the file system refused calls for a moment, or showed files late: "
            "%d repetitions on rank %d",
            running.name,
            running.path,
            retries,
            running.rank,
        )
    # One INFO line for an operation: on rank 0, at its end. All other events are details.
    level = logging.DEBUG
    if stage.name == TOTAL and running.rank == 0:
        level = logging.INFO
    is_logged = logger.isEnabledFor(level)
    if not running.name or not (_observers or is_logged):
        return
    event = Event(
        operation=running.name,
        stage=stage.name,
        id=running.id,
        rank=running.rank,
        ranks=running.ranks,
        bytes=stage.done if error is None else 0,
        seconds=time.perf_counter() - stage.started_at,
        path=running.path,
        error=error and error.partition("\n")[0][:_MAX_ERROR_LENGTH],
        retries=retries,
    )
    if is_logged:
        logger.log(level, "%s", event, extra=asdict(event))
    for observer in _observers:
        _notify(observer, lambda o: o.stage_ended(stage, event))


@contextmanager
def _finishing(stage: Stage) -> Iterator[None]:
    try:
        yield
    except BaseException as raised:
        finish(stage, raised)
        raise
    finish(stage)


def _notify(observer: Observer, call: Callable[[Observer], None]) -> None:
    """An observer that fails must not fail the save that it observes."""
    try:
        call(observer)
    except Exception:
        if not observer._failed:
            observer._failed = True
            logger.exception("%r failed; its further errors are not reported", observer)


def format_error(error: BaseException) -> str:
    """The text of an exception and its notes; ``__str__`` may be user code that fails itself."""
    try:
        return "\n".join([str(error), *map(str, getattr(error, "__notes__", ()))])
    except Exception as failed:  # noqa: BLE001 - the first error is the one to report
        return f"its text cannot be had: {type(failed).__name__}"


def format_size(count: float) -> str:
    """Bytes with a binary unit: 1.5 KiB, 64.0 MiB."""
    if count < 1024:
        return f"{count:.0f} B"
    power = min(5, (int(count).bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {' KMGTP'[power]}iB"
