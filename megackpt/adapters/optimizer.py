"""Optimizer state, declared as shards like the parameters that it belongs to.

State is stored under the key of the model's parameter, such as
``optimizer.state.exp_avg.decoder.layers.mlp.weight``, not under the optimizer's numbers, which
depend on the parameters that a rank holds. The keys are the same if ranks have flat ranges of
parameters (ZeRO-1). Functions have the names of Megatron-Core's ``dist_checkpointing.optimizer``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megackpt import tree
from megackpt.adapters.flat_ranges import (
    ShardedParam,
    built_tensors,
    check_flat_range,
    declare_flat_range,
    declare_whole_by_range,
    make_flat_range_shards,
    param_shape,
)
from megackpt.adapters.megatron import from_megatron
from megackpt.adapters.param_groups import GroupsFactory
from megackpt.errors import MismatchError, ShardingError
from megackpt.state import (
    FactoryMergeFn,
    ReplicaId,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)

KEEP_VARS_HINT = (
    " Is the sharded state dict made of the module's own Parameters?"
    " (Call `state_dict(keep_vars=True)`; without keep_vars it holds detached copies.)"
)

__all__ = [
    "KEEP_VARS_HINT",
    "ShardedParam",
    "get_optim_param_to_id_map",
    "get_param_id_to_sharded_param_map",
    "make_flat_range_shards",
    "make_sharded_optimizer_tensor",
    "optim_state_to_sharding_state",
]

_STEP = "optimizer.state.step"
_logger = logging.getLogger(__name__)


def get_optim_param_to_id_map(
    optim_params_iter: Iterable[torch.nn.Parameter],
) -> dict[int, int]:
    """``id(param)`` -> number of the parameter in the optimizer, the first if there are several."""
    numbers: dict[int, int] = {}
    for number, param in enumerate(optim_params_iter):
        numbers.setdefault(id(param), number)
    return numbers


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict,
    optim_params_iter: Iterable[torch.nn.Parameter],
) -> dict[int, ShardedParam]:
    """Number of each parameter in the optimizer -> its declaration in the model's state.

    Parameters are matched by identity: the ``data`` of the declarations must be the parameters
    themselves (see KEEP_VARS_HINT). Declarations of other parameters are left out. If the
    optimizer's parameters are flat pieces of the model's, pass for each the model's parameter; one
    may occur repeatedly. A parameter may have several declarations (tied weights). The declaration
    with the smallest replica id counts, which is the same one on all data-parallel ranks. Among
    equal ids the first one counts.
    """
    params = list(optim_params_iter)
    declared: dict[int, ShardedParam] = {}
    for leaf in tree.nested_values(model_sharded_state_dict):
        shard = from_megatron(leaf)
        if isinstance(shard, (ShardedTensor, ShardedTensorFactory)):
            known = declared.setdefault(id(shard.data), shard)
            if _as_tuple(shard.replica_id) < _as_tuple(known.replica_id):
                declared[id(shard.data)] = shard
    found = {}
    for number, param in enumerate(params):
        if id(param) in declared:
            found[number] = declared[id(param)]
    if params and not found:
        _logger.warning(
            "the optimizer and the sharded state dict share no parameter.%s",
            KEEP_VARS_HINT,
        )
    return found


def make_sharded_optimizer_tensor(
    model_param: ShardedParam,
    optim_param: torch.Tensor,
    prefix: str,
) -> ShardedParam:
    """``optim_param``, declared like the parameter, as ``{prefix}.{key of the parameter}``.

    Raises ShardingError unless both have the same shape.
    """
    model_param = from_megatron(model_param)
    key = f"{prefix}.{model_param.key}"
    shape = param_shape(model_param)
    if tuple(optim_param.shape) != shape:
        raise ShardingError(
            f"{key!r}: state of shape {tuple(optim_param.shape)} does not match its parameter's "
            f"shape {shape}"
        )
    if isinstance(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=optim_param)
    sharded = replace(model_param, key=key, data=optim_param, dtype=optim_param.dtype)
    sharded.validate_metadata_integrity()
    return sharded


def optim_state_to_sharding_state(
    optim_state_dict: dict[str, Any],
    id_to_sharded_param_map: Mapping[int, ShardedParam],
    exclude_keys: Iterable[str] = (),
    *,
    flat_ranges: Mapping[int, slice] | None = None,
) -> dict[str, Any]:
    """Turn ``optimizer.state_dict()`` into a sharded state dict, in place, and return it.

    State of the parameter's shape is sharded as the parameter is, under
    ``optimizer.state.{name}.{key of the parameter}``.

    Other state (Adam's ``step``, a number or a 0-dim tensor) belongs to the whole parameter. It is
    stored once, and must be equal on all ranks that hold the parameter, as any of them may write
    it. It is not common state, because a save stores only rank 0's common state, and pipeline
    stages hold different parameters. A parameter with prepended axes has one such value for each
    index along these axes, and a parameter behind a factory one for each tensor that the factory
    builds. If these differ in the checkpoint, a load takes the largest ``step``, with a warning,
    and raises MismatchError for other state.

    ``param_groups`` are common state, without their lists of parameters. A load matches them by
    their ``name``, or the hyperparameters by which Megatron-Core makes its groups. If these are
    not distinct, the number of its group is stored for each parameter, under
    ``optimizer.param_group.{key}``. Rank 0's list is stored, so it needs all groups. For groups
    without a parameter on rank 0 it stores the values of the lowest rank that has parameters of
    them. A save raises ShardingError if ranks with parameters of a group have different values.

    Args:
        optim_state_dict: changed in place; the dicts of single parameters are not.
        id_to_sharded_param_map: number of a parameter -> its declaration.
        exclude_keys: names of state to leave out.
        flat_ranges: number of a parameter -> the elements of the declared parameter that this
            rank's optimizer has, if its parameters are flat (1-dim) pieces of the model's (ZeRO-1).
            ``make_flat_range_shards`` declares state of a range's length, under the same keys; a
            ``step`` of one element belongs to the whole parameter.

    Raises:
        ValueError: a parameter is not in ``id_to_sharded_param_map``.
        ShardingError: a tensor has another shape than its parameter, which is sharded.
    """
    params: dict[int, ShardedParam] = {}
    for number, param in id_to_sharded_param_map.items():
        params[number] = from_megatron(param)
    ranges = flat_ranges or {}
    optim_state_dict["state"] = declare_state(
        optim_state_dict["state"], params, exclude_keys, ranges
    )
    keys = {number: param.key for number, param in params.items()}
    groups = GroupsFactory(
        "optimizer.param_groups", list(optim_state_dict["param_groups"]), keys=keys
    )
    optim_state_dict["param_groups"] = groups
    if groups.numbers is None:
        return optim_state_dict
    # A load merges factories from the last to the first: it needs the numbers for the groups.
    numbers = {}
    for i, group in enumerate(groups.data):
        for number in group["params"]:
            if number in params:
                param = params[number]
                numbers[number] = _declare_of_whole(
                    replace(param, key=f"optimizer.param_group.{param.key}"),
                    torch.tensor(i, device="cpu"),
                    ranges.get(number),
                    partial(groups.keep, number),
                )
    optim_state_dict["param_group"] = numbers
    return optim_state_dict


def declare_state(
    state: Mapping[int, Mapping[str, Any]],
    id_to_sharded_param_map: Mapping[int, ShardedParam],
    exclude_keys: Iterable[str] = (),
    flat_ranges: Mapping[int, slice] | None = None,
) -> dict[int, dict[str, Any]]:
    """The "state" of an optimizer's state dict, declared by ``optim_state_to_sharding_state``."""
    if isinstance(exclude_keys, str):
        excluded = {exclude_keys}
    else:
        excluded = set(exclude_keys)
    declared: dict[int, dict[str, Any]] = {}
    for number, values in state.items():
        if number not in id_to_sharded_param_map:
            raise ValueError(
                f"Param id {number} does not match any model sharded param.{KEEP_VARS_HINT}"
            )
        param = from_megatron(id_to_sharded_param_map[number])
        part = (flat_ranges or {}).get(number)
        declared[number] = {}
        for name, value in values.items():
            if name not in excluded:
                prefix = f"optimizer.state.{name}"
                declared[number][name] = _declare(param, value, prefix, part)
    return declared


def _declare(
    param: ShardedParam,
    value: Any,
    prefix: str,
    flat_range: slice | None,
) -> Any:
    shape = None
    if isinstance(value, torch.Tensor):
        shape = tuple(value.shape)
    if prefix == _STEP and shape == (1,):
        shape = None  # One number of the whole parameter, even if that has one element.
    if flat_range is None and shape == param_shape(param):
        return make_sharded_optimizer_tensor(param, value, prefix)
    param = replace(param, key=f"{prefix}.{param.key}")
    if flat_range is not None:
        check_flat_range(param, None, flat_range)
        if shape == (flat_range.stop - flat_range.start,):
            return declare_flat_range(param, value, flat_range, main=True)
    elif isinstance(param, ShardedTensor):
        return _declare_once(param, value)

    def merge(loaded: list[Any]) -> Any:
        if not loaded:
            return value
        found = _choose(param.key, loaded, prefix == _STEP)
        tensors = isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor)
        if tensors and not value.is_meta:
            return value.detach().copy_(found)
        return found

    return _declare_of_whole(param, value, flat_range, merge)


