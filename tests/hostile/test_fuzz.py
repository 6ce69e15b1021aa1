"""The parsers under any bytes, and good bytes gone wrong: whatever they are given, only our own errors come out."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st

from megackpt import serialization
from megackpt.backends import weight_maps
from megackpt.backends.archives import check_archive, load_structure
from megackpt.backends.base import read_config
from megackpt.backends.orbax import Orbax
from megackpt.backends.safetensors import Safetensors
from megackpt.backends.torch_dist import TorchDist
from megackpt.backends.torch_file import TorchFile
from megackpt.backends.zarr.array_metadata import parse_array, parse_zarray
from megackpt.backends.zarr.codecs import crc32c, crc_bytes, shard_index
from megackpt.checkpoint import decode_index
from megackpt.checkpoint.marker import markers
from megackpt.errors import CheckpointingException
from megackpt.serialization.inspection import look
from megackpt.storage import LocalStorage, digest
from tests.hostile import healthy
from tests.hostile.ocdbt import MANIFEST, NODE, envelope
from tests.hostile.orbax_files import DATABASE
from tests.hostile.pickles import BOMBS, QUIET, RUNNING, archive, whole

Parse = Callable[[bytes], object]

TOKENS = (
    *(
        b"-1",
        b"0",
        b"9223372036854775808",
        b"18446744073709551615",
        b"1e999",
        b"NaN",
        b"null",
        b"true",
    ),
    *(
        b"[]",
        b"{}",
        b'"x"',
        b"[" * 3000,
        b"9" * 5000,
        b"../",
        b"/",
        b"\0",
        b"\xff",
        b"\xff" * 4,
        b"\xff" * 8,
    ),
    *(
        b"PK\5\6",
        b"PK\1\2",
        b"\x80\x04",
        b"cos\nsystem\n",
        b"h\0",
        b"q\0",
        b"\x82\1",
        b"\x93",
        b"\x85",
    ),
    *(b"R", b"b", b"2", b"a", b"s", b"t", b"(", b"}", b"]", b"Q", b"\x81", b"\x92"),
)
"""Pieces that mean something to one of the parsers."""


@st.composite
def spoiled(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """Good bytes with some pieces changed, put in, taken out, or written twice; or any bytes at all."""
    data = draw(
        st.one_of(
            st.sampled_from(seeds), st.sampled_from(seeds), st.binary(max_size=200)
        )
    )
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        end = min(len(data), at + draw(st.integers(0, 12)))
        piece = draw(
            st.one_of(
                st.sampled_from(TOKENS),
                st.binary(min_size=1, max_size=4),
                st.just(data[at:end] * 2),
            )
        )
        kept = draw(st.sampled_from((at, end, min(at + len(piece), len(data)))))
        data = data[:at] + piece + data[kept:]
    return data


@pytest.fixture(scope="module", autouse=True)
def base(tmp_path_factory: pytest.TempPathFactory) -> None:
    global BASE
    BASE = tmp_path_factory.mktemp("fuzz")


BASE = Path()


@cache
def made(kind: str) -> Path:
    """A healthy checkpoint of this kind."""
    healthy.MAKERS[kind][1](BASE / kind)
    return BASE / kind


def bytes_of(kind: str, name: str) -> bytes:
    return (made(kind) / name).read_bytes()


def in_place(kind: str, name: str, read: Callable[[LocalStorage], object]) -> Parse:
    """The bytes as this file of a healthy checkpoint."""

    def parse(data: bytes) -> object:
        file = made(kind) / name
        good = file.read_bytes()
        try:
            file.write_bytes(data)
            return read(LocalStorage(made(kind)))
        finally:
            file.write_bytes(good)

    return parse


def read_index(root: LocalStorage) -> object:
    """A shard's index of four chunks, with a true crc32c behind it."""
    data = root.get("w/c.0.0")
    root.put("w/c.0.0", data + crc_bytes(crc32c(data[-64:])))
    return shard_index(root, "w/c.0.0", 4)


def indexed(data: bytes) -> object:
    """With a digest that is right, for nothing behind it would be looked at otherwise."""
    with contextlib.suppress(CheckpointingException):
        decode_index(data)
    return decode_index(data + digest(data))


def checked(root: LocalStorage) -> object:
    with root.open("model.pt") as reader:
        return check_archive(reader, 0, reader.size)


def pickled() -> tuple[bytes, ...]:
    """What stands in archives, and what should not."""
    blob = serialization.dump(
        {
            **healthy.COMMON,
            "t": torch.ones(2),
            "a": [1.5, None, (True, "x")],
            "d": torch.device("cpu"),
        }
    )
    bodies = [
        *(make("true") for make in RUNNING.values()),
        *QUIET.values(),
        *(b for b in BOMBS.values() if len(b) < 500),
    ]
    return (inner(blob), inner(bytes_of("torch", "model.pt")), *map(whole, bodies))


def inner(blob: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(blob)) as file:
        return file.read(
            next(name for name in file.namelist() if name.endswith("/data.pkl"))
        )


def opened(data: bytes) -> None:
    for open_ in (
        serialization.load,
        look,
        serialization.wrapped,
        serialization.unwrapped,
    ):
        with contextlib.suppress(CheckpointingException):
            open_(data)


def in_archive(data: bytes) -> None:
    opened(archive(data, storages={"0": bytes(8)}))
    with contextlib.suppress(CheckpointingException):
        load_structure(data, stand_ins=True)


