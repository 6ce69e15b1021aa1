"""What a model declares: the values it is said with, and the three verbs extract, declare, restore.

``values`` holds what people write, ``states`` takes a state dict apart and puts it together again,
``declaring`` turns shards into the columns that planning works on. This is their door.
"""

from megackpt.sharded.declaring import bundled, declare, object_groups, unbundled
from megackpt.sharded.states import (
    ABSENT,
    Extracted,
    apply_factories,
    apply_factory_merges,
    extract,
    restore,
)
from megackpt.sharded.storable import dtype_name, dtype_named, pickled
from megackpt.sharded.values import (
    CommonStateDict,
    FactoryBuildFn,
    FactoryMergeFn,
    LocalNonpersistentObject,
    ReplicaId,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    is_main_replica,
)

__all__ = [
    "ABSENT",
    "CommonStateDict",
    "Extracted",
    "FactoryBuildFn",
    "FactoryMergeFn",
    "LocalNonpersistentObject",
    "ReplicaId",
    "ShardedBase",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "apply_factories",
    "apply_factory_merges",
    "bundled",
    "declare",
    "dtype_name",
    "dtype_named",
    "extract",
    "is_main_replica",
    "object_groups",
    "pickled",
    "restore",
    "unbundled",
]
