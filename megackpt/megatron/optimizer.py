"""Megatron's ``optimizer``: an optimizer's state, declared like the parameters that it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from megackpt.adapters import optimizer
from megackpt.adapters.optimizer import (
    KEEP_VARS_HINT as KEEP_VARS_HINT,
    get_optim_param_to_id_map as get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map as get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor as make_sharded_optimizer_tensor,
)
from megackpt.state import LocalNonpersistentObject


def optim_state_to_sharding_state(
    optim_state_dict: dict[str, Any],
    id_to_sharded_param_map: Mapping[int, optimizer.ShardedParam],
    exclude_keys: Iterable[str] = (),
) -> None:
    """As in ``adapters.optimizer``, but the groups stay a list of dicts, which Megatron changes and matches itself."""
    groups = deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    optimizer.optim_state_to_sharding_state(optim_state_dict, id_to_sharded_param_map, exclude_keys)
    optim_state_dict["param_groups"] = groups
    optim_state_dict.pop("param_group", None)
