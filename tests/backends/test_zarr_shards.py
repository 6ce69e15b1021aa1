"""zarr's shards: cells of many chunks. What they consist of, where chunks lie, what stock readers see."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import tensorstore as ts
import zarr
from hypothesis import given, strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec

import megackpt.zarr_dtypes  # noqa: F401  (zarr-python learns bfloat16)
from megackpt.backends.zarr import Zarr
from megackpt.backends.zarr.codecs import MISSING, shard_index
from megackpt.backends.zarr.grid import inner_of
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.box import Box
from megackpt.planning.manifest import DIGEST_BLOCK, ITEMSIZE, OBJECT, ShardId
from megackpt.storage import LocalStorage, digest_blocks
from megackpt.testing import BackendSuite, WatchedStorage, Whole, World

LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
DTYPES = tuple(d for d in ITEMSIZE if d not in (OBJECT, "complex32"))


@pytest.mark.usefixtures("tiny_chunks")
class TestShards(BackendSuite):
    """The conformance tests, where almost every cell is a shard."""

    backend = Zarr()
    dtypes = DTYPES

    def world(self) -> World:
        world = super().world()
        return replace(
            world,
            tensors={
                key: whole for key, whole in world.tensors.items() if key != "large"
            },
        )

    @pytest.mark.slow
    def test_a_thin_slice_reads_few_bytes(self, tmp_path: Path) -> None:
        super().test_a_thin_slice_reads_few_bytes(tmp_path)


suite = TestShards()


def shards() -> World:
    """Cells cut along the first and along a later axis, padded and not."""
    return World(
        {
            "rows": Whole.random("bfloat16", (16, 5), (8, 5), 1),
            "later": Whole.random("float32", (2, 12, 3), (1, 12, 3), 2),
            "padded.rows": Whole.random("int64", (7, 4), (4, 4), 3),
            "padded.columns": Whole.random("float16", (8, 10), (8, 6), 4),
            "prime": Whole.random("uint8", (53,), (53,), 5),
        }
    )


@given(
    st.lists(st.integers(1, 1 << 12), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4, 8, 16]),
)
def test_chunks_divide_the_cell_and_are_runs_of_its_bytes(
    extents: list[int], itemsize: int
) -> None:
    cell = tuple(extents)
    inner = inner_of(cell, itemsize)
    size = math.prod(inner) * itemsize
    if inner == cell:
        return
    assert math.prod(cell) * itemsize > 4 << 20
    assert 1 << 19 <= size <= 4 << 20
    axis = (
        next(i for i, n in enumerate(inner) if n > 1) if size > itemsize else len(cell)
    )
    assert inner[axis + 1 :] == cell[axis + 1 :]
    assert all(n % step == 0 for n, step in zip(cell, inner, strict=True))


def test_usual_cells() -> None:
    assert inner_of((), 8) == ()
    assert inner_of((1024, 1024), 4) == (1024, 1024)
    assert inner_of((8192, 4096), 2) == (512, 4096)
    assert inner_of((1, 4, 16384, 1024), 2) == (1, 1, 2048, 1024)
    assert inner_of((100_000_000,), 4) == (1_000_000,)
    assert inner_of((50257, 1024), 2) == (1733, 1024)
    assert inner_of((50261, 1024), 2) == (50261, 1024)  # prime: whole


@pytest.mark.usefixtures("tiny_chunks")
def test_one_file_a_cell_many_chunks_in_it(tmp_path: Path) -> None:
    world = shards()
    _, manifest = suite.save(tmp_path / "c", world, ranks=2)
    chunks = manifest.chunks_of("rows")
    assert {c.location.file for c in chunks} == {"rows/c.0.0", "rows/c.1.0"}
    assert {c.box.shape for c in chunks} == {(4, 5)}
    document = json.loads((tmp_path / "c/rows/zarr.json").read_text())
    (sharding,) = document["codecs"]
    assert sharding["configuration"]["chunk_shape"] == [4, 5]
    assert sharding["configuration"]["codecs"] == [LITTLE, {"name": "crc32c"}]
    assert sharding["configuration"]["index_codecs"] == [LITTLE, {"name": "crc32c"}]
    assert len(manifest.chunks_of("prime")) == 1
    assert "sharding_indexed" not in (tmp_path / "c/prime/zarr.json").read_text()


@pytest.mark.usefixtures("tiny_chunks")
def test_the_bytes_of_a_shard(tmp_path: Path) -> None:
    """Chunks and their crc32c, then the index, which tells where they are, and its crc32c."""
    world = shards()
    root, manifest = suite.save(tmp_path / "c", world)
    raw = Zarr().decoded_bytes(manifest) == 0
    for i, (key, chunk) in enumerate(
        (manifest.tensors[manifest.chunks.tensor[i]].key, manifest.chunk(i))
        for i in range(len(manifest.chunks))
    ):
        data = (tmp_path / "c" / chunk.location.file).read_bytes()
        expected = world.tensors[key].values[chunk.box.slices()].tobytes()
        assert chunk.digests.tobytes() == digest_blocks(memoryview(expected))
        start, length = chunk.location.start, chunk.location.length
        assert length == len(expected)
        if raw[i]:
            assert data[start : start + length] == expected
    data = (tmp_path / "c/rows/c.1.0").read_bytes()
    starts, lengths = shard_index(root, "rows/c.1.0", 2)
    assert lengths.tolist() == [44, 44]
    assert len(data) == 2 * 44 + 2 * 16 + 4
    for start in starts.tolist():
        crc = google_crc32c.value(data[start : start + 40])
        assert data[start + 40 : start + 44] == crc.to_bytes(4, "little")
    assert (
        raw.tolist().count(False) == 2
    )  # the second shard of padded.columns, in which padding parts the rows


def expect_bytes_of_tensorstore(folder: Path, world: World, checksum: bool) -> None:
    """Save a world; every cell's file is what tensorstore writes of the same array."""
    suite_of = BackendSuite()
    suite_of.backend = Zarr(checksum=checksum)
    suite_of.save(folder / "c", world, ranks=2)
    for key, whole in world.tensors.items():
        metadata = json.loads((folder / "c" / key / "zarr.json").read_text())
        place = {"driver": "file", "path": f"{folder}/theirs/{key}/"}
        spec = {
            "driver": "zarr3",
            "kvstore": place,
            "metadata": metadata,
            "store_data_equal_to_fill_value": True,
        }
        store = ts.open(spec, create=True).result()
        store[...] = whole.values.view(store.dtype.numpy_dtype)
        theirs = {
            path.name: path.read_bytes()
            for path in (folder / "theirs" / key).glob("c*")
        }
        assert theirs == {
            path.name: path.read_bytes() for path in (folder / "c" / key).glob("c*")
        }


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.usefixtures("tiny_chunks")
def test_our_bytes_are_those_of_tensorstore(tmp_path: Path, checksum: bool) -> None:
    whole = {
        f"all.{d}": Whole.random(d, (9, 7), (6, 4), i) for i, d in enumerate(DTYPES)
    }
    beyond = {
        "beyond": Whole.random(
            "float32", (13, 3), (8, 3), 1
        ),  # a chunk of which nothing is in the tensor
        "between": Whole.random("float32", (3, 7, 5), (2, 4, 5), 2),
        "scalar": Whole.random("float64", (), (), 3),
    }
    expect_bytes_of_tensorstore(
        tmp_path, World(shards().tensors | whole | beyond), checksum
    )


