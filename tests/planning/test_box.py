"""Boxes, alone and in columns, against plain index arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from megackpt.planning import box as box_module
from megackpt.planning.box import (
    Box,
    Boxes,
    cut,
    distinct,
    group_equal,
    largest_divisor,
    regular_grids,
    runs,
)

boxes_2d = st.builds(
    lambda a, b, c, d: Box((a, b), (c, d)),
    *(st.integers(0, 5),) * 2,
    *(st.integers(0, 4),) * 2,
)


def cells(box: Box) -> set[tuple[int, ...]]:
    return {
        tuple(i) for i in np.argwhere(np.ones(box.shape)) + np.array(box.offset, int)
    }


@given(boxes_2d, boxes_2d)
def test_intersection_is_that_of_the_sets_of_elements(a: Box, b: Box) -> None:
    common = a.intersect(b)
    assert (cells(common) if common else set()) == cells(a) & cells(b)


@given(boxes_2d, boxes_2d)
def test_contains_agrees_with_stops(a: Box, b: Box) -> None:
    if a.contains(b):
        assert cells(b) <= cells(a)
    elif b.volume:
        assert not cells(b) <= cells(a)


def test_a_box_of_no_dimensions_holds_one_element() -> None:
    scalar = Box((), ())
    assert scalar.volume == 1
    assert scalar.intersect(scalar) == scalar
    assert str(scalar) == "[]"
    assert scalar.slices() == ()


def test_local_coordinates_and_text() -> None:
    inner = Box((5, 2), (1, 3))
    assert inner.relative_to(Box((4, 2), (4, 4))) == Box((1, 0), (1, 3))
    assert str(inner) == "[5:6, 2:5]"
    assert np.arange(64).reshape(8, 8)[inner.slices()].shape == inner.shape
    assert Box.whole((3, 4)) == Box((0, 0), (3, 4))


def test_offset_and_shape_must_agree() -> None:
    with pytest.raises(ValueError, match="differ in dimensions"):
        Box((0,), (1, 1))


def test_columns_pad_missing_axes_without_changing_volumes() -> None:
    column = Boxes.of([Box((), ()), Box((2,), (3,)), Box((1, 1), (2, 2))])
    assert column.width == 2
    assert column.volume.tolist() == [1, 3, 4]
    assert [column.row(i, i) for i in range(3)] == [
        Box((), ()),
        Box((2,), (3,)),
        Box((1, 1), (2, 2)),
    ]


def test_joining_columns_of_several_widths() -> None:
    parts = [
        Boxes.of([Box((2,), (3,))]),
        Boxes.of([]),
        Boxes.of([Box((1, 1), (2, 2))]),
        Boxes.of([Box((), ())]),
    ]
    joined = Boxes.concat(parts)
    assert [joined.row(i, n) for i, n in enumerate((1, 2, 0))] == [
        Box((2,), (3,)),
        Box((1, 1), (2, 2)),
        Box((), ()),
    ]
    assert joined.volume.tolist() == [3, 4, 1]
    assert len(Boxes.concat([])) == 0


def test_distinct_numbers() -> None:
    for column in ([], [3], [4, 0, 4, 2, 0]):
        numbers = np.array(column, np.int32)
        found, place = distinct(numbers, 5)
        expected = np.unique(numbers, return_inverse=True)
        assert (found.tolist(), place.tolist()) == tuple(e.tolist() for e in expected)


def test_runs() -> None:
    assert runs(np.array([3, 3, 5, 5, 5, 3])).tolist() == [0, 2, 5, 6]
    assert runs(np.array([], int)).tolist() == [0]


@pytest.mark.parametrize("colliding", [False, True])
@given(rows=st.lists(st.tuples(st.integers(0, 3), boxes_2d), max_size=30))
def test_groups_are_those_of_a_dictionary(
    colliding: bool, rows: list[tuple[int, Box]]
) -> None:
    owner = np.array([o for o, _ in rows], np.int32)
    column = Boxes.of([b for _, b in rows], 2)
    with pytest.MonkeyPatch.context() as patch:
        if (
            colliding
        ):  # a hash that tells nothing: the columns themselves must be sorted
            patch.setattr(
                box_module, "_sorting_key", lambda owner, _: owner.astype(np.int64)
            )
        groups = group_equal(owner, column)
    expected: dict[tuple[int, Box], list[int]] = {}
    for i, row in enumerate(rows):
        expected.setdefault(row, []).append(i)
    found = [groups.rows(g).tolist() for g in range(len(groups))]
    assert sorted(found) == sorted(expected.values())
    assert owner[groups.first].tolist() == sorted(owner[groups.first].tolist())
    assert groups.number.tolist() == [g for g, rows in enumerate(found) for _ in rows]


def test_regular_grids() -> None:
    regular = [
        Box((0, 0), (2, 3)),
        Box((0, 3), (2, 2)),
        Box((2, 0), (1, 3)),
        Box((2, 3), (1, 2)),
    ]
    irregular = [Box((0,), (2,)), Box((2,), (3,))]
    cells, fits = regular_grids(
        Boxes.of([*regular, *irregular]),
        np.array([0, 4, 6]),
        np.array([[3, 5], [5, 1]]),
    )
    assert fits.tolist() == [True, False]
    assert cells[0].tolist() == [2, 3]


def test_boxes_are_cut_at_the_borders_of_a_grid() -> None:
    boxes = Boxes.of([Box((1, 0), (5, 3)), Box((4, 0), (2, 0)), Box((), ())])
    pieces = np.array([[3, 2], [3, 2], [3, 2]])
    row, found = cut(boxes, pieces, np.zeros_like(pieces))
    assert row.tolist() == [0, 0, 0, 0, 1, 2]
    assert [found.row(i, 2) for i in range(5)] == [
        *(
            Box((1, 0), (2, 2)),
            Box((1, 2), (2, 1)),
            Box((3, 0), (3, 2)),
            Box((3, 2), (3, 1)),
        ),
        Box((4, 0), (2, 0)),
    ]
    _, shifted = cut(boxes.take([0]), pieces[:1], boxes.offset[:1])
    assert [shifted.row(i, 2).offset for i in range(4)] == [
        (1, 0),
        (1, 2),
        (4, 0),
        (4, 2),
    ]


@given(st.integers(1, 5000), st.integers(1, 6000))
def test_largest_divisor(number: int, limit: int) -> None:
    assert largest_divisor(number, limit) == max(
        n for n in range(1, number + 1) if number % n == 0 and n <= limit
    )
