"""Saves the shards of each rank on the host of the rank, and sends copies to other hosts."""

from __future__ import annotations

import copy
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from megackpt import tree
from megackpt.adapters.megatron import from_megatron
from megackpt.async_save import AsyncCallsQueue, AsyncRequest, Pending, Task
from megackpt.distributed import (
    Group,
    GroupLike,
    SingleGroup,
    attempt,
    group_over,
)
from megackpt.errors import CheckpointingException, ShardingError, StorageError
from megackpt.loader.comparison import StateOfStored
from megackpt.loader.load_session import destination
from megackpt.manager.local.agent import ensure_agent
from megackpt.manager.local.drain import DrainSettings, read_status
from megackpt.manager.local.drain_records import RECORD, Record, encode
from megackpt.manager.local.lineage import Line
from megackpt.manager.local.pieces import (
    READY,
    HostPieces,
    LocalSave,
    Piece,
    transfer,
)
from megackpt.manager.local.tier import LocalTier
from megackpt.saver import save
from megackpt.state import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.storage import Executor
from megackpt.strategies import Strategy

logger = logging.getLogger("megackpt.manager")

_SPARE = 1 << 20  # bytes of a piece in addition to its tensors


class LocalSaves:
    """The local saves of one run. All ranks create it at the same time, and call it.

    Args:
        tier: its settings; ``every`` is not used here.
        pieces: the directory of this host.
        strategy: of the pieces.
        process_group: of all ranks. The copies are sent over another group of them.
        queue: of the local saves alone.
        drain: for the agents, if steps that are due in the storage are drained.
    """

    def __init__(
        self,
        tier: LocalTier,
        pieces: HostPieces,
        strategy: Strategy,
        process_group: GroupLike,
        timeout: timedelta,
        queue: AsyncCallsQueue,
        drain: DrainSettings | None,
    ) -> None:
        self._drain = drain
        self._tier = tier
        self._pieces = pieces
        self._strategy = strategy
        self._process_group = process_group
        self._timeout = timeout
        self._queue = queue
        self._copies_group: GroupLike = None
        self._has_copies_group = False

        def place(hosts: list[str]) -> tuple[list[str], list[list[int]]]:
            return hosts, tier.targets(hosts)

        with self._group() as group:
            hosts, self._targets = group.reduce_broadcast(
                "hosts", lambda: tier.hostname, place
            )
        self._rank = group.rank
        if tier.copies and len({*hosts}) <= tier.copies and not group.rank:
            logger.warning(
                "local checkpoints have %d copies, %d were asked for: the ranks are on %d hosts",
                len({*hosts}) - 1,
                tier.copies,
                len({*hosts}),
            )
        self._hosts = hosts
        self._are_hosts_checked = False
        # The first rank of a host removes the pieces that no rank needs any more.
        self._is_first = hosts.index(hosts[self._rank]) == self._rank
        # Complete on all ranks, the oldest first.
        self._complete: list[LocalSave] = []

    @property
    def running(self) -> bool:
        """Whether a local save is not finalized."""
        return self._queue.get_num_unfinalized_calls() > 0

    def begin(self, found: list[LocalSave]) -> None:
        """A line begins, with these saves on the hosts, in order.

        The last ones stay until a save is complete.
        """
        self._complete = found

    def save(
        self,
        step: int,
        state: ShardedStateDict,
        asynchronous: bool,
        options: Mapping[str, Any],
        line: Line,
        due: Record | None,
    ) -> None:
        """Save a step; collective. It waits until the save before has ended on all ranks.

        ``options``: the options of ``megackpt.save`` that change the stored content. ``line``: the
        line of the save. ``due``: it is drained. Raises StorageError if a host has no space for it.
        """
        if self.running:
            logger.info("step %d waits for the local save before it", step)
            self.poll(blocking=True)
        if not self._has_copies_group:
            self._copies_group = another_group(self._process_group, self._timeout)
            self._has_copies_group = True
        own = as_one_rank(state)
        with self._group() as group:
            try:
                kept = self._find_kept(group)
                nbytes = nbytes_of(own)
                agreed = self._prepare(group, step, nbytes, line, kept, due is not None)
            except CheckpointingException as error:
                name = f"step {step} on the hosts"
                if not self._queue.failures.tolerates(
                    error, name, group.is_coordinator
                ):
                    raise
                return
        piece = Piece(agreed, self._rank)
        write = partial(
            save,
            own,
            self._pieces.path(piece),
            self._strategy,
            process_group=SingleGroup(),
            timeout=self._timeout,
            validate_access_integrity=False,
            **options,
        )
        begin: Callable[[], AsyncRequest | None] = write
        pending: Any = None
        if asynchronous:
            # The tensors are copied now. An error of this rank alone is raised on all ranks when
            # the save is finalized.
            copied = attempt(partial(write, async_sharded_save=True))
            begin = copied.get
            pending = copied.value and copied.value.async_fn
        self._complete = kept

        def complete() -> None:
            self._complete.append(agreed)
            line.is_complete = True

        work = partial(self._store, piece, [*kept, agreed], begin, line, due)
        task = Task(lambda _: work(), f"step {step} on the hosts")
        if pending:
            # If the work fails before it writes, the error of the work counts.
            task.on_end(lambda _: pending.give_up())
        request = AsyncRequest(Pending(task, group), (), [complete])
        if not asynchronous:
            task.perform()
        self._queue.schedule_async_request(request)
        if not asynchronous:
            self.poll(blocking=True)

    def poll(self, blocking: bool = False) -> None:
        """Finalize the save that all ranks have written and sent. Collective while one runs."""
        self._queue.maybe_finalize_async_calls(blocking)

    def close(self, abort: bool = False) -> None:
        """Finalize the running save (collective), or drop it (not collective)."""
        self._queue.close(abort)
        if self._has_copies_group and not abort:
            give_back(self._copies_group, self._process_group)
            self._has_copies_group = False

    def _find_kept(self, group: Group) -> list[LocalSave]:
        """The steps that stay while the next one is written. Collective if steps are drained.

        They are the last ones, and the one that is being drained.
        """
        kept = self._complete[1 - self._tier.generations :]
        if self._drain is None:
            return kept

        def durable() -> tuple[str, str]:
            status = read_status(self._pieces.location)
            return status.durable, status.reason

        newest, reason = group.reduce_broadcast("durable step", durable, max)
        waiting = [s for s in self._complete if s.is_due and s.id > newest]
        for late in waiting[1:]:
            if late not in kept and group.is_coordinator:
                logger.warning(
                    "the storage is behind: step %d is removed from the hosts before it is "
                    "durable, as step %d is still being drained. %s",
                    late.step,
                    waiting[0].step,
                    reason or "The storage is slower than the saves",
                )
        return [s for s in self._complete if s in kept or s in waiting[:1]]

    def _group(self) -> Group:
        return group_over(self._process_group, self._timeout)

    def _prepare(
        self,
        group: Group,
        step: int,
        nbytes: int,
        line: Line,
        kept: Sequence[LocalSave],
        is_due: bool,
    ) -> LocalSave:
        """Check that all hosts have space for a save, and agree on its id.

        ``nbytes``: the bytes of this rank's shards.
        """
        if not self._are_hosts_checked:
            self._check_hosts(group)
            self._are_hosts_checked = True

        def work() -> tuple[int, int, int]:
            if not self._is_first:
                return step, nbytes, 0
            return step, nbytes, self._pieces.free_bytes(kept)

        def decide(answers: Sequence[tuple[int, int, int]]) -> LocalSave:
            steps, needed, free = zip(*answers, strict=True)
            if len({*steps}) > 1:
                raise ShardingError(
                    f"the ranks save different steps: {sorted({*steps})}"
                )
            generations = self._tier.generations + self._tier.drain
            self._check_space(needed, free, generations - len(kept))
            return line.new_save(step, group.size, is_due)

        return group.reduce_broadcast("local save", work, decide)

    def _check_hosts(self, group: Group) -> None:
        """Raise StorageError unless the ranks of each host, and only they, share one directory."""
        prefix = group.broadcast("hosts", lambda: f".rank-{secrets.token_hex(8)}-")
        mark = partial(self._pieces.mark, f"{prefix}{group.rank}")
        group.reduce_broadcast("mark hosts", mark, len)

        def compare(seen: Sequence[set[str]]) -> None:
            there: dict[str, set[str]] = {}
            for rank, host in enumerate(self._hosts):
                there.setdefault(host, set()).add(f"{prefix}{rank}")
            for rank, host in enumerate(self._hosts):
                others = [int(m.split("-")[-1]) for m in seen[rank] ^ there[host]]
                if not others:
                    continue
                other = self._hosts[min(others)]
                text = (
                    f"{self._pieces.location} is shared by the hosts {host!r} and {other!r}, and "
                    "local checkpoints need a directory of each host alone, such as one below "
                    "/dev/shm"
                )
                if other == host:
                    text = (
                        f"{self._pieces.location}: ranks {rank} and {min(others)} are both on host "
                        f"{host!r}, and see different directories there. Give each host or "
                        "container another name: LocalTier(host=...)"
                    )
                raise StorageError(text)

        group.reduce_broadcast(
            "see hosts", partial(self._pieces.marks, prefix), compare
        )

    def _check_space(
        self, needed: Sequence[int], free: Sequence[int], generations: int
    ) -> None:
        """Raise StorageError if a host has no space for ``generations`` further saves."""
        required = Counter[str]()
        for rank, host in enumerate(self._hosts):
            for holder in (host, *(self._hosts[to] for to in self._targets[rank])):
                required[holder] += (needed[rank] + _SPARE) * generations
        for host, nbytes in required.items():
            available = free[self._hosts.index(host)]
            if available < nbytes:
                raise StorageError(
                    f"{self._pieces.location} on host {host!r} has {available:,} bytes free, and "
                    f"local checkpoints need {nbytes:,} more: {self._tier.generations} generations "
                    "of what its ranks hold and of copies for other hosts. Make the tmpfs larger "
                    "(mount -o remount,size=..., docker run --shm-size=...), or have fewer copies"
                )

    def _store(
        self,
        piece: Piece,
        kept: Sequence[LocalSave],
        begin: Callable[[], AsyncRequest | None],
        line: Line,
        due: Record | None,
    ) -> None:
        """Remove all steps but ``kept``, write the piece, and exchange copies with other hosts."""

        def remove() -> None:
            if self._is_first:
                self._pieces.clear(kept)
                if self._drain is not None:
                    self._drain.write(self._pieces.location)

        def write() -> None:
            request = begin()
            if request is not None:
                request.execute_sync()
            if due is not None:
                record = replace(due, host=self._hosts[piece.rank])
                self._pieces.put(f"{piece.name}/{RECORD}", encode(record))

        def note() -> None:
            with closing(Executor(self._timeout)) as executor:
                executor.call(
                    f"noting that local step {piece.save.step} counts", line.write
                )

        sent = dict.fromkeys(self._targets[self._rank], piece)
        received = {
            rank: Piece(piece.save, rank)
            for rank, targets in enumerate(self._targets)
            if self._rank in targets
        }
        with group_over(self._copies_group, self._timeout) as group:
            group.reduce_broadcast("older local steps", remove, len)
            group.reduce_broadcast("local save", write, len)
            if any(self._targets):
                transfer(group, self._pieces, sent, received)
            if not line.is_complete:
                group.broadcast("note the run", note)
        if due is not None and self._is_first:
            self._pieces.put(f"{piece.save.folder}/{READY}", b"")
            ensure_agent(self._pieces.location)


