"""The stages of a save: declare, begin, plan, stage, write, finish, commit.

Ranks communicate in two collective steps: to plan, and after all of them have written. Between
these each rank writes alone: at once, or later as the task of an AsyncRequest.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast
from weakref import finalize

import numpy as np

from megackpt import events
from megackpt.adapters.param_groups import HeldGroup
from megackpt.async_save import AsyncRequest, Pending, Task
from megackpt.backends.base import plan_for_backend
from megackpt.checkpoint import SaveSession, Writing
from megackpt.checkpoint.transaction import CheckedSource
from megackpt.distributed import (
    DEFAULT_TIMEOUT,
    Attempt,
    Group,
    GroupLike,
    attempt,
    group_over,
    name_here,
)
from megackpt.distributed.failures import DEPARTURES
from megackpt.errors import (
    CheckpointingException,
    NonfiniteValues,
    ReplicaMismatch,
    ShardingError,
    join_truncated,
    name_ranks,
)
from megackpt.planning.cache import CachedPlan, cache_of
from megackpt.planning.manifest import (
    Declarations,
    Manifest,
    SavePlan,
    ShardId,
    WriteResult,
)
from megackpt.planning.unchanged import Reuse
from megackpt.saver.audit import (
    OF_A_SAVE,
    AllReplicas,
    Blocks,
    RankDigests,
    RankReplicas,
    describe,
    find_replicas,
    hash_replicas,
)
from megackpt.saver.common_state import groups_to_store, warn_of_difference
from megackpt.saver.nonfinite import examine, merge
from megackpt.saver.save_request import COMMON, SaveRequest, digest_number
from megackpt.staging.buffers import HostCopy
from megackpt.staging.copy import copy_to_host
from megackpt.staging.devices import synchronize
from megackpt.staging.source import TensorSource
from megackpt.state import ShardedStateDict, pickled
from megackpt.strategies import COMMON_IS_KEPT, StrategyLike, resolve

logger = logging.getLogger("megackpt.saver")

Hold = Callable[[], object]
"""Makes later work on devices wait for the copy of an asynchronous save."""

_NO_PLAN = -(2**63) + 1
"""The vote of a rank that cannot reuse a plan: no other vote agrees with it."""
_ABSTAINS = 2**63 - 1
"""It is never the lowest."""
_STALE = "training changed none, or a state was saved that training does not use"
_named_classes: set[str] = set()  # classes to trust that a warning has named
_named_refusals: set[str] = set()  # of links, that a warning has named


@dataclass(frozen=True, eq=False)
class RankPart:
    """What this rank writes and compares. Only rank 0 has ``manifest`` and ``all_replicas``."""

    save_id: str
    plan: SavePlan
    manifest: Manifest | None
    replicas: RankReplicas | None = None
    all_replicas: AllReplicas | None = None
    differed: bool = False
    reuse: Reuse | None = None

    def between_audits(self, declared: Declarations) -> RankPart:
        """For a save that ``Strategy.audit_every`` leaves out: it compares small replicas."""
        own, every = self.replicas, self.all_replicas
        return replace(
            self,
            replicas=own and own.small(declared),
            all_replicas=every and every.small,
        )


@dataclass(frozen=True, eq=False)
class Examined:
    """What a rank has found in its tensors: digests of its replicas, and numbers of its values.

    ``digests``: None without an audit.
    """

    digests: RankDigests | None
    values: bytes


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
    process_group: GroupLike = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    wait_staged: bool = True,
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
            exactly, and warn on ranks whose common state differs from rank 0's. Saves of the same
            declarations warn once of a rank.
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
        timeout: how long any rank waits in one collective step, or in one call to its storage.
        wait_staged: False = kernels that only read CUDA tensors may run while an asynchronous
            save copies them. Call ``request.wait_staged()`` before work that changes tensors.

    Raises:
        BackendError: the format is unknown, cannot hold this, or only ``convert`` writes it.
        ShardingError, CoverageError: declarations that contradict themselves or each other, or
            a common state that holds 2 GiB of tensors.
        CheckpointExists: a complete checkpoint is there, and ``overwrite`` is False.
        SaveInProgress: another save to the directory has committed first.
        StorageError: the storage refused or did not answer, or files that belong to no
            checkpoint have names which this save uses.
        CorruptCheckpoint: a damaged checkpoint is there, and its files cannot be determined.
        ReplicaMismatch: the audit of the strategy has found different values of one shard.
        NonfiniteValues: the strategy refuses NaN and infinite values, and there are some.
        RankFailure: other ranks failed or did not answer in time. If rank 0 was lost right after
            its commit, the new checkpoint is complete nevertheless.
    """
    if common_strategy is not None:
        raise NotImplementedError(
            f"a common_strategy is not supported: {COMMON_IS_KEPT}"
        )
    # An error in the strategy is raised below, on all ranks.
    strategy = attempt(partial(resolve, sharded_strategy)).value
    own = None if strategy is None else strategy.own("save")
    if own is not None:
        later: AsyncRequest | None = own(
            sharded_state_dict,
            checkpoint_dir,
            validate=validate_access_integrity,
            asynchronous=async_sharded_save,
            comparable=preprocess_common_before_consistancy_check,
            content_metadata=content_metadata,
            overwrite=overwrite,
            allow_large_common_state=allow_large_common_state,
            process_group=process_group,
            timeout=timeout,
        )
        return later
    group = group_over(process_group, timeout, f"save {checkpoint_dir}")
    session = SaveSession(str(checkpoint_dir), timeout, name_here(group.rank), group)

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

    with session.running():
        # Declare and begin. The next collective step raises their errors on all ranks.
        declared = attempt(declare)
        cached = find_plan(group, declared.value)
        started = begin(session, declared, cached)
        # Plan, unless all ranks hold the plan of an earlier save.
        reuse, turn = all_ranks_reuse(group, declared, cached, started)
        if cached is not None and reuse:
            request = declared.get()
            part = cached
        else:
            request, part = make_plan(session, declared, started)
        if part.replicas is not None and not part.replicas.due(turn):
            part = part.between_audits(request.declared)
        if request.reuse is not None:
            held = cache_of(group.identity).get(request.fingerprint or 0)
            steps = held.steps if held is not None else []
            part = replace(part, reuse=replace(request.reuse, steps=steps))
        session.total.operation.id = part.save_id
        # Stage, then write: now, or later while training continues.
        stage = _reference
        if async_sharded_save:
            stage = _copy
        task, hold = stage(session, request, part)
        session.wait_for(task)
        examined = attempt(partial(_examine, request, part, turn))
        if wait_staged:
            hold()
        # Finish and commit, when all ranks have written.
        finish = partial(_commit, session, task, request, part, examined)
        if not async_sharded_save:
            task.run()
            finish()
            return None
    return _async_request(session, task, hold, finish)


