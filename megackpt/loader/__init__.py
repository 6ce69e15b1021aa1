"""Loading: ``order`` is load itself, ``asking`` its questions, ``reading`` the bytes, ``contents`` its relatives."""

from megackpt.loader.contents import (
    check_is_distributed_checkpoint as check_is_distributed_checkpoint,
    get_default_load_sharded_strategy as get_default_load_sharded_strategy,
    load_common_state_dict as load_common_state_dict,
    load_content_metadata as load_content_metadata,
    load_plain_tensors as load_plain_tensors,
    load_sharded_metadata as load_sharded_metadata,
    load_tensors_metadata as load_tensors_metadata,
)
from megackpt.loader.order import load as load
