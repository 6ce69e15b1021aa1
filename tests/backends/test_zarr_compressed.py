"""zarr with compression: chosen by name when saving, found by itself when loading."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr
from numcodecs import Blosc, Zstd

import megackpt
from megackpt import ShardedTensor, Strategy
from megackpt.backends.zarr import Zarr
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.manifest import ITEMSIZE, OBJECT, ShardId
from megackpt.storage import LocalStorage
from megackpt.testing import BackendSuite, MemorySource, Whole, World

DTYPES = tuple(d for d in ITEMSIZE if d not in (OBJECT, "complex32"))


class TestZstd(BackendSuite):
    backend = Zarr("zstd")
    dtypes = DTYPES


class TestBloscWithoutChecksums(BackendSuite):
    backend = Zarr("blosc:9", checksum=False)
    dtypes = DTYPES


def zeros() -> World:
    return World(
        {
            "z": Whole("float32", np.zeros((64, 64), np.uint32), (32, 64)),
            "one": Whole.random("int8", (5,), (5,)),
        }
    )


@pytest.mark.parametrize("name", ["zstd", "zstd:19", "blosc", "blosc:1"])
@pytest.mark.usefixtures("tiny_chunks")
def test_stock_zarr_reads_it_and_it_is_smaller(tmp_path: Path, name: str) -> None:
    suite = TestZstd()
    world = zeros()
    plans, manifest = suite.planned(world, 1)
    root = LocalStorage(tmp_path / "c", create=True)
    backend = Zarr(name)
    result = backend.write(root, plans[0], MemorySource(world, plans[0]))
    finished = backend.finish(root, manifest.located([result]))
    for file, data in finished.files.items():
        root.put(file, data)
    array = zarr.open_group(tmp_path / "c", mode="r")["z"]
    assert array[:].tobytes() == world.tensors["z"].values.tobytes()
    codecs = json.loads((tmp_path / "c/z/zarr.json").read_text())["codecs"][0][
        "configuration"
    ]["codecs"]
    assert [codec["name"] for codec in codecs] == [
        "bytes",
        name.partition(":")[0],
        "crc32c",
    ]
    level = codecs[1]["configuration"].get(
        "level", codecs[1]["configuration"].get("clevel")
    )
    assert level == int(name.partition(":")[2] or {"zstd": 3, "blosc": 5}[name])


def test_a_strategy_says_so_and_a_load_needs_not(tmp_path: Path) -> None:
    full = torch.arange(1 << 16, dtype=torch.float32).reshape(256, 256)
    sizes = {}
    for name in (None, "zstd", "blosc:9"):
        path = tmp_path / str(name).replace(":", "")
        shard = ShardedTensor.from_rank_offsets("w", full)
        megackpt.save(
            {"w": shard}, path, Strategy("zarr", options={"compression": name})
        )
        found = ShardedTensor.from_rank_offsets("w", torch.zeros(256, 256))
        megackpt.load({"w": found}, path)
        assert torch.equal(found.data, full)
        report = megackpt.verify(path)
        assert report.ok, report
        assert report.checked
        sizes[name] = sum(f.stat().st_size for f in (path / "w").rglob("*"))
        chunk = path / "w/c.0.0"
        data = bytearray(chunk.read_bytes())
        data[len(data) // 2] ^= 1
        chunk.write_bytes(data)
        (problem,) = megackpt.verify(path).problems
        assert "'w' [0:256, 0:256]" in problem
    assert sizes["blosc:9"] < sizes["zstd"] < sizes[None]


def test_a_plan_that_is_kept_serves_another_compression(tmp_path: Path) -> None:
    for i, name in enumerate(("zstd", None, "blosc")):
        shard = ShardedTensor.from_rank_offsets("w", torch.full((64, 64), float(i)))
        megackpt.save(
            {"w": shard},
            tmp_path / "c",
            Strategy("zarr", options={"compression": name}),
        )
        assert megackpt.load_plain_tensors(tmp_path / "c")["w"][0, 0] == i
        assert megackpt.verify(tmp_path / "c").ok


@pytest.mark.parametrize(
    "name", ["gzip", "zstd:0", "zstd:23", "zstd:", "zstd:x", "blosc:10", "", 5, "ZSTD"]
)
def test_what_is_unknown_is_refused_with_all_that_is_known(name: object) -> None:
    with pytest.raises(
        BackendError, match=r"'zstd:LEVEL' \(1 to 22, else 3\).*'blosc:LEVEL' \(1 to 9"
    ):
        Strategy("zarr", options={"compression": name}).make_backend()


def test_checksum_is_yes_or_no() -> None:
    with pytest.raises(BackendError, match="True or False"):
        Zarr(checksum="crc32c")  # type: ignore[arg-type]


def bomb(tmp_path: Path, codec: str) -> tuple[LocalStorage, World]:
    """A chunk of 64 KiB, in whose place some bytes stand that decode to a lot."""
    world = World({"t": Whole.random("float32", (128, 128), (128, 128))})
    TestZstd().save(tmp_path / "c", world)
    root = LocalStorage(tmp_path / "c")
    document = json.loads((tmp_path / "c/t/zarr.json").read_text())
    how = {
        "zstd": {"level": 3},
        "blosc": {
            "cname": "zstd",
            "clevel": 1,
            "shuffle": "shuffle",
            "typesize": 4,
            "blocksize": 0,
        },
    }
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    document["codecs"] = [little, {"name": codec, "configuration": how[codec]}]
    (tmp_path / "c/t/zarr.json").write_text(json.dumps(document))
    large = np.zeros(1 << 30, np.uint8)
    packed = (
        Zstd(1).encode(large) if codec == "zstd" else Blosc("zstd", 1).encode(large)
    )
    assert len(packed) < 1 << 20
    (tmp_path / "c/t/c.0.0").write_bytes(packed)
    return root, world


@pytest.mark.parametrize(
    "codec", ["zstd", pytest.param("blosc", marks=pytest.mark.slow)]
)
def test_bombs_do_not_explode(tmp_path: Path, codec: str) -> None:
    """In a process of its own, whose memory is limited to what a chunk may need."""
    _, world = bomb(tmp_path, codec)
    assert list(world.tensors) == ["t"]
    code = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_zarr_compressed
test_zarr_compressed.read_bomb({str(tmp_path / "c")!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "t" in done.stdout


def read_bomb(path: str) -> None:
    world = World({"t": Whole.random("float32", (128, 128), (128, 128))})
    suite = TestZstd()
    root = LocalStorage(path)
    manifest = Zarr().read_manifest(root)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptCheckpoint) as caught:
        suite.load(
            root,
            manifest,
            world.declared([ShardId("t", next(world.tensors["t"].boxes()))]),
        )
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 << 10, f"{grown} KiB"
    print(caught.value)


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
GZIP = [LITTLE, {"name": "gzip", "configuration": {"level": 1}}]


@pytest.mark.parametrize("dtype", ["float32", "complex64", "int16", "uint8"])
def test_arrays_with_other_codecs_are_read(tmp_path: Path, dtype: str) -> None:
    """As tensorstore writes them: in place of ours."""
    values = np.random.default_rng(1).integers(0, 99, (5, 6, 7)).astype(dtype)
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.from_numpy(values))}
    megackpt.save(state, tmp_path, "zarr")
    (tmp_path / "megackpt.index").unlink()
    document = json.loads((tmp_path / "w/zarr.json").read_text())
    document["codecs"] = GZIP
    document["chunk_grid"]["configuration"]["chunk_shape"] = [3, 4, 5]
    (tmp_path / "w/c.0.0.0").unlink()
    (tmp_path / "w/zarr.json").unlink()
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/w/"},
        "metadata": {k: v for k, v in document.items() if k != "attributes"},
        "store_data_equal_to_fill_value": True,
    }
    ts.open(spec, create=True).result().write(values).result()
    (tmp_path / "w/zarr.json").write_text(json.dumps(document))
    found = megackpt.load_plain_tensors(tmp_path)["w"]
    assert found.numpy().tobytes() == values.tobytes()
    part = ShardedTensor("w", None, found.dtype, (2, 3, 4), (5, 6, 7), (2, 2, 2), None)
    state = megackpt.load({"w": part}, tmp_path, validate_access_integrity=False)
    assert np.array_equal(state["w"].numpy(), values[2:4, 2:5, 2:6])


@pytest.mark.parametrize(
    "codecs",
    [
        [{"name": "zstd"}, LITTLE],
        [LITTLE, LITTLE],
        [LITTLE, {"name": "packbits"}],
        [LITTLE, {"name": "numcodecs.pickle"}],
        [LITTLE, {"name": "zstd"}, {"name": "gzip"}],
        [{"name": "bytes"}],
        [{"name": "crc32c"}],
    ],
    ids=str,
)
def test_codecs_that_cannot_be_read_are_refused(
    tmp_path: Path, codecs: list[object]
) -> None:
    world = World({"t": Whole.random("float32", (4, 4), (4, 4))})
    root, _ = TestZstd().save(tmp_path, world)
    document = json.loads((tmp_path / "t/zarr.json").read_text())
    document["codecs"] = codecs
    (tmp_path / "t/zarr.json").write_text(json.dumps(document))
    with pytest.raises(
        BackendError,
        match=r"t/zarr\.json: the (codecs .* cannot be|description)|not take",
    ):
        Zarr().read_manifest(root)


@pytest.mark.parametrize("compression", ["zstd", "blosc"])
@pytest.mark.parametrize("damage", ["cut", "longer", "short"])
def test_damaged_chunks_are_corrupt(
    tmp_path: Path, compression: str, damage: str
) -> None:
    world = World({"t": Whole.random("float32", (64, 64), (64, 64))})
    suite = TestZstd()
    root, _ = TestBloscWithoutChecksums().save(tmp_path, world)
    if compression == "zstd":
        document = json.loads((tmp_path / "t/zarr.json").read_text())
        document["codecs"] = [LITTLE, {"name": "zstd", "configuration": {"level": 1}}]
        (tmp_path / "t/zarr.json").write_text(json.dumps(document))
        chunk = world.tensors["t"].values.tobytes()
        (tmp_path / "t/c.0.0").write_bytes(Zstd(1).encode(chunk))
    path = tmp_path / "t/c.0.0"
    data = path.read_bytes()
    contents = {"cut": data[:-5], "longer": data + b"12345", "short": data[:7]}
    path.write_bytes(contents[damage])
    rows = world.declared(list(world.shards()))
    with pytest.raises(
        CorruptCheckpoint, match=f"'t'.*({compression}|tensorstore) cannot"
    ):
        suite.load(root, Zarr().read_manifest(root), rows)
