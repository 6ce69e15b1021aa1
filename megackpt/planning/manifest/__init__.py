"""The values of plan time: what ranks hold (declarations), do (plans), and a checkpoint holds (manifest).

Everything is frozen. Many shards travel as columns (numpy arrays, one row a shard); the small dataclasses
are the views of single rows. Keys and metas stand once in a table that the rows point into by number.

Two unifications keep the count of concepts low. An object is a tensor of blobs: a ShardedObject of global
shape (4, 2) at (1, 0) is the unit box at (1, 0) of a tensor with dtype ``"object"``. And the common state
is such an object too, with the reserved key ``COMMON_KEY`` and no dimensions.
"""

from megackpt.planning.manifest.declarations import (
    Declaration,
    Declarations,
)
from megackpt.planning.manifest.listed import listed
from megackpt.planning.manifest.naming import (
    COMMON_KEY,
    DIGEST_BLOCK,
    DIGEST_SIZE,
    FINGERPRINT_SIZE,
    ITEMSIZE,
    NOMINAL_OBJECT,
    OBJECT,
    Bool,
    Digests,
    Int32,
    ReplicaId,
    ShardId,
    TensorEntry,
    TensorMeta,
    is_main_replica,
    unique_key,
)
from megackpt.planning.manifest.plans import (
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItem,
)
from megackpt.planning.manifest.stored import (
    Chunk,
    Chunks,
    Location,
    Manifest,
    TensorParts,
    WriteResult,
)

__all__ = [
    "COMMON_KEY",
    "DIGEST_BLOCK",
    "DIGEST_SIZE",
    "FINGERPRINT_SIZE",
    "ITEMSIZE",
    "NOMINAL_OBJECT",
    "OBJECT",
    "Bool",
    "Chunk",
    "Chunks",
    "Declaration",
    "Declarations",
    "Digests",
    "Int32",
    "LoadPlan",
    "Location",
    "Manifest",
    "ReadItem",
    "ReplicaId",
    "SavePlan",
    "ShardId",
    "TensorEntry",
    "TensorMeta",
    "TensorParts",
    "WriteItem",
    "WriteResult",
    "is_main_replica",
    "listed",
    "unique_key",
]
