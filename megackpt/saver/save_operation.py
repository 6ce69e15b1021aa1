"""The steps of a save: declare, begin, plan, stage, write, finish, commit.

Ranks communicate in two steps: when they plan, and after all of them have written. Between
these each rank writes alone: at once, or later as the task of an AsyncRequest.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast
from weakref import finalize

from megackpt import events, gc_pause
from megackpt.adapters.param_groups import HeldGroup
from megackpt.async_save import AsyncRequest, Pending, Task
from megackpt.backends.base import Backend, Source, plan_for_backend
from megackpt.checkpoint import Transaction, Writing, begin
from megackpt.distributed import (
    DEFAULT_TIMEOUT,
    Attempt,
    Group,
    attempt,
    group_over,
)
from megackpt.distributed.failures import DEPARTURES
from megackpt.errors import (
    CheckpointingException,
    RankLost,
    ShardingError,
    join_truncated,
    name_ranks,
)
from megackpt.planning.cache import CachedPlan, cache_of
from megackpt.planning.manifest import Declarations, Manifest, SavePlan, WriteResult
from megackpt.saver.common_state import groups_to_store, warn_of_difference
from megackpt.saver.save_request import COMMON, SaveRequest, digest_number
from megackpt.staging.buffers import HostCopy
from megackpt.staging.copy import copy_to_host
from megackpt.staging.source import TensorSource, synchronize
from megackpt.state import ShardedStateDict, pickled
from megackpt.strategies import COMMON_IS_KEPT, StrategyLike

logger = logging.getLogger("megackpt.saver")

_NO_PLAN = -(2**63) + 1
"""The vote of a rank that cannot reuse a plan: no other vote agrees with it."""
_named_classes: set[str] = set()  # classes to trust that a warning has named


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

    Everything in ``sharded_state_dict`` but ShardedTensors, ShardedObjects, factories and
    LocalNonpersistentObjects is common state: rank 0's value is stored. ``megackpt.sharded``
    declares the tensors of any state dict. The caller's dict and objects are not changed. When
    this returns on any rank, the checkpoint is complete and durable. When it raises, all ranks
    raise the same error, and the directory holds the checkpoint that it held before.

    Args:
        checkpoint_dir: made with its parents where missing. A complete checkpoint there is
            replaced atomically.
        sharded_strategy: a format's name ("torch_dist", "zarr", "safetensors"), a pair
            ("zarr", 2), or a Strategy with its policy. ``convert`` alone writes "torch".
        common_strategy: not supported, as in Megatron-Core (NotImplementedError).
        validate_access_integrity: check that the main replicas of all ranks tile every tensor
            exactly, and warn on ranks whose common state differs from rank 0's (when a plan is
            made, not when one is reused).
        preprocess_common_before_consistancy_check: gives the view of the common state used in
            that comparison. An error in it, or in comparing, is logged; the save continues.
        async_sharded_save: return as soon as the tensors may be changed, with an AsyncRequest
            for an ``AsyncCallsQueue``. The checkpoint is complete when that is finalized.
        content_metadata: stored with the common state; see ``load_content_metadata``.
        overwrite: False = raise CheckpointExists instead of replacing a complete checkpoint.
        allow_large_common_state: do not check the size of tensors and arrays in the common
            state. Otherwise a save warns of them from 1 MiB in sum on, and raises ShardingError
            from 2 GiB on. Rank 0's value decides.
        process_group: a torch process group of the ranks that save (None: the default one, or
            this process alone).
        timeout: how long any rank waits for the others in one step.

    Raises:
        BackendError: the format is unknown, cannot hold this, or only ``convert`` writes it.
        ShardingError, CoverageError: declarations that contradict themselves or each other, or
            a common state that holds 2 GiB of tensors.
        CheckpointExists: a complete checkpoint is there, and ``overwrite`` is False.
        SaveInProgress: another save to the directory has committed first.
        StorageError: the storage refused, or files that belong to no checkpoint have names
            which this save uses.
        CorruptCheckpoint: a damaged checkpoint is there, and its files cannot be determined.
        RankFailure: other ranks failed or did not answer in time.
    """
    if common_strategy is not None:
        raise NotImplementedError(
            f"a common_strategy is not supported: {COMMON_IS_KEPT}"
        )
    group = group_over(process_group, timeout)
    operation = _SaveOperation(group, str(checkpoint_dir))

    @events.stage("declare")
    def declare() -> SaveRequest:
        return SaveRequest.of(
            sharded_state_dict,
            checkpoint_dir,
            sharded_strategy,
            group,
            content_metadata=content_metadata,
            validate=validate_access_integrity,
            comparable=preprocess_common_before_consistancy_check,
            overwrite=overwrite,
            allow_large_common_state=allow_large_common_state,
        )

    with operation.running():
        # Declare and begin. The next step raises their errors on all ranks.
        declared = attempt(declare)
        cached = _find_plan(group, declared.value)
        started = operation.begin(declared, cached)
        # Plan, unless all ranks hold the plan of an earlier save.
        reuse = _all_ranks_reuse(group, declared, cached, started)
        if cached is not None and reuse:
            request = declared.get()
            part = cached
        else:
            request, part = _make_plan(group, declared, started)
        operation.total.operation.id = part.save_id
        # Stage, then write: now, or later while training continues.
        stage = _reference
        if async_sharded_save:
            stage = _copy
        task = operation.task = stage(operation, request, part)
        backend = request.backend
        if not async_sharded_save:
            task.run()
            # Finish and commit, when all ranks have written.
            operation.commit(task, backend, part)
            return None

    def finish() -> None:
        with operation.running():
            operation.commit(task, backend, part)

    pending = Pending(task, group, finish, operation.give_up)
    finalize(pending, _dropped, task, operation.total, os.getpid()).atexit = False
    return AsyncRequest(pending, (), [pending.conclude])


