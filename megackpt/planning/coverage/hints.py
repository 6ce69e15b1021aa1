"""The likely cause of a coverage problem, as one sentence that says what to check.

Only the mistakes that users make most often have a hint. The message itself gives the region, the ranks and the key.
"""

from __future__ import annotations

from collections.abc import Iterable

from megackpt.planning.coverage.cases import Case, Way, named
from megackpt.planning.manifest import TensorMeta


def hint_of(case: Case) -> str:
    """The hint for a tensor that is not covered; of several causes, the one that explains the others."""
    if case.outside:
        return (
            "is the global shape that of one rank, or does rank_offsets hold the global rank instead of the rank "
            "within its group, or an index counted from 1?"
        )
    if case.doubled:
        return _doubled(case)
    if case.overlaps:
        return (
            "different boxes share elements; do all ranks cut this tensor in the same way (same parallel sizes, "
            "offsets and rounding)?"
        )
    # Without holes, the tensor has no elements, and no rank declares it as main replica.
    orphans = case.orphans
    if all(
        any(hole.intersect(box) is not None for box in orphans) for hole in case.holes
    ):
        return (
            "every replica of the region has a non-zero replica_id; exactly one rank must declare it with "
            "replica_id 0 (or all zeros). Do only some ranks hold it, declared by megackpt.sharded without among=?"
        )
    return (
        "no rank declares the region; is a rank or a pipeline stage missing, or is the global shape larger than "
        "what the ranks hold together?"
    )


def _doubled(case: Case) -> str:
    ranks = case.ranks(case.doubled[0])
    if len(set(ranks)) == 1:
        return (
            f"rank {ranks[0]} declares the same box more than once; does its state hold the key twice (two models "
            "with one prefix)? Give each its own (add_prefix_for_sharding)"
        )
    count = "two ranks declare" if len(ranks) == 2 else f"{len(ranks)} ranks declare"
    same = f"{count} the same box as main replica; "
    if case.holes:
        which = "expert-parallel" if "expert" in case.entry.key else "tensor-parallel"
        return f"{same}is the {which} rank missing from rank_offsets?"
    return (
        f"{same}is the replica_id forgotten? All but one of the copies need a non-zero one. If they hold different "
        "parts, the rank that tells them apart is missing from rank_offsets instead"
    )


def conflict_hint(most: Way, fewest: Way) -> str:
    """The hint for a key that is declared in several ways, in one of them by the ``fewest`` ranks."""
    one, other = most.meta, fewest.meta
    where = named(fewest.ranks)
    if set(most.ranks) & set(fewest.ranks):
        return (
            f"{where} declare{'s' * (len(fewest.ranks) == 1)} it in both ways; do two models, or two parts of the "
            "state, share one prefix? Give each its own (add_prefix_for_sharding)"
        )
    if one.is_object or other.is_object:
        return f"is it declared as another kind, or with another grid of objects, on {where}?"
    if one.shape == other.shape:
        return f"only the dtype differs; is the tensor cast on {where} only?"
    return (
        f"is the number of fragments, the axis or prepend_axis_num wrong on {where}, or the local shape another "
        "one (a vocabulary that is not padded)? Pieces of different sizes need global_shape and global_offset, "
        "with axis_fragmentations=None"
    )


def shape_text(meta: TensorMeta) -> str:
    return f"objects {numbers(meta.shape)}" if meta.is_object else numbers(meta.shape)


def numbers(values: Iterable[int]) -> str:
    return str(tuple(int(v) for v in values))
