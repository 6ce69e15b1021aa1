"""Arrays that zarr-python and tensorstore have written, in version 2 and 3 of zarr, with any of their options."""

from __future__ import annotations

import json
import logging
import lzma
import os
import random
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr
import zarr.codecs
import zarr.codecs.numcodecs
import zstandard

import megackpt
import megackpt.zarr_dtypes
from megackpt import ShardedTensor, Strategy
from megackpt.__main__ import main
from megackpt.backends.zarr import Zarr, library_decoders
from megackpt.backends.zarr.array_metadata import read_layout
from megackpt.backends.zarr.library_decoders import decode
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.storage import LocalStorage
from tests.bits import assert_same
from tests.buckets import Bucket
from tests.converter.test_memory import peak
from tests.foreign.bars import check_conversions, check_layouts, check_resuming

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
)
PLAIN = DTYPES[:-3]  # numpy's own
ARRAYS = 300
FOLDERS = 10
BLOSC = {"id": "blosc", "cname": "zstd", "clevel": 3, "shuffle": 1, "blocksize": 0}
INDEX_CODECS = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]


def as_tensor(values: Any) -> torch.Tensor:
    """The same bits in torch, little-endian."""
    name = np.dtype(values.dtype).name
    kind = values.dtype.newbyteorder("=")
    plain = np.array(values, kind, order="C")
    octets = torch.from_numpy(plain.reshape(-1).view(np.uint8).copy())
    return octets.view(getattr(torch, name)).reshape(values.shape)


