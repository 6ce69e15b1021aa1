"""Cells that several ranks hold pieces of: left as fragments by the ranks, put together by the coordinator."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import megackpt
from megackpt import ShardedTensor
from megackpt.backends.zarr import Zarr
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.box import Box
from megackpt.planning.manifest import Manifest, ShardId
from megackpt.planning.save_plan import SavePolicy, plan_save
from megackpt.storage import LocalStorage
from megackpt.testing import (
    BackendSuite,
    MemorySource,
    ThreadedGroup,
    WatchedStorage,
    Whole,
    World,
)


class _Suite(BackendSuite):
    """its helpers; its tests run in test_conformance.py."""

    __test__ = False
    backend = Zarr()


suite = _Suite()
SMALL_CELLS = SavePolicy(gridded=True, cell_bytes=64)


def buckets(borders: list[int], dtype: str = "float32") -> World:
    """One tensor in shards of any lengths."""
    total = borders[-1]
    boxes = [Box((a,), (b - a,)) for a, b in pairwise(borders)]
    return World({"b": Whole.random(dtype, (total,), (total,)).cut(*boxes)})


def written(folder: Path, world: World, ranks: int) -> tuple[LocalStorage, Manifest]:
    """All ranks have written, in cells of at most 64 bytes; nothing is assembled."""
    root = LocalStorage(folder, create=True)
    shards = list(world.shards())
    parts = [world.declared(shards[rank::ranks], rank) for rank in range(ranks)]
    plans, manifest = plan_save(parts, SMALL_CELLS)
    announced = {
        name
        for name in Zarr().layout(ranks, manifest).files
        if name.startswith("__fragments_")
    }
    results = [Zarr().write(root, plan, MemorySource(world, plan)) for plan in plans]
    found = {name for name in os.listdir(folder) if name.startswith("__")}
    assert found == announced
    return root, replace(
        manifest.located(results), backend=("zarr", 2), save_id="0" * 32
    )


def everything(world: World) -> Any:
    return world.declared(
        [ShardId(k, Box.whole(w.values.shape)) for k, w in world.tensors.items()]
    )


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.sets(st.integers(1, 199), max_size=6),
    st.integers(1, 3),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_any_cut_comes_back(
    tmp_path_factory: pytest.TempPathFactory, cuts: set[int], ranks: int, dtype: str
) -> None:
    world = buckets([0, *sorted(cuts), 200], dtype)
    folder = tmp_path_factory.mktemp("c")
    root, manifest = written(folder, world, ranks)
    manifest = suite.finish(root, manifest)
    assert not [name for name in os.listdir(folder) if name.startswith("__")]
    assert not [name for name in manifest.files if name.startswith("__")]
    for found in (manifest, Zarr().read_manifest(root)):
        suite.expect_all(world, root, found)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/b/"}}
    assert (
        ts.open(spec, open=True).result().read().result().tobytes()
        == world.tensors["b"].values.tobytes()
    )


def test_whole_cells_are_written_by_their_owner_alone(tmp_path: Path) -> None:
    world = buckets([0, 30, 200])
    root, manifest = written(tmp_path / "c", world, 2)
    owners = {
        c.location.file: c.writer
        for c in manifest.chunks_of("b")
        if not c.location.file.startswith("__")
    }
    assert (
        len(owners) == 16
    )  # of 17: borders of cells are at multiples of 12, that of the shards at 30
    assert set(owners.values()) == {0, 1}
    before = {file: (tmp_path / "c" / file).stat().st_mtime_ns for file in owners}
    manifest = suite.finish(root, manifest)
    assert before == {
        file: (tmp_path / "c" / file).stat().st_mtime_ns for file in owners
    }
    (assembled,) = [c for c in manifest.chunks_of("b") if c.location.file not in owners]
    assert (assembled.box, assembled.writer) == (Box((24,), (12,)), 0)


def test_what_is_assembled_is_durable_before_the_pieces_go(tmp_path: Path) -> None:
    world = buckets([0, 25, 30, 200])
    _, manifest = written(tmp_path / "c", world, 3)
    root = WatchedStorage(tmp_path / "c")
    root.durable.update(root.lost())  # by the ranks
    Zarr().finish(root, manifest)
    assert not list(root.lost())


@pytest.mark.parametrize("damage", ["flipped", "cut", "removed"])
def test_a_damaged_piece_is_named_and_nothing_is_assembled_of_it(
    tmp_path: Path, damage: str
) -> None:
    world = buckets([0, 25, 30, 200])
    root, manifest = written(tmp_path / "c", world, 3)
    path = tmp_path / "c/__fragments_1"
    data = path.read_bytes()
    path.unlink()
    if damage != "removed":
        path.write_bytes(
            data[:3] if damage == "cut" else bytes([data[0] ^ 1]) + data[1:]
        )
    with pytest.raises(CorruptCheckpoint, match=r"__fragments_1"):
        Zarr().finish(root, manifest)
    assert (tmp_path / "c/__fragments_0").exists()


def test_unchecked_holes_are_named_at_the_end(tmp_path: Path) -> None:
    world = buckets([0, 25, 30, 200])
    shards = list(world.shards())
    plans, manifest = plan_save(
        [world.declared([shards[0], shards[2]])], SMALL_CELLS, validate=False
    )
    root = LocalStorage(tmp_path)
    results = [Zarr().write(root, plan, MemorySource(world, plan)) for plan in plans]
    with pytest.raises(
        BackendError, match=r"'b' \[24:36\].*not all of it was declared"
    ):
        Zarr().finish(root, manifest.located(results))


def run_save(path: Path, total: int, borders: list[list[tuple[int, int]]]) -> None:
    """Each rank holds several shards of one key, or one, or none."""
    full = torch.arange(total, dtype=torch.float32)

    def save(group: ThreadedGroup) -> None:
        state = {
            str(i): ShardedTensor(
                "bucket", full[a:b].clone(), full.dtype, (b - a,), (total,), (a,), None
            )
            for i, (a, b) in enumerate(borders[group.rank])
        }
        megackpt.save(state, path, "zarr", process_group=group)

    ThreadedGroup.run(len(borders), save)
    assert torch.equal(megackpt.load_plain_tensors(path)["bucket"], full)
    report = megackpt.verify(path)
    assert report.ok, report
    assert report.checked
    assert not report.foreign


def test_uneven_buckets_with_several_or_no_shards_per_rank(tmp_path: Path) -> None:
    """Megatron's dp_reshardable optimizer state, in cells of 256 KiB."""
    borders = [
        [(0, 100_001), (700_000, 700_000)],
        [],
        [(100_001, 350_000), (600_007, 700_000)],
        [(350_000, 600_007)],
    ]
    run_save(tmp_path / "c", 700_000, borders)
    full = torch.arange(700_000, dtype=torch.float32)

    def load(group: ThreadedGroup) -> None:
        a, b = [(0, 3), (3, 333_333), (333_333, 700_000)][group.rank]
        part = ShardedTensor(
            "bucket", torch.zeros(b - a), full.dtype, (b - a,), (700_000,), (a,), None
        )
        megackpt.load({"x": part}, tmp_path / "c", process_group=group)
        assert torch.equal(part.data, full[a:b])

    ThreadedGroup.run(3, load)


