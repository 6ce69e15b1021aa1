"""Megatron's ``utils``: parts of a sharded state dict, and the prefixes of its keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megackpt.adapters.modules import (
    add_prefix_for_sharding as add_prefix_for_sharding,
    apply_prefix_mapping as apply_prefix_mapping,
    replace_prefix_for_sharding as replace_prefix_for_sharding,
)
from megackpt.megatron.refused import refusing
from megackpt.state import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_declared,
)
from megackpt.tree import extract_matching_values

__getattr__ = refusing(__name__)

Split = tuple[Any, Any]
_ShardId = tuple[str, tuple[int, ...], tuple[int, ...] | None]


def zip_strict(*args: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """``zip``, which raises ValueError where one is shorter."""
    return zip(*args, strict=True)


def _extracting(name: str, *kinds: type) -> Callable[[dict[Any, Any] | list[Any]], Split]:
    def extract(sharded_state_dict: dict[Any, Any] | list[Any]) -> Split:
        return extract_matching_values(sharded_state_dict, lambda leaf: is_declared(leaf, *kinds))

    extract.__name__ = extract.__qualname__ = name
    extract.__doc__ = f"(the leaves that are a {' or a '.join(k.__name__ for k in kinds)}, the rest)"
    return extract


extract_sharded_tensors = _extracting("extract_sharded_tensors", ShardedTensor)
extract_sharded_tensors_and_factories = _extracting(
    "extract_sharded_tensors_and_factories", ShardedTensor, ShardedTensorFactory
)
extract_sharded_tensors_or_nonpersistent = _extracting(
    "extract_sharded_tensors_or_nonpersistent",
    ShardedTensor,
    LocalNonpersistentObject,
    ShardedTensorFactory,
)
extract_sharded_base = _extracting("extract_sharded_base", ShardedBase)
extract_nonpersistent = _extracting("extract_nonpersistent", LocalNonpersistentObject)


def _sharded_tensor_shard_id(sharded_tensor: ShardedTensor) -> _ShardId:
    """What names one piece of one tensor: its key and its offset."""
    return sharded_tensor.key, tuple(sharded_tensor.global_offset), None


def _sharded_object_id(sharded_object: ShardedObject) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """What names one cell of a grid of objects."""
    return sharded_object.key, sharded_object.global_offset, sharded_object.global_shape


def _clean_metadata_for_serialization(metadata: dict[Any, Any] | None) -> dict[Any, Any] | None:
    """Without the process group, which cannot be saved; None stays None."""
    if metadata is None:
        return None
    return {key: value for key, value in metadata.items() if key != "dp_cp_group"}
