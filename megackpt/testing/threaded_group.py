"""Ranks as threads of this process.

``ThreadedGroup`` is the Group of real ranks but for the primitives that move bytes. Its ranks meet
for each collective and name it, so that ranks at different collectives fail instead of waiting for
one another until the timeout.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

from megackpt import events
from megackpt.adapters.dtensor import thread_rank
from megackpt.distributed import RankGroup, Stream, Streams
from megackpt.distributed.failures import departure
from megackpt.distributed.streams import copy
from megackpt.errors import RankLost, name_ranks
from megackpt.waiting import warn, warn_after

T = TypeVar("T")
Packed = bytes | memoryview


class ThreadedGroup(RankGroup):
    """One of N ranks that are threads. ``log`` names the collectives that it took part in.

    On these threads ``megackpt.sharded``, and a manager's objects, take the rank of the group.
    """

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = meeting.size
        self.log: list[str] = []
        self._meeting = meeting

    @staticmethod
    def run(
        size: int, fn: Callable[[ThreadedGroup], T], timeout: float = 30.0
    ) -> list[T]:
        """Call ``fn`` on each of ``size`` ranks, and return the results.

        Raises the exception of the rank that failed first. ``timeout``: seconds that ranks wait
        for one another; a rank that is missing then is a RankLost.
        """
        results, errors = _run(size, fn, timeout)
        if errors:
            raise errors[0]
        return cast("list[T]", results)

    @staticmethod
    def outcomes(
        size: int, fn: Callable[[ThreadedGroup], T], timeout: float = 30.0
    ) -> list[T | BaseException]:
        """Like ``run``, but return the exception of each rank that raised one as its result."""
        return _run(size, fn, timeout)[0]

    def _lowest(self, numbers: Sequence[int]) -> list[int]:
        votes = self._meet("lowest", "vote", list(numbers))
        return list(map(min, zip(*votes, strict=True)))

    def _gather(self, stage: str, packed: Packed) -> list[Packed] | None:
        everything = self._meet("gather", stage, packed)
        if self.rank:
            return None
        return everything

    def _scatter(self, stage: str, packed: Sequence[Packed] | None) -> Packed:
        return cast("Packed", self._meet("scatter", stage, packed)[0][self.rank])

    def _broadcast(self, stage: str, packed: Packed | None) -> Packed:
        return cast("Packed", self._meet("broadcast", stage, packed)[0])

    def exchange(
        self, stage: str, streams: Callable[[], tuple[Streams, Streams]]
    ) -> None:
        self.log.append("exchange")
        super().exchange(stage, streams)

    def _transfer(
        self, stage: str, to: int, outgoing: Stream, source: int, incoming: Stream
    ) -> None:
        for piece in outgoing.pieces():
            self._meeting.send(self.rank, to, bytes(piece))
        if incoming.nbytes:
            arriving = self._arriving(source, stage, incoming.nbytes)
            copy(arriving, incoming.pieces())

    def _arriving(self, source: int, stage: str, nbytes: int) -> Iterator[memoryview]:
        while nbytes:
            data = self._meeting.receive(self.rank, source, stage)
            nbytes -= len(data)
            yield memoryview(data)

    def _leave(self, reason: BaseException) -> None:
        self._meeting.leave(self.rank, departure(reason))

    def _meet(self, collective: str, stage: str, value: Any) -> list[Any]:
        self.log.append(collective)
        return self._meeting.meet(self.rank, collective, stage, value)


class _Meeting:
    """Where the ranks meet for each collective. The first failure ends it for all."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self._changed = threading.Condition()
        # The current collective: for each rank that came its name and the rank's value.
        self._here: dict[int, tuple[str, Any]] = {}
        self._gone: dict[int, str] = {}
        self._failure: RankLost | None = None
        self._messages: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)

    def meet(self, rank: int, collective: str, stage: str, value: Any) -> list[Any]:
        """Wait for all ranks, and return the values of all in rank order."""
        name = f"{collective} of the stage {stage!r}"
        with self._changed:
            here = self._here
            here[rank] = name, value
            if len(here) == self.size and not self._failure and not self._differ():
                self._here = {}
            self._check()
            self._changed.notify_all()
            if not self._wait(
                lambda: self._here is not here or self._failure, rank, stage
            ):
                self._fail(f"no answer within {self.timeout:g} s from", self._absent())
            if self._here is here:
                self._raise()
            return [here[each][1] for each in range(self.size)]

    def _wait(
        self,
        done: Callable[[], object],
        rank: int,
        stage: str,
        source: int | None = None,
    ) -> bool:
        """Wait at most for the timeout. A long wait is logged, with the missing ranks."""
        after = warn_after()
        if 0 < after < self.timeout and not self._changed.wait_for(done, after):
            whom = name_ranks(self._absent())
            if source is not None:
                whom = name_ranks([source])
            running = events.current().operation
            warn(rank, stage, whom, running.name, running.path, self.timeout)
        return bool(self._changed.wait_for(done, self.timeout))

    def send(self, rank: int, to: int, data: bytes) -> None:
        with self._changed:
            self._messages[rank, to].append(data)
            self._changed.notify_all()

    def receive(self, rank: int, source: int, stage: str) -> bytes:
        """Wait for the next message from ``source`` to this rank."""
        messages = self._messages[source, rank]
        with self._changed:
            self._wait(
                lambda: messages or self._failure or source in self._gone,
                rank,
                stage,
                source,
            )
            if not messages:
                late = f"did not answer within {self.timeout:g} s"
                missing = {source: self._gone.get(source, late)}
                self._fail(
                    f"rank {rank} waits in vain in the stage {stage!r}:", missing
                )
                self._raise()
            return messages.popleft()

    def leave(self, rank: int, reason: str) -> None:
        """Note that this rank comes to no further collective."""
        with self._changed:
            self._gone.setdefault(rank, reason)
            self._check()
            self._changed.notify_all()

    def _differ(self) -> bool:
        return len({name for name, _ in self._here.values()}) > 1

    def _check(self) -> None:
        """Fail if the ranks can never meet: at different collectives, or some are gone."""
        if self._here and self._gone:
            self._fail("the others wait in vain:", self._gone)
        elif self._differ():
            self._fail("the ranks are at different collectives:", {})

    def _absent(self) -> dict[int, str]:
        missing = set(range(self.size)).difference(self._here)
        return dict.fromkeys(sorted(missing), "did not come")

    def _fail(self, text: str, missing: dict[int, str]) -> None:
        if self._failure is None:
            lines = []
            for rank in range(self.size):
                if rank in missing:
                    lines.append(f"rank {rank} {missing[rank]}")
                elif rank in self._here:
                    name, _ = self._here[rank]
                    lines.append(f"rank {rank} is at {name}")
            self._failure = RankLost(f"{text} {'; '.join(lines)}", dict(missing))
        self._changed.notify_all()

    def _raise(self) -> None:
        failure = cast("RankLost", self._failure)
        # A new exception for each rank: their tracebacks differ.
        raise RankLost(str(failure), failure.failures)


def _run(
    size: int, fn: Callable[[ThreadedGroup], T], timeout: float
) -> tuple[list[T | BaseException], list[BaseException]]:
    """Return the result or exception of every rank, and the exceptions in the order of time."""
    meeting = _Meeting(size, timeout)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        thread_rank.set((rank, size))
        try:
            results[rank] = fn(ThreadedGroup(rank, meeting))
            meeting.leave(rank, "has finished")
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            results[rank] = error
            errors.append(error)
            meeting.leave(rank, f"raised {type(error).__name__}: {error}")

    threads = []
    for rank in range(size):
        thread = threading.Thread(
            target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True
        )
        threads.append(thread)
        thread.start()
    for thread in threads:
        thread.join(2 * timeout)
    for rank, thread in enumerate(threads):
        if thread.is_alive():
            stuck = "is still running"
            text = f"rank {rank} {stuck} after {2 * timeout:g} s"
            results[rank] = RankLost(text, {rank: stuck})
            errors.append(results[rank])
    return results, errors
