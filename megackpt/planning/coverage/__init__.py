"""Do the main replicas of all ranks tile each tensor exactly? All problems at once, each explained.

Exact tiling = in bounds, and disjoint, and volumes that add up. The sound case is decided in columns, for
all tensors together; only what looks wrong is looked at one by one and put into words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megackpt.errors import CoverageError
from megackpt.planning.box import Boxes, Groups, Int64, runs
from megackpt.planning.coverage.explain import (
    Problem as Problem,
    explain_conflict,
    explain_tensor,
    summary,
    telling,
    together,
)
from megackpt.planning.coverage.tiling import (
    miscounted as miscounted,
    tile_exactly as tile_exactly,
)
from megackpt.planning.manifest import Bool, Declarations, Int32, TensorEntry

EXPLAINED = 20  # problems told in full; the others in a line each


def uncovered(declared: Declarations, shards: Groups | None = None) -> list[Problem]:
    """Everything that keeps the declarations of all ranks from being an exact tiling; empty = sound.

    One Problem a key: disagreement about shape, dtype or kind, boxes out of bounds, holes, overlaps, and
    boxes with no or several main replicas. Empty shards, tensors without elements or without dimensions, and
    objects (unit boxes) are judged by the same rule; a box without elements may have any number of main
    replicas, but each key needs one. ``shards`` is ``declared.shards()`` where the caller has it already.
    """
    shards = declared.shards() if shards is None else shards
    conflicts = _conflicts(declared.tensors)
    suspects = _suspects(declared, shards)
    suspects[[number for numbers in conflicts.values() for number in numbers]] = False
    return _explained(declared, conflicts, np.flatnonzero(suspects).tolist())


def unsaved(declared: Declarations, shards: Groups | None = None) -> list[Problem]:
    """The problems that would lose a whole key, or make it mean two things, and shards outside of their tensors, which
    no reader takes: what no save may pass over."""
    shards = declared.shards() if shards is None else shards
    conflicts = _conflicts(declared.tensors)
    whole = shapes_table(declared.tensors, declared.boxes.width)
    boxes = declared.boxes.take(shards.first).widened(whole.shape[1])
    tensor, volume, mains = (
        declared.tensor[shards.first],
        boxes.volume,
        _mains(declared, shards),
    )
    lost = _lost(declared, tensor, volume, mains)
    written = (mains > 0) & ((volume > 0) | _empty(declared.tensors)[tensor])
    lost[tensor[written & _outside(boxes, whole[tensor])]] = True
    lost[[number for numbers in conflicts.values() for number in numbers]] = False
    return _explained(declared, conflicts, np.flatnonzero(lost).tolist())


def check(
    declared: Declarations, shards: Groups | None = None, thorough: bool = True
) -> None:
    """Raise CoverageError with all problems: of ``uncovered`` or, where not thorough, of ``unsaved`` only."""
    problems = uncovered(declared, shards) if thorough else unsaved(declared, shards)
    if not problems:
        return
    raise CoverageError(together(problems, EXPLAINED))


def _explained(
    declared: Declarations, conflicts: dict[str, list[int]], wrong: Sequence[int]
) -> list[Problem]:
    """A problem for each conflict and each wrong tensor, of which EXPLAINED are looked into."""
    chosen = telling(list(conflicts), EXPLAINED)
    problems = [
        explain_conflict(declared, numbers)
        if i in chosen
        else Problem(key, f"{key!r} is declared in several ways")
        for i, (key, numbers) in enumerate(conflicts.items())
    ]
    chosen = telling([declared.tensors[n].key for n in wrong], EXPLAINED - len(chosen))
    explain = [explain_tensor if i in chosen else summary for i in range(len(wrong))]
    return problems + [
        tell(declared, n) for tell, n in zip(explain, wrong, strict=True)
    ]


def shapes_table(tensors: Sequence[TensorEntry], width: int) -> Int64:
    """The global shapes of a table of tensors, (n, width or more), padded with 1 as boxes are."""
    shapes = [entry.meta.shape for entry in tensors]
    width = max([width, *map(len, shapes)])
    pads = [(1,) * (width - ndim) for ndim in range(width + 1)]
    flat = [shape + pads[len(shape)] for shape in shapes]
    return np.array(flat, np.int64).reshape(len(tensors), width)


def _conflicts(tensors: Sequence[TensorEntry]) -> dict[str, list[int]]:
    """Keys that stand in the table more than once, with different metas, and their numbers."""
    numbers: dict[str, list[int]] = {}
    if len({entry.key for entry in tensors}) < len(tensors):
        for i, entry in enumerate(tensors):
            numbers.setdefault(entry.key, []).append(i)
    return {key: several for key, several in numbers.items() if len(several) > 1}


def _suspects(declared: Declarations, shards: Groups) -> Bool:
    """The tensors that their shards do not tile: exactly those."""
    whole = shapes_table(declared.tensors, declared.boxes.width)
    boxes = declared.boxes.take(shards.first).widened(whole.shape[1])
    tensor = declared.tensor[shards.first]
    volume = boxes.volume
    mains = _mains(declared, shards)
    suspects = _lost(declared, tensor, volume, mains)
    outside = _outside(boxes, whole[tensor])
    suspects[tensor[outside | ((mains > 1) & (volume != 0))]] = True
    held = np.flatnonzero((mains > 0) & (volume > 0) & ~suspects[tensor])
    bounds = runs(tensor[held])
    present = tensor[held][bounds[:-1]]
    suspects[present] = ~tile_exactly(boxes.take(held), bounds, whole[present])
    return suspects


def _outside(boxes: Boxes, whole: Int64) -> Bool:
    """Which boxes leave their tensors, whose shapes are the rows of ``whole``."""
    outside = np.zeros(len(boxes), np.bool_)
    for axis in range(boxes.width):
        offset, shape = boxes.offset[:, axis], boxes.shape[:, axis]
        outside |= (offset < 0) | (shape < 0) | (offset + shape > whole[:, axis])
    return outside


def _empty(tensors: Sequence[TensorEntry]) -> Bool:
    return np.array([0 in entry.meta.shape for entry in tensors], np.bool_)


def _lost(declared: Declarations, tensor: Int32, volume: Int64, mains: Int64) -> Bool:
    """Tensors that are declared, but of which no main replica holds anything that could be written.

    ``tensor``, ``volume`` and ``mains`` (the number of main replicas) tell of each shard.
    """
    lost = np.zeros(len(declared.tensors), np.bool_)
    lost[tensor] = True
    useful = (mains > 0) & ((volume > 0) | _empty(declared.tensors)[tensor])
    lost[tensor[useful]] = False
    return lost


def _mains(declared: Declarations, shards: Groups) -> Int64:
    """The number of main replicas of each shard."""
    if not len(shards):
        return np.zeros(0, np.int64)
    return np.add.reduceat(
        declared.main[shards.order].astype(np.int64), shards.bounds[:-1]
    )
