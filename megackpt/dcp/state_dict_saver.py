"""A save of torch DCP in three stages: plan (collective), write (each rank), finalize (collective).

Names, arguments and results are those of Megatron-Core 0.16. Messages between ranks are sent over
our own process group, and an error of one rank is raised on all, as in every save of megackpt.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

from torch.distributed import is_available, is_initialized
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
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

# Which plans all ranks use.
CACHED, LOADED, NEW = "cached", "loaded", "new"


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

    Args:
        state_dict: what to save.
        storage_writer: a ``FileSystemWriterAsync``, or an object with its methods, for this save.
        process_group: the ranks that save.
        coordinator_rank: 0; others are refused.
        planner: a ``SavePlanner`` by default.
        cached_ckpt_structure: the central and the local plan of the save before, and whether both
            may be reused. Each rank still makes its local plan and compares. If no rank finds a
            difference, no plan is gathered and no metadata made.
        loaded_all_plans: the local plans of all ranks in the metadata of a loaded checkpoint,
            reused likewise by the first save after the load.

    Returns:
        ``((storage_writer, metadata, dist_wrapper), central_plan, local_plan, unchanged,
        loaded_reused)``. The first is for ``save_state_dict_async_finalize``. The coordinator has
        metadata, unless plans were reused: pass it what that save, or load, had. ``unchanged``:
        the central plan equals the cached one. ``loaded_reused``: the loaded plans were reused.

    Raises:
        On all ranks what any of them met: CoverageError, RankFailure and others.
    """
    if coordinator_rank != 0:
        raise CheckpointingException(
            f"coordinator_rank is {coordinator_rank}: rank 0 of the process group coordinates; "
            "give a process group whose first rank is the one that you mean"
        )
    wrapper = _DistWrapper(process_group, is_available() and is_initialized(), 0)
    old_central, old_local, validated = cached_ckpt_structure or (None, None, False)
    planner = planner or SavePlanner()
    with group_over(process_group) as group, _reset_on_error(storage_writer):
        planning = _Planning(group, planner, storage_writer, loaded_all_plans or [])
        usable = old_local if validated and old_central is not None else None
        found = planning.compare(state_dict, usable)
        central = group.reduce_scatter("plan", planning.offer, planning.global_plan)
        if found == CACHED and old_central is not None:
            central = replace(old_central, storage_data=central.storage_data)
        central = planning.prepare(central)
    unchanged = _equal(old_central, central, group.rank, "central plan")
    handle = storage_writer, planning.metadata, wrapper
    return handle, central, planning.local, unchanged, found == LOADED


class _Planning:
    """The first stage on one rank."""

    def __init__(
        self,
        group: Group,
        planner: Any,
        writer: Any,
        loaded: Sequence[SavePlan],
    ) -> None:
        self._group = group
        self._planner = planner
        self._writer = writer
        self._loaded = loaded
        self._found = NEW
        self.local = SavePlan([])
        self.metadata: Metadata | None = None

    def compare(self, state_dict: dict[str, Any], cached: SavePlan | None) -> str:
        """Make the local plan. Returns which plans all ranks can use."""

        def compare_own() -> tuple[bool, bool]:
            self.local = self._local_plan(state_dict)
            rank, size = self._group.rank, self._group.size
            return (
                _equal(cached, self.local, rank, "local plan"),
                _equals_loaded(self._loaded, self.local, rank, size),
            )

        def decide(answers: list[tuple[bool, bool]]) -> str:
            if all(is_cached for is_cached, _ in answers):
                return CACHED
            return LOADED if all(is_loaded for _, is_loaded in answers) else NEW

        self._found = self._group.reduce_broadcast("plan", compare_own, decide)
        return self._found

    def _local_plan(self, state_dict: dict[str, Any]) -> SavePlan:
        plain = {}
        for key, value in state_dict.items():
            plain[key] = value.state_dict() if isinstance(value, Stateful) else value
        coordinator = self._group.is_coordinator
        self._planner.set_up_planner(plain, is_coordinator=coordinator)
        arguments: dict[str, Any] = {}
        # torch 2.8 passes no keyword arguments.
        if "kwargs" in signature(self._writer.set_up_storage_writer).parameters:
            arguments = {"rank": self._group.rank, "use_collectives": True}
        self._writer.set_up_storage_writer(coordinator, **arguments)
        plan = self._planner.create_local_plan()
        local: SavePlan = self._writer.prepare_local_plan(plan)
        return local

    def offer(self) -> SavePlan | None:
        """What the coordinator needs of this rank's plan."""
        return self.local if self._found == NEW else None

    def global_plan(self, offers: list[SavePlan | None]) -> list[SavePlan]:
        """On the coordinator. Of cached plans only the storage's part is made again."""
        plans: list[SavePlan] = [offer or SavePlan([]) for offer in offers]
        if self._found == LOADED:
            loaded = [replace(plan, storage_data=None) for plan in self._loaded]
            plans, _ = self._planner.create_global_plan(loaded)
        elif self._found == NEW:
            local_plans = list(plans)
            plans, metadata = self._planner.create_global_plan(plans)
            # Where Megatron-Core looks for them.
            cast("Any", metadata).all_local_plans = local_plans
            self.metadata = metadata
        prepared: list[SavePlan] = self._writer.prepare_global_plan(plans)
        return prepared

    def prepare(self, plan: SavePlan) -> SavePlan:
        """This rank's final plan, after the writers of all ranks have received theirs."""
        final: list[SavePlan] = []

        def hand_over() -> None:
            final.append(self._planner.finish_plan(plan))
            self._writer.prepare_write_data(final[0], self._planner)

        self._group.reduce_broadcast("prepare", hand_over, lambda _: None)
        return final[0]


