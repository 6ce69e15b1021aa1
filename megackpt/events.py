"""What operations tell of themselves while they run: events at the end of stages, and how far a stage is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Protocol

logger = logging.getLogger("megackpt.events")

TOTAL = "total"
"""The stage of the last event of an operation."""

_LONGEST = 300  # characters of an error


@dataclass(frozen=True, slots=True)
class Event:
    """A stage of an operation has ended on one rank; or all of the operation, where the stage is "total"."""

    operation: str
    """"save", "load" or "verify"."""
    stage: str
    """declare, begin, plan, write, commit; open, compare, share, read, exchange; total."""
    id: str
    """Of the save that made the checkpoint; "" where this rank does not know it (yet), or there is none."""
    rank: int
    ranks: int
    bytes: int
    """What this rank has written, read or compared in this stage; in "total", all ranks together. 0 after a failure."""
    seconds: float
    path: str
    error: str | None = None

    def __str__(self) -> str:
        known = f" ({self.id})" if self.id else ""
        told = f"{self.operation} {self.path}{known}: {self.stage}, rank {self.rank} of {self.ranks}: "
        if self.error is not None:
            return f"{told}failed after {self.seconds:.3f} s: {self.error}"
        if not self.bytes:
            return f"{told}{self.seconds:.3f} s"
        rate = self.bytes / max(self.seconds, 1e-9)
        return f"{told}{size(self.bytes)} in {self.seconds:.3f} s, {size(rate)}/s"


@dataclass(eq=False)
class Stage:
    """A stage that goes on: whoever moves bytes in it says so here. A viewer may look at it from any thread."""

    name: str
    operation: Operation
    todo: int = 0
    done: int = 0
    viewers: tuple[Viewer, ...] = ()
    """Who looks while it goes on. If nobody does, only the outcome has to be told."""
    ended: str = ""
    """"done" or "failed", once it has ended."""
    began: float = field(default_factory=time.perf_counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def advance(self, count: int) -> None:
        """So many bytes more are done. From any thread."""
        with self._lock:
            self.done += count


@dataclass(eq=False)
class Operation:
    """A save, load or verification that goes on, on this rank."""

    name: str
    path: str
    rank: int = 0
    ranks: int = 1
    id: str = ""
    bytes: int = 0
    """Of all ranks together, told by the order of the operation at its end."""
    problem: str | None = None
    """What it found to be wrong, where that is no exception."""


Callback = Callable[[Event], None]


class Viewer(Protocol):
    """Who looks at stages (and operations: stages of the name "total") while they go on."""

    def began(self, stage: Stage) -> None: ...
    def ended(self, stage: Stage) -> None: ...


_lock = threading.Lock()
_watches: tuple[Watch, ...] = ()
_viewers: tuple[Viewer, ...] = ()
_current: ContextVar[Stage] = ContextVar("megackpt_stage")


class Watch:
    """A callback that is told of events until ``stop`` is called, or the ``with`` block ends."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback
        self._failed = False

    def tell(self, event: Event) -> None:
        try:
            self._callback(event)
        except Exception:
            if not self._failed:
                self._failed = True
                logger.exception(
                    "the callback %r failed, at %s; its further errors are not told",
                    self._callback,
                    event,
                )

    def stop(self) -> None:
        global _watches  # noqa: PLW0603 - one list for the process, replaced as a whole
        with _lock:
            _watches = tuple(watch for watch in _watches if watch is not self)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def watching(callback: Callback) -> Watch:
    """Call ``callback`` with an Event at the end of each stage of all that this process saves, loads or verifies.

    From now on, and until the ``stop`` of what this returns; or for the time of a ``with`` block. It is called on the
    thread that works, which waits for it: hand over and return. What it raises is logged, once, and changes nothing.
    """
    global _watches  # noqa: PLW0603
    watch = Watch(callback)
    with _lock:
        _watches = (*_watches, watch)
    return watch


