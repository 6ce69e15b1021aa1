"""Values of one floating dtype as values of another, by torch's own rules, and how many did not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_STEP = (
    1 << 15
)  # elements at a time: few enough to stay in the cache, and for torch to start no threads


def cast(array: NDArray[Any], stored: str, wanted: str) -> tuple[NDArray[Any], int]:
    """The elements of ``array`` (their bits, of the dtype ``stored``) as bits of the dtype ``wanted``.

    Also how many of them are finite and beyond the range of ``wanted``: these become infinite, or (float8_e4m3fn has
    no infinity) its largest value.
    """
    source: torch.dtype = getattr(torch, stored)
    target: torch.dtype = getattr(torch, wanted)
    values = torch.from_numpy(
        np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    ).view(source)
    result = torch.empty(values.numel(), dtype=target, device="cpu")
    most = torch.finfo(target).max
    beyond = 0
    for start in range(0, values.numel(), _STEP):
        given = values[start : start + _STEP]
        result[start : start + _STEP].copy_(given)
        if most < torch.finfo(source).max:
            size = (given if given.itemsize >= 4 else given.float()).abs()
            beyond += int(((size > most) & (size < torch.inf)).count_nonzero())
    bits = result.view(torch.uint8).numpy().view(f"u{target.itemsize}")
    return bits.reshape(array.shape), beyond
