"""The plan of a load: the intersections of the boxes that a rank wants with the stored ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megackpt.errors import CheckpointingException, CorruptCheckpoint, MismatchError
from megackpt.planning.box import Box, Boxes, Int64, group_equal, runs
from megackpt.planning.coverage import shapes_table
from megackpt.planning.manifest import Bool, Declarations, Int32, LoadPlan, Manifest
from megackpt.planning.tiling import miscounted, tile_exactly

PAIRS = 1 << 19
"""Pairs of boxes that are intersected at a time."""
CROWD = 64
"""With more stored chunks of a tensor, candidates are searched instead of comparing all."""
_NAMED = 20  # problems named in an error


def plan_load(wanted: Declarations, manifest: Manifest) -> LoadPlan:
    """The regions to read, ordered by row of ``wanted``; each lies in one stored chunk.

    Flexible rows get their overlap with the stored tensor. Stored chunks must cover all others.
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
    bounds = np.searchsorted(owner, np.arange(len(manifest.tensors) + 1))
    targets, places = _overlaps(boxes, stored, chunks, bounds)
    low = np.maximum(boxes.offset[targets], chunks.offset[places])
    high = np.minimum(boxes.stop[targets], chunks.stop[places])
    found = Boxes(low, high - low)
    _check_whole(
        wanted, manifest, stored, targets, found, _sound(manifest, chunks, owner)
    )
    return LoadPlan(manifest, rows[places], found, targets)


def _stored_numbers(wanted: Declarations, manifest: Manifest) -> Int64:
    """For each wanted row the number of its tensor in the manifest."""
    numbers = manifest.numbers()
    problems = []
    table = np.zeros(len(wanted.tensors), np.int64)
    for i in np.unique(wanted.tensor).tolist():
        key, meta = wanted.tensors[i]
        number = numbers.get(key)
        if number is None:
            problems.append(f"Unexpected keys: {key!r} is not in the checkpoint")
            continue
        table[i] = number
        there = manifest.tensors[number].meta
        if there == meta:
            continue
        if there.is_object != meta.is_object:
            kinds = ["an object", "a tensor"]
            if meta.is_object:
                kinds.reverse()
            problems.append(
                f"{key!r} is stored as {kinds[0]} and asked for as {kinds[1]}"
            )
        elif len(there.shape) != len(meta.shape) or (
            meta.is_object and there.shape != meta.shape
        ):
            problems.append(
                f"Global shape mismatch for loaded {there.shape} and expected {meta.shape} "
                f"tensor for key {key}"
            )
    _complain(MismatchError, problems)
    return table[wanted.tensor]


def _overlaps(
    boxes: Boxes, stored: Int64, chunks: Boxes, bounds: Int64
) -> tuple[Int64, Int64]:
    """All pairs (wanted row, place in ``chunks``) that share an element, in this order."""
    counts = bounds[stored + 1] - bounds[stored]
    few = np.flatnonzero(counts <= CROWD)
    found = list(_compared(boxes, chunks, few, bounds[stored[few]], counts[few]))
    many = np.flatnonzero(counts > CROWD)
    for number in np.unique(stored[many]).tolist():
        rows = many[stored[many] == number]
        found += _searched(
            boxes, chunks, rows, int(bounds[number]), int(bounds[number + 1])
        )
    if not found:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    targets = np.concatenate([t for t, _ in found])
    places = np.concatenate([p for _, p in found])
    order = np.lexsort([places, targets])
    return targets[order], places[order]


def _searched(
    boxes: Boxes, chunks: Boxes, rows: Int64, low: int, high: int
) -> Iterator[tuple[Int64, Int64]]:
    """The pairs of a tensor of many chunks.

    Only a range of chunks along its most divided axis is compared.
    """
    mine = chunks.take(slice(low, high))
    axis = int(np.argmax([len(np.unique(column)) for column in mine.offset.T]))
    order = np.argsort(mine.offset[:, axis], kind="stable")
    start = mine.offset[order, axis]
    reach = np.maximum.accumulate(mine.stop[order, axis])
    first = np.searchsorted(reach, boxes.offset[rows, axis], side="right")
    last = np.searchsorted(start, boxes.stop[rows, axis], side="left")
    sorted_chunks = mine.take(order)
    for targets, places in _compared(
        boxes, sorted_chunks, rows, first, np.maximum(0, last - first)
    ):
        yield targets, order[places] + low


