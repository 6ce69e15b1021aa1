"""Error texts about coverage: the region, the ranks that declare it, and the likely cause.

Used for tensors that are known to be wrong. Slower than the check, but bounded: a few keys,
regions and ranks are named, the others counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from megackpt.errors import join_truncated, name_ranks
from megackpt.planning.box import Box, Boxes, Int64
from megackpt.planning.manifest import Declarations, TensorMeta
from megackpt.planning.tiling import miscounted

EXPLAINED = 20
"""Problems with a paragraph; the others have a line."""
REGIONS = 4
"""Regions of one kind named for a tensor."""
BOXES = 6
"""Declared boxes named for a tensor."""
RANKS_SHOWN = 6
"""Spans of ranks named for a box."""
_EXAMINED = 1024  # boxes of a tensor in which causes are searched


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one key. ``hint`` is the likely cause, part of ``text``."""

    key: str
    text: str
    hint: str = ""

    def __str__(self) -> str:
        return self.text


class _Shard(NamedTuple):
    """One declared box, the number of its main replicas, and the ranks that declare it.

    The ranks are those of main replicas, or all where every replica is a copy.
    """

    box: Box
    mains: int
    ranks: list[int]
    replica_ids: list[str]


class _Variant(NamedTuple):
    """One of several metas with which a key is declared."""

    meta: TensorMeta
    ranks: list[int]


def explain(
    declared: Declarations, conflicts: Mapping[str, list[int]], wrong: Sequence[int]
) -> list[Problem]:
    """A problem for each key with several metas, and for each tensor that is not tiled.

    ``conflicts`` and ``wrong`` hold numbers of tensors. EXPLAINED of them get a paragraph.
    """
    problems = []
    chosen = _chosen(list(conflicts), EXPLAINED)
    for i, (key, numbers) in enumerate(conflicts.items()):
        if i in chosen:
            problems.append(_explain_conflict(declared, numbers))
        else:
            problems.append(Problem(key, f"{key!r} is declared in several ways"))
    names = [declared.tensors[number].key for number in wrong]
    chosen = _chosen(names, EXPLAINED - len(chosen))
    for i, number in enumerate(wrong):
        if i in chosen:
            problems.append(_explain_tensor(declared, number))
        else:
            shape = _shape_text(declared.tensors[number].meta)
            text = (
                f"{names[i]!r} is not covered: the main replicas do not tile {shape}."
            )
            problems.append(Problem(names[i], text))
    return problems


def join_problems(problems: Sequence[Problem]) -> str:
    """EXPLAINED paragraphs, each hint once for keys that are alike; the others counted."""
    lines: list[str] = []
    seen: set[tuple[str, str]] = set()
    rest: dict[str, list[str]] = {}
    for problem in problems:
        pattern = key_pattern(problem.key)
        new = problem.hint and (pattern, problem.hint) not in seen
        if new and len(seen) < EXPLAINED:
            seen.add((pattern, problem.hint))
            lines.append(problem.text)
        else:
            rest.setdefault(pattern, []).append(problem.key)
    patterns = list(rest.items())
    for pattern, keys in patterns[:EXPLAINED]:
        if len(keys) == 1:
            lines.append(f"and 1 more key {keys[0]!r}")
            continue
        named = ", ".join(map(repr, keys[:3]))
        more = ", ..." if len(keys) > 3 else ""
        lines.append(f"and {len(keys)} more keys like {pattern!r}: {named}{more}")
    left = sum(len(keys) for _, keys in patterns[EXPLAINED:])
    if left:
        lines.append(f"and {left} more keys of other kinds")
    return "\n".join(lines)


def key_pattern(key: str) -> str:
    """``decoder.layers.*.mlp.fc1.weight``: the same for keys that differ in numbers only."""
    return re.sub(r"\b[0-9]+\b", "*", key)


def _chosen(keys: Sequence[str], count: int) -> set[int]:
    """The positions of the keys to explain: all patterns first, three of a pattern at most."""
    seen: Counter[str] = Counter()
    rounds: list[list[int]] = [[], [], []]
    for i, key in enumerate(keys):
        pattern = key_pattern(key)
        if seen[pattern] < len(rounds):
            rounds[seen[pattern]].append(i)
        seen[pattern] += 1
    return set([i for found in rounds for i in found][:count])


