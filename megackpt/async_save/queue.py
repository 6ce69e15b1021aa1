"""The queue of requests under way: each is begun at once, and all are finalized in their order, on all ranks alike."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - has set its hook when we set ours
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from megackpt import events
from megackpt.async_save.request import AsyncRequest, Pending
from megackpt.async_save.task import Task
from megackpt.async_save.workers import ThreadWorker, Worker
from megackpt.distributed import DEFAULT_TIMEOUT, Attempt, Busy, attempt
from megackpt.errors import CheckpointingException, RankLost, StorageError

logger = logging.getLogger("megackpt.async_calls")

ENDED = 1000
"""How far a task is that has ended, in thousandths; one that has not is below."""
_RANKS = 1 << 32
_FIRST_PAUSE, _LONGEST_PAUSE = (
    0.002,
    0.5,
)  # seconds between two looks of a blocking call

_under_way: set[AsyncCallsQueue] = set()
"""Queues with something under way. They stay until it is finalized or given up, also when nobody else keeps them."""


@dataclass(eq=False)
class _Call:
    """A request under way on this rank."""

    index: int
    request: AsyncRequest
    pending: Pending
    first: float = field(default_factory=time.monotonic)
    """When it came to be the oldest one; before that it may have had to wait for another."""
    slowest: tuple[int, int] | None = None
    """The rank that was least far when all ranks looked last, and how far (thousandths)."""
    looks: int = 0
    """Of this rank, those included that were refused."""
    agreed: bool = False
    """Do all ranks know that all have done their work?"""

    @property
    def task(self) -> Task[Any]:
        return self.pending.task

    @property
    def progress(self) -> int:
        """In thousandths; ENDED exactly when it has ended."""
        if self.task.outcome is not None:
            return ENDED
        return (
            min(ENDED - 1, self.task.done * ENDED // self.task.todo)
            if self.task.todo
            else 0
        )

    def __str__(self) -> str:
        name = self.task.name or f"call {self.index}"
        outcome = self.task.outcome
        if outcome is None:
            told = (
                f"{name}: writing, {self.progress // 10} %"
                if self.task.todo
                else f"{name}: under way"
            )
        elif outcome.error is not None:
            why = events.format_error(outcome.error)
            told = f"{name}: failed here ({why}), which all ranks hear when it is finalized"
        else:
            told = f"{name}: written here"
        if self.slowest is None or self.slowest[1] == ENDED:
            return told
        return f"{told}, waiting for rank {self.slowest[0]} ({self.slowest[1] // 10} %)"


class AsyncCallsQueue:
    """Asynchronous saves under way: schedule each, look now and then, close at the end. On all ranks alike.

    Args:
        persistent: a writer process of low priority, started once, does the work; else threads of this process.
        process_group: whose ranks take part where a request does not say it (None: the default one's).
        timeout: how long a worker may go without moving a byte before it is given up; a function of the caller's
            own, which tells nothing of bytes, may take so long.
    """

    def __init__(
        self,
        persistent: bool = False,
        *,
        process_group: Any = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        self.persistent = persistent
        self._process_group = process_group
        self._timeout = timeout
        self._calls: deque[_Call] = deque()
        self._index = -1
        self._worker: Worker | None = None
        self._lock = threading.RLock()  # the handler of a signal may come between

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Begin the work of a request, and return its number at once: 0, 1, 2, ... Call it on all ranks alike."""
        with self._alone():
            request = AsyncRequest(*async_request).freeze()  # also Megatron's own
            pending = request.begun(self._process_group)
            self._index += 1
            self._calls.append(_Call(self._index, request, pending))
            _under_way.add(self)
            if (
                error := attempt(lambda: self._at_work().start(pending.task)).error
            ) is not None:
                pending.task.finish(Attempt(None, error))
            return self._index

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalize, in their order, the requests whose work all ranks have done; returns their numbers.

        Collective: one small vote for each of them, and one for the first that goes on. ``blocking``: wait for all.
        ``no_dist``: this rank's work alone is looked at, for callers who know of the others'.

        Raises, on all ranks, what went wrong with a request on any; that one is over then, and the next call goes
        on with the next request. Where ranks have lost one another (RankLost), all that were under way are over.
        While another thread saves or loads over the same ranks it is refused, and nothing has changed.
        """
        finalized: list[int] = []
        lost: RankLost | None = None
        with self._alone():
            while self._calls:
                call = self._calls[0]
                before = call.pending.over  # of one that was scheduled twice
                try:
                    if self._done(call, blocking, no_dist) and self._out(call):
                        call.request.finalize(call.pending)
                        finalized.append(call.index)
                    elif call in self._calls:
                        break
                except Exception as error:
                    if (
                        call.pending.over == "done" != before
                    ):  # a function of the caller's has failed
                        finalized.append(call.index)
                    elif isinstance(
                        error, RankLost
                    ):  # as is all begun before, as some ranks know already
                        lost = lost or error
                        lost.add_note(
                            f"{call.task.name} was not finalized, and is given up"
                        )
                        continue
                    if finalized:
                        error.add_note(f"this call has finalized before: {finalized}")
                    raise
        if lost is not None:
            raise lost
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """How many requests are under way."""
        return len(self._calls)

    def status(self) -> str:
        """A line for each request under way, for people: "iter_300: writing, 41 %, waiting for rank 3 (12 %)".

        Of other ranks it tells what the last look of all ranks has shown. From any thread; asks nobody.
        """
        return "\n".join(map(str, tuple(self._calls))) or "nothing is being saved"

    def close(self, abort: bool = False) -> None:
        """Finalize all that is under way (collective), or ``abort`` it (not collective); the worker ends.

        What is aborted is no checkpoint, and what stood in its directory before still stands. Ranks that go on with it,
        or with another asynchronous save of this process group that is under way, hear RankLost. Raises the first error
        of all requests. Where it is refused because another thread is at work, nothing is given up: call it again.
        """
        failed: Exception | None = None
        while self._calls and not abort:
            try:
                self.maybe_finalize_async_calls(blocking=True)
            except Busy as error:
                raise error from failed
            except Exception as error:  # noqa: BLE001 - raised below, when the others have had their turn
                failed = failed or error
            except BaseException:
                self._end()
                raise
        self._end()
        if failed is not None:
            raise failed

    def _end(self) -> None:
        while self._calls:
            self._give_up(self._calls[0])
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        lock = self._lock
        if not lock.acquire(blocking=False):
            raise Busy(
                "another thread is at work with this AsyncCallsQueue: let it finish first, or give each thread a queue "
                "and a process group of its own (status() and close(abort=True) may be called from any thread)"
            )
        try:
            yield
        finally:
            lock.release()

    def _at_work(self) -> Worker:
        if self._worker is None:
            if self.persistent:
                from megackpt.async_save.process_worker import ProcessWorker

                self._worker = ProcessWorker()
            else:
                self._worker = ThreadWorker()
        return self._worker

    def _done(self, call: _Call, blocking: bool, no_dist: bool) -> bool:
        """Have all ranks done the work of their oldest request? Then it is this thread's turn to finalize it."""
        pause = _FIRST_PAUSE
        while call in self._calls:
            self._watch(call)
            try:
                call.agreed = call.agreed or (
                    call.progress == ENDED if no_dist else self._all_done(call)
                )
                if call.agreed:
                    call.pending.meet()
            except Busy:  # all is as it was
                raise
            except (
                BaseException
            ) as error:  # whoever was lost, this request cannot be finalized any more
                if not self._give_up(call) and isinstance(
                    error, CheckpointingException
                ):
                    return False  # a signal's handler did so
                raise
            if call.agreed or not blocking:
                return call.agreed
            began = time.monotonic()
            call.task.wait(pause)
            time.sleep(max(0.0, min(pause, began + pause - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return False

    def _all_done(self, call: _Call) -> bool:
        call.looks += 1
        far = least = opposite = first = last = 0
        own = call.index, -call.index, call.looks, -call.looks
        with call.pending.meet() as ranks:
            # Again for who waits in a look that was refused to this rank.
            while first < call.looks and least == -opposite:
                told = ranks.lowest([call.progress * _RANKS + ranks.rank, *own])
                far, least, opposite, first, last = told
        if least != -opposite:
            raise CheckpointingException(
                f"Unmatched async calls. The ranks' oldest unfinalized requests are the numbers {least} to "
                f"{-opposite} (here {call.index}): every rank must schedule and finalize the same requests"
            )
        progress, rank = divmod(far, _RANKS)
        call.slowest = rank, progress
        return progress == ENDED and -last == call.looks

    def _watch(self, call: _Call) -> None:
        """Give up work that does not move any more."""
        still = time.monotonic() - max(call.task.moved, call.first)
        if call.task.outcome is None and still > self._timeout.total_seconds():
            reason = StorageError(
                f"{call.task.name}: its worker has not moved a byte for {still:.0f} s and is given up after "
                f"{call.task.done} of {call.task.todo} bytes (timeout {self._timeout.total_seconds():g} s): does the "
                "disk still answer? Where it is only slow, give the AsyncCallsQueue a longer timeout"
            )
            self._at_work().stop(call.task, reason)

    def _out(self, call: _Call) -> bool:
        """Take this one out. Was it there?"""
        try:
            self._calls.remove(call)
        except ValueError:
            return False
        if self._calls:
            self._calls[0].first = time.monotonic()
        else:
            _under_way.discard(self)
        return True

    def _give_up(self, call: _Call) -> bool:
        """False: somebody else has done so."""
        if not self._out(call):
            return False
        try:
            self._at_work().stop(call.task)
            call.pending.give_up()
        except Exception:  # there may be others to give up
            logger.exception(
                "%s is given up, but not cleared away: the next save does that",
                call.task.name,
            )
        return True


def _end_of_process() -> None:
    """What was not finalized is not committed: say so, and let it stop."""
    for queue in list(_under_way):
        logger.warning(
            "the process ends before these saves are finalized, so they are no checkpoints "
            "(AsyncCallsQueue.close() finalizes them): %s",
            queue.status(),
        )
        queue.close(abort=True)


def _forked() -> None:
    """What is under way is the parent's: this process has none of its threads, and leaves its files alone."""
    for queue in list(_under_way):
        queue._calls.clear()
        queue._worker = None
        queue._lock = threading.RLock()
    _under_way.clear()


# Before the interpreter joins the threads of pools: they would write to the end first. Hooks run last set first.
getattr(threading, "_register_atexit", atexit.register)(_end_of_process)
os.register_at_fork(after_in_child=_forked)
