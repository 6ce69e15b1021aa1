"""The plain-I/O limit: the same bytes, by the same number of processes, with only pwritev, fsync and preadv."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.contestants import Contestant, Place
from benchmarks.states import Piece

BATCH = 8 << 20  # bytes of one system call
VECTORS = 1024
Batch = list[memoryview]


def batches(pieces: Sequence[Piece], size: int) -> list[Batch]:
    """The bytes of all pieces in order, in lists that one system call takes."""
    done: list[Batch] = [[]]
    free = size
    for piece in pieces:
        octets = piece.data.view(torch.uint8).reshape(-1).numpy().data
        while octets:
            part, octets = octets[:free], octets[free:]
            done[-1].append(part)
            free -= len(part)
            if not free or len(done[-1]) == VECTORS:
                done.append([])
                free = size
    return [batch for batch in done if batch]


@dataclass(frozen=True)
class Limit(Contestant):
    """One file for each rank, which has its share of the unique bytes; reads go through the files in turn."""

    place: Place
    name: str = "limit"

    def declare(self, pieces: Sequence[Piece]) -> list[Batch]:
        mine = sum(piece.data.nbytes for piece in pieces)
        # At least 16 batches, so that the batches of small states spread over the ranks, too.
        return batches(pieces, min(BATCH, max(mine // 16, 1)))

    def save(self, declared: list[Batch], folder: Path) -> None:
        parts = self.place.parts
        folder.mkdir(exist_ok=True)
        file = os.open(
            folder / str(self.place.rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        )
        offset = 0
        for batch in declared[self.place.rank // parts :: self.place.ranks // parts]:
            offset += os.pwritev(file, batch, offset)
        os.fsync(file)
        os.close(file)

    def load(self, declared: list[Batch], folder: Path, verify: bool) -> None:  # noqa: ARG002
        """As many bytes as this rank holds, into their memory."""
        turn, file, left, offset = self.place.rank, -1, 0, 0
        for batch in declared:
            size = sum(map(len, batch))
            if left < size:
                if file >= 0:
                    os.close(file)
                file = os.open(folder / str(turn % self.place.ranks), os.O_RDONLY)
                left, offset, turn = os.fstat(file).st_size, 0, turn + 1
            done = os.preadv(file, batch, offset)
            if done != size:
                raise OSError(f"{folder}: {done} bytes instead of {size}")
            left, offset = left - size, offset + size
        os.close(file)
