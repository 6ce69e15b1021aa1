"""Sharded state dicts: the classes that callers declare with; extract, declare and restore.

``values`` has the public classes. ``nested_state`` splits a state dict into shards and common
state, and restores it. ``shard_columns`` makes of shards the columns that planning works on.
"""

from megackpt.planning.manifest import (
    ReplicaId as ReplicaId,
    is_main_replica as is_main_replica,
)
from megackpt.state.nested_state import (
    ABSENT as ABSENT,
    Extracted as Extracted,
    Placed as Placed,
    apply_factories as apply_factories,
    apply_factory_merges as apply_factory_merges,
    extract as extract,
    joined as joined,
    restore as restore,
)
from megackpt.state.shard_columns import (
    bundled as bundled,
    declare as declare,
    object_groups as object_groups,
    unbundled as unbundled,
)
from megackpt.state.storable import (
    dtype_name as dtype_name,
    dtype_named as dtype_named,
    is_declared as is_declared,
    loadable as loadable,
    pickled as pickled,
)
from megackpt.state.tensor_subclasses import (
    register_tensor_subclass as register_tensor_subclass,
)
from megackpt.state.values import (
    CommonStateDict as CommonStateDict,
    FactoryBuildFn as FactoryBuildFn,
    FactoryMergeFn as FactoryMergeFn,
    FilledFactory as FilledFactory,
    LocalNonpersistentObject as LocalNonpersistentObject,
    PerRank as PerRank,
    ShardedBase as ShardedBase,
    ShardedObject as ShardedObject,
    ShardedStateDict as ShardedStateDict,
    ShardedTensor as ShardedTensor,
    ShardedTensorFactory as ShardedTensorFactory,
    StateDict as StateDict,
)
