"""One writer for each shard, among its holders, with balanced bytes."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from megackpt.planning.box import Box
from megackpt.planning.manifest import Declaration, Declarations, ShardId, TensorMeta
from megackpt.planning.save_plan import assign

Holders = dict[
    str, tuple[int, list[int]]
]  # key -> bytes, ranks (the first one is the main replica)


def world(held: Holders, domains: list[int]) -> Declarations:
    parts: list[list[Declaration]] = [[] for _ in domains]
    for key, (size, ranks) in held.items():
        for copy, rank in enumerate(ranks):
            meta = TensorMeta((size,), "uint8")
            parts[rank].append(
                Declaration(
                    ShardId(key, Box((0,), (size,))), meta, copy, False, size, rank
                )
            )
    return Declarations.merge(
        [Declarations.of(rows, d) for rows, d in zip(parts, domains, strict=True)]
    )


def writers(declared: Declarations, balance: bool = True) -> dict[str, int]:
    rows = assign(declared, balance).tolist()
    assert rows == sorted(rows)
    found = [(declared.row(i).shard.key, declared.row(i).rank) for i in rows]
    assert len(dict(found)) == len(found)
    return dict(found)


# Groups within groups, as parallel layouts make them: 8 ranks, halves, quarters, single ranks.
groups = [
    list(range(8)),
    [0, 1, 2, 3],
    [4, 5, 6, 7],
    [0, 1],
    [2, 3],
    [4, 5],
    [6, 7],
    *([r] for r in range(8)),
]
nested = st.lists(st.tuples(st.integers(0, 50), st.sampled_from(groups)), max_size=40)


@given(nested, st.randoms(use_true_random=False))
def test_each_shard_once_by_a_holder_and_balanced(
    shards: list[tuple[int, list[int]]], rng: random.Random
) -> None:
    held = {
        f"k{i}": (size, rng.sample(ranks, len(ranks)))
        for i, (size, ranks) in enumerate(shards)
    }
    chosen = writers(world(held, [0] * 8))
    assert set(chosen) == set(held)
    assert all(chosen[key] in ranks for key, (_, ranks) in held.items())
    load = Counter[int]()
    for key, rank in chosen.items():
        load[rank] += held[key][0]
    # Bytes that a group alone holds must be written by its ranks: no plan can do better than the average.
    bound = max(
        sum(size for size, ranks in shards if set(ranks) <= set(g)) / len(g)
        for g in groups
    )
    assert max(load.values(), default=0) <= bound + max(
        (size for size, _ in shards), default=0
    )


@given(nested, st.randoms(use_true_random=False))
def test_the_order_of_declaration_does_not_matter(
    shards: list[tuple[int, list[int]]], rng: random.Random
) -> None:
    held = {f"k{i}": shard for i, shard in enumerate(shards)}
    keys = rng.sample(list(held), len(held))
    assert writers(world(held, [0] * 8)) == writers(
        world({k: held[k] for k in keys}, [0] * 8)
    )


def plain(held: Holders, ranks: int) -> dict[str, int]:
    """The rule, one shard after the other."""
    load = [0] * ranks
    expected = {}
    for key, (size, mine) in sorted(
        held.items(), key=lambda x: (len(x[1][1]), -x[1][0], x[0])
    ):
        expected[key] = min(mine, key=lambda r: (load[r], r))
        load[expected[key]] += size
    return expected


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sets(st.integers(0, 4), min_size=1)),
        max_size=20,
    )
)
def test_it_is_the_plain_greedy_rule(shards: list[tuple[int, set[int]]]) -> None:
    held = {f"k{i:02}": (size, sorted(ranks)) for i, (size, ranks) in enumerate(shards)}
    assert writers(world(held, [0] * 5)) == plain(held, 5)


@settings(max_examples=30)
@given(
    st.integers(2, 3),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 23)), max_size=8),
    st.randoms(use_true_random=False),
)
def test_it_is_so_where_many_sets_of_ranks_have_none_in_common(
    width: int, turns: int, alone: list[tuple[int, int]], rng: random.Random
) -> None:
    """Then all sets choose at once. Shards with one holder come before."""
    sets = [list(range(start, start + width)) for start in range(0, 24 * width, width)]
    shards = [(rng.randrange(10), rng.sample(ranks, width)) for ranks in sets * turns]
    shards += [(size, sets[number][:1]) for size, number in alone]
    held = {f"k{i:02}": shard for i, shard in enumerate(shards)}
    assert writers(world(held, [0] * 24 * width)) == plain(held, 24 * width)


def test_only_the_main_replicas_domain_writes() -> None:
    held: Holders = {
        "a": (9, [1, 0, 2, 3]),
        "b": (8, [0, 1, 2, 3]),
        "c": (1, [3, 2, 1, 0]),
    }
    chosen = writers(world(held, [0, 0, 1, 1]))
    assert chosen == {"a": 0, "b": 1, "c": 2}


def test_without_balance_the_main_replica_writes() -> None:
    held: Holders = {"a": (9, [1, 0]), "b": (8, [1, 0]), "c": (1, [0])}
    assert writers(world(held, [0, 0]), balance=False) == {"a": 1, "b": 1, "c": 0}


def test_shards_without_main_replica_are_not_assigned() -> None:
    meta, box = TensorMeta((4,), "uint8"), Box((0,), (4,))
    rows = [Declaration(ShardId("w", box), meta, 1, False, 4, 0)]
    for balance in (True, False):
        assert len(assign(Declarations.of(rows), balance)) == 0
        assert len(assign(Declarations.merge([]), balance)) == 0


def test_a_rank_that_holds_a_shard_twice_is_one_candidate() -> None:
    meta, box = TensorMeta((4,), "uint8"), Box((0,), (4,))
    rows = [
        Declaration(ShardId("w", box), meta, copy, False, 4, 0) for copy in (1, 0, 0)
    ]
    assert assign(Declarations.of(rows)).tolist() == [0]
    assert assign(Declarations.of(rows), balance=False).tolist() == [1]


@pytest.mark.parametrize("rank", [0, 5])
def test_the_declarations_of_one_rank_alone(rank: int) -> None:
    meta, box = TensorMeta((4,), "uint8"), Box((0,), (4,))
    assert assign(
        Declarations.of([Declaration(ShardId("w", box), meta, 0, False, 4, rank)])
    ).tolist() == [0]
