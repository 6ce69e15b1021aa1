"""Small checkpoints of orbax made by hand, and values of msgpack."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from tests.hostile.ocdbt import Database, Value

ZARRAY: dict[str, Any] = {
    "zarr_format": 2,
    "shape": [8, 4],
    "chunks": [8, 4],
    "dtype": "<f4",
    "compressor": None,
    "fill_value": None,
    "order": "C",
    "filters": None,
}
DATA = b"head" + struct.pack("<32f", *range(32))
DATABASE = Database(
    {
        "w/.zarray": json.dumps(ZARRAY).encode(),
        "w/0.0": Value("", "d/data", 4, 128),
        "b/.zarray": json.dumps(
            {**ZARRAY, "shape": [6], "chunks": [6], "dtype": "bfloat16"}
        ).encode(),
        "b/0": struct.pack("<6H", *range(6)),
    }
)


def made(folder: Path) -> None:
    """An item with OCDBT: two arrays and a text."""
    DATABASE.write(folder)
    (folder / "d" / "data").write_bytes(DATA)
    kinds = {"w": "jax.Array", "b": "jax.Array", "name": "string"}
    leaves = {
        f"({name!r},)": {
            "key_metadata": [{"key": name, "key_type": 2}],
            "value_metadata": {"value_type": kind, "skip_deserialize": False},
        }
        for name, kind in kinds.items()
    }
    document = {
        "tree_metadata": leaves,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
    }
    (folder / "_METADATA").write_text(json.dumps(document))
    (folder / "_strings.json").write_text('{"name": "tall"}')


class Lie(NamedTuple):
    """Bytes in the place of a value."""

    data: bytes


def packed(value: Any) -> bytes:
    """Values as msgpack, of few bytes."""
    if isinstance(value, Lie):
        return value.data
    if isinstance(value, dict):
        pairs = (packed(key) + packed(part) for key, part in value.items())
        return b"\xde" + struct.pack(">H", len(value)) + b"".join(pairs)
    if isinstance(value, list):
        parts = b"".join(map(packed, value))
        return b"\xdc" + struct.pack(">H", len(value)) + parts
    if isinstance(value, str):
        data = value.encode()
        return b"\xda" + struct.pack(">H", len(data)) + data
    if isinstance(value, bytes):
        return b"\xc6" + struct.pack(">I", len(value)) + value
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    return b"\xd3" + struct.pack(">q", value)


def array(shape: list[int], dtype: str, data: bytes) -> Lie:
    inner = packed([shape, dtype, data])
    return Lie(b"\xc9" + struct.pack(">I", len(inner)) + b"\x01" + inner)


def only_msgpack(folder: Path) -> None:
    folder.mkdir()
    tree = {"w": array([8, 4], "float32", DATA[4:]), "n": {"step": 3, "name": "x"}}
    (folder / "checkpoint").write_bytes(packed(tree))


def zlib_bomb() -> bytes:
    packer = zlib.compressobj(9)
    return (
        b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()
    )
