"""Cases of the corpus: arrays of other programs, which tensorstore and zarr-python decode."""

from __future__ import annotations

import bz2
import lzma
import os
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numcodecs

from tests.hostile.cases.files import cut, flip
from tests.hostile.cases.place import Place, add
from tests.hostile.cases.zarr_arrays import zstd_bomb

# The kinds of healthy.py -> the description of the array, and its only chunk.
V3 = {
    "other gzip": ("w/zarr.json", "w/c/0/0"),
    "other zstd": ("w/zarr.json", "w/c/0/0"),
    "other blosc": ("w/zarr.json", "w/c/0/0"),
    "other shards": ("w/zarr.json", "w/c/0/0"),
    "numcodecs lz4": ("w/zarr.json", "w/c/0/0"),
}
V2 = {
    "old bz2": ("w/.zarray", "w/0.0"),
    "old blosc": ("w/.zarray", "w/0.0"),
    "old lz4": ("w/.zarray", "w/0.0"),
    "old lzma": ("w/.zarray", "w/0.0"),
}
TELLS = r"'w'|w/c/0/0|w/0\.0|w/zarr\.json|w/\.zarray|/w describes|recognised"
GIB = 1 << 30


def document(kind: str, **fields: Any) -> Callable[[Place], None]:
    name = {**V3, **V2}[kind][0]
    return lambda p: p.json(name, lambda d: d.update(fields))


def grid(*chunk: Any) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}


def chunk(kind: str, make: Callable[[bytes], bytes]) -> Callable[[Place], None]:
    name = {**V3, **V2}[kind][1]
    return lambda p: p.put(name, make(p.get(name)))


def deflated(size: int, bits: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, bits)
    parts = [packer.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return b"".join([*parts, packer.flush()])


def blosc(size: int) -> bytes:
    return bytes(numcodecs.Blosc("zstd", 9).encode(bytes(size)))


def lzma_bomb(size: int) -> bytes:
    packer = lzma.LZMACompressor(preset=0)
    parts = [packer.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return b"".join([*parts, packer.flush()])


# Chunks -------------------------------------------------------------------------------------------------------------

BOMBS: Mapping[str, Callable[[bytes], bytes]] = {
    "other gzip": lambda _: deflated(GIB, 31),
    "other zstd": lambda _: zstd_bomb(GIB),
    "other blosc": lambda _: blosc(GIB),
    "other shards": lambda data: deflated(GIB, 31) + data[-68:],
    "old bz2": lambda _: bz2.compress(bytes(64 << 20)) * 16,
    "old blosc": lambda _: blosc(GIB),
    "old lz4": lambda _: bytes(numcodecs.LZ4().encode(bytes(GIB))),
    "old lzma": lambda _: lzma_bomb(GIB),
    "numcodecs lz4": lambda _: bytes(numcodecs.LZ4().encode(bytes(GIB))),
}
LIES: Mapping[str, tuple[str, Callable[[bytes], bytes]]] = {
    "other blosc": ("2 GiB", lambda d: d[:4] + struct.pack("<I", 0x7FFFFFEF) + d[8:]),
    "old blosc": ("2 GiB", lambda d: d[:4] + struct.pack("<I", 0x7FFFFFEF) + d[8:]),
    "other zstd": ("2^62 bytes", lambda _: zstd_bomb(1 << 20)[:5] + struct.pack("<Q", 1 << 62)),
    "old lz4": ("2 GiB", lambda d: struct.pack("<i", 0x7FFFFFEF) + d[4:]),
    "numcodecs lz4": ("less than nothing", lambda d: struct.pack("<i", -1) + d[4:]),
}  # fmt: skip
_number = 0
for _kind, (_description, _chunk) in {**V3, **V2}.items():
    _bomb = chunk(_kind, BOMBS[_kind])
    add("a bomb of a GiB", _kind, _bomb, TELLS)
    add("a chunk of a TiB that is a hole", _kind,
        lambda p, name=_chunk: os.truncate(p.folder / name, 1 << 40), TELLS)  # fmt: skip
    add("a description of a TiB that is a hole", _kind,
        lambda p, name=_description: os.truncate(p.folder / name, 1 << 40), TELLS)  # fmt: skip
    for _keep in (0, 1, 0.5):
        _number += 1
        add(
            f"a chunk cut at {_keep}",
            _kind,
            cut(_chunk, _keep),
            TELLS,
            long=_number % 2 == 0,
        )
    add("a chunk of zeros", _kind, chunk(_kind, lambda d: bytes(len(d))), TELLS)
    add("a chunk that is a link", _kind, lambda p, name=_chunk: (
        (p.folder / name).unlink(), (p.folder / name).symlink_to(p.outside / "secret")),
        TELLS)  # fmt: skip
    add("an array that is a link", _kind, lambda p: (
        (p.folder / "w").rename(p.home / "away"),
        (p.folder / "w").symlink_to(p.home / "away")), ".")  # fmt: skip
    if _kind in LIES:
        _claim, _lie = LIES[_kind]
        add(f"a header that claims {_claim}", _kind, chunk(_kind, _lie), TELLS)
add("a bit of the index", "other shards", flip("w/c/0/0", -8), TELLS)
add("an index beyond the end", "other shards", chunk(
    "other shards", lambda d: d[:-36] + struct.pack("<QQ", 1 << 40, 36) + d[-20:]), TELLS)  # fmt: skip

# Documents ----------------------------------------------------------------------------------------------------------

LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
GZIP = {"name": "gzip", "configuration": {"level": 1}}


def nested(depth: int) -> list[Any]:
    codecs: list[Any] = [LITTLE]
    for _ in range(depth):
        shard = {"chunk_shape": [8, 4], "codecs": codecs, "index_codecs": [GZIP]}
        codecs = [{"name": "sharding_indexed", "configuration": shard}]
    return codecs


for _name, _fields in {
    "a shape over 2^63": {"shape": [1 << 40, 1 << 40], "chunk_grid": grid(1 << 40, 1 << 40)},
    "a negative shape": {"shape": [-8, 4]},
    "a shape of booleans": {"shape": [True, 4]},
    "a shape of one dimension more": {"shape": [8, 4, 1]},
    "100,000 axes": {"shape": [1] * 100_000, "chunk_grid": grid(*[1] * 100_000)},
    "chunks of nothing": {"chunk_grid": grid(0, 4)},
    "chunks of 32 GiB": {"chunk_grid": grid(1 << 31, 4)},
    "chunks over 2^63": {"chunk_grid": grid(1 << 40, 1 << 40)},
    "an irregular grid": {"chunk_grid": {"name": "rectilinear", "configuration": {}}},
    "texts": {"data_type": "string"},
    "records": {"data_type": {"name": "structured", "configuration": {"fields": []}}},
    "a codec that is unknown": {"codecs": [LITTLE, {"name": "exec", "configuration": {"code": "1"}}]},
    "a codec of pickles": {"codecs": [LITTLE, {"name": "numcodecs.pickle", "configuration": {}}]},
    "a codec by a class": {"codecs": [LITTLE, {"name": "os.system", "configuration": {}}]},
    "a thousand codecs": {"codecs": [LITTLE, *[GZIP] * 1000]},
    "shards in shards": {"codecs": nested(100)},
    "a fill value that is a text": {"fill_value": "__import__('os')", "shape": [16, 4]},
    "names that lead out": {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "/../"}}},
    "names of another kind": {"chunk_key_encoding": {"name": "../../outside", "configuration": {}}},
}.items():  # fmt: skip
    for _kind in ("other gzip", "numcodecs lz4"):
        add(
            f"an array with {_name}",
            _kind,
            document(_kind, **_fields),
            TELLS + "|array",
        )
