"""Megatron's functions on parts of a state: kinds of leaves, ids of shards, optimizer groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from megackpt.adapters import optimizer
from megackpt.state import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_declared,
)
from megackpt.tree import extract_matching_values

_ShardId = tuple[str, tuple[int, ...], tuple[int, ...] | None]


def zip_strict(*args: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """``zip`` that raises ValueError if one iterable is shorter than another."""
    return zip(*args, strict=True)


def _extractor(
    name: str, *kinds: type
) -> Callable[[dict[Any, Any] | list[Any]], tuple[Any, Any]]:
    def extract(sharded_state_dict: dict[Any, Any] | list[Any]) -> tuple[Any, Any]:
        return extract_matching_values(
            sharded_state_dict, lambda leaf: is_declared(leaf, *kinds)
        )

    extract.__name__ = extract.__qualname__ = name
    extract.__doc__ = (
        f"(the leaves that are a {' or a '.join(k.__name__ for k in kinds)}, the rest)"
    )
    return extract


extract_sharded_tensors = _extractor("extract_sharded_tensors", ShardedTensor)
extract_sharded_tensors_and_factories = _extractor(
    "extract_sharded_tensors_and_factories", ShardedTensor, ShardedTensorFactory
)
extract_sharded_tensors_or_nonpersistent = _extractor(
    "extract_sharded_tensors_or_nonpersistent",
    ShardedTensor,
    LocalNonpersistentObject,
    ShardedTensorFactory,
)
extract_sharded_base = _extractor("extract_sharded_base", ShardedBase)
extract_nonpersistent = _extractor("extract_nonpersistent", LocalNonpersistentObject)


def _sharded_tensor_shard_id(sharded_tensor: ShardedTensor) -> _ShardId:
    """The id of one shard of one tensor: its key and its offset."""
    return sharded_tensor.key, tuple(sharded_tensor.global_offset), None


def _sharded_object_id(
    sharded_object: ShardedObject,
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The id of one cell of a grid of objects: its key, its offset, the shape of the grid."""
    return sharded_object.key, sharded_object.global_offset, sharded_object.global_shape


def _clean_metadata_for_serialization(
    metadata: dict[Any, Any] | None,
) -> dict[Any, Any] | None:
    """``metadata`` without the process group, which cannot be saved; None stays None."""
    if metadata is None:
        return None
    return {key: value for key, value in metadata.items() if key != "dp_cp_group"}


def optim_state_to_sharding_state(
    optim_state_dict: dict[str, Any],
    id_to_sharded_param_map: Mapping[int, optimizer.ShardedParam],
    exclude_keys: Iterable[str] = (),
) -> None:
    """Declare an optimizer's state, in place, like the parameters that it belongs to.

    Unlike the function in ``adapters.optimizer`` it leaves ``param_groups`` a list of dicts:
    Megatron's optimizers change and match these themselves.
    """
    optim_state_dict["state"] = optimizer.declare_state(
        optim_state_dict["state"], id_to_sharded_param_map, exclude_keys
    )
    groups = []
    for group in optim_state_dict["param_groups"]:
        params = LocalNonpersistentObject(group["params"])
        groups.append({**group, "params": params})
    optim_state_dict["param_groups"] = groups
