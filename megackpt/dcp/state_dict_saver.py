"""A save of torch DCP's in three stages: plan (together), write (each rank, whenever it likes), finalize (together).

Names, arguments and results are those of Megatron-Core 0.16. All messages between ranks travel as those of every
other save of ours: on a group of our own, with one rank's error told to all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

from torch.distributed import is_available, is_initialized
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.utils import _DistWrapper

from megackpt.dcp.planner import SavePlanner
from megackpt.distributed import Group, group_over
from megackpt.errors import CheckpointingException, RankLost

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import WriteResult

__all__ = [
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
    "verify_global_md_reuse",
]

_log = logging.getLogger(__name__)

CachedStructure = tuple[SavePlan | None, SavePlan | None, bool]
Planned = tuple[
    tuple[Any, "Metadata | None", _DistWrapper], SavePlan, SavePlan, bool, bool
]


@dataclass(frozen=True)
class _Offer:
    """What a rank tells the coordinator: its plan, unless it is equal to one of before."""

    cached: bool  # to the one that the save before made
    loaded: bool  # to the one that came with a loaded checkpoint
    plan: SavePlan | None


@dataclass(frozen=True)
class _Answer:
    """What the coordinator tells a rank: which plans count, and (of ``CACHED`` only the storage's part) its plan."""

    found: str
    plan: SavePlan


CACHED, LOADED, PLANNED, AGAIN = "cached", "loaded", "planned", "again"


def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: Any,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: Any = None,
    cached_ckpt_structure: CachedStructure | None = None,
    loaded_all_plans: list[SavePlan] | None = None,
) -> Planned:
    """The first stage: all ranks plan together, and each hands its writer what to write.

    ``storage_writer``: a ``FileSystemWriterAsync``, or what has its methods, used for this save only. ``planner``: a
    ``SavePlanner`` by default. ``cached_ckpt_structure``: the central and the local plan that the save before
    returned, and whether both may be used again; each rank still plans for itself and compares, and where no rank
    finds a difference, no plan is gathered and no metadata made. ``loaded_all_plans``: the local plans of all
    ranks as a loaded checkpoint's metadata has them, used likewise by the first save after it.

    Returns ``((storage_writer, metadata, dist_wrapper), central_plan, local_plan, unchanged, loaded_reused)``. The
    first is for ``save_state_dict_async_finalize``. The coordinator has metadata, unless plans were used again:
    then it is to take what it has kept from that save or load. ``unchanged``: the central plan is equal to the
    cached one. ``loaded_reused``: all ranks' local plans are equal to the loaded ones.

    Raises on all ranks what any of them met: CoverageError, RankFailure and their kin.
    """
    wrapper = _wrapper(process_group, coordinator_rank)
    old_central, old_local, validated = cached_ckpt_structure or (None, None, False)
    usable = old_local if validated and old_central is not None else None
    with group_over(process_group) as group, _cleared(storage_writer):
        planning = _Planning(
            group,
            planner or SavePlanner(),
            storage_writer,
            usable,
            loaded_all_plans or [],
        )
        answer = planning.agreed(state_dict)
        central = answer.plan
        if answer.found == CACHED and old_central is not None:
            central = replace(old_central, storage_data=central.storage_data)
        central = planning.handed_over(central)
    unchanged = _same(old_central, central, group.rank, "central plan")
    handed = storage_writer, planning.metadata, wrapper
    return handed, central, planning.local, unchanged, answer.found == LOADED


class _Planning:
    """One save's first stage on one rank."""

    def __init__(
        self,
        group: Group,
        planner: Any,
        writer: Any,
        cached: SavePlan | None,
        loaded: Sequence[SavePlan],
    ) -> None:
        self._group = group
        self._planner = planner
        self._writer = writer
        self._cached = cached
        self._loaded = loaded
        self.local = SavePlan([])
        self.metadata: Metadata | None = None

    def agreed(self, state_dict: Mapping[str, Any]) -> _Answer:
        """One round where all plans are known to all, or none; two where only some ranks found theirs unchanged."""
        answer = self._group.reduce_scatter(
            "plan", lambda: self._offer(state_dict), self._answers
        )
        if answer.found == AGAIN:
            all_of_it = _Offer(False, False, self.local)
            answer = self._group.reduce_scatter(
                "plan", lambda: all_of_it, self._answers
            )
        return answer

    def handed_over(self, plan: SavePlan) -> SavePlan:
        """The final plan of this rank, once the writers of all ranks have taken what they are to write."""
        final: list[SavePlan] = []

        def hand_over() -> None:
            final.append(self._planner.finish_plan(plan))
            self._writer.prepare_write_data(final[0], self._planner)

        self._group.reduce_broadcast("prepare", hand_over, lambda _: None)
        return final[0]

    def _offer(self, state_dict: Mapping[str, Any]) -> _Offer:
        coordinator, rank = self._group.is_coordinator, self._group.rank
        plain = {
            key: value.state_dict() if isinstance(value, Stateful) else value
            for key, value in state_dict.items()
        }
        self._planner.set_up_planner(plain, is_coordinator=coordinator)
        takes = signature(self._writer.set_up_storage_writer).parameters
        told = {"rank": rank, "use_collectives": True} if "kwargs" in takes else {}
        self._writer.set_up_storage_writer(coordinator, **told)
        self.local = self._writer.prepare_local_plan(self._planner.create_local_plan())
        cached = _same(self._cached, self.local, rank, "local plan")
        loaded = _is_loaded(self._loaded, self.local, rank, self._group.size)
        return _Offer(cached, loaded, None if cached or loaded else self.local)

    def _answers(self, offers: Sequence[_Offer]) -> list[_Answer]:
        """On the coordinator."""
        found, plans = self._planned(offers)
        if found != AGAIN:
            plans = self._writer.prepare_global_plan(plans)
        return [_Answer(found, plan) for plan in plans]

    def _planned(self, offers: Sequence[_Offer]) -> tuple[str, list[SavePlan]]:
        plans: list[SavePlan]
        if all(offer.cached for offer in offers):
            return CACHED, [SavePlan([]) for _ in offers]
        if all(offer.loaded for offer in offers):
            plans, _ = self._planner.create_global_plan(
                [replace(p, storage_data=None) for p in self._loaded]
            )
            return LOADED, plans
        offered = [offer.plan for offer in offers if offer.plan is not None]
        if len(offered) < len(offers):
            return AGAIN, [SavePlan([]) for _ in offers]
        plans, self.metadata = self._planner.create_global_plan(offered)
        cast(
            "Any", self.metadata
        ).all_local_plans = offered  # where Megatron-Core looks for them
        return PLANNED, plans


