"""Megatron's ``optimizer``: an optimizer's state, declared like the parameters that it belongs to."""

from __future__ import annotations

from megackpt.adapters.optimizer import (
    KEEP_VARS_HINT as KEEP_VARS_HINT,
    get_optim_param_to_id_map as get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map as get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor as make_sharded_optimizer_tensor,
    optim_state_to_sharding_state as optim_state_to_sharding_state,
)
