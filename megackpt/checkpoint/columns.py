"""Columns of integers, encoded as few bytes and decoded without a loop.

The bytes are untrusted. Every number in an index is in ``[-1, LARGEST)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Int64
from megackpt.planning.manifest import LARGEST

_WIDTHS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_ROW, _PATCH = np.dtype("<u4"), np.dtype("<i8")
_SAMPLE = 1024


def damaged(what: str) -> NoReturn:
    raise CorruptCheckpoint(f"the index is damaged: {what}")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a column of ``count`` numbers is stored.

    Row i is ``base + step * small[i]``. ``small`` are unsigned integers of ``width`` bytes; if
    ``width`` is 0, all are 0. ``patches`` rows that differ follow: first their row numbers
    (uint32), then their values (int64).
    """

    count: int
    width: int
    base: int
    step: int
    patches: int

    @property
    def nbytes(self) -> int:
        patch = _ROW.itemsize + _PATCH.itemsize
        return self.count * self.width + self.patches * patch

    def fields(self) -> list[int]:
        return [self.count, self.width, self.base, self.step, self.patches]

    @classmethod
    def parse(cls, fields: Any) -> Layout:
        """The layout in the head of an index. CorruptCheckpoint if it is invalid."""
        sane = isinstance(fields, list) and len(fields) == 5
        if not sane or {*map(type, fields)} != {int}:
            damaged(f"{fields!r} describes no column")
        layout = cls(*fields)
        sane = (
            0 <= layout.count < LARGEST
            and (layout.width == 0 or layout.width in _WIDTHS)
            and -1 <= layout.base < LARGEST
            and 1 <= layout.step < LARGEST
            and 0 <= layout.patches <= layout.count
        )
        if not sane:
            damaged(f"{fields!r} describes no column")
        return layout


def pack(values: Int64) -> tuple[Layout, list[bytes]]:
    """The shortest layout for these numbers, and their bytes."""
    if not len(values):
        return Layout(0, 0, 0, 1, 0), []
    low, high = int(values.min()), int(values.max())
    if low < -1 or high >= LARGEST:
        raise ValueError(
            f"an index holds numbers from -1 to 2**62, not {low} to {high}"
        )
    step = 1
    # The greatest common divisor of all differences. One of a few is cheap and often 1.
    if _width(high - low) > 1:
        step = math.gcd(*(values[:_SAMPLE] - low).tolist())
        if step != 1:
            step = int(np.gcd.reduce(values - low)) or 1
    width = _width((high - low) // step)
    dense = Layout(len(values), width, low, step, 0)
    rows = np.flatnonzero(values)
    sparse = Layout(len(values), 0, 0, 1, len(rows))
    if sparse.nbytes < dense.nbytes and len(values) <= 1 << 32:
        patches = values[rows].astype(_PATCH)
        return sparse, [rows.astype(_ROW).tobytes(), patches.tobytes()]
    if not width:
        return dense, []
    small = (values - low) // step
    return dense, [small.astype(_WIDTHS[width]).tobytes()]


def _width(span: int) -> int:
    """The bytes that a number up to ``span`` takes; 0 for none."""
    width = 0
    while span >= 1 << (8 * width):
        width = 2 * width or 1
    return width


def unpack(layout: Layout, data: memoryview) -> Int64:
    """The numbers of a column from exactly ``layout.nbytes`` bytes.

    Equal numbers are a view of one, with a stride of 0. Any other column takes ``8 * layout.count``
    bytes.
    """
    if not layout.width:
        values = np.broadcast_to(np.int64(layout.base), layout.count)
        if layout.patches:
            values = values.copy()
    else:
        small = np.frombuffer(data, _WIDTHS[layout.width], layout.count)
        if layout.count and layout.base + layout.step * int(small.max()) >= LARGEST:
            damaged("a number is too large")
        values = small.astype(np.int64)
        if layout.step != 1:
            values *= layout.step
        if layout.base:
            values += layout.base
    if layout.patches:
        start = layout.count * layout.width
        rows = np.frombuffer(data, _ROW, layout.patches, start)
        patches = np.frombuffer(data, _PATCH, layout.patches, start + rows.nbytes)
        if rows.max() >= layout.count:
            damaged("a number is out of range")
        if patches.min() < -1 or patches.max() >= LARGEST:
            damaged("a number is out of range")
        values[rows] = patches
    return values
