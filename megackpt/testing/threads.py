"""Ranks without processes.

``ThreadedGroup`` runs a function on N ranks that are threads of this process. It is the same Group as real
ranks have but for the primitives that move bytes; those meet at a rendezvous where each collective is
named, so that ranks at different collectives stop with an error instead of waiting for one another for ever.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from megackpt.distributed import RankGroup, Streams
from megackpt.distributed.failures import departure
from megackpt.distributed.waiting import Wait
from megackpt.errors import RankLost

T = TypeVar("T")
Packed = bytes | memoryview


class ThreadedGroup(RankGroup):
    """One of N ranks that are threads. ``log`` names the collectives that this rank has taken part in."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = meeting.size
        self.log: list[str] = []
        self._meeting = meeting

    @staticmethod
    def run(
        size: int, fn: Callable[[ThreadedGroup], T], timeout: float = 30.0
    ) -> list[T]:
        """What ``fn`` gives on each of ``size`` ranks; raises the exception of the rank that failed first.

        ``timeout`` is how many seconds the ranks wait for one another; who is missing then is a RankLost.
        """
        outcomes, first = _run(size, fn, timeout)
        if first is not None:
            raise first
        return [cast("T", outcome.value) for outcome in outcomes]

    @staticmethod
    def outcomes(
        size: int, fn: Callable[[ThreadedGroup], T], timeout: float = 30.0
    ) -> list[T | BaseException]:
        """As ``run``, but an exception stands in its rank's place: to see what every single rank raised."""
        outcomes, _ = _run(size, fn, timeout)
        return [cast("T", o.value) if o.error is None else o.error for o in outcomes]

    def _lowest(self, numbers: Sequence[int]) -> list[int]:
        return [
            min(column)
            for column in zip(
                *self._meet("all_agree", "vote", list(numbers)), strict=True
            )
        ]

    def _gather(self, stage: str, packed: Packed) -> list[Packed] | None:
        everything = self._meet("gather", stage, packed)
        return everything if self.rank == 0 else None

    def _scatter(self, stage: str, packed: Sequence[Packed] | None) -> Packed:
        return cast("Packed", self._meet("scatter", stage, packed)[0][self.rank])

    def _broadcast(self, stage: str, packed: Packed | None) -> Packed:
        return cast("Packed", self._meet("broadcast", stage, packed)[0])

    def exchange(
        self, stage: str, streams: Callable[[], tuple[Streams, Streams]]
    ) -> None:
        self.log.append("exchange")
        super().exchange(stage, streams)

    def _swap(
        self, stage: str, to: int, leaving: memoryview, source: int, coming: memoryview
    ) -> Callable[[], None]:
        if leaving:
            self._meeting.post(self.rank, to, bytes(leaving))

        def wait() -> None:
            if coming:
                with Wait(self.rank, stage, lambda _: [source]):
                    coming[:] = self._meeting.fetch(self.rank, source, stage)

        return wait

    def _leave(self, reason: BaseException) -> None:
        self._meeting.leave(self.rank, departure(reason))

    def _meet(self, collective: str, stage: str, brought: Any) -> list[Any]:
        self.log.append(collective)
        with Wait(self.rank, stage, lambda _: self._meeting.awaited_by(self.rank)):
            return self._meeting.meet(
                self.rank, f"{collective} of the stage {stage!r}", brought
            )


@dataclass
class _Round:
    """One collective: who has come, to what, with what."""

    names: dict[int, str] = field(default_factory=dict)
    brought: dict[int, Any] = field(default_factory=dict)
    done: bool = False


