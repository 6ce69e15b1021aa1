"""Groups of ranks: their collective steps, and how the error of one rank reaches all.

``Group`` is the interface. ``RankGroup`` implements it over primitives that only move bytes, so
that processes and the threads of a test behave in the same way; ``SingleGroup`` is a single
process.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from megackpt.distributed.failures import (
    DEPARTURES,
    Attempt,
    Failure,
    for_all_ranks,
    of_coordinator,
    of_single_process,
    parted,
)
from megackpt.distributed.streams import Stream, copy
from megackpt.distributed.wire_format import compress, pack, unpack
from megackpt.errors import CheckpointingException, RankLost

T = TypeVar("T")
U = TypeVar("U")

Packed = bytes | memoryview

Streams = Mapping[int, Stream]
"""For each other rank the bytes between it and this one."""

_NO_TOKEN = -(2**63) + 1


class Busy(CheckpointingException):
    """Another thread of this process is using the same ranks. No message has been sent."""


class Group(ABC):
    """Ranks that save or load together; rank 0 is the coordinator.

    All of them make the same calls in the same order. An exception of any rank's ``work``, or of
    the coordinator's ``decide``, is raised on every rank: if all failures have one class of
    megackpt, as that class with a text that names the ranks, otherwise as RankFailure. A rank that
    is gone, or does not answer in time, is a RankLost, a subclass of RankFailure.
    KeyboardInterrupt and SystemExit pass through where they happen.
    """

    rank: int
    size: int
    timeout: float = math.inf
    """Seconds that ranks wait for one another."""

    @property
    def lost_at(self) -> float:
        """The ``time.monotonic()`` at which this rank knew of lost ranks; infinite if unknown."""
        return math.inf

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    @property
    def identity(self) -> Hashable:
        """The same object for all groups over the same ranks."""
        return self

    def __enter__(self) -> Group:
        """Start one save or load. Where ranks are processes, other threads cannot start one
        meanwhile.

        A later stage of the same save may enter again, on any thread.
        """
        return self

    def __exit__(  # noqa: B027 - a single process has no peers
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        """End the save or load. All ranks learn at once of an error that only this rank has."""

    def give_up(self) -> None:  # noqa: B027 - as above
        """Let the save fail on all ranks. Not collective; all other ranks raise RankLost."""

    def confirm(self) -> None:  # noqa: B027 - as above
        """On the coordinator before the commit: raise RankLost unless all ranks wait."""

    @abstractmethod
    def lowest(self, numbers: Sequence[int]) -> list[int]:
        """The element-wise minimum over all ranks (64 bits each, as many on each rank)."""

    def all_agree(self, token: int | None) -> bool:
        """True on every rank if all ranks passed the same token, none of them None. One tiny
        message.

        Tokens are compared by their lowest 63 bits.
        """
        # The least of t and the least of -t are opposites exactly if all t are equal; no token is
        # in between.
        pair = [_NO_TOKEN, _NO_TOKEN]
        if token is not None:
            pair = [token % 2**63, -(token % 2**63)]
        least, opposite = self.lowest(pair)
        return least == -opposite

    @abstractmethod
    def reduce_scatter(
        self,
        stage: str,
        work: Callable[[], T],
        decide: Callable[[list[T]], Sequence[U]],
    ) -> U:
        """One gather, one scatter: ``work`` on every rank, ``decide`` on the coordinator over all
        results in rank order, and each rank gets its element. Any exception anywhere is raised on
        every rank."""

    @abstractmethod
    def reduce_broadcast(
        self, stage: str, work: Callable[[], T], decide: Callable[[list[T]], U]
    ) -> U:
        """One gather, one broadcast: as reduce_scatter, but all ranks get the same value."""

    @abstractmethod
    def broadcast(self, stage: str, decide: Callable[[], U]) -> U:
        """One broadcast: ``decide`` on the coordinator; all get its value or its exception."""

    @abstractmethod
    def exchange(
        self, stage: str, streams: Callable[[], tuple[Streams, Streams]]
    ) -> None:
        """Send each rank (by number) its stream and receive one from each; then one gather, one
        broadcast.

        ``streams`` returns the outgoing and the incoming ones; both ends must agree on their sizes.
        An error of any stream is raised on every rank.
        """


class SingleGroup(Group):
    """One process, without messages. Our errors pass unchanged, foreign ones as RankFailure."""

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
            return decide([work()])[0]

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
            outgoing, incoming = streams()
            _copy_own(outgoing, incoming, 0)
            Attempt(None, _first_error(outgoing, incoming)).get()


@dataclass(frozen=True, slots=True)
class _ErrorReply:
    """A message that is an exception for all ranks to raise."""

    error: CheckpointingException


class RankGroup(Group):
    """Several ranks, over primitives that move bytes.

    A message is a packed value, Failure or _ErrorReply.
    """

    def _begin(self, stage: str) -> None:
        """A collective step begins, on all ranks."""

    def _introduce(self, stage: str, targets: Iterable[int]) -> None:
        """Before this rank sends bytes to these."""

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
    def _transfer(
        self, stage: str, to: int, outgoing: Stream, source: int, incoming: Stream
    ) -> None:
        """Send a stream to one rank, and receive one from another. Empty ones are not sent."""

    @abstractmethod
    def _leave(self, reason: BaseException) -> None:
        """Notify all ranks that this one leaves, without waiting for them."""

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        # The collective steps raise errors of this package on all ranks.
        if error is not None and not isinstance(error, CheckpointingException):
            self._leave(error)

    def lowest(self, numbers: Sequence[int]) -> list[int]:
        with self._step("vote"):
            return self._lowest(numbers)

    def reduce_scatter(
        self,
        stage: str,
        work: Callable[[], T],
        decide: Callable[[list[T]], Sequence[U]],
    ) -> U:
        with self._step(stage):
            own, packed = self._perform(work)
            gathered = self._gather(stage, packed)
            if gathered is None:
                reply = self._scatter(stage, None)
                return cast("U", self._unpack(stage, reply, own.error))

            def decide_all() -> tuple[U, list[Packed]]:
                parts = decide(self._results(stage, gathered, own))
                if len(parts) != self.size:
                    raise ValueError(
                        f"{len(parts)} values to scatter over {self.size} ranks"
                    )
                return parts[0], [pack(part) for part in parts]

            def refuse(message: Packed) -> None:
                self._scatter(stage, [message] * self.size)

            value, messages = self._decide(stage, decide_all, refuse, own.error)
            self._scatter(stage, messages)
            return value

    def reduce_broadcast(
        self, stage: str, work: Callable[[], T], decide: Callable[[list[T]], U]
    ) -> U:
        with self._step(stage):
            own, packed = self._perform(work)
            gathered = self._gather(stage, packed)
            if gathered is None:
                reply = self._broadcast(stage, None)
                return cast("U", self._unpack(stage, reply, own.error))

            return self._decide_and_broadcast(
                stage, lambda: decide(self._results(stage, gathered, own)), own.error
            )

    def broadcast(self, stage: str, decide: Callable[[], U]) -> U:
        with self._step(stage):
            if self.is_coordinator:
                return self._decide_and_broadcast(stage, decide)
            return cast("U", self._unpack(stage, self._broadcast(stage, None)))

    def exchange(
        self, stage: str, streams: Callable[[], tuple[Streams, Streams]]
    ) -> None:
        nothing = Stream(0, ())
        with self._step(stage):  # after an error, such as no memory, the rank leaves
            outgoing, incoming = streams()
            self._introduce(stage, outgoing)
            _copy_own(outgoing, incoming, self.rank)
            # In turn d, ranks send to the rank d above and receive from the one d below.
            for distance in range(1, self.size):
                to = (self.rank + distance) % self.size
                source = (self.rank - distance) % self.size
                if to in outgoing or source in incoming:
                    out, into = outgoing.get(to, nothing), incoming.get(source, nothing)
                    self._transfer(stage, to, out, source, into)
        error = _first_error(outgoing, incoming)
        self.reduce_broadcast(stage, Attempt(None, error).get, len)

    @contextmanager
    def _step(self, stage: str) -> Iterator[None]:
        """A collective step of all ranks.

        After an error that only this rank has, no other rank waits for it.
        """
        self._begin(stage)
        try:
            yield
        except CheckpointingException:
            raise  # on all ranks
        except BaseException as error:
            self._leave(error)
            if isinstance(error, DEPARTURES):
                raise
            raise parted(stage, self.rank, error) from error

    def _perform(self, work: Callable[[], T]) -> tuple[Attempt[T], Packed]:
        """This rank's result, and the message with it or with its error."""
        try:
            value = work()
            return Attempt(value), pack(value)
        except DEPARTURES:
            raise
        except BaseException as error:  # noqa: BLE001 - torch has some; raised on all ranks
            return Attempt(None, error), pack(Failure.of(self.rank, error))

    def _results(self, stage: str, gathered: list[Packed], own: Attempt[T]) -> list[T]:
        """All ranks' results. Raises the exception of all ranks if any rank failed."""
        failures: list[Failure] = []
        results: list[T] = []
        for rank, packed in enumerate(gathered):
            if rank == self.rank and own.error is None:
                results.append(cast("T", own.value))  # needs no unpacking
                continue
            value = unpack(packed, rank)
            if isinstance(value, Failure):
                failures.append(value)
            else:
                results.append(value)
        if failures:
            raise for_all_ranks(stage, failures, self.size)
        return results

    def _decide_and_broadcast(
        self, stage: str, decide: Callable[[], U], own: BaseException | None = None
    ) -> U:
        def decide_one() -> tuple[U, Packed]:
            value = decide()
            return value, compress(pack(value))

        def refuse(message: Packed) -> None:
            self._broadcast(stage, message)

        value, message = self._decide(stage, decide_one, refuse, own)
        self._broadcast(stage, message)
        return value

    def _decide(
        self,
        stage: str,
        decide: Callable[[], U],
        refuse: Callable[[Packed], None],
        own: BaseException | None,
    ) -> U:
        """The coordinator's decision. It packs the messages as well, as that may fail.

        An error is sent by ``refuse``, and raised on all ranks.
        """
        try:
            return decide()
        except (RankLost, *DEPARTURES):  # all ranks know of a RankLost already
            raise
        except BaseException as error:
            verdict = of_coordinator(stage, error)
            refuse(pack(_ErrorReply(verdict)))
            if verdict is error and own is None:
                raise
            raise verdict from (own if verdict is error else error)

    def _unpack(
        self, stage: str, packed: Packed, own: BaseException | None = None
    ) -> Any:
        """The value of a message. Raises the exception that it holds, ``from`` this rank's ``own``.

        A rank that cannot unpack the message leaves. All other ranks notice at the next message of
        the operation. The last message has plain values only.
        """
        try:
            value = unpack(packed)
        except CheckpointingException as error:
            self._leave(error)
            raise parted(stage, self.rank, error) from error
        if not isinstance(value, _ErrorReply):
            return value
        raise value.error from own


def _copy_own(outgoing: Streams, incoming: Streams, rank: int) -> None:
    if rank in outgoing:
        copy(outgoing[rank].pieces(), incoming[rank].pieces())


def _first_error(outgoing: Streams, incoming: Streams) -> BaseException | None:
    for stream in (*outgoing.values(), *incoming.values()):
        if stream.error is not None:
            return stream.error
    return None


@contextmanager
def _own_errors(stage: str) -> Iterator[None]:
    try:
        yield
    except (CheckpointingException, *DEPARTURES):
        raise
    except BaseException as error:
        raise of_single_process(stage, error) from error