def test_a_vocabulary_that_no_number_of_ranks_divides(tmp_path: Path) -> None:
    borders = [503 * i // 8 for i in range(9)]
    full = torch.randn(503, 64).bfloat16()

    def save(group: ThreadedGroup) -> None:
        a, b = borders[group.rank], borders[group.rank + 1]
        shard = ShardedTensor(
            "w", full[a:b].clone(), full.dtype, (b - a, 64), (503, 64), (a, 0), None
        )
        for _ in range(2):  # the second time by a plan that was kept
            megackpt.save({"w": shard}, tmp_path / "c", "zarr", process_group=group)

    ThreadedGroup.run(8, save)
    found = megackpt.load_plain_tensors(tmp_path / "c")["w"]
    assert torch.equal(found.view(torch.int16), full.view(torch.int16))


def test_pieces_of_odd_dtypes_and_column_cuts(tmp_path: Path) -> None:
    columns = [Box((0, 0), (6, 5)), Box((0, 5), (6, 4)), Box((0, 9), (6, 2))]
    kinds = ("complex128", "bool", "float8_e8m0fnu", "int16")
    world = World(
        {
            k: Whole.random(k, (6, 11), (6, 11), i).cut(*columns)
            for i, k in enumerate(kinds)
        }
    )
    root, manifest = suite.save(tmp_path / "c", world, ranks=3)
    for found in (manifest, Zarr().read_manifest(root)):
        suite.expect(world, suite.load(root, found, everything(world)))
    assert np.unique(manifest.chunks.writer).tolist() == [
        0
    ]  # small tensors are one cell each


def test_a_save_that_fails_while_assembling_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in a new place nor beside a checkpoint that stands."""

    def refuse(*_: object) -> None:
        raise CorruptCheckpoint("no")

    borders = [[(0, 100_001)], [(100_001, 350_000)]]
    with monkeypatch.context() as patch:
        patch.setattr("megackpt.backends.zarr.assemble", refuse)
        with pytest.raises(megackpt.CheckpointingException, match="no"):
            run_save(tmp_path / "c", 350_000, borders)
    assert os.listdir(tmp_path) == []
    run_save(tmp_path / "c", 350_000, borders)
    with monkeypatch.context() as patch:
        patch.setattr("megackpt.backends.zarr.assemble", refuse)
        with pytest.raises(megackpt.CheckpointingException, match="no"):
            run_save(tmp_path / "c", 350_000, borders)
    assert os.listdir(tmp_path) == ["c"]
    assert megackpt.verify(tmp_path / "c").ok