def as_one_rank(state: Any) -> Any:
    """The state of this rank as the state of a job of one rank: each shard is the main replica.

    The result includes shards of Megatron's classes, and shards that factories build.
    """
    if isinstance(state, StateOfStored):
        declare = state.declare

        def declared(*stored: Any) -> tuple[ShardedStateDict, Collection[str]]:
            given, settled = declare(*stored)
            return as_one_rank(given), settled

        return replace(state, declare=declared)
    seen = Counter[Hashable]()

    def own(leaf: Any) -> Any:
        leaf = from_megatron(leaf)
        if isinstance(leaf, ShardedTensorFactory):
            build_fn = leaf.build_fn
            leaf = copy.copy(leaf)
            leaf.build_fn = lambda *args: tree.dict_list_map_outplace(
                own, build_fn(*args)
            )
        elif (
            isinstance(leaf, ShardedTensor)
            and 0 in leaf.local_shape
            and 0 not in leaf.global_shape
        ):
            # This rank has no element to save or to load: few rows may be on many ranks.
            leaf = LocalNonpersistentObject(destination(leaf))
        elif isinstance(leaf, (ShardedTensor, ShardedObject)):
            place: list[Hashable] = [leaf.key, tuple(leaf.global_offset)]
            if isinstance(leaf, ShardedTensor):
                place += [tuple(leaf.local_shape), str(leaf.flattened_range)]
            leaf = copy.copy(leaf)
            # A rank may hold a shard twice.
            leaf.replica_id = seen[tuple(place)]
            seen[tuple(place)] += 1
        return leaf

    return tree.dict_list_map_outplace(own, state)


