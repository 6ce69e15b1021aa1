"""One WARNING for each long wait for other ranks, with the stage and the missing ranks.

A wait of less than a second costs two operations on a set and, at most once a second, the start of a
thread. A longer one gets a thread, which writes to the job's store that this rank is present; the
connections do not show which ranks are missing. Rank 0 reads the keys of all ranks, the others that of
rank 0, so the store has one reader a rank.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import copy_context
from functools import lru_cache
from types import TracebackType
from typing import Any

from megackpt import events, limits
from megackpt.errors import name_ranks

logger = logging.getLogger("megackpt.waiting")

VARIABLE = "MEGACKPT_WAIT_WARNING_SECONDS"
"""The environment variable with another number of seconds; 0 or less: never warn."""

LOOKED_AT = 64
"""Ranks that each waiting rank checks itself, where rank 0 names at most that many."""

Step = tuple[int, int]
"""The call in which the ranks connected, and how many steps they have made together since."""

_waits: set[Wait] = set()
_clock: threading.Thread | None = None


def warn_after() -> float:
    return _seconds(os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=16)
def _seconds(text: str) -> float:
    try:
        seconds = float(text or limits.WAIT_WARNING_SECONDS)
        return (
            seconds if seconds < threading.TIMEOUT_MAX else 0.0
        )  # "inf" and "nan": never
    except ValueError:
        logger.warning(
            "%s is %r, which is not a number of seconds: using %g",
            VARIABLE,
            text,
            limits.WAIT_WARNING_SECONDS,
        )
        return limits.WAIT_WARNING_SECONDS


def interval(after: float) -> float:
    """Seconds after which a wait is a long one, and its rank posts that it is present."""
    return min(max(after / 30, 0.02), 1.0) if after > 0 else 1.0


class Wait:
    """This rank waits for others during a ``with`` block.

    ``absent`` returns the missing ranks, or None where this rank is not waiting after all. It is called
    on a thread of its own, with an event that is set when the wait ends. ``arrive`` is called on that
    thread before it, once the wait is a long one.
    """

    def __init__(
        self,
        rank: int,
        stage: str,
        absent: Callable[[threading.Event], Iterable[int] | None],
        arrive: Callable[[], None] | None = None,
        timeout: float | None = None,
    ) -> None:
        self.rank, self.stage, self.timeout = rank, stage, timeout
        self.began = time.monotonic()
        self.long = False
        self._over: threading.Event | None = (
            None  # of a long wait: most waits are too short to make one
        )
        self._ended = False
        self._absent, self._arrive = absent, arrive
        self._context = copy_context()

    def __enter__(self) -> Wait:
        _waits.add(self)
        _start_clock()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended = True
        if self._over is not None:
            self._over.set()
        _waits.discard(self)

    def watch(self, after: float) -> None:
        """Runs on a thread of its own once the wait is a long one."""
        self._over = over = threading.Event()
        if self._ended:
            return
        try:
            if self._arrive is not None:
                self._arrive()
            if over.wait(max(0.0, self.began + after - time.monotonic())):
                return
            absent = self._absent(over)
            if absent is None:
                return
            names = sorted(absent)
            whom = name_ranks(names) if names else "other ranks"
        except (
            RuntimeError
        ) as error:  # the store's; the wait itself ends in its own way
            first = (str(error).splitlines() or [type(error).__name__])[0]
            whom = f"other ranks (the job's store does not answer: {first})"
        if not self._ended:
            self._warn(whom, after)

    def _warn(self, whom: str, after: float) -> None:
        running = self._context.run(events.current).operation
        inside = f" of the {running.name} {running.path}" if running.name else ""
        limit = (
            ""
            if self.timeout is None
            else f" It waits for {self.timeout:g} s at most (timeout=)."
        )
        logger.warning(
            "rank %d has waited %g s in the stage %r%s for %s: still at work there, or not in the same call (all ranks "
            "of the process group have to call save, load and the like alike).%s",
            self.rank,
            after,
            self.stage,
            inside,
            whom,
            limit,
        )


def _start_clock() -> None:
    """Start the thread that finds long waits, unless it runs; it ends when there are no waits."""
    global _clock  # noqa: PLW0603 - one for the process
    if _clock is None or not _clock.is_alive():
        _clock = threading.Thread(target=_find_long, name="megackpt-waits", daemon=True)
        _clock.start()


def _find_long() -> None:
    global _clock  # noqa: PLW0603
    while True:
        after = warn_after()
        time.sleep(interval(after))
        now = time.monotonic()
        for wait in tuple(_waits):
            if after <= 0 or now - wait.began < interval(after):
                continue
            try:
                _waits.remove(wait)  # by one thread only
            except KeyError:
                continue
            wait.long = True
            threading.Thread(
                target=wait.watch, args=(after,), name="megackpt-wait", daemon=True
            ).start()
        if not _waits:
            _clock = None  # waits from here on start another one
            if not _waits:
                return
            _clock = threading.current_thread()


class Arrivals:
    """Keys in the job's store: the step of each rank at its last long wait, and the ranks that rank 0 awaits."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def post(self, step: Step, answering: bool = False) -> None:
        """Post that this rank is at this step; ``answering``: all ranks are, and rank 0 is working."""
        self._store.set(f"waits/{self._rank}", json.dumps([*step, int(answering)]))

    def absent(self, step: Step, over: threading.Event) -> list[int]:
        """The ranks for which this one waits in a step, as far as it can know; all of them are missing."""
        store = (
            self._store.clone()
        )  # a client of its own: the other one may be waiting in a call
        after = warn_after()
        grace = (
            2 * interval(after) + 0.5
        )  # who came in the last moment has not posted it yet
        others = range(1, self._size) if self._rank == 0 else [0]
        missing = [rank for rank in others if self._read(store, rank)[:2] < [*step]]
        if missing and not over.wait(grace):
            missing = [
                rank for rank in missing if self._read(store, rank)[:2] < [*step]
            ]
        if self._rank == 0:
            store.set("awaited", json.dumps([*step, missing]))
            return missing
        made_in, made, answering = self._read(store, 0)
        at = made_in, made
        if answering or made_in != step[0] or at > step:
            return [0]
        # Rank 0 waits itself: in this step or, for a rank that has not taken its message, in an earlier one.
        deadline = time.monotonic() + max(after / 6, 2 * grace)
        while not over.wait(max(after / 10, 0.05)) and time.monotonic() < deadline:
            if store.check(["awaited"]):
                *posted, ranks = json.loads(store.get("awaited"))
                if posted == [*at]:
                    if len(ranks) <= LOOKED_AT:  # some may have come since
                        ranks = [
                            rank
                            for rank in ranks
                            if self._read(store, rank)[:2] < [*at]
                        ]
                    return ranks or [0]
        return [0]

    def _read(self, store: Any, rank: int) -> list[int]:
        key = f"waits/{rank}"
        return list(json.loads(store.get(key))) if store.check([key]) else [-1, -1, 0]


os.register_at_fork(after_in_child=_waits.clear)
