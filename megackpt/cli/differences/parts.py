"""The parts in which two objects differ, both opened for looking at: nested dicts and lists, and leaves bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import numpy as np

from megackpt import tree
from megackpt.serialization.inspection import UNSEEN

Change = tuple[tree.Path, Any, Any]
"""Path, value in A, value in B; ``...`` where a side has nothing."""


def changes(a: Any, b: Any, path: tree.Path = ()) -> Iterator[Change]:
    """Each part in which two values differ. What was too deep or too much to be opened is not known to be equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            yield from changes(a.get(key, ...), b.get(key, ...), (*path, key))
    elif isinstance(a, list) and isinstance(b, list):
        for i, (x, y) in enumerate(zip_longest(a, b, fillvalue=...)):
            yield from changes(x, y, (*path, i))
    elif not _same(a, b):
        yield path, a, b


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or a is UNSEEN:
        return False
    if isinstance(a, float | complex | np.generic):
        return repr(a) == repr(b)  # tells 0.0 from -0.0, and takes NaN for NaN
    if hasattr(a, "dtype") and hasattr(a, "shape"):
        return (
            bool(a.dtype == b.dtype and a.shape == b.shape)
            and _octets(a) == _octets(b) is not None
        )
    return bool(a == b)


def _octets(array: Any) -> bytes | None:
    """The elements of an array or a tensor; None: it claims more than it has (stride 0), and is not written out."""
    if isinstance(array, np.ndarray):
        return array.tobytes()
    if array.numel() * array.element_size() > array.untyped_storage().nbytes():
        return None
    import torch

    plain = array.detach().resolve_conj().resolve_neg()
    plain = plain.clone(
        memory_format=torch.contiguous_format
    )  # contiguous() keeps odd strides of single elements
    found: bytes = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return found