def _async_request(
    session: SaveSession,
    task: Task[WriteResult],
    hold: Hold,
    commit: Callable[[], None],
) -> AsyncRequest:
    # ``on_drop`` refers to the task. The traceback of a failed task's error refers to ``pending``,
    # so neither would ever be freed: ``on_drop`` ends before the error is raised.
    def finish() -> None:
        on_drop.detach()
        with session.running():
            commit()

    pending = Pending(task, session.group, finish, session.give_up, hold)
    on_drop = finalize(pending, _dropped, task, session.total, os.getpid())
    return AsyncRequest(pending, (), [pending.conclude])


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
    replicas: RankReplicas | None = None


def find_plan(group: Group, request: SaveRequest | None) -> RankPart | None:
    """The plan of an earlier save of these declarations, with a new id.

    All ranks that hold a plan of one planning round derive the same id.
    """
    if request is None or request.fingerprint is None:
        return None
    held = cache_of(group.identity).get(request.fingerprint)
    if held is None:
        return None
    return RankPart(
        held.next_save_id(), held.plan, held.manifest, *held.audit, held.differed
    )


def all_ranks_reuse(
    group: Group,
    declared: Attempt[SaveRequest],
    cached: RankPart | None,
    started: Attempt[None],
) -> tuple[bool, int]:
    """Vote: do all ranks hold one plan, and parameter groups as rank 0 has them? Collective.

    So must the common state, which is compared when a plan is made. A rank where it differed then
    abstains. Also returns how many saves of its declarations rank 0 has begun before, for the
    audit.
    """
    votes = [_NO_PLAN] * 6
    turn = _ABSTAINS
    if group.is_coordinator:
        known = declared.value.fingerprint if declared.value is not None else None
        turn = cache_of(group.identity).turn(known)
    if cached is not None and started.error is None:
        request = declared.get()
        view = Attempt[int | None](None if cached.differed else 0)
        if request.checked and group.size > 1 and not cached.differed:
            view = attempt(request.view_number)
        if view.error is None:
            place = cached.save_id.encode() + os.fsencode(request.directory)
            groups = request.group_number(may_abstain=not group.is_coordinator)
            votes = []
            for number in (digest_number(place), groups, view.value):
                votes += [_ABSTAINS] * 2 if number is None else [number, -number]
    # The lowest of t and the lowest of -t are opposites exactly if all t are equal.
    *lowest, turn = group.lowest([*votes, turn])
    numbers, negatives = lowest[::2], lowest[1::2]
    agreed = all(a == -b for a, b in zip(numbers, negatives, strict=True))
    if agreed:
        untrusted = declared.get().untrusted
        _warn_of_untrusted([t for t in untrusted if t not in _named_classes])
    return agreed, turn


