"""What tests of strategies share: a package that adds formats, and a small state."""

from __future__ import annotations

from pathlib import Path

import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.checkpoint import open_checkpoint

ROOT = Path(__file__).resolve().parents[2]

BACKEND = """
from dataclasses import replace

from megackpt.backends.torch_dist import TorchDist

class Mine(TorchDist):
    properties = replace(TorchDist.properties, name="mine")

class Newer(Mine):
    properties = replace(Mine.properties, version=2, reads=frozenset({2}))

class Reader(Newer):
    properties = replace(Mine.properties, version=3, reads=frozenset({1, 2, 3}))
"""


def with_line(line: str) -> str:
    """The same, in which ``Mine`` has one line more."""
    first = '    properties = replace(TorchDist.properties, name="mine")\n'
    return BACKEND.replace(first, f"{first}    {line}\n")


def state(value: float = 1.0, size: int = 4):
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((size,), value))}


def saved_as(directory: Path) -> tuple[str, int]:
    return open_checkpoint(directory).manifest.backend


# -- which format a directory is of


def load_over(group, directory: Path, asked) -> list[float]:
    """``w`` as the ranks of this group load it, each the whole of it."""
    loaded = megackpt.load(
        state(),
        directory,
        asked,
        validate_access_integrity=False,
        process_group=group,
    )
    return loaded["w"].tolist()


def bare(directory: Path) -> None:
    """Leave what stock DCP writes, and nothing that says who wrote it."""
    for name in ("megackpt.index", "metadata.json"):
        (directory / name).unlink()
