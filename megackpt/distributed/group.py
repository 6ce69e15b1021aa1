"""Ranks that work together: the four things they do with one another, and how the error of one reaches all.

``Group`` is the door. ``RankGroup`` writes it once over primitives that only move bytes, so that real
processes and the threads of a test behave alike; ``SingleGroup`` is a process that is alone.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, cast

from megackpt.distributed.failures import (
    DEPARTURES,
    Attempt,
    Failure,
    alone,
    coordinators,
    everybodys,
    parted,
)
from megackpt.distributed.streams import Stream, Swap, hand_over, within
from megackpt.errors import CheckpointingException, RankLost

T = TypeVar("T")
U = TypeVar("U")

Packed = bytes | memoryview

Streams = Mapping[int, Stream]
"""For each other rank what passes between it and this one."""

_NO_TOKEN = -(2**63) + 1


class Mark(NamedTuple):
    """Which of a group's calls began something whose later steps are to come, and how long its ranks wait in them."""

    call: int = 0
    timeout: timedelta | None = None


class Busy(CheckpointingException):
    """Another thread of this process is at work over the same ranks. Nothing has been sent."""


class Group(ABC):
    """Ranks that save or load together; rank 0 is the coordinator.

    All of them make the same calls in the same order. An exception of any rank's ``work``, or of the
    coordinator's ``decide``, is raised on every rank: if all failures are of one class of ours, as that
    class with a text that names the ranks, otherwise as RankFailure. A rank that is gone, or does not answer
    in time, is a RankFailure as well. KeyboardInterrupt and SystemExit pass through where they happen.
    """

    rank: int
    size: int

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def __enter__(self) -> Group:
        """One save or load of one thread; of another thread none can begin meanwhile where ranks are processes."""
        return self

    def __exit__(self, *_: object) -> None:  # noqa: B027 - threads and single processes keep no order
        """It is over."""

    def mark(self) -> Mark:
        """For something that is being begun now: see ``resumed``."""
        return Mark()

    def resumed(self, since: Mark) -> Group:  # noqa: ARG002 - threads and single processes lose nobody
        """For a later step of something begun before: enter what this returns. Raises as ``group_over`` does.

        RankLost, too, if ranks have lost one another in the call of this mark or since: some of them gave it up then.
        Until it is entered and left no other thread comes between. A step that was refused (Busy) may be tried again.
        """
        return self

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """If this process is being ended within, the others hear of it at once."""
        yield

    def parted(self, what: str, since: Mark, patience: float) -> bool:  # noqa: ARG002 - as above
        """This rank gives up what was begun at this mark. On the coordinator: have all, or do so in that many seconds?

        Not collective: other ranks may have done so, do so later, or never. Those that go on with it hear RankLost.
        """
        return True

    def confirm(self) -> None:  # noqa: B027 - threads and single processes are not stopped apart
        """Before a step that cannot be undone: raises RankLost if the other ranks have given this call up."""

    @abstractmethod
    def lowest(self, numbers: Sequence[int]) -> list[int]:
        """For each place the lowest number of all ranks (of 64 bits, as many on each). One tiny message."""

    def all_agree(self, token: int | None) -> bool:
        """True on every rank if all ranks passed the same token, none of them None. One tiny message.

        Tokens are compared by their lowest 63 bits.
        """
        # The least of t and the least of -t are opposites exactly if all t are equal; no token is in between.
        pair = (
            [_NO_TOKEN, _NO_TOKEN]
            if token is None
            else [token % 2**63, -(token % 2**63)]
        )
        least, opposite = self.lowest(pair)
        return least == -opposite

    @abstractmethod
    def reduce_scatter(
        self,
        stage: str,
        work: Callable[[], T],
        decide: Callable[[list[T]], Sequence[U]],
    ) -> U:
        """One gather, one scatter: ``work`` on every rank, ``decide`` on the coordinator over all results in
        rank order, and each rank gets its element. Any exception anywhere is raised on every rank."""

    @abstractmethod
    def reduce_broadcast(
        self, stage: str, work: Callable[[], T], decide: Callable[[list[T]], U]
    ) -> U:
        """One gather, one broadcast: as reduce_scatter, but all ranks get the same value."""

    @abstractmethod
    def broadcast(self, stage: str, decide: Callable[[], U]) -> U:
        """One broadcast: ``decide`` on the coordinator; all ranks get its value, or raise its exception."""

    @abstractmethod
    def exchange(
        self, stage: str, streams: Callable[[], tuple[Streams, Streams]]
    ) -> None:
        """Hand each rank (by number) its stream, and take from each rank what it hands this one; then one gather and
        one broadcast. ``streams`` gives what goes out and what comes in: what one end passes the other awaits, with as
        many bytes. An error of any stream is raised on every rank.
        """


