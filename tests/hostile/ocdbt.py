"""Writes OCDBT by hand, so that any field of it can lie. Source: tensorstore's ``kvstore/ocdbt/index.rst``."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import google_crc32c
import zstandard

MANIFEST, NODE = 0x0CDB3A2A, 0x0CDB20DE


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


def envelope(
    magic: int,
    body: bytes,
    *,
    compressed: bytes | None = None,
    length: int | None = None,
    version: int = 0,
    crc: int | None = None,
) -> bytes:
    """``compressed`` takes the place of the body, with the format zstd."""
    held = body if compressed is None else compressed
    kind = 0 if compressed is None else 1
    size = 12 + len(varint(version)) + 1 + len(held) + 4 if length is None else length
    data = struct.pack(">I", magic) + struct.pack("<Q", size)
    data += varint(version) + bytes([kind]) + held
    check = google_crc32c.value(data) if crc is None else crc
    return data + struct.pack("<I", check)


def zstd(body: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(body)


def bomb(size: int) -> bytes:
    """A frame of RLE blocks: 4 bytes for each 128 KiB of zeros."""
    blocks = [(128 << 10) << 3 | 1 << 1] * (size >> 17)
    blocks[-1] |= 1
    # a window of 128 KiB, no content size
    return b"\x28\xb5\x2f\xfd\0\x38" + b"".join(
        block.to_bytes(3, "little") + b"\0" for block in blocks
    )


def table(files: Sequence[tuple[str, str]]) -> bytes:
    """A table of data files, by base and relative path, without common prefixes."""
    found = varint(len(files)) + varint(0) * max(0, len(files) - 1)
    found += b"".join(varint(len(base + name)) for base, name in files)
    found += b"".join(varint(len(base)) for base, _ in files)
    return found + b"".join((base + name).encode() for base, name in files)


@dataclass(frozen=True)
class Value:
    """A value in a data file: by base and relative path, offset, length."""

    base: str
    name: str
    offset: int
    length: int


@dataclass(frozen=True)
class Database:
    """One leaf node, in its data file, and a manifest. Fields that lie take the place of true ones."""

    values: Mapping[str, bytes | Value]
    node_file: tuple[str, str] = ("", "d/node")
    node_offset: int | None = None
    node_length: int | None = None
    height: int = 0
    entries: int | None = None
    versions: int = 1
    generation: int = 1
    manifest_kind: int = 0
    node: Callable[[bytes], bytes] = lambda body: envelope(NODE, body)
    manifest: Callable[[bytes], bytes] = lambda body: envelope(MANIFEST, body)

    def leaf(self) -> bytes:
        keys = sorted(self.values)
        held = [self.values[key] for key in keys]
        placed = [value for value in held if isinstance(value, Value)]
        files = list(dict.fromkeys((value.base, value.name) for value in placed))
        body = bytes([0]) + table(files)
        body += varint(len(keys) if self.entries is None else self.entries)
        body += varint(0) * (len(keys) - 1)
        body += b"".join(varint(len(key.encode())) for key in keys)
        body += b"".join(key.encode() for key in keys)
        for value in held:
            size = value.length if isinstance(value, Value) else len(value)
            body += varint(size)
        body += b"".join(varint(isinstance(value, Value)) for value in held)
        body += b"".join(varint(files.index((v.base, v.name))) for v in placed)
        body += b"".join(varint(value.offset) for value in placed)
        return body + b"".join(value for value in held if isinstance(value, bytes))

    def write(self, folder: Path) -> None:
        node = self.node(self.leaf())
        file = folder / "d" / "node"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(node)
        offset = 0 if self.node_offset is None else self.node_offset
        length = len(node) if self.node_length is None else self.node_length
        config = bytes(16) + varint(self.manifest_kind) + varint(1024)
        config += varint(100_000_000) + bytes([4]) + varint(0)
        body = config + table([self.node_file]) + varint(self.versions)
        body += varint(self.generation) + bytes([self.height]) + varint(0)
        body += varint(offset) + varint(length) + varint(len(self.values))
        body += varint(length) + varint(0) + struct.pack("<Q", 1) + varint(0)
        (folder / "manifest.ocdbt").write_bytes(self.manifest(body))

    def but(self, **lies: object) -> Database:
        return replace(self, **lies)  # type: ignore[arg-type]