def _declare_of_whole(
    param: ShardedParam,
    value: Any,
    flat_range: slice | None,
    merge: FactoryMergeFn,
) -> ShardedTensorFactory:
    """``value`` for each tensor, and each index of prepended axes, that this rank has a part of."""

    def build(key: str, data: Any, replica_id: ReplicaId, *_: Any) -> list[Any]:
        named = replace(param, key=key, replica_id=replica_id)
        pieces = built_tensors(named)
        if flat_range is not None:
            pieces = declare_whole_by_range(named, flat_range)
        chosen: dict[Any, ShardedTensor] = {}
        for piece in pieces:
            place = piece.key, piece.global_offset[: piece.prepend_axis_num]
            if place not in chosen or is_main_replica(_replica_of_whole(piece)):
                chosen[place] = piece
        declared = []
        for piece in chosen.values():
            # Each piece is loaded into separate memory.
            own = data
            if isinstance(data, torch.Tensor):
                own = data.clone()
            declared.append(_declare_once(piece, own))
        return declared

    return ShardedTensorFactory(param.key, value, build, merge, param.replica_id)


def _choose(
    key: str,
    loaded: list[Any],
    is_step: bool,
) -> Any:
    """The value of a parameter that was saved as several."""
    if not tree.are_alike(loaded):
        if not is_step:
            raise MismatchError(
                f"{key!r} has one value here and {len(loaded)} in the checkpoint, which differ: "
                "load it in the form that it was saved in, or name it in exclude_keys"
            )
        steps = ", ".join(str(float(step)) for step in loaded[:6])
        _logger.warning(
            "%r has one value here and several in the checkpoint (%s); the largest is taken",
            key,
            steps,
        )
    if is_step:
        return max(loaded)
    return loaded[0]


