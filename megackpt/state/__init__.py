"""What a model declares: the values it is said with, and the three verbs extract, declare, restore.

``values`` holds what people write, ``states`` takes a state dict apart and puts it together again,
``declaring`` turns shards into the columns that planning works on. This is their door.
"""

from megackpt.planning.manifest import (
    ReplicaId as ReplicaId,
    is_main_replica as is_main_replica,
)
from megackpt.state.declaring import (
    bundled as bundled,
    declare as declare,
    object_groups as object_groups,
    unbundled as unbundled,
)
from megackpt.state.states import (
    ABSENT as ABSENT,
    Extracted as Extracted,
    apply_factories as apply_factories,
    apply_factory_merges as apply_factory_merges,
    extract as extract,
    restore as restore,
)
from megackpt.state.storable import (
    dtype_name as dtype_name,
    dtype_named as dtype_named,
    is_declared as is_declared,
    loadable as loadable,
    pickled as pickled,
)
from megackpt.state.values import (
    CommonStateDict as CommonStateDict,
    FactoryBuildFn as FactoryBuildFn,
    FactoryMergeFn as FactoryMergeFn,
    LocalNonpersistentObject as LocalNonpersistentObject,
    ShardedBase as ShardedBase,
    ShardedObject as ShardedObject,
    ShardedStateDict as ShardedStateDict,
    ShardedTensor as ShardedTensor,
    ShardedTensorFactory as ShardedTensorFactory,
    StateDict as StateDict,
)
