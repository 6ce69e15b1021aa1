"""The rows of a rank's save plan that may be unchanged since an earlier checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.planning.box import Int64
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    Bool,
    Manifest,
    SavePlan,
    WriteResult,
)

UNCHANGED = "unchanged"
"""The folder of files with only such rows, in the format that puts many rows into a file."""

_EQUAL, _UNKNOWN = 1, -1


@dataclass(frozen=True, eq=False)
class StepBefore:
    """What an earlier checkpoint has of the rows of a rank's plan.

    Attributes:
        directory, save_id: of the checkpoint.
        written: its chunks, by row of the plan in ascending order. Rows may be missing.
        equal: for each row of the plan, whether the checkpoint and the one before it have equal
            digests (1), or not (0); -1 if that is not known.
    """

    directory: str
    save_id: str
    written: WriteResult
    equal: NDArray[np.int8]

    @classmethod
    def of(
        cls, directory: str, stored: Manifest, plan: SavePlan, format: tuple[str, int]
    ) -> StepBefore:
        """What any checkpoint has. Only files of unchanged rows count, if the plan has them all."""
        row_of = {}
        if stored.backend == format:
            row_of = {
                (item.shard.key, item.meta, item.shard.box): row
                for row, item in enumerate(plan.rows())
            }
        chunks = stored.chunks
        row = np.full(len(chunks), -1, np.int64)
        for chunk, number in enumerate(chunks.tensor.tolist()):
            key, meta = stored.tensors[number]
            box = chunks.boxes.row(chunk, len(meta.shape))
            row[chunk] = row_of.get((key, meta, box), -1)
        named = [name.startswith(f"{UNCHANGED}/__") for name in stored.files]
        ours = np.array(named, np.bool_)
        ours[chunks.file[row < 0]] = False
        row[~ours[chunks.file]] = -1
        held = np.argsort(row, kind="stable")[np.count_nonzero(row < 0) :]
        part = chunks.take(held)
        place = part.file, part.start, part.length, part.digests
        written = WriteResult(row[held], part.boxes, stored.files, *place)
        equal = np.full(len(plan), _UNKNOWN, np.int8)
        equal[row[held]] = _EQUAL
        return cls(directory, stored.save_id, written, equal)

    @cached_property
    def bounds(self) -> Int64:
        """Row i has the chunks ``bounds[i]:bounds[i + 1]`` of ``written``."""
        return np.searchsorted(self.written.item, np.arange(len(self.equal) + 1))

    @cached_property
    def _block_bounds(self) -> Int64:
        counts = -(-self.written.length // DIGEST_BLOCK)
        return np.append(0, np.cumsum(counts))[self.bounds]

    def digests(self, row: int) -> bytes:
        """The digests of all blocks of a row; empty for a row that is missing."""
        first, last = self._block_bounds[row : row + 2]
        return self.written.digests[first:last].tobytes()


@dataclass(frozen=True, eq=False)
class Reuse:
    """The part of a rank in a save with ``Strategy.reuse_unchanged``.

    ``steps`` has the step before, when one was saved with this plan. Otherwise it is the checkpoint
    in ``directory``.
    """

    frozen: Collection[str]
    directory: Any
    steps: list[StepBefore]

    def rows(self, plan: SavePlan, before: StepBefore | None) -> Bool:
        """The rows that are compared: the last two saves decide, or else the ``frozen`` keys."""
        is_frozen = [entry.key in self.frozen for entry in plan.tensors]
        rows = np.array(is_frozen, np.bool_)[plan.tensor]
        if before is not None:
            rows = np.where(before.equal == _UNKNOWN, rows, before.equal == _EQUAL)
        return rows & (plan.lengths > 0)

    def note(
        self, directory: str, save_id: str, written: WriteResult, rows: int
    ) -> None:
        """This save is committed, and becomes the step before."""
        step = StepBefore(directory, save_id, written, np.full(rows, _UNKNOWN, np.int8))
        for old in self.steps:
            for row in np.flatnonzero(np.diff(old.bounds)).tolist():
                step.equal[row] = old.digests(row) == step.digests(row)
        step.equal[list(written.linked)] = _EQUAL
        self.steps[:] = [step]