def verify_global_md_reuse(
    loaded_all_plans: list[SavePlan] | None,
    local_plan: SavePlan,
    rank: int,
    dist_wrapper: _DistWrapper,
) -> bool:
    """Whether the plans of a loaded checkpoint equal those of all ranks now. Collective.

    ``loaded_all_plans`` has one plan for each rank. All fields but ``storage_data`` count.
    """
    with group_over(dist_wrapper.group) as group:
        same = _equals_loaded(loaded_all_plans or [], local_plan, rank, group.size)
        return group.all_agree(1 if same else None)


def save_state_dict_async_finalize(
    storage_writer: Any,
    global_metadata: Metadata | None,
    dist_wrapper: _DistWrapper,
) -> None:
    """The last stage: gather what all ranks have written, and commit it.

    The arguments are what the first stage returned first. Raises on all ranks what any of them met;
    nothing is committed then.
    """
    with group_over(dist_wrapper.group) as group, _reset_on_error(storage_writer):
        group.reduce_broadcast(
            "write",
            partial(_write_results, storage_writer),
            partial(_finish, storage_writer, global_metadata),
        )


@contextmanager
def _reset_on_error(writer: Any) -> Iterator[None]:
    """Remove what a failed save left, unless ranks are lost: these may be writing still."""
    try:
        yield
    except RankLost:
        raise
    except BaseException:
        writer.reset()
        raise


def _write_results(writer: Any) -> list[WriteResult]:
    results = writer.retrieve_write_results()
    if isinstance(results, tuple):  # torch's pair of an exception and its traceback
        raise results[0]
    found: list[WriteResult] = results
    return found


def _finish(
    writer: Any,
    metadata: Metadata | None,
    results: list[list[WriteResult]],
) -> None:
    if metadata is None:
        raise CheckpointingException(
            "the coordinator has no metadata for this save: it reuses the plans of an earlier save "
            "or of a loaded checkpoint, so pass the metadata that was returned, or read, then"
        )
    writer.finish(metadata, results)


def _equals_loaded(
    loaded: Sequence[SavePlan],
    local: SavePlan,
    rank: int,
    ranks: int,
) -> bool:
    if len(loaded) != ranks:
        return False
    return _equal(loaded[rank], local, rank, "loaded plan")


def _equal(
    old: SavePlan | None,
    new: SavePlan,
    rank: int,
    what: str,
) -> bool:
    """Whether two plans are equal but for ``storage_data``. Logs the keys that differ (DEBUG)."""
    if old is None:
        return False
    if replace(old, storage_data=None) == replace(new, storage_data=None):
        return True
    if _log.isEnabledFor(logging.DEBUG):
        before, after = _items_by_key(old), _items_by_key(new)
        changed = [
            key
            for key in sorted({*before, *after})
            if before.get(key) != after.get(key)
        ]
        _log.debug("rank %d, %s: the items of %s differ", rank, what, changed[:10])
    return False


def _items_by_key(plan: SavePlan) -> dict[str, list[WriteItem]]:
    items: dict[str, list[WriteItem]] = {}
    for item in plan.items:
        items.setdefault(item.index.fqn, []).append(item)
    return items
