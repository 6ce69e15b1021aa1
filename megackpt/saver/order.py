"""The order of a save, and nothing but the order: declare, begin, agree, plan, stage, write, finish, commit.

The ranks come together twice: before the writing, and after it. In between each works by itself: at once, or as a
task of an AsyncRequest while training goes on.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast
from weakref import finalize

from megackpt import events, gc_pause
from megackpt.adapters.megatron import native
from megackpt.adapters.param_groups import HeldGroup
from megackpt.async_save import AsyncRequest, Pending, Task, ThreadWorker
from megackpt.backends.base import Source, plan_in_format
from megackpt.checkpoint import Place, absolute, begin, commit
from megackpt.checkpoint.writing import Writing
from megackpt.distributed import (
    DEFAULT_TIMEOUT,
    Attempt,
    Group,
    Mark,
    attempt,
    group_over,
)
from megackpt.distributed.failures import DEPARTURES
from megackpt.errors import CheckpointingException, RankLost
from megackpt.planning.cache import Contents, cache_of
from megackpt.planning.manifest import Declarations, Manifest, SavePlan, WriteResult
from megackpt.saver.asking import COMMON, Request, itself
from megackpt.saver.notices import (
    check_same,
    groups_to_store,
    untold,
    warn_of_difference,
    warn_of_untrusted,
)
from megackpt.staging.snapshot import Snapshot
from megackpt.staging.source import Staged, settle
from megackpt.state import ShardedStateDict, extract, pickled
from megackpt.strategies import COMMON_IS_KEPT, StrategyLike, resolve

_NEVER = -(2**63) + 1  # the vote that no vote agrees with
_PATIENCE = 6.0
"""Seconds that the coordinator of a save which is given up waits for the other ranks to stop writing."""


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: StrategyLike = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: Mapping[str, Any] | None = None,
    *,
    overwrite: bool = True,
    allow_large_common_state: bool = False,
    process_group: Any = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> AsyncRequest | None:
    """Save the sharded state of all ranks as one checkpoint; collective over ``process_group``.

    Everything in ``sharded_state_dict`` that is no ShardedTensor, ShardedObject, factory or
    LocalNonpersistentObject is common state: the coordinator's (rank 0's) value is stored. ``megackpt.sharded``
    declares the tensors of any state dict. The caller's dict and objects are not changed. When this returns on any
    rank, the checkpoint is complete and durable; when it raises, every rank raises the same story, and what stood in
    the directory before still stands.

    Args:
        checkpoint_dir: made with its parents where missing. A complete checkpoint there is replaced atomically.
        sharded_strategy: a format's name ("torch_dist", "zarr", "safetensors"), a pair ("zarr", 2),
            or a Strategy with its policy. "torch" is written by ``convert`` only.
        common_strategy: not supported, as in Megatron-Core (NotImplementedError).
        validate_access_integrity: check that the main replicas of all ranks tile every tensor exactly, and warn on
            ranks whose common state differs from rank 0's (when a plan is made, not when one is reused).
        preprocess_common_before_consistancy_check: gives the view of the common state used in that comparison. What
            fails in it, or in comparing, is logged; the save goes on.
        async_sharded_save: return as soon as the tensors may be changed, with an AsyncRequest for an
            ``AsyncCallsQueue``; the checkpoint is complete when that has been finalized.
        content_metadata: stored with the common state; read back by ``load_content_metadata``.
        overwrite: False = raise CheckpointExists instead of replacing a complete checkpoint.
        allow_large_common_state: store tensors and arrays of any size as common state, without a word. Otherwise a save
            warns of them from 1 MiB in all on, and raises ShardingError from 2 GiB on. Rank 0's value decides.
        process_group: a torch process group of the ranks that save (None: the default one, or this process alone).
        timeout: how long any rank waits for the others in one step.

    Raises:
        BackendError: the format is unknown, cannot hold this, or is written by ``convert`` only.
        ShardingError, CoverageError: declarations that contradict themselves or each other, or a common state
            that holds 2 GiB of tensors.
        CheckpointExists, SaveInProgress: the directory is taken.
        StorageError: the disk refused, or files that belong to no checkpoint have names which this save uses.
        CorruptCheckpoint: a damaged checkpoint is there, and which files belong to it cannot be told.
        RankFailure: other ranks failed or did not answer in time.
    """
    if common_strategy is not None:
        raise NotImplementedError(
            f"a common_strategy is not supported: {COMMON_IS_KEPT}"
        )
    group = group_over(process_group, timeout)
    compare = preprocess_common_before_consistancy_check or itself

    @events.stage("declare")
    def request() -> Request:
        return Request.of(
            extract(sharded_state_dict, native),
            absolute(checkpoint_dir),
            resolve(sharded_strategy),
            group,
            content_metadata=content_metadata,
            compare=compare if validate_access_integrity else None,
            overwrite=overwrite,
            allow_large_common_state=allow_large_common_state,
        )

    running = _Save(group, str(checkpoint_dir))
    if async_sharded_save:
        return running.later(request)
    running.now(request)
    return None


@dataclass(frozen=True, eq=False)
class _Declared:
    """What the coordinator hears of one rank."""

    directory: str
    format: str
    declarations: Declarations
    common: bytes  # digest of the compared view of the common state
    needed: Mapping[str, HeldGroup]


@dataclass(frozen=True, eq=False)
class _Ticket:
    """What one rank is told: who writes what, and where."""

    save_id: str
    directory: str
    plan_id: str
    plan: SavePlan
    common: bytes | None = (
        None  # the coordinator's view of the common state, for a rank whose own differs
    )


class _Save:
    """One save on one rank: the order of its steps. Rank 0 alone has a place and a manifest."""

    request: Attempt[Request]

    def __init__(self, group: Group, directory: str) -> None:
        self.group = group
        self.cache = cache_of(group)
        self.place: Attempt[Place] = Attempt(None)
        self.manifest: Manifest | None = None
        self.contents: Contents | None = None
        self.mark = Mark()
        self.whole = events.start(
            events.TOTAL, events.Operation("save", directory, group.rank, group.size)
        )

    def now(self, request: Callable[[], Request]) -> None:
        with self.together(lambda: self.group):
            task = self.task(self.prepared(request), self.settled)
            task.run()
            self.conclude(task)

    def later(self, request: Callable[[], Request]) -> AsyncRequest:
        with self.together(lambda: self.group):
            self.mark = self.group.mark()
            task = self.copied(self.prepared(request))

        def finish(meet: Callable[[], Group]) -> None:
            with self.together(meet):
                self.conclude(task)

        pending = Pending(task, self.group, self.mark, finish, self.give_up)
        finalize(pending, _dropped, task, self.whole, os.getpid()).atexit = False
        return AsyncRequest(pending, (), [pending.conclude])

    @contextmanager
    def together(self, meet: Callable[[], Group]) -> Iterator[None]:
        """The ranks come together; whatever goes wrong then is the end of the save."""
        try:
            with (
                meet() as group,
                group.leaving(),
                gc_pause.paused(),
                events.use(self.whole),
            ):
                yield
        except BaseException as error:
            interrupted = isinstance(error, DEPARTURES) and self.group.size > 1
            self.end(interrupted or isinstance(error, RankLost), error)
            raise

    def end(self, others_may_write: bool, error: BaseException) -> None:
        if self.place.value is not None:
            self.place.value.abandon() if others_may_write else self.place.value.abort()
        events.finish(self.whole, error)

    def give_up(self) -> None:
        """On this rank alone; the others are expected to do so as well."""
        operation = self.whole.operation
        self.end(
            not self.group.parted(operation.id, self.mark, _PATIENCE),
            CheckpointingException(
                f"the save {operation.id} to {operation.path} is given up"
            ),
        )

    def prepared(self, request: Callable[[], Request]) -> _Ticket:
        self.request = attempt(request)
        held = self.ticket_held()
        if self.agreed(held) and held:
            ticket = held
            warn_of_untrusted(untold(self.request.get().wanted))
        else:
            ticket = self.planned()
        self.whole.operation.id = ticket.save_id
        return ticket

    def ticket_held(self) -> _Ticket | None:
        """The plan of an earlier save of these declarations, under an id that all ranks derive alike."""
        request = self.request.value
        if request is None or request.fingerprint is None:
            return None
        held = self.cache.get(request.fingerprint)
        if held is None:
            return None
        self.manifest, self.contents = held.manifest, held.contents
        return _Ticket(held.next_save_id(), request.directory, held.plan_id, held.plan)

    def agreed(self, held: _Ticket | None) -> bool:
        """Do all ranks go on without planning: with this ticket, and groups of which rank 0's are everybody's?"""
        vote = self.vote(held)
        votes = [_NEVER] * 4
        if vote is not None:
            votes = [
                *(vote, -vote),
                *self.request.get().vote_on_groups(
                    abstain=not self.group.is_coordinator
                ),
            ]
        # The least of t and the least of -t are opposites exactly if all t are equal.
        tickets, minus_tickets, groups, minus_groups = self.group.lowest(votes)
        return tickets == -minus_tickets and groups == -minus_groups

    def vote(self, held: _Ticket | None) -> int | None:
        """Begin, on the coordinator; then the number of the ticket that this rank holds."""
        if self.group.is_coordinator:
            save_id = held.save_id if held else uuid.uuid4().hex
            self.place = attempt(lambda: self.begin(save_id))
        if held is None or self.place.error is not None:
            return None
        named = held.save_id.encode() + os.fsencode(held.directory)
        return int.from_bytes(blake2b(named, digest_size=7).digest())

    @events.stage("begin")
    def begin(self, save_id: str) -> Place:
        request = self.request.get()
        events.current().operation.id = save_id
        place = begin(request.directory, save_id=save_id, overwrite=request.overwrite)
        try:
            if self.manifest is not None:
                place.announce(request.backend.files(self.group.size, self.manifest))
        except BaseException:
            place.abort()
            raise
        return place

    def planned(self) -> _Ticket:
        ticket = self.group.reduce_scatter("plan", self.declared, self.plan)
        request = self.request.get()
        ticket = replace(
            ticket, plan=replace(ticket.plan, tensors=request.declared.tensors)
        )
        held = self.cache.put(
            request.fingerprint, ticket.plan_id, ticket.plan, self.manifest
        )
        self.contents = held.contents
        return ticket

    def declared(self) -> _Declared:
        request = self.request.get()
        view = pickled(COMMON, request.compared) if request.checked else b""
        warn_of_untrusted(request.wanted)
        common = blake2b(view).digest()
        return _Declared(
            request.directory,
            request.format,
            request.declared,
            common,
            request.needed(),
        )

    @events.stage("plan")
    def plan(self, parts: Sequence[_Declared]) -> list[_Ticket]:
        """On the coordinator: who writes what."""
        request, place = self.request.get(), self.place.get()
        check_same("name different directories", [p.directory for p in parts])
        check_same("ask for different formats", [p.format for p in parts])
        request.store(groups_to_store(request.groups, [p.needed for p in parts]))
        declared = [p.declarations for p in parts]
        plans, manifest = plan_in_format(
            request.backend, declared, request.policy, request.checked
        )
        self.manifest = manifest
        place.announce(request.backend.files(self.group.size, manifest))
        plan_id = uuid.uuid4().hex
        own, view = parts[0].common, b""
        if any(p.common != own for p in parts):
            view = pickled(
                COMMON, request.compared
            )  # as it is stored: plain pickle cannot hold some tensors
        return [
            _Ticket(
                place.save_id,
                request.directory,
                plan_id,
                replace(plan, tensors=()),  # each rank knows its own table
                None if p.common == own else view,
            )
            for plan, p in zip(plans, parts, strict=True)
        ]

    def source(self, ticket: _Ticket) -> Staged:
        """What this rank is to write, where it lies now."""
        request = self.request.get()
        if ticket.common is not None:
            warn_of_difference(self.group.rank, ticket.common, request.compared)
        return Staged(ticket.plan, request.held(), request.declared.boxes)

    def settled(self, ticket: _Ticket) -> Staged:
        """The same, for threads of a backend to read at once."""
        staged = self.source(ticket)
        settle(staged.held)
        return staged

    def copied(self, ticket: _Ticket) -> Task[WriteResult]:
        """The task of writing a copy. When this returns the tensors may be changed."""
        snapshot = attempt(lambda: self.snapshot(ticket))
        task = self.task(ticket, lambda _: snapshot.get().source)
        if snapshot.value is not None:
            task.on_end(lambda _: snapshot.get().release())
            if not snapshot.value.complete:
                # There is no room for all of it: what there is begins to be written now.
                ThreadWorker().start(task)
                settled = attempt(snapshot.value.settle)
                if settled.error is not None:
                    task.cancel()
                    task.finish(Attempt(None, settled.error))
        self.request = Attempt(self.request.get().let_go())
        return task

    @events.stage("stage")
    def snapshot(self, ticket: _Ticket) -> Snapshot:
        snapshot = Snapshot.of(self.source(ticket), self.request.get().staging_memory)
        events.current().done = ticket.plan.nbytes
        return snapshot

    def task(
        self, ticket: _Ticket, source: Callable[[_Ticket], Source]
    ) -> Task[WriteResult]:
        """The task of writing. What stands in its way on this rank is its outcome, which all ranks hear."""
        step = events.start("write", self.whole.operation)
        step.todo = ticket.plan.nbytes
        backend, plan = self.request.get().backend, ticket.plan
        writing = attempt(
            lambda: Writing(
                ticket.directory, ticket.save_id, backend, plan, source(ticket)
            )
        )
        task: Task[WriteResult] = Task(
            writing.value or _unready,
            os.path.basename(ticket.directory),
            step.todo,
            step.advance if step.counts_bytes else None,
        )

        def end(outcome: Attempt[WriteResult]) -> None:
            if outcome.value is not None:
                step.done = int(outcome.value.length.sum())
            events.finish(step, outcome.error)

        task.on_end(end)
        if writing.error is not None:
            task.finish(Attempt(None, writing.error))
        return task

    def conclude(self, task: Task[WriteResult]) -> None:
        """All ranks have written, or some have failed."""
        self.whole.operation.bytes = self.group.reduce_broadcast(
            "write", task.get, self.commit
        )
        events.finish(self.whole)

    @events.stage("commit")
    def commit(self, results: Sequence[WriteResult]) -> int:
        """On the coordinator: all ranks have written. How many bytes?"""
        manifest = cast(Manifest, self.manifest).located(results)
        commit(
            self.place.get(),
            self.request.get().backend,
            manifest,
            confirm=self.group.confirm,
            contents=self.contents,
        )
        return sum(int(result.length.sum()) for result in results)


def _dropped(task: Task[WriteResult], whole: events.Stage, process: int) -> None:
    """Nobody has the request any more. If it is not over, no rank can finalize it."""
    if (
        not whole.ended and os.getpid() == process
    ):  # in a forked child it is the parent's
        reason = CheckpointingException(
            f"{task.name}: its request was dropped before it was finalized"
        )
        events.finish(whole, task.cancel(reason))


def _unready(_: Callable[[int], None]) -> WriteResult:
    raise CheckpointingException(
        "this save has failed before there was anything to write"
    )
