"""Pieces written to the places of whole tensors, and what is told of these afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from megackpt.backends import shared_files
from megackpt.backends.base import Source, write_result
from megackpt.backends.shared_files import (
    byte_runs,
    compute_digests,
    merge_pieces,
    write_tensors,
)
from megackpt.errors import BackendError
from megackpt.planning.box import Box
from megackpt.planning.manifest import Location, Manifest, SavePlan, TensorMeta
from megackpt.planning.save_plan import SavePolicy, plan_save
from megackpt.storage import LocalStorage, digest_blocks
from megackpt.testing import MemorySource, Whole, World

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = draw(SHAPES)
    ends = [
        sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape
    ]
    return shape, Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@given(boxes(), st.sampled_from(["uint8", "bfloat16", "complex128"]))
def test_runs_are_the_bytes_of_the_box_in_order(
    given: tuple[tuple[int, ...], Box], dtype: str
) -> None:
    shape, box = given
    meta = TensorMeta(shape, dtype)
    size = int(np.prod(shape, dtype=np.int64)) * meta.itemsize
    expected = (
        np.arange(size)
        .reshape(*shape, meta.itemsize)[box.slices()]
        .reshape(-1)
        .tolist()
    )
    length, runs = byte_runs(box, meta)
    starts = list(runs)
    found = [start + i for start in starts for i in range(length)]
    assert found == expected
    # Each run is as long as can be: between two of them something is missing.
    assert all(b > a + length for a, b in pairwise(starts) if length)


def placed(
    world: World, ranks: int, gap: int = 0
) -> tuple[list[SavePlan], Manifest, dict[str, Location]]:
    """Plans in which tensors follow one another in one file, a few bytes apart."""
    found: dict[str, Location] = {}
    end = gap
    for key, whole in world.tensors.items():
        found[key] = Location("all", end, whole.values.nbytes)
        end += whole.values.nbytes + gap
    shards = list(world.shards())
    parts = [world.declared(shards[rank::ranks], rank) for rank in range(ranks)]
    plans, manifest = plan_save(parts, SavePolicy())
    return [plan.placed(found) for plan in plans], manifest, found


def write(
    root: LocalStorage, world: World, plans: list[SavePlan], manifest: Manifest
) -> Manifest:
    results = [
        write_result(p, write_tensors(root, p, MemorySource(world, p), {}))
        for p in plans
    ]
    return manifest.located(results)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_gives_the_whole_tensors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tensors = {}
    for number in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.lists(st.integers(1, 9), max_size=3).map(tuple))
        shard = tuple(data.draw(st.integers(1, n)) for n in shape)
        dtype = data.draw(st.sampled_from(["float32", "bfloat16", "uint8"]))
        tensors[f"t{number}"] = Whole.random(dtype, shape, shard, number)
    world = World(tensors)
    root = LocalStorage(tmp_path_factory.mktemp("c"))
    gap = data.draw(st.integers(0, 3))
    plans, manifest, found = placed(world, data.draw(st.integers(1, 4)), gap)
    located = write(root, world, plans, manifest)
    content = root.get("all")
    for key, place in found.items():
        assert content[place.start :][: place.length] == tensors[key].values.tobytes()
    joined, rows = merge_pieces(located, found)
    several = {key for key, whole in tensors.items() if len(list(whole.boxes())) > 1}
    assert {joined.tensors[joined.chunks.tensor[row]].key for row in rows} == several
    whole_manifest = compute_digests(root, joined, rows)
    for i, entry in enumerate(whole_manifest.tensors):
        (chunk,) = whole_manifest.chunks_of(entry.key)
        assert (chunk.box, chunk.location) == (
            Box.whole(entry.meta.shape),
            found[entry.key],
        )
        assert chunk.digests.tobytes() == digest_blocks(
            memoryview(tensors[entry.key].values.tobytes())
        )
        assert (chunk.writer == -1) == (entry.key in several), i


def test_digests_of_what_is_larger_than_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_files, "WINDOW", 1 << 20)
    small = {
        f"s{i}": Whole.random("uint8", (1 << 18,), (1 << 17,), i) for i in range(5)
    }
    world = World(
        {"large": Whole.random("uint8", (3, (1 << 20) + 7), (3, 1 << 19), 9), **small}
    )
    root = LocalStorage(tmp_path)
    plans, manifest, found = placed(world, 2)
    joined, rows = merge_pieces(write(root, world, plans, manifest), found)
    whole = compute_digests(root, joined, rows)
    for row in range(len(whole.chunks)):
        key = whole.tensors[whole.chunks.tensor[row]].key
        data = world.tensors[key].values.tobytes()
        assert whole.chunk(row).digests.tobytes() == digest_blocks(memoryview(data))


def test_a_hole_that_no_rank_wrote_is_refused() -> None:
    world = World(
        {
            "good": Whole.random("float32", (4,), (2,)),
            "bad": Whole.random("float32", (4,), (2,)),
        }
    )
    shards = [
        shard
        for shard in world.shards()
        if shard.box.offset != (2,) or shard.key == "good"
    ]
    _, manifest = plan_save([world.declared(shards)], SavePolicy(), validate=False)
    with pytest.raises(BackendError, match=r"no rank wrote parts of 'bad'$"):
        merge_pieces(manifest, {key: Location("all", 0, 16) for key in world.tensors})


class _TooMuch(Source):
    """A model that changes while it is saved."""

    def __init__(self, source: MemorySource, extra: int) -> None:
        self._source, self._extra = source, extra

    def blocks(self, row: int) -> Iterator[memoryview]:
        data = b"".join(self._source.blocks(row))
        yield memoryview(
            data + b"x" * self._extra if self._extra > 0 else data[: self._extra]
        )


@pytest.mark.parametrize("extra", [-1, 1])
def test_rows_of_another_length_are_refused_and_spoil_nothing_else(
    tmp_path: Path, extra: int
) -> None:
    world = World(
        {
            "a": Whole.random("uint8", (8,), (4,)),
            "b": Whole.random("uint8", (8,), (4,), 1),
        }
    )
    (plan,), _, _ = placed(world, 1)
    root = LocalStorage(tmp_path)
    with pytest.raises(BackendError, match=r"should have 4 bytes"):
        write_tensors(root, plan, _TooMuch(MemorySource(world, plan), extra), {})


def test_a_plan_without_places_is_refused(tmp_path: Path) -> None:
    world = World({"a": Whole.random("uint8", (8,), (4,))})
    (plan,), _, _ = placed(world, 1)
    bare = replace(plan, places=None)
    with pytest.raises(BackendError, match="plan_for_backend"):
        write_tensors(LocalStorage(tmp_path), bare, MemorySource(world, bare), {})


def test_empty_tensors_take_a_place_and_no_bytes(tmp_path: Path) -> None:
    world = World(
        {
            "none": Whole.random("float32", (0, 3), (0, 3)),
            "some": Whole.random("float32", (2,), (2,)),
        }
    )
    root = LocalStorage(tmp_path)
    plans, manifest, found = placed(world, 1, gap=8)
    joined, rows = merge_pieces(write(root, world, plans, manifest), found)
    assert not len(rows)
    assert [
        c.location.length for key in world.tensors for c in joined.chunks_of(key)
    ] == [0, 8]
