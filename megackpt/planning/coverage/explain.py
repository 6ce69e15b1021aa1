"""Problems of coverage in words: which region, who declared what, and what probably went wrong.

Called for tensors that are known to be wrong; slower than judging, but bounded: few regions and few ranks
are told, the others counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from megackpt.planning.box import Box, Groups, Int64
from megackpt.planning.coverage.tiling import miscounted
from megackpt.planning.manifest import Declarations, TensorEntry, TensorMeta

REGIONS = 4  # regions of one kind told for a tensor
BOXES = 6  # declared boxes told for a tensor
LOOKED_AT = 4096  # boxes of a tensor among which these are chosen


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one key; ``text`` is the explained paragraph."""

    key: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """All that was declared about one tensor, and what is wrong with it."""

    entry: TensorEntry
    declared: Declarations  # the rows of this tensor only
    shards: Groups
    boxes: list[Box]  # of the shards, as many as may be looked at one by one
    mains: Int64  # main replicas of each shard
    outside: Int64  # shards that leave the tensor
    holes: list[Box]
    overlaps: list[tuple[Box, int]]

    @property
    def orphans(self) -> list[int]:
        """Shards held by replicas, none of which is the main one."""
        return [i for i in range(len(self.boxes)) if not self.mains[i]]

    @property
    def doubled(self) -> list[int]:
        """Shards with several main replicas."""
        return [i for i, box in enumerate(self.boxes) if self.mains[i] > 1 and box.volume]


def explain_tensor(declared: Declarations, number: int) -> Problem:
    """The paragraph about a tensor whose main replicas do not tile it."""
    case = _case(declared, number)
    shape = _shape_text(case.entry.meta)
    findings = [
        *(f"{case.boxes[i]} lies outside of {shape}" for i in case.outside[:REGIONS].tolist()),
        *(f"{hole} of {shape} has no main replica" for hole in case.holes[:REGIONS]),
        *(f"{box} of {shape} has {count} main replicas" for box, count in case.overlaps[:REGIONS]),
    ]
    if not findings:
        findings = [f"no rank holds any part of {shape} as main replica"]
    kinds = (len(case.outside), len(case.holes), len(case.overlaps))
    if any(k > REGIONS for k in kinds):
        findings.append("and there are more such regions")
    lines = [f"{case.entry.key!r} is not covered: " + "; ".join(findings) + "."]
    lines.append("  declared: " + _told(case))
    lines.append("  hint: " + _hint(case))
    return Problem(case.entry.key, "\n".join(lines))


def summary(declared: Declarations, number: int) -> Problem:
    """One line about a tensor whose main replicas do not tile it."""
    key, meta = declared.tensors[number]
    return Problem(key, f"{key!r} is not covered: the main replicas do not tile {_shape_text(meta)}.")


def explain_conflict(declared: Declarations, numbers: Sequence[int]) -> Problem:
    """The paragraph about a key that ranks declare with different global shapes, dtypes or kinds."""
    entries = [declared.tensors[n] for n in numbers]
    who: list[list[int]] = [np.unique(declared.rank[np.equal(declared.tensor, n)]).tolist() for n in numbers]
    told = [
        f"{_ranks(ranks)} {_shape_text(entry.meta)} {entry.meta.dtype}"
        for entry, ranks in zip(entries, who, strict=True)
    ]
    fewest = min(who[::-1], key=len)
    minority = _ranks(fewest)
    key = entries[0].key
    lines = [
        f"{key!r} is declared in {len(entries)} ways, where all ranks must agree on global shape and dtype.",
        "  declared: " + "; ".join(told[:BOXES]) + _more(len(told) - BOXES),
        "  hint: " + _conflict_hint([e.meta for e in entries], minority),
    ]
    return Problem(key, "\n".join(lines))


def _case(declared: Declarations, number: int) -> _Case:
    rows = np.flatnonzero(declared.tensor == number)
    entry = declared.tensors[number]
    mine = declared.take(rows)
    shards = mine.shards()
    ndim = len(entry.meta.shape)
    boxes = mine.boxes.take(shards.first)
    shape = np.array([*entry.meta.shape, *(1,) * (boxes.width - ndim)], np.int64)
    wide = boxes.widened(ndim)
    leaves = (wide.offset < 0) | (wide.shape < 0) | (wide.stop > shape)
    outside = np.flatnonzero(leaves.any(axis=1))
    main = np.flatnonzero(mine.main)
    found = list(islice(miscounted(mine.boxes.take(main), entry.meta.shape), 16 * REGIONS))
    # Boxes with too many dimensions are told with all of them.
    extra = ndim + _surplus(boxes.offset[:, ndim:], boxes.shape[:, ndim:])
    return _Case(
        entry,
        mine,
        shards,
        [wide.row(i, int(extra[i])) for i in range(min(len(wide), LOOKED_AT))],
        np.add.reduceat(mine.main[shards.order].astype(np.int64), shards.bounds[:-1]),
        outside[outside < LOOKED_AT],
        [box for box, count in found if count == 0],
        [(box, count) for box, count in found if count > 1],
    )


def _surplus(offset: Int64, shape: Int64) -> Int64:
    """How many of the axes beyond a tensor's own each box really uses."""
    used = (offset != 0) | (shape != 1)
    if not used.shape[1]:
        return np.zeros(len(used), np.int64)
    return np.where(used.any(axis=1), used.shape[1] - used[:, ::-1].argmax(axis=1), 0).astype(np.int64)


