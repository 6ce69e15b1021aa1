"""The arithmetic of differences: two arrays of raw elements -> which differ, and how far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from megackpt.planning.box import Box, Int64

TOLD = 5
"""Differing elements that are told of each tensor."""
_AT_ONCE = 1 << 18
"""Elements that are compared at once: what this takes in float64 is some MiB."""

Raw = NDArray[Any]


@dataclass(frozen=True)
class Tolerance:
    """Values are taken for equal where ``|a - b| <= absolute + relative * |b|``, and where both are NaN."""

    relative: float = 0.0
    absolute: float = 0.0


@dataclass(frozen=True)
class Element:
    """One differing element: where it is in the whole tensor, and its value on either side."""

    index: tuple[int, ...]
    a: Any
    b: Any


class Tally:
    """What differs between two versions of one tensor, region by region."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtypes: tuple[str, str],
        tolerance: Tolerance | None,
    ) -> None:
        self._shape = shape
        self._dtypes = dtypes
        self._tolerance = tolerance
        self._first: list[tuple[int, Element]] = []
        self._sum = 0.0
        self.elements = 0
        self.largest: float = 0
        self.nans = (0, 0)
        self._unmeasured = 0

    def add(self, box: Box, a: Raw, b: Raw) -> None:
        """One region: the raw elements of either side, in arrays of its shape."""
        mine, yours = a.reshape(-1), b.reshape(-1)
        with np.errstate(
            all="ignore"
        ):  # any bits may come: signalling NaNs, infinities, what overflows
            for start in range(0, len(mine), _AT_ONCE):
                part = slice(start, start + _AT_ONCE)
                self._add(box, start, mine[part], yours[part])

    def _add(self, box: Box, start: int, a: Raw, b: Raw) -> None:
        if self._dtypes[0] == self._dtypes[1]:
            rows = np.flatnonzero(_unequal_bits(a, b))
            if not len(rows):
                return
            a, b = a[rows], b[rows]
        else:
            rows = np.arange(len(a))
        x, y = values(a, self._dtypes[0]), values(b, self._dtypes[1])
        apart = _distance(x, y)
        differs = self._beyond(x, y, apart)
        rows, x, y, apart = rows[differs], x[differs], y[differs], apart[differs]
        if not len(rows):
            return
        nan = np.isnan(x), np.isnan(y)
        measured = apart[~(nan[0] | nan[1])]
        self.elements += len(rows)
        self.nans = self.nans[0] + int(nan[0].sum()), self.nans[1] + int(nan[1].sum())
        self._unmeasured += len(rows) - len(measured)
        if len(measured):
            self.largest = max(self.largest, measured.max().item())
            self._sum += float(measured.sum(dtype=np.float64))
        self._tell(box, rows[:TOLD] + start, x[:TOLD], y[:TOLD])

    def _beyond(self, x: Raw, y: Raw, apart: Raw) -> NDArray[np.bool_]:
        """Which of these elements differ; those of one dtype come here only if their bits do."""
        if self._tolerance is None and self._dtypes[0] == self._dtypes[1]:
            return np.ones(len(x), np.bool_)
        tolerance = self._tolerance or Tolerance()
        equal: NDArray[np.bool_] = (x == y) | (np.isnan(x) & np.isnan(y))
        limit = tolerance.absolute + tolerance.relative * np.abs(y.astype(_float(y)))
        differs: NDArray[np.bool_] = ~(equal | ((apart <= limit) & np.isfinite(apart)))
        return differs

    def _tell(self, box: Box, rows: Int64, x: Raw, y: Raw) -> None:
        for row, a, b in zip(rows.tolist(), x.tolist(), y.tolist(), strict=True):
            local = np.unravel_index(row, box.shape)
            index = tuple(int(i) + o for i, o in zip(local, box.offset, strict=True))
            flat = 0
            for i, extent in zip(index, self._shape, strict=True):
                flat = flat * extent + i
            self._first.append((flat, Element(index, a, b)))
        self._first = sorted(self._first, key=lambda told: told[0])[:TOLD]

    @property
    def first(self) -> tuple[Element, ...]:
        """The first differing elements, in C order."""
        return tuple(element for _, element in self._first)

    @property
    def mean(self) -> float:
        """Of the absolute differences, over all elements of the tensor that are no differing NaN."""
        return self._sum / max(1, math.prod(self._shape) - self._unmeasured)


def values(raw: Raw, dtype: str) -> Raw:
    """A column of raw elements as numbers, without loss: bool, int64 or uint64, float64, complex128."""
    if dtype == "bool":
        true: Raw = raw != 0
        return true
    if dtype == "complex32":
        return raw.view(np.float16).astype(np.float64).view(np.complex128)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    typed = raw.view(kind)
    return typed.astype(_wide(typed))


def _wide(typed: Raw) -> type[Any]:
    return {"i": np.int64, "u": np.uint64, "b": np.int64, "c": np.complex128}.get(
        typed.dtype.kind, np.float64
    )


def _unequal_bits(a: Raw, b: Raw) -> NDArray[np.bool_]:
    if a.dtype.itemsize < 16:
        unequal: NDArray[np.bool_] = a != b
        return unequal
    halves: NDArray[np.bool_] = a.view(np.uint64) != b.view(np.uint64)
    return halves[0::2] | halves[1::2]


def _distance(x: Raw, y: Raw) -> Raw:
    """The absolute differences: of whole numbers exactly (as uint64), of all others in float64."""
    if x.dtype.kind == y.dtype.kind == "b":
        unequal: Raw = (x != y).astype(np.uint64)
        return unequal
    if x.dtype == y.dtype and x.dtype.kind in "iu":
        # Modulo 2**64 the difference of the larger and the smaller is right even where int64 would overflow.
        whole: Raw = np.maximum(x, y).view(np.uint64) - np.minimum(x, y).view(np.uint64)
        return whole
    distance: Raw = np.abs(x.astype(_float(x)) - y.astype(_float(y)))
    return distance


def _float(typed: Raw) -> type[Any]:
    return np.complex128 if typed.dtype.kind == "c" else np.float64
