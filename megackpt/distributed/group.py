"""Groups of ranks: their collective steps, and how the error of one rank reaches all.

``Group`` is the interface. ``RankGroup`` implements it over primitives that only move bytes, so that
processes and the threads of a test behave alike; ``SingleGroup`` is a single process.
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
    for_all_ranks,
    of_coordinator,
    of_single_process,
    parted,
)
from megackpt.distributed.streams import Stream, Swap, hand_over, within
from megackpt.errors import CheckpointingException, RankLost

T = TypeVar("T")
U = TypeVar("U")

Packed = bytes | memoryview

Streams = Mapping[int, Stream]
"""For each other rank the bytes between it and this one."""

_NO_TOKEN = -(2**63) + 1


class Mark(NamedTuple):
    """The call of a group that started an operation with later steps, and the timeout of these."""

    call: int = 0
    timeout: timedelta | None = None


class Busy(CheckpointingException):
    """Another thread of this process is using the same ranks. Nothing has been sent."""


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
        """Start one save or load. Where ranks are processes, other threads cannot start one meanwhile."""
        return self

    def __exit__(self, *_: object) -> None:  # noqa: B027 - threads and single processes keep no order
        """End it."""

    def mark(self) -> Mark:
        """A mark for an operation that starts now: see ``resumed``."""
        return Mark()

    def resumed(self, since: Mark) -> Group:  # noqa: ARG002 - threads and single processes lose nobody
        """The group for a later step of the operation of a mark; enter it as a context.

        No other thread can use the group until it was entered and left. Raises as ``group_over`` does,
        and RankLost if the connection has failed since the mark. A step that was refused (Busy) may be
        tried again.
        """
        return self

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """If this process is ended inside the block, the other ranks are notified at once."""
        yield

    def parted(self, what: str, since: Mark, patience: float) -> bool:  # noqa: ARG002 - as above
        """Give up the operation of a mark, on this rank.

        Returns, on the coordinator, whether all ranks have given it up within ``patience`` seconds. Not
        collective: ranks that continue with the operation raise RankLost.
        """
        return True

    def confirm(self) -> None:  # noqa: B027 - threads and single processes are not stopped apart
        """Before a step that cannot be undone: raise RankLost if other ranks have given up this call."""

    @abstractmethod
    def lowest(self, numbers: Sequence[int]) -> list[int]:
        """The element-wise minimum over all ranks (64 bits each, as many on each rank). One tiny message."""

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
        """Send each rank (by number) its stream and receive one from each; then one gather, one broadcast.

        ``streams`` returns the outgoing and the incoming ones; both ends must agree on their sizes. An
        error of any stream is raised on every rank.
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
        with _own_errors(stage):
            return _one_each(decide([work()]), 1)[0]

    def reduce_broadcast(
        self, stage: str, work: Callable[[], T], decide: Callable[[list[T]], U]
    ) -> U:
        with _own_errors(stage):
            return decide([work()])

    def broadcast(self, stage: str, decide: Callable[[], U]) -> U:
        with _own_errors(stage):
            return decide()

    def exchange(
        self, stage: str, streams: Callable[[], tuple[Streams, Streams]]
    ) -> None:
        with _own_errors(stage):
            Attempt(None, _exchanged(self, *streams(), lambda *_: within)).get()


@dataclass(frozen=True, slots=True)
class _ErrorReply:
    """A message that is an exception for all ranks to raise."""

    error: CheckpointingException


@dataclass(frozen=True, slots=True)
class _Done(Generic[T]):
    """The finished step of this rank: its result or error, and the message with it."""

    packed: Packed
    value: T | None = None
    error: BaseException | None = None
    verdict: CheckpointingException | None = None

    def settled(self, own: BaseException | None = None) -> T:
        """The value. Raises the exception of all ranks, from this rank's own if there is one."""
        if self.verdict is not None:
            _raise(self.verdict, own if self.error is self.verdict else self.error)
        return cast("T", self.value)


class RankGroup(Group):
    """Several ranks, over primitives that move bytes. A message is a pickled value, Failure or _ErrorReply."""

    _step = 0  # the number of steps so far; the same on all ranks

    @abstractmethod
    def _lowest(self, numbers: Sequence[int]) -> list[int]:
        """See ``lowest``."""

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
        """Start to send bytes to one rank and to receive some from another; the result waits for both.

        Messages between two ranks arrive in the order of their calls. Empty ones are not sent.
        """

    @abstractmethod
    def _leave(self, reason: BaseException) -> None:
        """Notify the other ranks that this one leaves in the middle of a step, without waiting."""

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
            mine = self._perform(work)
            gathered = self._gather(stage, mine.packed)
            if gathered is None:
                return cast(
                    "U", self._unpack(stage, self._scatter(stage, None), mine.error)
                )
            replies = _decided(
                stage,
                lambda: self._replies(stage, gathered, mine, decide),
                pack=_packed_already,
            )
            reply = self._scatter(stage, replies.value or [replies.packed] * self.size)
            replies.settled(mine.error)
            return cast("U", self._unpack(stage, reply))

    def reduce_broadcast(
        self, stage: str, work: Callable[[], T], decide: Callable[[list[T]], U]
    ) -> U:
        self._step += 1
        with self.leaving():
            mine = self._perform(work)
            gathered = self._gather(stage, mine.packed)
            if gathered is None:
                return cast(
                    "U", self._unpack(stage, self._broadcast(stage, None), mine.error)
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
                return cast("U", self._unpack(stage, self._broadcast(stage, None)))
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

    def _perform(self, work: Callable[[], T]) -> _Done[T]:
        try:
            value = work()
            return _Done(_pack(value), value)
        except DEPARTURES:
            raise
        except BaseException as error:  # noqa: BLE001  # torch raises BaseExceptions; raised on all ranks
            return _Done(_pack(Failure.of(self.rank, error)), error=error)

    def _results(self, stage: str, gathered: list[Packed], mine: _Done[T]) -> list[T]:
        """All ranks' results. Raises the exception of all ranks if any rank failed."""
        failures: list[Failure] = []
        results: list[T] = []
        for rank, packed in enumerate(gathered):
            # The own result needs no unpacking.
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
            raise for_all_ranks(stage, failures, self.size)
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

    def _unpack(
        self, stage: str, packed: Packed, own: BaseException | None = None
    ) -> Any:
        """The value of a message. Raises the exception that it holds, from this rank's own if there is one.

        A rank that cannot unpack it leaves; the others notice at the next message of the operation. The
        last message has plain values only.
        """
        with self._parting(stage):  # unpickling runs the code of the value's class
            value = pickle.loads(packed)
        if isinstance(value, _ErrorReply):
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
        """No later message reports an error in this block: the rank leaves, so that no other waits for it."""
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
    """In turn d, ranks send to the rank d above and receive from the one d below, so none waits in a ring.

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
    except BaseException as error:  # noqa: BLE001  # as above; raised after all ranks know
        verdict = of_coordinator(stage, error)
        return _Done(_pack(_ErrorReply(verdict)), error=error, verdict=verdict)


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
def _own_errors(stage: str) -> Iterator[None]:
    try:
        yield
    except (CheckpointingException, *DEPARTURES):
        raise
    except BaseException as error:
        raise of_single_process(stage, error) from error
