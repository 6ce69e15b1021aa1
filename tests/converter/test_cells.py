"""Planning of conversions: cells tile each tensor, are of bounded size and whole atoms; tasks are alike."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from megackpt import limits
from megackpt.converter.cells import (
    cell_shape,
    declare_cells,
    split_tasks,
    task_count,
)
from megackpt.planning.box import Box, Boxes, regular_grids
from megackpt.planning.coverage import tile_exactly
from megackpt.planning.manifest import (
    Chunks,
    Declarations,
    Manifest,
    TensorEntry,
    TensorMeta,
    TensorParts,
)


def ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * len(shape)


@pytest.mark.parametrize(
    ("shape", "cut", "atom", "budget", "cell"),
    [
        # Nothing of a grid: rows, as many as fit.
        ((1000, 256), None, None, 4096, (16, 256)),
        ((1000, 256), None, None, 1 << 20, (1000, 256)),
        ((10, 1000, 256), None, None, 4096, (1, 16, 256)),
        ((3, 5000), None, None, 4096, (1, 4096)),
        ((), None, None, 4096, ()),
        # Columns of a tensor-parallel save stay columns, in pieces that its cells are made up of.
        ((4096, 4096), (4096, 1024), None, 1 << 20, (1024, 1024)),
        ((4096, 4096), (1024, 4096), None, 1 << 20, (256, 4096)),
        # Cells that are too fine are taken together, along the last axis first.
        ((1024, 1024), (1024, 128), None, 1 << 20, (1024, 1024)),
        ((1024, 1024), (1, 1024), None, 1 << 18, (256, 1024)),
        # A cell without useful divisors is given up, but not a single one along its axis, which may end anywhere.
        ((7919 * 2, 512), (7919, 512), None, 1 << 20, (2048, 512)),
        ((7919, 512), (7919, 256), None, 1 << 20, (4096, 256)),
        # What can only be decoded whole stays whole, be it larger than the budget.
        ((4096, 4096), (4096, 1024), (256, 1024), 1 << 20, (1024, 1024)),
        ((4096, 4096), (2048, 2048), (2048, 2048), 1 << 20, (2048, 2048)),
        ((4096, 4096), (64, 64), (64, 64), 1 << 20, (256, 4096)),
    ],
)
def test_cells(shape, cut, atom, budget, cell) -> None:
    assert cell_shape(shape, cut or ones(shape), atom or ones(shape), budget) == cell


@st.composite
def stored(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A shape, the cell of a grid over it, and atoms that this cell is made up of."""
    shape = tuple(draw(st.lists(st.integers(1, 40), max_size=4)))
    atom = tuple(draw(st.integers(1, n)) for n in shape)
    cut = tuple(
        min(n, a * draw(st.integers(1, 5))) for n, a in zip(shape, atom, strict=True)
    )
    return shape, cut, tuple(min(a, c) for a, c in zip(atom, cut, strict=True))


@given(stored(), st.integers(1, 5000))
@example(((40,), (40,), (40,)), 1)
def test_cells_are_whole_atoms_and_fit(given_: tuple, budget: int) -> None:
    shape, cut, atom = given_
    cell = cell_shape(shape, cut, atom, budget)
    assert math.prod(cell) <= max(budget, math.prod(atom))
    for extent, a, c in zip(shape, atom, cell, strict=True):
        assert 1 <= c <= extent
        assert c % a == 0 or c == extent


def manifest_of(tensors: dict[str, tuple[tuple[int, ...], str, list[Box]]]) -> Manifest:
    entries = tuple(
        TensorEntry(key, TensorMeta(shape, dtype))
        for key, (shape, dtype, _) in tensors.items()
    )
    boxes = [box for _, _, held in tensors.values() for box in held]
    number = [i for i, (_, _, held) in enumerate(tensors.values()) for _ in held]
    length = [
        box.volume * entries[i].meta.itemsize or 100
        for i, box in zip(number, boxes, strict=True)
    ]
    zeros = np.zeros(len(boxes), np.int64)
    chunks = Chunks(
        np.array(number, np.int32), Boxes.of(boxes), zeros.astype(np.int32), np.arange(len(boxes), dtype=np.int32),
        zeros, np.array(length, np.int64), np.zeros((0, 16), np.uint8),
    )  # fmt: skip
    return Manifest(
        entries,
        (None,) * len(entries),
        chunks,
        tuple(f"f{i}" for i in range(len(boxes))),
    )


def rows_of(
    manifest: Manifest, contiguous: bool = False, decoded: int = 0
) -> Declarations:
    heavy = np.full(len(manifest.chunks), decoded, np.int64)
    return declare_cells(manifest, dict(enumerate(manifest.tensors)), heavy, contiguous)


