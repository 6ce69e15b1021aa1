"""Megatron's ``validation``: strictness, and the checks that can be asked for by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megackpt import checkpoint
from megackpt.errors import CorruptCheckpoint
from megackpt.megatron.refused import refusing
from megackpt.megatron.serialization import get_default_load_sharded_strategy
from megackpt.planning.strict import StrictHandling as StrictHandling, parse_strict_flag as parse_strict_flag
from megackpt.strategies import StrategyLike

__getattr__ = refusing(__name__)


def verify_checkpoint(checkpoint_dir: str | Path) -> None:
    """Raise NotACheckpoint where there is none that is complete."""
    checkpoint.open_checkpoint(checkpoint_dir)


def verify_checkpoint_and_load_strategy(
    checkpoint_dir: str | Path, sharded_strategy: StrategyLike = None, common_strategy: Any = None
) -> tuple[StrategyLike, Any]:
    """The strategies to load with: those that are given, else what reads this checkpoint."""
    default = get_default_load_sharded_strategy(checkpoint_dir)
    return default if sharded_strategy is None else sharded_strategy, common_strategy


def verify_integrity_manifest(checkpoint_dir: str | Path) -> None:
    """Read everything and compare it with its digests. Raises CorruptCheckpoint."""
    report = checkpoint.verify(checkpoint_dir)
    if not report.ok:
        raise CorruptCheckpoint("\n".join(map(str, report.problems)))


def validate_sharded_objects_handling(sharded_strategy: Any, common_strategy: Any) -> None:
    """Every format here keeps objects: there is nothing to check."""
