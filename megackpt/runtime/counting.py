"""How far a write or a read is, counted where data pass between ranks and formats; only while somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from megackpt import events
from megackpt.planning.box import Box
from megackpt.runtime.staging import PIECE, Landing, Staged


def counted_source(staged: Staged) -> Staged | CountedSource:
    """The same source; where somebody looks at this stage, it counts what is handed over."""
    here = events.here()
    if not here.viewed:
        return staged
    here.todo = sum(item.nbytes for item in staged.plan.rows())
    return CountedSource(staged, here.advance)


def counted_target(landing: Landing, todo: int) -> Landing | CountedTarget:
    """The same target; where somebody looks at this stage, it counts what has landed of ``todo`` bytes."""
    here = events.here()
    if not here.viewed:
        return landing
    here.todo = todo
    return CountedTarget(landing, here.advance)


@dataclass(frozen=True, eq=False)
class CountedSource:
    """A Source that tells what it hands over, in pieces that are not too large to see it move."""

    data: Staged
    moved: Callable[[int], None]

    def blocks(self, row: int) -> Iterator[memoryview]:
        for block in self.data.blocks(row):
            for start in range(0, len(block), PIECE):
                piece = block[start : start + PIECE]
                self.moved(len(piece))
                yield piece

    def array(self, row: int) -> NDArray[Any]:
        array = self.data.array(row)
        self.moved(array.nbytes)
        return array


@dataclass(frozen=True, eq=False)
class CountedTarget:
    """A Target that tells what has landed in it."""

    into: Landing
    moved: Callable[[int], None]

    def open(self, target: int, box: Box) -> NDArray[Any]:
        return self.into.open(target, box)

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        self.into.close(target, box, filled)
        self.moved(filled.nbytes)

    def blob(self, target: int, data: bytes) -> None:
        self.into.blob(target, data)
        self.moved(len(data))
