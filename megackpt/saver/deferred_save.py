"""The plan of a save whose bytes another process writes later, from a copy of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, cast
from uuid import uuid4

import numpy as np

from megackpt.checkpoint import SaveSession
from megackpt.distributed import Attempt, GroupLike, attempt, group_over, name_here
from megackpt.planning.manifest import Manifest, SavePlan, itemsizes
from megackpt.saver.save_operation import (
    RankPart,
    all_ranks_reuse,
    find_plan,
    make_plan,
)
from megackpt.saver.save_request import SaveRequest
from megackpt.state import ShardedStateDict
from megackpt.strategies import StrategyLike


class DeferredPart(NamedTuple):
    """What one rank contributes to a save that is written later.

    ``objects``: the rows of the plan that are objects, with their blobs. ``manifest``: of the
    checkpoint, on rank 0.
    """

    plan: SavePlan
    objects: Mapping[int, bytes]
    manifest: Manifest | None


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
    preprocess_common_before_consistancy_check: Callable[[Any], Any],
    **options: Any,
) -> DeferredPart:
    """Plan a save as ``megackpt.save`` does, without a call to its storage. Collective.

    ``options``: further ones of ``SaveRequest.of``. Raises the errors of declarations and of
    planning, on all ranks.
    """
    group = group_over(process_group, timeout, f"plan {directory}")
    session = _Deferred(directory, timeout, name_here(group.rank))
    session.group = group
    with session.running():
        declare = partial(SaveRequest.of, state, directory, strategy, group, **options)
        comparable = preprocess_common_before_consistancy_check
        declared = attempt(
            lambda: declare(validate=validate_access_integrity, comparable=comparable)
        )
        cached = find_plan(group, declared.value)
        session.total.operation.id = cached.save_id if cached else uuid4().hex
        begun = Attempt[None](None)
        reuse, _ = all_ranks_reuse(group, declared, cached, begun)
        if cached is not None and reuse:
            request, part = declared.get(), cached
        else:
            request, part = make_plan(session, declared, begun)
        blobs = attempt(partial(_blobs, request, part))

        def outcome() -> None:
            blobs.get()

        group.reduce_broadcast("objects", outcome, len)
    session.withdraw()
    return DeferredPart(part.plan, blobs.get(), part.manifest)


def _blobs(request: SaveRequest, part: RankPart) -> dict[int, bytes]:
    plan, held = part.plan, request.held()
    rows = np.flatnonzero(itemsizes(plan.tensors)[plan.tensor] == 0).tolist()
    return {row: cast("Callable[[], bytes]", held[plan.source[row]])() for row in rows}