def begin(
    session: SaveSession, declared: Attempt[SaveRequest], cached: RankPart | None
) -> Attempt[None]:
    """On rank 0: begin the transaction, under the id of the cached plan if there is one."""

    @events.stage("begin")
    def work() -> None:
        request = declared.get()
        save_id = uuid.uuid4().hex
        if cached:
            save_id = cached.save_id
        session.total.operation.id = save_id
        indexed = request.backend.properties.indexed
        session.begin(save_id, overwrite=request.overwrite, indexed=indexed)
        if cached and cached.manifest is not None:
            layout = request.backend.layout(session.group.size, cached.manifest)
            session.announce([*layout.files, *request.folders])

    return attempt(work) if session.group.is_coordinator else Attempt(None)


def make_plan(
    session: SaveSession,
    declared: Attempt[SaveRequest],
    started: Attempt[None],
) -> tuple[SaveRequest, RankPart]:
    """Gather the declarations, plan on rank 0, scatter the plans. Collective.

    On rank 0 the request that is returned has parameter groups of other ranks in it.
    """
    group = session.group
    planned: list[tuple[SaveRequest, Manifest, AllReplicas | None]] = []

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
        started.get()
        request = declared.get()
        replicas: Sequence[RankReplicas | None] = [None] * len(parts)
        all_replicas = None
        if request.audit.amount != "off" and group.size > 1:
            replicas, all_replicas = find_replicas(
                [part.declarations for part in parts], request.audit
            )
        request, manifest, replies = _plan_for_all(session, request, parts, replicas)
        planned.append((request, manifest, all_replicas))
        return replies

    reply = group.reduce_scatter("plan", send, decide)
    request, manifest, all_replicas = declared.get(), None, None
    if planned:
        request, manifest, all_replicas = planned[0]
    differs = reply.common is not None
    if reply.common is not None:
        warn_of_difference(group.rank, reply.common, request.compared)
    plan = replace(reply.plan, tensors=request.declared.tensors)
    if request.fingerprint is not None:
        held = CachedPlan(
            reply.save_id, plan, manifest, (reply.replicas, all_replicas), differs
        )
        cache_of(group.identity).put(request.fingerprint, held)
    part = RankPart(reply.save_id, plan, manifest, reply.replicas, all_replicas)
    return request, part