@dataclass(frozen=True, eq=False)
class _RankPart:
    """What this rank writes. Only rank 0 has ``manifest``."""

    save_id: str
    plan: SavePlan
    manifest: Manifest | None


@dataclass(frozen=True, eq=False)
class _RankRequest:
    """What a rank sends to rank 0 to have the save planned. ``common`` is a digest."""

    directory: str
    format: str
    declarations: Declarations
    common: bytes
    groups: Mapping[str, HeldGroup]


@dataclass(frozen=True, eq=False)
class _RankReply:
    """What rank 0 replies. ``common`` is its view of the common state, if it differs."""

    save_id: str
    plan: SavePlan
    common: bytes | None


class _SaveOperation:
    """One save on one rank: its events and, on rank 0, the transaction in the storage.

    All calls of the transaction are made here. Any failure ends it.
    """

    def __init__(self, group: Group, directory: str) -> None:
        self.group = group
        self.transaction: Transaction | None = None
        self.task: Task[WriteResult] | None = None
        self.total = events.start(
            events.TOTAL, events.Operation("save", directory, group.rank, group.size)
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """A part of the save. An exception ends it on this rank."""
        try:
            with self.group, gc_pause.paused(), events.use(self.total):
                yield
        except BaseException as error:
            # Other ranks may still be writing if they do not know of this error.
            interrupted = isinstance(error, DEPARTURES) and self.group.size > 1
            self._end(error, interrupted or isinstance(error, RankLost))
            raise

    def begin(
        self, declared: Attempt[SaveRequest], cached: _RankPart | None
    ) -> Attempt[Transaction | None]:
        """On rank 0: begin the transaction, under the id of the cached plan if there is one."""
        if not self.group.is_coordinator:
            return Attempt(None)

        @events.stage("begin")
        def work() -> Transaction:
            request = declared.get()
            save_id = uuid.uuid4().hex
            if cached:
                save_id = cached.save_id
            self.total.operation.id = save_id
            place = begin(
                request.directory, save_id=save_id, overwrite=request.overwrite
            )
            self.transaction = place
            if cached and cached.manifest is not None:
                place.announce(
                    request.backend.layout(self.group.size, cached.manifest).files
                )
            return place

        return attempt(work)

    def commit(
        self, task: Task[WriteResult], backend: Backend, part: _RankPart
    ) -> None:
        """When all ranks have written: finish and commit, on rank 0. Collective.

        The error of any rank's task is raised on all ranks.
        """

        @events.stage("commit")
        def work(results: Sequence[WriteResult]) -> int:
            cast(Transaction, self.transaction).commit(
                backend,
                cast(Manifest, part.manifest).located(results),
                confirm=self.group.confirm,
            )
            return sum(int(result.length.sum()) for result in results)

        written = self.group.reduce_broadcast("write", task.get, work)
        self.total.operation.bytes = written
        events.finish(self.total)

    def give_up(self) -> None:
        """Cancel the save on this rank, without the others, which may still be writing."""
        operation = self.total.operation
        self.group.give_up()
        error = CheckpointingException(
            f"the save {operation.id} to {operation.path} is given up"
        )
        self._end(error, others_may_write=self.group.size > 1)

    def _end(self, error: BaseException, others_may_write: bool) -> None:
        if self.transaction is not None:
            # A disk that hangs would hang this thread, too.
            if others_may_write or (self.task is not None and self.task.stuck):
                self.transaction.abandon()
            else:
                self.transaction.abort()
        events.finish(self.total, error)


def _find_plan(group: Group, request: SaveRequest | None) -> _RankPart | None:
    """The plan of an earlier save of these declarations, with a new id.

    All ranks that hold a plan of one planning round derive the same id.
    """
    if request is None or request.fingerprint is None:
        return None
    held = cache_of(group.identity).get(request.fingerprint)
    if held is None:
        return None
    return _RankPart(held.next_save_id(), held.plan, held.manifest)


def _all_ranks_reuse(
    group: Group,
    declared: Attempt[SaveRequest],
    cached: _RankPart | None,
    started: Attempt[Transaction | None],
) -> bool:
    """Vote: do all ranks hold one plan, and parameter groups as rank 0 has them? Collective."""
    votes = [_NO_PLAN] * 4
    if cached is not None and started.error is None:
        request = declared.get()
        number = digest_number(cached.save_id.encode() + os.fsencode(request.directory))
        groups = request.group_votes(may_abstain=not group.is_coordinator)
        votes = [number, -number, *groups]
    # The lowest of t and the lowest of -t are opposites exactly if all t are equal.
    plan, minus_plan, groups_number, minus_groups = group.lowest(votes)
    agreed = plan == -minus_plan and groups_number == -minus_groups
    if agreed:
        untrusted = declared.get().untrusted
        _warn_of_untrusted([t for t in untrusted if t not in _named_classes])
    return agreed


def _make_plan(
    group: Group, declared: Attempt[SaveRequest], started: Attempt[Transaction | None]
) -> tuple[SaveRequest, _RankPart]:
    """Gather the declarations, plan on rank 0, scatter the plans. Collective.

    On rank 0 the request that is returned has parameter groups of other ranks in it.
    """
    planned: list[tuple[SaveRequest, Manifest]] = []

    def send() -> _RankRequest:
        request = declared.get()
        view = b""
        if request.checked and group.size > 1:
            view = pickled(COMMON, request.compared)
        _warn_of_untrusted(request.untrusted)
        return _RankRequest(
            request.directory,
            request.format,
            request.declared,
            blake2b(view).digest(),
            request.needed_groups(),
        )

    @events.stage("plan")
    def decide(parts: Sequence[_RankRequest]) -> list[_RankReply]:
        place = cast(Transaction, started.get())
        request, manifest, replies = _plan_for_all(declared.get(), place, parts)
        planned.append((request, manifest))
        return replies

    reply = group.reduce_scatter("plan", send, decide)
    request, manifest = planned[0] if planned else (declared.get(), None)
    if reply.common is not None:
        warn_of_difference(group.rank, reply.common, request.compared)
    plan = replace(reply.plan, tensors=request.declared.tensors)
    if request.fingerprint is not None:
        held = CachedPlan(reply.save_id, plan, manifest)
        cache_of(group.identity).put(request.fingerprint, held)
    return request, _RankPart(reply.save_id, plan, manifest)


def _plan_for_all(
    request: SaveRequest, place: Transaction, parts: Sequence[_RankRequest]
) -> tuple[SaveRequest, Manifest, list[_RankReply]]:
    """On rank 0: the plan of every rank, and the manifest of the checkpoint."""
    _check_same("name different directories", [part.directory for part in parts])
    _check_same("ask for different formats", [part.format for part in parts])
    groups = groups_to_store(request.groups, [part.groups for part in parts])
    request = request.with_groups(groups)
    plans, manifest = plan_for_backend(
        request.backend,
        [part.declarations for part in parts],
        request.policy,
        request.checked,
    )
    place.announce(request.backend.layout(len(parts), manifest).files)
    view = None
    if any(part.common != parts[0].common for part in parts):
        view = pickled(COMMON, request.compared)
    replies = []
    for plan, part in zip(plans, parts, strict=True):
        differs = part.common != parts[0].common
        # The table of tensors stays here: each rank has its own.
        sent = replace(plan, tensors=())
        replies.append(_RankReply(place.save_id, sent, view if differs else None))
    return request, manifest, replies


def _check_same(what: str, values: Sequence[str]) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) > 1:
        named = [f"{name_ranks(those)}: {value}" for value, those in ranks.items()]
        raise ShardingError(
            f"the ranks of one save {what}: {join_truncated(named, 4)} (all must agree)"
        )