def verify_global_md_reuse(
    loaded_all_plans: list[SavePlan] | None,
    local_plan: SavePlan,
    rank: int,
    dist_wrapper: _DistWrapper,
) -> bool:
    """Are the plans of a loaded checkpoint those of all ranks now? Collective: the answer is the same everywhere.

    ``loaded_all_plans`` are one for each rank; all fields but ``storage_data`` count.
    """
    with group_over(dist_wrapper.group) as group:
        same = _is_loaded(loaded_all_plans or [], local_plan, rank, group.size)
        return group.all_agree(1 if same else None)


def save_state_dict_async_finalize(
    storage_writer: Any, global_metadata: Metadata | None, dist_wrapper: _DistWrapper
) -> None:
    """The last stage: what all ranks have written is gathered and published, or no rank's is.

    The arguments are what the first stage returned first. Raises on all ranks what any of them met.
    """
    with group_over(dist_wrapper.group) as group, _cleared(storage_writer):
        group.reduce_broadcast(
            "write",
            partial(_written, storage_writer),
            partial(_publish, storage_writer, global_metadata),
        )


@contextmanager
def _cleared(writer: Any) -> Iterator[None]:
    """Nothing of a save that fails is left behind, unless ranks are lost that may still be at it."""
    try:
        yield
    except RankLost:
        raise
    except BaseException:
        writer.reset()
        raise


def _written(writer: Any) -> list[WriteResult]:
    results = writer.retrieve_write_results()
    if isinstance(
        results, tuple
    ):  # torch's way to hand on an exception, with where it was
        raise results[0]
    found: list[WriteResult] = results
    return found


def _publish(
    writer: Any, metadata: Metadata | None, results: list[list[WriteResult]]
) -> None:
    if metadata is None:
        raise CheckpointingException(
            "the coordinator has no metadata for this save: the plans of an earlier one, or of a loaded checkpoint, "
            "were used again, so pass the metadata that was returned, or read, then"
        )
    writer.finish(metadata, results)


def _wrapper(process_group: ProcessGroup | None, coordinator_rank: int) -> _DistWrapper:
    if coordinator_rank != 0:
        raise CheckpointingException(
            f"coordinator_rank is {coordinator_rank}: rank 0 of the process group coordinates; give a process group "
            "whose first rank is the one that is meant"
        )
    return _DistWrapper(
        process_group, is_available() and is_initialized(), coordinator_rank
    )


def _is_loaded(
    loaded: Sequence[SavePlan], local: SavePlan, rank: int, ranks: int
) -> bool:
    if loaded and len(loaded) != ranks:
        _log.debug(
            "rank %d: %d plans were loaded for %d ranks", rank, len(loaded), ranks
        )
    return len(loaded) == ranks and _same(loaded[rank], local, rank, "loaded plan")


def _same(old: SavePlan | None, new: SavePlan, rank: int, what: str) -> bool:
    """Are two plans equal, but for what the storage added? What differs is told in the debug log, field by field."""
    if old is None:
        return False
    found = replace(old, storage_data=None) == replace(new, storage_data=None)
    if not found and _log.isEnabledFor(logging.DEBUG):
        before, now = _fields_of(old), _fields_of(new)
        for place in sorted({*before, *now}):
            if before.get(place) != now.get(place):
                key, field = place
                told = before.get(place, "absent"), now.get(place, "absent")
                _log.debug(
                    "rank %d, %s: %r %s was %s, is %s", rank, what, key, field, *told
                )
    return found


def _fields_of(plan: SavePlan) -> dict[tuple[str, str], Any]:
    """Everything in a plan: (key, name of the field) -> value; pieces of a tensor by their offset."""
    found: dict[tuple[str, str], Any] = {("", "usable"): plan.usable}
    for item in plan.items:
        offset = "" if item.index.offset is None else f"{list(item.index.offset)} "
        found |= {
            (item.index.fqn, f"{offset}{name}"): value for name, value in _leaves(item)
        }
    mappings = (
        plan.planner_data
        if isinstance(plan.planner_data, Mapping)
        else {"": plan.planner_data}
    )
    return found | {
        (str(key), "planner_data"): value for key, value in mappings.items()
    }


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not is_dataclass(value):
        yield name, value
        return
    for field in fields(value):
        inner = f"{name}.{field.name}" if name else field.name
        yield from _leaves(getattr(value, field.name), inner)
