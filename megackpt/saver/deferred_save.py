"""The plan of a save whose bytes another process writes later, from a copy of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast
from uuid import uuid4

import numpy as np

from megackpt.checkpoint import SaveSession
from megackpt.distributed import Attempt, GroupLike, attempt, group_over, name_here
from megackpt.planning.manifest import SavePlan, itemsizes
from megackpt.saver.nonfinite import examine
from megackpt.saver.save_operation import all_ranks_reuse, find_plan, make_plan
from megackpt.saver.save_request import SaveRequest
from megackpt.staging.source import TensorSource
from megackpt.state import ShardedStateDict
from megackpt.strategies import StrategyLike


@dataclass(frozen=True, eq=False)
class DeferredPart:
    """What one rank contributes to a save that is written later.

    ``objects``: the rows of the plan that are objects, with their blobs. ``values``: the numbers of
    ``check_values`` for all rows, b"" if these are not examined.
    """

    plan: SavePlan
    objects: Mapping[int, bytes]
    values: bytes


class _Deferred(SaveSession):
    """A session without a transaction, which is begun by the process that writes."""

    def announce(self, names: Iterable[str]) -> None:
        """The process that writes finds out whether the names are free."""


def plan_deferred(
    state: ShardedStateDict,
    directory: str,
    strategy: StrategyLike,
    *,
    process_group: GroupLike,
    timeout: timedelta,
    validate_access_integrity: bool,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None,
    content_metadata: Mapping[str, Any] | None,
    allow_large_common_state: bool,
) -> DeferredPart:
    """Plan a save as ``megackpt.save`` does, without a call to its storage. Collective.

    Raises the errors of declarations and of planning, on all ranks.
    """
    group = group_over(process_group, timeout, f"plan {directory}")
    session = _Deferred(directory, timeout, name_here(group.rank))
    session.group = group

    def declare() -> SaveRequest:
        return SaveRequest.of(
            state,
            directory,
            strategy,
            group,
            content_metadata=content_metadata,
            validate=validate_access_integrity,
            comparable=preprocess_common_before_consistancy_check,
            allow_large_common_state=allow_large_common_state,
        )

    with session.running():
        declared = attempt(declare)
        cached = find_plan(group, declared.value)
        session.total.operation.id = cached.save_id if cached else uuid4().hex
        begun = Attempt[None](None)
        reuse, _ = all_ranks_reuse(group, declared, cached, begun)
        if cached is not None and reuse:
            request, plan = declared.get(), cached.plan
        else:
            request, part = make_plan(session, declared, begun)
            plan = part.plan
        made = attempt(partial(_part, request, plan))

        def outcome() -> None:
            made.get()

        group.reduce_broadcast("objects", outcome, len)
    session.withdraw()
    return made.get()


def _part(request: SaveRequest, plan: SavePlan) -> DeferredPart:
    held = request.held()
    is_object = itemsizes(plan.tensors)[plan.tensor] == 0
    objects = {}
    for row in np.flatnonzero(is_object).tolist():
        blob = cast("Callable[[], bytes]", held[plan.source[row]])
        objects[row] = blob()
    values = b""
    if request.check_values != "off":
        values = examine(TensorSource(plan, held, request.declared.boxes))
    return DeferredPart(plan, objects, values)