def _warn_of_untrusted(texts: Iterable[str]) -> None:
    for text in texts:
        _named_classes.add(text)
        logger.warning("saved, but a load will need the argument trusted: %s", text)


def _reference(
    operation: _SaveOperation, request: SaveRequest, part: _RankPart
) -> Task[WriteResult]:
    """The task of writing the caller's tensors themselves, which threads may read at once."""

    def source() -> TensorSource:
        source = TensorSource(part.plan, request.held(), request.declared.boxes)
        synchronize(source.held)
        return source

    return _write_task(operation, request, part, source)


def _copy(
    operation: _SaveOperation, request: SaveRequest, part: _RankPart
) -> Task[WriteResult]:
    """The task of writing a copy. When this returns, the tensors may be changed."""

    @events.stage("stage")
    def copy() -> HostCopy | None:
        source = TensorSource(part.plan, request.held(), request.declared.boxes)
        made = copy_to_host(source, request.staging_memory)
        if made is not None:
            events.current().done = part.plan.nbytes
        return made

    copied = attempt(copy)
    made = copied.value
    if made is not None or copied.error is not None:
        task = _write_task(operation, request, part, lambda: cast(Source, copied.get()))
        if made is not None:
            task.on_end(lambda _: made.release())
        return task
    # There is no memory for a copy, so the tensors themselves are written now.
    task = _reference(operation, request, part)
    task.run()
    if task.outcome is not None and isinstance(task.outcome.error, DEPARTURES):
        raise task.outcome.error
    return task


def _write_task(
    operation: _SaveOperation,
    request: SaveRequest,
    part: _RankPart,
    source: Callable[[], Source],
) -> Task[WriteResult]:
    """The task of writing. An error in making its source becomes its outcome."""
    step = events.start("write", operation.total.operation)
    step.todo = part.plan.nbytes
    directory = request.directory
    backend = request.backend
    writing = attempt(
        lambda: Writing(directory, part.save_id, backend, part.plan, source())
    )
    task: Task[WriteResult] = Task(
        writing.value or _not_ready,
        os.path.basename(directory),
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


def _not_ready(_: Callable[[int], None]) -> WriteResult:
    raise CheckpointingException("this save failed before there was anything to write")


def _dropped(task: Task[WriteResult], total: events.Stage, process: int) -> None:
    """The request was garbage-collected before it was finalized: the save has failed."""
    # A forked child also drops its copy of the request, which is still the parent's.
    if not total.ended and os.getpid() == process:
        reason = CheckpointingException(
            f"{task.name}: its request was dropped before it was finalized"
        )
        events.finish(total, task.cancel(reason))