def _as_tuple(replica_id: ReplicaId) -> tuple[int, ...]:
    if isinstance(replica_id, (tuple, list)):
        return tuple(replica_id)
    return (replica_id,)


def _declare_once(param: ShardedTensor, value: Any) -> ShardedTensor | ShardedObject:
    """``value`` of a whole parameter; ``param`` is a part of it."""
    key = param.key
    n = param.prepend_axis_num
    grid = param.global_shape[:n]
    offset = param.global_offset[:n]
    replica = _replica_of_whole(param)
    is_step = (
        f"{_STEP}." in key and isinstance(value, torch.Tensor) and value.numel() == 1
    )
    if tuple(param.local_shape) != param.global_shape[n:] and not is_step:
        for inner in tree.nested_values({0: value}):
            if isinstance(inner, torch.Tensor) and inner.dim():
                raise ShardingError(
                    f"{key!r}: state of shape {tuple(inner.shape)} is neither one number nor of "
                    f"its parameter's shape {param.local_shape}, and the parameter is a part of "
                    f"{param.global_shape[n:]}: nothing says how it is sharded. Name it in "
                    "exclude_keys and declare it yourself as a ShardedTensor"
                )
    if not isinstance(value, torch.Tensor):
        return ShardedObject(key, value, grid or (1,), offset or (0,), replica)
    shape = tuple(value.shape)
    fragments = param.axis_fragmentations
    if fragments is not None:
        fragments = fragments[:n] + (1,) * len(shape)
    return ShardedTensor(
        key,
        value,
        value.dtype,
        shape,
        grid + shape,
        offset + (0,) * len(shape),
        fragments,
        replica,
        n,
    )


def _replica_of_whole(param: ShardedTensor) -> ReplicaId:
    """All zeros for the main replica of the parameter's first piece, and for no other piece."""
    n = param.prepend_axis_num
    is_empty = 0 in param.local_shape and 0 not in param.global_shape
    is_first = not any(param.global_offset[n:]) and not is_empty
    return (0 if is_first else 1, *_as_tuple(param.replica_id))
