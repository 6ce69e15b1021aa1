"""Ranks as processes: a gloo group of our own over the ranks of a torch process group.

We send nothing over the caller's group, which may be NCCL's, and a group that has failed or timed out
is replaced, so that the trainer's groups are never touched.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from megackpt import limits
from megackpt.distributed.connection import Connection
from megackpt.distributed.group import (
    Busy,
    Group,
    Mark,
    Packed,
    RankGroup,
    SingleGroup,
)
from megackpt.distributed.waiting import Wait
from megackpt.errors import CheckpointingException, RankLost

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

T = TypeVar("T")

DEFAULT_TIMEOUT = timedelta(seconds=limits.RANK_TIMEOUT_SECONDS)
FIRST = 4096
"""Bytes of the first message of a value; most values need no second one."""
BUSY = (
    "another thread of this process is saving or loading over the same process group: let it finish first, or "
    "give each thread a process group of its own (torch.distributed.new_group, in the same order on all ranks)"
)

_LENGTH = 8

_ALONE = SingleGroup()
_groups: WeakKeyDictionary[Any, ProcessGroup] = WeakKeyDictionary()
_finding = threading.Lock()


def group_over(
    process_group: dist.ProcessGroup | Group | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> Group:
    """The Group for one save or load: over the process group given, the default one, or this process alone.

    Every rank of the process group calls this equally often. ``timeout`` is how long the ranks wait for one
    another; for the coordinator, which itself waits for the others before it answers, twice as long.
    The same process group always gives the same Group, and a Group is returned as it is.

    Raises RankFailure if the ranks cannot be reached, CheckpointingException if this process is none of them.
    """
    given: object = timeout  # callers without a type checker give anything
    if not isinstance(given, timedelta):
        raise CheckpointingException(
            f"timeout must be a datetime.timedelta, not {given!r}"
        )
    if isinstance(process_group, Group):
        return process_group
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (
        distributed.is_available() and distributed.is_initialized()
    ):
        if process_group is not None:
            raise CheckpointingException(
                f"process_group is {process_group!r}, but torch.distributed is not initialised"
            )
        return _ALONE
    over = distributed.group.WORLD if process_group is None else process_group
    if not isinstance(over, distributed.ProcessGroup):
        raise CheckpointingException(
            f"process_group must be a process group that this rank is a member of, not {over!r}"
        )
    if over.size() == 1:
        return _ALONE
    with _finding:
        group = _groups.get(over)
        if group is None:
            group = _groups[over] = ProcessGroup(Connection(over))
    group.begin(timeout)
    return group


def domain_of(
    process_group: dist.ProcessGroup | None, called: str = "dedup_group"
) -> int:
    """A number that names these ranks among all others: the lowest of them (0 for None: all ranks)."""
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
            f"{called} is a process group that has been destroyed, {process_group!r}: make a new strategy, over a "
            "group that there is"
        ) from None


@atexit.register
def _hang_up() -> None:
    """Gloo threads must end before the interpreter: releasing a message later would abort the process."""
    for group in list(_groups.values()):
        group.close()


class ProcessGroup(RankGroup):
    """The ranks of a torch process group."""

    def __init__(self, connection: Connection) -> None:
        self.rank, self.size = connection.rank, connection.size
        self._connection = connection
        self._taking = threading.Lock()
        self._thread: int | None = None  # the one in a save or load
        self._entered = False
        self._refused: list[
            int
        ] = []  # which call was it to go on with? 0: to begin one
        self._since = 0
        self._timeout = DEFAULT_TIMEOUT

    def __enter__(self) -> Group:
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        with self._taking:
            self._entered, self._thread = False, None

    def mark(self) -> Mark:
        return Mark(self._connection.call, self._timeout)

    def resumed(self, since: Mark) -> Group:
        self.begin(since.timeout or self._timeout, since.call)
        return self

    def parted(self, what: str, since: Mark, patience: float) -> bool:
        return self._connection.parted(what, since.call, patience)

    def confirm(self) -> None:
        self._connection.confirm(self._timeout, self._since)

    def begin(self, timeout: timedelta, since: int = 0) -> None:
        """Connect for one save or load of this thread, or a step of one. Raises RankLost."""
        with self._taking:
            if self._entered or self._thread not in (None, threading.get_ident()):
                self._refused.append(since)
                raise Busy(BUSY)
            # No rank must wait for what is done after all.
            refused = [not call for call in self._refused if not since or call != since]
            self._thread, self._refused = threading.get_ident(), []
        self._timeout, self._since = timeout, since
        made_in = self._connection.made_in
        try:
            self._connection.open(timeout, refused, since)
            if (
                self._connection.made_in != made_in
            ):  # ranks may have left steps out while they were apart
                self._step = 0
        except BaseException:
            self._thread = None
            raise

    def close(self) -> None:
        """Close the connection, and wait for its threads."""
        self._connection.gloo = None

    def _lowest(self, numbers: Sequence[int]) -> list[int]:
        import torch
        import torch.distributed as dist

        from megackpt.torch_versions import TIMES_OPERATIONS_OUT

        if not TIMES_OPERATIONS_OUT:
            packed = self._gather("vote", np.array(numbers, np.int64).tobytes())
            all_votes = [np.frombuffer(vote, np.int64) for vote in packed or ()]
            lowest = np.min(all_votes, axis=0).tobytes() if all_votes else None
            return [
                int(vote)
                for vote in np.frombuffer(self._broadcast("vote", lowest), np.int64)
            ]

        votes = torch.tensor(numbers, dtype=torch.int64, device="cpu")

        def reduce(gloo: Any) -> None:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
            options.timeout = self._timeout
            gloo.allreduce([votes], options).wait()

        with self._waiting("vote"):
            self._over_connection("vote", reduce)
        return [int(vote) for vote in votes.tolist()]

    def _gather(self, stage: str, packed: Packed) -> list[Packed] | None:
        with self._waiting(stage):
            if self.rank:
                self._over_connection(stage, lambda gloo: self._send(gloo, {0: packed}))
                return None
            others = range(1, self.size)
            messages = self._over_connection(
                stage, lambda gloo: self._receive(gloo, others, self._timeout)
            )
        return [packed, *messages]

    def _scatter(self, stage: str, packed: Sequence[Packed] | None) -> Packed:
        with self._waiting(stage):
            if packed is None:
                return self._over_connection(
                    stage, lambda gloo: self._receive(gloo, [0], 2 * self._timeout)
                )[0]
            others = {rank: packed[rank] for rank in range(1, self.size)}
            self._over_connection(stage, lambda gloo: self._send(gloo, others))
        return packed[0]

    def _broadcast(self, stage: str, packed: Packed | None) -> Packed:
        import torch.distributed as dist

        from megackpt.torch_versions import TIMES_OPERATIONS_OUT

        if not TIMES_OPERATIONS_OUT:
            return self._scatter(
                stage, None if packed is None else [packed] * self.size
            )

        def spread(gloo: Any) -> Packed:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            options.timeout = 2 * self._timeout
            first, rest = (
                _parted(packed) if packed is not None else (_space(FIRST), None)
            )
            gloo.broadcast([first], options).wait()
            message, missing = _begun(first)
            if missing is not None:
                gloo.broadcast([missing if rest is None else rest], options).wait()
            return message if packed is None else packed

        with self._waiting(stage):
            return self._over_connection(stage, spread)

    def _swap(
        self, stage: str, to: int, leaving: memoryview, source: int, coming: memoryview
    ) -> Callable[[], None]:
        import torch

        def begin(gloo: Any) -> list[tuple[int, Any]]:
            into = [torch.frombuffer(coming, dtype=torch.uint8)] if coming else []
            out = [torch.frombuffer(leaving, dtype=torch.uint8)] if leaving else []
            return [
                *((source, gloo.recv([part], source, 0)) for part in into),
                *((to, gloo.send([part], to, 0)) for part in out),
            ]

        works = self._over_connection(stage, begin)

        def wait_for(peer: int, work: Any) -> None:
            with Wait(
                self.rank,
                stage,
                lambda _: [peer],
                timeout=self._timeout.total_seconds(),
            ):
                work.wait(self._timeout)

        def wait_for_all(_: Any) -> None:
            for peer, work in works:
                wait_for(peer, work)

        return lambda: self._over_connection(stage, wait_for_all)

    def _leave(self, reason: BaseException) -> None:
        self._connection.leave(reason)

    @contextmanager
    def _waiting(self, stage: str) -> Iterator[None]:
        """A Wait for the other ranks in the current step."""
        step, arrivals = (
            (self._connection.made_in, self._step),
            self._connection.arrivals,
        )
        arrive, absent = partial(arrivals.post, step), partial(arrivals.absent, step)
        with Wait(
            self.rank, stage, absent, arrive, self._timeout.total_seconds()
        ) as wait:
            yield
        if wait.long and self.is_coordinator:  # from here on all wait for this rank
            arrivals.post(step, answering=True)

    def _over_connection(self, stage: str, use: Callable[[Any], T]) -> T:
        if self._connection.gloo is None:
            raise RankLost(
                f"stage {stage!r}: this group has failed before; the next save or load makes one"
            )
        try:
            return use(self._connection.gloo)
        except (
            Exception
        ) as error:  # whatever it was, the ranks are no longer at the same message
            # Its frames hold the connection, whose end the other ranks wait for.
            traceback.clear_frames(error.__traceback__)
            raise self._connection.broken(stage, self._timeout, error) from error

    def _send(self, gloo: Any, messages: dict[int, Packed]) -> None:
        tensors: list[tuple[int, torch.Tensor]] = []
        for rank, packed in messages.items():
            tensors += [(rank, part) for part in _parted(packed) if part is not None]
        for work in [gloo.send([tensor], rank, 0) for rank, tensor in tensors]:
            work.wait(self._timeout)

    def _receive(
        self, gloo: Any, ranks: Sequence[int], timeout: timedelta
    ) -> list[Packed]:
        deadline = time.monotonic() + timeout.total_seconds()

        def receive(ranks: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
            for work in [
                gloo.recv([t], rank, 0) for rank, t in zip(ranks, tensors, strict=True)
            ]:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))

        firsts = [_space(FIRST) for _ in ranks]
        receive(ranks, firsts)
        begun = [_begun(first) for first in firsts]
        long = [
            (rank, missing)
            for rank, (_, missing) in zip(ranks, begun, strict=True)
            if missing is not None
        ]
        receive([rank for rank, _ in long], [missing for _, missing in long])
        return [message for message, _ in begun]


def _space(size: int) -> torch.Tensor:
    import torch

    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _parted(packed: Packed) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A message as it travels: its length and its beginning in FIRST bytes, and what does not fit into them."""
    import torch

    first = bytearray(FIRST)
    first[:_LENGTH] = len(packed).to_bytes(_LENGTH, "little")
    begin = packed[: FIRST - _LENGTH]
    first[_LENGTH : _LENGTH + len(begin)] = begin
    rest = bytearray(memoryview(packed)[FIRST - _LENGTH :])  # the one copy
    tail = torch.frombuffer(rest, dtype=torch.uint8) if rest else None
    return torch.frombuffer(first, dtype=torch.uint8), tail


def _begun(first: torch.Tensor) -> tuple[memoryview, torch.Tensor | None]:
    """The message with this beginning, and the part of its memory that is still to be filled."""
    length = int.from_bytes(bytes(first[:_LENGTH].numpy().data), "little")
    if length <= FIRST - _LENGTH:
        return first.numpy().data[_LENGTH : _LENGTH + length], None
    message = _space(length)
    message[: FIRST - _LENGTH] = first[_LENGTH:]
    return message.numpy().data, message[FIRST - _LENGTH :]
