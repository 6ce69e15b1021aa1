"""Ranks as processes: a gloo group of our own over the ranks of a torch process group.

Nothing of ours travels on the caller's group, which may be NCCL's, and a group that has failed or timed out
is thrown away and made anew, so that the trainer's groups are never touched. The job's store tells what the
broken connections cannot: who was missing, and to a rank that comes late, that the others have gone on.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from megackpt.errors import CheckpointingException, RankLost
from megackpt.runtime.collectives.group import Group, Packed, RankGroup, SingleGroup

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

T = TypeVar("T")

DEFAULT_TIMEOUT = timedelta(minutes=30)
FIRST = 4096
"""Bytes of the first, and mostly only, message that carries a value: a short one takes no second round."""
ROLL_CALL = 10.0
"""Seconds that the coordinator waits at most, after a failure, for the others to say that they are there."""

ADVICE = (
    "The trainer's own process groups are as they were, and the next save or load connects afresh. "
    "Where a rank is only slow, give a longer timeout."
)
BUSY = (
    "another thread of this process is saving or loading over the same process group: let it finish first, or "
    "give each thread a process group of its own (torch.distributed.new_group, in the same order on all ranks)"
)
REFUSED = "began one while another thread of its process was at work over the same group, and was refused"
LAST_ADVICE = "The control group could not be made anew; the job must restart."

_LENGTH = 8

_ALONE = SingleGroup()
_groups: WeakKeyDictionary[Any, ProcessGroup] = WeakKeyDictionary()
_finding = threading.Lock()
_made: Counter[str] = Counter()


def group_over(
    process_group: dist.ProcessGroup | Group | None = None, timeout: timedelta = DEFAULT_TIMEOUT
) -> Group:
    """The Group for one save or load: over the process group given, the default one, or this process alone.

    Every rank of the process group calls this equally often. ``timeout`` is how long the ranks wait for one
    another; for the coordinator, which itself waits for the others before it answers, twice as long.
    The same process group always gives the same Group, and a Group is returned as it is.

    Raises RankFailure if the ranks cannot be reached, CheckpointingException if this process is none of them.
    """
    given: object = timeout  # callers without a type checker give anything
    if not isinstance(given, timedelta):
        raise CheckpointingException(f"timeout must be a datetime.timedelta, not {given!r}")
    if isinstance(process_group, Group):
        return process_group
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
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
            group = _groups[over] = ProcessGroup(Line(over))
    group.begin(timeout)
    return group


def domain_of(process_group: dist.ProcessGroup | None) -> int:
    """A number that names these ranks among all others: the lowest of them (0 for None: all ranks)."""
    if process_group is None:
        return 0
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not isinstance(process_group, distributed.ProcessGroup):
        raise CheckpointingException(
            f"dedup_group must be a process group that this rank is a member of, not {process_group!r}"
        )
    return int(min(distributed.get_process_group_ranks(process_group)))


@atexit.register
def _hang_up() -> None:
    """A gloo thread that still lets go of a message while the interpreter ends would abort the process."""
    for group in list(_groups.values()):
        group.close()


class Line:
    """The connection between the ranks of one process group, remade when it has failed.

    A call is one ``open``. Keys in the job's store, below a prefix for this line:
    ``failed``, the number of the latest call in which the line broke; ``here/C/R``, rank R left call C;
    ``story/C``, what the coordinator found out about the failure of call C.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        from torch.distributed import distributed_c10d, get_process_group_ranks

        name = process_group.group_name
        _made[name] += 1  # a later group may have the name of one that was destroyed, in the same store
        self.store = distributed_c10d.PrefixStore(
            f"megackpt/{name}/{_made[name]}", distributed_c10d._get_default_store()
        )
        self.rank, self.size = process_group.rank(), process_group.size()
        self.global_ranks = get_process_group_ranks(process_group)
        self.call = 0
        self.made_in = 0
        self._late_before = False
        self.gloo: Any = None  # a ProcessGroupGloo, whose messages torch does not describe to type checkers

    def open(self, timeout: timedelta, refused: int = 0) -> None:
        """Begin a call: connected to all ranks, or a RankFailure. ``refused`` calls before it never came here."""
        from torch.distributed import ProcessGroupGloo, distributed_c10d

        self.call += refused
        try:
            if refused:  # other ranks may be waiting in them
                self.gloo = None
                self._sign(REFUSED)
            self.call += 1
            failed = int(self.store.compare_set("failed", "", "-1"))
            if failed < self.call and (self.gloo is None or failed >= self.made_in):
                store = distributed_c10d.PrefixStore(f"gloo/{self.call}", self.store)
                self.gloo = None
                self.gloo = ProcessGroupGloo(store, self.rank, self.size, timeout)
                self.made_in = self.call
        except RuntimeError as error:
            raise self.broken("connect", timeout, error) from error
        if failed < self.call:
            self._late_before = False
            return
        if self._late_before:  # twice running: this rank has left a call out, and would be behind for ever
            self.call = failed + 1
        self._late_before = not self._late_before
        raise self._late(failed)

    def broken(self, stage: str, timeout: timedelta, error: Exception) -> RankLost:
        """Give the connection up, find out who is missing, and say so."""
        self.gloo = None
        try:
            self._sign("here")
            patience = min(ROLL_CALL, timeout.total_seconds())
            told = self._call_the_roll if self.rank == 0 else self._story
            story = told(self.call, patience)
        except RuntimeError as lost:  # the store's server is gone too, as when rank 0 held it and died
            story = {"text": f"the job's store cannot be reached either ({_first_line(lost)})", "missing": {}}
        missing = {int(rank): str(word) for rank, word in story["missing"].items()}
        who = "; ".join(f"rank {rank}{self._globally(rank)} {word}" for rank, word in missing.items())
        advice = LAST_ADVICE if stage == "connect" and self.call > 1 else ADVICE
        return RankLost(
            f"the ranks lost one another in the stage {stage!r} (timeout {timeout.total_seconds():g} s): "
            f"{who or story['text']}.\n  torch says: {_first_line(error)}\n  {advice}",
            missing,
        )

    def _globally(self, rank: int) -> str:
        return "" if self.global_ranks[rank] == rank else f" (global rank {self.global_ranks[rank]})"

    def confirm(self, timeout: timedelta) -> None:
        """RankLost if any rank has given this call up, as after this process was stopped for long."""
        try:
            failed = int(self.store.compare_set("failed", "", "-1"))
        except RuntimeError as error:
            raise self.broken("commit", timeout, error) from error
        if failed >= self.call:
            raise self._late(failed)

    def leave(self, reason: BaseException) -> None:
        """Give the connection up because this process ends; the others notice at once."""
        self.gloo = None
        try:
            self._sign(f"left: {type(reason).__name__}")
        except RuntimeError as error:
            reason.add_note(f"the other ranks could not be told: {_first_line(error)}")

    def _sign(self, word: str) -> None:
        self.store.set(f"here/{self.call}/{self.rank}", word)
        self.store.set("failed", str(self.call))

    def _call_the_roll(self, call: int, patience: float) -> dict[str, Any]:
        keys = [f"here/{call}/{rank}" for rank in range(self.size)]
        _until(lambda: self.store.check(keys), patience)
        missing: dict[int, str] = {}
        for rank, key in enumerate(keys):
            word = self.store.get(key).decode() if self.store.check([key]) else "did not answer"
            if word != "here":
                missing[rank] = word
        story = {"text": "every rank is there, but a connection broke", "missing": missing}
        self.store.set(f"story/{call}", json.dumps(story))
        return story

    def _story(self, call: int, patience: float) -> dict[str, Any]:
        key = f"story/{call}"
        if _until(lambda: self.store.check([key]), 2 * patience + 2):  # who tells it waits as well
            return dict(json.loads(self.store.get(key)))
        return {"text": "", "missing": {0: "did not answer"}}

    def _late(self, failed: int) -> RankLost:
        self.gloo = None
        if self.rank == 0 and not self.store.check([f"story/{failed}"]):  # it is itself who tells it
            missing = self._call_the_roll(failed, 0)["missing"]
        else:
            missing = self._story(failed, ROLL_CALL / 2)["missing"]
        told = "; ".join(f"rank {rank} {word}" for rank, word in missing.items()) or "a connection was lost"
        return RankLost(
            f"rank {self.rank} comes too late: the other ranks have given this save or load up ({told}). "
            "They were told so too; the next one begins afresh.",
            {int(rank): word for rank, word in missing.items()},
        )