class SingleGroup(Group):
    """One process alone. Nothing is sent or copied; our own errors pass unchanged, others as RankFailure."""

    rank = 0
    size = 1

    def lowest(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def reduce_scatter(
        self,
        stage: str,
        work: Callable[[], T],
        decide: Callable[[list[T]], Sequence[U]],
    ) -> U:
        with _telling(stage):
            return _one_each(decide([work()]), 1)[0]

    def reduce_broadcast(
        self, stage: str, work: Callable[[], T], decide: Callable[[list[T]], U]
    ) -> U:
        with _telling(stage):
            return decide([work()])

    def broadcast(self, stage: str, decide: Callable[[], U]) -> U:
        with _telling(stage):
            return decide()

    def exchange(
        self, stage: str, streams: Callable[[], tuple[Streams, Streams]]
    ) -> None:
        with _telling(stage):
            Attempt(None, _exchanged(self, *streams(), lambda *_: within)).get()


@dataclass(frozen=True, slots=True)
class _Verdict:
    """A message that is an exception for everybody to raise."""

    error: CheckpointingException


@dataclass(frozen=True, slots=True)
class _Done(Generic[T]):
    """A step that this rank has made: its result or what stopped it, and the message that tells so."""

    packed: Packed
    value: T | None = None
    error: BaseException | None = None
    verdict: CheckpointingException | None = None

    def settled(self, own: BaseException | None = None) -> T:
        """The value; or raise everybody's exception, from this rank's own where it has one."""
        if self.verdict is not None:
            _raise(self.verdict, own if self.error is self.verdict else self.error)
        return cast("T", self.value)


class RankGroup(Group):
    """Several ranks, over primitives that move bytes. A message is a pickled value, Failure or _Verdict."""

    _step = 0  # how many steps this rank has begun; on all ranks the same

    @abstractmethod
    def _lowest(self, numbers: Sequence[int]) -> list[int]:
        """What ``lowest`` says."""

    @abstractmethod
    def _gather(self, stage: str, packed: Packed) -> list[Packed] | None:
        """On the coordinator the messages of all ranks in rank order; None elsewhere."""

    @abstractmethod
    def _scatter(self, stage: str, packed: Sequence[Packed] | None) -> Packed:
        """The coordinator's message for this rank; only the coordinator passes any."""

    @abstractmethod
    def _broadcast(self, stage: str, packed: Packed | None) -> Packed:
        """The coordinator's message; only the coordinator passes one."""

    @abstractmethod
    def _swap(
        self, stage: str, to: int, leaving: memoryview, source: int, coming: memoryview
    ) -> Callable[[], None]:
        """Begin to send one rank some bytes and to receive some from another; what is returned waits for both.

        Messages between two ranks arrive in the order in which they were begun. Empty ones are not sent.
        """

    @abstractmethod
    def _leave(self, reason: BaseException) -> None:
        """This rank cannot go on in the middle of a step: let the others know, without waiting."""

    def lowest(self, numbers: Sequence[int]) -> list[int]:
        self._step += 1
        with self.leaving():
            return self._lowest(numbers)

    def reduce_scatter(
        self,
        stage: str,
        work: Callable[[], T],
        decide: Callable[[list[T]], Sequence[U]],
    ) -> U:
        self._step += 1
        with self.leaving():
            mine = self._worked(work)
            gathered = self._gather(stage, mine.packed)
            if gathered is None:
                return cast(
                    "U", self._opened(stage, self._scatter(stage, None), mine.error)
                )
            replies = _decided(
                stage,
                lambda: self._replies(stage, gathered, mine, decide),
                pack=_packed_already,
            )
            reply = self._scatter(stage, replies.value or [replies.packed] * self.size)
            replies.settled(mine.error)
            return cast("U", self._opened(stage, reply))

    def reduce_broadcast(
        self, stage: str, work: Callable[[], T], decide: Callable[[list[T]], U]
    ) -> U:
        self._step += 1
        with self.leaving():
            mine = self._worked(work)
            gathered = self._gather(stage, mine.packed)
            if gathered is None:
                return cast(
                    "U", self._opened(stage, self._broadcast(stage, None), mine.error)
                )
            decided = _decided(
                stage, lambda: decide(self._results(stage, gathered, mine))
            )
            self._broadcast(stage, decided.packed)
            return decided.settled(mine.error)

    def broadcast(self, stage: str, decide: Callable[[], U]) -> U:
        self._step += 1
        with self.leaving():
            if not self.is_coordinator:
                return cast("U", self._opened(stage, self._broadcast(stage, None)))
            decided = _decided(stage, decide)
            self._broadcast(stage, decided.packed)
            return decided.settled()

    def exchange(
        self, stage: str, streams: Callable[[], tuple[Streams, Streams]]
    ) -> None:
        def swap(to: int, source: int) -> Swap:
            return (
                within
                if to == self.rank
                else lambda out, into: self._swap(stage, to, out, source, into)
            )

        with (
            self.leaving(),
            self._parting(stage),
        ):  # as where there is no memory for a window
            error = _exchanged(self, *streams(), swap)
        self.reduce_broadcast(stage, Attempt(None, error).get, len)

    def _worked(self, work: Callable[[], T]) -> _Done[T]:
        try:
            value = work()
            return _Done(_pack(value), value)
        except DEPARTURES:
            raise
        except BaseException as error:  # noqa: BLE001  # torch raises some that are no Exception; all are told
            return _Done(_pack(Failure.of(self.rank, error)), error=error)

    def _results(self, stage: str, gathered: list[Packed], mine: _Done[T]) -> list[T]:
        """All ranks' results; raises everybody's exception if any rank failed."""
        failures: list[Failure] = []
        results: list[T] = []
        for rank, packed in enumerate(gathered):
            # What this rank has made itself it need not unpack.
            value = (
                mine.value
                if rank == self.rank and mine.error is None
                else pickle.loads(packed)
            )
            if isinstance(value, Failure):
                failures.append(value)
            else:
                results.append(cast("T", value))
        if failures:
            raise everybodys(stage, failures, self.size)
        return results

    def _replies(
        self,
        stage: str,
        gathered: list[Packed],
        mine: _Done[T],
        decide: Callable[[list[T]], Sequence[U]],
    ) -> list[Packed]:
        replies = _one_each(decide(self._results(stage, gathered, mine)), self.size)
        return [_pack(reply) for reply in replies]

    def _opened(
        self, stage: str, packed: Packed, own: BaseException | None = None
    ) -> Any:
        """The value of a message; or raise the exception that it holds, from this rank's own where it has one.

        A rank that cannot open it leaves, which the others hear of in the next message of the same operation: the last
        one is of plain values.
        """
        with self._parting(stage):  # a value's own code makes it anew
            value = pickle.loads(packed)
        if isinstance(value, _Verdict):
            _raise(value.error, own)
        return value

    @contextmanager
    def leaving(self) -> Iterator[None]:
        try:
            yield
        except DEPARTURES as reason:
            self._leave(reason)
            raise

    @contextmanager
    def _parting(self, stage: str) -> Iterator[None]:
        """What goes wrong here is heard of by nobody: this rank leaves, so that the others do not wait for it."""
        try:
            yield
        except (RankLost, *DEPARTURES):
            raise
        except BaseException as error:
            self._leave(error)
            raise parted(stage, self.rank, error) from error


def _exchanged(
    group: Group,
    outgoing: Mapping[int, Stream],
    incoming: Mapping[int, Stream],
    swap: Callable[[int, int], Swap],
) -> BaseException | None:
    """In each turn ranks give to the one so far above them and take from the one so far below: none waits in a ring.

    Returns the first error of a stream.
    """
    given = {(rank - group.rank) % group.size for rank in outgoing}
    taken = {(group.rank - rank) % group.size for rank in incoming}
    for distance in sorted(given | taken):
        to, source = (
            (group.rank + distance) % group.size,
            (group.rank - distance) % group.size,
        )
        nothing = Stream(0, ())
        hand_over(
            outgoing.get(to, nothing), incoming.get(source, nothing), swap(to, source)
        )
    errors = (stream.error for stream in (*outgoing.values(), *incoming.values()))
    return next((error for error in errors if error is not None), None)


def _pack(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _decided(
    stage: str, decide: Callable[[], U], pack: Callable[[U], bytes] = _pack
) -> _Done[U]:
    """The coordinator's step. Packed at once, so that what cannot be sent is an error on all ranks."""
    try:
        value = decide()
        return _Done(pack(value), value)
    except (RankLost, *DEPARTURES):  # of a RankLost, the others know already
        raise
    except BaseException as error:  # noqa: BLE001  # as above; the caller raises it once all ranks are told
        verdict = coordinators(stage, error)
        return _Done(_pack(_Verdict(verdict)), error=error, verdict=verdict)


def _packed_already(_: object) -> bytes:
    return b""


def _raise(error: CheckpointingException, own: BaseException | None) -> NoReturn:
    if own is None:
        raise error
    raise error from own


def _one_each(parts: Sequence[U], size: int) -> Sequence[U]:
    if len(parts) != size:
        raise ValueError(f"{len(parts)} values to scatter over {size} ranks")
    return parts


@contextmanager
def _telling(stage: str) -> Iterator[None]:
    try:
        yield
    except (CheckpointingException, *DEPARTURES):
        raise
    except BaseException as error:
        raise alone(stage, error) from error
