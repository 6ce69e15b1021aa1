"""Optimizer state declared like the parameters it belongs to, so that it survives changes of parallelism.

Names are those of Megatron-Core's ``dist_checkpointing.optimizer``. State is stored under the key of the
model's parameter, ``optimizer.state.exp_avg.decoder.layers.mlp.weight``, never under the optimizer's own
numbers, which depend on what this rank holds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from megackpt import tree
from megackpt.errors import ShardingError
from megackpt.sharded import (
    LocalNonpersistentObject,
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

ShardedParam = ShardedTensor | ShardedTensorFactory

_logger = logging.getLogger(__name__)


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.nn.Parameter]) -> dict[int, int]:
    """``id(param)`` -> number of the parameter in the optimizer, the first where it occurs twice."""
    numbers: dict[int, int] = {}
    for number, param in enumerate(optim_params_iter):
        numbers.setdefault(id(param), number)
    return numbers


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.nn.Parameter]
) -> dict[int, ShardedParam]:
    """Number of each parameter in the optimizer -> its declaration in the model's sharded state dict.

    They are matched by identity: the shards' ``data`` must be the parameters themselves (see KEEP_VARS_HINT).
    Declarations that are no parameters of this optimizer are left out.
    """
    numbers = get_optim_param_to_id_map(optim_params_iter)
    found: dict[int, ShardedParam] = {}
    for leaf in tree.nested_values(model_sharded_state_dict):
        if isinstance(leaf, (ShardedTensor, ShardedTensorFactory)) and id(leaf.data) in numbers:
            found[numbers[id(leaf.data)]] = leaf
    if numbers and not found:
        _logger.warning("the optimizer and the sharded state dict share no parameter.%s", KEEP_VARS_HINT)
    return found


def make_sharded_optimizer_tensor(
    model_param: ShardedParam, optim_param: torch.Tensor, prefix: str
) -> ShardedParam:
    """``optim_param``, of the parameter's shape, declared like the parameter, as ``{prefix}.{its key}``.

    Raises ShardingError if the shapes differ.
    """
    key = f"{prefix}.{model_param.key}"
    shape = _param_shape(model_param)
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
) -> dict[str, Any]:
    """Turn ``optimizer.state_dict()`` into a sharded state dict, in place, and return it.

    State of the parameter's shape is cut as the parameter is. Other state belongs to the parameter as a whole
    (Adam's ``step``, a 0-dim tensor, or a plain number): every rank that holds a piece of the parameter has
    the same, and it is stored once, under ``optimizer.state.step.{key}``, for each cell of the parameter's
    prepended axes; the rank with the main replica of the parameter's first piece is the one that writes it.
    It is not left in the common state, of which only the coordinator's is kept, while pipeline stages hold
    different parameters. A parameter that is stored through a factory keeps one such value for each tensor
    that the factory builds.

    ``param_groups`` are common, but for their lists of parameter numbers, which every rank keeps for itself.
    The inner dicts of the optimizer are not touched; state named in ``exclude_keys`` is left out.
    Raises ValueError for a parameter that ``id_to_sharded_param_map`` lacks, ShardingError for a tensor of
    another shape whose parameter is cut: nobody could say how to cut it.
    """
    excluded = set(exclude_keys)
    state: dict[Any, dict[str, Any]] = {}
    for number, values in optim_state_dict["state"].items():
        if number not in id_to_sharded_param_map:
            raise ValueError(f"Param id {number} does not match any model sharded param.{KEEP_VARS_HINT}")
        param = id_to_sharded_param_map[number]
        state[number] = {
            name: _declared(param, value, f"optimizer.state.{name}")
            for name, value in values.items()
            if name not in excluded
        }
    groups = [
        {**group, "params": LocalNonpersistentObject(group["params"])}
        for group in optim_state_dict["param_groups"]
    ]
    optim_state_dict["state"], optim_state_dict["param_groups"] = state, groups
    return optim_state_dict


def _param_shape(param: ShardedParam) -> tuple[int, ...]:
    return param.local_shape if isinstance(param, ShardedTensor) else tuple(param.data.shape)


def _declared(param: ShardedParam, value: Any, prefix: str) -> Any:
    if isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(_param_shape(param)):
        return make_sharded_optimizer_tensor(param, value, prefix)
    if isinstance(param, ShardedTensor):
        return _once(param, value, prefix)
    return _once_for_each_built(param, value, prefix)


def _once_for_each_built(param: ShardedTensorFactory, value: Any, prefix: str) -> ShardedTensorFactory:
    def build(_key: str, data: Any, _replica_id: ReplicaId, _flattened_range: slice | None) -> list[Any]:
        cells: dict[Any, ShardedTensor | ShardedObject] = {}
        for piece in _pieces(param):
            cell = (piece.key, piece.global_offset[: piece.prepend_axis_num])
            shard = _once(piece, data, prefix)
            if cell not in cells or is_main_replica(shard.replica_id):
                cells[cell] = shard
        return list(cells.values())

    def merge(loaded: list[Any]) -> Any:
        return loaded[0] if loaded else value

    return ShardedTensorFactory(f"{prefix}.{param.key}", value, build, merge, param.replica_id)


def _pieces(param: ShardedTensorFactory) -> list[ShardedTensor]:
    """The tensors that a factory builds in the end."""
    todo, pieces = [param.build()], []
    while todo:
        for leaf in tree.nested_values(todo.pop()):
            if isinstance(leaf, ShardedTensorFactory):
                todo.append(leaf.build())
            elif isinstance(leaf, ShardedTensor):
                pieces.append(leaf)
    return pieces


def _once(param: ShardedTensor, value: Any, prefix: str) -> ShardedTensor | ShardedObject:
    """``value`` belongs to the whole parameter, whichever piece of it this is."""
    key, n = f"{prefix}.{param.key}", param.prepend_axis_num
    whole, offset = param.global_shape[:n], param.global_offset[:n]
    replica = _replica_of_whole(param)
    if not isinstance(value, torch.Tensor):
        return ShardedObject(key, value, whole or (1,), offset or (0,), replica)
    shape = tuple(value.shape)
    if value.numel() != 1 and tuple(param.local_shape) != param.global_shape[n:]:
        raise ShardingError(
            f"{key!r}: state of shape {shape} is neither one number nor of its parameter's shape "
            f"{param.local_shape}, and the parameter is a piece of {param.global_shape[n:]}: nobody can tell "
            "how it is cut. Name it in exclude_keys and declare it yourself as a ShardedTensor"
        )
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
    own = param.replica_id if isinstance(param.replica_id, (tuple, list)) else (param.replica_id,)
    return (0 if begins and not empty_beside_others else 1, *own)
