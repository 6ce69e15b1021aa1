"""Megatron's ``mapping``: what models declare."""

from __future__ import annotations

from megackpt.errors import CheckpointingException as CheckpointingException
from megackpt.state import (
    CommonStateDict as CommonStateDict,
    FactoryBuildFn as FactoryBuildFn,
    FactoryMergeFn as FactoryMergeFn,
    LocalNonpersistentObject as LocalNonpersistentObject,
    ReplicaId as ReplicaId,
    ShardedBase as ShardedBase,
    ShardedObject as ShardedObject,
    ShardedStateDict as ShardedStateDict,
    ShardedTensor as ShardedTensor,
    ShardedTensorFactory as ShardedTensorFactory,
    StateDict as StateDict,
    apply_factories as apply_factories,
    apply_factory_merges as apply_factory_merges,
    is_main_replica as is_main_replica,
)