PARSERS: Mapping[str, tuple[Callable[[], tuple[bytes, ...]], Callable[[], Parse]]] = {
    "megackpt.index": (
        lambda: tuple(
            bytes_of(kind, "megackpt.index")[:-16]
            for kind in ("ours", "zarr with index")
        ),
        lambda: indexed,
    ),
    ".metadata": (
        lambda: (bytes_of("dcp", ".metadata"), bytes_of("layout C", ".metadata")),
        lambda: in_place("dcp", ".metadata", TorchDist().read_manifest),
    ),
    "a flattened .metadata": (
        lambda: (bytes_of("flattened", ".metadata"),),
        lambda: in_place("flattened", ".metadata", TorchDist().read_manifest),
    ),
    "a pickle": (pickled, lambda: in_archive),
    "a blob": (
        lambda: (bytes_of("dcp", "common.pt"), serialization.dump([healthy.COMMON])),
        lambda: opened,
    ),
    "a torch file": (
        lambda: (bytes_of("torch", "model.pt"),),
        lambda: in_place("torch", "model.pt", TorchFile().read_manifest),
    ),
    "a torch file's checksums": (
        lambda: (bytes_of("torch", "model.pt"),),
        lambda: in_place("torch", "model.pt", checked),
    ),
    "a safetensors header": (
        lambda: (bytes_of("one safetensors", "model.safetensors"),),
        lambda: in_place(
            "one safetensors", "model.safetensors", Safetensors().read_manifest
        ),
    ),
    "a weight map": (
        lambda: (bytes_of("safetensors", "model.safetensors.index.json"),),
        lambda: in_place(
            "safetensors",
            "model.safetensors.index.json",
            lambda root: weight_maps.read(root, "model.safetensors.index.json"),
        ),
    ),
    "metadata.json": (
        lambda: (bytes_of("dcp", "metadata.json"), bytes_of("zarr", "metadata.json")),
        lambda: in_place("dcp", "metadata.json", read_config),
    ),
    "zarr.json": (
        lambda: tuple(
            bytes_of(kind, "w/zarr.json")
            for kind in ("zarr", "zarr shards", "zarr blosc")
        ),
        lambda: partial(parse_array, where="zarr.json"),
    ),
    ".zarray": (
        lambda: (bytes_of("megatron zarr", "misc.uint8/.zarray"),),
        lambda: partial(parse_zarray, where=".zarray"),
    ),
    "a shard's index": (
        lambda: (bytes_of("zarr shards", "w/c.0.0")[:-4],),  # without its crc32c
        lambda: in_place(
            "zarr shards",
            "w/c.0.0",
            read_index,
        ),
    ),
    "a tree of orbax": (
        lambda: (bytes_of("orbax made", "_METADATA"),),
        lambda: in_place("orbax made", "_METADATA", Orbax().read_manifest),
    ),
    "msgpack of orbax": (
        lambda: (bytes_of("orbax msgpack", "checkpoint"),),
        lambda: in_place("orbax msgpack", "checkpoint", Orbax().read_manifest),
    ),
    "a manifest of OCDBT": (
        lambda: (bytes_of("orbax made", "manifest.ocdbt")[14:-4],),
        lambda: partial(in_ocdbt, "manifest", MANIFEST),
    ),
    "a node of OCDBT": (
        lambda: (DATABASE.leaf(),),
        lambda: partial(in_ocdbt, "node", NODE),
    ),
    "the mark of a save": (
        lambda: (
            json.dumps(
                {
                    "time": 1.0,
                    "pid": 1,
                    "host": "h",
                    "boot": "b",
                    "names": ["x"],
                    "last": "y",
                }
            ).encode(),
        ),
        lambda: in_marker,
    ),
}


def in_ocdbt(part: str, magic: int, data: bytes) -> object:
    """The body of a part of OCDBT, with a length and a crc32c that are right."""
    folder = BASE / "ocdbt"
    if not folder.is_dir():
        shutil.copytree(made("orbax made"), folder)
    DATABASE.but(**{part: lambda _: envelope(magic, data)}).write(folder)
    return Orbax().read_manifest(LocalStorage(folder))


def in_marker(data: bytes) -> object:
    file = made("dcp") / ".megackpt-saving-ff"
    try:
        file.write_bytes(data)
        found = markers(LocalStorage(made("dcp")))
        return [(str(mark), mark.is_dead(), mark.is_dead(True)) for mark in found]
    finally:
        file.unlink()


def fuzzed(name: str, examples: int) -> None:
    seeds, parser = PARSERS[name]
    parse = parser()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(spoiled(seeds()))
    @example(b"")
    def any_bytes(data: bytes) -> None:
        with contextlib.suppress(CheckpointingException):
            parse(data)

    any_bytes()


@pytest.mark.parametrize("name", PARSERS)
def test_good_bytes_are_read(name: str) -> None:
    """What is fuzzed gets behind the first check."""
    seeds, parser = PARSERS[name]
    good = seeds()[0]
    parser()(good)


@pytest.mark.parametrize("name", PARSERS)
def test_only_our_own_errors_come_out(name: str) -> None:
    fuzzed(name, 120)


@pytest.mark.campaign
@pytest.mark.parametrize("name", PARSERS)
def test_only_our_own_errors_come_out_of_very_many(name: str) -> None:
    fuzzed(name, 2000)
