"""What every checkpoint of another library must pass: layouts, conversions, resuming, bounded memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor, limits
from megackpt.converter import conversion
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
        _check_tensors(folder / target, expected)


def check_resuming(
    source: Path,
    expected: Mapping[str, torch.Tensor],
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> None:
    """Interrupt a conversion after two tasks; the next one continues, and the tensors keep their bits."""
    monkeypatch.setattr(limits, "CONVERT_CELL_BYTES", 4 << 10)
    monkeypatch.setattr(limits, "CONVERT_TASK_BYTES_MIN", 100)
    perform = conversion.TaskRunner.perform
    performed: list[int] = []

    def twice_and_no_more(self: Any, task: Any, moved: Any) -> Any:
        if len(performed) == 2:
            raise KeyboardInterrupt
        performed.append(task.number)
        return perform(self, task, moved)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(conversion.TaskRunner, "perform", twice_and_no_more)
        with pytest.raises(KeyboardInterrupt):
            megackpt.convert(source, target, "torch_dist", workers=1, **options)
    done = megackpt.convert(source, target, "torch_dist", workers=1, **options)
    assert done.resumed > 0
    _check_tensors(target, expected)


def _check_tensors(folder: Path, expected: Mapping[str, torch.Tensor]) -> None:
    found = megackpt.load_plain_tensors(folder)
    assert found.keys() == expected.keys(), folder
    for key, tensor in expected.items():
        assert_same(found[key], tensor, f"{key} in {folder}")