def nbytes_of(state: ShardedStateDict) -> int:
    """The bytes of the tensors of a state on this rank."""
    total = 0
    for _, leaf in tree.walk(state):
        data = leaf.data if isinstance(leaf, ShardedBase) else leaf
        total += getattr(data, "nbytes", 0)
    return total


_spare: WeakKeyDictionary[Any, list[GroupLike]] = WeakKeyDictionary()


def another_group(process_group: GroupLike, timeout: timedelta) -> GroupLike:
    """A group of the same ranks, for a thread that works at the same time. Collective.

    A ``Group`` is returned as it is. ``give_back`` keeps any new group for the next call.
    """
    if isinstance(process_group, Group):
        return process_group
    if not (dist.is_available() and dist.is_initialized()):
        return process_group
    over = dist.group.WORLD if process_group is None else process_group
    if spare := _spare.get(over):
        return spare.pop()
    ranks = dist.get_process_group_ranks(over)
    made: dist.ProcessGroup = dist.new_group(
        ranks, timeout, backend="gloo", use_local_synchronization=True
    )
    return made


def give_back(made: GroupLike, process_group: GroupLike) -> None:
    """Keep what ``another_group`` has returned, for its next call. All ranks, in the same order.

    torch cannot make a group of the same name again after one was destroyed.
    """
    if made is process_group:
        return
    over = process_group or dist.group.WORLD
    if over is not None:
        _spare.setdefault(over, []).append(made)