class Maker:
    """Writes random arrays with random options into a folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.choice = random.Random(seed)
        self.bits = np.random.default_rng(seed)
        self.expected: dict[str, torch.Tensor] = {}

    def some(self, *values: Any) -> Any:
        return self.choice.choice(values)

    def values(self, dtype: str, fill: Any) -> Any:
        """Random numbers, with a region of the fill value, so that chunks are missing."""
        shape = tuple(self.some(1, 3, 8, 13) for _ in range(self.some(0, 1, 2, 2, 3)))
        kind = ts.dtype(dtype).numpy_dtype
        top = 2 if dtype == "bool" else 100
        values = self.bits.integers(0, top, shape).astype(kind)
        if shape:
            values[: self.some(0, shape[0] // 2)] = fill
        return values

    def chunks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(max(1, min(extent, self.some(2, 4, 5))) for extent in shape)

    def add(self, name: str, writer: str, version: int) -> None:
        dtype = self.some(*DTYPES)
        fill = self.some(0, 1)
        values = self.values(dtype, fill)
        key = self.some("", "group.a/", "group.a/b/") + f"{name}.{dtype}"
        write = getattr(self, f"{writer}_v{version}")
        write(self.folder / key, values, fill)
        self.expected[key] = as_tensor(values)

    def zarr_python_v2(self, path: Path, values: Any, fill: Any) -> None:
        item = values.dtype.str
        kinds = [None, numcodecs.Zlib(1), numcodecs.GZip(1), numcodecs.BZ2(1)]
        kinds += [numcodecs.Zstd(1), numcodecs.Blosc("lz4", 1), numcodecs.LZ4()]
        kinds += [numcodecs.LZMA(preset=1)]
        if values.dtype.name not in PLAIN:
            kinds = [None]  # numcodecs takes numpy's own dtypes only
        chains: list[Any] = [None]
        dtype = values.dtype
        if values.dtype.name in PLAIN and values.dtype.kind in "iuf":
            chains += [[numcodecs.Shuffle(values.dtype.itemsize)]]
            chains += [[numcodecs.Delta(item)]]
            chains += [[numcodecs.FixedScaleOffset(0, 1, dtype=item)]]
            dtype = values.dtype.newbyteorder(self.some("<", ">"))
        filters = self.some(*chains) if dtype == values.dtype else None
        array = zarr.create_array(
            path,
            shape=values.shape,
            chunks=self.chunks(values.shape),
            dtype=dtype,
            zarr_format=2,
            fill_value=values.dtype.type(fill),
            compressors=self.some(*kinds),
            filters=filters,
            order=self.some("C", "F"),
            chunk_key_encoding={"name": "v2", "separator": self.some(".", "/")},
        )
        array[...] = values

    def zarr_python_v3(self, path: Path, values: Any, fill: Any) -> None:
        ours = zarr.codecs
        theirs = zarr.codecs.numcodecs
        compressors = self.some(
            None,
            ours.ZstdCodec(level=1),
            ours.BloscCodec(cname="lz4"),
            ours.GzipCodec(level=1),
            ours.Crc32cCodec(),
            [ours.ZstdCodec(level=1), ours.Crc32cCodec()],
            [ours.GzipCodec(level=1), ours.ZstdCodec(level=1)],
            theirs.LZ4(),
            theirs.LZMA(preset=1),
            theirs.BZ2(level=1),
            theirs.Zlib(level=1),
        )
        chunks = self.chunks(values.shape)
        order = list(range(values.ndim))[::-1]
        filters = None
        if values.ndim > 1 and self.some(True, False):
            filters = [ours.TransposeCodec(order=order)]
        shards = None
        if values.ndim and self.some(True, False):
            shards = tuple(self.some(1, 2) * extent for extent in chunks)
        encoding = self.some(
            {"name": "default", "separator": "/"},
            {"name": "default", "separator": "."},
            {"name": "v2", "separator": "."},
        )
        array = zarr.create_array(
            path,
            shape=values.shape,
            chunks=chunks,
            shards=shards,
            dtype=values.dtype,
            fill_value=values.dtype.type(fill),
            compressors=compressors,
            filters=filters,
            serializer=ours.BytesCodec(
                endian=self.some("little", "big")
                if values.dtype.kind != "V" and values.dtype.itemsize > 1
                else "little"
            ),
            chunk_key_encoding=encoding,
        )
        array[...] = values

    def tensorstore(
        self, driver: str, path: Path, metadata: Mapping[str, Any], values: Any
    ) -> None:
        spec = {
            "driver": driver,
            "kvstore": {"driver": "file", "path": f"{path}/"},
            "metadata": metadata,
        }
        ts.open(spec, create=True).result().write(values).result()

    def tensorstore_v2(self, path: Path, values: Any, fill: Any) -> None:
        name = values.dtype.name
        compressors = [None, BLOSC, {"id": "zlib", "level": 1}]
        compressors += [{"id": kind, "level": 1} for kind in ("gzip", "bz2", "zstd")]
        metadata = {
            "shape": values.shape,
            "chunks": self.chunks(values.shape),
            "dtype": values.dtype.newbyteorder(self.some("<", ">")).str
            if name in PLAIN
            else name,
            "compressor": self.some(*compressors),
            "fill_value": bool(fill) if name == "bool" else fill,
            "order": self.some("C", "F") if values.ndim > 1 else "C",
            "filters": None,
            "dimension_separator": self.some(".", "/"),
        }
        if values.dtype.kind == "c":
            del metadata["fill_value"]
            metadata["fill_value"] = None
            values[...] = values + 1  # without a fill value zeros are stored or not
        self.tensorstore("zarr", path, metadata, values)

    def tensorstore_v3(self, path: Path, values: Any, fill: Any) -> None:
        name = values.dtype.name
        chunks = self.chunks(values.shape)

        def chain(ndim: int) -> list[dict[str, Any]]:
            codecs: list[dict[str, Any]] = []
            if ndim > 1 and self.some(True, False):
                order = self.choice.sample(range(ndim), ndim)
                codecs.append({"name": "transpose", "configuration": {"order": order}})
            endian = self.some("little", "big")
            codecs.append({"name": "bytes", "configuration": {"endian": endian}})
            blosc = {"cname": "lz4", "clevel": 1, "shuffle": "shuffle", "blocksize": 0}
            typesize = {"typesize": values.dtype.itemsize}
            packed = {
                "gzip": {"level": 1},
                "zstd": {"level": 1},
                "blosc": blosc | typesize,
            }
            kind = self.some("", *packed)
            if kind:
                codecs.append({"name": kind, "configuration": packed[kind]})
            if self.some(True, False):
                codecs.append({"name": "crc32c"})
            return codecs

        codecs = chain(values.ndim)
        if values.ndim and self.some(True, False):
            inner = chunks
            chunks = tuple(self.some(1, 2) * extent for extent in inner)
            index = self.some(INDEX_CODECS, INDEX_CODECS[:1])
            shard = {
                "chunk_shape": inner,
                "codecs": codecs,
                "index_codecs": index,
                "index_location": self.some("start", "end"),
            }
            codecs = [{"name": "sharding_indexed", "configuration": shard}]
        plain: Any = fill
        if name == "bool":
            plain = bool(fill)
        elif values.dtype.kind == "c":
            plain = [float(fill), 0.0]
        grid = {"name": "regular", "configuration": {"chunk_shape": chunks}}
        separator = {"separator": self.some(".", "/")}
        encoding = {"name": self.some("default", "v2"), "configuration": separator}
        metadata = {
            "shape": values.shape,
            "data_type": name,
            "chunk_grid": grid,
            "chunk_key_encoding": encoding,
            "fill_value": plain,
            "codecs": codecs,
        }
        self.tensorstore("zarr3", path, metadata, values)


def made(folder: Path, number: int) -> Maker:
    """One of the folders: every second one has the document of a group."""
    maker = Maker(folder, number)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # zarr-python's, of codecs without a specification
        if number % 2:
            zarr.create_group(folder, zarr_format=2 + number % 4 // 2)
        for i in range(ARRAYS // FOLDERS):
            writer = ("zarr_python", "tensorstore")[i % 2]
            maker.add(f"w{i}", writer, 2 + i // 2 % 2)
    return maker


def readers_of(folder: Path, keys: Mapping[str, object]) -> Counter[str]:
    """Who decodes the chunks of each array: megackpt, tensorstore or zarr-python."""
    root = LocalStorage(folder)
    found: Counter[str] = Counter()
    for key in keys:
        layout = read_layout(root, key)
        assert layout is not None
        library = layout.packing.compressor
        found[library if library in ("tensorstore", "zarr-python") else "megackpt"] += 1
    return found


@pytest.mark.parametrize("number", range(FOLDERS))
def test_random_arrays_load_bit_equal_at_other_layouts(
    tmp_path: Path, number: int
) -> None:
    maker = made(tmp_path, number)
    check_layouts(tmp_path, maker.expected)
    readers = readers_of(tmp_path, maker.expected)
    print(dict(readers))
    assert len(readers) == 3


def test_show_verify_and_convert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    maker = made(tmp_path / "source", 3)
    assert main(["show", str(tmp_path / "source"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["format"], shown["version"]) == ("zarr", 3)
    assert {entry["key"] for entry in shown["entries"]} == maker.expected.keys()
    assert megackpt.verify(tmp_path / "source").ok
    assert any("/" in key for key in maker.expected)
    check_conversions(tmp_path / "source", maker.expected, tmp_path)


def test_a_conversion_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = made(tmp_path / "source", 4)
    check_resuming(tmp_path / "source", maker.expected, tmp_path / "out", monkeypatch)


@pytest.mark.parametrize("version", [2, 3])
def test_missing_chunks_have_the_fill_value_and_may_be_refused(
    tmp_path: Path, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    array = zarr.create_array(
        tmp_path / "group/w",
        shape=(10, 6),
        chunks=(2, 6),
        dtype="float32",
        fill_value=2.5,
        zarr_format=version,
    )
    array[4:6] = 7
    expected = torch.full((10, 6), 2.5)
    expected[4:6] = 7
    with caplog.at_level(logging.INFO, "megackpt"):
        found = megackpt.load_plain_tensors(tmp_path / "group")["w"]
    assert_same(found, expected, "w")
    lines = [r.message for r in caplog.records if "not stored" in r.message]
    assert len(lines) == 1
    assert "4 chunks are not stored" in lines[0]
    assert megackpt.verify(tmp_path / "group").ok
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(10, 6))}
    strict = Strategy("zarr", options={"missing_chunks": "error"})
    with pytest.raises(CorruptCheckpoint, match=r"'w' .* lacks the chunk w/"):
        megackpt.load(state, tmp_path / "group", strict)
    with pytest.raises(BackendError, match="missing_chunks must be"):
        Strategy("zarr", options={"missing_chunks": "zero"}).make_backend()


@pytest.mark.parametrize("version", [2, 3])
def test_an_array_without_any_chunk_costs_nothing(tmp_path: Path, version: int) -> None:
    """It has a trillion chunks, and its region is as quick as a small array's."""
    zarr.create_array(
        tmp_path / "w",
        shape=(1 << 40, 4),
        chunks=(1, 4),
        dtype="int16",
        fill_value=-3,
        zarr_format=version,
    )
    part = ShardedTensor(
        "w", None, torch.int16, (5, 4), (1 << 40, 4), (1 << 39, 0), None
    )
    found = megackpt.load({"w": part}, tmp_path, validate_access_integrity=False)["w"]
    assert_same(found, torch.full((5, 4), -3, dtype=torch.int16), "w")
    assert megackpt.verify(tmp_path).ok