def _explain_tensor(declared: Declarations, number: int) -> Problem:
    key, meta = declared.tensors[number]
    mine = declared.take(np.flatnonzero(declared.tensor == number))
    mains = mine.boxes.take(np.flatnonzero(mine.main))
    regions = list(islice(miscounted(mains, meta.shape), 16 * REGIONS))
    holes = [box for box, count in regions if not count]
    overlaps = [(box, count) for box, count in regions if count]
    shards, others = _nearest_shards(mine, meta, [box for box, _ in regions])
    whole, shape = Box.whole(meta.shape), _shape_text(meta)
    outside = [shard.box for shard in shards if not whole.contains(shard.box)]

    findings = [f"{box} lies outside of {shape}" for box in outside[:REGIONS]]
    findings += [f"{hole} of {shape} has no main replica" for hole in holes[:REGIONS]]
    for box, count in overlaps[:REGIONS]:
        findings.append(f"{box} of {shape} has {count} main replicas")
    if not findings:
        findings.append(f"no rank holds any part of {shape} as main replica")
    if max(len(outside), len(holes), len(overlaps)) > REGIONS:
        findings.append("and there are more such regions")

    holders = []
    for shard in shards[:BOXES]:
        text = f"{name_ranks(shard.ranks, RANKS_SHOWN)} {shard.box}"
        if not shard.mains:
            ids = join_truncated(sorted(set(shard.replica_ids)), 3, ", ")
            text += f" (replica_id {ids})"
        holders.append(text)
    others += len(shards) - len(holders)
    if others:
        holders.append(f"and {others} more boxes")
    hint = _hint(key, shards, bool(outside), holes, bool(overlaps))
    text = (
        f"{key!r} is not covered: {'; '.join(findings)}.\n"
        f"  declared: {'; '.join(holders)}\n"
        f"  hint: {hint}"
    )
    return Problem(key, text, hint)


def _nearest_shards(
    mine: Declarations, meta: TensorMeta, regions: Sequence[Box]
) -> tuple[list[_Shard], int]:
    """The declared boxes of one tensor, nearest to the wrong regions first; how many more."""
    shards = mine.shards()
    ndim = len(meta.shape)
    boxes = mine.boxes.take(shards.first).widened(ndim)
    mains = np.add.reduceat(
        mine.main[shards.order].astype(np.int64), shards.bounds[:-1]
    )
    distance = _distances(boxes, regions, ndim)
    shape = np.array(meta.shape, np.int64)
    low, high = boxes.offset[:, :ndim], boxes.stop[:, :ndim]
    distance[((low < 0) | (high < low) | (high > shape)).any(axis=1)] = -1
    order = np.lexsort([*boxes.offset.T[::-1], mains == 0, distance])
    found = []
    for i in order[:_EXAMINED].tolist():
        rows = shards.rows(i)
        if mains[i]:
            rows = rows[mine.main[rows]]
        ids = [str(mine.replica_ids[n]) for n in mine.replica[rows]]
        found.append(
            _Shard(boxes.row(i, ndim), int(mains[i]), mine.rank[rows].tolist(), ids)
        )
    return found, len(order) - len(found)


def _distances(boxes: Boxes, regions: Sequence[Box], ndim: int) -> Int64:
    """How far each box is from the nearest of the first regions; 0 = it touches one."""
    nearest = np.full(len(boxes), 1 << 62, np.int64)
    for region in regions[: 2 * REGIONS]:
        low, high = np.array(region.offset, np.int64), np.array(region.stop, np.int64)
        gaps = np.maximum(low - boxes.stop[:, :ndim], boxes.offset[:, :ndim] - high)
        np.minimum(nearest, np.maximum(gaps + 1, 0).sum(axis=1), out=nearest)
    return nearest


