"""The data of a conversion task: rows of the target's plan, read from the source on demand."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt import limits
from megackpt.backends.base import Backend, Source
from megackpt.checkpoint import Opened
from megackpt.checkpoint.regions import Region, Regions
from megackpt.converter.cells import ConversionTask
from megackpt.planning.manifest import itemsizes
from megackpt.storage import Storage

# Elements that are cast at once: they stay in the cache, and torch starts no threads for them.
_CAST_ELEMENTS = 1 << 15


class CellSource(Source):
    """The source of a task.

    Neighbouring rows are read together, up to a cell's bytes. A row is dropped when it was used.
    """

    def __init__(
        self,
        source: Storage,
        reader: Backend,
        task: ConversionTask,
        verify: bool,
    ) -> None:
        self.overflows: Counter[str] = Counter()
        """Key -> finite values beyond the range of the dtype that they were cast to."""
        self._plan = task.plan
        self._stored = [entry.meta for entry in task.part.tensors]
        self._regions = Regions(Opened(source, reader, task.part, {}), verify)
        itemsize = itemsizes(task.part.tensors)[task.plan.tensor]
        self._sizes = task.plan.boxes.volume * itemsize
        self._lock = threading.Lock()
        self._ready: dict[int, NDArray[Any] | bytes] = {}
        self._used: set[int] = set()

    def blocks(self, row: int) -> Iterator[memoryview]:
        with self._lock:
            if row not in self._ready:
                self._read(row)
            value = self._ready.pop(row)
            self._used.add(row)
        if isinstance(value, bytes):
            yield memoryview(value)
            return
        number = self._plan.tensor[row]
        stored, (key, target) = self._stored[number], self._plan.tensors[number]
        if stored.dtype != target.dtype:
            value, overflows = cast(value, stored.dtype, target.dtype)
            if overflows:
                with self._lock:
                    self.overflows[key] += overflows
        yield value.reshape(-1).view(np.uint8).data

    def _read(self, row: int) -> None:
        number, _ = region = self._region(row)
        if self._stored[number].is_object:
            self._ready[row] = self._regions.blobs([region])[0]
            return
        rows = [row]
        regions = [region]
        total = self._sizes[row]
        for other in range(
            row + 1, min(row + limits.CONVERT_READ_ROWS, len(self._plan))
        ):
            number, _ = region = self._region(other)
            total += self._sizes[other]
            known = other in self._used or other in self._ready
            is_object = self._stored[number].is_object
            if total > limits.CONVERT_CELL_BYTES or known or is_object:
                break
            rows.append(other)
            regions.append(region)
        self._ready.update(zip(rows, self._regions.arrays(regions), strict=True))

    def _region(self, row: int) -> Region:
        number = int(self._plan.tensor[row])
        return number, self._plan.boxes.row(row, len(self._stored[number].shape))


def cast(array: NDArray[Any], stored: str, wanted: str) -> tuple[NDArray[Any], int]:
    """Cast elements between floating dtypes by torch's rules.

    ``array`` holds the bits of its elements. Returns the bits of the result, and how many elements
    are finite and beyond the new range: they become infinite, or (float8_e4m3fn has no infinity)
    the largest value.
    """
    import torch  # here, because workers that do not cast start faster without

    source: torch.dtype = getattr(torch, stored)
    target: torch.dtype = getattr(torch, wanted)
    octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    values = torch.from_numpy(octets).view(source)
    result = torch.empty(values.numel(), dtype=target, device="cpu")
    largest = torch.finfo(target).max
    overflows = 0
    for start in range(0, values.numel(), _CAST_ELEMENTS):
        part = values[start : start + _CAST_ELEMENTS]
        result[start : start + _CAST_ELEMENTS].copy_(part)
        if largest < torch.finfo(source).max:
            # The narrow dtypes lack some of these operations.
            size = (part if part.itemsize >= 4 else part.float()).abs()
            beyond = (size > largest) & (size < torch.inf)
            overflows += int(beyond.count_nonzero())
    bits = result.view(torch.uint8).numpy().view(f"u{target.itemsize}")
    return bits.reshape(array.shape), overflows
