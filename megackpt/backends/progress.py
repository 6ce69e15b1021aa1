"""A Source and a Target that count the bytes that pass through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from megackpt import events
from megackpt.backends.base import Source, Target
from megackpt.planning.box import Box
from megackpt.planning.manifest import DIGEST_BLOCK

COUNTED_AT_ONCE = 16 * DIGEST_BLOCK
"""Bytes: the largest block that is passed on. Progress is visible, and a cancelled task stops,
between blocks."""


@dataclass(frozen=True, eq=False)
class CountedSource(Source):
    """Calls ``advance`` with the size of each block."""

    source: Source
    advance: Callable[[int], None]

    def views(
        self, rows: Sequence[int], sizes: Sequence[int]
    ) -> Sequence[memoryview | None]:
        views = self.source.views(rows, sizes)
        self.advance(sum(len(view) for view in views if view is not None))
        return views

    def blocks(self, row: int) -> Iterator[memoryview]:
        for block in self.source.blocks(row):
            for start in range(0, len(block), COUNTED_AT_ONCE):
                part = block[start : start + COUNTED_AT_ONCE]
                self.advance(len(part))
                yield part


def counted_target(target: Target, todo: int) -> Target:
    """The target itself if no observer shows the progress of this stage, which loads ``todo``
    bytes.
    """
    stage = events.current()
    if not stage.counts_bytes:
        return target
    stage.todo = todo
    return CountedTarget(target, stage.advance)


@dataclass(frozen=True, eq=False)
class CountedTarget(Target):
    """Calls ``advance`` with the bytes of each region and blob that the target has received."""

    target: Target
    advance: Callable[[int], None]

    def views(
        self, targets: Sequence[int], sizes: Sequence[int]
    ) -> Sequence[memoryview | None]:
        """See ``Target.views``. Memory that is handed out counts as filled."""
        views = self.target.views(targets, sizes)
        self.advance(sum(len(view) for view in views if view is not None))
        return views

    def open(self, target: int, box: Box) -> NDArray[Any]:
        return self.target.open(target, box)

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        self.target.close(target, box, filled)
        self.advance(filled.nbytes)

    def blob(self, target: int, data: bytes) -> None:
        self.target.blob(target, data)
        self.advance(len(data))
