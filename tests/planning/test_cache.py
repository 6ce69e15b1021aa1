"""Fingerprints change with all that a plan depends on; plans are found again in what was written with them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from megackpt.planning.box import Box
from megackpt.planning.cache import CachedPlan, PlanCache, fingerprint
from megackpt.planning.manifest import (
    Declaration,
    Declarations,
    ShardId,
    TensorMeta,
)
from megackpt.planning.save_plan import plan_save

Rows = list[Declaration]
BASE = Declaration(
    ShardId("w", Box((0, 2), (4, 2))),
    TensorMeta((4, 8), "float32"),
    (0, 0, 1),
    False,
    32,
    3,
)


def of(*rows: Declaration, domain: int = 0) -> Declarations:
    return Declarations.of(rows, domain)


def test_equal_declarations_have_equal_fingerprints() -> None:
    assert fingerprint(of(BASE), "torch_dist") == fingerprint(
        of(replace(BASE)), "torch_dist"
    )
    # Known from an earlier run: the same in every process.
    assert fingerprint(of(BASE), "torch_dist") == 4732874455116572347
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
        return fingerprint(
            of(*(replace(BASE, shard=ShardId(k, BASE.shard.box)) for k in keys))
        )

    assert (
        len(
            {
                named("ab", "c"),
                named("a", "bc"),
                named("abc"),
                named("c", "ab"),
                named("a\ud800", "c"),
            }
        )
        == 5
    )


def test_ranks_derive_the_same_save_only_from_one_round_used_as_often() -> None:
    (plan,), manifest = plan_save([of(replace(BASE, replica_id=0))], validate=False)
    coordinator, other = PlanCache(), PlanCache()
    assert coordinator.get(1) is None
    coordinator.put(1, CachedPlan("round 1", plan, manifest))
    other.put(7, CachedPlan("round 1", plan))

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
    coordinator.put(1, CachedPlan("round 2", plan, manifest))
    other.put(7, CachedPlan("round 3", plan))
    fourth = ids()
    assert fourth[0] != fourth[1]


def test_threads_never_share_an_id() -> None:
    (plan,), _ = plan_save([of()])
    cache = PlanCache()
    cache.put(1, CachedPlan("round", plan))
    held = cache.get(1)
    assert held is not None
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: held.next_save_id(), range(400)))
    assert len(set(ids)) == 400


def test_the_plan_unused_for_longest_makes_room() -> None:
    (plan,), _ = plan_save([of()])
    cache = PlanCache(size=2)
    for number in (1, 2):
        cache.put(number, CachedPlan(f"round {number}", plan))
    cache.get(1)
    cache.put(3, CachedPlan("round 3", plan))
    assert [cache.get(n) is not None for n in (1, 2, 3)] == [True, False, True]
