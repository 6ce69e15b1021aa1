"""The data of a task: rows of the target's plan, fetched from the source when a format asks for them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.backends.base import Backend
from megackpt.checkpoint import Opened
from megackpt.checkpoint.regions import Region, Regions
from megackpt.converter.cutting import CELL, Task
from megackpt.storage import Storage

TOGETHER = 4096
"""Small rows that are fetched at once."""


class Passing:
    """The Source of a task. ``moved`` is told the bytes of rows that are handed on.

    Neighbouring rows are fetched together, up to a cell's bytes; each is forgotten when it has been asked for.
    """

    def __init__(
        self,
        source: Storage,
        reader: Backend,
        task: Task,
        verify: bool,
        moved: Callable[[int], None],
    ) -> None:
        self.overflows: Counter[str] = Counter()
        """Key -> finite values beyond the range of the dtype that they were cast to."""
        self._plan = task.plan
        self._moved = moved
        self._stored = [entry.meta for entry in task.part.tensors]
        self._regions = Regions(Opened(source, reader, task.part, {}), verify)
        itemsize = np.array([meta.itemsize for meta in self._stored], np.int64)
        self._sizes = (
            (task.plan.boxes.volume * itemsize[task.plan.tensor]).tolist()
            if len(task.plan)
            else []
        )
        self._lock = threading.Lock()
        self._ready: dict[int, NDArray[Any] | bytes] = {}
        self._passed: set[int] = set()

    def blocks(self, row: int) -> Iterator[memoryview]:
        value = self._taken(row)
        yield (
            memoryview(value)
            if isinstance(value, bytes)
            else value.reshape(-1).view(np.uint8).data
        )

    def _taken(self, row: int) -> NDArray[Any] | bytes:
        with self._lock:
            if row not in self._ready:
                self._fetch(row)
            value = self._ready.pop(row)
            self._passed.add(row)
        number = int(self._plan.tensor[row])
        stored, (key, wanted) = self._stored[number], self._plan.tensors[number]
        if stored.dtype != wanted.dtype and not isinstance(value, bytes):
            from megackpt.converter.casting import cast

            value, lost = cast(value, stored.dtype, wanted.dtype)
            if lost:
                self.overflows[key] += lost
        with self._lock:
            self._moved(len(value) if isinstance(value, bytes) else value.nbytes)
        return value

    def _fetch(self, row: int) -> None:
        if self._is_object(row):
            self._ready[row] = self._regions.blobs([self._region(row)])[0]
            return
        rows, total = [row], self._sizes[row]
        for other in range(row + 1, min(row + TOGETHER, len(self._plan))):
            total += self._sizes[other]
            if (
                total > CELL
                or self._is_object(other)
                or other in self._passed
                or other in self._ready
            ):
                break
            rows.append(other)
        self._ready.update(
            zip(rows, self._regions.arrays(list(map(self._region, rows))), strict=True)
        )

    def _is_object(self, row: int) -> bool:
        return self._stored[int(self._plan.tensor[row])].is_object

    def _region(self, row: int) -> Region:
        number = int(self._plan.tensor[row])
        return number, self._plan.boxes.row(row, len(self._stored[number].shape))