def _plan_for_all(
    session: SaveSession,
    request: SaveRequest,
    parts: Sequence[_RankRequest],
    replicas: Sequence[RankReplicas | None],
) -> tuple[SaveRequest, Manifest, list[_RankReply]]:
    """On rank 0: the plan of every rank, and the manifest of the checkpoint."""
    _check_same("name different directories", [part.directory for part in parts])
    _check_same("ask for different formats", [part.format for part in parts])
    groups = groups_to_store(request.groups, [part.groups for part in parts])
    plans, manifest = plan_for_backend(
        request.backend,
        [part.declarations for part in parts],
        request.policy,
        request.checked,
    )
    layout = request.backend.layout(len(parts), manifest)
    session.announce([*layout.files, *request.folders])
    save_id = session.total.operation.id
    view = None
    if any(part.common != parts[0].common for part in parts):
        view = pickled(COMMON, request.compared)
    replies = []
    for plan, part, own in zip(plans, parts, replicas, strict=True):
        differs = part.common != parts[0].common
        # The table of tensors stays here: each rank has its own.
        sent = replace(plan, tensors=())
        replies.append(_RankReply(save_id, sent, view if differs else None, own))
    return request.with_groups(groups), manifest, replies


def _check_same(difference: str, values: Sequence[str]) -> None:
    """Raise ShardingError unless all ranks have the same value."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) > 1:
        named = [f"{name_ranks(those)}: {value}" for value, those in ranks.items()]
        raise ShardingError(
            f"the ranks of one save {difference}: {join_truncated(named, 4)} (all must agree)"
        )


def _warn_of_untrusted(texts: Iterable[str]) -> None:
    for text in texts:
        _named_classes.add(text)
        logger.warning("saved, but a load will need the argument trusted: %s", text)


def _reference(
    session: SaveSession, request: SaveRequest, part: RankPart
) -> tuple[Task[WriteResult], Hold]:
    """The task of writing the caller's tensors themselves, which threads may read at once."""

    def source() -> CheckedSource:
        source = TensorSource(part.plan, request.held(), request.declared.boxes)
        synchronize(source.held)
        return source

    return _write_task(session, request, part, attempt(source)), int


def _copy(
    session: SaveSession, request: SaveRequest, part: RankPart
) -> tuple[Task[WriteResult], Hold]:
    """The task of writing a copy. CPU tensors may be changed when this returns."""

    @events.stage("stage")
    def copy() -> HostCopy | None:
        source = TensorSource(part.plan, request.held(), request.declared.boxes)
        made = copy_to_host(source, request.staging_memory)
        if made is not None:
            events.current().done = part.plan.nbytes
        return made

    copied = attempt(copy)
    made = copied.value
    if made is not None:
        task = _write_task(session, request, part, copied)
        task.on_end(lambda _: made.release())
        return task, made.hold
    if copied.error is not None:
        return _write_task(session, request, part, copied), int
    # There is no memory for a copy, so the tensors themselves are written now.
    task, hold = _reference(session, request, part)
    task.run()
    if task.outcome is not None and isinstance(task.outcome.error, DEPARTURES):
        raise task.outcome.error
    return task, hold


def _examine(request: SaveRequest, part: RankPart, turn: int) -> Examined:
    """The digests of this rank's replicas, and the numbers of the values that it writes."""
    digests = None
    values = b""
    if part.replicas is not None:
        with events.stage("audit"):
            digests = hash_replicas(
                part.replicas, request.declared, request.held(), turn
            )
    if request.check_values != "off":
        source = TensorSource(part.plan, request.held(), request.declared.boxes)
        with events.stage("values"):
            values = examine(source)
    return Examined(digests, values)


def _write_task(
    session: SaveSession,
    request: SaveRequest,
    part: RankPart,
    source: Attempt[Any],
) -> Task[WriteResult]:
    """The task of writing from a CheckedSource. An error in making that becomes its outcome."""
    stage = events.start("write", session.total.operation)
    stage.todo = part.plan.nbytes
    directory = request.directory
    writing: Callable[[Callable[[int], None]], WriteResult] = _not_ready
    if source.error is None:
        writing = Writing(
            directory,
            part.save_id,
            request.backend,
            part.plan,
            source.get(),
            part.reuse,
        )
    task: Task[WriteResult] = Task(
        writing,
        os.path.basename(directory),
        stage.todo,
        stage.advance if stage.counts_bytes else None,
        session.timeout,
        f"writing of the save to {directory} ({session.who})",
    )

    def end(outcome: Attempt[WriteResult]) -> None:
        if outcome.value is not None:
            written = outcome.value
            is_linked = np.isin(written.item, written.linked)
            stage.done = int(written.length[~is_linked].sum())
        events.finish(stage, outcome.error)

    task.on_end(end)
    if source.error is not None:
        task.finish(Attempt(None, source.error))
    return task


