"""Plans: every shard once, in order, cut and gridded as asked, and a manifest that agrees with them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from megackpt.errors import CoverageError
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    COMMON_KEY,
    Declaration,
    Declarations,
    Manifest,
    ReplicaId,
    SavePlan,
    ShardId,
    TensorMeta,
)
from megackpt.planning.save_plan import SavePolicy, plan_save

Shard = tuple[str, tuple[int, ...], Box, ReplicaId, str]


def parts(*ranks: list[Shard]) -> list[Declarations]:
    return [
        Declarations.of(
            [
                Declaration(
                    ShardId(key, box),
                    TensorMeta(shape, dtype),
                    replica,
                    False,
                    box.volume * (TensorMeta(shape, dtype).itemsize or 100),
                    rank,
                )
                for key, shape, box, replica, dtype in rows
            ]
        )
        for rank, rows in enumerate(ranks)
    ]


def w(
    key: str,
    shape: tuple[int, ...],
    box: Box,
    replica: ReplicaId = 0,
    dtype: str = "float32",
) -> Shard:
    return key, shape, box, replica, dtype


def written(plans: list[SavePlan]) -> dict[str, list[tuple[int, Box]]]:
    found: dict[str, list[tuple[int, Box]]] = {}
    for plan in plans:
        for item in plan.rows():
            found.setdefault(item.shard.key, []).append((plan.rank, item.shard.box))
    return found


def agree(given: list[Declarations], plans: list[SavePlan], manifest: Manifest) -> None:
    """The plan's rows lie in what their ranks hold, and the manifest lists them in the same order."""
    items = [(plan.rank, item) for plan in plans for item in plan.rows()]
    assert len(manifest.chunks) == len(items)
    for i, (rank, item) in enumerate(items):
        chunk = manifest.chunk(i)
        entry = manifest.tensors[manifest.chunks.tensor[i]]
        assert (entry.key, entry.meta) == (item.shard.key, item.meta)
        assert (chunk.box, chunk.writer, chunk.location.length) == (
            item.shard.box,
            rank,
            item.nbytes,
        )
        assert manifest.chunks.file[i] == -1
        assert manifest.grids[manifest.chunks.tensor[i]] == item.grid
        source = given[rank].row(item.source)
        assert source.shard.key == item.shard.key
        assert source.shard.box.contains(item.shard.box)


def test_objects_first_then_large_tensors() -> None:
    given = parts(
        [
            w("small", (2,), Box((0,), (2,))),
            w("large", (9,), Box((0,), (9,))),
            w("rng", (2,), Box((0,), (1,)), dtype="object"),
            w(COMMON_KEY, (), Box((), ()), dtype="object"),
        ],
        [
            w("rng", (2,), Box((1,), (1,)), dtype="object"),
            w("small", (2,), Box((0,), (2,)), 1),
        ],
    )
    plans, manifest = plan_save(given)
    agree(given, plans, manifest)
    assert [item.shard.key for item in plans[0].rows()] == ["rng", COMMON_KEY, "large"]
    # Rank 1 holds a copy of the small tensor and has less to write.
    assert [item.shard.key for item in plans[1].rows()] == ["rng", "small"]
    assert written(plan_save(given, SavePolicy(balance=False))[0])["small"] == [
        (0, Box((0,), (2,)))
    ]


def test_a_world_without_anything() -> None:
    for world in ([], parts([], [])):
        plans, manifest = plan_save(world)
        assert [len(plan) for plan in plans] == [0] * len(world)
        assert len(manifest.chunks) == 0


def test_ranks_without_declarations_get_empty_plans() -> None:
    given = parts([], [w("a", (2,), Box((0,), (2,)))], [], [w("b", (), Box((), ()))])
    plans, manifest = plan_save(given)
    agree(given, plans, manifest)
    assert [len(plan) for plan in plans] == [0, 1, 0, 1]


def test_empty_shards_are_not_written_but_empty_tensors_keep_one() -> None:
    given = parts(
        [w("uneven", (2,), Box((0,), (2,))), w("empty", (0, 4), Box((0, 0), (0, 2)))],
        [w("uneven", (2,), Box((2,), (0,))), w("empty", (0, 4), Box((0, 2), (0, 2)))],
    )
    for gridded in (False, True):
        plans, manifest = plan_save(given, SavePolicy(gridded=gridded))
        agree(given, plans, manifest)
        assert written(plans)["uneven"] == [(0, Box((0,), (2,)))]
        assert len(written(plans)["empty"]) == 1
        assert written(plans)["empty"][0][1].volume == 0


