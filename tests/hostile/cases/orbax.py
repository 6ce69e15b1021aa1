"""Cases of the corpus: checkpoints of orbax."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from typing import Any

import google_crc32c
import numcodecs

from tests.hostile import ocdbt, orbax_files
from tests.hostile.cases.place import Place, add
from tests.hostile.ocdbt import MANIFEST, NODE, Value
from tests.hostile.orbax_files import DATABASE, ZARRAY, packed

Spoil = Callable[[Place], None]
MADE, PLAIN, REAL, PACKED = "orbax made", "orbax plain", "orbax", "orbax msgpack"
KERNEL = "params.layers.0.kernel"
PROCESS = "ocdbt.process_0/manifest.ocdbt"
TIB = 1 << 40


def forged(**lies: object) -> Spoil:
    return lambda p: DATABASE.but(**lies).write(p.folder)


def with_values(change: Callable[[dict[str, Any]], None]) -> Spoil:
    def spoil(place: Place) -> None:
        values = dict(DATABASE.values)
        change(values)
        DATABASE.but(values=values).write(place.folder)

    return spoil


def with_zarray(**fields: Any) -> Spoil:
    text = json.dumps({**ZARRAY, **fields}).encode()
    return with_values(lambda v: v.update({"w/.zarray": text}))


def with_document(text: bytes) -> Spoil:
    return with_values(lambda v: v.update({"w/.zarray": text}))


def with_data(data: bytes, **fields: Any) -> Spoil:
    """The chunk of w is these bytes, and its array has these codecs."""
    text = json.dumps({**ZARRAY, **fields}).encode()
    return with_values(lambda v: v.update({"w/.zarray": text, "w/0.0": data}))


def hole(name: str) -> Spoil:
    return lambda p: os.truncate(p.folder / name, TIB)


def cut(name: str, size: int) -> Spoil:
    return lambda p: p.put(name, p.get(name)[:size])


def gone(name: str) -> Spoil:
    return lambda p: (p.folder / name).unlink()


def linked(name: str) -> Spoil:
    def spoil(place: Place) -> None:
        path = place.folder / name
        if path.is_dir():
            shutil.move(path, place.outside / "moved")
            path.symlink_to(place.outside / "moved")
            return
        path.unlink()
        path.symlink_to(place.outside / "secret")

    return spoil


def tree(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    def spoil(document: dict[str, Any]) -> None:
        change(document["tree_metadata"])

    return lambda p: p.json("_METADATA", spoil)


def leaf(*parts: Any, kind: Any = "jax.Array") -> dict[str, Any]:
    keys = [{"key": part, "key_type": 2} for part in parts]
    value = {"value_type": kind, "skip_deserialize": False}
    return {"key_metadata": keys, "value_metadata": value}


def renamed(*parts: Any) -> Spoil:
    """The leaf w has another name."""

    def change(leaves: dict[str, Any]) -> None:
        leaves["('w',)"] = leaf(*parts)

    return tree(change)


def compressed(magic: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda body: ocdbt.envelope(magic, body, compressed=data)


def blosc(size: int) -> bytes:
    """A header of blosc that claims this many bytes."""
    return struct.pack("<BBBBIII", 2, 1, 0x21, 4, size, size, 16)


_VALUE = DATABASE.values["w/0.0"]
if not isinstance(_VALUE, Value):
    raise TypeError(_VALUE)
W = _VALUE


def moved(**fields: Any) -> Spoil:
    value = Value(**{**vars(W), **fields})
    return with_values(lambda v: v.update({"w/0.0": value}))


def two_bytes(body: bytes) -> bytes:
    """A node whose version 0 takes two bytes: tensorstore reads it."""
    held = b"\x80\0\1" + ocdbt.zstd(body)
    data = struct.pack(">I", NODE) + struct.pack("<Q", 16 + len(held)) + held
    return data + struct.pack("<I", google_crc32c.value(data))


BLOSC_BOMB = bytes(numcodecs.Blosc("zstd").encode(bytes(512 << 20)))
EMPTY_BLOCKS = b"\x28\xb5\x2f\xfd\0\x38" + bytes(3 << 20)
LARGE_WINDOW = b"\x28\xb5\x2f\xfd\0\xf8" + bytes(99)
ZLIB = {"id": "zlib", "level": 1}
_DEEP = b'{"a":' * 100_000
_NO_LEAF = r"_METADATA|missing|leaf|leaves|tree"

for _name, _spoil, _tells in (
    ("a manifest of a TiB that is a hole", hole("manifest.ocdbt"), r"manifest\.ocdbt"),
    ("an empty manifest", cut("manifest.ocdbt", 0), r"manifest\.ocdbt"),
    ("a manifest of 20 bytes", cut("manifest.ocdbt", 20), r"manifest\.ocdbt"),
    ("no manifest", gone("manifest.ocdbt"), "missing"),
    ("a manifest that is a link", linked("manifest.ocdbt"), "link"),
    ("data files behind a link", linked("d"), "link"),
    ("a manifest of another crc", forged(manifest=lambda b: ocdbt.envelope(MANIFEST, b, crc=1)), "manifest"),
    ("a manifest of another length", forged(manifest=lambda b: ocdbt.envelope(MANIFEST, b, length=TIB)), "manifest"),
    ("a manifest of version 99", forged(manifest=lambda b: ocdbt.envelope(MANIFEST, b, version=99)), "manifest"),
    ("a manifest that is a node", forged(manifest=lambda b: ocdbt.envelope(NODE, b)), "manifest"),
    ("a bomb of a manifest", forged(manifest=compressed(MANIFEST, ocdbt.bomb(4 << 30))), "decompress"),
    ("a manifest of no frame", forged(manifest=compressed(MANIFEST, b"\xff" * 99)), "manifest"),
    ("2^40 versions", forged(versions=TIB), "manifest"),
    ("a generation of 0", forged(generation=0), "manifest"),
    ("numbered manifests", forged(manifest_kind=1), "manifest"),
    ("another height", forged(height=9), "manifest"),
    ("a node outside", forged(node_file=("", "../../outside/secret")), "outside|name of a file"),
    ("a node behind a base outside", forged(node_file=("../../outside/", "secret")), "outside|name of a file"),
    ("a node of an absolute path", forged(node_file=("", "/etc/passwd")), "outside|name of a file"),
    ("a node of an encoded path", forged(node_file=("", "%2e%2e/%2e%2e/outside/secret")), "manifest|name of a file"),
    ("a node that is missing", forged(node_file=("", "d/none")), "manifest"),
    ("a node of a TiB", forged(node_length=TIB), "manifest"),
    ("a node at 2^62", forged(node_offset=1 << 62), "d/node"),
    ("a node of 2^20 entries", forged(entries=1 << 20), "manifest"),
    ("a node of 2^31 entries", forged(entries=1 << 31), "manifest"),
    ("a node without entries", forged(entries=0), "manifest"),
    ("a node of another crc", forged(node=lambda b: ocdbt.envelope(NODE, b, crc=1)), "manifest"),
    ("a bomb of a node", forged(node=compressed(NODE, ocdbt.bomb(4 << 30))), "decompress"),
    ("a node of empty blocks", forged(node=compressed(NODE, EMPTY_BLOCKS)), "decompress"),
    ("a node of a large window", forged(node=compressed(NODE, LARGE_WINDOW)), "manifest"),
    ("a node that is compressed", forged(node=lambda b: ocdbt.envelope(NODE, b, compressed=ocdbt.zstd(b))), ""),
    ("a chunk of a TiB", moved(length=TIB), "'w'"),
    ("a chunk of 2^62 bytes", moved(offset=1 << 61, length=1 << 62), "'w'|manifest"),
    ("a chunk behind the end", moved(offset=1 << 20), "'w'"),
    ("a chunk that is too short", moved(length=64), "'w'"),
    ("a chunk that is too long", moved(length=132, offset=0), "'w'"),
    ("a chunk in a file outside", moved(base="../../outside/", name="secret"), "outside|name of a file"),
    ("a chunk in another process", moved(base="ocdbt.p_0/../../../outside/", name="secret"), "outside|name of a file"),
    ("a chunk in a file that is missing", moved(name="d/none"), "'w'"),
    ("a chunk that is missing", with_values(lambda v: v.pop("w/0.0")), "lacks 1"),
    ("chunks of a hole", lambda p: (moved(length=TIB, offset=0)(p), hole("d/data")(p)), "'w'"),
    ("a data file of a TiB", hole("d/data"), ""),
    ("an array that is missing", with_values(lambda v: (v.pop("w/.zarray"), v.pop("w/0.0"))), "missing"),
    ("an array that no leaf names", with_values(lambda v: v.update({"x/.zarray": v["w/.zarray"]})), "no leaves"),
    ("an array of both zarrs", with_values(lambda v: v.update({"w/zarr.json": b"{}"})), "twice"),
    ("a name that is no text", with_values(lambda v: v.update({"w\0/.zarray": b"{}"})), "no leaves"),
    ("an array of 2^62 rows", with_zarray(shape=[1 << 62, 4]), "'w'"),
    ("an array of 2^40 chunks", with_zarray(shape=[1 << 20, 1 << 20], chunks=[1, 1]), "'w'"),
    ("a chunk that exceeds the array", with_zarray(chunks=[1 << 20, 1 << 20]), "'w'"),
    ("a negative shape", with_zarray(shape=[-8, 4]), "w"),
    ("a shape of fractions", with_zarray(shape=[8.5, 4]), "w"),
    ("no chunks", with_zarray(chunks=[0, 4]), "w"),
    ("100 dimensions", with_zarray(shape=[1] * 100, chunks=[1] * 100), "w"),
    ("other dimensions", with_zarray(shape=[8, 4, 1]), "w"),
    ("integers of 4 bits", with_zarray(dtype="int4"), "int4"),
    ("objects", with_zarray(dtype="|O"), "w"),
    ("a record", with_zarray(dtype=[["a", "<f4"], ["b", "|O"]]), "w"),
    ("another dtype", with_zarray(dtype="<f8"), "'w'"),
    ("an unknown compressor", with_zarray(compressor={"id": "none"}), "w"),
    ("a filter", with_zarray(filters=[{"id": "delta"}]), "w"),
    ("a zarr.json of depth", with_document(_DEEP), "w"),
    ("a document of 5,000 digits", with_document(b'{"shape": [' + b"9" * 5000 + b"]}"), "w"),
    ("a document that is a list", with_document(b"[]"), "w"),
    ("a document that is none", with_document(b"\xff\0"), "w"),
    ("a chunk that is a bomb of zstd", with_data(ocdbt.bomb(4 << 30), compressor={"id": "zstd"}), "'w'"),
    ("a chunk that is a bomb of zlib", with_data(orbax_files.zlib_bomb(), compressor=ZLIB), "'w'"),
    ("a chunk that is a lie of blosc", with_data(blosc(0x7FFFFFFF), compressor={"id": "blosc"}), "'w'"),
    ("a chunk that is a bomb of blosc", with_data(BLOSC_BOMB, compressor={"id": "blosc"}), "'w'"),
    ("a node of a version in two bytes", forged(node=two_bytes), "version"),
    ("a tree of a TiB that is a hole", hole("_METADATA"), "_METADATA"),
    ("an empty tree", cut("_METADATA", 0), "_METADATA"),
    ("a tree of depth", lambda p: p.put("_METADATA", _DEEP), "_METADATA"),
    ("a tree that is a list", lambda p: p.put("_METADATA", b"[1]"), "_METADATA"),
    ("a tree that is a link", linked("_METADATA"), "link"),
    ("a tree without leaves", tree(lambda t: t.clear()), _NO_LEAF),
    ("a tree without a leaf", tree(lambda t: t.pop("('w',)")), "no leaves"),
    ("a leaf more", tree(lambda t: t.update(x=leaf("x"))), "missing"),
    ("a leaf twice", tree(lambda t: t.update(x=leaf("w"))), r"\('w',\)"),
    ("a leaf that is a list", tree(lambda t: t.update(x=[])), "_METADATA"),
    ("a leaf of a number", renamed(7), "_METADATA"),
    ("a leaf of no name", renamed(), _NO_LEAF),
    ("a leaf outside", renamed("../../outside/secret"), _NO_LEAF),
    ("a leaf of a surrogate", renamed("\ud83d\ude00"), "w|surrogate"),
    ("a leaf that is a text elsewhere", tree(lambda t: t.update(x=leaf("x", kind="string"))), "no text"),
    ("no texts", gone("_strings.json"), "_strings"),
    ("texts of a TiB", hole("_strings.json"), "_strings"),
    ("texts of depth", lambda p: p.put("_strings.json", _DEEP), "_strings"),
    ("a text that is a number", lambda p: p.put("_strings.json", b'{"name": 5}'), "no text"),
):  # fmt: skip
    add(_name, MADE, _spoil, _tells)

for _name, _spoil, _tells in (
    ("a description that is a link", linked(f"{KERNEL}/.zarray"), ""),
    ("a description of a TiB", hole(f"{KERNEL}/.zarray"), "kernel"),
    ("no description", gone(f"{KERNEL}/.zarray"), "missing"),
    ("a chunk of a TiB that is a hole", hole(f"{KERNEL}/1.1"), "kernel"),
    ("an empty chunk", cut(f"{KERNEL}/1.1", 0), "kernel"),
    ("a chunk that is cut off", cut(f"{KERNEL}/1.1", 40), "kernel"),
    ("a chunk that is a link", linked(f"{KERNEL}/1.1"), ""),
    ("an array that is a link", linked(KERNEL), ""),
    ("no chunk", gone(f"{KERNEL}/1.1"), "lacks 1"),
    ("a chunk of other bytes", lambda p: p.put(f"{KERNEL}/1.1", b"\xff" * 300), "kernel"),
    ("a chunk that is a bomb", lambda p: p.put(f"{KERNEL}/1.1", ocdbt.bomb(4 << 30)), "kernel"),
):  # fmt: skip
    add(_name, PLAIN, _spoil, _tells or "link|regular|recognised")

CHUNKED = "__msgpack_chunked_array__"
PIECE = orbax_files.array([4], "float32", bytes(16))
for _name, _data in {
    "empty": b"",
    "an array of a TiB": packed({"w": orbax_files.Lie(b"\xc6\xff\xff\xff\xff")}),
    "an array of another shape": packed({"w": orbax_files.array([9, 9], "float32", bytes(128))}),
    "an array of 2^62 rows": packed({"w": orbax_files.array([1 << 62], "float32", bytes(128))}),
    "an array of no rows and 2^62": packed({"w": orbax_files.array([0, 1 << 62, 1 << 62], "float32", b"")}),
    "an array of a negative shape": packed({"w": orbax_files.array([-8, -4], "float32", bytes(128))}),
    "an array of objects": packed({"w": orbax_files.array([8, 4], "object", bytes(128))}),
    "an array of another extension": packed({"w": orbax_files.Lie(b"\xd4\x63\0")}),
    "an extension that ends elsewhere": packed({"w": orbax_files.Lie(b"\xc7\x05\x01\x93\x90")}),
    "a list of 2^32": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "a list of 2^32 and nothing": b"\x81\xa1a\xdd\xff\xff\xff\xff" + b"\xc0" * (1 << 20),
    "a map of 2^32": b"\xdf\xff\xff\xff\xff",
    "a text of 2^32": b"\x81\xdb\xff\xff\xff\xff",
    "depth": b"\x81\xa1a" + b"\x91" * 100_000,
    "a key twice": b"\x82\xa1w\x01\xa1w\x02",
    "a key that is a list": b"\x81\x90\x01",
    "two leaves of one name": packed({"a.b": 1, "a": {"b": 2}}),
    "pieces of no array": packed({"w": {CHUNKED: True, "shape": {}, "chunks": {}}}),
    "pieces of another array": packed({"w": {CHUNKED: True, "shape": {"0": 0, "1": 9}, "chunks": {"0": PIECE}}}),
    "a placeholder of nothing": packed({"w": "PLACEHOLDER://w"}),
    "bytes": packed({"w": orbax_files.Lie(b"\xc4\x02ab")}),
    "more bytes": packed({"w": 1}) + b"\xc1",
    "a byte that begins nothing": b"\x81\xa1w\xc1",
}.items():  # fmt: skip
    add(
        _name,
        PACKED,
        lambda p, data=_data: p.put("checkpoint", data),
        "checkpoint|missing",
    )
add("a hole of a TiB", PACKED, hole("checkpoint"), "checkpoint")
add("a link", PACKED, linked("checkpoint"), "link|regular|recognised")

for _name, _spoil, _tells in (
    # The values of this checkpoint are small, and lie in the nodes of the tree.
    ("the files of a process are gone", lambda p: shutil.rmtree(p.folder / "ocdbt.process_0"), ""),
    ("the files of a process are a link", linked("ocdbt.process_0"), ""),
    ("the manifest of a process", lambda p: shutil.copy(p.folder / PROCESS, p.folder), "missing|cannot be read"),
    ("only the tree", lambda p: (shutil.rmtree(p.folder / "d"), gone("manifest.ocdbt")(p)), "missing"),
    ("only the step", lambda p: (gone("_METADATA")(p), gone("manifest.ocdbt")(p)), "holds no tree"),
):  # fmt: skip
    add(_name, REAL, _spoil, _tells)
