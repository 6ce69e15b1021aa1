"""Tensors of any bits, and their comparison bit by bit."""

from __future__ import annotations

import math

import torch

from megackpt.planning.manifest import ITEMSIZE


def bits(shape: tuple[int, ...], dtype: str, seed: int = 0) -> torch.Tensor:
    """Any bits at all, but for bool, which has two values."""
    top = 2 if dtype == "bool" else 256
    size = math.prod(shape) * ITEMSIZE[dtype]
    if not size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, top, (size,), dtype=torch.uint8, generator=generator)
    return found.view(getattr(torch, dtype)).reshape(shape)


def octets(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def assert_same(found: torch.Tensor, expected: torch.Tensor, key: str = "") -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), key
    assert octets(found) == octets(expected), key