def _compared(
    boxes: Boxes, chunks: Boxes, rows: Int64, first: Int64, counts: Int64
) -> Iterator[tuple[Int64, Int64]]:
    """Compare each wanted row with ``counts`` chunks from ``first`` on, some pairs at a time."""
    ends = np.cumsum(counts)
    begin = 0
    while begin < len(rows):
        done = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + PAIRS, side="right")))
        part = slice(begin, end)
        targets = np.repeat(rows[part], counts[part])
        places = np.arange(len(targets)) + np.repeat(
            first[part] - (ends[part] - counts[part] - done), counts[part]
        )
        shared = np.ones(len(targets), np.bool_)
        for axis in range(boxes.width):
            low = np.maximum(boxes.offset[targets, axis], chunks.offset[places, axis])
            high = np.minimum(
                boxes.offset[targets, axis] + boxes.shape[targets, axis],
                chunks.offset[places, axis] + chunks.shape[places, axis],
            )
            shared &= low < high
        yield targets[shared], places[shared]
        begin = end


def _sound(manifest: Manifest, chunks: Boxes, owner: Int32) -> Bool:
    """For each stored tensor: do its chunks tile it? Then volumes alone show what is covered."""
    sound = np.zeros(len(manifest.tensors), np.bool_)
    full = np.flatnonzero(chunks.volume > 0)
    numbers = owner[full]
    limits = runs(numbers)
    present = numbers[limits[:-1]]
    whole = shapes_table([manifest.tensors[n] for n in present], chunks.width)
    boxes = chunks.take(full).widened(whole.shape[1])
    sound[present] = tile_exactly(boxes, limits, whole)
    groups = group_equal(numbers, boxes)
    sound[numbers[groups.first[np.diff(groups.bounds) > 1]]] = (
        False  # the same chunk twice
    )
    return sound


def _check_whole(
    wanted: Declarations,
    manifest: Manifest,
    stored: Int64,
    targets: Int64,
    found: Boxes,
    sound: Bool,
) -> None:
    """Raise unless each wanted row, or the stored part of a flexible one, is covered exactly."""
    numbers, which = np.unique(stored, return_inverse=True)
    whole = shapes_table([manifest.tensors[n] for n in numbers], found.width)[which]
    boxes = wanted.boxes.widened(found.width)
    low, high = np.maximum(boxes.offset, 0), np.minimum(boxes.stop, whole)
    inside = np.prod(np.maximum(0, high - low), axis=1, dtype=np.int64)
    beyond = (inside != boxes.volume) & ~wanted.flexible
    _complain(
        MismatchError,
        [
            f"{row.shard} was asked for, but the checkpoint holds this tensor with shape "
            f"{manifest.tensors[stored[i]].meta.shape}"
            for i in np.flatnonzero(beyond)[: _NAMED + 1].tolist()
            for row in [wanted.row(i)]
        ],
    )
    got = np.zeros(len(wanted), np.int64)
    np.add.at(got, targets, found.volume)
    doubtful = np.flatnonzero((got != inside) | (~sound[stored] & (inside > 0)))
    starts = np.searchsorted(targets, np.arange(len(wanted) + 1))
    problems = []
    for i in doubtful.tolist():
        parts = found.take(slice(starts[i], starts[i + 1]))
        ndim = len(manifest.tensors[stored[i]].meta.shape)
        local = Boxes((parts.offset - low[i])[:, :ndim], parts.shape[:, :ndim])
        for region, count in miscounted(local, (high[i] - low[i])[:ndim].tolist()):
            place = Box(
                tuple(a + int(b) for a, b in zip(region.offset, low[i], strict=False)),
                region.shape,
            )
            what = (
                f"{count} stored chunks overlap in it"
                if count
                else "no stored chunk holds it"
            )
            problems.append(f"{wanted.row(i).shard}: {place} cannot be read, {what}")
            break
        if len(problems) > _NAMED:
            break
    _complain(CorruptCheckpoint, problems)


def _complain(kind: type[CheckpointingException], problems: list[str]) -> None:
    if problems:
        more = "\nand more" if len(problems) > _NAMED else ""
        raise kind("\n".join(problems[:_NAMED]) + more)
