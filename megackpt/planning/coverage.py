"""Do the main replicas of all ranks tile each tensor exactly?

Exactly means: in bounds, disjoint, and with volumes that add up. Columns decide for all tensors
together. Only tensors that are wrong are examined one by one, for the error text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megackpt.errors import CoverageError
from megackpt.planning.box import Boxes, Groups, Int64, runs
from megackpt.planning.coverage_report import Problem, explain, join_problems
from megackpt.planning.manifest import Bool, Declarations, Int32, TensorEntry
from megackpt.planning.tiling import tile_exactly


def uncovered(declared: Declarations, shards: Groups | None = None) -> list[Problem]:
    """All reasons why the declarations of all ranks do not tile exactly; empty if they do.

    One Problem a key: different shapes, dtypes or kinds, boxes out of bounds, holes, overlaps,
    and boxes with no or several main replicas. A box without elements may have any number of
    main replicas, but each key needs one. ``shards`` is ``declared.shards()``, if known.
    """
    shards = declared.shards() if shards is None else shards
    return _problems(declared, _suspects(declared, shards))


def unsaved(declared: Declarations, shards: Groups | None = None) -> list[Problem]:
    """The problems that no save may ignore.

    These lose a whole key, make it ambiguous, or put a shard outside of its tensor.
    """
    shards = declared.shards() if shards is None else shards
    whole = shapes_table(declared.tensors, declared.boxes.width)
    boxes = declared.boxes.take(shards.first).widened(whole.shape[1])
    tensor, volume = declared.tensor[shards.first], boxes.volume
    mains = _mains(declared, shards)
    lost = _lost(declared, tensor, volume, mains)
    written = (mains > 0) & ((volume > 0) | _empty(declared.tensors)[tensor])
    lost[tensor[written & _outside(boxes, whole[tensor])]] = True
    return _problems(declared, lost)


def check(
    declared: Declarations, shards: Groups | None = None, thorough: bool = True
) -> None:
    """Raise CoverageError for all that ``uncovered`` or, if not thorough, ``unsaved`` finds."""
    problems = uncovered(declared, shards) if thorough else unsaved(declared, shards)
    if problems:
        raise CoverageError(join_problems(problems))


def _problems(declared: Declarations, wrong: Bool) -> list[Problem]:
    """A problem for each key with several metas, and for each other tensor that is wrong."""
    numbers: dict[str, list[int]] = {}
    if len({entry.key for entry in declared.tensors}) < len(declared.tensors):
        for i, entry in enumerate(declared.tensors):
            numbers.setdefault(entry.key, []).append(i)
    conflicts = {key: several for key, several in numbers.items() if len(several) > 1}
    for several in conflicts.values():
        wrong[several] = False
    if not conflicts and not wrong.any():
        return []
    return explain(declared, conflicts, np.flatnonzero(wrong).tolist())


def shapes_table(tensors: Sequence[TensorEntry], width: int) -> Int64:
    """The global shapes of a table of tensors, (n, width or more), padded with 1 as boxes are."""
    shapes = [entry.meta.shape for entry in tensors]
    width = max([width, *map(len, shapes)])
    pads = [(1,) * (width - ndim) for ndim in range(width + 1)]
    flat = [shape + pads[len(shape)] for shape in shapes]
    return np.array(flat, np.int64).reshape(len(tensors), width)


def _suspects(declared: Declarations, shards: Groups) -> Bool:
    """The tensors that their main replicas do not tile."""
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
    """Which boxes reach beyond their tensors? The rows of ``whole`` are the global shapes."""
    outside = np.zeros(len(boxes), np.bool_)
    for axis in range(boxes.width):
        offset, shape = boxes.offset[:, axis], boxes.shape[:, axis]
        outside |= (offset < 0) | (shape < 0) | (offset + shape > whole[:, axis])
    return outside


def _empty(tensors: Sequence[TensorEntry]) -> Bool:
    return np.array([0 in entry.meta.shape for entry in tensors], np.bool_)


def _lost(declared: Declarations, tensor: Int32, volume: Int64, mains: Int64) -> Bool:
    """The declared tensors without a main replica that has data to write.

    ``tensor``, ``volume`` and ``mains`` (the number of main replicas) have a row a shard.
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
