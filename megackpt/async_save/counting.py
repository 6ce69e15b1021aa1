"""How far a write or a read is, counted where data pass between ranks and formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from megackpt import events
from megackpt.planning.box import Box
from megackpt.planning.manifest import DIGEST_BLOCK

if TYPE_CHECKING:
    # brings torch, which a writer process does without
    from megackpt.staging.landing import Landing

STEP = 16 * DIGEST_BLOCK
"""Bytes that are handed over at a time at most: few enough to see them move, and to be stopped in between."""


class Handing(Protocol):
    """What is counted: a Source (see backends/base.py)."""

    def blocks(self, row: int) -> Iterator[memoryview]: ...


@dataclass(frozen=True, eq=False)
class CountedSource:
    """A Source that tells what it hands over, in pieces that are not too large to see it move."""

    data: Handing
    moved: Callable[[int], None]

    def blocks(self, row: int) -> Iterator[memoryview]:
        for block in self.data.blocks(row):
            for start in range(0, len(block), STEP):
                piece = block[start : start + STEP]
                self.moved(len(piece))
                yield piece


def counted_target(landing: Landing, todo: int) -> Landing | CountedTarget:
    """The same target; where somebody looks at this stage, it counts what has landed of ``todo`` bytes."""
    stage = events.current()
    if not stage.counts_bytes:
        return landing
    stage.todo = todo
    return CountedTarget(landing, stage.advance)


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
