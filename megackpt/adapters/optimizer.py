"""Optimizer state declared like the parameters it belongs to, so that it survives changes of parallelism.

The keys are the same whether a rank has the state of its parameters or, as in ZeRO-1, of flat ranges of them.
Names are those of Megatron-Core's ``dist_checkpointing.optimizer``. State is stored under the key of the
model's parameter, ``optimizer.state.exp_avg.decoder.layers.mlp.weight``, never under the optimizer's own
numbers, which depend on what this rank holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megackpt import tree
from megackpt.adapters.flat_ranges import (
    ShardedParam,
    built,
    check_flat_range,
    flattened,
    known_by,
    make_flat_range_shards,
    param_shape,
)
from megackpt.adapters.megatron import native
from megackpt.adapters.param_groups import declared_groups, told_apart
from megackpt.errors import MismatchError, ShardingError
from megackpt.state import (
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
    """``id(param)`` -> number of the parameter in the optimizer, the first where it occurs twice."""
    numbers: dict[int, int] = {}
    for number, param in enumerate(optim_params_iter):
        numbers.setdefault(id(param), number)
    return numbers


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict,
    optim_params_iter: Iterable[torch.nn.Parameter],
) -> dict[int, ShardedParam]:
    """Number of each parameter in the optimizer -> its declaration in the model's sharded state dict.

    They are matched by identity: the shards' ``data`` must be the parameters themselves (see KEEP_VARS_HINT).
    Declarations that are no parameters of this optimizer are left out. Where an optimizer's own parameters are flat
    pieces of the model's, give for each the parameter of the model that it is a piece of; one may occur repeatedly.
    Of several declarations of one parameter (tied weights) the one of the smallest replica id counts, which is the
    same one on all data-parallel ranks, or the first.
    """
    params = list(optim_params_iter)
    declared: dict[int, ShardedParam] = {}
    for leaf in tree.nested_values(model_sharded_state_dict):
        shard = native(leaf)
        if isinstance(shard, (ShardedTensor, ShardedTensorFactory)):
            known = declared.setdefault(id(shard.data), shard)
            if _numbers(shard.replica_id) < _numbers(known.replica_id):
                declared[id(shard.data)] = shard
    found = {
        number: declared[id(param)]
        for number, param in enumerate(params)
        if id(param) in declared
    }
    if params and not found:
        _logger.warning(
            "the optimizer and the sharded state dict share no parameter.%s",
            KEEP_VARS_HINT,
        )
    return found


def make_sharded_optimizer_tensor(
    model_param: ShardedParam, optim_param: torch.Tensor, prefix: str
) -> ShardedParam:
    """``optim_param``, of the parameter's shape, declared like the parameter, as ``{prefix}.{its key}``.

    Raises ShardingError if the shapes differ.
    """
    model_param = native(model_param)
    key = f"{prefix}.{model_param.key}"
    shape = param_shape(model_param)
    if tuple(optim_param.shape) != shape:
        raise ShardingError(
            f"{key!r}: state of shape {tuple(optim_param.shape)} does not match its parameter's shape {shape}"
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

    State of the parameter's shape is cut as the parameter is. Other state belongs to the parameter as a whole
    (Adam's ``step``, a 0-dim tensor, or a plain number): every rank that holds a piece of the parameter has
    the same, and it is stored once, under ``optimizer.state.step.{key}``, for each cell of the parameter's
    prepended axes; it has to be alike on all ranks that hold the parameter, any of which may write it.
    It is not left in the common state, of which only the coordinator's is kept, while pipeline stages hold
    different parameters. A parameter that is stored through a factory keeps one such value for each tensor
    that the factory builds; where the stored ones differ, a load takes the largest ``step``, with a warning, and
    raises MismatchError for anything else.

    ``flat_ranges``: number -> the elements of the declared parameter that this rank's optimizer has, where its
    parameters are flat (1-dim) pieces of the model's, dealt out over data-parallel ranks. State of a range's length is
    then declared by ``make_flat_range_shards``, under the same keys; a ``step`` of one element is the parameter's,
    however long the range is. Numbers that are not in it are whole.

    ``param_groups`` are common, but for their lists of parameter numbers, which every rank keeps for itself. A load
    matches them by ``param_groups.IDENTIFYING`` hyperparameters; of groups that these do not tell apart, the number
    is stored with each parameter, under ``optimizer.param_group.{key}``. The coordinator's list is the one that is
    stored, so it needs all groups, also those without a parameter there: of these it stores what the lowest rank has
    that has parameters of them. A save raises ShardingError where ranks have parameters of a group and differ.
    The inner dicts of the optimizer are not touched; state named in ``exclude_keys`` is left out.
    Raises ValueError for a parameter that ``id_to_sharded_param_map`` lacks, ShardingError for a tensor of
    another shape whose parameter is cut: nobody could say how to cut it.
    """
    excluded = {exclude_keys} if isinstance(exclude_keys, str) else set(exclude_keys)
    params: dict[int, ShardedParam] = {
        number: native(p) for number, p in id_to_sharded_param_map.items()
    }
    ranges = flat_ranges or {}
    state: dict[Any, dict[str, Any]] = {}
    for number, values in optim_state_dict["state"].items():
        if number not in params:
            raise ValueError(
                f"Param id {number} does not match any model sharded param.{KEEP_VARS_HINT}"
            )
        state[number] = {
            name: _declared(
                params[number], value, f"optimizer.state.{name}", ranges.get(number)
            )
            for name, value in values.items()
            if name not in excluded
        }
    groups = optim_state_dict["param_groups"]
    before: dict[int, set[int]] | None = None if told_apart(groups) else {}
    keys = {number: param.key for number, param in params.items()}
    optim_state_dict["state"] = state
    optim_state_dict["param_groups"] = declared_groups(groups, before, keys)
    if before is not None:  # behind the groups: a load merges last what stands first
        optim_state_dict["param_group"] = {
            number: _group_number(
                params[number],
                i,
                ranges.get(number),
                partial(before.__setitem__, number),
            )
            for i, group in enumerate(groups)
            for number in group["params"]
            if number in params
        }
    return optim_state_dict


