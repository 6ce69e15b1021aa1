"""Megatron's ``core``: is this a checkpoint, and of which format?"""

from __future__ import annotations

from pathlib import Path

from megackpt.backends.base import CONFIG
from megackpt.checkpoint import find_storage
from megackpt.errors import CheckpointingException as CheckpointingException, NotACheckpoint
from megackpt.loader import check_is_distributed_checkpoint as check_is_distributed_checkpoint
from megackpt.megatron.refused import refusing
from megackpt.strategies import CheckpointingConfig as CheckpointingConfig, read_config

__getattr__ = refusing(__name__)

CONFIG_FNAME = CONFIG


def maybe_load_config(checkpoint_dir: str | Path) -> CheckpointingConfig | None:
    """What metadata.json says, or None where there is none."""
    try:
        return read_config(find_storage(checkpoint_dir))
    except NotACheckpoint:
        return None
