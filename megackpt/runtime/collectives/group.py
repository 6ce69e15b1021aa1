"""Ranks that work together: the four things they do with one another, and how the error of one reaches all.

``Group`` is the door. ``RankGroup`` writes it once over four primitives that only move bytes, so that real
processes and the threads of a test behave alike; ``SingleGroup`` is a process that is alone.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar, cast

from megackpt.errors import CheckpointingException, RankLost
from megackpt.runtime.collectives.failures import DEPARTURES, Failure, alone, coordinators, everybodys

T = TypeVar("T")
U = TypeVar("U")

Packed = bytes | memoryview


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

    def confirm(self) -> None:  # noqa: B027 - threads and single processes are not stopped apart
        """Before a step that cannot be undone: raises RankLost if the other ranks have given this call up."""

    @abstractmethod
    def all_agree(self, token: int | None) -> bool:
        """True on every rank if all ranks passed the same token, none of them None. One tiny message.

        Tokens are compared by their lowest 63 bits.
        """

    @abstractmethod
    def reduce_scatter(
        self, stage: str, work: Callable[[], T], decide: Callable[[list[T]], Sequence[U]]
    ) -> U:
        """One gather, one scatter: ``work`` on every rank, ``decide`` on the coordinator over all results in
        rank order, and each rank gets its element. Any exception anywhere is raised on every rank."""

    @abstractmethod
    def reduce_broadcast(self, stage: str, work: Callable[[], T], decide: Callable[[list[T]], U]) -> U:
        """One gather, one broadcast: as reduce_scatter, but all ranks get the same value."""

    @abstractmethod
    def broadcast(self, stage: str, decide: Callable[[], U]) -> U:
        """One broadcast: ``decide`` on the coordinator; all ranks get its value, or raise its exception."""


class SingleGroup(Group):
    """One process alone. Nothing is sent or copied; our own errors pass unchanged, others as RankFailure."""

    rank = 0
    size = 1

    def all_agree(self, token: int | None) -> bool:
        return token is not None

    def reduce_scatter(
        self, stage: str, work: Callable[[], T], decide: Callable[[list[T]], Sequence[U]]
    ) -> U:
        with _telling(stage):
            return _one_each(decide([work()]), 1)[0]

    def reduce_broadcast(self, stage: str, work: Callable[[], T], decide: Callable[[list[T]], U]) -> U:
        with _telling(stage):
            return decide([work()])

    def broadcast(self, stage: str, decide: Callable[[], U]) -> U:
        with _telling(stage):
            return decide()


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
    """Several ranks, over four primitives. A message is a pickled value, Failure or _Verdict."""

    @abstractmethod
    def _vote(self, token: int | None) -> bool:
        """What ``all_agree`` says."""

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
    def _leave(self, reason: BaseException) -> None:
        """This process is being ended in the middle of a step: let the others know, without waiting."""

    def all_agree(self, token: int | None) -> bool:
        with self._leaving():
            return self._vote(token)

    def reduce_scatter(
        self, stage: str, work: Callable[[], T], decide: Callable[[list[T]], Sequence[U]]
    ) -> U:
        with self._leaving():
            mine = self._worked(work)
            gathered = self._gather(stage, mine.packed)
            if gathered is None:
                return cast("U", _opened(self._scatter(stage, None), mine.error))
            replies = _decided(
                stage, lambda: self._replies(stage, gathered, mine, decide), pack=_packed_already
            )
            reply = self._scatter(stage, replies.value or [replies.packed] * self.size)
            replies.settled(mine.error)
            return cast("U", pickle.loads(reply))

    def reduce_broadcast(self, stage: str, work: Callable[[], T], decide: Callable[[list[T]], U]) -> U:
        with self._leaving():
            mine = self._worked(work)
            gathered = self._gather(stage, mine.packed)
            if gathered is None:
                return cast("U", _opened(self._broadcast(stage, None), mine.error))
            decided = _decided(stage, lambda: decide(self._results(stage, gathered, mine)))
            self._broadcast(stage, decided.packed)
            return decided.settled(mine.error)

    def broadcast(self, stage: str, decide: Callable[[], U]) -> U:
        with self._leaving():
            if not self.is_coordinator:
                return cast("U", _opened(self._broadcast(stage, None)))
            decided = _decided(stage, decide)
            self._broadcast(stage, decided.packed)
            return decided.settled()

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
            value = mine.value if rank == self.rank and mine.error is None else pickle.loads(packed)
            if isinstance(value, Failure):
                failures.append(value)
            else:
                results.append(cast("T", value))
        if failures:
            raise everybodys(stage, failures, self.size)
        return results

    def _replies(
        self, stage: str, gathered: list[Packed], mine: _Done[T], decide: Callable[[list[T]], Sequence[U]]
    ) -> list[Packed]:
        replies = _one_each(decide(self._results(stage, gathered, mine)), self.size)
        return [_pack(reply) for reply in replies]

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        try:
            yield
        except DEPARTURES as reason:
            self._leave(reason)
            raise


def _pack(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _decided(stage: str, decide: Callable[[], U], pack: Callable[[U], bytes] = _pack) -> _Done[U]:
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


def _opened(packed: Packed, own: BaseException | None = None) -> Any:
    """The value of a message; or raise the exception that it holds, from this rank's own where it has one."""
    value = pickle.loads(packed)
    if isinstance(value, _Verdict):
        _raise(value.error, own)
    return value


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
