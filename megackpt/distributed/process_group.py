"""Ranks as processes: collective steps of a save or load over the tree of a torch process group.

The caller's group, which may be NCCL's, carries no message. It names the ranks. They find each
other's addresses in the job's store.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet, finalize

import numpy as np

from megackpt import events, limits
from megackpt.distributed.failures import departure
from megackpt.distributed.group import (
    Busy,
    Group,
    Packed,
    RankGroup,
    SingleGroup,
)
from megackpt.distributed.messages import (
    CallFailed,
    CollectiveStep,
    Reason,
    Verdict,
    join,
    split,
)
from megackpt.distributed.rank_tree import Tree
from megackpt.distributed.rendezvous import Address, JobStore
from megackpt.distributed.streams import Stream
from megackpt.errors import CheckpointingException, RankLost, name_ranks

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

Part: TypeAlias = Callable[[CollectiveStep], Coroutine[Any, Any, T]]

GroupLike: TypeAlias = "dist.ProcessGroup | Group | None"
"""None: the default process group, or this process alone."""

DEFAULT_TIMEOUT = timedelta(seconds=limits.RANK_TIMEOUT_SECONDS)
BUSY = (
    "another thread of this process is saving or loading over the same process group: let it "
    "finish first, or give each thread a process group of its own (torch.distributed.new_group, in "
    "the same order on all ranks)"
)
ADVICE = (
    "The trainer's own process groups are as they were, and the next save or load connects afresh. "
    "Where a rank is only slow, give a longer timeout."
)
_MARGIN = 30.0  # seconds; each collective step has a bound, so this is the last resort

_ALONE = SingleGroup()
_known: WeakKeyDictionary[Any, dict[str, Ranks]] = WeakKeyDictionary()
_finding = threading.Lock()


def group_over(
    process_group: GroupLike = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    name: str = "",
    lane: str = "",
) -> Group:
    """The Group for one save or load: over the process group given, the default one, or this
    process alone.

    Every rank of the process group calls this equally often. ``timeout`` is how long the ranks wait
    for one another. They wait twice as long for rank 0, since rank 0 may wait ``timeout`` for other
    ranks. ``name`` says the purpose of the call, with the same text on all ranks: a rank that has
    left a call out passes the numbers of calls with other names. Calls of another ``lane`` have
    separate connections and numbers, so calls of two lanes may run at once. A Group is returned as
    it is.

    Raises RankLost if other ranks have given up this call already, Busy while another thread is in
    a call, CheckpointingException if this process is none of the ranks.
    """
    if isinstance(process_group, Group):
        return process_group
    distributed = sys.modules.get("torch.distributed")
    given: object = timeout  # callers without a type checker give anything
    wrong = None
    if not isinstance(given, timedelta):
        wrong = CheckpointingException(
            f"timeout must be a datetime.timedelta, not {given!r}"
        )
    if distributed is None or not (
        distributed.is_available() and distributed.is_initialized()
    ):
        if process_group is not None:
            wrong = CheckpointingException(
                f"process_group is {process_group!r}, but torch.distributed is not initialised"
            )
        if wrong is not None:
            raise wrong
        return _ALONE
    over = distributed.group.WORLD if process_group is None else process_group
    if not isinstance(over, distributed.ProcessGroup):
        raise CheckpointingException(
            f"process_group must be a process group that this rank is a member of, not {over!r}"
        )
    if over.size() == 1:
        if wrong is not None:
            raise wrong
        return _ALONE
    with _finding:
        lanes = _known.setdefault(over, {})
        ranks = lanes.get(lane)
        if ranks is None:
            ranks = lanes[lane] = Ranks(over, lane)
    if wrong is not None:  # all ranks learn it at once
        with ranks.begin(DEFAULT_TIMEOUT, name) as group:
            group._leave(wrong)
            raise wrong
    return ranks.begin(timeout, name)


def rank_and_size(process_group: Any = None) -> tuple[int, int]:
    """The rank in the group, and its size: (0, 1) where torch.distributed is not initialised."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(process_group), dist.get_world_size(process_group)


def coordinates(process_group: GroupLike) -> bool:
    """Whether this rank is rank 0. Not collective: it counts as no call."""
    if isinstance(process_group, Group):
        return process_group.is_coordinator
    return rank_and_size(process_group)[0] == 0


