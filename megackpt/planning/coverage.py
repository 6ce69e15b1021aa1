"""Do the main replicas of all ranks tile each tensor exactly?

Exactly means: in bounds, disjoint, and with volumes that add up. Columns decide for all tensors
together. Only tensors that are wrong are examined one by one, for the error text.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from megackpt.errors import CoverageError
from megackpt.planning.box import Int64, padded, runs
from megackpt.planning.coverage_report import explain, join_problems
from megackpt.planning.manifest import Declarations, TensorEntry
from megackpt.planning.tiling import tile_exactly


def uncovered(declared: Declarations, thorough: bool = True) -> dict[str, str]:
    """All reasons why the declarations of all ranks do not tile exactly; empty if they do.

    A text a key: different shapes, dtypes or kinds, boxes out of bounds, holes, overlaps,
    and boxes with no or several main replicas. A box without elements may have any number of
    main replicas, but each key needs one. If not ``thorough``, only the problems that no save may
    ignore: keys that would be lost or are ambiguous, and shards to write outside of their tensors.
    """
    tensors = declared.tensors
    shards = declared.shards
    tensor = declared.tensor[shards.first]
    metas, meta_of = declared.metas
    rows = [meta.shape for meta in metas]
    shapes = padded(rows, 1, declared.boxes.width)[meta_of]
    whole = shapes[tensor]
    boxes = declared.boxes.take(shards.first).widened(whole.shape[1])
    volume = boxes.volume
    mains = declared.mains
    outside = np.zeros(len(boxes), np.bool_)
    for axis in range(boxes.width):  # long columns are faster than many short rows
        offset = boxes.offset[:, axis]
        shape = boxes.shape[:, axis]
        outside |= (offset < 0) | (shape < 0) | (offset + shape > whole[:, axis])

    # A key is lost if no main replica of it has data, or could have none.
    written = (mains > 0) & ((volume > 0) | (shapes == 0).any(axis=1)[tensor])
    wrong = np.zeros(len(tensors), np.bool_)
    wrong[tensor] = True
    wrong[tensor[written]] = False
    if thorough:
        wrong[tensor[outside | ((mains > 1) & (volume != 0))]] = True
        held = np.flatnonzero((mains > 0) & (volume > 0) & ~wrong[tensor])
        bounds = runs(tensor[held])
        present = tensor[held][bounds[:-1]]
        if len(held) < len(boxes):
            boxes = boxes.take(held)
        wrong[present] = ~tile_exactly(boxes, bounds, shapes[present])
    else:
        wrong[tensor[written & outside]] = True

    # Also wrong are keys with several metas, which are several tensors.
    keys = list(map(itemgetter(0), tensors))
    if not wrong.any() and len(set(keys)) == len(keys):
        return {}
    numbers: dict[str, list[int]] = {}
    for number, key in enumerate(keys):
        numbers.setdefault(key, []).append(number)
    for key, own in list(numbers.items()):
        if len(own) == 1 and not wrong[own[0]]:
            del numbers[key]
    return explain(declared, numbers)


def check(declared: Declarations, thorough: bool = True) -> None:
    """Raise CoverageError for all that ``uncovered`` finds."""
    problems = uncovered(declared, thorough)
    if problems:
        raise CoverageError(join_problems(problems))


def shapes_table(tensors: Sequence[TensorEntry], width: int) -> Int64:
    """The global shapes of a table of tensors, (n, width or more), padded with 1 as boxes are."""
    return padded([entry.meta.shape for entry in tensors], 1, width)
