"""Megatron-Core's module names and nothing else: aliases, and strategies that can be called. Releases 0.16 to 0.19.

Either a program changes the root of its imports from ``megatron.core.dist_checkpointing`` to ``megackpt.megatron``, or
it calls ``install()``, before it imports Megatron, and changes nothing.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from megackpt.loader import check_is_distributed_checkpoint as check_is_distributed_checkpoint
from megackpt.megatron.installing import (
    MODULES,
    Installed as Installed,
    install as install,
    uninstall as uninstall,
)
from megackpt.megatron.serialization import (
    load as load,
    load_common_state_dict as load_common_state_dict,
    load_content_metadata as load_content_metadata,
    load_plain_tensors as load_plain_tensors,
    load_tensors_metadata as load_tensors_metadata,
    remove_sharded_tensors as remove_sharded_tensors,
    save as save,
)
from megackpt.state import (
    LocalNonpersistentObject as LocalNonpersistentObject,
    ShardedObject as ShardedObject,
    ShardedTensor as ShardedTensor,
)


def __getattr__(name: str) -> ModuleType:
    """Modules below, which importing Megatron's package imports as well."""
    if f".{name}" in MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
