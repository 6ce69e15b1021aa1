"""Loading: ``load_operation`` has the steps of a load, ``metadata`` reads by one process alone."""

from megackpt.loader.comparison import KeyMap as KeyMap
from megackpt.loader.load_operation import load as load
from megackpt.loader.metadata import (
    check_is_distributed_checkpoint as check_is_distributed_checkpoint,
    get_default_load_sharded_strategy as get_default_load_sharded_strategy,
    load_common_state_dict as load_common_state_dict,
    load_content_metadata as load_content_metadata,
    load_plain_tensors as load_plain_tensors,
    load_sharded_metadata as load_sharded_metadata,
    load_tensors_metadata as load_tensors_metadata,
)
