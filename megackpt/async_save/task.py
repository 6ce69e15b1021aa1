"""A task: work of one rank that talks to no other rank, how far it is, and what became of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from megackpt.distributed import Attempt
from megackpt.distributed.failures import DEPARTURES
from megackpt.errors import CheckpointingException

T = TypeVar("T")

logger = logging.getLogger("megackpt.async_calls")

Advance = Callable[[int], None]
Work = Callable[[Advance], T]


class Task(Generic[T]):
    """``work`` is called once, by whatever worker, with a function that it calls as bytes are handed on.

    Its outcome, a value or an error, is set once and stays. ``todo`` is how many bytes there are to hand on (0: not
    known), ``done`` how many were; ``moved`` is when the last of them were, by ``time.monotonic``. From any thread.
    """

    def __init__(
        self,
        work: Work[T],
        name: str = "",
        todo: int = 0,
        heard: Callable[[int], None] | None = None,
    ) -> None:
        """``heard`` is told as well of all that is handed on."""
        self.work = work
        self._heard = heard
        self.name = name
        self.todo = todo
        self.done = 0
        self.moved = time.monotonic()
        self.started = False
        self.outcome: Attempt[T] | None = None
        self.cancelled: CheckpointingException | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._hearers: list[Callable[[Attempt[T]], object]] = []

    def advance(self, count: int) -> None:
        """So many more bytes are handed on. Raises what the task was cancelled with."""
        if self.cancelled is not None:
            raise self.cancelled
        with self._lock:
            self.done += count
            self.moved = time.monotonic()
        if self._heard is not None:
            self._heard(count)

    def begin(self) -> bool:
        """Whoever hears True does the work; it is said once."""
        with self._lock:
            first, self.started = not self.started, True
        self.moved = time.monotonic()
        return first

    def run(self, apart: bool = False) -> None:
        """Do the work on this thread, or wait for whoever does it. Never raises what the work raises.

        ``apart``: the thread is there for this alone, so that what would end a process is a failure like others.
        """
        if not self.begin():
            self._ended.wait()
            return
        try:
            value = self.work(self.advance)
        except BaseException as raised:  # noqa: BLE001 - torch raises some that are no Exception; told to all ranks
            error = raised
            if apart and isinstance(raised, DEPARTURES):
                error = RuntimeError(f"the thread was told to end: {raised!r}")
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
            del self.work  # and with it whatever memory it holds
            hearers, self._hearers = self._hearers, []
        for hear in hearers:
            try:
                hear(outcome)
            except Exception:  # whoever waits for the outcome need not suffer for it
                logger.exception(
                    "%s has ended, but somebody who was told so failed", self.name
                )
        self._ended.set()

    def on_end(self, hear: Callable[[Attempt[T]], object]) -> None:
        """Call ``hear`` with the outcome, on the thread that sets it; at once if it is set."""
        with self._lock:
            if self.outcome is None:
                self._hearers.append(hear)
                return
        hear(self.outcome)

    def cancel(
        self, reason: CheckpointingException | None = None
    ) -> CheckpointingException:
        """Let the work stop when it next advances, with this error."""
        self.cancelled = (
            self.cancelled
            or reason
            or CheckpointingException(
                f"{self.name}: given up before all was written; nothing was committed"
            )
        )
        return self.cancelled

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the outcome is set, at most so long. Is it?"""
        return self._ended.wait(seconds)

    def get(self) -> T:
        """The value; or raise the error. The work must have ended."""
        if self.outcome is None:
            raise CheckpointingException(
                f"{self.name}: nobody has done this yet: schedule it in megackpt's AsyncCallsQueue (others do not know "
                "how), or execute_sync()"
            )
        return self.outcome.get()