def domain_of(
    process_group: dist.ProcessGroup | None, called: str = "dedup_group"
) -> int:
    """A number that names these ranks among all ranks: the lowest (0 for None: all ranks)."""
    if process_group is None:
        return 0
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not isinstance(process_group, distributed.ProcessGroup):
        raise CheckpointingException(
            f"{called} must be a process group that this rank is a member of, not {process_group!r}"
        )
    try:
        return int(min(distributed.get_process_group_ranks(process_group)))
    except KeyError:
        raise CheckpointingException(
            f"{called} is a process group that has been destroyed, {process_group!r}: make a new "
            "strategy, over a group that there is"
        ) from None


class Ranks:
    """The ranks of one torch process group, and the calls that they have started together."""

    def __init__(self, process_group: dist.ProcessGroup, lane: str) -> None:
        from torch.distributed import get_process_group_ranks

        self.global_ranks = get_process_group_ranks(process_group)
        rank, size = process_group.rank(), process_group.size()
        self.tree = Tree(rank, size, JobStore(process_group, lane))
        # Not with the process group: a save in flight may outlive it.
        finalize(self, self.tree.close).atexit = False
        # Reentrant: a signal handler may save as well.
        self._lock = threading.RLock()
        self._last = 0
        self._late: str | None = None
        self._entered: WeakSet[ProcessGroup] = WeakSet()

    def begin(self, timeout: timedelta, name: str) -> ProcessGroup:
        """Begin a call, on this thread."""
        here = threading.get_ident()
        with self._lock:
            if any(group.thread != here for group in tuple(self._entered)):
                self._last += 1
                self.tree.calls.refuse(self._last)
                raise Busy(BUSY)
            verdict = self._number(name)
            group = ProcessGroup(self, self._last, timeout, name)
            self.tree.calls.begin(group.step, name)
            if verdict is not None:
                raise group.lost("begin", verdict)
            self._entered.add(group)
            return group

    def _number(self, name: str) -> Verdict | None:
        """Number the next call. Returns why it has failed, if this rank comes too late for it."""
        calls = self.tree.calls
        self._last += 1
        while calls.other_failed(self._last, name):
            self._last += 1
        verdict = calls.verdict(self._last)
        if verdict is not None and self._late == name:
            # Twice running: it has left a call of this name out, and would be behind for ever.
            self._last = calls.last_failure() + 1
            verdict = None
        self._late = name if verdict is not None else None
        return verdict

    def again(self, group: ProcessGroup) -> bool:
        """Give the last call another number if a different call has failed under its number."""
        with self._lock:
            if group.call != self._last or not self.tree.calls.other_failed(
                self._last, group.name
            ):
                return False
            verdict = self._number(group.name)
            if verdict is not None:
                raise group.lost("begin", verdict)
            group.call = self._last
            return True

    def end(self, group: ProcessGroup) -> None:
        with self._lock:
            self._entered.discard(group)


