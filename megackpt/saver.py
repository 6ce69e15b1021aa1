"""The order of a save, and nothing but the order: declare, begin, agree, plan, stage, write, finish, commit."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from megackpt import collector, events, objects, tree
from megackpt.backends.base import Backend, plan_in_format
from megackpt.checkpoint import Place, absolute, begin, commit, place_of
from megackpt.errors import CorruptCheckpoint, RankLost, ShardingError
from megackpt.planning.cache import PlanCache, fingerprint
from megackpt.planning.manifest import Declarations, Manifest, SavePlan, WriteResult
from megackpt.planning.save_plan import SavePolicy
from megackpt.runtime.collectives import DEFAULT_TIMEOUT, Attempt, Group, attempt, domain_of, group_over
from megackpt.runtime.collectives.failures import name_ranks
from megackpt.runtime.counting import counted_source
from megackpt.runtime.staging import Staged, settle
from megackpt.sharded import (
    Extracted,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    bundled,
    declare,
    extract,
    object_groups,
    pickled,
)
from megackpt.strategies import Strategy, StrategyLike, resolve

Held = torch.Tensor | Callable[[], bytes]

logger = logging.getLogger(__name__)

CONTENT_METADATA = "content_metadata"
_COMMON = "the common state"

_caches: WeakKeyDictionary[Group, PlanCache] = WeakKeyDictionary()


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
    process_group: Any = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> None:
    """Save the sharded state of all ranks as one checkpoint; collective over ``process_group``.

    Everything in ``sharded_state_dict`` that is no ShardedTensor, ShardedObject, factory or
    LocalNonpersistentObject is common state: the coordinator's (rank 0's) value is stored. The caller's dict
    and objects are not changed. When this returns on any rank, the checkpoint is complete and durable; when it
    raises, every rank raises the same story, and what stood in the directory before still stands.

    Args:
        checkpoint_dir: made with its parents where missing. A complete checkpoint there is replaced atomically.
        sharded_strategy: a format's name ("torch_dist", "zarr"), a pair ("zarr", 2), or a Strategy with its policy.
        common_strategy: not supported, as in Megatron-Core (NotImplementedError).
        validate_access_integrity: check that the main replicas of all ranks tile every tensor exactly, and warn on
            ranks whose common state differs from rank 0's (when a plan is made, not when one is reused).
        preprocess_common_before_consistancy_check: gives the view of the common state used in that comparison.
        content_metadata: stored with the common state; read back by ``load_content_metadata``.
        overwrite: False = raise CheckpointExists instead of replacing a complete checkpoint.
        process_group: a torch process group of the ranks that save (None: the default one, or this process alone).
        timeout: how long any rank waits for the others in one step.

    Raises:
        ShardingError, CoverageError: declarations that contradict themselves or each other.
        CheckpointExists, SaveInProgress: the directory is taken.
        StorageError: the disk refused.
        RankFailure: other ranks failed or did not answer in time.
    """
    if common_strategy is not None:
        raise NotImplementedError(
            "a common_strategy is not supported: the format keeps the common state itself"
        )
    if async_sharded_save:
        raise NotImplementedError("this release saves synchronously only: leave async_sharded_save=False")
    group = group_over(process_group, timeout)
    compare = preprocess_common_before_consistancy_check or _itself

    @events.stage("declare")
    def request() -> Request:
        return Request.of(
            extract(sharded_state_dict),
            absolute(checkpoint_dir),
            resolve(sharded_strategy),
            group,
            content_metadata=content_metadata,
            compare=compare if validate_access_integrity else None,
            overwrite=overwrite,
        )

    with (
        group,
        collector.held_off(),
        events.operation("save", checkpoint_dir, group.rank, group.size) as running,
    ):
        running.bytes = _Save(group, attempt(request)).run()


def _compact(leaf: Any) -> Any:
    """A view of a larger tensor as a tensor of its own, or all of the larger one would be stored."""
    if (
        type(leaf) is torch.Tensor
        and leaf.layout is torch.strided
        and not leaf.is_quantized
        and not leaf.is_meta
    ):
        spare = leaf.untyped_storage().nbytes() > leaf.numel() * leaf.element_size()
        return leaf.clone() if spare else leaf
    return leaf


def _itself(common: Any) -> Any:
    return common


@dataclass(frozen=True, eq=False)
class Request:
    """What this rank asks to be saved, checked by itself."""

    directory: str
    backend: Backend
    format: str  # name and version
    policy: SavePolicy
    overwrite: bool
    shards: Sequence[ShardedTensor | ShardedObject]
    common: Mapping[str, Any]
    compared: Any  # the view of the common state that ranks compare; None: nothing is validated
    declared: Declarations
    fingerprint: int

    @classmethod
    def of(
        cls,
        extracted: Extracted,
        directory: str,
        strategy: Strategy,
        group: Group,
        *,
        content_metadata: Mapping[str, Any] | None = None,
        compare: Callable[[Any], Any] | None = _itself,
        overwrite: bool = True,
    ) -> Request:
        common: dict[Any, Any] = tree.dict_list_map_outplace(_compact, extracted.common)
        if content_metadata is not None:
            if not isinstance(content_metadata, Mapping):
                raise ShardingError(f"content_metadata must be a dict, not {content_metadata!r}")
            common[CONTENT_METADATA] = {k: v for k, v in content_metadata.items() if k != "dp_cp_group"}
        declared = declare(
            extracted.shards,
            rank=group.rank,
            domain=domain_of(strategy.dedup_group),
            common=group.is_coordinator,
            saving=True,
        )
        backend = strategy.make_backend()
        policy = SavePolicy(balance=strategy.balance)
        # The caller's function gets containers of its own: what it takes out is saved all the same.
        compared = None if compare is None else compare(tree.copied(common))
        named = f"{backend.name} {backend.version}"
        options = getattr(backend, "__dict__", {})  # they may decide where things are to be
        what = f"{named} {options} {policy} size={group.size} checked={compared is not None}"
        return cls(
            directory,
            backend,
            named,
            policy,
            overwrite,
            extracted.shards,
            common,
            compared,
            declared,
            fingerprint(declared, what),
        )

    def held(self) -> list[Held]:
        """For each row of ``declared``: its tensor, or what makes its blob."""
        groups = object_groups(self.shards)
        rows = [self._holder(shard, groups.get(i, [])) for i, shard in enumerate(self.shards)]
        return [*rows, lambda: pickled(_COMMON, dict(self.common))]

    def _holder(self, shard: ShardedTensor | ShardedObject, group: Sequence[int]) -> Held:
        if isinstance(shard, ShardedTensor):
            return cast(torch.Tensor, shard.data)
        values = [self.shards[i].data for i in group]
        return lambda: pickled(f"the object {shard.unique_key!r}", bundled(shard, values))

    def blobs(self) -> Iterator[bytes]:
        """The objects of which this rank holds the main replica; on the coordinator also the common state."""
        mains = self.declared.main
        for i, held in enumerate(self.held()[: len(self.declared)]):
            if mains[i] and not isinstance(held, torch.Tensor):
                yield held()


@dataclass(frozen=True, eq=False)
class _Declared:
    """What the coordinator hears of one rank."""

    directory: str
    format: str
    declarations: Declarations
    common: bytes  # digest of the compared view of the common state


@dataclass(frozen=True, eq=False)
class _Ticket:
    """What one rank is told: who writes what, and where."""

    save_id: str
    directory: str
    plan_id: str
    plan: SavePlan
    common: Any = None  # the coordinator's view of the common state, for a rank whose own differs


class _Save:
    """One save on one rank: the order of its steps. Rank 0 alone has a place and a manifest."""

    def __init__(self, group: Group, request: Attempt[Request]) -> None:
        self.group = group
        self.request = request
        self.cache = _caches.setdefault(group, PlanCache())
        self.place: Attempt[Place] = Attempt(None)
        self.manifest: Manifest | None = None

    def run(self) -> int:
        """The bytes that all ranks have written."""
        try:
            held = self.ticket_held()
            agreed = self.group.all_agree(self.vote(held))
            ticket = held if held and agreed else self.planned()
            return self.group.reduce_broadcast("write", lambda: self.write(ticket), self.commit)
        except RankLost:
            if self.place.value is not None:
                self.place.value.abandon()
            raise
        except BaseException:
            if self.place.value is not None:
                self.place.value.abort()
            raise

    def ticket_held(self) -> _Ticket | None:
        """The plan of an earlier save of these declarations, under an id that all ranks derive alike."""
        request = self.request.value
        held = None if request is None else self.cache.get(request.fingerprint)
        if request is None or held is None:
            return None
        self.manifest = held.manifest
        return _Ticket(held.next_save_id(), request.directory, held.plan_id, held.plan)

    def vote(self, held: _Ticket | None) -> int | None:
        """Begin, on the coordinator; then what all ranks must agree on to go on without planning."""
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
        events.here().operation.id = save_id
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
        ticket = replace(ticket, plan=replace(ticket.plan, tensors=request.declared.tensors))
        self.cache.put(request.fingerprint, ticket.plan_id, ticket.plan, self.manifest)
        return ticket

    def declared(self) -> _Declared:
        request = self.request.get()
        view = b"" if request.compared is None else pickled(_COMMON, request.compared)
        _warn_of_untrusted(request.blobs())
        return _Declared(request.directory, request.format, request.declared, blake2b(view).digest())

    @events.stage("plan")
    def plan(self, parts: Sequence[_Declared]) -> list[_Ticket]:
        """On the coordinator: who writes what."""
        request, place = self.request.get(), self.place.get()
        _check_same("name different directories", [p.directory for p in parts])
        _check_same("ask for different formats", [p.format for p in parts])
        declared = [p.declarations for p in parts]
        checked = request.compared is not None
        plans, self.manifest = plan_in_format(request.backend, declared, request.policy, checked)
        place.announce(request.backend.files(self.group.size, self.manifest))
        plan_id = uuid.uuid4().hex
        own = parts[0].common
        return [
            _Ticket(
                place.save_id,
                request.directory,
                plan_id,
                replace(plan, tensors=()),  # each rank knows its own table
                None if p.common == own else request.compared,
            )
            for plan, p in zip(plans, parts, strict=True)
        ]

    @events.stage("write")
    def write(self, ticket: _Ticket) -> WriteResult:
        events.here().operation.id = ticket.save_id
        request = self.request.get()
        if ticket.common is not None:
            _warn_of_difference(self.group.rank, ticket.common, request.compared)
        held = request.held()
        settle(held)
        staged = Staged(ticket.plan, held, request.declared.boxes)
        root = place_of(ticket.directory, ticket.save_id)
        result = request.backend.write(root, ticket.plan, counted_source(staged))
        events.here().done = int(result.length.sum())
        return result

    @events.stage("commit")
    def commit(self, results: Sequence[WriteResult]) -> int:
        """On the coordinator: all ranks have written. How many bytes?"""
        manifest = cast(Manifest, self.manifest).located(results)
        commit(self.place.get(), self.request.get().backend, manifest, confirm=self.group.confirm)
        return sum(int(result.length.sum()) for result in results)


def _check_same(what: str, said: Sequence[str]) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, word in enumerate(said):
        ranks.setdefault(word, []).append(rank)
    if len(ranks) > 1:
        named = [f"{name_ranks(those)}: {word}" for word, those in ranks.items()][:4]
        more = f"; and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        raise ShardingError(f"the ranks of one save {what}: {'; '.join(named)}{more} (all must agree)")


def _warn_of_untrusted(blobs: Iterable[bytes]) -> None:
    """Say now what a load would say too late: that it wants to be told to trust a class."""
    for blob in blobs:
        try:
            objects.load(blob)
        except CorruptCheckpoint as error:
            logger.warning("this is saved, but will not simply load: %s", error)


def _warn_of_difference(rank: int, coordinators: Any, own: Any) -> None:
    only_own, only_coordinators, mismatched = tree.diff(own, coordinators)
    if only_own or only_coordinators or mismatched:
        logger.warning(
            "Rank %d common state dict differs from rank 0 common state dict. "
            "Keys only on rank 0: %s, Keys only on %d: %s, Mismatched keys: %s",
            rank,
            only_coordinators,
            rank,
            only_own,
            mismatched,
        )
    tensors = [path for path, *kinds in mismatched if any(issubclass(kind, torch.Tensor) for kind in kinds)]
    if tensors:
        logger.warning(
            "only rank 0's values of %s and %d more tensors are saved: what differs between ranks belongs in a "
            "ShardedTensor (sharded_state_dict(), not state_dict())",
            tree.show(tensors[0]),
            len(tensors) - 1,
        )
