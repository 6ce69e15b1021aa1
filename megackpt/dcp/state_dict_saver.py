"""A save of torch DCP in three stages: plan (collective), write (each rank), finalize (collective).

Names, arguments and results follow Megatron-Core 0.16. Messages between ranks are sent over a
process group of megackpt, and an error of one rank is raised on all ranks. Every save of megackpt
does so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.distributed import is_available, is_initialized
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.utils import _DistWrapper

from megackpt import gc_pause
from megackpt.dcp.planner import SavePlanner
from megackpt.distributed import group_over
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


def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: Any,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: Any = None,
    cached_ckpt_structure: CachedStructure | None = None,
    loaded_all_plans: list[SavePlan] | None = None,
) -> Planned:
    """The first stage: all ranks plan together, and each gives its writer the items to write.

    Args:
        state_dict: the state to save.
        storage_writer: a ``FileSystemWriterAsync``, or an object with its methods, for this save.
        process_group: the ranks that save.
        coordinator_rank: 0; any other rank is refused.
        planner: a ``SavePlanner`` by default.
        cached_ckpt_structure: the central and the local plan of the save before, and whether both
            may be reused. Each rank still makes its local plan and compares. If no rank finds a
            difference, no plan is gathered and no metadata made.
        loaded_all_plans: the local plans of all ranks in the metadata of a loaded checkpoint,
            reused in the same way by the first save after the load.

    Returns:
        ``((storage_writer, metadata, dist_wrapper), central_plan, local_plan, unchanged,
        loaded_reused)``. The first is for ``save_state_dict_async_finalize``. The coordinator has
        metadata, unless plans were reused: pass the metadata of that save or load then.
        ``unchanged``: the central plan equals the cached one. ``loaded_reused``: the loaded plans
        were reused.

    Raises:
        On all ranks the errors of any rank, such as CoverageError and RankFailure.
    """
    if coordinator_rank != 0:
        raise CheckpointingException(
            f"coordinator_rank is {coordinator_rank}: rank 0 of the process group coordinates; "
            "give a process group whose first rank is the one that you mean"
        )
    wrapper = _DistWrapper(process_group, is_available() and is_initialized(), 0)
    old_central, usable, validated = cached_ckpt_structure or (None, None, False)
    if not validated or old_central is None:
        usable = None
    loaded = loaded_all_plans or []
    planner = planner or SavePlanner()
    local = central = SavePlan([])
    metadata: Any = None

    def compare() -> tuple[bool, bool]:
        """Make the local plan. Returns whether it equals the cached, and the loaded one."""
        nonlocal local
        plain = {}
        for key, value in state_dict.items():
            plain[key] = value.state_dict() if isinstance(value, Stateful) else value
        planner.set_up_planner(plain, is_coordinator=group.is_coordinator)
        storage_writer.set_up_storage_writer(
            group.is_coordinator, rank=group.rank, use_collectives=True
        )
        local = storage_writer.prepare_local_plan(planner.create_local_plan())
        return (
            _equal(usable, local, group.rank, "local plan"),
            _equals_loaded(loaded, local, group.rank, group.size),
        )

    def decide(answers: list[tuple[bool, bool]]) -> tuple[bool, bool]:
        cached = all(is_cached for is_cached, _ in answers)
        return cached, not cached and all(is_loaded for _, is_loaded in answers)

    def make_global_plan(offers: list[SavePlan | None]) -> list[SavePlan]:
        """On the coordinator. Only the storage's part of cached plans is made again."""
        nonlocal metadata
        plans = [offer or SavePlan([]) for offer in offers]
        if reused:
            given = [replace(plan, storage_data=None) for plan in loaded]
            plans, _ = planner.create_global_plan(given)
        elif not cached:
            local_plans = list(plans)
            plans, metadata = planner.create_global_plan(plans)
            metadata.all_local_plans = local_plans  # where Megatron-Core looks for them
        prepared: list[SavePlan] = storage_writer.prepare_global_plan(plans)
        return prepared

    def prepare() -> None:
        nonlocal central
        finished = planner.finish_plan(central)
        # A planner that caches plans gives an old plan.
        central = replace(finished, storage_data=central.storage_data)
        storage_writer.prepare_write_data(central, planner)

    with (
        group_over(process_group) as group,
        gc_pause.paused(),
        reset_on_error(storage_writer),
    ):
        cached, reused = group.reduce_broadcast("plan", compare, decide)
        offer = None if cached or reused else local
        central = group.reduce_scatter("plan", lambda: offer, make_global_plan)
        if cached and old_central is not None:
            central = replace(old_central, storage_data=central.storage_data)
        group.reduce_broadcast("prepare", prepare, lambda _: None)
    unchanged = _equal(old_central, central, group.rank, "central plan")
    return (storage_writer, metadata, wrapper), central, local, unchanged, reused


def verify_global_md_reuse(
    loaded_all_plans: list[SavePlan] | None,
    local_plan: SavePlan,
    rank: int,
    dist_wrapper: _DistWrapper,
) -> bool:
    """Whether the plans of a loaded checkpoint equal the present plans of all ranks. Collective.

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
    """The last stage: gather the write results of all ranks, and commit them.

    The arguments are the first result of the first stage. Raises on all ranks the errors of any
    rank, without a commit.
    """

    def finish(results: list[list[WriteResult]]) -> None:
        if global_metadata is None:
            raise CheckpointingException(
                "the coordinator has no metadata for this save: it reuses the plans of an earlier "
                "save or of a loaded checkpoint, so pass the metadata that was returned, or read, "
                "then"
            )
        storage_writer.finish(global_metadata, results)

    with group_over(dist_wrapper.group) as group, reset_on_error(storage_writer):
        group.reduce_broadcast("write", storage_writer.retrieve_write_results, finish)


@contextmanager
def reset_on_error(writer: Any) -> Iterator[None]:
    """Remove the files of a failed save, unless ranks are lost: these may be writing still."""
    try:
        yield
    except RankLost:
        raise
    except BaseException:
        writer.reset()
        raise


def _equals_loaded(
    loaded: Sequence[SavePlan], local: SavePlan, rank: int, ranks: int
) -> bool:
    return len(loaded) == ranks and _equal(loaded[rank], local, rank, "loaded plan")


def _equal(old: SavePlan | None, new: SavePlan, rank: int, what: str) -> bool:
    """Whether two plans are equal but for ``storage_data``. Logs the keys that differ (DEBUG)."""
    if old is None:
        return False
    if replace(old, storage_data=None) == replace(new, storage_data=None):
        return True
    if _log.isEnabledFor(logging.DEBUG):
        before = {item.index: item for item in old.items}
        after = {item.index: item for item in new.items}
        changed = set()
        for index in {**before, **after}:
            if before.get(index) != after.get(index):
                changed.add(index.fqn)
        names = sorted(changed)[:10]
        _log.debug("rank %d, %s: the items of %s differ", rank, what, names)
    return False
