"""Bounded calls to a storage: their thread, their deadline, their progress and cancellation."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar, cast

from megackpt import limits
from megackpt.errors import CheckpointingException, StorageError
from megackpt.waiting import logger, warn_after

P = ParamSpec("P")
T = TypeVar("T")

Advance = Callable[[int], None]

_SHARE = 0.9
"""Share of the timeout. A rank gives its storage up before its peers give the rank up."""
_IDLE_SECONDS = 1.0
"""A thread without calls ends after these. The next call starts another."""


class Progress:
    """The progress of some work, and the order to stop it. Thread-safe.

    ``todo`` is the number of bytes of the work (0: unknown), ``done`` how many of them are done,
    ``moved_at`` the ``time.monotonic()`` of the last progress.
    """

    def __init__(
        self,
        name: str = "",
        todo: int = 0,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """``on_progress`` is also called with the bytes of each progress."""
        self.name = name
        self.todo = todo
        self.done = 0
        self.moved_at = time.monotonic()
        self.cancelled: CheckpointingException | None = None
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def advance(self, count: int) -> None:
        """Count bytes that are done; 0 is a sign of life. Raises as ``check`` does."""
        if self.cancelled is not None:
            raise self.cancelled
        if not count:
            self.moved_at = time.monotonic()
            return
        with self._lock:
            if self.todo:  # formats may read a block twice
                count = min(count, self.todo - self.done)
            self.done += count
            self.moved_at = time.monotonic()
        if self._on_progress is not None:
            self._on_progress(count)

    def check(self) -> None:
        """Raise the error of ``cancel`` if the work was cancelled."""
        if self.cancelled is not None:
            raise self.cancelled

    def cancel(
        self, reason: CheckpointingException | None = None
    ) -> CheckpointingException:
        """Make the work stop at its next progress, with this error."""
        self.cancelled = (
            self.cancelled
            or reason
            or CheckpointingException(
                f"{self.name}: given up before all was written; nothing was committed"
            )
        )
        return self.cancelled


class Call(Generic[T]):
    """One call on the thread of an Executor."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self.name = name
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.value: T | None = None
        self._work = work
        self._context = copy_context()

    def perform(self) -> None:
        """Perform the work in the context of the thread that made the call."""
        try:
            self.value = self._context.run(self._work)
        except BaseException as error:  # noqa: BLE001 - raised by ``Executor.result``
            self.error = error
        finally:
            del self._work, self._context  # they may hold much memory
            self.ended.set()


