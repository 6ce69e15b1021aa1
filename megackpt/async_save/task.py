"""Tasks and workers: work of one rank without communication, and the threads that perform it."""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from datetime import timedelta
from typing import Any, Generic, TypeVar

from megackpt import limits
from megackpt.distributed import Attempt, attempt
from megackpt.distributed.failures import DEPARTURES
from megackpt.errors import CheckpointingException, StorageError

T = TypeVar("T")

logger = logging.getLogger("megackpt.async_calls")

Advance = Callable[[int], None]
Work = Callable[[Advance], T]

_SHARE = 0.9
"""Of the timeout. A rank gives its storage up before the others give the rank up."""


class Task(Generic[T]):
    """``work`` is called once by a worker, with a function that takes the bytes done since its last
    call.

    The outcome, a value or an error, is set once. ``todo`` is the number of bytes of the work (0:
    unknown), ``done`` how many of them are done, ``moved_at`` the ``time.monotonic()`` of the last
    progress, ``stuck`` whether the work, here or on another rank, was given up and may still be
    running, for example because its disk hangs. ``place`` is the name in errors of a disk that
    hangs. Thread-safe.
    """

    def __init__(
        self,
        work: Work[T],
        name: str = "",
        todo: int = 0,
        on_progress: Callable[[int], None] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """``on_progress`` is also called with the bytes of each progress.

        ``timeout``: of the save or load. ``run`` gives up work that makes no progress for nearly
        as long.
        """
        self.work = work
        self._patience = math.inf
        if timeout is not None:
            self._patience = _SHARE * timeout.total_seconds()
        self._on_progress = on_progress
        self.name = self.place = name
        self.todo = todo
        self.done = 0
        self.moved_at = time.monotonic()
        self.started = False
        self.stuck = False
        self.outcome: Attempt[T] | None = None
        self.cancelled: CheckpointingException | None = None
        self._waits_for_ranks = False
        self._clock: list[int] = []  # of the processor time of its thread
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._callbacks: list[Callable[[Attempt[T]], object]] = []

    def advance(self, count: int) -> None:
        """Count bytes that are done; 0 is a sign of life.

        Raises the error of ``cancel`` if the task was cancelled.
        """
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

    @contextmanager
    def waiting_for_ranks(self) -> Iterator[None]:
        """In this block the work waits for other ranks, which has a bound of its own."""
        self._waits_for_ranks = True
        try:
            yield
        finally:
            self.moved_at = time.monotonic()
            self._waits_for_ranks = False

    def claim(self) -> bool:
        """True for the first caller, which performs the work."""
        with self._lock:
            first, self.started = not self.started, True
        self.moved_at = time.monotonic()
        return first

    def run(self) -> None:
        """Perform the work, or wait for the thread that does. Errors become the outcome.

        With a timeout, a thread of its own performs it, and this one leaves it when a disk hangs.
        """
        if self._patience == math.inf:
            self.perform()
        else:
            self.start()
            self.join()

    def start(self) -> None:
        """Perform the work on a thread of its own; on this one where no thread can be started."""

        def perform() -> None:
            if hasattr(time, "pthread_getcpuclockid"):
                self._clock.append(time.pthread_getcpuclockid(threading.get_ident()))
            self.perform()

        try:
            threading.Thread(
                target=copy_context().run,
                args=(perform,),
                name="megackpt-disk",
                daemon=True,
            ).start()
        except RuntimeError:  # no thread is left, or the interpreter ends
            self.perform()

    def join(self) -> None:
        """Wait for the outcome. With a timeout, give the work up when a disk hangs."""
        try:
            self._watch(self._patience)
        except BaseException:  # a signal handler raises
            self.cancel()
            self.stuck = not self.wait(limits.WORKER_STOP_SECONDS)
            raise

    def _watch(self, patience: float) -> None:
        """Wait for the outcome. Give the work up if nothing moves for ``patience`` seconds.

        A thread that uses the processor, however little, moves: its last system call has returned.
        """
        pause = min(max(patience / 50, 0.01), 1.0)
        seen, silent = (0.0, 0), 0
        # Counted in pauses: this process itself may have been stopped.
        while not self.wait(pause):
            before, seen = seen, (self.moved_at, _nanoseconds(self._clock))
            silent += 1
            if seen != before or self._waits_for_ranks:
                silent = 0
            if silent * pause >= patience:
                self._give_up(patience)

    def _give_up(self, patience: float) -> None:
        written = f" after {self.done} of {self.todo} bytes" if self.todo else ""
        reason = StorageError(
            f"{self.place}: the storage has not answered for {patience:g} s, and is given up"
            f"{written}: check the disk; if it is only slow, give a longer timeout"
        )
        self.stuck = True
        self.finish(Attempt(None, self.cancel(reason)))

    def perform(self, contain_exit: bool = False) -> None:
        """Perform the work on this thread, or wait for the thread that does.

        ``contain_exit``: SystemExit and the like, on a worker thread, are failures of the task.
        """
        if not self.claim():
            self._ended.wait()
            return
        try:
            value = self.work(self.advance)
        except BaseException as raised:  # noqa: BLE001 - torch has some; raised on all ranks
            error = raised
            if contain_exit and isinstance(raised, DEPARTURES):
                error = RuntimeError(f"the work tried to end its thread: {raised!r}")
                error.__cause__ = raised
            self.finish(Attempt(None, error))
        else:
            self.finish(Attempt(value))

    def finish(self, outcome: Attempt[T]) -> None:
        """Set the outcome; only the first one counts."""
        with self._lock:
            if self.outcome is not None:
                return
            self.outcome = outcome
            del self.work  # it may hold much memory
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(outcome)
            except Exception:  # the outcome counts all the same
                logger.exception("%s has ended, but a callback failed", self.name)
        self._ended.set()

    def on_end(self, callback: Callable[[Attempt[T]], object]) -> None:
        """Call ``callback`` with the outcome, on the thread that sets it; at once if it is set."""
        with self._lock:
            if self.outcome is None:
                self._callbacks.append(callback)
                return
        callback(self.outcome)

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

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the outcome, at most so many seconds. Returns whether it is set."""
        return self._ended.wait(seconds)

    def get(self) -> T:
        """The value. Raises the error of the work, or CheckpointingException before its end."""
        if self.outcome is None:
            raise CheckpointingException(
                f"{self.name}: not executed yet: schedule it in megackpt's AsyncCallsQueue (other "
                "queues cannot run it), or call execute_sync()"
            )
        return self.outcome.get()


class Worker(ABC):
    """Performs tasks in the background."""

    @abstractmethod
    def start(self, task: Task[Any]) -> None:
        """Start or queue the task, without blocking. Errors become its outcome."""

    @abstractmethod
    def stop(
        self, task: Task[Any], reason: CheckpointingException | None = None
    ) -> None:
        """Give up a task. On return it has an outcome (this error), and the worker takes others."""

    def waits_for_processor(self) -> bool:
        """Whether it makes no progress because others take the processor, not for a disk."""
        return False

    def close(self) -> None:  # noqa: B027 - threads end with their tasks
        """Release what the worker holds; no task may follow."""


class ThreadWorker(Worker):
    """One thread a task. System calls and digests release the interpreter's lock."""

    def start(self, task: Task[Any]) -> None:
        if not task.started:
            # A daemon: without finalization there is no checkpoint, so an ending process need
            # not wait.
            name = f"megackpt-{task.name}"
            thread = threading.Thread(
                target=task.perform, args=(True,), name=name, daemon=True
            )
            error = attempt(thread.start).error
            if error is not None:  # the system has no thread left
                task.finish(Attempt(None, error))

    def stop(
        self, task: Task[Any], reason: CheckpointingException | None = None
    ) -> None:
        error = task.cancel(reason)
        if not (task.started and task.wait(limits.WORKER_STOP_SECONDS)):
            task.stuck = task.started
            task.finish(Attempt(None, error))


def within(timeout: timedelta | None, name: str, work: Work[T]) -> T:
    """The value of ``work`` (see Task), which has a thread of its own.

    StorageError if that hangs for nearly this long. None: this thread performs it, without bound.
    """
    task = Task(work, name, timeout=timeout)
    task.run()
    return task.get()


def _nanoseconds(clock: list[int]) -> int:
    """How long a thread has used the processor; 0 if that is unknown."""
    try:
        return sum(map(time.clock_gettime_ns, clock))
    except OSError:  # it has ended
        return 0