def test_validation_raises_and_without_it_nothing_vanishes_silently() -> None:
    hole = [w("hole", (4,), Box((0,), (2,)))]
    with pytest.raises(CoverageError, match="'hole' is not covered"):
        plan_save(parts(hole))
    assert written(plan_save(parts(hole), validate=False)[0]) == {
        "hole": [(0, Box((0,), (2,)))]
    }
    twice = parts(*[[w("twice", (4,), Box((0,), (4,)))]] * 2)
    assert len(written(plan_save(twice, validate=False)[0])["twice"]) == 1
    with pytest.raises(CoverageError, match="'copies' is not covered"):
        plan_save(parts(hole, [w("copies", (4,), Box((0,), (4,)), 1)]), validate=False)
    with pytest.raises(CoverageError, match="declared in 2 ways"):
        plan_save(parts(hole, [w("hole", (5,), Box((2,), (2,)), 0)]), validate=False)


@given(st.lists(st.integers(1, 7), max_size=3).map(tuple), st.integers(1, 200))
def test_cut_items_stay_below_the_bound_and_make_up_the_whole(
    shape: tuple[int, ...], limit: int
) -> None:
    given = parts(
        [w("w", shape, Box.whole(shape)), w("o", (1,), Box((0,), (1,)), dtype="object")]
    )
    for gridded in (False, True):
        plans, manifest = plan_save(
            given, SavePolicy(max_item_bytes=limit, gridded=gridded)
        )
        agree(given, plans, manifest)
        count = np.zeros(shape, int)
        for item in plans[0].rows():
            if item.shard.key == "w":
                assert item.nbytes <= max(limit, 4)
                count[item.shard.box.slices()] += 1
                assert gridded is (item.grid is not None)
        assert (count == 1).all()


def test_pieces_are_as_large_as_they_may_be() -> None:
    given = parts([w("w", (10, 8), Box((0, 0), (10, 8)))])
    plans, _ = plan_save(given, SavePolicy(max_item_bytes=100))
    assert [item.shard.box.shape for item in plans[0].rows()] == [(3, 8)] * 3 + [(1, 8)]
    with pytest.raises(ValueError, match="must be positive"):
        SavePolicy(max_item_bytes=0)


def test_grids_are_the_writers_boxes() -> None:
    given = parts(
        [
            w("a", (8, 5), Box((0, 0), (4, 3))),
            w("s", (), Box((), ())),
            w("b", (3,), Box((0,), (2,))),
        ],
        [w("a", (8, 5), Box((0, 3), (4, 2))), w("o", (), Box((), ()), dtype="object")],
        [w("a", (8, 5), Box((4, 0), (4, 3))), w("b", (3,), Box((2,), (1,)))],
        [w("a", (8, 5), Box((4, 3), (4, 2)))],
    )
    plans, manifest = plan_save(given, SavePolicy(gridded=True))
    agree(given, plans, manifest)
    grids = {
        entry.key: grid
        for entry, grid in zip(manifest.tensors, manifest.grids, strict=True)
    }
    assert grids == {"a": (4, 3), "s": (), "b": (2,), "o": None}


def test_smaller_cells_divide_the_writers_boxes() -> None:
    given = parts(
        [w("a", (12, 2), Box((0, 0), (6, 2)))], [w("a", (12, 2), Box((6, 0), (6, 2)))]
    )
    plans, manifest = plan_save(given, SavePolicy(gridded=True, max_item_bytes=5 * 8))
    agree(given, plans, manifest)
    assert manifest.grids == ((3, 2),)
    assert [item.shard.box.offset[0] for plan in plans for item in plan.rows()] == [
        0,
        3,
        6,
        9,
    ]


def test_larger_cells_without_a_useful_divisor_are_shared() -> None:
    given = parts(
        [w("a", (202,), Box((0,), (101,)))], [w("a", (202,), Box((101,), (101,)))]
    )
    plans, manifest = plan_save(given, SavePolicy(gridded=True, max_item_bytes=50 * 4))
    agree(given, plans, manifest)
    assert manifest.grids == ((50,),)
    assert [
        (rank, box.offset[0], box.shape[0]) for rank, box in written(plans)["a"]
    ] == [
        *((0, 0, 50), (0, 50, 50), (0, 100, 1)),
        *((1, 150, 50), (1, 101, 49), (1, 200, 2)),
    ]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor's shape, and boxes that tile it in any way: halved again and again, anywhere."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[axis]))
        for low, high in ((0, at), (at, box.shape[axis])):
            offset, extent = list(box.offset), list(box.shape)
            offset[axis] += low
            extent[axis] = high - low
            boxes.append(Box(tuple(offset), tuple(extent)))
    return shape, boxes