def _group_number(
    param: ShardedParam,
    group: int,
    flat_range: slice | None,
    tell: Callable[[set[int]], None],
) -> ShardedTensorFactory:
    """The number of the parameter's group, for a save; a load gives ``tell`` the stored ones."""

    def build(
        key: str, _data: Any, replica_id: ReplicaId, _: slice | None
    ) -> ShardedTensorFactory:
        named = replace(param, key=key, replica_id=replica_id)
        number = torch.tensor(group, device="cpu")  # anew: a load fills it
        return _once_for_each(
            named, number, flat_range, lambda _, stored: tell({int(i) for i in stored})
        )

    key = f"optimizer.param_group.{param.key}"
    return ShardedTensorFactory(key, None, build, lambda told: told, param.replica_id)


def _declared(
    param: ShardedParam, value: Any, prefix: str, flat_range: slice | None
) -> Any:
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
    if prefix == _STEP and shape == (1,):
        shape = None  # of the parameter as a whole, as a 0-dim one is
    if flat_range is None and shape == param_shape(param):
        return make_sharded_optimizer_tensor(param, value, prefix)
    param = replace(param, key=f"{prefix}.{param.key}")
    if flat_range is not None:
        check_flat_range(param, None, flat_range)
        if shape == (flat_range.stop - flat_range.start,):
            return flattened(param, value, flat_range, main=True)
    elif isinstance(param, ShardedTensor):
        return _once(param, value)
    return _once_for_each(
        param, value, flat_range, _largest if prefix == _STEP else _same
    )


