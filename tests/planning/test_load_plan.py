"""Resharding: what is planned to be read is what numpy indexing would give, and nothing is read twice."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, strategies as st

from megackpt.errors import CorruptCheckpoint, MismatchError
from megackpt.planning import load_plan
from megackpt.planning.box import Box, Boxes
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import (
    Chunks,
    Declaration,
    Declarations,
    Manifest,
    ShardId,
    TensorEntry,
    TensorMeta,
)

Tensor = tuple[str, tuple[int, ...], list[Box]]


def manifest_of(tensors: Iterable[Tensor], dtype: str = "int64") -> Manifest:
    tensors = list(tensors)
    rows = [(i, box) for i, (_, _, boxes) in enumerate(tensors) for box in boxes]
    random.Random(0).shuffle(rows)
    zeros = np.zeros(len(rows), np.int64)
    entries = tuple(
        TensorEntry(key, TensorMeta(shape, dtype)) for key, shape, _ in tensors
    )
    chunks = Chunks(
        np.array([i for i, _ in rows], np.int32),
        Boxes.of(box for _, box in rows),
        zeros.astype(np.int32),
        zeros.astype(np.int32),
        zeros,
        zeros,
        np.zeros((0, 16), np.uint8),
    )
    return Manifest(entries, (None,) * len(entries), chunks, ("file",))


def wanted_of(
    rows: Iterable[tuple[str, tuple[int, ...], Box]],
    flexible: bool = False,
    dtype: str = "int64",
) -> Declarations:
    return Declarations.of(
        [
            Declaration(
                ShardId(k, b), TensorMeta(s, dtype), 0, flexible, 8 * b.volume, 0
            )
            for k, s, b in rows
        ]
    )


def tiles(rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    boxes = [Box.whole(shape)]
    for _ in range(rng.randrange(6)):
        box = boxes.pop(rng.randrange(len(boxes)))
        axes = [a for a, n in enumerate(box.shape) if n > 1]
        if not axes:
            boxes.append(box)
            continue
        axis = rng.choice(axes)
        at = rng.randint(1, box.shape[axis] - 1)
        for low, high in ((0, at), (at, box.shape[axis])):
            offset, extent = list(box.offset), list(box.shape)
            offset[axis] += low
            extent[axis] = high - low
            boxes.append(Box(tuple(offset), tuple(extent)))
    return boxes


def part(rng: random.Random, shape: tuple[int, ...]) -> Box:
    offset = [rng.randint(0, n) for n in shape]
    return Box(
        tuple(offset),
        tuple(rng.randint(0, n - o) for n, o in zip(shape, offset, strict=True)),
    )


@pytest.mark.parametrize("pairs", [1 << 19, 3])
@given(
    shapes=st.lists(
        st.lists(st.integers(1, 8), max_size=3).map(tuple), min_size=1, max_size=4
    ),
    rng=st.randoms(use_true_random=False),
)
def test_reading_by_the_plan_is_indexing(
    pairs: int, shapes: list[tuple[int, ...]], rng: random.Random
) -> None:
    values = {
        f"t{i}": np.arange(np.prod(shape, dtype=int)).reshape(shape)
        for i, shape in enumerate(shapes)
    }
    manifest = manifest_of(
        (key, value.shape, tiles(rng, value.shape)) for key, value in values.items()
    )
    wanted = wanted_of(
        (key, values[key].shape, part(rng, values[key].shape))
        for key in rng.choices(list(values), k=rng.randrange(6))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_plan, "PAIRS", pairs)
        plan = plan_load(wanted, manifest)
    results = [np.full(row.shard.box.shape, -1) for row in wanted.rows()]
    assert plan.target.tolist() == sorted(plan.target.tolist())
    for item in plan.rows():
        assert item.box.volume
        assert item.chunk.box.contains(item.box)
        local = item.box.relative_to(wanted.row(item.target).shard.box)
        target = results[item.target][(*local.slices(), ...)]
        assert (target == -1).all()
        target[...] = values[item.entry.key][item.box.slices()]
    for row, result in zip(wanted.rows(), results, strict=True):
        assert (result == values[row.shard.key][row.shard.box.slices()]).all()


def test_flexible_rows_get_what_overlaps() -> None:
    manifest = manifest_of([("w", (6, 2), [Box((0, 0), (3, 2)), Box((3, 0), (3, 2))])])
    wanted = wanted_of(
        [
            ("w", (8, 2), Box((4, 0), (4, 2))),
            ("w", (8, 2), Box((6, 0), (2, 2))),
            ("w", (4, 2), Box((0, 0), (4, 2))),
        ],
        flexible=True,
    )
    items = [(item.target, item.box) for item in plan_load(wanted, manifest).rows()]
    assert items == [
        (0, Box((4, 0), (2, 2))),
        (2, Box((0, 0), (3, 2))),
        (2, Box((3, 0), (1, 2))),
    ]
    with pytest.raises(
        MismatchError, match=r"'w' \[4:8, 0:2\] was asked for, but .* shape \(6, 2\)"
    ):
        plan_load(wanted_of([("w", (8, 2), Box((4, 0), (4, 2)))]), manifest)


def test_keys_and_kinds_that_do_not_fit_are_all_named() -> None:
    manifest = manifest_of(
        [("w", (2,), [Box((0,), (2,))]), ("v", (2,), [Box((0,), (2,))])]
    )
    wanted = wanted_of(
        [
            ("x", (2,), Box((0,), (2,))),
            ("y", (2,), Box((0,), (2,))),
            ("v", (1, 2), Box((0, 0), (1, 2))),
        ]
    )
    with pytest.raises(
        MismatchError,
        match=r"(?s)Unexpected keys: 'x'.*'y'.*'v' is stored as int64 .2,. and asked for as int64 .1, 2.",
    ):
        plan_load(wanted, manifest)
    with pytest.raises(
        MismatchError, match=r"stored as int64 .2,. and asked for as object"
    ):
        plan_load(wanted_of([("w", (2,), Box((0,), (1,)))], dtype="object"), manifest)


def test_objects_are_fetched_whole_and_never_resharded() -> None:
    manifest = manifest_of(
        [("rng", (2,), [Box((0,), (1,)), Box((1,), (1,))])], dtype="object"
    )
    wanted = wanted_of([("rng", (2,), Box((1,), (1,)))], dtype="object")
    assert [item.box for item in plan_load(wanted, manifest).rows()] == [
        Box((1,), (1,))
    ]
    with pytest.raises(
        MismatchError, match=r"stored as object .2,. and asked for as object .3,."
    ):
        plan_load(wanted_of([("rng", (3,), Box((1,), (1,)))], dtype="object"), manifest)


def test_holes_and_overlaps_in_what_is_stored() -> None:
    whole = wanted_of([("w", (6,), Box((1,), (5,)))])
    holes = manifest_of([("w", (6,), [Box((0,), (2,)), Box((4,), (2,))])])
    with pytest.raises(
        CorruptCheckpoint,
        match=r"'w' \[1:6\]: \[2:4\] cannot be read, no stored chunk holds it",
    ):
        plan_load(whole, holes)
    assert len(plan_load(wanted_of([("w", (6,), Box((4,), (2,)))]), holes)) == 1
    # Hole and overlap together keep the volume; the same chunk twice does so on a regular grid.
    for boxes in (
        [Box((0,), (3,)), Box((1,), (3,))],
        [Box((3,), (3,)), Box((3,), (3,))],
    ):
        with pytest.raises(CorruptCheckpoint, match="cannot be read"):
            plan_load(whole, manifest_of([("w", (6,), boxes)]))
    beyond = manifest_of([("w", (6,), [Box((0,), (9,))])])
    assert [item.box for item in plan_load(whole, beyond).rows()] == [Box((1,), (5,))]


def test_a_hole_is_found_behind_many_rows_that_are_whole() -> None:
    # Each row has to be examined: the tensor as a whole is known to have a hole.
    size = 3_000
    cells = [Box((i,), (1,)) for i in range(size)]
    wanted = wanted_of([("w", (size,), cell) for cell in cells])
    with pytest.raises(
        CorruptCheckpoint, match=r"'w' \[2999:3000\]: .* cannot be read"
    ):
        plan_load(wanted, manifest_of([("w", (size,), cells[:-1])]))
    with pytest.raises(CorruptCheckpoint, match=r"and \d+ more"):
        plan_load(wanted, manifest_of([("w", (size,), cells[:1])]))


def test_tensors_without_elements_or_dimensions() -> None:
    manifest = manifest_of(
        [("s", (), [Box((), ())]), ("e", (0, 3), [Box((0, 0), (0, 3))])]
    )
    wanted = wanted_of([("s", (), Box((), ())), ("e", (0, 3), Box((0, 0), (0, 3)))])
    assert [(item.target, item.box) for item in plan_load(wanted, manifest).rows()] == [
        (0, Box((), ()))
    ]
    assert len(plan_load(wanted_of([]), manifest)) == 0
    assert len(plan_load(wanted_of([]), manifest_of([]))) == 0


def test_many_chunks_for_many_wanted_boxes() -> None:
    ends = np.cumsum(np.random.default_rng(0).integers(1, 9, 10_000)).tolist()
    boxes = [Box((a,), (b - a,)) for a, b in zip([0, *ends], ends, strict=False)]
    size = ends[-1]
    step = -(-size // 5_000)
    wanted = [Box((a,), (min(step, size - a),)) for a in range(0, size, step)]
    plan = plan_load(
        wanted_of(("w", (size,), b) for b in wanted),
        manifest_of([("w", (size,), boxes)]),
    )
    assert plan.boxes.volume.sum() == size
    assert len(plan) <= len(boxes) + len(wanted)
