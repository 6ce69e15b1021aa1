"""Megatron-Core's module names, for the calls of releases 0.16 to 0.19.

Either a program changes the root of its imports from ``megatron.core.dist_checkpointing`` to
``megackpt.megatron``, or it calls ``install()``, before it imports Megatron, and changes nothing.
The modules below, such as ``megackpt.megatron.strategies.torch``, are made from ``table.py``.
"""

from __future__ import annotations

from megackpt.converter import remove_sharded_tensors as remove_sharded_tensors
from megackpt.loader import (
    check_is_distributed_checkpoint as check_is_distributed_checkpoint,
    load_common_state_dict as load_common_state_dict,
    load_content_metadata as load_content_metadata,
    load_plain_tensors as load_plain_tensors,
    load_tensors_metadata as load_tensors_metadata,
)
from megackpt.megatron.import_hook import (
    Installed as Installed,
    install as install,
    uninstall as uninstall,
)
from megackpt.megatron.modules import make_modules
from megackpt.megatron.save_load import load as load, save as save
from megackpt.state import (
    LocalNonpersistentObject as LocalNonpersistentObject,
    ShardedObject as ShardedObject,
    ShardedTensor as ShardedTensor,
)

make_modules()
