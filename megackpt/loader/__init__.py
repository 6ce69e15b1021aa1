"""Loading: ``order`` is load itself, ``asking`` its questions, ``reading`` the bytes, ``contents`` its relatives."""

from megackpt.loader.contents import (
    check_is_distributed_checkpoint,
    get_default_load_sharded_strategy,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
)
from megackpt.loader.order import load

__all__ = [
    "check_is_distributed_checkpoint",
    "get_default_load_sharded_strategy",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
]
