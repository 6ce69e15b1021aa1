"""Megatron's ``strategies.state_dict_saver``: a save of torch DCP's in three stages."""

from __future__ import annotations

from megackpt.dcp import (
    save_state_dict_async_finalize as save_state_dict_async_finalize,
    save_state_dict_async_plan as save_state_dict_async_plan,
    verify_global_md_reuse as verify_global_md_reuse,
)
