"""Megatron's ``dict_utils``."""

from __future__ import annotations

from megackpt.megatron.refused import refusing
from megackpt.tree import (
    dict_list_map_inplace as dict_list_map_inplace,
    dict_list_map_outplace as dict_list_map_outplace,
    diff as diff,
    extract_matching_values as extract_matching_values,
    map_reduce as map_reduce,
    merge as merge,
    nested_values as nested_values,
)

__getattr__ = refusing(__name__)
