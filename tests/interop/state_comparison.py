"""States of Megatron's models and optimizers, compared bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import megackpt
from megackpt.tree import walk


def compare(found: Any, expected: Any, where: str = "") -> None:
    """Trees alike, tensors bit by bit."""
    tensors, others = (
        [
            {
                path: leaf
                for path, leaf in walk(tree)
                if isinstance(leaf, torch.Tensor) is kind
            }
            for tree in (found, expected)
        ]
        for kind in (True, False)
    )
    assert tensors[0].keys() == tensors[1].keys(), where
    for path, tensor in tensors[0].items():
        other = tensors[1][path]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), (where, path)
        assert torch.equal(bits(tensor), bits(other)), (where, path)
    assert others[0] == others[1], where


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    found = megackpt.load_plain_tensors(path)
    assert megackpt.verify(path).ok
    return found
