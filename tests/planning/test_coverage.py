"""Exact tiling: sound declarations pass, each kind of mistake is named, and a brute-force count agrees."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from megackpt.errors import CoverageError
from megackpt.planning import coverage
from megackpt.planning.box import Box, Boxes, runs
from megackpt.planning.coverage import (
    check,
    miscounted,
    tile_exactly,
    uncovered,
)
from megackpt.planning.manifest import (
    Declaration,
    Declarations,
    ReplicaId,
    ShardId,
    TensorMeta,
)

Row = tuple[
    int, str, tuple[int, ...], Box, ReplicaId
]  # rank, key, global shape, box, replica id


def world(
    rows: Iterable[Row], dtype: str = "float32", odd: dict[int, str] | None = None
) -> Declarations:
    """The declarations of all ranks; ``odd`` gives some ranks another dtype."""
    rows = list(rows)
    parts = []
    for rank in range(max((r[0] for r in rows), default=0) + 1):
        mine = [
            Declaration(
                ShardId(key, box),
                TensorMeta(shape, (odd or {}).get(rank, dtype)),
                replica,
                False,
                4 * box.volume,
                rank,
            )
            for holder, key, shape, box, replica in rows
            if holder == rank
        ]
        parts.append(Declarations.of(mine))
    return Declarations.merge(parts)


def split(rng: random.Random, box: Box, depth: int) -> list[Box]:
    """A random tiling of a box, by cutting recursively; now and then into an empty part too."""
    axes = [a for a, n in enumerate(box.shape) if n > 1]
    if depth == 0 or not axes or rng.random() < 0.1:
        return [box]
    axis = rng.choice(axes)
    at = rng.randint(1, box.shape[axis] - 1)
    left = tuple(at if a == axis else n for a, n in enumerate(box.shape))
    right = tuple(n - at if a == axis else n for a, n in enumerate(box.shape))
    offset = tuple(o + at if a == axis else o for a, o in enumerate(box.offset))
    return split(rng, Box(box.offset, left), depth - 1) + split(
        rng, Box(offset, right), depth - 1
    )


def counted(boxes: Iterable[Box], shape: Sequence[int]) -> np.ndarray:
    count = np.zeros(shape, int)
    for box in boxes:
        count[box.slices()] += 1
    return count


shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)


@given(shapes, st.randoms(use_true_random=False), st.integers(0, 5))
def test_random_tilings_are_accepted(
    shape: tuple[int, ...], rng: random.Random, depth: int
) -> None:
    boxes = split(rng, Box.whole(shape), depth)
    rng.shuffle(boxes)
    rows: list[Row] = [(i % 3, "w", shape, box, 0) for i, box in enumerate(boxes)]
    rows += [
        (3, "w", shape, box, (0, 0, 1)) for box in boxes
    ]  # replicas change nothing
    assert uncovered(world(rows)) == {}


@given(shapes.filter(len), st.randoms(use_true_random=False), st.integers(1, 5))
def test_a_removed_box_is_named(
    shape: tuple[int, ...], rng: random.Random, depth: int
) -> None:
    boxes = split(rng, Box.whole(shape), depth)
    lost = boxes.pop(rng.randrange(len(boxes)))
    rows: list[Row] = [(i, "w", shape, box, 0) for i, box in enumerate(boxes)]
    rows.append((99, "w", shape, lost, 1))
    text = uncovered(world(rows))["w"]
    assert f"{lost} of {shape} has no main replica" in text
    assert f"rank 99 {lost} (replica_id 1)" in text
    assert "non-zero replica_id" in text


@given(shapes.filter(len), st.randoms(use_true_random=False), st.integers(1, 5))
def test_a_doubled_box_is_named(
    shape: tuple[int, ...], rng: random.Random, depth: int
) -> None:
    boxes = split(rng, Box.whole(shape), depth)
    twice = rng.choice(boxes)
    rows: list[Row] = [(i, "w", shape, box, 0) for i, box in enumerate([*boxes, twice])]
    text = uncovered(world(rows))["w"]
    assert f"{twice} of {shape} has 2 main replicas" in text
    assert f"{boxes.index(twice)}, {len(boxes)} {twice}" in text.replace(" and ", " ")
    assert "is the tensor-parallel rank missing" in text


few_axes = st.lists(st.integers(1, 6), min_size=1, max_size=3)
many_axes = st.lists(st.integers(1, 3), min_size=7, max_size=8)


@given((few_axes | many_axes).map(tuple), st.data())
def test_any_boxes_are_judged_as_counting_judges(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    rng = data.draw(st.randoms(use_true_random=False))
    boxes = split(rng, Box.whole(shape), 3)
    for _ in range(rng.randint(0, 2)):  # spoil it, perhaps so that volumes still add up
        i, axis = rng.randrange(len(boxes)), rng.randrange(len(shape))
        moved = list(boxes[i].offset)
        moved[axis] = rng.randint(0, shape[axis] - boxes[i].shape[axis])
        boxes[i] = Box(tuple(moved), boxes[i].shape)
    count = counted(boxes, shape)
    assert (
        uncovered(world((i, "w", shape, b, 0) for i, b in enumerate(boxes))) == {}
    ) is bool((count == 1).all())
    found = np.ones(shape, int)
    for region, times in miscounted(Boxes.of(boxes), shape):
        assert (found[region.slices()] == 1).all()
        found[region.slices()] = times
    assert (found == count).all()


def test_many_axes_cost_no_more_than_their_boxes() -> None:
    """Two boxes that overlap in 32 dimensions: a grid of their cuts would have 3^32 cells."""
    boxes = Boxes.of([Box((0,) * 32, (5,) * 32), Box((3,) * 32, (6,) * 32)])
    found = list(miscounted(boxes, [9] * 32))
    assert sum(region.volume for region, _ in found) == 9**32 - (
        5**32 + 6**32 - 2 * 2**32
    )
    assert [(region, times) for region, times in found if times] == [
        (Box((3,) * 32, (2,) * 32), 2)
    ]


@given(st.randoms(use_true_random=False))
def test_regions_larger_than_the_counting_grid_are_halved(rng: random.Random) -> None:
    shape = (12, 10)
    boxes = [*split(rng, Box.whole(shape), 6)[1:], Box((2, 3), (4, 4))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage, "CELLS", 4)
        found = np.ones(shape, int)
        for region, times in miscounted(Boxes.of(boxes), shape):
            found[region.slices()] = times
    assert (found == counted(boxes, shape)).all()


def test_slabs_and_sweeps_agree_on_many_irregular_shards() -> None:
    rng = random.Random(1)
    cuts = sorted(rng.sample(range(1, 10**9), 9_999))
    ends = [*cuts, 10**9]
    starts = [0, *cuts]
    boxes = [Box((a,), (b - a,)) for a, b in zip(starts, ends, strict=True)]
    rng.shuffle(boxes)
    column, whole = Boxes.of(boxes), np.array([[10**9]])
    assert tile_exactly(column, np.array([0, len(boxes)]), whole).all()
    assert next(miscounted(column, [10**9]), None) is None
    boxes[5] = Box((boxes[5].offset[0] + 1,), boxes[5].shape)
    assert not tile_exactly(Boxes.of(boxes), np.array([0, len(boxes)]), whole).any()


def test_no_tensor_is_judged_without_boxes() -> None:
    assert (
        len(
            tile_exactly(
                Boxes.of([], 2), runs(np.array([])), np.zeros((0, 2), np.int64)
            )
        )
        == 0
    )
    assert uncovered(world([])) == {}


# --- each mistake, with its likely cause ---


def grid(
    key: str, shape: tuple[int, int], parts: tuple[int, int], first_rank: int = 0
) -> list[Row]:
    cell = shape[0] // parts[0], shape[1] // parts[1]
    return [
        (
            first_rank + i * parts[1] + j,
            key,
            shape,
            Box((i * cell[0], j * cell[1]), cell),
            0,
        )
        for i in range(parts[0])
        for j in range(parts[1])
    ]


def only(declared: Declarations) -> str:
    (text,) = uncovered(declared).values()
    return text


def test_tensor_parallel_rank_missing_from_rank_offsets() -> None:
    first = Box((0, 0), (2048, 1024))
    text = only(
        world([(0, "fc1", (4096, 1024), first, 0), (8, "fc1", (4096, 1024), first, 0)])
    )
    assert text.startswith(
        "'fc1' is not covered: [2048:4096, 0:1024] of (4096, 1024) has no main replica"
    )
    assert "declared: ranks 0, 8 [0:2048, 0:1024]" in text
    assert (
        "two ranks declare the same box as main replica; is the tensor-parallel rank missing"
        in text
    )


def test_one_missing_cell_of_a_grid() -> None:
    rows = [row for row in grid("w", (8, 8), (4, 2)) if row[0] != 5]
    text = only(world(rows))
    assert "[4:6, 4:8] of (8, 8) has no main replica" in text
    assert "no rank declares the region; is a rank or a pipeline stage missing" in text


def test_a_missing_pipeline_stage() -> None:
    rows = [(r, "layers.w", (4, 6), Box((r, 0), (1, 6)), 0) for r in range(3)]
    text = only(world(rows))
    assert "[3:4, 0:6] of (4, 6) has no main replica" in text
    assert "pipeline stage missing" in text


def test_every_replica_is_a_copy() -> None:
    text = only(
        world([(r, "w", (4,), Box((0,), (4,)), (0, 0, r + 1)) for r in range(3)])
    )
    assert "every replica of the region has a non-zero replica_id" in text
    assert "ranks 0-2 [0:4] (replica_id (0, 0, 1), (0, 0, 2), (0, 0, 3))" in text


def test_the_same_rank_declares_a_box_twice() -> None:
    box = Box((0,), (4,))
    assert "rank 3 declared it more than once" in only(
        world([(3, "w", (4,), box, 0)] * 2)
    )


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, 0), (8, 4))],
        [Box((-4, 0), (4, 8)), Box((0, 0), (4, 8))],
        [Box((0, 0), (4, 9))],
        [Box((0, 8), (4, 4)), Box((0, 4), (4, 4))],
    ],
)
def test_out_of_bounds(boxes: list[Box]) -> None:
    text = only(world((i, "w", (4, 8), box, 0) for i, box in enumerate(boxes)))
    assert f"{boxes[0]} lies outside of (4, 8)" in text
    assert "hint: is the global shape that of one rank" in text


def test_ranks_that_cut_differently() -> None:
    rows: list[Row] = [
        (0, "w", (8,), Box((0,), (5,)), 0),
        (1, "w", (8,), Box((4,), (4,)), 0),
    ]
    text = only(world(rows))
    assert "[4:5] of (8,) has 2 main replicas" in text


def test_holes_between_irregular_boxes() -> None:
    rows: list[Row] = [
        (0, "w", (9,), Box((0,), (2,)), 0),
        (1, "w", (9,), Box((3,), (5,)), 0),
    ]
    text = only(world(rows))
    assert "[2:3] of (9,) has no main replica; [8:9]" in text
    assert "hint: no rank declares the region" in text


@pytest.mark.parametrize("shape", [(1, 4, 6), (6, 4), (2, 6), (4, 7), (4, 6, 2)])
def test_global_shapes_that_disagree(shape: tuple[int, ...]) -> None:
    whole = (4, 6)
    rows: list[Row] = [(r, "w", whole, Box((2 * r, 0), (2, 6)), 0) for r in range(2)]
    text = only(world([*rows, (2, "w", shape, Box.whole(shape), 1)]))
    assert f"ranks 0, 1 {whole} float32; rank 2 {shape} float32" in text
    assert (
        "hint: is the number of fragments, the axis or prepend_axis_num wrong on rank 2"
        in text
    )


def test_dtypes_that_disagree() -> None:
    rows: list[Row] = [(r, "w", (4,), Box((r,), (1,)), 0) for r in range(4)]
    text = only(world(rows, "bfloat16", {3: "float32"}))
    assert "ranks 0-2 (4,) bfloat16; rank 3 (4,) float32" in text


def test_a_tensor_and_an_object_of_one_name() -> None:
    rows: list[Row] = [(r, "w", (), Box((), ()), r) for r in range(2)]
    text = only(world(rows, odd={1: "object"}))
    assert "rank 0 () float32; rank 1 objects () object" in text


def test_all_problems_of_all_keys_at_once_but_not_without_bound() -> None:
    """Keys that are alike are told together; of each kind some are looked into, of many kinds 20."""
    holes: list[Row] = [
        (0, f"layers.{i}.w", (4,), Box((0,), (3,)), 0) for i in range(10_000)
    ]
    odd: list[Row] = [
        (0, "norm", (4,), Box((0,), (4,)), 0),
        (1, "norm", (4,), Box((0,), (4,)), 0),
    ]
    many: list[Row] = [
        (0, "kind" + "x" * i, (4,), Box((0,), (3,)), 0) for i in range(100)
    ]
    declared = world([*holes, *odd, *many, *grid("sound", (4, 4), (2, 2))])
    assert list(uncovered(declared)) == [row[1] for row in (*holes, odd[0], *many)]
    with pytest.raises(CoverageError) as caught:
        check(declared)
    text = str(caught.value)
    assert "'layers.0.w' is not covered: [3:4] of (4,) has no main replica" in text
    assert "'norm' is not covered: [0:4] of (4,) has 2 main replicas" in text
    assert (
        "and 9999 more keys like 'layers.*.w': 'layers.1.w', 'layers.2.w', 'layers.3.w', and 9996 more"
        in text
    )
    assert text.count("hint:") == 20
    assert len(text) < 10_000
    assert text.endswith("more keys of other kinds")


def test_many_ways_to_declare_one_key_stay_bounded() -> None:
    rows: list[Row] = [(r, "w", (r + 1,), Box((0,), (1,)), 0) for r in range(500)]
    text = only(world(rows))
    assert "'w' is declared in 500 ways" in text
    assert len(text) < 1500


# --- what is legal ---


def test_tensors_without_elements_or_dimensions() -> None:
    rows: list[Row] = [
        (0, "scalar", (), Box((), ()), 0),
        (1, "scalar", (), Box((), ()), 1),
        (0, "empty", (0, 4), Box((0, 0), (0, 2)), 0),
        (1, "empty", (0, 4), Box((0, 2), (0, 2)), 0),
        (0, "uneven", (2,), Box((0,), (1,)), 0),
        (1, "uneven", (2,), Box((1,), (1,)), 0),
        *((r, "uneven", (2,), Box((2,), (0,)), 0) for r in (2, 3)),
    ]
    assert uncovered(world(rows)) == {}
    assert "no rank holds any part" in only(
        world([(0, "empty", (0, 4), Box((0, 0), (0, 4)), 1)])
    )
    assert "[] of () has 2 main replicas" in only(
        world([(r, "s", (), Box((), ()), 0) for r in range(2)])
    )


def test_objects_are_unit_boxes() -> None:
    rows: list[Row] = [
        (r, "rng", (2, 2), Box((r // 2, r % 2), (1, 1)), 0) for r in range(4)
    ]
    assert uncovered(world(rows, "object")) == {}
    text = only(world(rows[:3], "object"))
    assert "[1:2, 1:2] of objects (2, 2) has no main replica" in text
    assert "hint: no rank declares the region" in text
    assert "is the tensor-parallel rank missing" in only(
        world([(r, "step", (), Box((), ()), 0) for r in range(2)], "object")
    )


def test_without_thoroughness_only_lost_keys_are_named() -> None:
    hole: list[Row] = [(0, "hole", (4,), Box((0,), (2,)), 0)]
    lost: list[Row] = [(0, "lost", (4,), Box((0,), (4,)), 1)]
    hollow: list[Row] = [
        (0, "hollow", (4,), Box((0,), (0,)), 0),
        (1, "hollow", (4,), Box((0,), (4,)), 1),
    ]
    assert list(uncovered(world(hole + lost + hollow), thorough=False)) == [
        "lost",
        "hollow",
    ]
    assert set(uncovered(world(hole + lost + hollow))) == {
        "hole",
        "lost",
        "hollow",
    }
    check(world(hole), thorough=False)
