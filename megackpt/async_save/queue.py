"""AsyncCallsQueue: starts requests at once, and finalizes them in order on all ranks."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # registers its exit hook before ours
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal
from zlib import crc32

from megackpt import events, limits
from megackpt.async_save.request import AsyncRequest, Pending
from megackpt.async_save.task import Task, ThreadWorker, Worker
from megackpt.distributed import DEFAULT_TIMEOUT, Attempt, Busy, GroupLike, attempt
from megackpt.errors import CheckpointingException, RankLost, StorageError
from megackpt.staging.buffers import POOL

logger = logging.getLogger("megackpt.async_calls")

ENDED = 1000
"""The progress, in thousandths, that only an ended task has."""
_RANKS = 1 << 32
_HEARTBEAT = 0.5
"""Seconds after which a rank votes in a blocking call although its task has not ended."""

_unfinished: dict[AsyncCallsQueue, None] = {}
"""Queues with unfinalized requests, in an order that is the same on all ranks; kept here even if
the caller drops them."""


class FailurePolicy:
    """Decides whether a failed save is raised. All ranks see the same errors, so they agree.

    ``failed`` counts all saves that failed. It has arguments of ``AsyncCallsQueue``. Raises
    ValueError for wrong ones.
    """

    def __init__(self, on_error: str, max_failures: int) -> None:
        if on_error not in ("raise", "warn"):
            raise ValueError(f"on_error is 'raise' or 'warn', not {on_error!r}")
        if type(max_failures) is not int or max_failures < 1:
            raise ValueError(f"max_failures is 1 or more, not {max_failures!r}")
        self._warns, self._most = on_error == "warn", max_failures
        self.failed = self._in_a_row = 0

    def succeeded(self) -> None:
        self._in_a_row = 0

    def tolerates(self, error: BaseException, what: str, is_coordinator: bool) -> bool:
        """Count a failed save, and log it on rank 0. False if its error has to be raised.

        The error of lost ranks (RankLost) is raised always: no rank can continue without them.
        """
        ours = isinstance(error, CheckpointingException)
        if not ours or isinstance(error, (Busy, RankLost)):
            return False
        self.failed += 1
        self._in_a_row += 1
        if not self._warns:
            return False
        if self._in_a_row >= self._most:
            error.add_note(f"saves that failed in a row: {self._in_a_row}")
            return False
        if is_coordinator:
            logger.error(
                "%s is not saved, and training continues (failure %d in a row; %d raise): %s",
                what,
                self._in_a_row,
                self._most,
                events.format_error(error),
            )
        return True


@dataclass(eq=False)
class _Call:
    """An unfinalized request on this rank."""

    index: int
    request: AsyncRequest
    pending: Pending
    scheduled: float = field(default_factory=time.monotonic)
    timed_from: float = field(default_factory=time.monotonic)
    """When it became the oldest one; later by the time that its worker waited for a processor."""
    looked: float = field(default_factory=time.monotonic)
    """When this rank last looked at the worker."""
    slowest: tuple[int, int] | None = None
    """The slowest rank in the last vote, and its progress in thousandths."""
    agreed: bool = False
    """Whether all ranks know that all tasks have ended."""

    @property
    def task(self) -> Task[Any]:
        return self.pending.task

    @property
    def progress(self) -> int:
        """In thousandths."""
        if self.task.outcome is not None:
            return ENDED
        if not self.task.todo:
            return 0
        return min(ENDED - 1, self.task.done * ENDED // self.task.todo)

    def __str__(self) -> str:
        name = self.task.name or f"call {self.index}"
        outcome = self.task.outcome
        if outcome is None:
            text = f"{name}: in progress"
            if self.task.todo:
                text = f"{name}: writing, {self.progress // 10} %"
        elif outcome.error is not None:
            why = events.format_error(outcome.error)
            text = f"{name}: failed here ({why}), to be raised on all ranks when it is finalized"
        else:
            text = f"{name}: written here"
        if self.slowest is None or self.slowest[1] == ENDED:
            return text
        return f"{text}, waiting for rank {self.slowest[0]} ({self.slowest[1] // 10} %)"


class AsyncCallsQueue:
    """Asynchronous saves: schedule, finalize regularly, close at the end, all on all ranks.

    Args:
        persistent: a writer process of low priority, started once, does the work; else threads of
            this process.
        process_group: the ranks of requests that do not know their ranks (None: the default process
            group).
        timeout: how long a worker may go without progress before it is given up. A function of the
            caller reports no progress, so this bounds its time.
        on_error: "raise" the error of a failed save on all ranks, or "warn": log it as an ERROR on
            rank 0 and continue. RankLost is raised always.
        max_failures: with "warn", this number of failures in a row raises the last error.
        staging_bytes: make staging memory of this size ready in a thread, so that the first save
            does not wait for new pages. It is the size of this rank's save: its part of the
            tensors, and its share of replicas. None: the share of a whole checkpoint that this
            process has loaded, or loads before its first save. 0: no memory.
    """

    def __init__(
        self,
        persistent: bool = False,
        *,
        process_group: GroupLike = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        on_error: Literal["raise", "warn"] = "raise",
        max_failures: int = 3,
        staging_bytes: int | None = None,
    ) -> None:
        self.failures = FailurePolicy(on_error, max_failures)
        if staging_bytes is None:
            POOL.is_expecting = True
        elif type(staging_bytes) is not int or staging_bytes < 0:
            raise ValueError(
                f"staging_bytes is a number of bytes or None, not {staging_bytes!r}"
            )
        if staging_bytes or (staging_bytes is None and POOL.expected):
            from megackpt.staging.copy import prepare  # imports torch

            prepare(staging_bytes)
        self.persistent = persistent
        self._process_group = process_group
        self._timeout = timeout
        self._calls: deque[_Call] = deque()
        self._index = -1
        self._worker: Worker | None = None
        # Reentrant: a signal handler may call a method during another.
        self._lock = threading.RLock()

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start the task of a request; returns its number (0, 1, 2, ...). Call it on all ranks."""
        with self._exclusive(), _given_up_if_interrupted(async_request):
            request = AsyncRequest(*async_request).freeze()  # also Megatron's requests
            pending = request.prepare(self._process_group)
            self._index += 1
            call = _Call(self._index, request, pending)
            try:
                self._calls.append(call)
                _unfinished[self] = None
                error = attempt(lambda: self._get_worker().start(pending.task)).error
                if error is not None:
                    pending.task.finish(Attempt(None, error))
            except BaseException:  # a signal handler raises
                self._give_up(call)
                raise
            return self._index

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalize, in order, the requests whose tasks all ranks have ended; returns their numbers.

        Collective: one small vote for each of them, and one for the first unfinished one.
        ``blocking``: wait for all. ``no_dist``: check only the task of this rank, for callers who
        know the state of other ranks.

        Raises, on all ranks, the error of a request on any rank (see ``on_error``). That request
        has ended then; the next call continues with the next one. After RankLost all requests have
        ended that were scheduled before the rank was lost. An exception of a signal handler ends
        all requests, on all ranks.
        """
        finalized: list[int] = []
        lost: RankLost | None = None
        callers: list[BaseException] = []
        with self._exclusive(), self._ended_if_interrupted(callers):
            while self._calls:
                call = self._calls[0]
                before = call.pending.ended  # set if it was scheduled twice
                group = call.pending.group
                try:
                    if self._all_ended(call, blocking, no_dist) and self._remove(call):
                        call.request.finalize(call.pending)
                        finalized.append(call.index)
                        self.failures.succeeded()
                    elif call in self._calls:
                        break
                except Exception as error:
                    if call.pending.ended == "done" != before:
                        # A finalize function of the caller has failed: the save is committed.
                        finalized.append(call.index)
                        callers.append(error)
                    elif isinstance(error, RankLost):
                        # Calls scheduled before have started over the same ranks. Other ranks may
                        # already be in the vote on a later call.
                        since = math.inf if group is None else group.lost_at
                        if lost is not None:
                            lost.add_note(f"{call.task.name} is given up as well")
                        lost = lost or error
                        for call in [c for c in self._calls if c.scheduled < since]:
                            lost.add_note(f"{call.task.name} is given up as well")
                            self._give_up(call)
                        continue
                    elif call not in self._calls and self.failures.tolerates(
                        error, call.task.name, group is None or group.is_coordinator
                    ):
                        continue
                    if finalized:
                        error.add_note(f"finalized before in this call: {finalized}")
                    raise
            if lost is not None:
                if finalized:
                    lost.add_note(f"finalized in this call: {finalized}")
                raise lost
        return finalized

    @contextmanager
    def _ended_if_interrupted(self, callers: list[BaseException]) -> Iterator[None]:
        """After an exception of this rank alone, no other rank waits for its votes.

        ``callers``: exceptions of the caller's finalize functions. The queue continues after these.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, CheckpointingException) and error not in callers:
                while self._calls:
                    self._give_up(self._calls[0])
            raise

    @staticmethod
    def warmup_persistent_caller(*_: Any, **__: Any) -> None:
        """Megatron-Core's name. No effect: a worker process starts with the first save, fast."""

    def get_num_unfinalized_calls(self) -> int:
        """The number of unfinalized requests."""
        return len(self._calls)

    def status(self) -> str:
        """One line a request, such as "iter_300: writing, 41 %, waiting for rank 3 (12 %)".

        The progress of other ranks comes from the last vote. Not collective; may be called on any
        thread.
        """
        return "\n".join(map(str, tuple(self._calls))) or "nothing is being saved"

    def close(self, abort: bool = False) -> None:
        """Finalize all requests (collective), or ``abort`` them (not collective); then end the
        worker.

        Aborted saves leave their directories as they were. Other ranks that continue with them, or
        with other asynchronous saves of this process group, raise RankLost. Raises the first error
        of all requests. Raises Busy, without effect, while another thread uses the queue: call it
        again.
        """
        failed: Exception | None = None
        while self._calls and not abort:
            try:
                self.maybe_finalize_async_calls(blocking=True)
            except Busy as error:
                raise error from failed
            except Exception as error:  # noqa: BLE001 - raised below, after all requests
                failed = failed or error
            except BaseException:
                self._end()
                raise
        self._end()
        if failed is not None:
            raise failed

    def end(self, raised: BaseException | None) -> None:
        """Finalize all requests at the end of the process. A loss is logged as an ERROR.

        ``raised``: the exception that ends this rank. Other ranks may not come then, so their
        requests are given up; without other ranks the requests are finalized. A worker or rank that
        does not answer for ``EXIT_SECONDS`` is given up.
        """
        saves, seconds = self.status(), limits.EXIT_SECONDS
        self._timeout = min(self._timeout, timedelta(seconds=seconds))
        is_alone = True
        for call in self._calls:
            if (group := call.pending.group) is not None:
                group.timeout = min(group.timeout, seconds)
                is_alone &= group.size == 1
        if raised is None or is_alone:
            raised = attempt(self.close).error
        if raised is not None:
            logger.error(
                "the process ends (%r) before these saves are committed on all ranks: %s",
                raised,
                saves,
            )
            self.close(abort=True)

    def _end(self) -> None:
        while self._calls:
            self._give_up(self._calls[0])
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        # No save of this queue follows a load.
        POOL.is_expecting = False
        POOL.free_guess()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        lock = self._lock
        if not lock.acquire(blocking=False):
            raise Busy(
                "another thread is using this AsyncCallsQueue: let it finish first, or give each "
                "thread a queue and a process group of its own (status() and close(abort=True) may "
                "be called from any thread)"
            )
        try:
            yield
        finally:
            lock.release()

    def _get_worker(self) -> Worker:
        if self._worker is None:
            if self.persistent:
                from megackpt.async_save.process_worker import ProcessWorker

                self._worker = ProcessWorker()
            else:
                self._worker = ThreadWorker()
        return self._worker

    def _all_ended(self, call: _Call, blocking: bool, no_dist: bool) -> bool:
        """Whether the oldest request has ended on all ranks, and this thread may finalize it.

        A blocking call votes when the task of this rank ends. Ranks whose tasks have ended wait in
        the vote, so they know at once when the last task ends.
        """
        while call in self._calls:
            task, seconds = call.task, self._timeout.total_seconds()
            now = time.monotonic()
            since_look, call.looked = now - call.looked, now
            began = max(task.moved_at, call.timed_from)
            idle = now - began if task.outcome is None else 0.0
            worker = self._get_worker()
            if idle > min(_HEARTBEAT, seconds) and worker.waits_for_processor():
                # A worker of low priority waits by turns for the disk and for a processor.
                call.timed_from = now - max(idle - since_look, 0.0)
            elif idle > seconds:
                reason = StorageError(
                    f"{task.place}: its worker has not moved a byte for {idle:.0f} s and is given "
                    f"up after {task.done} of {task.todo} bytes (timeout {seconds:g} s): check "
                    "the disk; if it is only slow, give the AsyncCallsQueue a longer timeout"
                )
                worker.stop(task, reason)
            try:
                if no_dist:
                    call.agreed = call.agreed or call.progress == ENDED
                else:
                    call.agreed = call.agreed or self._vote(call)
                if call.agreed:
                    call.pending.meet()
            except BaseException as error:
                # This request cannot be finalized any more.
                was_there = self._give_up(call)
                if not was_there and isinstance(error, CheckpointingException):
                    return False  # a signal handler has aborted it
                raise
            if call.agreed or not blocking:
                return call.agreed
            call.task.wait(_HEARTBEAT)
        return False

    def _vote(self, call: _Call) -> bool:
        group = call.pending.meet()
        own = call.progress * _RANKS + group.rank
        name = crc32(call.task.name.encode())
        slowest, least, opposite, stuck = group.lowest(
            [own, name, -name, -int(call.task.stuck)]
        )
        if least != -opposite:
            raise CheckpointingException(
                "Unmatched async calls. The ranks' oldest unfinalized requests differ (here "
                f"{call.task.name!r}): every rank must schedule and finalize the same requests"
            )
        progress, rank = divmod(slowest, _RANKS)
        call.slowest = rank, progress
        call.task.stuck = stuck < 0
        return progress == ENDED

    def _remove(self, call: _Call) -> bool:
        """Remove a request. Returns whether it was in the queue."""
        try:
            self._calls.remove(call)
        except ValueError:
            return False
        if self._calls:
            self._calls[0].timed_from = time.monotonic()
        else:
            _unfinished.pop(self, None)
        return True

    def _give_up(self, call: _Call) -> bool:
        """Remove a request and stop its task. Returns whether it was still in the queue."""
        if not self._remove(call):
            return False
        try:
            self._get_worker().stop(call.task)
            call.pending.give_up()
        except Exception:  # continue with the next one
            logger.exception(
                "%s is given up, but its files were not removed: the next save does that",
                call.task.name,
            )
        return True


@contextmanager
def _given_up_if_interrupted(request: AsyncRequest) -> Iterator[None]:
    """Give up a request on an error: other ranks may have scheduled the request."""
    try:
        yield
    except BaseException:
        if isinstance(request[0], Pending) and not request[0].ended:
            request[0].give_up()
        raise


def _end_of_process() -> None:
    """Finalize saves in flight. Leave threads whose disk may hang."""
    for queue in list(_unfinished):
        queue.end(getattr(sys, "last_value", None))  # the exception that was printed
    # Python waits for the threads of pools, also for daemon threads whose disk hangs.
    threads = getattr(concurrent.futures.thread, "_threads_queues", {})
    for thread in list(threads):
        if thread.daemon and thread.name.startswith("megackpt-"):
            threads.pop(thread, None)


def _forked() -> None:
    """In a forked child: the requests and their files belong to the parent."""
    for queue in list(_unfinished):
        queue._calls.clear()
        queue._worker = None
        queue._lock = threading.RLock()
    _unfinished.clear()


# This must run before the interpreter joins the threads of pools, which would finish writing first.
# Hooks run in reverse order.
getattr(threading, "_register_atexit", atexit.register)(_end_of_process)
os.register_at_fork(after_in_child=_forked)