def test_our_bytes_are_those_of_tensorstore_where_chunks_end_anywhere(
    tmp_path: Path,
) -> None:
    """Chunks of 3 MB, so that digest blocks and the pieces that a source gives end in the middle of them."""
    world = World({"w": Whole.random("float16", (4000, 1000), (3000, 1000))})
    expect_bytes_of_tensorstore(tmp_path, world, checksum=True)


@pytest.mark.usefixtures("tiny_chunks")
def test_stock_readers_read_every_element(tmp_path: Path) -> None:
    world = shards()
    suite.save(tmp_path / "c", world, ranks=3)
    group = zarr.open_group(tmp_path / "c", mode="r", use_consolidated=False)
    for key, whole in world.tensors.items():
        assert group[key][:].tobytes() == whole.values.tobytes()
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{tmp_path}/c/{key}/"},
        }
        store = ts.open(spec, open=True).result()
        assert store.read().result().tobytes() == whole.values.tobytes()
        assert store.chunk_layout.read_chunk.shape == inner_of(
            whole.shard, ITEMSIZE[whole.dtype]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("tiny_chunks")
def test_stock_readers_read_every_data_type(tmp_path: Path, dtype: str) -> None:
    world = World(
        {"w": Whole.random(dtype, (30, 7), (20, 7)), "s": Whole.random(dtype, (), ())}
    )
    suite.save(tmp_path / "c", world)
    for key, whole in world.tensors.items():
        array = zarr.open_array(tmp_path / "c" / key, mode="r")
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{tmp_path}/c/{key}/"},
        }
        store = ts.open(spec, open=True).result()
        assert str(array.dtype) == store.dtype.name == dtype
        for found in (array[...], store.read().result()):
            assert np.asarray(found).tobytes() == whole.values.tobytes()


