"""zarr: what other readers see, names on disk, padding, damage, hostile descriptions."""

from __future__ import annotations

import json
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import torch
import xarray
import zarr

import megackpt
from megackpt import ShardedTensor
from megackpt.backends.object_files import encode_key
from megackpt.backends.zarr import Zarr
from megackpt.backends.zarr.array_metadata import array_document, parse_array
from megackpt.backends.zarr.codecs import Packing
from megackpt.backends.zarr.grid import ArrayLayout, Cells
from megackpt.errors import BackendError, CorruptCheckpoint, StorageError
from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import (
    Declarations,
    SavePlan,
    ShardId,
    TensorEntry,
    TensorMeta,
)
from megackpt.planning.save_plan import SavePolicy, plan_save
from megackpt.storage import LocalStorage, digest_blocks
from megackpt.testing import BackendSuite, MemorySource, Whole, World


class _Suite(BackendSuite):
    """its helpers; its tests run in test_conformance.py."""

    __test__ = False
    backend = Zarr()


suite = _Suite()


def small_world(dtype: str = "float32") -> World:
    tensors = {
        "a/weight": Whole.random(dtype, (8, 6), (4, 6), 1),
        "edge": Whole.random(dtype, (7, 5), (3, 2), 2),
        "zeros": Whole(
            dtype,
            np.zeros((4, 4), np.uint32 if dtype == "float32" else np.uint16),
            (2, 4),
        ),
    }
    return World(tensors, {"rng": {(0, 0): b"r", (0, 1): b"s"}}, b"common")


def everything(world: World) -> Declarations:
    return world.declared(
        [ShardId(k, Box.whole(w.values.shape)) for k, w in world.tensors.items()]
    )


# -- what other readers see


def test_zarr_python_lists_and_reads_without_a_warning(tmp_path: Path) -> None:
    world = small_world()
    suite.save(tmp_path / "c", world, ranks=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(tmp_path / "c", mode="r")
        members = dict(group.members())
        assert sorted(members) == ["a%2Fweight", "edge", "zeros"]
        for name, array in members.items():
            whole = world.tensors[str(array.attrs["key"])]
            assert encode_key(str(array.attrs["key"])) == name
            assert array[:].tobytes() == whole.values.tobytes()


def test_zarr_python_opens_the_group_beside_arrays_it_does_not_know(
    tmp_path: Path,
) -> None:
    world = World(
        {
            "known": Whole.random("float32", (4,), (2,)),
            "odd": Whole.random("bfloat16", (4,), (2,)),
        }
    )
    suite.save(tmp_path / "c", world)
    group = zarr.open_group(tmp_path / "c", mode="r")
    assert group["known"][:].tobytes() == world.tensors["known"].values.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "complex64", "bool"])
def test_tensorstore_opens_each_array_by_its_own_description(
    tmp_path: Path, dtype: str
) -> None:
    world = World({"t": Whole.random(dtype, (7, 5), (3, 2))})
    suite.save(tmp_path / "c", world, ranks=3)
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/c/t/"},
    }
    store = ts.open(spec, open=True).result()
    assert store.dtype.name == dtype
    assert store.chunk_layout.write_chunk.shape == (3, 2)
    assert store.read().result().tobytes() == world.tensors["t"].values.tobytes()


def test_metadata_json_is_megatrons(tmp_path: Path) -> None:
    suite.save(tmp_path / "c", small_world())
    assert json.loads((tmp_path / "c/metadata.json").read_text()) == {
        "sharded_backend": "zarr",
        "sharded_backend_version": 2,
        "common_backend": "torch",
        "common_backend_version": 1,
    }


# -- cells


def test_cells_of_zeros_are_files_too(tmp_path: Path) -> None:
    suite.save(tmp_path / "c", small_world())
    assert sorted(os.listdir(tmp_path / "c/zeros")) == ["c.0.0", "c.1.0", "zarr.json"]


def test_only_padding_behind_the_bytes_leaves_a_prefix() -> None:
    meta = TensorMeta((2, 7, 5), "float32")
    boxes = [
        Box((0, 0, 0), (1, 3, 5)),
        Box((1, 6, 0), (1, 1, 5)),
        Box((0, 0, 0), (1, 3, 4)),
        Box((0, 3, 0), (2, 3, 5)),
    ]
    cells = Cells.of(
        (TensorEntry("t", meta),), ((1, 3, 5),), np.zeros(4, np.int32), Boxes.of(boxes)
    )
    assert cells.prefix[:3].tolist() == [True, True, False]
    assert cells.whole.tolist() == [True, True, False, False]
    assert cells.index[:2].tolist() == [[0, 0, 0], [1, 2, 0]]


