"""The audit without a save: do ranks hold equal values of a state, as after a restore?"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Never

from megackpt.distributed import Group, attempt
from megackpt.errors import ReplicaMismatch
from megackpt.planning.manifest import Declarations, ShardId
from megackpt.saver.audit import (
    AllReplicas,
    AuditPolicy,
    Blocks,
    RankDigests,
    RankReplicas,
    describe,
    find_replicas,
    hash_replicas,
)
from megackpt.saver.save_request import SaveRequest
from megackpt.state import ShardedStateDict
from megackpt.strategies import StrategyLike

logger = logging.getLogger("megackpt.saver")

_AFTER_A_RESTORE = (
    "After the restore of {}, ranks hold different values of the same shard: a rank has tensors "
    "that were not restored, or that are of another model. Strategy(audit_exclude=[...]) leaves "
    "out keys whose replicas may differ, and on_mismatch='warn' goes on anyway."
)


def compare_replicas(
    state: ShardedStateDict, directory: str, strategy: StrategyLike, group: Group
) -> None:
    """Compare the values of the shards that several ranks hold. Collective.

    Objects and the common state are not compared.

    Args:
        state: the state after the restore, declared as for a save.
        directory: the checkpoint that was restored, for the message.
        strategy: its ``audit_exclude`` and ``on_mismatch`` count.

    Raises:
        ReplicaMismatch: on all ranks. The message names the shards, the ranks and the blocks.
    """
    request = attempt(
        lambda: SaveRequest.of(
            state, directory, strategy, group, allow_large_common_state=True
        )
    )
    replicas: list[AllReplicas] = []

    def find(parts: Sequence[Declarations]) -> Sequence[RankReplicas]:
        policy = AuditPolicy("full", exclude=request.get().audit.exclude)
        found, of_all = find_replicas(parts, policy)
        replicas.append(of_all)
        return found

    def compare(digests: Sequence[bytes]) -> list[ShardId]:
        return replicas[0].differing(digests)

    def refuse(found: Sequence[Blocks]) -> Never:
        advice = _AFTER_A_RESTORE.format(directory)
        tensors = replicas[0].shards.tensors
        raise ReplicaMismatch(describe(advice, differing, found, tensors))

    own = group.reduce_scatter("audit", lambda: request.get().declared, find)

    def digests() -> RankDigests:
        made = request.get()
        return hash_replicas(own, made.declared, made.held(), 0)

    hashed = attempt(digests)
    differing = group.reduce_broadcast("audit", lambda: hashed.get().packed(), compare)
    if not differing:
        return
    try:
        group.reduce_broadcast("audit", lambda: hashed.get().of(differing), refuse)
    except ReplicaMismatch as error:
        if request.get().audit.raises:
            raise
        if group.is_coordinator:
            logger.warning("%s", error)