def _commit(
    session: SaveSession,
    task: Task[WriteResult],
    request: SaveRequest,
    part: RankPart,
    examined: Attempt[Examined],
) -> None:
    """When all ranks have written: finish and commit, on rank 0. Collective.

    The error of any rank's task is raised on all ranks. If the audit finds differences, another
    collective step names them, and then raises or commits. NaN and infinite values raise
    NonfiniteValues, or give a WARNING, as the strategy says.
    """
    manifests: list[Manifest] = []

    def send() -> tuple[WriteResult, bytes, bytes]:
        found = examined.get()
        digests = b"" if found.digests is None else found.digests.packed()
        return task.get(), digests, found.values

    def blocks() -> Blocks:
        found = examined.get()
        return {} if found.digests is None else found.digests.of(differing)

    def decide(
        results: Sequence[tuple[WriteResult, bytes, bytes]],
    ) -> list[ShardId] | int:
        written, digests, values = zip(*results, strict=True)
        planned = cast(Manifest, part.manifest)
        manifest = planned.located(written)
        for refused in {result.refused for result in written} - _named_refusals - {""}:
            _named_refusals.add(refused)
            logger.warning(
                "%s: unchanged tensors are written again: %s",
                request.directory,
                refused,
            )
        if any(values):
            manifest = replace(manifest, values=merge(planned, values))
            text = manifest.nonfinite()
            if text and request.check_values == "raise":
                raise NonfiniteValues(
                    f"{request.directory} is not saved, it has {text}. Go back to an earlier "
                    "checkpoint, or save with check_values='note'"
                )
            if text:
                logger.warning("%s has %s", request.directory, text)
        manifests.append(manifest)
        if part.all_replicas is not None:
            differing = part.all_replicas.differing(digests)
            if differing:
                return differing
        nbytes = session.commit(request.backend, manifest)
        cache = cache_of(session.group.identity)
        before = cache.step_with_equal_weights(request.directory, manifest)
        if before and not request.backend.properties.is_delta:
            text = (
                "%s has the weights of %s: all floating-point tensors are equal, so %s"
            )
            logger.warning(text, request.directory, before, _STALE)
        return nbytes

    def conclude(found: Sequence[Blocks]) -> int:
        tensors, chunks = manifests[0].tensors, manifests[0].chunks
        text = describe(OF_A_SAVE, differing, found, tensors, chunks)
        if request.audit.raises:
            raise ReplicaMismatch(text)
        logger.warning("%s", text)
        keys = tuple(dict.fromkeys(shard.key for shard in differing))
        return session.commit(request.backend, replace(manifests[0], differing=keys))

    reply = session.group.reduce_broadcast("write", send, decide)
    if isinstance(reply, list):
        differing = reply
        reply = session.group.reduce_broadcast("audit", blocks, conclude)
    session.finish(reply)
    if part.reuse is not None:
        rows = len(part.plan)
        part.reuse.note(request.directory, part.save_id, task.get(), rows)


def _not_ready(_: Callable[[int], None]) -> WriteResult:
    raise CheckpointingException("this save failed before there was anything to write")


def _dropped(task: Task[WriteResult], total: events.Stage, process: int) -> None:
    """The request was garbage-collected before it was finalized: the save has failed."""
    # A forked child also drops its copy of the request, which is still the parent's.
    if not total.ended and os.getpid() == process:
        reason = CheckpointingException(
            f"{total.operation.path} is not saved: its request was dropped before it was "
            "finalized. Give it to AsyncCallsQueue.schedule_async_request, and close the queue"
        )
        logger.error("%s", reason)
        events.finish(total, task.cancel(reason))