@settings(deadline=None)
@given(
    tilings(), st.integers(1, 400), st.none() | st.integers(1, 400), st.integers(1, 3)
)
def test_any_shards_are_written_as_cells_and_pieces_of_cells(
    tiling: tuple[tuple[int, ...], list[Box]],
    cell_bytes: int,
    limit: int | None,
    ranks: int,
) -> None:
    shape, boxes = tiling
    given = parts(
        *([w("a", shape, box) for box in boxes[rank::ranks]] for rank in range(ranks))
    )
    policy = SavePolicy(gridded=True, cell_bytes=cell_bytes, max_item_bytes=limit)
    plans, manifest = plan_save(given, policy)
    agree(given, plans, manifest)
    (grid,) = manifest.grids
    assert grid is not None
    assert limit is None or np.prod(grid) * 4 <= max(limit, 4)
    count = np.zeros(shape, int)
    for _, box in written(plans)["a"]:
        count[box.slices()] += 1
        lows = [o // g for o, g in zip(box.offset, grid, strict=True)]
        assert lows == [
            (e - 1) // g for e, g in zip(box.stop, grid, strict=True)
        ]  # in one cell
    assert (count == 1).all()
    whole = {box for _, box in written(plans)["a"]}
    for index in np.ndindex(*(-(-n // g) for n, g in zip(shape, grid, strict=True))):
        offset = tuple(i * g for i, g in zip(index, grid, strict=True))
        cell = Box(
            offset,
            tuple(min(g, n - o) for g, n, o in zip(grid, shape, offset, strict=True)),
        )
        assert cell in whole or not any(box.contains(cell) for box in boxes)


def uneven(total: int, ranks: int) -> list[int]:
    """Borders of shards that are of about one size."""
    return [total * i // ranks + 3 * i % 7 for i in range(ranks)] + [total]


def shared_bytes(plans: list[SavePlan], grid: tuple[int, ...]) -> int:
    whole = int(np.prod(grid)) * 4
    last = max(
        (item.shard.box.stop for plan in plans for item in plan.rows()), default=()
    )
    return sum(
        item.nbytes
        for plan in plans
        for item in plan.rows()
        if item.nbytes != whole and item.shard.box.stop != last
    )


@pytest.mark.parametrize(
    ("total", "ranks"), [(100_000_000, 8), (100_000_000, 64), (1_000_000, 8)]
)
def test_of_irregular_buckets_little_is_shared(total: int, ranks: int) -> None:
    borders = uneven(total, ranks)
    given = parts(
        *([w("b", (total,), Box((a,), (b - a,)))] for a, b in pairwise(borders))
    )
    plans, manifest = plan_save(given, SavePolicy(gridded=True))
    (grid,) = manifest.grids
    assert grid is not None
    assert grid[0] * 4 <= 4 << 20
    assert grid[0] * 4 >= min(256 << 10, total * 4)
    assert sum(map(len, plans)) <= ranks * 10 + total * 4 // (4 << 20)
    if total == 100_000_000:
        assert shared_bytes(plans, grid) <= total * 4 // 7


def test_axes_on_which_shards_form_a_grid_keep_it() -> None:
    rows = [0, 600, 1300, 2000]
    boxes = [Box((a, c), (b - a, 1000)) for a, b in pairwise(rows) for c in (0, 1000)]
    given = parts(*([w("a", (2000, 2000), box)] for box in boxes))
    plans, manifest = plan_save(given, SavePolicy(gridded=True))
    assert manifest.grids == ((83, 1000),)  # an eighth of the mean shard
    assert len(written(plans)["a"]) == 2 * (25 + 2)
    flipped = parts(
        *([w("a", (2000, 2000), Box(b.offset[::-1], b.shape[::-1]))] for b in boxes)
    )
    assert plan_save(flipped, SavePolicy(gridded=True))[1].grids == ((1000, 83),)


def test_small_irregular_tensors_are_one_cell() -> None:
    given = parts([w("a", (8,), Box((0,), (3,)))], [w("a", (8,), Box((3,), (5,)))])
    plans, manifest = plan_save(given, SavePolicy(gridded=True))
    agree(given, plans, manifest)
    assert manifest.grids == ((8,),)
    assert written(plans)["a"] == [(0, Box((0,), (3,))), (1, Box((3,), (5,)))]