@pytest.mark.usefixtures("tiny_chunks")
def test_other_readers_notice_a_flipped_bit_and_so_do_we_without_an_index(
    tmp_path: Path,
) -> None:
    world = shards()
    root, manifest = suite.save(tmp_path / "c", world)
    path = tmp_path / "c/rows/c.0.0"
    data = bytearray(path.read_bytes())
    data[manifest.chunks_of("rows")[0].location.start] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        zarr.open_group(tmp_path / "c", mode="r", use_consolidated=False)["rows"][:]
    found = Zarr().read_manifest(root)
    assert not len(found.chunks.digests)
    (problem,) = Zarr().verify_native(root, found) or []
    assert "'rows' [0:4, 0:5]" in problem
    rows = world.declared([ShardId("rows", Box.whole((16, 5)))])
    with pytest.raises(CorruptCheckpoint, match=r"'rows' \[0:4, 0:5\].*crc32c"):
        suite.load(root, found, rows)
    suite.load(root, found, rows, verify=False)


def test_a_slice_costs_what_it_weighs(tmp_path: Path) -> None:
    """A real shard of 8 MiB: exact ranges unverified, whole blocks verified."""
    world = World({"w": Whole.random("bfloat16", (2048, 2048), (2048, 2048))})
    _, manifest = suite.save(tmp_path / "c", world)
    assert len(manifest.chunks) == 2
    part = world.declared([ShardId("w", Box((1030, 0), (7, 2048)))])
    for verify, limit in ((False, 7 * 4096), (True, DIGEST_BLOCK)):
        root = WatchedStorage(tmp_path / "c")
        suite.expect(world, suite.load(root, manifest, part, verify))
        assert root.read == limit


@pytest.mark.usefixtures("tiny_chunks")
def test_places_come_from_the_shards_own_index(tmp_path: Path) -> None:
    """zarr-python writes chunks in another order (Morton's)."""
    world = World({"t": Whole.random("float32", (8, 8), (8, 8))})
    root, _ = suite.save(tmp_path / "c", world)
    root.delete("t")
    array = zarr.create_array(
        tmp_path / "c/t",
        shape=(8, 8),
        chunks=(2, 4),
        shards=(8, 8),
        dtype="float32",
        compressors=None,
    )
    array[:] = world.tensors["t"].values.view(np.float32)
    manifest = Zarr().read_manifest(root)
    assert manifest.encoding == "raw"
    assert len(manifest.chunks) == 8
    starts = [c.location.start for c in manifest.chunks_of("t")]
    assert sorted(starts) != starts
    shards = world.declared(list(world.shards()))
    for verify in (True, False):
        suite.expect(world, suite.load(root, manifest, shards, verify))


@pytest.mark.parametrize("place", ["start", "end"])
@pytest.mark.parametrize("checksum", [True, False])
def test_an_index_may_be_in_front_or_without_a_checksum(
    tmp_path: Path, place: str, checksum: bool
) -> None:
    world = World({"t": Whole.random("float32", (8, 8), (8, 8))})
    root, _ = suite.save(tmp_path / "c", world)
    root.delete("t")
    array = zarr.create_array(
        tmp_path / "c/t",
        shape=(8, 8),
        chunks=(8, 8),
        dtype="float32",
        compressors=None,
        serializer=ShardingCodec(
            chunk_shape=(2, 4),
            codecs=[BytesCodec()],
            index_codecs=[BytesCodec(), *[Crc32cCodec()] * checksum],
            index_location=place,
        ),
    )
    array[:] = world.tensors["t"].values.view(np.float32).reshape(8, 8)
    manifest = Zarr().read_manifest(root)
    assert manifest.encoding == "raw"
    assert len(manifest.chunks) == 8
    suite.expect(world, suite.load(root, manifest, world.declared([*world.shards()])))


def put_shard(
    path: Path, starts: list[int], lengths: list[int], content: int = 96
) -> bytes:
    table = np.stack(
        [np.array(starts, np.int64).view("u8"), np.array(lengths, np.int64).view("u8")],
        axis=1,
    )
    index = table.astype("<u8").tobytes()
    data = bytes(content) + index + google_crc32c.value(index).to_bytes(4, "little")
    path.write_bytes(data)
    return data


