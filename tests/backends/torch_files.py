"""What tests of torch files share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megackpt import (
    ShardedTensor,
    convert,
    save,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "torch-file-v1"
State = dict[str, torch.Tensor]
STATE = "megackpt.state"

torch.manual_seed(0)
TENSORS: State = {
    "a.weight": torch.randn(6, 8),
    "b": torch.arange(5, dtype=torch.int64),
    "half": torch.randn(3, 3).to(torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "none": torch.zeros(0, 4),
    "ключ": torch.ones(3, dtype=torch.uint16),
}


def same(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert found[key].shape == tensor.shape
        assert torch.equal(found[key], tensor), key


def whole(state: State) -> dict[str, Any]:
    return {
        key: ShardedTensor.from_rank_offsets(key, t, replica_id=0)
        for key, t in state.items()
    }


def export(state: dict[str, Any], folder: Path) -> None:
    """Save the state beside the folder, and export it into the folder as a torch file."""
    saved = folder.with_name("saved")
    save(state, saved)
    convert(saved, folder, "torch")