def test_a_manifest_tells_which_chunks_are_raw(tmp_path: Path) -> None:
    world = small_world()
    _, manifest = suite.save(tmp_path / "c", world, ranks=2)
    raw = Zarr().decoded_bytes(manifest) == 0
    for i, is_raw in enumerate(raw.tolist()):
        chunk, entry = manifest.chunk(i), manifest.tensors[manifest.chunks.tensor[i]]
        data = (tmp_path / "c" / chunk.location.file).read_bytes()[
            : chunk.location.length
        ]
        assert is_raw == (digest_blocks(memoryview(data)) == chunk.digests.tobytes())
        assert entry.key == "edge" or is_raw
    assert 0 < raw.sum() < len(raw)


def test_ranks_may_write_one_array_at_the_same_time(tmp_path: Path) -> None:
    world = World({"t": Whole.random("bfloat16", (64, 8), (1, 4))})
    shards = list(world.shards())
    parts = [world.declared(shards[rank::4], rank) for rank in range(4)]
    plans, manifest = plan_save(parts, SavePolicy(gridded=True))
    with ThreadPoolExecutor(4) as pool:
        writes = [
            pool.submit(
                Zarr().write, LocalStorage(tmp_path), plan, MemorySource(world, plan)
            )
            for plan in plans
        ]
        manifest = manifest.located([write.result() for write in writes])
    suite.expect(world, suite.load(LocalStorage(tmp_path), manifest, everything(world)))


def test_rows_of_several_cells_are_refused_before_writing(tmp_path: Path) -> None:
    world = World({"t": Whole.random("float32", (8, 4), (8, 4))})
    boxes = Boxes.of([Box((0, 0), (4, 4)), Box((3, 0), (2, 4))])
    entries = (TensorEntry("t", world.meta("t")),)
    plan = SavePlan(
        0, entries, ((4, 4),), np.zeros(2, np.int32), boxes, np.zeros(2, np.int32)
    )
    root = LocalStorage(tmp_path)
    with pytest.raises(BackendError, match=r"'t' \[3:5, 0:4\]"):
        Zarr().write(root, plan, MemorySource(world, plan))
    assert root.list() == []


def test_new_folders_are_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    real = os.fsync

    def recording(fd: int) -> None:
        synced.add(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path / "c"))
        real(fd)

    monkeypatch.setattr(os, "fsync", recording)
    suite.save(tmp_path / "c", small_world())
    assert {".", "edge", "zeros", "rng.objects"} <= synced


def test_a_write_that_fails_tells_what_and_where(tmp_path: Path) -> None:
    world = small_world()
    (plan,), _ = suite.planned(world, 1)
    for i, (backend, told) in enumerate(
        ((Zarr(), "cannot create .*"), (Zarr("zstd"), "cannot create .*"))
    ):
        (tmp_path / f"{i}/edge/c.0.1").mkdir(parents=True)
        with pytest.raises(StorageError, match=rf"{told}/{i}/edge/c\.0\.1"):
            backend.write(
                LocalStorage(tmp_path / str(i)), plan, MemorySource(world, plan)
            )


# -- reading without an index


def test_every_missing_or_cut_chunk_is_named(tmp_path: Path) -> None:
    root, _ = suite.save(tmp_path / "c", small_world())
    (tmp_path / "c/edge/c.1.2").unlink()
    (tmp_path / "c/a%2Fweight/c.1.0").write_bytes(b"short")
    with pytest.raises(CorruptCheckpoint) as caught:
        Zarr().read_manifest(root)
    assert "edge/c.1.2" in str(caught.value)
    assert "a%2Fweight/c.1.0 has 5 bytes instead of 100" in str(caught.value)


def test_links_are_not_followed(tmp_path: Path) -> None:
    world = small_world()
    root, manifest = suite.save(tmp_path / "c", world)
    for file in ("edge/c.2.2", "zeros/c.0.0"):  # padded, and plain
        (tmp_path / "c" / file).rename(tmp_path / "elsewhere")
        (tmp_path / "c" / file).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CorruptCheckpoint):
            suite.load(root, manifest, everything(world), verify=False)
        (tmp_path / "elsewhere").rename(tmp_path / "c" / file)