@contextmanager
def viewing(viewer: Viewer) -> Iterator[None]:
    """Let ``viewer`` look at all stages that begin within; it is called on the threads that work."""
    global _viewers  # noqa: PLW0603
    with _lock:
        _viewers = (*_viewers, viewer)
    try:
        yield
    finally:
        with _lock:
            _viewers = tuple(other for other in _viewers if other is not viewer)


@contextmanager
def operation(
    name: str, path: object, rank: int = 0, ranks: int = 1
) -> Iterator[Operation]:
    """All that this thread does within belongs to one operation."""
    whole = begun(TOTAL, Operation(name, str(path), rank, ranks))
    with _ending(whole), within(whole):
        yield whole.operation


@contextmanager
def stage(name: str) -> Iterator[Stage]:
    """One stage of the operation of this thread. Also a decorator: of the function that is the stage."""
    step = begun(name, here().operation)
    with _ending(step), within(step):
        yield step


def here() -> Stage:
    """The stage of this thread; outside any, one that nobody hears of."""
    return _current.get(None) or Stage(TOTAL, Operation("", ""))


def begun(name: str, operation: Operation) -> Stage:
    """A stage that may go on on other threads, and for a while on none; whoever began it calls ``over``."""
    step = Stage(name, operation, viewers=_viewers if operation.name else ())
    for viewer in step.viewers:
        _safely(viewer.began, step)
    return step


@contextmanager
def within(step: Stage) -> Iterator[None]:
    """What this thread does within belongs to this stage."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def over(step: Stage, raised: BaseException | None = None) -> None:
    """The stage has ended, here or with what was raised; only the first such word counts."""
    if step.ended:
        return
    whole = step.name == TOTAL
    error = (
        None
        if raised is None
        else f"{type(raised).__name__}: {told(raised)}".rstrip(": ")
    )
    if whole:
        step.done = step.operation.bytes
        error = error or step.operation.problem
    step.ended = "done" if error is None else "failed"
    for viewer in step.viewers:
        _safely(viewer.ended, step)
    _tell(step, time.perf_counter() - step.began, error)


def told(error: BaseException) -> str:
    """The text of an exception, and of its notes: code of anybody's, which may fail itself."""
    try:
        return "\n".join([str(error), *map(str, getattr(error, "__notes__", ()))])
    except Exception as failed:  # noqa: BLE001 - what is told is the first one
        return f"its text cannot be had: {type(failed).__name__}"


@contextmanager
def _ending(step: Stage) -> Iterator[None]:
    try:
        yield
    except BaseException as raised:
        over(step, raised)
        raise
    over(step)


def _tell(step: Stage, seconds: float, error: str | None) -> None:
    running = step.operation
    # One INFO line for an operation; what its stages and the other ranks did is for whoever asks.
    level = logging.INFO if step.name == TOTAL and running.rank == 0 else logging.DEBUG
    logged = logger.isEnabledFor(level)
    if not running.name or not (_watches or logged):
        return
    short = None if error is None else error.partition("\n")[0][:_LONGEST]
    event = Event(
        operation=running.name,
        stage=step.name,
        id=running.id,
        rank=running.rank,
        ranks=running.ranks,
        bytes=step.done if error is None else 0,
        seconds=seconds,
        path=running.path,
        error=short,
    )
    if logged:
        logger.log(level, "%s", event, extra=asdict(event))
    for watch in _watches:
        watch.tell(event)


def _safely(view: Callable[[Stage], None], step: Stage) -> None:
    """What cannot be drawn stops no save."""
    try:
        view(step)
    except Exception:
        logger.exception("the progress of %s cannot be shown", step.operation.name)


def size(count: float) -> str:
    """Bytes as people read them: 1.5 KiB, 64.0 MiB."""
    if count < 1024:
        return f"{count:.0f} B"
    power = min(5, (int(count).bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {' KMGTP'[power]}iB"
