"""The rows of a rank's save plan that may be unchanged since an earlier checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

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
"""The folder of files that hold only such rows, in formats that put many rows into a file."""

_EQUAL, _DIFFERS, _UNKNOWN = 1, 0, -1


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

    @cached_property
    def bounds(self) -> Int64:
        """Row i has the chunks ``bounds[i]:bounds[i + 1]`` of ``written``."""
        rows = np.arange(len(self.equal) + 1)
        return np.searchsorted(self.written.item, rows)

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
    """The ``rows`` of a plan that get files of their own, and are compared with ``before``."""

    before: StepBefore | None
    rows: Bool

    @classmethod
    def of(
        cls, plan: SavePlan, frozen: Collection[str], before: StepBefore | None
    ) -> Reuse:
        """The last two saves decide. Where they are not known, ``frozen`` keys are chosen."""
        is_frozen = [entry.key in frozen for entry in plan.tensors]
        rows = np.array(is_frozen, np.bool_)[plan.tensor]
        if before is not None:
            rows = np.where(before.equal == _UNKNOWN, rows, before.equal == _EQUAL)
        return cls(before, rows & (plan.lengths > 0))

    def after(self, directory: str, save_id: str, written: WriteResult) -> StepBefore:
        """The step before of the next save, once this save is committed."""
        unknown = np.full(len(self.rows), _UNKNOWN, np.int8)
        step = StepBefore(directory, save_id, written, unknown)
        if self.before is not None:
            for row in np.flatnonzero(np.diff(self.before.bounds)).tolist():
                step.equal[row] = self.before.digests(row) == step.digests(row)
        return step


def steps_before(
    directory: str, stored: Manifest, plans: Sequence[SavePlan]
) -> list[StepBefore]:
    """For each rank what a checkpoint has of the rows of its plan.

    Only files count that a save may link: with rows of one rank, and in the folder of such files or
    with one row.
    """
    chunks = stored.chunks
    found = {}
    for chunk, number in enumerate(chunks.tensor.tolist()):
        entry = stored.tensors[number]
        box = chunks.boxes.row(chunk, len(entry.meta.shape))
        found[entry.key, entry.meta, box] = chunk
    files = len(stored.files)
    counts = np.bincount(chunks.file, minlength=files)
    ours = np.array([f.startswith(f"{UNCHANGED}/") for f in stored.files], np.bool_)
    steps = []
    for plan in plans:
        pairs = []
        for row, item in enumerate(plan.rows()):
            chunk = found.get((item.shard.key, item.meta, item.shard.box), -1)
            if chunk >= 0:
                pairs.append((row, chunk))
        rows, held = np.array(pairs, np.int64).reshape(-1, 2).T
        whole = counts == np.bincount(chunks.file[held], minlength=files)
        kept = (whole & (ours | (counts == 1)))[chunks.file[held]]
        part = chunks.take(held[kept])
        written = WriteResult(
            rows[kept],
            part.boxes,
            stored.files,
            part.file,
            part.start,
            part.length,
            part.digests,
        )
        equal = np.full(len(plan), _UNKNOWN, np.int8)
        equal[rows[kept]] = _EQUAL
        steps.append(StepBefore(directory, stored.save_id, written, equal))
    return steps
