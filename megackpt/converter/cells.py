"""Planning of a conversion: each tensor is cut into cells, and the cells are grouped into tasks.

The plan depends on the source and on the selection, not on the number of workers or the
memory limit. So the same conversion always writes the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from megackpt import limits
from megackpt.planning.box import Box, Boxes, Int64, cut, group, regular_grids
from megackpt.planning.coverage import shapes_table
from megackpt.planning.manifest import (
    Declarations,
    Manifest,
    SavePlan,
    TensorEntry,
    TensorParts,
    itemsizes,
)

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ConversionTask:
    """The plan of one virtual rank, and the part of the source's manifest that it reads.

    ``plan.tensors[i]`` is made of ``part.tensors[i]``.
    """

    number: int
    plan: SavePlan
    part: Manifest


def declare_cells(
    manifest: Manifest,
    entries: Mapping[int, TensorEntry],
    decoded: Int64,
    contiguous: bool,
    in_order: bool = False,
) -> Declarations:
    """Declare all cells of the target, in the source's order.

    Args:
        entries: tensor number in the source -> name and dtype in the target.
        decoded: the result of ``Backend.decoded_bytes`` for the source.
        contiguous: cut into consecutive bytes of whole tensors, because the target keeps them so.
        in_order: the cells of a tensor must follow one another. So what can only be read whole is
            read several times if it is not consecutive itself.
    """
    parts = TensorParts(manifest)
    grids, atoms = _stored_cells(manifest, decoded)
    boxes: list[Boxes] = []
    nbytes: list[Int64] = [np.zeros(0, np.int64)]
    for number, (_, meta) in entries.items():
        if meta.is_object:
            rows = parts.rows(number)
            boxes.append(manifest.chunks.boxes.take(rows))
            nbytes.append(manifest.chunks.length[rows])
            continue
        itemsize = max(meta.itemsize, manifest.tensors[number].meta.itemsize)
        element = (1,) * len(meta.shape)
        atom = atoms.get(number, element)
        if in_order:
            cut_axis = next((i for i, extent in enumerate(atom) if extent > 1), 0)
            if atom[cut_axis + 1 :] != meta.shape[cut_axis + 1 :]:
                atom = element
        stored = atom
        if not contiguous:
            stored = grids.get(number, atom)
        budget = limits.CONVERT_CELL_BYTES // itemsize
        cells = Boxes.of([Box.whole(meta.shape)])
        if 0 not in meta.shape:
            cell = cell_shape(meta.shape, stored, atom, budget)
            cells = cut(cells, np.array([cell], np.int64), cells.offset)[1]
        boxes.append(cells)
        nbytes.append(cells.volume * meta.itemsize)
    counts = [len(cells) for cells in boxes]
    return Declarations.of_boxes(
        tuple(entries.values()),
        np.repeat(np.arange(len(entries)), counts).astype(np.int32),
        Boxes.concat(boxes),
        np.concatenate(nbytes),
    )


def cell_shape(shape: Shape, stored: Shape, atom: Shape, budget: int) -> Shape:
    """Return the shape of a tensor's cells: whole atoms, if possible at most ``budget`` elements.

    ``stored`` is the cell of the grid that the source has (ones: no grid). Its cuts are kept where
    they are coarse enough: a large cell is divided along its leading axes, small ones are joined
    along the last. ``atom`` is the smallest box that can be read alone.
    """
    cell = list(stored)
    for axis in range(len(cell)):
        if math.prod(cell) <= budget:
            break
        # The largest number of whole atoms along this axis that divides the stored cell.
        atoms = -(-stored[axis] // atom[axis])
        fitting = budget // (math.prod(cell) // cell[axis])
        count = min(max(1, fitting // atom[axis]), atoms)
        if stored[axis] < shape[axis]:
            while atoms % count:
                count -= 1
        cell[axis] = min(stored[axis], count * atom[axis])
    # A stored cell without useful divisors (a prime number of rows) is given up.
    if math.prod(cell) * 4 < min(budget, math.prod(stored)):
        cell = list(atom)
    for axis in reversed(range(len(cell))):
        times = budget // math.prod(cell)
        cell[axis] = max(cell[axis], min(shape[axis], cell[axis] * times))
        if cell[axis] < shape[axis]:
            break
    return tuple(cell)


def _stored_cells(
    manifest: Manifest, decoded: Int64
) -> tuple[dict[int, Shape], dict[int, Shape]]:
    """Return tensor number -> the cell of its stored grid, and -> what can only be read whole."""
    groups = group(manifest.chunks.tensor)
    order = groups.order
    bounds = groups.bounds
    tensor = manifest.chunks.tensor[order]
    numbers = tensor[bounds[:-1]].tolist()
    boxes = manifest.chunks.boxes
    shapes = shapes_table([manifest.tensors[n] for n in numbers], boxes.width)
    whole = np.maximum(1, shapes)
    stored = boxes.take(order).widened(whole.shape[1])
    stored = Boxes(stored.offset, np.maximum(1, stored.shape))
    cells, regular = regular_grids(stored, bounds, whole)
    encoded = regular
    if len(order):
        # A chunk is read once if any part of it takes the memory of the full chunk.
        sizes = stored.volume * itemsizes(manifest.tensors)[tensor]
        is_whole = decoded[order] >= np.maximum(1, sizes)
        encoded = np.logical_or.reduceat(is_whole, bounds[:-1])
    grids: dict[int, Shape] = {}
    atoms: dict[int, Shape] = {}
    for row, number in enumerate(numbers):
        if regular[row]:
            ndim = len(manifest.tensors[number].meta.shape)
            grids[number] = tuple(cells[row, :ndim].tolist())
            if encoded[row]:
                atoms[number] = grids[number]
        if (grid := manifest.grids[number]) is not None:
            grids[number] = tuple(max(1, extent) for extent in grid)
    return grids, atoms


def task_count(total: int) -> int:
    """Return the number of tasks for ``total`` bytes."""
    size = max(total // limits.CONVERT_TASKS, limits.CONVERT_TASK_BYTES_MIN)
    size = min(size, limits.CONVERT_TASK_BYTES_MAX)
    return max(1, -(-total // size))


def split_tasks(rows: Declarations, count: int) -> list[Declarations]:
    """Split into tasks of consecutive rows and about equal bytes; each lists only its tensors."""
    before = np.cumsum(rows.nbytes) - rows.nbytes
    task = before * count // max(int(rows.nbytes.sum()), 1)
    bounds = np.searchsorted(task, np.arange(1, count))
    parts = []
    for number, own in enumerate(np.split(np.arange(len(rows)), bounds)):
        part = rows.take(own)
        used, tensor = np.unique(part.tensor, return_inverse=True)
        parts.append(
            replace(
                part,
                tensors=tuple(rows.tensors[n] for n in used.tolist()),
                tensor=tensor.astype(np.int32),
                rank=np.full(len(own), number, np.int32),
            )
        )
    return parts