def _told(case: _Case) -> str:
    """Who declared which box: first those that touch what is wrong, then main replicas, then the others."""
    wrong = [*case.holes[:REGIONS], *(box for box, _ in case.overlaps[:REGIONS])]
    outside = set(case.outside.tolist())

    def order(i: int) -> tuple[bool, bool, int]:
        box = case.boxes[i]
        touches = i in outside or any(
            len(box.shape) == len(other.shape) and box.intersect(other) is not None for other in wrong
        )
        return not touches, not case.mains[i], i

    chosen = sorted(range(len(case.boxes)), key=order)[:BOXES]
    told = [_holders(case, i) for i in chosen]
    return "; ".join(told) + _more(len(case.shards) - len(chosen), "boxes")


def _holders(case: _Case, shard: int) -> str:
    rows = case.shards.rows(shard)
    main = case.declared.main[rows]
    box = case.boxes[shard]
    if main.any():
        return f"{_ranks(case.declared.rank[rows[main]].tolist())} {box}"
    replicas = sorted({str(case.declared.replica_ids[n]) for n in case.declared.replica[rows]})
    ids = ", ".join(replicas[:3]) + _more(len(replicas) - 3)
    return f"{_ranks(case.declared.rank[rows].tolist())} {box} (replica_id {ids})"


def _hint(case: _Case) -> str:
    """The likely cause. The order matters: the first that fits is the most telling."""
    shape = case.entry.meta.shape
    if len(case.outside):
        return _outside_hint([case.boxes[i] for i in case.outside.tolist()], shape)
    if case.doubled:
        return _doubled_hint(case)
    if case.overlaps:
        return (
            "different boxes share elements; do all ranks cut this tensor in the same way (same parallel "
            "sizes, same offsets)?"
        )
    if case.orphans and not case.mains.any():
        return (
            "every replica has a non-zero replica_id; exactly one rank must declare each box with "
            "replica_id 0 (or all zeros)"
        )
    cells = _missing_cells(case)
    if _fills(case.holes, [case.boxes[i] for i in case.orphans]):
        return (
            "the region is held, but every replica of it has a non-zero replica_id; exactly one rank must "
            "declare it with replica_id 0 (or all zeros)"
        )
    return cells or (
        "the declared boxes leave elements out; is the global shape larger than what the ranks hold together?"
    )


def _outside_hint(boxes: list[Box], shape: tuple[int, ...]) -> str:
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
    return "is the global shape that of one rank, or the rank in rank_offsets that of another group?"


def _doubled_hint(case: _Case) -> str:
    shard = case.doubled[0]
    rows = case.shards.rows(shard)
    ranks = case.declared.rank[rows[case.declared.main[rows]]]
    count = "two ranks declare" if len(ranks) == 2 else f"{len(ranks)} ranks declare"
    if len(np.unique(ranks)) == 1:
        return f"rank {ranks[0]} declares the same box more than once; does its state hold the key twice?"
    if case.holes:
        return f"{count} the same box as main replica; is the tensor-parallel rank missing from rank_offsets?"
    return (
        f"{count} the same box as main replica; is the replica_id forgotten? All but one of the copies "
        "need a non-zero one"
    )


def _missing_cells(case: _Case) -> str | None:
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
    size = "" if case.entry.meta.is_object else f" of {_numbers(cell)} elements"
    if missing == 1:
        first = case.holes[0].offset
        place = _numbers([o // c for o, c in zip(first, cell, strict=True)])
        text = f"exactly one {one}{size}, number {place} of the grid, is missing; a rank did not declare it"
    else:
        text = f"{missing} {many}{size} are missing" if missing else ""
    if not text:
        return None
    if len(shape) > 1 and cell[0] == 1 and case.holes[0].shape[1:] == shape[1:]:
        return text + " (axis 0 counts layers: is a pipeline stage missing?)"
    return text + " (do all ranks take part, all pipeline stages and tensor-parallel ranks?)"


def _fills(holes: list[Box], held: list[Box]) -> bool:
    """Does each hole touch a box that is held by replicas only?"""
    return bool(holes) and all(any(h.intersect(b) is not None for b in held) for h in holes)


def _conflict_hint(metas: list[TensorMeta], minority: str) -> str:
    one, *others = metas
    for other in others:
        if one.is_object != other.is_object:
            return f"the key names a tensor and an object; rename one of them ({minority})"
        if one.shape == other.shape:
            return f"only the dtype differs; is the tensor cast on {minority} only?"
        if len(one.shape) != len(other.shape):
            short, long = sorted((one.shape, other.shape), key=len)
            if long[len(long) - len(short) :] == short:
                return f"the shapes differ by leading axes; does prepend_axis_num differ on {minority}?"
            return f"the numbers of dimensions differ; look at what {minority} declares"
        if one.shape == other.shape[::-1]:
            return f"one shape is the other transposed; is the weight transposed on {minority}?"
        differing = [(a, b) for a, b in zip(one.shape, other.shape, strict=True) if a != b]
        if len(differing) == 1 and _multiple(*differing[0]):
            return (
                "one global shape is a multiple of the other; is a local shape given as global one, or the "
                f"rank missing from rank_offsets, on {minority}?"
            )
    return f"look at what {minority} declares; the same model must be built on all ranks"


def _multiple(a: int, b: int) -> bool:
    small, large = sorted((a, b))
    return small > 0 and large % small == 0


def _shape_text(meta: TensorMeta) -> str:
    return f"objects {_numbers(meta.shape)}" if meta.is_object else _numbers(meta.shape)


def _numbers(values: Iterable[int]) -> str:
    return str(tuple(int(v) for v in values))


def _more(count: int, what: str = "") -> str:
    return f", and {count} more{' ' if what else ''}{what}" if count > 0 else ""


def _ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 0-7, 16`` for many."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    if len(spans) == 1 and spans[0][0] == spans[0][1]:
        return f"rank {spans[0][0]}"
    told = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in spans]
    return "ranks " + ", ".join(told[:6]) + _more(len(told) - 6)