class ProcessGroup(RankGroup):
    """The ranks of a torch process group."""

    def __init__(self, line: Line) -> None:
        self.rank, self.size = line.rank, line.size
        self._line = line
        self._taking = threading.Lock()
        self._thread: int | None = None  # which has begun a save or load
        self._entered = False
        self._refused = 0
        self._timeout = DEFAULT_TIMEOUT

    def __enter__(self) -> Group:
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        with self._taking:
            self._entered, self._thread = False, None

    def confirm(self) -> None:
        self._line.confirm(self._timeout)

    def begin(self, timeout: timedelta) -> None:
        """Make sure of the connection for one save or load of this thread. Raises RankLost."""
        with self._taking:
            if self._entered or self._thread not in (None, threading.get_ident()):
                self._refused += 1
                raise CheckpointingException(BUSY)
            self._thread, refused, self._refused = threading.get_ident(), self._refused, 0
        self._timeout = timeout
        try:
            self._line.open(timeout, refused)
        except BaseException:
            self._thread = None
            raise

    def close(self) -> None:
        """Close the connection, and wait for its threads."""
        self._line.gloo = None

    def _vote(self, token: int | None) -> bool:
        import torch
        import torch.distributed as dist

        # The least of t and the least of -t are opposites exactly if all t are equal; no token is in between.
        lowest = -(2**63) + 1
        pair = [lowest, lowest] if token is None else [token % 2**63, -(token % 2**63)]
        votes = torch.tensor(pair, dtype=torch.int64)

        def reduce(gloo: Any) -> None:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
            options.timeout = self._timeout
            gloo.allreduce([votes], options).wait()

        self._over_line("vote", reduce)
        return int(votes[0]) == -int(votes[1])

    def _gather(self, stage: str, packed: Packed) -> list[Packed] | None:
        if self.rank:
            self._over_line(stage, lambda gloo: self._send(gloo, {0: packed}))
            return None
        others = range(1, self.size)
        messages = self._over_line(stage, lambda gloo: self._receive(gloo, others, self._timeout))
        return [packed, *messages]

    def _scatter(self, stage: str, packed: Sequence[Packed] | None) -> Packed:
        if packed is None:
            return self._over_line(stage, lambda gloo: self._receive(gloo, [0], 2 * self._timeout))[0]
        others = {rank: packed[rank] for rank in range(1, self.size)}
        self._over_line(stage, lambda gloo: self._send(gloo, others))
        return packed[0]

    def _broadcast(self, stage: str, packed: Packed | None) -> Packed:
        import torch.distributed as dist

        def spread(gloo: Any) -> Packed:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            options.timeout = 2 * self._timeout
            first, rest = _parted(packed) if packed is not None else (_space(FIRST), None)
            gloo.broadcast([first], options).wait()
            message, missing = _begun(first)
            if missing is not None:
                gloo.broadcast([missing if rest is None else rest], options).wait()
            return message if packed is None else packed

        return self._over_line(stage, spread)

    def _leave(self, reason: BaseException) -> None:
        self._line.leave(reason)

    def _over_line(self, stage: str, use: Callable[[Any], T]) -> T:
        if self._line.gloo is None:
            raise RankLost(f"stage {stage!r}: this group has failed before; the next save or load makes one")
        try:
            return use(self._line.gloo)
        except Exception as error:  # whatever it was, the ranks are no longer at the same message
            raise self._line.broken(stage, self._timeout, error) from error

    def _send(self, gloo: Any, messages: dict[int, Packed]) -> None:
        tensors: list[tuple[int, torch.Tensor]] = []
        for rank, packed in messages.items():
            tensors += [(rank, part) for part in _parted(packed) if part is not None]
        for work in [gloo.send([tensor], rank, 0) for rank, tensor in tensors]:
            work.wait(self._timeout)

    def _receive(self, gloo: Any, ranks: Sequence[int], timeout: timedelta) -> list[Packed]:
        deadline = time.monotonic() + timeout.total_seconds()

        def receive(ranks: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
            for work in [gloo.recv([t], rank, 0) for rank, t in zip(ranks, tensors, strict=True)]:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))

        firsts = [_space(FIRST) for _ in ranks]
        receive(ranks, firsts)
        begun = [_begun(first) for first in firsts]
        long = [
            (rank, missing) for rank, (_, missing) in zip(ranks, begun, strict=True) if missing is not None
        ]
        receive([rank for rank, _ in long], [missing for _, missing in long])
        return [message for message, _ in begun]


def _space(size: int) -> torch.Tensor:
    import torch

    return torch.empty(size, dtype=torch.uint8)


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
    """The message that begins so, and the part of its memory that is still to be filled."""
    length = int.from_bytes(bytes(first[:_LENGTH].numpy().data), "little")
    if length <= FIRST - _LENGTH:
        return first.numpy().data[_LENGTH : _LENGTH + length], None
    message = _space(length)
    message[: FIRST - _LENGTH] = first[_LENGTH:]
    return message.numpy().data, message[FIRST - _LENGTH :]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _until(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
