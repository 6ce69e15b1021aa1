"""The values of planning: declarations of ranks, their plans, and the manifest of a checkpoint.

All are frozen. Many shards travel as columns (numpy arrays, one row a shard); the small
dataclasses are views of single rows. Keys and metas are in a table, and rows hold their numbers.

An object is a tensor of blobs: a ShardedObject of global shape (4, 2) at (1, 0) is the unit box
at (1, 0) of a tensor with dtype ``"object"``. The common state is such an object, with the
reserved key ``COMMON_KEY`` and without dimensions.
"""

from megackpt.planning.manifest.chunks import (
    Chunk as Chunk,
    Chunks as Chunks,
    Location as Location,
    Manifest as Manifest,
    TensorParts as TensorParts,
    WriteResult as WriteResult,
    listed as listed,
)
from megackpt.planning.manifest.declarations import (
    Declaration as Declaration,
    Declarations as Declarations,
)
from megackpt.planning.manifest.plans import (
    LoadPlan as LoadPlan,
    ReadItem as ReadItem,
    SavePlan as SavePlan,
    WriteItem as WriteItem,
)
from megackpt.planning.manifest.tensors import (
    COMMON as COMMON,
    COMMON_KEY as COMMON_KEY,
    DIGEST_BLOCK as DIGEST_BLOCK,
    DIGEST_SIZE as DIGEST_SIZE,
    ITEMSIZE as ITEMSIZE,
    LARGEST as LARGEST,
    MOST_AXES as MOST_AXES,
    NOMINAL_OBJECT as NOMINAL_OBJECT,
    OBJECT as OBJECT,
    UNNUMBERED as UNNUMBERED,
    Bool as Bool,
    Digests as Digests,
    Int32 as Int32,
    ReplicaId as ReplicaId,
    ShardId as ShardId,
    TensorEntry as TensorEntry,
    TensorMeta as TensorMeta,
    carried_dtype as carried_dtype,
    is_main_replica as is_main_replica,
    itemsizes as itemsizes,
    key_problem as key_problem,
    size_problem as size_problem,
    unique_key as unique_key,
)