def _hint(
    key: str, shards: Sequence[_Shard], outside: bool, holes: list[Box], overlaps: bool
) -> str:
    """The likely cause; of several, the one that explains the others."""
    if outside:
        return (
            "is the global shape that of one rank, or does rank_offsets hold the global rank "
            "instead of the rank within its group, or an index counted from 1?"
        )
    for shard in shards:
        if shard.mains > 1 and shard.box.volume:
            return _hint_of_doubled(key, shard, bool(holes))
    if overlaps:
        return (
            "different boxes share elements; do all ranks cut this tensor in the same way "
            "(same parallel sizes, offsets and rounding)?"
        )
    # Without holes the tensor has no elements, and no rank declares it as main replica.
    copies = [shard.box for shard in shards if not shard.mains]
    for hole in holes:
        if all(hole.intersect(box) is None for box in copies):
            return (
                "no rank declares the region; is a rank or a pipeline stage missing, or is the "
                "global shape larger than what the ranks hold together?"
            )
    return (
        "every replica of the region has a non-zero replica_id; exactly one rank must declare "
        "it with replica_id 0 (or all zeros). Do only some ranks hold it, declared by "
        "megackpt.sharded without among=?"
    )


def _hint_of_doubled(key: str, shard: _Shard, holes: bool) -> str:
    ranks = shard.ranks
    if len(set(ranks)) == 1:
        return (
            f"rank {ranks[0]} declares the same box more than once; does its state hold the key "
            "twice (two models with one prefix)? Give each its own (add_prefix_for_sharding)"
        )
    count = "two ranks declare" if len(ranks) == 2 else f"{len(ranks)} ranks declare"
    same = f"{count} the same box as main replica; "
    if holes:
        which = "expert-parallel" if "expert" in key else "tensor-parallel"
        return f"{same}is the {which} rank missing from rank_offsets?"
    return (
        f"{same}is the replica_id forgotten? All but one of the copies need a non-zero one. If "
        "they hold different parts, the rank that tells them apart is missing from rank_offsets "
        "instead"
    )


def _explain_conflict(declared: Declarations, numbers: Sequence[int]) -> Problem:
    """The paragraph about a key with several global shapes, dtypes or kinds."""
    variants = []
    for number in sorted(numbers):
        ranks = np.unique(declared.rank[declared.tensor == number]).tolist()
        if ranks:
            variants.append(_Variant(declared.tensors[number].meta, ranks))
    key = declared.tensors[numbers[0]].key
    texts = []
    for meta, ranks in variants:
        texts.append(
            f"{name_ranks(ranks, RANKS_SHOWN)} {_shape_text(meta)} {meta.dtype}"
        )
    # The variant of the fewest ranks is probably the wrong one; of equals, the last.
    by_count = sorted(variants, key=lambda variant: -len(variant.ranks))
    hint = _hint_of_conflict(by_count[0], by_count[-1])
    text = (
        f"{key!r} is declared in {len(variants)} ways, where all ranks must agree on global "
        f"shape and dtype.\n  declared: {join_truncated(texts, BOXES)}\n  hint: {hint}"
    )
    return Problem(key, text, hint)


def _hint_of_conflict(most: _Variant, fewest: _Variant) -> str:
    one, other = most.meta, fewest.meta
    where = name_ranks(fewest.ranks, RANKS_SHOWN)
    if set(most.ranks) & set(fewest.ranks):
        verb = "declares" if len(fewest.ranks) == 1 else "declare"
        return (
            f"{where} {verb} it in both ways; do two models, or two parts of the state, share "
            "one prefix? Give each its own (add_prefix_for_sharding)"
        )
    if one.is_object or other.is_object:
        return (
            "is it declared as another kind, or with another grid of objects, on "
            f"{where}?"
        )
    if one.shape == other.shape:
        return f"only the dtype differs; is the tensor cast on {where} only?"
    return (
        f"is the number of fragments, the axis or prepend_axis_num wrong on {where}, or the "
        "local shape another one (a vocabulary that is not padded)? Pieces of different sizes "
        "need global_shape and global_offset, with axis_fragmentations=None"
    )


def _shape_text(meta: TensorMeta) -> str:
    shape = str(tuple(int(size) for size in meta.shape))
    return f"objects {shape}" if meta.is_object else shape