class ProcessGroup(RankGroup):
    """The ranks of a torch process group in one save or load, including its later steps."""

    def __init__(self, ranks: Ranks, call: int, timeout: timedelta, name: str) -> None:
        self.rank, self.size = ranks.tree.rank, ranks.tree.size
        self.call, self.name = call, name
        self.thread = threading.get_ident()
        self._ranks = ranks
        self._tree = ranks.tree
        self.timeout = timeout.total_seconds()
        self.step = CollectiveStep(call, 0, self.timeout, "", "", "")
        self._parts: list[Part[Any]] = []  # of this collective step, done
        self._addresses: dict[int, Address] = {}

    @property
    def identity(self) -> Ranks:
        return self._ranks

    @property
    def lost_at(self) -> float:
        return self._tree.calls.failed_at(self.call)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._ranks.end(self)
        super().__exit__(kind, error, _)

    def run(self, work: Coroutine[Any, Any, T], stage: str = "") -> T:
        limit = 2 * self.timeout + _MARGIN
        return self._result(self._tree.start(work), stage, limit)

    def _result(self, future: Future[T], stage: str, seconds: float | None) -> T:
        try:
            return future.result(seconds)
        except CallFailed as failed:
            raise self.lost(stage, failed.verdict) from None
        except BaseException:
            future.cancel()
            raise

    def lost(self, stage: str, verdict: Verdict) -> RankLost:
        """The error for this rank of a call that has failed on all."""
        by_word: dict[str, list[int]] = {}
        for rank, word in sorted(verdict.missing.items()):
            by_word.setdefault(word, []).append(rank)
        named = []
        for word, ranks in by_word.items():
            others = [self._ranks.global_ranks[rank] for rank in ranks]
            globally = "" if others == ranks else f" (global {name_ranks(others)})"
            named.append(f"{name_ranks(ranks)}{globally} {word}")
        who = "; ".join(named) or verdict.text
        if self.rank in verdict.missing:
            text = (
                f"rank {self.rank} comes too late: the other ranks have given this save or load up "
                f"({who}). They have raised this as well; the next one starts afresh."
            )
        else:
            text = (
                f"the ranks lost one another in the stage {stage!r} (timeout {self.timeout:g} s): "
                f"{who}.\n  {ADVICE}"
            )
        return RankLost(text, verdict.missing)

    def _do(self, stage: str, part: Part[T]) -> T:
        """A part of this collective step. The first may begin again under another call number."""
        parts: list[Part[Any]] = [part]
        value: Any = None
        while True:
            try:
                for each in parts:
                    value = self.run(each(self.step), stage)
            except RankLost:
                # What the coordinator has decided is not decided again.
                if self.step.number > 1 or (self.rank == 0 and self._parts):
                    raise
                if not self._ranks.again(self):
                    raise
                self.step = self.step.under(self.call)
                self._tree.calls.begin(self.step, self.name)
                parts = [*self._parts, part]
            else:
                self._parts.append(part)
                return cast("T", value)

    def give_up(self) -> None:
        self.run(self._tree.fail(self.call, Verdict({self.rank: Reason.GAVE_UP})))

    def confirm(self) -> None:
        self.run(self._tree.confirm(self.step), "commit")

    def _begin(self, stage: str) -> None:
        running = events.current().operation
        number = self.step.number + 1
        step = CollectiveStep(
            self.call, number, self.timeout, stage, running.name, running.path
        )
        self._tree.calls.steps[self.call] = step
        self.step, self._parts = step, []

    def _lowest(self, numbers: Sequence[int]) -> list[int]:
        def merge(votes: Sequence[Packed]) -> bytes:
            columns = [np.frombuffer(vote, np.int64) for vote in votes]
            return bytes(np.min(columns, axis=0).tobytes())

        own = np.array(numbers, np.int64).tobytes()
        merged = self._do("vote", lambda step: self._tree.gather(step, own, merge))
        least = self._do("vote", lambda step: self._tree.broadcast(step, merged))
        return [int(number) for number in np.frombuffer(least, np.int64)]

    def _gather(self, stage: str, packed: Packed) -> list[Packed] | None:
        def merge(payloads: Sequence[Packed]) -> bytes:
            parts = [payloads[0]]
            for below in payloads[1:]:
                parts += split(below)
            return join(parts)

        merged = self._do(stage, lambda step: self._tree.gather(step, packed, merge))
        return None if merged is None else [*split(merged)]

    def _scatter(self, stage: str, packed: Sequence[Packed] | None) -> Packed:
        return self._do(stage, lambda step: self._tree.scatter(step, packed))

    def _broadcast(self, stage: str, packed: Packed | None) -> Packed:
        return self._do(stage, lambda step: self._tree.broadcast(step, packed))

    def _introduce(self, stage: str, targets: Iterable[int]) -> None:
        """Rank 0 sends each rank the addresses of the ranks to which it sends."""

        def introduce(
            parts: list[tuple[Address, list[int]]],
        ) -> list[dict[int, Address]]:
            return [{to: parts[to][0] for to in wanted} for _, wanted in parts]

        own = self.run(self._tree.address(), stage)
        others = [rank for rank in targets if rank != self.rank]
        self._addresses = self.reduce_scatter(stage, lambda: (own, others), introduce)

    def _transfer(
        self, stage: str, to: int, outgoing: Stream, source: int, incoming: Stream
    ) -> None:
        address = self._addresses.get(to)
        work = self._tree.transfer(self.step, to, address, outgoing, source, incoming)
        self._result(self._tree.start(work), stage, None)

    def _leave(self, reason: BaseException) -> None:
        verdict = Verdict({self.rank: departure(reason)})
        with suppress(RankLost):
            self.run(self._tree.fail(self.call, verdict))
