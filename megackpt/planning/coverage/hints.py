"""The likely cause of a problem of coverage, as a sentence that says what to look at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megackpt.planning.box import Box
from megackpt.planning.coverage.cases import Case, Way, named
from megackpt.planning.manifest import Declarations, ReplicaId, TensorMeta

Shape = tuple[int, ...]


def hint_of(case: Case) -> str:
    """Of a tensor that is not tiled. The order matters: the first that fits is the most telling."""
    if case.outside:
        return _outside(case)
    if case.doubled:
        return _doubled(case)
    if case.overlaps:
        return _overlapping(case)
    if not case.mains.any() and case.orphans:
        return (
            "no rank declares replica id 0: every replica has a non-zero replica_id; exactly one rank must "
            "declare each box with replica_id 0 (or all zeros)" + _counted_from_one(case)
        )
    if _touched(case.holes, case.orphans):
        return (
            "the region is held, but every replica of it has a non-zero replica_id; exactly one rank must "
            "declare it with replica_id 0 (or all zeros)"
        )
    return _missing_cells(case) or _gap(case)


def _outside(case: Case) -> str:
    shape, boxes = case.entry.meta.shape, [case.boxes[i] for i in case.outside]
    box = boxes[0]
    if len(box.shape) != len(shape):
        return (
            f"the box has {len(box.shape)} dimensions, the global shape {len(shape)}; "
            "do they count the same prepended axes (prepend_axis_num)?"
        )
    if min((*box.offset, *box.shape), default=0) < 0:
        return "offsets and extents are never negative; was the offset computed from a rank of -1 or None?"
    if shape != shape[::-1] and all(Box.whole(shape[::-1]).contains(b) for b in boxes):
        return "the boxes fit the transposed global shape; are the weight or its shape transposed?"
    axis = next(a for a, (stop, size) in enumerate(zip(box.stop, shape, strict=True)) if stop > size)
    own = [(case.ranks(i), case.boxes[i].offset[axis]) for i in case.outside]
    if len(own) > 1 and all(ranks == [start // (box.shape[axis] or 1)] for ranks, start in own):
        return (
            f"each rank outside is piece number (its own rank) along axis {axis}; is the global rank given "
            "where the rank within its tensor-parallel (or other) group belongs?"
        )
    if box.offset[axis] == shape[axis] and any(hole.offset[axis] == 0 for hole in case.holes):
        return (
            f"the first place along axis {axis} is empty and one behind the last is claimed; is a rank or an index "
            "(of an expert, of a layer) counted from 1?"
        )
    if box.offset[axis] < shape[axis] < box.stop[axis]:
        return (
            f"{case.holder(case.outside[0])} ends {box.stop[axis] - shape[axis]} behind the end of axis {axis}; do "
            "the pieces hold padding that the global shape does not count?"
        )
    return "is the global shape that of one rank, or the rank in rank_offsets that of another group?"


def _doubled(case: Case) -> str:
    i = case.doubled[0]
    ranks = sorted(case.ranks(i))
    if len(set(ranks)) == 1:
        return (
            f"rank {ranks[0]} declares the same box more than once; does its state hold the key twice (two models "
            "with one prefix)?"
        )
    count = "two ranks declare" if len(ranks) == 2 else f"{len(ranks)} ranks declare"
    said = f"{count} the same box as main replica; "
    numbered = _numbered(case.boxes[i], case.entry.meta.shape)
    if case.holes and numbered:
        return said + (
            f"axis 0 numbers layers or experts: do {named(ranks)} count them from 0 each, where the number in the "
            "whole model belongs (first layer of the pipeline stage, first expert of the expert-parallel rank)?"
        )
    if case.holes:
        which = "expert-parallel" if "expert" in case.entry.key else "tensor-parallel"
        return said + f"is the {which} rank missing from rank_offsets?"
    if case.single and numbered:
        return said + (
            f"the others have one, so do two pipeline stages both claim number {case.boxes[i].offset[0]} of axis 0 "
            "(a layer), or is the replica_id forgotten on one of them?"
        )
    said += "is the replica_id forgotten? All but one of the copies need a non-zero one"
    if case.entry.meta.is_object and not case.entry.meta.shape:
        return said + (
            ". Or are they of different pipeline stages? What all hold alike (the number of the step) is common state, "
            "outside of sharded(); in an optimizer's state flatten_optimizer_state_dict tells the stages apart"
        )
    held = case.shards.rows(int(case.numbers[i]))
    if len(held) == len(ranks) > 2:
        return said + _or_pieces(case.boxes[i], case.entry.meta.shape, "what tells them apart")
    if ranks[1] == ranks[0] + 1:
        missing = "the tensor-parallel rank (neighbouring ranks are mostly of one tensor-parallel group)"
        return f"{said}, and this one lacks {missing}" + _or_pieces(
            case.boxes[i], case.entry.meta.shape, "that rank"
        )
    return said + (
        f". Ranks that are {ranks[1] - ranks[0]} apart are mostly data-parallel copies, or pipeline stages "
        "with one tied weight: their number is what the replica_id lacks"
    )


def _or_pieces(box: Box, shape: Shape, what: str) -> str:
    """What else it may be where the box is all of the tensor: pieces declared as if each was the whole."""
    if box != Box.whole(shape) or not shape:
        return ""
    return f". If they hold different parts, {what} is missing from rank_offsets instead"


def _numbered(box: Box, shape: Shape) -> bool:
    """Is it one of the things that axis 0 numbers, whole but for that?"""
    return len(shape) > 1 and box.shape[0] == 1 < shape[0]


def _overlapping(case: Case) -> str:
    region = case.overlaps[0][0]
    there = [i for i, box in enumerate(case.boxes) if case.mains[i] and box.intersect(region) is not None]
    which = " and ".join(case.holder(i) for i in there[:2])
    return (
        f"different boxes share elements: {which}; do all ranks cut this tensor in the same way (same "
        "parallel sizes, same offsets, same rounding)?"
    )


def _counted_from_one(case: Case) -> str:
    """The hint where a number in the replica ids is never 0."""
    ids: list[ReplicaId] = [case.declared.replica_ids[n] for n in set(case.declared.replica.tolist())]
    rows = [(n,) if isinstance(n, int) else n for n in ids]
    columns = list(zip(*rows, strict=True)) if len({len(row) for row in rows}) == 1 else []
    for place, column in enumerate(columns):
        if min(column) > 0:
            where = f"number {place} of the replica_id" if len(columns) > 1 else "the replica_id"
            return (
                f". At the lowest, {where} is {min(column)}: are copies counted from 1? Or is this held by some ranks "
                "only, and declared by megackpt.sharded without among= these?"
            )
    return ""


def _touched(holes: Sequence[Box], held: Sequence[Box]) -> bool:
    """Does each hole touch a box that is held by replicas only?"""
    return bool(holes) and all(any(h.intersect(b) is not None for b in held) for h in holes)


def _missing_cells(case: Case) -> str | None:
    """The hint where the holes are whole cells of the grid that the declared boxes form."""
    boxes = [b for b in case.boxes if b.volume]
    shape = case.entry.meta.shape
    if not boxes or not shape:
        return None
    cell = tuple(max(b.shape[a] for b in boxes) for a in range(len(shape)))
    missing = 0
    for hole in case.holes:
        aligned = all(
            o % c == 0 and (e % c == 0 or e == s)
            for o, e, c, s in zip(hole.offset, hole.stop, cell, shape, strict=True)
        )
        if not aligned:
            return None
        missing += math.prod(-(-e // c) for e, c in zip(hole.shape, cell, strict=True))
    one, many = ("object", "objects") if case.entry.meta.is_object else ("cell", "cells")
    size = "" if case.entry.meta.is_object else f" of {numbers(cell)} elements"
    if not missing:
        return None
    first = case.holes[0]
    if missing == 1:
        place = numbers([o // c for o, c in zip(first.offset, cell, strict=True)])
        text = f"exactly one {one}{size}, number {place} of the grid, is missing; a rank did not declare it"
    else:
        text = f"{missing} {many}{size} are missing"
    if len(shape) > 1 and cell[0] == 1 and first.shape[1:] == shape[1:]:
        last = first.stop[0] - 1
        which = f"number {last}" if first.shape[0] == 1 else f"numbers {first.offset[0]} to {last}"
        return f"{text} (axis 0 counts layers: is a pipeline stage missing, or does none claim {which}?)"
    return text + " (do all ranks take part, all pipeline stages and tensor-parallel ranks?)"


def _gap(case: Case) -> str:
    text = "the declared boxes leave elements out"
    hole = case.holes[0] if case.holes else None
    beside = [
        case.holder(i)
        for i, box in enumerate(case.boxes[:16])
        if hole is not None and len(hole.shape) == 1 and (box.stop == hole.offset or box.offset == hole.stop)
    ]
    if len(beside) == 2:
        return f"{text}, between {beside[0]} and {beside[1]}; does one compute another length or start than the other?"
    return text + "; is the global shape larger than what the ranks hold together?"


def conflict_hint(declared: Declarations, most: Way, fewest: Way) -> str:
    """Of a key that is declared in several ways: ``fewest`` ranks do it unlike ``most``."""
    one, other = most.meta, fewest.meta
    where = named(fewest.ranks)
    if set(most.ranks) & set(fewest.ranks):
        return (
            f"{where} declare{'s' * (len(fewest.ranks) == 1)} it in both ways; do two models, or two parts of the "
            "state, share one prefix? Give each its own (add_prefix_for_sharding)"
        )
    if one.is_object != other.is_object:
        what = "an object" if other.is_object else "a tensor"
        return f"the key names a tensor and an object: {what} on {where} only; rename one of them, or declare it alike"
    if one.is_object:
        return f"the grids of objects differ; is their size (that of a group of ranks, say) another one on {where}?"
    if one.shape == other.shape:
        return f"only the dtype differs; is the tensor cast on {where} only?"
    if len(one.shape) != len(other.shape):
        short, long = sorted((one.shape, other.shape), key=len)
        if long[len(long) - len(short) :] == short:
            return f"the shapes differ by leading axes; does prepend_axis_num differ on {where}?"
        return f"the numbers of dimensions differ; look at what is declared on {where}"
    pieces = [declared.boxes.row(int(way.rows[0]), len(one.shape)).shape for way in (most, fewest)]
    return _shapes_hint((one.shape, other.shape), (pieces[0], pieces[1]), where)


def _shapes_hint(wholes: tuple[Shape, Shape], pieces: tuple[Shape, Shape], where: str) -> str:
    """Of two global shapes of as many axes, by the shapes of the pieces that some rank holds of each."""
    (one, other), (mine, its) = wholes, pieces
    counts = [
        tuple(w // p if p else 0 for w, p in zip(*pair, strict=True)) for pair in ((one, mine), (other, its))
    ]
    axes = [a for a in range(len(one)) if one[a] != other[a]]
    if mine == its and sorted(counts[0]) == sorted(counts[1]):
        return (
            f"the pieces are alike, {numbers(its)}, but cut along another axis on {where}; is the axis in "
            "rank_offsets wrong there?"
        )
    if one == other[::-1]:
        return f"one shape is the other transposed; is the weight transposed on {where}?"
    if mine == its:
        told = ", ".join(f"{counts[1][a]} pieces along axis {a} instead of {counts[0][a]}" for a in axes)
        return (
            f"the pieces are alike, {numbers(its)}, but on {where} there are {told}; is the number of fragments (the "
            "tensor-parallel size) in rank_offsets wrong there, or the rank missing?"
        )
    if counts[0] == counts[1]:
        told = ", ".join(f"{its[a]} instead of {mine[a]} along axis {a}" for a in axes)
        return (
            f"the pieces differ in size: {told} on {where}. If they are meant to be of one size, is one padded (a "
            "vocabulary) and the other not? If not, from_rank_offsets cannot say it: give global_shape and "
            "global_offset, with axis_fragmentations=None"
        )
    if len(axes) == 1 and _multiple(one[axes[0]], other[axes[0]]):
        return (
            "one global shape is a multiple of the other; is a local shape given as global one, or the "
            f"rank missing from rank_offsets, on {where}?"
        )
    return f"look at what is declared on {where}; the same model must be built on all ranks"


def _multiple(a: int, b: int) -> bool:
    small, large = sorted((a, b))
    return small > 0 and large % small == 0


def shape_text(meta: TensorMeta) -> str:
    return f"objects {numbers(meta.shape)}" if meta.is_object else numbers(meta.shape)


def numbers(values: Iterable[int]) -> str:
    return str(tuple(int(v) for v in values))
