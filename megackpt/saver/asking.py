"""What one rank asks to be saved, checked by itself: the state taken apart, declared, and told by a fingerprint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from megackpt import tree
from megackpt.backends.base import Backend, plan_of_stored
from megackpt.errors import ShardingError
from megackpt.planning.cache import CachedPlan, PlanCache, Resumed, fingerprint
from megackpt.planning.manifest import Declarations, SavePlan
from megackpt.planning.save_plan import SavePolicy
from megackpt.runtime.collectives import Group, attempt, domain_of
from megackpt.sharded import Extracted, ShardedObject, ShardedTensor, bundled, declare, object_groups, pickled
from megackpt.strategies import Strategy

logger = logging.getLogger("megackpt.saver")

Held = torch.Tensor | Callable[[], bytes]

CONTENT_METADATA = "content_metadata"
COMMON = "the common state"


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


def itself(common: Any) -> Any:
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
    staging_memory: int | None = None  # bytes; None: the default

    @classmethod
    def of(
        cls,
        extracted: Extracted,
        directory: str,
        strategy: Strategy,
        group: Group,
        *,
        content_metadata: Mapping[str, Any] | None = None,
        compare: Callable[[Any], Any] | None = itself,
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
            strategy.staging_memory,
        )

    def known(self, cache: PlanCache, ranks: int) -> CachedPlan | None:
        """The plan of an earlier save that declared the same, or the one that what was loaded last was written with."""
        held = cache.get(self.fingerprint)
        if held is not None:
            return held
        checked = self.compared is not None

        def derive(resumed: Resumed) -> SavePlan | None:
            return plan_of_stored(self.backend, self.declared, resumed, self.policy, ranks, checked)

        found = attempt(lambda: cache.derived(self.fingerprint, derive))
        if found.error is not None:
            logger.debug("no plan can be told from what was loaded: %s", found.error)
        return found.value

    def let_go(self) -> Request:
        """Without the caller's data, of which a copy has been made."""
        return replace(self, shards=(), common={}, compared=None)

    def held(self) -> list[Held]:
        """For each row of ``declared``: its tensor, or what makes its blob."""
        groups = object_groups(self.shards)
        rows = [self._holder(shard, groups.get(i, [])) for i, shard in enumerate(self.shards)]
        return [*rows, lambda: pickled(COMMON, dict(self.common))]

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