class _Meeting:
    """Where the ranks meet for each collective. The first thing that goes wrong ends it for all."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self._changed = threading.Condition()
        self._round = _Round()
        self._gone: dict[int, str] = {}
        self._broken: RankLost | None = None
        self._posted: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)

    def meet(self, rank: int, name: str, brought: Any) -> list[Any]:
        """What all ranks brought to this collective, in rank order."""
        with self._changed:
            now = self._round
            now.names[rank], now.brought[rank] = name, brought
            if (
                not self._broken
                and len(now.names) == self.size
                and len(set(now.names.values())) == 1
            ):
                now.done = True
                self._round = _Round()
            else:
                self._look()
            self._changed.notify_all()
            if not self._changed.wait_for(
                lambda: now.done or self._broken, self.timeout
            ):
                self._break(f"no answer within {self.timeout:g} s from", self._absent())
            if not now.done and self._broken:
                raise RankLost(str(self._broken), self._broken.failures)
            return [now.brought[each] for each in range(self.size)]

    def awaited_by(self, rank: int) -> list[int] | None:
        """Who has not come to the collective in which this rank waits; None if it does not wait any more."""
        with self._changed:
            return list(self._absent()) if rank in self._round.names else None

    def post(self, rank: int, to: int, data: bytes) -> None:
        """A message from one rank to another, which need not be there yet."""
        with self._changed:
            self._posted[rank, to].append(data)
            self._changed.notify_all()

    def fetch(self, rank: int, source: int, stage: str) -> bytes:
        """The next message from ``source`` to this rank."""
        posted = self._posted[source, rank]
        with self._changed:
            if not self._changed.wait_for(
                lambda: posted or self._broken or source in self._gone, self.timeout
            ):
                self._gone.setdefault(
                    source, f"did not answer within {self.timeout:g} s"
                )
            if not posted and not self._broken:
                self._break(
                    f"rank {rank} waits in vain in the stage {stage!r}:",
                    {source: self._gone[source]},
                )
            if not posted and self._broken:
                raise RankLost(str(self._broken), self._broken.failures)
            return posted.popleft()

    def leave(self, rank: int, reason: str) -> None:
        """This rank comes to no further collective."""
        with self._changed:
            self._gone.setdefault(rank, reason)
            self._look()
            self._changed.notify_all()

    def _look(self) -> None:
        """Stop if the ranks can never come together: at different collectives, or some are gone."""
        if self._round.names and self._gone:
            self._break("the others wait in vain:", self._gone)
        elif len(set(self._round.names.values())) > 1:
            self._break("the ranks are at different collectives:", {})

    def _absent(self) -> dict[int, str]:
        return {
            r: "did not come" for r in range(self.size) if r not in self._round.names
        }

    def _break(self, what: str, missing: dict[int, str]) -> None:
        where = {rank: f"is at {name}" for rank, name in self._round.names.items()}
        told = "; ".join(
            f"rank {rank} {word}" for rank, word in sorted({**where, **missing}.items())
        )
        self._broken = self._broken or RankLost(f"{what} {told}", missing)
        self._changed.notify_all()


@dataclass
class _Outcome(Generic[T]):
    value: T | None = None
    error: BaseException | None = None


def _run(
    size: int, fn: Callable[[ThreadedGroup], T], timeout: float
) -> tuple[list[_Outcome[T]], BaseException | None]:
    """The outcome of every rank, and the exception that was raised first."""
    meeting = _Meeting(size, timeout)
    outcomes: list[_Outcome[T]] = [_Outcome() for _ in range(size)]
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            outcomes[rank].value = fn(ThreadedGroup(rank, meeting))
            meeting.leave(rank, "has finished")
        except BaseException as error:  # noqa: BLE001  # told to the other ranks, and raised by the caller
            outcomes[rank].error = error
            errors.append(error)
            meeting.leave(rank, f"raised {type(error).__name__}: {error}")

    threads = [
        threading.Thread(
            target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True
        )
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * timeout)
    stuck = {
        rank: "is still running"
        for rank, thread in enumerate(threads)
        if thread.is_alive()
    }
    for rank, word in stuck.items():
        outcomes[rank].error = RankLost(
            f"rank {rank} {word} after {2 * timeout:g} s", {rank: word}
        )
        errors.append(cast("BaseException", outcomes[rank].error))
    return outcomes, errors[0] if errors else None