@pytest.mark.parametrize("separator", ["/", "."])
def test_compressed_arrays_of_others_are_read(tmp_path: Path, separator: str) -> None:
    world = World({"t": Whole.random("float32", (7, 5), (3, 2))})
    root, _ = suite.save(tmp_path / "c", world)
    root.delete("t")
    values = world.tensors["t"].values.view(np.float32)
    array = zarr.create_array(
        tmp_path / "c/t",
        shape=(7, 5),
        chunks=(4, 3),
        dtype="float32",
        chunk_key_encoding={"name": "default", "separator": separator},
    )
    array[:] = values
    manifest = Zarr().read_manifest(root)
    assert manifest.encoding == "native"
    suite.expect(world, suite.load(root, manifest, everything(world)))
    corner = world.declared([ShardId("t", Box((2, 1), (4, 3)))])
    suite.expect(world, suite.load(root, manifest, corner))


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [1 << 62, 1 << 62]},
        {"shape": [7]},
        {"shape": [-1, 5]},
        {"shape": "75"},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 2]}}},
        {"chunk_grid": {"name": "rectilinear", "configuration": {}}},
        {
            "chunk_key_encoding": {
                "name": "default",
                "configuration": {"separator": "/../"},
            }
        },
        {"node_type": "group"},
        {"zarr_format": 2},
        {"attributes": {"key": 5}},
        {"attributes": []},
        {"data_type": "string"},
        {"data_type": ["float32"]},
        {"codecs": None},
        {"storage_transformers": [{"name": "odd"}]},
        {"an_extension": {"must_understand": True}},
    ],
)
def test_a_description_that_lies_is_an_error(
    tmp_path: Path, change: dict[str, object]
) -> None:
    root, _ = suite.save(tmp_path / "c", small_world())
    path = tmp_path / "c/edge/zarr.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises((CorruptCheckpoint, BackendError), match="edge"):
        Zarr().read_manifest(root)


def test_what_may_be_passed_over_is(tmp_path: Path) -> None:
    root, manifest = suite.save(tmp_path / "c", small_world())
    path = tmp_path / "c/edge/zarr.json"
    more = {
        "storage_transformers": [],
        "an_extension": {"must_understand": False},
        "dimension_names": None,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    assert set(Zarr().read_manifest(root).tensors) == set(manifest.tensors)


@pytest.mark.parametrize("how", ["folder", "link", "description"])
def test_a_lost_array_is_missed(tmp_path: Path, how: str) -> None:
    """Without our index: the group counts its arrays."""
    root, _ = suite.save(tmp_path / "c", small_world())
    if how == "description":
        (tmp_path / "c/edge/zarr.json").unlink()
    else:
        (tmp_path / "c/edge").rename(tmp_path / "elsewhere")
    if how == "link":
        (tmp_path / "c/edge").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpoint, match="lists 3 arrays, and 2 are there"):
        Zarr().read_manifest(root)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "[" * 100_000, "\udc80", '{"attributes": 5}']
)
def test_garbage_is_an_error(tmp_path: Path, text: str) -> None:
    root, _ = suite.save(tmp_path / "c", small_world())
    data = text.encode("utf-8", "surrogateescape")
    (tmp_path / "c/edge/zarr.json").write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="edge"):
        Zarr().read_manifest(root)


def test_a_description_is_what_it_was_made_of() -> None:
    meta = TensorMeta((7, 5), "bfloat16")
    planned = ArrayLayout.planned(meta, (3, 2), Packing())
    document = array_document(planned)
    layout = parse_array(json.dumps(document).encode(), "here")
    assert layout == planned
    assert layout.counts == (3, 3)
    assert layout.file((1, 2)) == "c.1.2"


def test_an_unfinished_save_is_not_taken_for_another_programs_group(
    tmp_path: Path,
) -> None:
    group = zarr.create_group(tmp_path / "other")
    group.create_array("a", shape=(4,), dtype="float32")
    assert Zarr().recognises(LocalStorage(tmp_path / "other"))
    root, _ = suite.save(tmp_path / "ours", small_world())
    root.delete("metadata.json")
    assert not Zarr().recognises(root)
    root.delete("zarr.json")
    assert not Zarr().recognises(root)


def test_xarray_opens_the_group(tmp_path: Path) -> None:
    weights = {
        "layer.weight": torch.arange(12.0).view(3, 4),
        "square": torch.eye(3),
        "step": torch.tensor(7),
    }
    state = {
        key: ShardedTensor.from_rank_offsets(key, data) for key, data in weights.items()
    }
    megackpt.save(state, tmp_path / "c", "zarr")
    opened = xarray.open_zarr(tmp_path / "c")
    assert opened["layer.weight"].dims == ("layer.weight.dim_0", "layer.weight.dim_1")
    for key, data in weights.items():
        assert torch.equal(torch.tensor(opened[key].values), data)