def test_a_single_array_is_called_array(tmp_path: Path) -> None:
    for version in (2, 3):
        folder = tmp_path / f"v{version}"
        array = zarr.create_array(
            folder, shape=(4, 6), chunks=(3, 2), dtype="int32", zarr_format=version
        )
        array[...] = np.arange(24).reshape(4, 6)
        found = megackpt.load_plain_tensors(folder)
        assert_same(found["array"], torch.arange(24, dtype=torch.int32).view(4, 6))
        megackpt.convert(folder, tmp_path / f"to{version}", "zarr")
        assert megackpt.load_plain_tensors(tmp_path / f"to{version}").keys() == {
            "array"
        }


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("dtype", ["<U4", "M8[ns]"])
def test_texts_and_dates_are_refused_by_name(
    tmp_path: Path, version: int, dtype: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.create_array(
            tmp_path / "names", shape=(4,), dtype=dtype, zarr_format=version
        )
    with pytest.raises(BackendError, match=r"names/.*no tensor holds texts, dates"):
        megackpt.load_plain_tensors(tmp_path)


def write_chunk(folder: Path, codecs: list[dict[str, Any]], stored: bytes) -> None:
    """An int32 array of (4, 6) in one chunk, which holds these bytes."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    (folder / "w/c/0").mkdir(parents=True)
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [4, 6],
        "data_type": "int32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 6]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [little, *codecs],
    }
    (folder / "w/zarr.json").write_text(json.dumps(document))
    (folder / "w/c/0/0").write_bytes(stored)


def test_a_zstd_frame_need_not_state_its_size(tmp_path: Path) -> None:
    values = np.arange(24, dtype="<i4").reshape(4, 6)
    packer = zstandard.ZstdCompressor(write_content_size=False)
    zstd = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
    write_chunk(tmp_path, [zstd], packer.compress(values.tobytes()))
    found = megackpt.load_plain_tensors(tmp_path)["w"]
    assert_same(found, as_tensor(values))


def test_zarr_python_decodes_on_after_a_chunk_that_it_had_to_leave(
    tmp_path: Path,
) -> None:
    values = np.arange(24, dtype="<i4").reshape(4, 6)
    codec = {"name": "numcodecs.lzma", "configuration": {"preset": 1}}
    write_chunk(tmp_path / "good", [codec], lzma.compress(values.tobytes()))
    write_chunk(tmp_path / "bomb", [codec], lzma.compress(bytes(400 << 20), preset=0))
    for _ in range(2):
        with pytest.raises(CorruptCheckpoint, match=r"'w' .*zarr-python cannot decode"):
            megackpt.load_plain_tensors(tmp_path / "bomb")
        found = megackpt.load_plain_tensors(tmp_path / "good")["w"]
        assert_same(found, as_tensor(values))


def test_a_process_of_zarr_python_that_stands_still_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = zarr.create_array(
        tmp_path / "w",
        shape=(4,),
        dtype="int32",
        zarr_format=2,
        compressors=numcodecs.LZ4(),
    )
    array[...] = 7
    assert megackpt.load_plain_tensors(tmp_path)["w"].tolist() == [7] * 4
    running = library_decoders._process_of(os.getpid())._running
    assert running is not None
    os.kill(running[0].pid, signal.SIGSTOP)
    monkeypatch.setattr(library_decoders, "_PATIENCE", 1)
    with pytest.raises(BackendError, match="memory or time"):
        megackpt.load_plain_tensors(tmp_path)
    monkeypatch.undo()
    assert megackpt.load_plain_tensors(tmp_path)["w"].tolist() == [7] * 4


def test_a_damaged_chunk_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    """tensorstore keeps an array open from chunk to chunk."""
    array = zarr.create_array(
        tmp_path / "w",
        shape=(8, 6),
        chunks=(4, 6),
        dtype="int32",
        fill_value=5,
        compressors=zarr.codecs.GzipCodec(),
    )
    array[:4] = 7
    (tmp_path / "w/c/0/0").write_bytes(b"no gzip")
    for _ in range(2):
        report = megackpt.verify(tmp_path)
        assert len(report.problems) == 1
        assert "tensorstore cannot decode" in report.problems[0]
        assert not report.unread
    rows = ShardedTensor.from_rank_offsets(
        "w", torch.zeros(4, 6, dtype=torch.int32), (0, 1, 2)
    )
    found = megackpt.load({"w": rows}, tmp_path, validate_access_integrity=False)["w"]
    assert_same(found, torch.full((4, 6), 5, dtype=torch.int32))


def test_a_read_decodes_each_chunk_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = zarr.create_array(
        tmp_path / "w",
        shape=(8, 6),
        chunks=(4, 6),
        dtype="int32",
        compressors=zarr.codecs.GzipCodec(),
    )
    array[...] = np.arange(48).reshape(8, 6)
    decoded = []

    def counting(library: str, document: str, data: Any, where: str) -> Any:
        decoded.append(where)
        return decode(library, document, data, where)

    monkeypatch.setattr("megackpt.backends.zarr.chunk_reader.decode", counting)
    state = {
        str(i): ShardedTensor.from_rank_offsets(
            "w", torch.zeros(1, 6, dtype=torch.int32), (0, i, 8)
        )
        for i in range(8)
    }
    found = megackpt.load(state, tmp_path)
    for i in range(8):
        assert found[str(i)][0].tolist() == list(range(6 * i, 6 * i + 6))
    assert len(decoded) == 2


def test_a_fork_reads_what_tensorstore_has_decoded_before_it(tmp_path: Path) -> None:
    """tensorstore ends such a fork, so zarr-python decodes there."""
    array = zarr.create_array(
        tmp_path / "w",
        shape=(8, 6),
        chunks=(4, 6),
        dtype="int32",
        compressors=zarr.codecs.GzipCodec(),
    )
    array[...] = 7
    script = f"""
import os
import megackpt

def total():
    return int(megackpt.load_plain_tensors({str(tmp_path / "")!r})["w"].sum())

assert total() == 336
child = os.fork()
if not child:
    os._exit(total() != 336)
assert os.waitpid(child, 0)[1] == 0
assert total() == 336
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_plain_arrays_of_others_are_read_by_ranges(tmp_path: Path) -> None:
    """Uncompressed, also in shards: no chunk is decoded, and tensorstore is not imported."""
    for name, shards in (("plain", None), ("shards", (4, 6))):
        array = zarr.create_array(
            tmp_path / name,
            shape=(8, 6),
            chunks=(2, 6),
            shards=shards,
            dtype="float32",
            compressors=None,
            fill_value=-1,
        )
        array[...] = np.arange(48).reshape(8, 6)
    manifest = Zarr().read_manifest(LocalStorage(tmp_path))
    assert manifest.encoding == "raw"
    assert not Zarr().decoded_bytes(manifest).any()
    script = f"""
import sys
import megackpt
found = megackpt.load_plain_tensors({str(tmp_path)!r})
assert found["shards"].flatten().tolist() == list(range(48))
assert not {{"tensorstore", "zarr", "zarr_python"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_arrays_of_others_in_a_bucket(tmp_path: Path, bucket: Bucket) -> None:
    maker = made(tmp_path, 2)
    for file in tmp_path.rglob("*"):
        if file.is_file():
            name = f"group/{file.relative_to(tmp_path)}"
            bucket.client.put_object(
                Bucket=bucket.name, Key=name, Body=file.read_bytes()
            )
    found = megackpt.load_plain_tensors(f"{bucket.url}/group")
    assert found.keys() == maker.expected.keys()
    for key, tensor in maker.expected.items():
        assert_same(found[key], tensor, key)


@pytest.mark.parametrize(
    ("mebibytes", "cap"),
    [
        pytest.param(256, 128, marks=pytest.mark.slow),
        pytest.param(4096, 512, marks=pytest.mark.campaign),
    ],
)
def test_a_conversion_keeps_to_its_memory(
    tmp_path: Path, mebibytes: int, cap: int
) -> None:
    """Chunks of 4 MiB that tensorstore decodes. A tenth is left to the allocator, as for all formats."""
    rows = mebibytes << 8
    array = zarr.create_array(
        tmp_path / "source/w",
        shape=(rows, 1024),
        chunks=(1024, 1024),
        dtype="int32",
        serializer=zarr.codecs.BytesCodec(endian="big"),
        compressors=zarr.codecs.ZstdCodec(level=1),
    )
    for first in range(0, rows, 4096):
        part = np.random.default_rng(first).integers(0, 1 << 16, (4096, 1024), "int32")
        array[first : first + 4096] = part
    taken = peak(tmp_path / "source", tmp_path / "target", "torch_dist", cap << 20)
    print(taken >> 20)
    assert taken <= 1.1 * (cap << 20)