class Executor:
    """Makes the calls of one save or load to its storage, one after another, on one thread.

    A call that makes no progress for nearly the ``timeout`` is given up with a StorageError. Its
    thread may hang on, so later calls raise that error at once. None: the caller's thread makes the
    calls, without bound; so it does where no thread can be started.

    ``alive`` is a sign of life of the current call. It raises the error of a call that was given
    up, or interrupted. ``progress`` counts bytes, too. ``gave_up`` is the error of the call that
    was given up; its thread may still be in the storage.
    """

    def __init__(
        self, timeout: timedelta | None, progress: Progress | None = None
    ) -> None:
        self.patience = math.inf
        if timeout is not None:
            self.patience = _SHARE * timeout.total_seconds()
        self.progress = progress or Progress()
        self.alive = partial(self.progress.advance, 0)
        self.gave_up: CheckpointingException | None = None
        self._waits_for_ranks = False
        self._clock: list[int] = []  # of the processor time of the thread
        self._thread: threading.Thread | None = None
        self._calls: SimpleQueue[Call[Any] | None] = SimpleQueue()
        # The thread of an executor that is garbage collected ends, too.
        self.close = weakref.finalize(self, self._calls.put, None)
        """End the thread after its calls, also after a call that hangs."""

    def call(
        self, name: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return ``work(*args, **kwargs)``; ``name`` is the call's in errors.

        A call that ``work`` makes is a part of the first one.
        """
        if threading.current_thread() is self._thread:
            return work(*args, **kwargs)
        return self.result(self.start(name, partial(work, *args, **kwargs)))

    def start(self, name: str, work: Callable[[], T]) -> Call[T]:
        """Begin a call. ``result`` waits for it. RuntimeError after ``close``."""
        if self.gave_up is not None:
            raise self.gave_up
        if not self.close.alive:
            raise RuntimeError(f"{name}: this executor is closed")
        call = Call(name, work)
        if self.patience == math.inf or not self._is_running():
            call.perform()
        else:
            self._calls.put(call)
        return call

    def _is_running(self) -> bool:
        """Start the thread if it is not running. False where that is not possible."""
        if self._thread is None or not self._thread.is_alive():  # or this is a fork
            thread = threading.Thread(
                target=_serve,
                args=(self._calls, self._clock),
                name="megackpt-disk",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError:  # no thread is left, or the interpreter ends
                return False
            self._thread = thread
        return True

    def afterwards(self, work: Callable[[], object]) -> None:
        """Have the thread do this after the call that hangs, when the storage answers."""
        self._calls.put(Call("", work))

    def result(self, call: Call[T]) -> T:
        """Wait for a call. Returns its value or raises its error; gives it up when it hangs."""
        try:
            self._watch(call)
        except BaseException:  # a signal handler raises
            stopped = self.progress.cancel()
            if call.ended.wait(limits.WORKER_STOP_SECONDS):
                self.progress.cancelled = None
            else:
                self.gave_up = stopped
            raise
        if self.gave_up is not None:
            raise self.gave_up
        error, call.error = call.error, None
        if error is None:
            return cast(T, call.value)
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    def _watch(self, call: Call[T]) -> None:
        """Wait for a call. Give it up if it makes no progress for ``patience`` seconds.

        A thread that uses the processor, however little, makes progress: its last system call has
        returned.
        """
        pause = min(max(self.patience / 50, 0.01), 1.0)
        seen, silent, warned = (0.0, 0), 0, False
        # Counted in pauses: this process itself may have been stopped.
        while not call.ended.wait(pause):
            self._is_running()  # it may have ended, idle, just when the call was queued
            progress = self.progress
            before, seen = seen, (progress.moved_at, _nanoseconds(self._clock))
            silent += 1
            if seen != before or self._waits_for_ranks:
                silent = 0
            if silent and not warned and 0 < warn_after() <= silent * pause:
                warned = True
                logger.warning(
                    "%s: the storage has not answered for %g s. It is given up after %g s "
                    "(timeout=).",
                    call.name,
                    warn_after(),
                    self.patience,
                )
            if silent * pause >= self.patience:
                written = ""
                if progress.todo:
                    written = f" after {progress.done} of {progress.todo} bytes"
                reason = StorageError(
                    f"{call.name}: the storage has not answered for {self.patience:g} s, and is "
                    f"given up{written}: check the disk; if it is only slow, give a longer timeout"
                )
                self.gave_up = progress.cancel(reason)
                return

    @contextmanager
    def waiting_for_ranks(self) -> Iterator[None]:
        """In this block the current call waits for other ranks, which the group bounds."""
        self._waits_for_ranks = True
        try:
            yield
        finally:
            self.progress.moved_at = time.monotonic()
            self._waits_for_ranks = False


def _serve(calls: SimpleQueue[Call[Any] | None], clock: list[int]) -> None:
    """The thread of an executor, to which it holds no reference: it may be garbage collected."""
    clock.clear()
    if hasattr(time, "pthread_getcpuclockid"):
        clock.append(time.pthread_getcpuclockid(threading.get_ident()))
    with suppress(Empty):
        while (call := calls.get(timeout=_IDLE_SECONDS)) is not None:
            call.perform()
            del call


def _nanoseconds(clock: list[int]) -> int:
    """How long a thread has used the processor; 0 if that is unknown."""
    try:
        return sum(map(time.clock_gettime_ns, clock))
    except OSError:  # it has ended
        return 0
