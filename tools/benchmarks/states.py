"""The states of the benchmarks: each element encodes its position, so that a load can be checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

LARGE_COLUMNS, SMALL_COLUMNS = 1024, 32
LARGE_BYTES = 32 << 20
ITEMSIZE = 4
EIGHTHS = 8


@dataclass(frozen=True)
class Spec:
    """Tensors of ``rows`` rows each (multiples of 8), all with ``columns`` columns of four bytes."""

    name: str
    rows: tuple[int, ...]
    columns: int

    @property
    def nbytes(self) -> int:
        return sum(self.rows) * self.columns * ITEMSIZE

    @classmethod
    def large(cls, nbytes: float) -> Spec:
        """Tensors of 32 MiB; smaller ones where that would make fewer than eight."""
        row = LARGE_COLUMNS * ITEMSIZE
        rows = max(int(min(LARGE_BYTES, nbytes / 8)) // row // EIGHTHS, 1) * EIGHTHS
        return cls(
            "large", (rows,) * max(round(nbytes / (rows * row)), 1), LARGE_COLUMNS
        )

    @classmethod
    def small(cls, count: int) -> Spec:
        """Tensors of 4 to 64 KiB, 34 KiB in the mean."""
        return cls(
            f"small{count}",
            tuple(32 + EIGHTHS * (i * 37 % 61) for i in range(count)),
            SMALL_COLUMNS,
        )


@dataclass(frozen=True, eq=False)
class Piece:
    """One rank's piece of one tensor: part ``index`` of ``parts`` equal ones along the first axis."""

    key: str
    number: int
    data: torch.Tensor
    index: int
    parts: int
    copy: int  # which replica: 0 is the main one

    @property
    def shape(self) -> tuple[int, int]:
        """Of the whole tensor."""
        rows, columns = self.data.shape
        return rows * self.parts, columns

    @property
    def offset(self) -> tuple[int, int]:
        return self.index * len(self.data), 0

    def fill(self) -> None:
        self.data.view(torch.int32).copy_(self._pattern())

    def is_filled(self, found: torch.Tensor | None = None) -> bool:
        """Whether the piece (or its loaded copy) has the values of ``fill``."""
        return torch.equal(
            (self.data if found is None else found).view(torch.int32), self._pattern()
        )

    def _pattern(self) -> torch.Tensor:
        first = self.offset[0] * self.data.shape[1] + self.number * 1_000_003
        count = self.data.numel()
        numbers = torch.arange(first, first + count, dtype=torch.int64, device="cpu")
        return numbers.to(torch.int32).view(self.data.shape)


def pieces(
    spec: Spec, index: int, parts: int, copy: int, *, strided: bool = False
) -> list[Piece]:
    """One piece of every tensor, filled. ``strided``: columns are consecutive in memory, not rows."""
    return list(_pieces(spec, index, parts, copy, strided))


def _pieces(
    spec: Spec, index: int, parts: int, copy: int, strided: bool
) -> Iterator[Piece]:
    for number, rows in enumerate(spec.rows):
        shape = rows // parts, spec.columns
        memory = torch.empty(shape[::-1] if strided else shape, device="cpu")
        data = memory.t() if strided else memory
        piece = Piece(f"layers.{number}.weight", number, data, index, parts, copy)
        piece.fill()
        yield piece
