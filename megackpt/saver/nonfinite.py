"""The notes of a save on the values of its tensors: how many are NaN or infinite, and how large.

Each rank looks at the rows that it writes, before ``save`` returns, and sends two numbers a row
with its result. Rank 0 merges them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megackpt.errors import ShardingError, name_ranks
from megackpt.planning.manifest import Manifest, TensorValues
from megackpt.staging.source import TensorSource

_ROW = np.dtype([("nonfinite", "<i8"), ("largest", "<f4")])
_BLOCK = 1 << 24
"""Elements that are examined at a time: where some are not finite, copies of a block are made."""


def examine(source: TensorSource) -> bytes:
    """The numbers of all rows of a plan, packed; -1 for objects, integers and float4."""
    rows = np.full(len(source.plan), -1, _ROW)
    for row in np.flatnonzero(~source.is_object).tolist():
        tensor = source.tensor(row)
        if _is_examined(tensor.dtype):
            with np.errstate(over="ignore"):  # a float64 may be infinite as float32
                rows[row] = _examine(tensor)
    return rows.tobytes()


def _is_examined(dtype: torch.dtype) -> bool:
    if dtype.itemsize == 1:
        return str(dtype).startswith("torch.float8")
    return dtype.is_floating_point or dtype.is_complex


def _examine(tensor: torch.Tensor) -> tuple[int, float]:
    """How many elements are NaN or infinite, and the largest magnitude of the finite ones.

    The magnitude of a complex number is the larger one of its parts.
    """
    nonfinite = 0
    largest = 0.0
    for block in _blocks(tensor):
        if block.element_size() == 1:
            count, magnitude = _examine_float8(block)
        else:
            count, magnitude = _examine_block(block)
        nonfinite += count
        largest = max(largest, magnitude)
    return nonfinite, largest


def _examine_block(block: torch.Tensor) -> tuple[int, float]:
    # An axis of the parts of a number.
    if block.is_complex():
        parts = torch.view_as_real(block.resolve_conj())
    else:
        parts = block.unsqueeze(-1)
    low, high = torch.aminmax(parts)
    magnitude = max(-float(low), float(high))  # NaN if any element is
    if math.isfinite(magnitude):
        return 0, magnitude
    finite = parts.isfinite().all(-1, keepdim=True)
    low, high = torch.aminmax(parts.where(finite, 0))
    return block.numel() - int(finite.count_nonzero()), max(-float(low), float(high))


def _examine_float8(block: torch.Tensor) -> tuple[int, float]:
    """As ``_examine_block``, by counting the bytes: torch compares no float8."""
    codes = block.view(torch.uint8).flatten()
    counts = torch.bincount(codes, minlength=256).cpu()
    meaning = torch.arange(256, dtype=torch.uint8, device="cpu")
    numbers = meaning.view(block.dtype).float()
    finite = numbers.isfinite()
    used = numbers[finite & (counts > 0)]
    magnitude = float(used.abs().max()) if len(used) else 0.0
    return int(counts[~finite].sum()), magnitude


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor in parts of at most ``_BLOCK`` elements; an empty tensor has no parts."""
    if tensor.numel() <= _BLOCK:
        if tensor.numel():
            yield tensor
        return
    row = tensor.numel() // len(tensor)
    if row > _BLOCK:
        for part in tensor:
            yield from _blocks(part)
        return
    step = _BLOCK // row
    for start in range(0, len(tensor), step):
        yield tensor[start : start + step]


def merge(planned: Manifest, parts: Sequence[bytes]) -> TensorValues:
    """The numbers of each tensor.

    ``parts``: one part for each rank, in rank order; an empty one was not examined.

    Raises ShardingError if only some of the ranks have examined their tensors.
    """
    rows = np.frombuffer(b"".join(parts), _ROW)
    # By rank, and within a rank in the order of its plan.
    tensor = planned.chunks.tensor
    if len(rows) != len(tensor):
        examining = [rank for rank, part in enumerate(parts) if part]
        raise ShardingError(
            "the ranks of one save have strategies with different check_values (all must agree): "
            f"only {name_ranks(examining)} examined the values"
        )
    examined = rows["nonfinite"] >= 0
    nonfinite = np.full(len(planned.tensors), -1, np.int64)
    nonfinite[tensor[examined]] = 0
    np.add.at(nonfinite, tensor[examined], rows["nonfinite"][examined])
    largest = np.full(len(planned.tensors), -1, np.float32)
    np.maximum.at(largest, tensor[examined], rows["largest"][examined])
    return TensorValues(nonfinite, largest)
