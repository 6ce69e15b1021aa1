"""Do the main replicas of all ranks tile each tensor exactly? All problems at once, each explained.

Exact tiling = in bounds, and disjoint, and volumes that add up. The sound case is decided in columns, for
all tensors together; only what looks wrong is looked at one by one and put into words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megackpt.errors import CoverageError
from megackpt.planning.box import Groups, Int64, runs
from megackpt.planning.coverage.explain import Problem, explain_conflict, explain_tensor, summary
from megackpt.planning.coverage.tiling import miscounted, tile_exactly
from megackpt.planning.manifest import Bool, Declarations, TensorEntry

__all__ = ["Problem", "check", "miscounted", "shapes_table", "tile_exactly", "uncovered", "unsaved"]

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
    problems = [explain_conflict(declared, numbers) for numbers in list(conflicts.values())[:EXPLAINED]]
    problems += [
        Problem(key, f"{key!r} is declared with different shapes or dtypes")
        for key in list(conflicts)[EXPLAINED:]
    ]
    room = max(0, EXPLAINED - len(conflicts))
    for i, number in enumerate(np.flatnonzero(suspects).tolist()):
        explain = explain_tensor if i < room else summary
        problems.append(explain(declared, number))
    return problems


def unsaved(declared: Declarations, shards: Groups | None = None) -> list[Problem]:
    """The problems that would lose a whole key, or make it mean two things: what no save may pass over."""
    shards = declared.shards() if shards is None else shards
    conflicts = _conflicts(declared.tensors)
    lost = _lost(declared, shards)
    lost[[number for numbers in conflicts.values() for number in numbers]] = False
    return [
        *(explain_conflict(declared, numbers) for numbers in list(conflicts.values())[:EXPLAINED]),
        *(Problem(k, f"{k!r} is declared in several ways") for k in list(conflicts)[EXPLAINED:]),
        *(explain_tensor(declared, n) for n in np.flatnonzero(lost)[:EXPLAINED].tolist()),
        *(summary(declared, n) for n in np.flatnonzero(lost)[EXPLAINED:].tolist()),
    ]


def check(declared: Declarations, shards: Groups | None = None, thorough: bool = True) -> None:
    """Raise CoverageError with all problems: of ``uncovered`` or, where not thorough, of ``unsaved`` only."""
    problems = uncovered(declared, shards) if thorough else unsaved(declared, shards)
    if not problems:
        return
    told = [str(problem) for problem in problems[:EXPLAINED]]
    rest = problems[EXPLAINED:]
    if rest:
        names = ", ".join(repr(p.key) for p in rest[:EXPLAINED])
        told.append(f"and {len(rest)} more: {names}" + (", ..." if len(rest) > EXPLAINED else ""))
    raise CoverageError("\n".join(told))


def shapes_table(tensors: Sequence[TensorEntry], width: int) -> Int64:
    """The global shapes of a table of tensors, (n, width or more), padded with 1 as boxes are."""
    width = max([width, *(len(entry.meta.shape) for entry in tensors)])
    return np.array(
        [entry.meta.shape + (1,) * (width - len(entry.meta.shape)) for entry in tensors], np.int64
    ).reshape(len(tensors), width)


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
    outside = np.zeros(len(boxes), np.bool_)
    for axis in range(boxes.width):
        offset, shape = boxes.offset[:, axis], boxes.shape[:, axis]
        outside |= (offset < 0) | (shape < 0) | (offset + shape > whole[tensor, axis])
    mains = _mains(declared, shards)
    suspects = _lost(declared, shards)
    suspects[tensor[outside | ((mains > 1) & (volume != 0))]] = True
    held = np.flatnonzero((mains > 0) & (volume > 0) & ~suspects[tensor])
    bounds = runs(tensor[held])
    present = tensor[held][bounds[:-1]]
    suspects[present] = ~tile_exactly(boxes.take(held), bounds, whole[present])
    return suspects


def _lost(declared: Declarations, shards: Groups) -> Bool:
    """Tensors that are declared, but of which no main replica holds anything that could be written."""
    lost = np.zeros(len(declared.tensors), np.bool_)
    lost[declared.tensor] = True
    empty = np.array([0 in entry.meta.shape for entry in declared.tensors], np.bool_)
    tensor = declared.tensor[shards.first]
    volume = declared.boxes.take(shards.first).volume
    useful = (_mains(declared, shards) > 0) & ((volume > 0) | empty[tensor])
    lost[tensor[useful]] = False
    return lost


def _mains(declared: Declarations, shards: Groups) -> Int64:
    """The number of main replicas of each shard."""
    if not len(shards):
        return np.zeros(0, np.int64)
    return np.add.reduceat(declared.main[shards.order].astype(np.int64), shards.bounds[:-1])
