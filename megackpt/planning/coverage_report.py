"""Error texts about coverage: the region, the ranks that declare it, and the likely cause.

Used for tensors that are known to be wrong. Slower than the check, but bounded: a few keys, regions
and ranks are named, the rest is counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np

from megackpt.errors import join_truncated, name_ranks
from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import Declarations, TensorMeta
from megackpt.planning.tiling import miscounted

EXPLAINED = 20
"""Kinds of keys with a paragraph, about the first key. Keys of a kind differ in numbers only."""
REGIONS = 4
"""Regions of one sort named for a tensor."""
BOXES = 6
"""Declared boxes named for a tensor."""
RANKS_SHOWN = 6
"""Spans of ranks named for a box."""
_SHARED_PREFIX = (
    "{} declared it more than once; does the state hold the key twice, or do two models share "
    "one prefix? Give each its own (add_prefix_for_sharding)"
)


def explain(
    declared: Declarations, wrong: Mapping[str, Sequence[int]]
) -> dict[str, str]:
    """A text for each key; ``wrong``: key -> the numbers of its tensors.

    A key with several tensors is declared in several ways. The first key of each of EXPLAINED
    kinds gets a paragraph.
    """
    problems = {}
    seen: set[str] = set()
    for key, numbers in wrong.items():
        text = f"{key!r} is not covered"
        pattern = key_pattern(key)
        if pattern not in seen and len(seen) < EXPLAINED:
            seen.add(pattern)
            if len(numbers) > 1:
                text = _explain_conflict(declared, numbers)
            else:
                text = _explain_tensor(declared, numbers[0])
        problems[key] = text
    return problems


def join_problems(problems: Mapping[str, str]) -> str:
    """One text: the first problem of each of EXPLAINED kinds of keys, and a count of the rest."""
    kinds: dict[str, list[str]] = {}
    for key in problems:
        kinds.setdefault(key_pattern(key), []).append(key)
    lines = []
    others = 0
    for number, (pattern, found) in enumerate(kinds.items()):
        if number >= EXPLAINED:
            others += len(found)
            continue
        lines.append(problems[found[0]])
        keys = list(map(repr, found[1:]))
        if keys:
            named = join_truncated(keys, 3, ", ")
            lines.append(f"and {len(keys)} more keys like {pattern!r}: {named}")
    if others:
        lines.append(f"and {others} more keys of other kinds")
    return "\n".join(lines)


def key_pattern(key: str) -> str:
    """``decoder.layers.*.mlp.fc1.weight``: the same for keys that differ in numbers only."""
    return re.sub(r"\b[0-9]+\b", "*", key)


def _explain_tensor(declared: Declarations, number: int) -> str:
    key, meta = declared.tensors[number]
    mine = declared.take(np.flatnonzero(declared.tensor == number))
    regions = list(islice(miscounted(mine.boxes.take(mine.main), meta.shape), 64))
    shards = mine.shards
    mains = mine.mains
    ndim = len(meta.shape)
    boxes = mine.boxes.take(shards.first).widened(ndim)
    boxes = Boxes(boxes.offset[:, :ndim], boxes.shape[:, :ndim])
    low = boxes.offset
    high = boxes.stop
    whole = np.array(meta.shape, np.int64)
    outside = ((low < 0) | (high < low) | (high > whole)).any(axis=1)
    near = np.zeros(len(boxes), np.int64)  # 2: meets one of the regions, 1: touches it
    for region, _ in regions[:REGIONS]:
        touches = ((low <= region.stop) & (high >= region.offset)).all(axis=1)
        meets = ((low < region.stop) & (high > region.offset)).all(axis=1)
        near = np.maximum(near, touches.astype(np.int64) + meets)
    order = np.lexsort([*low.T[::-1], mains == 0, -near, ~outside])

    shape = _shape_text(meta)
    leaving = []
    holes = []
    overlaps = []
    for i in np.flatnonzero(outside)[: REGIONS + 1].tolist():
        box = boxes.row(i, ndim)
        leaving.append(f"{box} lies outside of {shape}")
    for region, count in regions:
        if count:
            overlaps.append(f"{region} of {shape} has {count} main replicas")
        else:
            holes.append(f"{region} of {shape} has no main replica")
    findings = [*leaving[:REGIONS], *holes[:REGIONS], *overlaps[:REGIONS]]
    if not findings:
        findings.append(f"no rank holds any part of {shape} as main replica")
    if max(len(leaving), len(holes), len(overlaps)) > REGIONS:
        findings.append("and there are more such regions")

    holders = []
    for i in order[:BOXES].tolist():
        rows = shards.rows(i)
        if mains[i]:
            rows = rows[mine.main[rows]]
        text = (
            f"{name_ranks(mine.rank[rows].tolist(), RANKS_SHOWN)} {boxes.row(i, ndim)}"
        )
        if not mains[i]:
            ids = {str(mine.replica_ids[n]) for n in mine.replica[rows]}
            text += f" (replica_id {join_truncated(sorted(ids), 3, ', ')})"
        holders.append(text)
    if len(order) > BOXES:
        holders.append(f"and {len(order) - BOXES} more boxes")
    text = (
        f"{key!r} is not covered: {'; '.join(findings)}.\n"
        f"  declared: {'; '.join(holders)}"
    )
    if outside.any():
        hint = (
            "is the global shape that of one rank, or does rank_offsets hold the global rank "
            "instead of the rank within its group, or an index counted from 1?"
        )
    else:
        doubled = order[(mains > 1)[order] & (boxes.volume > 0)[order]]
        rows = doubled
        if len(doubled):
            rows = shards.rows(int(doubled[0]))
        hint = _cause(
            mine.rank[rows[mine.main[rows]]].tolist(), boxes.take(mains == 0), regions
        )
    if hint:
        return f"{text}\n  hint: {hint}"
    return text


def _cause(
    ranks: Sequence[int], copies: Boxes, regions: Sequence[tuple[Box, int]]
) -> str:
    """The likely cause, or "".

    ``ranks`` have the same box as main replica, ``copies`` are the boxes without one.
    """
    if len(set(ranks)) > 1:
        count = str(len(ranks))
        if len(ranks) == 2:
            count = "two"
        return (
            f"{count} ranks declare the same box as main replica; is the tensor-parallel rank "
            "missing from rank_offsets? If they hold copies, all but one need a non-zero "
            "replica_id"
        )
    if ranks:
        return _SHARED_PREFIX.format(name_ranks(ranks))
    if any(count for _, count in regions):
        return ""
    for hole, _ in regions:
        meets = (copies.offset < hole.stop) & (copies.stop > hole.offset)
        if not meets.all(axis=1).any():
            return (
                "no rank declares the region; is a rank or a pipeline stage missing, or is the "
                "global shape larger than what the ranks hold together?"
            )
    return (
        "every replica of the region has a non-zero replica_id; exactly one rank must declare "
        "it with replica_id 0 (or all zeros). Do only some ranks hold it, declared by "
        "megackpt.sharded without among=?"
    )


def _explain_conflict(declared: Declarations, numbers: Sequence[int]) -> str:
    """The paragraph about a key with several global shapes, dtypes or kinds."""
    variants = []
    for number in numbers:
        ranks = np.unique(declared.rank[declared.tensor == number]).tolist()
        if ranks:
            variants.append((declared.tensors[number].meta, ranks))
    texts = []
    for meta, ranks in variants:
        where = name_ranks(ranks, RANKS_SHOWN)
        texts.append(f"{where} {_shape_text(meta)} {meta.dtype}")
    text = (
        f"{declared.tensors[numbers[0]].key!r} is declared in {len(variants)} ways, where all "
        "ranks must agree on global shape and dtype.\n"
        f"  declared: {join_truncated(texts, BOXES)}"
    )
    # The variant of the fewest ranks is probably the wrong one; of equals, the last.
    variants.sort(key=lambda variant: -len(variant[1]))
    (one, most), (other, fewest) = variants[0], variants[-1]
    where = name_ranks(fewest, RANKS_SHOWN)
    if set(most) & set(fewest):
        return f"{text}\n  hint: {_SHARED_PREFIX.format(where)}"
    if one.shape == other.shape:
        return text
    return (
        f"{text}\n  hint: is the number of fragments, the axis or prepend_axis_num wrong on "
        f"{where}, or the local shape another one (a vocabulary that is not padded)? Pieces of "
        "different sizes need global_shape and global_offset, with axis_fragmentations=None"
    )


def _shape_text(meta: TensorMeta) -> str:
    shape = str(tuple(int(size) for size in meta.shape))
    if meta.is_object:
        return f"objects {shape}"
    return shape