def _once_for_each(
    param: ShardedParam,
    value: Any,
    flat_range: slice | None,
    one_of: Callable[[str, list[Any]], Any],
) -> ShardedTensorFactory:
    """``value`` belongs to each tensor as a whole of which this rank has pieces; of what is loaded ``one_of`` tells
    which it is (given the key)."""

    def build(key: str, data: Any, replica_id: ReplicaId, _: slice | None) -> list[Any]:
        cells: dict[Any, ShardedTensor] = {}
        named = replace(param, key=key, replica_id=replica_id)
        for piece in (
            built(named) if flat_range is None else known_by(named, flat_range)
        ):
            cell = (piece.key, piece.global_offset[: piece.prepend_axis_num])
            if cell not in cells or is_main_replica(_replica_of_whole(piece)):
                cells[cell] = piece
        copied = isinstance(data, torch.Tensor)  # each is read into memory of its own
        return [
            _once(piece, data.clone() if i and copied else data)
            for i, piece in enumerate(cells.values())
        ]

    def merge(loaded: list[Any]) -> Any:
        found = one_of(param.key, loaded) if loaded else value
        if (
            isinstance(value, torch.Tensor)
            and isinstance(found, torch.Tensor)
            and not value.is_meta
        ):
            value.detach().copy_(found)
            return value
        return found

    return ShardedTensorFactory(param.key, value, build, merge, param.replica_id)


def _differ(values: list[Any]) -> bool:
    return any(any(tree.diff({0: values[0]}, {0: value})) for value in values[1:])


def _largest(key: str, steps: list[Any]) -> Any:
    if _differ(steps):
        told = ", ".join(str(float(step)) for step in steps[:6])
        _logger.warning(
            "%r has one value here and several in the checkpoint (%s); the largest is taken",
            key,
            told,
        )
    return max(steps)


def _same(key: str, values: list[Any]) -> Any:
    if _differ(values):
        raise MismatchError(
            f"{key!r} has one value here and {len(values)} in the checkpoint, which differ: load it in the form that "
            "it was saved in, or name it in exclude_keys"
        )
    return values[0]


def _numbers(replica_id: ReplicaId) -> tuple[int, ...]:
    return tuple(replica_id) if isinstance(replica_id, (tuple, list)) else (replica_id,)


def _once(param: ShardedTensor, value: Any) -> ShardedTensor | ShardedObject:
    """``value`` belongs to the whole parameter, whichever piece of it this is."""
    key, n = param.key, param.prepend_axis_num
    whole, offset = param.global_shape[:n], param.global_offset[:n]
    replica = _replica_of_whole(param)
    tensors = [
        x
        for x in tree.nested_values({0: value})
        if isinstance(x, torch.Tensor) and x.dim()
    ]
    step = isinstance(value, torch.Tensor) and value.numel() == 1 and f"{_STEP}." in key
    if tensors and not step and tuple(param.local_shape) != param.global_shape[n:]:
        raise ShardingError(
            f"{key!r}: state of shape {tuple(tensors[0].shape)} is neither one number nor of its parameter's shape "
            f"{param.local_shape}, and the parameter is a piece of {param.global_shape[n:]}: nobody can tell "
            "how it is cut. Name it in exclude_keys and declare it yourself as a ShardedTensor"
        )
    if not isinstance(value, torch.Tensor):
        return ShardedObject(key, value, whole or (1,), offset or (0,), replica)
    shape = tuple(value.shape)
    grid = param.axis_fragmentations
    return ShardedTensor(
        key,
        value,
        value.dtype,
        shape,
        whole + shape,
        offset + (0,) * len(shape),
        None if grid is None else grid[:n] + (1,) * len(shape),
        replica,
        n,
    )


def _replica_of_whole(param: ShardedTensor) -> ReplicaId:
    """All zeros for the main replica of the parameter's first piece, and for no other piece."""
    n = param.prepend_axis_num
    begins = not any(param.global_offset[n:])
    empty_beside_others = 0 in param.local_shape and 0 not in param.global_shape
    return (0 if begins and not empty_beside_others else 1, *_numbers(param.replica_id))
