"""The plan of a load: the intersections of the boxes that a rank wants with the stored ones."""

from __future__ import annotations

import numpy as np

from megackpt.errors import CorruptCheckpoint, MismatchError, join_truncated
from megackpt.planning.box import (
    Box,
    Boxes,
    Int64,
    distinct,
    expand_ranges,
    group_equal,
    runs,
)
from megackpt.planning.coverage import miscounted, shapes_table, tile_exactly
from megackpt.planning.manifest import (
    LARGEST,
    Bool,
    Declarations,
    Int32,
    LoadPlan,
    Manifest,
    itemsizes,
)

_NAMED = 1000  # rows with a hole or an overlap that are counted in an error
PAIRS = 1 << 19
"""Pairs of boxes that are intersected at a time."""


def plan_load(wanted: Declarations, manifest: Manifest) -> LoadPlan:
    """The regions to read, ordered by row of ``wanted``; each lies in one stored chunk.

    Flexible rows get their overlap with the stored tensor. Stored chunks must cover all other rows.
    Raises MismatchError for keys that are not stored, for tensors asked for as objects and the
    reverse, and for boxes beyond the stored shape; CorruptCheckpoint where stored chunks leave a
    hole in a wanted box, or overlap in it. All problems of one sort at once. Dtypes are compared
    by ``strict.check_shapes``.
    """
    stored = _stored_numbers(wanted, manifest)
    # The chunks of wanted tensors, in the tensors' order.
    asked = np.zeros(len(manifest.tensors), np.bool_)
    asked[stored] = True
    rows = np.flatnonzero(asked[manifest.chunks.tensor])
    rows = rows[np.argsort(manifest.chunks.tensor[rows], kind="stable")]
    chunks = manifest.chunks.boxes.take(rows).widened(max(1, wanted.boxes.width))
    boxes = wanted.boxes.widened(chunks.width)
    owner = manifest.chunks.tensor[rows]
    targets, places = _overlaps(boxes, stored, chunks, owner)
    low = np.maximum(boxes.offset[targets], chunks.offset[places])
    high = np.minimum(boxes.stop[targets], chunks.stop[places])
    plan = LoadPlan(manifest, rows[places], Boxes(low, high - low), targets)
    _check_whole(wanted, stored, plan, _sound(manifest, chunks, owner))
    return plan


def check_whole(manifest: Manifest) -> None:
    """Raise CorruptCheckpoint for holes and overlaps among the stored chunks."""
    tensors = manifest.tensors
    number = np.flatnonzero(itemsizes(tensors)).astype(np.int32)
    shape = shapes_table(tensors, 0)[number]
    whole = Boxes(np.zeros_like(shape), shape)
    wanted = Declarations.of_boxes(tensors, number, whole, whole.volume)
    plan_load(wanted, manifest)


def _stored_numbers(wanted: Declarations, manifest: Manifest) -> Int64:
    """For each wanted row the number of its tensor in the manifest."""
    numbers = manifest.numbers()
    problems = []
    table = np.zeros(len(wanted.tensors), np.int64)
    for i in distinct(wanted.tensor, len(wanted.tensors))[0].tolist():
        key, meta = wanted.tensors[i]
        if key not in numbers:
            problems.append(f"Unexpected keys: {key!r} is not in the checkpoint")
            continue
        table[i] = numbers[key]
        held = manifest.tensors[numbers[key]].meta
        if held == meta:
            continue
        differs = held.is_object or meta.is_object or len(held.shape) != len(meta.shape)
        if differs:
            problems.append(
                f"{key!r} is stored as {held.dtype} {held.shape} and asked for as "
                f"{meta.dtype} {meta.shape}"
            )
    if problems:
        raise MismatchError(join_truncated(problems, separator="\n"))
    return table[wanted.tensor]