@pytest.mark.parametrize(
    ("starts", "lengths", "told"),
    [
        ([0, 1 << 62], [48, 48], "chunk 1 has 48 bytes from byte 4611686018427387904"),
        (
            [0, 100],
            [48, 48],
            "chunk 1 has 48 bytes from byte 100 on, and the file has 132",
        ),
        ([0, 48], [48, -2], "chunk 1 has 18446744073709551614 bytes"),
        ([0, -1], [48, 0], "chunk 1 has 0 bytes from byte 18446744073709551615"),
    ],
)
def test_an_index_that_lies_is_an_error(
    tmp_path: Path, starts: list[int], lengths: list[int], told: str
) -> None:
    put_shard(tmp_path / "shard", starts, lengths)
    with pytest.raises(CorruptCheckpoint, match=told):
        shard_index(LocalStorage(tmp_path), "shard", 2)


def test_an_index_that_is_damaged_or_cut_is_an_error(tmp_path: Path) -> None:
    root = LocalStorage(tmp_path)
    data = put_shard(tmp_path / "shard", [0, -1], [48, -1])
    starts, lengths = shard_index(root, "shard", 2)
    assert (starts.tolist(), lengths.tolist()) == ([0, MISSING], [48, MISSING])
    (tmp_path / "shard").write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(CorruptCheckpoint, match="crc32c"):
        shard_index(root, "shard", 2)
    with pytest.raises(
        CorruptCheckpoint, match="its index alone should have 17592186044420"
    ):
        shard_index(root, "shard", 1 << 40)
    with pytest.raises(CorruptCheckpoint, match="missing"):
        shard_index(root, "elsewhere", 2)


@pytest.mark.usefixtures("tiny_chunks")
def test_a_chunk_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    root, manifest = suite.save(tmp_path / "c", shards())
    put_shard(tmp_path / "c/rows/c.0.0", [0, -1], [44, -1])
    with pytest.raises(
        CorruptCheckpoint, match=r"rows/c.0.0 has -1 bytes of chunk 1, \[4:8, 0:5\]"
    ):
        Zarr().read_manifest(root)
    put_shard(tmp_path / "c/padded.columns/c.0.1", [0, -1], [52, -1])
    columns = shards().declared([ShardId("padded.columns", Box((2, 6), (2, 4)))])
    with pytest.raises(CorruptCheckpoint, match=r"padded\.columns"):
        suite.load(root, manifest, columns, verify=False)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"chunk_shape": [3, 5]}, CorruptCheckpoint),
        ({"chunk_shape": [0, 5]}, CorruptCheckpoint),
        ({"chunk_shape": [8]}, CorruptCheckpoint),
        ({"chunk_shape": None}, CorruptCheckpoint),
        ({"codecs": []}, CorruptCheckpoint),
        ({"codecs": [{"name": "sharding_indexed"}]}, BackendError),
        ({"codecs": [LITTLE, {"name": "zstd"}, {"name": "blosc"}]}, BackendError),
        ({"index_codecs": [LITTLE, {"name": "zstd"}]}, BackendError),
        ({"index_location": "middle"}, CorruptCheckpoint),
    ],
)
@pytest.mark.usefixtures("tiny_chunks")
def test_a_sharding_that_makes_no_sense_is_an_error(
    tmp_path: Path, change: dict[str, object], kind: type[Exception]
) -> None:
    root, _ = suite.save(tmp_path / "c", shards())
    path = tmp_path / "c/rows/zarr.json"
    document = json.loads(path.read_text())
    document["codecs"][0]["configuration"] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(kind, match=r"rows/zarr\.json"):
        Zarr().read_manifest(root)


@pytest.mark.usefixtures("tiny_chunks")
def test_absurd_shards_are_errors_and_take_no_memory(tmp_path: Path) -> None:
    root, manifest = suite.save(tmp_path / "c", shards())
    path = tmp_path / "c/padded.columns/zarr.json"
    document = json.loads(path.read_text())
    document["chunk_grid"]["configuration"]["chunk_shape"] = [1 << 62, 1 << 62]
    document["codecs"][0]["configuration"]["chunk_shape"] = [1, 1]
    path.write_text(json.dumps(document))
    with pytest.raises(CorruptCheckpoint, match="its index alone should have"):
        Zarr().read_manifest(root)
    columns = shards().declared([ShardId("padded.columns", Box((0, 6), (8, 4)))])
    with pytest.raises(CorruptCheckpoint, match=r"padded\.columns"):
        suite.load(root, manifest, columns)
