"""A Source and a Target that count the bytes that pass through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from megackpt import events
from megackpt.planning.box import Box
from megackpt.planning.manifest import DIGEST_BLOCK

if TYPE_CHECKING:
    # This module must not import torch: the worker process uses it.
    from megackpt.staging.target import LoadTarget

COUNTED_AT_ONCE = 16 * DIGEST_BLOCK
"""Bytes: the largest block that is passed on. Progress is visible, and a cancelled task stops,
between blocks."""


class Blocks(Protocol):
    """What is counted: a Source (see backends/base.py)."""

    def blocks(self, row: int) -> Iterator[memoryview]: ...


@dataclass(frozen=True, eq=False)
class CountedSource:
    """Calls ``advance`` with the size of each block."""

    source: Blocks
    advance: Callable[[int], None]

    def views(
        self, rows: Sequence[int], sizes: Sequence[int]
    ) -> Sequence[memoryview | None]:
        """See ``TensorSource.views``: none of a source without this method."""
        if not hasattr(self.source, "views"):
            return [None] * len(rows)
        views: Sequence[memoryview | None] = self.source.views(rows, sizes)
        self.advance(sum(len(view) for view in views if view is not None))
        return views

    def blocks(self, row: int) -> Iterator[memoryview]:
        for block in self.source.blocks(row):
            for start in range(0, len(block), COUNTED_AT_ONCE):
                part = block[start : start + COUNTED_AT_ONCE]
                self.advance(len(part))
                yield part


def counted_target(target: LoadTarget, todo: int) -> LoadTarget | CountedTarget:
    """The target itself if no observer shows the progress of this stage, which loads ``todo``
    bytes.
    """
    stage = events.current()
    if not stage.counts_bytes:
        return target
    stage.todo = todo
    return CountedTarget(target, stage.advance)


@dataclass(frozen=True, eq=False)
class CountedTarget:
    """Calls ``advance`` with the bytes of each region and blob that the target has received."""

    target: LoadTarget
    advance: Callable[[int], None]

    def views(
        self, targets: Sequence[int], sizes: Sequence[int]
    ) -> Sequence[memoryview | None]:
        """See ``LoadTarget.views``. Memory that is handed out counts as filled."""
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
