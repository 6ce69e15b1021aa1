"""What every checkpoint of another library must pass: other layouts, conversions, bounded memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from tests.bits import assert_same
from tests.converter.test_memory import peak

TARGETS = ("torch_dist", "zarr", "safetensors", "torch")
MEMORY = 512 << 20
"""Bytes that a conversion may take above idle, at any size."""
MEMORY_RUNS = (
    pytest.param(0.25, "zarr", marks=pytest.mark.slow),
    *(pytest.param(4, to, marks=pytest.mark.campaign) for to in TARGETS),
)
"""Sizes in GiB, and formats."""


def check_memory(source: Path, target: Path, to: str) -> None:
    """Convert within ``MEMORY``, and print what the conversion took."""
    taken = peak(source, target, to, MEMORY)
    print(f"{to}: {taken / (1 << 20):.0f} MiB")
    assert taken <= MEMORY


def check_layouts(source: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """Load every tensor whole, cut along its first axis, and cut along its last axis."""
    for axis, count in ((0, 1), (0, 2), (-1, 3)):
        state = {}
        parts: dict[str, list[torch.Tensor]] = {}
        for key, tensor in expected.items():
            cut = axis % max(tensor.ndim, 1)
            if tensor.ndim == 0 or count == 1 or tensor.shape[cut] % count:
                parts[key] = [torch.zeros_like(tensor)]
                state[key] = [ShardedTensor.from_rank_offsets(key, parts[key][0])]
                continue
            parts[key] = [torch.zeros_like(part) for part in tensor.chunk(count, cut)]
            state[key] = [
                ShardedTensor.from_rank_offsets(key, part.contiguous(), (cut, i, count))
                for i, part in enumerate(parts[key])
            ]
        loaded = megackpt.load(state, source)
        for key, tensor in expected.items():
            found = loaded[key]
            whole = found[0] if len(found) == 1 else torch.cat(found, axis)
            assert_same(whole, tensor, key)


def check_conversions(
    source: Path, expected: Mapping[str, torch.Tensor], folder: Path
) -> None:
    """Convert to every format that is written; the tensors keep their bits."""
    for target in TARGETS:
        megackpt.convert(source, folder / target, target)
        found = megackpt.load_plain_tensors(folder / target)
        assert found.keys() == expected.keys(), target
        for key, tensor in expected.items():
            assert_same(found[key], tensor, f"{key} as {target}")