def _overlaps(
    boxes: Boxes, stored: Int64, chunks: Boxes, owner: Int32
) -> tuple[Int64, Int64]:
    """All pairs (wanted row, chunk) that share an element, in this order.

    A tensor's chunks are sorted along its most divided axis. Only chunks in the range along this
    axis that may meet the wanted box are compared.
    """
    bounds = runs(owner)[:-1]
    axes = np.zeros(int(stored.max(initial=0)) + 1, np.int64)
    if len(bounds):
        longest = np.maximum.reduceat(chunks.shape, bounds)
        divided = np.maximum.reduceat(chunks.stop, bounds) // np.maximum(1, longest)
        axes[owner[bounds]] = divided.argmax(axis=1)
    chunk = np.arange(len(chunks))
    row = np.arange(len(boxes))
    ends = [
        chunks.offset[chunk, axes[owner]],
        chunks.stop[chunk, axes[owner]],
        boxes.offset[row, axes[stored]],
        boxes.stop[row, axes[stored]],
    ]
    # One number for a tensor and a place in it, so that one search serves all tensors.
    number = np.concatenate(ends)
    number -= number.min(initial=0)
    span = int(number.max(initial=0)) + 1
    if span * len(axes) >= LARGEST:
        values, number = np.unique(number, return_inverse=True)
        span = len(values)
    number += span * np.concatenate([owner, owner, stored, stored], dtype=np.int64)
    start, stop, low, high = np.split(number, np.cumsum(list(map(len, ends[:3]))))
    order = np.argsort(start, kind="stable")
    chunks = chunks.take(order)
    # Chunks before ``first`` end before the wanted box. Chunks from ``last`` on begin behind it.
    first = np.searchsorted(np.maximum.accumulate(stop[order]), low, side="right")
    last = np.searchsorted(start[order], high, side="left")
    counts = np.maximum(0, last - first)

    found_rows = [row[:0]]
    found_chunks = [chunk[:0]]
    done = np.cumsum(counts)
    begin = 0
    while begin < len(boxes):  # some pairs at a time, to bound the memory
        limit = done[begin] - counts[begin] + PAIRS
        end = max(begin + 1, int(np.searchsorted(done, limit, side="right")))
        targets, places = expand_ranges(first[begin:end], counts[begin:end])
        targets += begin
        shared = np.ones(len(targets), np.bool_)
        for axis in range(boxes.width):
            low = boxes.offset[targets, axis]
            high = low + boxes.shape[targets, axis]
            start = chunks.offset[places, axis]
            stop = start + chunks.shape[places, axis]
            shared &= np.maximum(low, start) < np.minimum(high, stop)
        found_rows.append(targets[shared])
        found_chunks.append(order[places[shared]])
        begin = end
    targets = np.concatenate(found_rows)
    places = np.concatenate(found_chunks)
    order = np.lexsort([places, targets])
    return targets[order], places[order]


def _sound(manifest: Manifest, chunks: Boxes, owner: Int32) -> Bool:
    """For each stored tensor: do its chunks tile it? Then volumes alone show the coverage."""
    sound = np.zeros(len(manifest.tensors), np.bool_)
    full = np.flatnonzero(chunks.volume > 0)
    numbers = owner[full]
    limits = runs(numbers)
    present = numbers[limits[:-1]]
    whole = shapes_table([manifest.tensors[n] for n in present], chunks.width)
    boxes = chunks.take(full).widened(whole.shape[1])
    sound[present] = tile_exactly(boxes, limits, whole)
    groups = group_equal(numbers, boxes)
    is_repeated = np.diff(groups.bounds) > 1  # the same chunk twice
    sound[numbers[groups.first[is_repeated]]] = False
    return sound


def _check_whole(
    wanted: Declarations, stored: Int64, plan: LoadPlan, sound: Bool
) -> None:
    """Raise unless each wanted row, or the stored part of a flexible one, is covered exactly."""
    tensors = plan.manifest.tensors
    found = plan.boxes
    numbers, which = distinct(stored, len(tensors))
    whole = shapes_table([tensors[n] for n in numbers], found.width)[which]
    boxes = wanted.boxes.widened(found.width)
    low = np.maximum(boxes.offset, 0)
    high = np.minimum(boxes.stop, whole)
    inside = np.prod(np.maximum(0, high - low), axis=1, dtype=np.int64)
    beyond = np.flatnonzero((inside != boxes.volume) & ~wanted.flexible).tolist()
    problems = []
    for i in beyond:
        shape = tensors[stored[i]].meta.shape
        problems.append(
            f"{wanted.row(i).shard} was asked for, but the checkpoint holds this tensor with "
            f"shape {shape}"
        )
    if problems:
        raise MismatchError(join_truncated(problems, separator="\n"))
    got = np.zeros(len(wanted), np.int64)
    np.add.at(got, plan.target, found.volume)
    doubtful = np.flatnonzero((got != inside) | (~sound[stored] & (inside > 0)))
    starts = np.searchsorted(plan.target, np.arange(len(wanted) + 1))
    for i in doubtful.tolist():
        if len(problems) == _NAMED:
            break
        parts = found.take(slice(starts[i], starts[i + 1]))
        ndim = len(tensors[stored[i]].meta.shape)
        local = Boxes((parts.offset - low[i])[:, :ndim], parts.shape[:, :ndim])
        for region, count in miscounted(local, (high[i] - low[i])[:ndim].tolist()):
            offset = np.array(region.offset, np.int64) + low[i, :ndim]
            what = "no stored chunk holds it"
            if count:
                what = f"{count} stored chunks overlap in it"
            place = Box(tuple(offset.tolist()), region.shape)
            problems.append(f"{wanted.row(i).shard}: {place} cannot be read, {what}")
            break
    if problems:
        raise CorruptCheckpoint(join_truncated(problems, separator="\n"))