for _name, _fields in {
    "a shape over 2^63": {"shape": [1 << 63, 4], "chunks": [1 << 63, 4]},
    "a negative shape": {"shape": [-8, 4]},
    "chunks of nothing": {"chunks": [0, 4]},
    "chunks of 32 GiB": {"chunks": [1 << 31, 4]},
    "an order that is none": {"order": "X"},
    "dates": {"dtype": "<M8[ns]"},
    "objects": {"dtype": "|O", "filters": [{"id": "pickle", "protocol": 5}]},
    "records": {"dtype": [["a", "<f4"], ["b", "|O"]]},
    "a filter of pickles": {"filters": [{"id": "pickle", "protocol": 5}]},
    "a filter of another library": {"filters": [{"id": "imagecodecs_jpeg"}]},
    "a filter of objects": {"filters": [{"id": "delta", "dtype": "|O"}]},
    "a filter that is no dict": {"filters": ["delta"]},
    "a thousand filters": {"filters": [{"id": "packbits"}] * 1000},
    "a compressor that is none": {"compressor": {"id": "os"}},
    "a separator that leads out": {"dimension_separator": "/../"},
}.items():  # fmt: skip
    for _kind in ("old bz2", "old lz4"):
        add(
            f"an array with {_name}",
            _kind,
            document(_kind, **_fields),
            TELLS + "|array",
        )

# Groups -------------------------------------------------------------------------------------------------------------


def deep(place: Place) -> None:
    folder = place.folder
    for _ in range(40):
        folder = folder / "f"
    folder.mkdir(parents=True)


add("folders in folders", "other gzip", deep, "deep")
add("a group that is a link", "other gzip", lambda p: (
    (p.outside / "zarr.json").write_bytes(b'{"zarr_format": 3, "node_type": "group"}'),
    (p.folder / "link").symlink_to(p.outside)), ".")  # fmt: skip


def linked(name: str) -> Callable[[Place], None]:
    def spoil(place: Place) -> None:
        (place.folder / "v").mkdir()
        (place.folder / "v" / name).symlink_to(place.outside / "secret")

    return spoil


for _name in ("zarr.json", ".zarray"):
    add(f"a {_name} that is a link", "other gzip", linked(_name), f"v/{_name}")
add("a group that is an array of version 2", "old bz2", lambda p: p.put(
    "w/zarr.json", b'{"zarr_format": 3, "node_type": "group"}'), r"\.zarray|recognised")  # fmt: skip
add("chunks of another separator", "old bz2", lambda p: (
    (p.folder / "w/0").mkdir(), (p.folder / "w/0.0").rename(p.folder / "w/0/0")),
    "'w'")  # fmt: skip
