"""Fingerprints change with all that a plan depends on; plans are found again in what was written with them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from megackpt.checkpoint import decode_index, encode_index
from megackpt.planning.box import Box
from megackpt.planning.cache import PlanCache, Resumed, fingerprint, joined
from megackpt.planning.manifest import (
    OBJECT,
    Declaration,
    Declarations,
    Manifest,
    SavePlan,
    ShardId,
    TensorMeta,
)
from megackpt.planning.save_plan import SavePolicy, Wrote, plan_again, plan_save, tiled

Rows = list[Declaration]
BASE = Declaration(ShardId("w", Box((0, 2), (4, 2))), TensorMeta((4, 8), "float32"), (0, 0, 1), False, 32, 3)


def of(*rows: Declaration, domain: int = 0) -> Declarations:
    return Declarations.of(rows, domain)


def test_equal_declarations_have_equal_fingerprints() -> None:
    assert fingerprint(of(BASE), "torch_dist") == fingerprint(of(replace(BASE)), "torch_dist")
    # Known from an earlier run: the same in every process.
    assert fingerprint(of(BASE), "torch_dist") == 9041482286358065389
    assert 0 <= fingerprint(of()) < 2**63


def test_everything_counts() -> None:
    different = [
        of(BASE),
        of(),
        of(BASE, BASE),
        of(BASE, domain=1),
        of(replace(BASE, shard=ShardId("v", BASE.shard.box))),
        of(replace(BASE, shard=ShardId("w", Box((2, 0), (4, 2))))),
        of(replace(BASE, shard=ShardId("w", Box((0, 2), (2, 4))))),
        of(replace(BASE, meta=TensorMeta((8, 4), "float32"))),
        of(replace(BASE, meta=TensorMeta((4, 8), "int32"))),
        of(replace(BASE, replica_id=0)),
        of(replace(BASE, flexible=True)),
        of(replace(BASE, nbytes=33)),
        of(replace(BASE, rank=4)),
    ]
    assert len({fingerprint(d) for d in different}) == len(different)
    assert fingerprint(of(BASE), "zarr") != fingerprint(of(BASE), "torch_dist")


def test_names_do_not_run_into_one_another() -> None:
    def named(*keys: str) -> int:
        return fingerprint(of(*(replace(BASE, shard=ShardId(k, BASE.shard.box)) for k in keys)))

    assert (
        len({named("ab", "c"), named("a", "bc"), named("abc"), named("c", "ab"), named("a\ud800", "c")}) == 5
    )


def test_ranks_derive_the_same_save_only_from_one_round_used_as_often() -> None:
    (plan,), manifest = plan_save([of(replace(BASE, replica_id=0))], validate=False)
    coordinator, other = PlanCache(), PlanCache()
    assert coordinator.get(1) is None
    coordinator.put(1, "round 1", plan, manifest)
    other.put(7, "round 1", plan)

    def ids() -> tuple[str, str]:
        mine, theirs = coordinator.get(1), other.get(7)
        assert mine is not None
        assert theirs is not None
        return mine.next_save_id(), theirs.next_save_id()

    first, second = ids(), ids()
    assert first[0] == first[1] != second[0] == second[1]
    ahead = other.get(7)
    assert ahead is not None
    ahead.next_save_id()
    third = ids()
    assert third[0] != third[1]
    coordinator.put(1, "round 2", plan, manifest)
    other.put(7, "round 3", plan)
    fourth = ids()
    assert fourth[0] != fourth[1]


def test_threads_never_share_an_id() -> None:
    (plan,), _ = plan_save([of()])
    cache = PlanCache()
    cache.put(1, "round", plan)
    held = cache.get(1)
    assert held is not None
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: held.next_save_id(), range(400)))
    assert len(set(ids)) == 400


def test_the_plan_unused_for_longest_makes_room() -> None:
    (plan,), _ = plan_save([of()])
    cache = PlanCache(size=2)
    for number in (1, 2):
        cache.put(number, f"round {number}", plan)
    cache.get(1)
    cache.put(3, "round 3", plan)
    assert [cache.get(n) is not None for n in (1, 2, 3)] == [True, False, True]
    with pytest.raises(ValueError, match="at least 1"):
        PlanCache(0)


# ---- plans found again in what was written


def stored(manifest: Manifest) -> Manifest:
    """As an index gives it back: sorted by tensor."""
    named = replace(manifest, backend=("any", 1), encoding="native")
    return decode_index(encode_index(named, {}))[0]


def same(found: SavePlan, planned: SavePlan) -> bool:
    width = max(found.boxes.width, planned.boxes.width)
    a, b = found.boxes.widened(width), planned.boxes.widened(width)
    columns = [(found.tensor, planned.tensor), (found.source, planned.source)]
    equal = all(np.array_equal(x, y) for x, y in [*columns, (a.offset, b.offset), (a.shape, b.shape)])
    tables = (found.rank, found.tensors, found.grids) == (planned.rank, planned.tensors, planned.grids)
    return equal and tables


@st.composite
def worlds(draw: st.DrawFn) -> list[Declarations]:
    """Tensors in shards of any lengths along both axes, objects, and an empty one; replicas here and there, in any
    order."""
    ranks = draw(st.integers(1, 4))
    rows: list[Rows] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(1, 4))):
        is_object = number == 3
        shape = draw(st.tuples(st.integers(1, 12), st.integers(0 if number == 2 else 1, 6)))
        meta = TensorMeta(shape, OBJECT if is_object else draw(st.sampled_from(["float32", "int8"])))
        cuts = [sorted({0, n, *draw(st.sets(st.integers(0, n), max_size=3))}) for n in shape]
        lines = [range(n + 1) if is_object else cut for n, cut in zip(shape, cuts, strict=True)]
        spans = [list(pairwise(line)) or [(0, 0)] for line in lines]
        for a, b in ((a, b) for a in spans[0] for b in spans[1]):
            box = Box((a[0], b[0]), (a[1] - a[0], b[1] - b[0]))
            holders = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=3))
            for copy, rank in enumerate(holders):
                nbytes = box.volume * meta.itemsize or 1024 * is_object
                row = Declaration(ShardId(f"t{number}", box), meta, (0, copy), False, nbytes, rank)
                rows[rank].append(row)
    return [
        Declarations.of(draw(st.permutations(part)), draw(st.integers(0, ranks - 1)) if r % 2 else 0)
        for r, part in enumerate(rows)
    ]


def shares_cells(plans: Sequence[SavePlan]) -> bool:
    """Is any item a piece of a cell?"""
    for item in (item for plan in plans for item in plan.rows() if item.grid):
        box, whole = item.shard.box, item.meta.shape
        low = [o // g * g for o, g in zip(box.offset, item.grid, strict=True)]
        cell = tuple(min(g, n - o) for g, n, o in zip(item.grid, whole, low, strict=True))
        if (box.offset, box.shape) != (tuple(low), cell):
            return True
    return False


@settings(max_examples=300, deadline=None)
@given(worlds(), st.booleans(), st.booleans(), st.none() | st.integers(1, 60))
def test_the_plan_of_each_rank_stands_in_what_it_wrote(
    parts: list[Declarations], balance: bool, gridded: bool, limit: int | None
) -> None:
    policy = SavePolicy(balance, gridded, limit, cell_bytes=24)
    plans, manifest = plan_save(parts, policy)
    known = stored(manifest)
    assert tiled(known, len(parts), thorough=True)
    numbers = manifest.numbers()
    for rank, (declared, planned) in enumerate(zip(parts, plans, strict=True)):
        found = plan_again(declared, Wrote.of(known, rank, declared.tensors), policy)
        if found is None:
            assert gridded
            assert shares_cells(plans)  # which a format stores whole: who wrote them is not told
            continue
        assert same(found, planned)
        assert found.numbers is not None
        assert found.numbers.tolist() == [numbers[item.shard.key] for item in planned.rows()]


def test_plans_on_a_grid_of_the_shards_are_always_found() -> None:
    """Also of a rank that writes nothing, and in cells that are smaller than the shards."""
    meta = TensorMeta((8, 6), "float32")
    boxes = [Box((a, b), (4, 3)) for a in (0, 4) for b in (0, 3)]
    parts = [
        of(*(Declaration(ShardId("w", box), meta, int(rank > 0), False, 48, rank) for box in boxes))
        for rank in range(6)
    ]
    for limit in (None, 24, 5):
        policy = SavePolicy(gridded=True, max_item_bytes=limit)
        plans, manifest = plan_save(parts, policy)
        for rank, declared in enumerate(parts):
            found = plan_again(declared, Wrote.of(stored(manifest), rank, declared.tensors), policy)
            assert found is not None
            assert same(found, plans[rank])


def wrote(parts: Sequence[Declarations], rank: int = 0) -> Wrote:
    return Wrote.of(stored(plan_save(parts, validate=False)[1]), rank, parts[rank].tensors)


def test_what_was_not_written_so_is_not_told() -> None:
    row = replace(BASE, replica_id=0, rank=0, shard=ShardId("w", Box((0, 0), (4, 8))))
    held, policy = of(row), SavePolicy()
    assert plan_again(held, wrote([held]), policy) is not None
    other = replace(row, shard=ShardId("v", row.shard.box))
    halves = [replace(row, shard=ShardId("w", Box((a, 0), (2, 8))), nbytes=64) for a in (0, 2)]
    twice = [row, replace(halves[0])]  # nobody checked: elements that stand in two shards
    for declared, written in (
        (of(other), of(row)),  # another key
        (of(*halves), of(row)),  # cut otherwise
        (of(row), of(*halves)),
        (of(halves[0]), of(*halves)),  # more was written than there is
    ):
        assert plan_again(declared, wrote([written]), policy) is None
    assert plan_again(of(*twice), wrote([of(*twice)]), policy) is not None
    grid = SavePolicy(gridded=True, max_item_bytes=64)
    assert plan_again(of(*twice), Wrote.of(stored(plan_save([held], grid)[1]), 0, ()), grid) is None


def test_a_checkpoint_of_others_is_not_resumed() -> None:
    row = replace(BASE, replica_id=0, rank=0, shard=ShardId("w", Box((0, 0), (4, 8))))
    manifest = stored(plan_save([of(row)])[1])
    assert Resumed.of(manifest, "load", 0, 1, ()) is None  # nobody told fingerprints
    told = replace(manifest, fingerprints=joined([5]))
    assert Resumed.of(told, "load", 0, 2, ()) is None
    assert Resumed.of(replace(manifest, fingerprints=joined([5, None])), "load", 0, 2, ()) is None
    found = Resumed.of(stored(told), "load", 0, 1, ())
    assert found is not None
    assert (found.fingerprint, found.plan_id) == (5, "load")
    assert found.manifest is not None
    assert set(found.manifest.chunks.file.tolist()) == {-1}


def test_holes_and_unknown_writers_are_seen() -> None:
    rows = [
        replace(BASE, replica_id=0, rank=r, shard=ShardId("w", Box((2 * r, 0), (2, 8)))) for r in range(2)
    ]
    whole = stored(plan_save([of(row) for row in rows])[1])
    half = stored(plan_save([of(rows[0])], validate=False)[1])
    assert tiled(whole, 2, thorough=True)
    assert not tiled(whole, 1, thorough=True)
    assert not tiled(half, 2, thorough=True)
    assert tiled(half, 2, thorough=False)


def test_what_was_loaded_is_tried_once_and_only_for_what_it_declared() -> None:
    row = replace(BASE, replica_id=0, rank=0, shard=ShardId("w", Box((0, 0), (4, 8))))
    manifest = replace(stored(plan_save([of(row)])[1]), fingerprints=joined([5]))
    cache = PlanCache()
    cache.resumed = Resumed.of(manifest, "load 1", 0, 1, ())

    def derive(resumed: Resumed) -> SavePlan | None:
        return plan_again(of(row), resumed.wrote, SavePolicy())

    assert cache.derived(4, derive) is None
    found = cache.derived(5, derive)
    assert found is not None
    assert found is cache.get(5)
    assert found.plan_id == "load 1"
    assert cache.resumed is None
    cache.resumed = Resumed.of(manifest, "load 2", 0, 1, ())
    cache.put(5, "planned", found.plan)  # it is known by now: nothing is kept any longer
    assert cache.resumed is None


def test_threads_that_derive_one_plan_share_its_count() -> None:
    row = replace(BASE, replica_id=0, rank=0, shard=ShardId("w", Box((0, 0), (4, 8))))
    planned, manifest = plan_save([of(row)])
    cache = PlanCache()
    resumed = cache.resumed = Resumed.of(
        replace(stored(manifest), fingerprints=joined([5])), "load", 0, 1, ()
    )

    def late(_: Resumed) -> SavePlan:
        """Another thread has looked before this one was done."""
        cache.resumed = resumed
        other = cache.derived(5, lambda _: planned[0])
        assert other is not None
        ids.append(other.next_save_id())
        return planned[0]

    ids: list[str] = []
    found = cache.derived(5, late)
    assert found is not None
    assert found.next_save_id() not in ids


def test_what_another_thread_takes_away_meanwhile_is_no_error() -> None:
    (plan,), manifest = plan_save([of(replace(BASE, replica_id=0))], validate=False)

    class Taken(PlanCache):
        """Of which another thread takes what was loaded as soon as this one has looked."""

        @property
        def resumed(self) -> Resumed | None:
            return left.pop() if left else None

        @resumed.setter
        def resumed(self, _: Resumed | None) -> None:
            left.clear()

    left: list[Resumed] = []
    cache = Taken()
    told = Resumed.of(replace(stored(manifest), fingerprints=joined([5])), "load", 0, 1, ())
    assert told is not None
    left.append(told)
    assert cache.put(5, "round", plan) is cache.get(5)
