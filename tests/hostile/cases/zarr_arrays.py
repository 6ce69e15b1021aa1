"""Cases of the corpus: documents and chunks of zarr."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.hostile import healthy
from tests.hostile.cases.files import flip
from tests.hostile.cases.place import Place, add


def array(**fields: Any) -> Callable[[Place], None]:
    return lambda p: p.json("w/zarr.json", lambda d: d.update(fields))


def grid(*chunk: Any) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}


for _name, _fields in {
    "a shape over 2^63": {"shape": [1 << 40, 1 << 40], "chunk_grid": grid(1 << 40, 1 << 40)},
    "a shape of 10^19": {"shape": [10**19, 4]},
    "a negative shape": {"shape": [-8, 4]},
    "a shape of texts": {"shape": ["8", "4"]},
    "a shape of floats": {"shape": [8.0, 4.0]},
    "a shape of booleans": {"shape": [True, 4]},
    "a shape of one dimension more": {"shape": [8, 4, 1]},
    "a shape of 4 TiB": {"shape": [1 << 38, 4]},
    "100,000 axes": {"shape": [1] * 100_000, "chunk_grid": grid(*[1] * 100_000)},
    "a trillion chunks": {"shape": [1 << 40, 4], "chunk_grid": grid(1, 4)},
    "chunks of nothing": {"chunk_grid": grid(0, 4)},
    "chunks of minus one": {"chunk_grid": grid(-1, 4)},
    "chunks beyond memory": {"chunk_grid": grid(1 << 50, 4)},
    "chunks over 2^63": {"chunk_grid": grid(1 << 40, 1 << 40)},
    "an irregular grid": {"chunk_grid": {"name": "rectilinear", "configuration": {}}},
    "a dtype that is none": {"data_type": "object"},
    "a dtype that is a dict": {"data_type": {"name": "struct"}},
    "codecs that are none": {"codecs": []},
    "codecs that are unknown": {"codecs": [{"name": "exec", "configuration": {"code": "1"}}]},
    "codecs that are no list": {"codecs": {"bytes": 1}},
    "zstd of level 10^9": {"codecs": [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 10**9}}]},
    "zarr's format 4": {"zarr_format": 4},
    "the type of a group": {"node_type": "group"},
    "something that must be understood": {"storage_transformers": [{"name": "x"}]},
    "attributes that are a list": {"attributes": [1]},
}.items():  # fmt: skip
    add(
        f"an array with {_name}",
        "zarr",
        array(**_fields),
        r"zarr\.json|'w'|/w describes|w/c.0.0",
    )
# Every chunk is there, so the fill value is not used.
add(
    "an array with a fill value that is code",
    "zarr",
    array(fill_value="__import__('os')"),
)
for _name, _fields in {
    "a shape over 2^63": {"shape": [1 << 63], "chunks": [1 << 63]},
    "a negative shape": {"shape": [-8]},
    "chunks of nothing": {"chunks": [0]},
    "an order that is none": {"order": "X"},
    "a dtype of objects": {"dtype": "|O"},
    "a filter of pickles": {"filters": [{"id": "pickle", "protocol": 5}]},
    "a compressor that is none": {"compressor": {"id": "os"}},
    "a separator that leads out": {"dimension_separator": "/../"},
}.items():
    add(f"an old array with {_name}", "megatron zarr", partial(
        lambda fields, p: p.json("misc.uint8/.zarray", lambda d: d.update(fields)), _fields),
        r"misc\.uint8|zarr")  # fmt: skip

# Chunks -------------------------------------------------------------------------------------------------------------


def zstd_bomb(size: int) -> bytes:
    """A frame of blocks that each repeat one byte 128 KiB: four bytes for each."""
    frame = b"\x28\xb5\x2f\xfd" + b"\xe0" + struct.pack("<Q", size)
    blocks, block = size >> 17, 1 << 17
    return frame + b"".join(
        struct.pack("<I", block << 3 | 1 << 1 | (number == blocks - 1))[:3] + b"\0"
        for number in range(blocks)
    )


def crc_ended(data: bytes) -> bytes:
    import google_crc32c

    return data + google_crc32c.value(data).to_bytes(4, "little")


def shard_of(
    *index: tuple[int, int], crc: int | None = None
) -> Callable[[Place], None]:
    return lambda p: p.put("w/c.0.0", healthy.shard(list(index), crc))


def gzipped(place: Place) -> None:
    array(codecs=[{"name": "bytes", "configuration": {"endian": "little"}},
                  {"name": "gzip", "configuration": {"level": 5}}])(place)  # fmt: skip
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    place.put(
        "w/c.0.0",
        b"".join(
            [*(packer.compress(bytes(1 << 20)) for _ in range(1024)), packer.flush()]
        ),
    )


_GOOD = [(36 * i, 36) for i in range(4)]
for _kind, _name, _spoil in (
    ("zarr", "a crc32c that is wrong", flip("w/c.0.0", -1)),
    ("zarr", "a bit that is wrong", flip("w/c.0.0", 20)),
    ("zarr", "a byte too many", lambda p: p.put("w/c.0.0", p.get("w/c.0.0") + b"x")),
    ("zarr zstd", "a bomb of 4 GiB", lambda p: p.put("w/c.0.0", crc_ended(zstd_bomb(4 << 30)))),
    ("zarr zstd", "a bomb that hides", lambda p: p.put("w/c.0.0", crc_ended(zstd_bomb(1 << 30)))),
    ("zarr zstd", "a size that lies", lambda p: p.put("w/c.0.0", crc_ended(zstd_bomb(1 << 20)[:13]))),
    ("zarr zstd", "no zstd", lambda p: p.put("w/c.0.0", crc_ended(b"PK\3\4" * 9))),
    ("zarr blosc", "a bomb of 2 GiB", lambda p: p.put(
        "w/c.0.0", crc_ended(p.get("w/c.0.0")[:4] + struct.pack("<I", 0x7FFFFFEF) + p.get("w/c.0.0")[8:-4]))),
    ("zarr blosc", "a compressed size that lies", lambda p: p.put(
        "w/c.0.0", crc_ended(p.get("w/c.0.0")[:12] + struct.pack("<I", 0x7FFFFFEF) + p.get("w/c.0.0")[16:-4]))),
    ("zarr blosc", "a block size that lies", lambda p: p.put(
        "w/c.0.0", crc_ended(p.get("w/c.0.0")[:8] + b"\xff" * 4 + p.get("w/c.0.0")[12:-4]))),
    ("zarr", "gzip of 1 GiB", gzipped),
    ("zarr shards", "an index beyond the end", shard_of(*_GOOD[:3], (1 << 40, 36))),
    ("zarr shards", "an index of 2^64 - 2", shard_of(*_GOOD[:3], ((1 << 64) - 2, 36))),
    ("zarr shards", "an index that overflows", shard_of(*_GOOD[:3], ((1 << 63) + 8, (1 << 63) + 8))),
    ("zarr shards", "an index with a hole", shard_of(*_GOOD[:3], ((1 << 64) - 1, (1 << 64) - 1))),
    ("zarr shards", "an index of chunks on one another", shard_of(*_GOOD[:3], (20, 36))),
    ("zarr shards", "an index of lengths that are none", shard_of(*_GOOD[:3], (108, 35))),
    ("zarr shards", "an index whose crc32c is wrong", shard_of(*_GOOD, crc=5)),
    ("zarr shards", "nothing but its index", lambda p: p.put("w/c.0.0", p.get("w/c.0.0")[-68:])),
):  # fmt: skip
    add(f"a chunk with {_name}", _kind, _spoil, r"'w'|w/c.0.0|w/zarr\.json")
