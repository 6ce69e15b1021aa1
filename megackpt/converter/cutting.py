"""How a conversion is cut: each tensor into cells, the cells into tasks. Planning, nothing else.

Both follow from what the source holds and from what was asked for, not from how many workers there are or how
much memory they may take: the same conversion gives the same bytes, however it ran.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megackpt.planning.box import Box, Boxes, Int64, cut, regular_grids, runs
from megackpt.planning.coverage import shapes_table
from megackpt.planning.manifest import (
    Declarations,
    Manifest,
    SavePlan,
    TensorEntry,
    TensorParts,
)

Shape = tuple[int, ...]

CELL = 8 << 20
"""Bytes of a cell: what is read, and (by the formats with cells) written, in one go."""
SMALL_TASK, LARGE_TASK = 64 << 20, 1 << 30
"""Bytes that a task writes: large enough to be worth a file, small enough to be done again after a death."""
TASKS = 64
"""Tasks that a conversion is cut into where their sizes allow it."""


@dataclass(frozen=True, eq=False)
class Task:
    """One virtual rank: what it writes, and the part of the source's manifest that this comes from.

    ``plan.tensors[i]`` is made of ``part.tensors[i]``.
    """

    number: int
    plan: SavePlan
    part: Manifest


def cell_shape(shape: Shape, cut: Shape, atom: Shape, budget: int) -> Shape:
    """The cell of the grid that a tensor is cut into anew, of at most ``budget`` elements if atoms allow it.

    ``cut``: the cell of the grid that it is stored in (a shape of ones where there is none): its own cuts are
    kept where they are coarse enough, by pieces of it along the leading axes, or several of it along the last
    ones. ``atom``: what can only be read whole; a cell consists of whole atoms.
    """
    cell = list(cut)
    for axis in range(len(cell)):
        if math.prod(cell) <= budget:
            break
        fitting = budget // (math.prod(cell) // cell[axis])
        cell[axis] = _divided(
            cut[axis], atom[axis], fitting, single=cut[axis] >= shape[axis]
        )
    if math.prod(cell) * 4 < min(budget, math.prod(cut)):  # it has no useful divisors
        cell = list(atom)
    for axis in reversed(range(len(cell))):
        times = budget // math.prod(cell)
        cell[axis] = max(cell[axis], min(shape[axis], cell[axis] * times))
        if cell[axis] < shape[axis]:
            break
    return tuple(cell)


def _divided(extent: int, atom: int, fitting: int, single: bool) -> int:
    """The largest number of elements, at most ``fitting``, of which the extent is made up; whole atoms."""
    atoms = -(-extent // atom)
    most = min(max(1, fitting // atom), atoms)
    if not single:
        while atoms % most:
            most -= 1
    return min(extent, most * atom)


def declared(
    manifest: Manifest,
    carried: Mapping[int, TensorEntry],
    decoded: Int64,
    contiguous: bool,
) -> Declarations:
    """Everything that is carried, cut into cells, in the source's order.

    ``decoded``: Backend.decoded. ``contiguous``: cells are to be consecutive bytes of whole tensors, because that is
    how the target keeps them.
    """
    parts = TensorParts(manifest)
    cuts, atoms = _stored_cells(manifest, decoded)
    boxes: list[Boxes] = []
    nbytes: list[Int64] = []
    for number, (_, meta) in carried.items():
        if meta.is_object:
            rows = parts.rows(number)
            boxes.append(manifest.chunks.boxes.take(rows))
            nbytes.append(manifest.chunks.length[rows])
            continue
        itemsize = max(meta.itemsize, manifest.tensors[number].meta.itemsize)
        atom = atoms.get(number, (1,) * len(meta.shape))
        cut = atom if contiguous else cuts.get(number, atom)
        boxes.append(
            _grid(meta.shape, cell_shape(meta.shape, cut, atom, CELL // itemsize))
        )
        nbytes.append(boxes[-1].volume * meta.itemsize)
    return Declarations.of_boxes(
        tuple(carried.values()),
        np.repeat(np.arange(len(carried)), list(map(len, boxes))).astype(np.int32),
        Boxes.concat(boxes),
        np.concatenate([np.zeros(0, np.int64), *nbytes]),
    )


def _stored_cells(
    manifest: Manifest, decoded: Int64
) -> tuple[dict[int, Shape], dict[int, Shape]]:
    """Tensor number -> the cell of the grid that it is stored in; and what of it can only be read whole."""
    tensor, boxes = manifest.chunks.tensor, manifest.chunks.boxes
    order = np.argsort(tensor, kind="stable")
    bounds = runs(tensor[order])
    numbers = tensor[order][bounds[:-1]]
    whole = np.maximum(
        1, shapes_table([manifest.tensors[n] for n in numbers], boxes.width)
    )
    stored = boxes.take(order).widened(whole.shape[1])
    found, regular = regular_grids(
        Boxes(stored.offset, np.maximum(1, stored.shape)), bounds, whole
    )
    heavy = (
        np.logical_or.reduceat(decoded[order] > 0, bounds[:-1])
        if len(order)
        else regular
    )
    cuts: dict[int, Shape] = {}
    atoms: dict[int, Shape] = {}
    for number, cell, fits, atomic in zip(
        numbers.tolist(), found.tolist(), regular, heavy, strict=True
    ):
        grid = manifest.grids[number]
        ndim = len(manifest.tensors[number].meta.shape)
        if fits:
            cuts[number] = tuple(cell[:ndim])
        if fits and atomic:
            atoms[number] = cuts[number]
        if grid is not None:
            cuts[number] = tuple(max(1, extent) for extent in grid)
    return cuts, atoms


def _grid(shape: Shape, cell: Shape) -> Boxes:
    """The cells over a tensor of this shape, in C order; one empty box where it has no elements."""
    whole = Boxes.of([Box.whole(shape)])
    return (
        whole if 0 in shape else cut(whole, np.array([cell], np.int64), whole.offset)[1]
    )


def task_count(total: int) -> int:
    """Into how many tasks so many bytes are cut."""
    size = min(max(total // TASKS, SMALL_TASK), LARGE_TASK)
    return max(1, -(-total // size))


def shared_out(rows: Declarations, count: int) -> list[Int64]:
    """The rows of each task: consecutive ones, of about equal bytes."""
    before = np.cumsum(rows.nbytes) - rows.nbytes
    total = int(rows.nbytes.sum())
    task = before * count // max(total, 1)
    return np.split(np.arange(len(rows)), np.searchsorted(task, np.arange(1, count)))


def parts_of(rows: Declarations, tasks: Sequence[Int64]) -> list[Declarations]:
    """The declarations of each task, with a table of its own tensors only."""
    parts = []
    for number, own in enumerate(tasks):
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