@given(st.lists(st.tuples(stored(), st.booleans()), max_size=4), st.booleans())
def test_cells_tile_every_tensor(given_: list, contiguous: bool) -> None:
    def grid(shape, cell):
        return [
            Box(
                tuple(i * c for i, c in zip(index, cell, strict=True)),
                tuple(
                    min(c, n - i * c)
                    for i, c, n in zip(index, cell, shape, strict=True)
                ),
            )
            for index in np.ndindex(
                *(-(-n // c) for n, c in zip(shape, cell, strict=True))
            )
        ]

    tensors = {
        f"t{i}": (shape, "float32", grid(shape, cut) if regular else [Box.whole(shape)])
        for i, ((shape, cut, _), regular) in enumerate(given_)
    }
    manifest = manifest_of(tensors)
    rows = rows_of(manifest, contiguous)
    bounds = np.searchsorted(rows.tensor, np.arange(len(tensors) + 1))
    width = rows.boxes.width
    whole = np.ones((len(tensors), width), np.int64)
    for i, (shape, _, _) in enumerate(tensors.values()):
        whole[i, : len(shape)] = shape
    assert tile_exactly(rows.boxes, bounds, whole).all()
    assert regular_grids(rows.boxes, bounds, whole)[1].all()


def test_cells_of_large_tensors_are_bounded() -> None:
    half = Box((0, 0), (50257, 4096)), Box((0, 4096), (50257, 4096))
    manifest = manifest_of({"w": ((50257, 8192), "float32", list(half))})
    rows = rows_of(manifest)
    assert rows.nbytes.max() <= limits.CONVERT_CELL_BYTES
    assert set(rows.boxes.shape[:, 1].tolist()) == {4096}  # the two halves stay apart
    whole = rows_of(manifest, contiguous=True)
    assert set(whole.boxes.shape[:, 1].tolist()) == {8192}
    assert (
        rows_of(manifest, decoded=half[0].volume * 4).nbytes.max() == half[0].volume * 4
    )


def test_objects_and_empty_tensors_are_not_cut() -> None:
    manifest = manifest_of({
        "o": ((2,), "object", [Box((0,), (1,)), Box((1,), (1,))]),
        "none": ((0, 5), "float32", [Box((0, 0), (0, 5))]),
        "scalar": ((), "int64", [Box((), ())]),
    })  # fmt: skip
    rows = rows_of(manifest)
    assert [row.shard.box for row in rows.rows()] == [
        Box((0,), (1,)),
        Box((1,), (1,)),
        Box((0, 0), (0, 5)),
        Box((), ()),
    ]
    assert rows.nbytes.tolist() == [100, 100, 0, 8]


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=50), st.integers(1, 60))
def test_tasks_are_consecutive_rows_of_about_equal_bytes(
    sizes: list[int], count: int
) -> None:
    manifest = manifest_of(
        {f"t{i}": ((), "uint8", [Box((), ())]) for i in range(len(sizes))}
    )
    rows = rows_of(manifest)
    rows = dataclasses.replace(rows, nbytes=np.array(sizes))
    parts = split_tasks(rows, count)
    assert len(parts) == count
    for part in parts:
        assert part.nbytes.sum() <= sum(sizes) / count + max(sizes)
    assert [entry.key for part in parts for entry in part.tensors] == [
        f"t{i}" for i in range(len(sizes))
    ]
    assert [rank for part in parts for rank in part.rank] == [
        n for n, part in enumerate(parts) for _ in range(len(part))
    ]


def test_the_number_of_tasks() -> None:
    assert task_count(0) == task_count(limits.CONVERT_TASK_BYTES_MIN) == 1
    assert task_count(10 * limits.CONVERT_TASK_BYTES_MIN) == 10
    assert task_count(10 << 30) == 64
    assert task_count(5 << 40) == (5 << 40) // limits.CONVERT_TASK_BYTES_MAX


def test_an_excerpt_is_the_manifest_of_some_tensors() -> None:
    manifest = manifest_of({
        "a": ((4,), "float32", [Box((0,), (2,)), Box((2,), (2,))]),
        "b": ((1,), "int8", [Box((0,), (1,))]),
        "c": ((2, 2), "int8", [Box((0, 0), (1, 2)), Box((1, 0), (1, 2))]),
    })  # fmt: skip
    part = TensorParts(manifest).excerpt([2, 0])
    assert [entry.key for entry in part.tensors] == ["c", "a"]
    assert part.files == ("f0", "f1", "f3", "f4")
    for key in ("a", "c"):
        placed, known = (
            [(c.box, c.location, c.writer) for c in m.chunks_of(key)]
            for m in (part, manifest)
        )
        assert placed == known
    assert TensorParts(manifest).excerpt([]).files == ()
