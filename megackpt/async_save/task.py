"""Tasks and workers: work of one rank without communication, and the threads that perform it."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any, Generic, TypeVar

from megackpt import limits
from megackpt.distributed import Attempt, attempt
from megackpt.distributed.failures import DEPARTURES
from megackpt.errors import CheckpointingException
from megackpt.storage.executor import Advance, Executor, Progress

T = TypeVar("T")
Work = Callable[[Advance], T]

logger = logging.getLogger("megackpt.async_calls")


class Task(Progress, Generic[T]):
    """``work`` is called once by a worker, with a function that takes the bytes done since its last
    call.

    The outcome, a value or an error, is set once. ``stuck`` is whether the work, here or on another
    rank, was given up and may still be running, for example because its disk hangs. ``place`` is
    the name in errors of a disk that hangs. Thread-safe.
    """

    def __init__(
        self,
        work: Work[T],
        name: str = "",
        todo: int = 0,
        on_progress: Callable[[int], None] | None = None,
        timeout: timedelta | None = None,
        place: str = "",
    ) -> None:
        """``timeout``: the timeout of the save.

        ``run`` gives up work that makes no progress for nearly as long.
        """
        super().__init__(name, todo, on_progress)
        self.work = work
        self.place = place or name
        self._timeout = timeout
        self.started = False
        self.stuck = False
        self.outcome: Attempt[T] | None = None
        self._ended = threading.Event()
        self._callbacks: list[Callable[[Attempt[T]], object]] = []

    def claim(self) -> bool:
        """True for the first caller, which performs the work."""
        with self._lock:
            first, self.started = not self.started, True
        self.moved_at = time.monotonic()
        return first

    def run(self) -> None:
        """Perform the work, or wait for the thread that does. Errors become the outcome.

        With a timeout, a separate thread performs the work, and this thread leaves it when a disk
        hangs.
        """
        with closing(Executor(self._timeout, self)) as executor:
            try:
                executor.call(self.place, self.perform)
            except CheckpointingException as error:
                self.finish(Attempt(None, error))
            finally:
                self.stuck |= executor.gave_up is not None

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

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the outcome, at most ``seconds``. Returns whether it is set."""
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
        """Give up a task. On return it has an outcome (this error), and the worker is free."""

    def waits_for_processor(self) -> bool:
        """Whether it makes no progress because the processor is busy, not because of a disk."""
        return False

    def close(self) -> None:  # noqa: B027 - threads end with their tasks
        """Release what the worker holds; no task may follow."""


class ThreadWorker(Worker):
    """One thread a task. System calls and digests release the interpreter's lock."""

    def start(self, task: Task[Any]) -> None:
        if not task.started:
            # A daemon: without finalization there is no checkpoint, so an ending process need not
            # wait.
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
