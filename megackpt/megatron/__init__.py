"""Megatron-Core's module names, for the calls of releases 0.16 to 0.19.

Either a program changes the root of its imports from ``megatron.core.dist_checkpointing`` to
``megackpt.megatron``, or it calls ``install()`` before it imports Megatron, and keeps its imports.
The modules below, such as ``megackpt.megatron.strategies.torch``, are made from ``table.py``.
"""

from __future__ import annotations

from megackpt.converter import remove_sharded_tensors
from megackpt.loader.metadata import (
    check_is_distributed_checkpoint,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_tensors_metadata,
)
from megackpt.megatron.import_hook import Installed, install, uninstall
from megackpt.megatron.module_table import make_modules
from megackpt.megatron.save_load import load, save
from megackpt.state import LocalNonpersistentObject, ShardedObject, ShardedTensor

__all__ = [
    "Installed",
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedTensor",
    "check_is_distributed_checkpoint",
    "install",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
    "uninstall",
]

make_modules()
