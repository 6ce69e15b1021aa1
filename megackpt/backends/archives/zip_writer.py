"""Headers of stored members, zip directories, and the pickle of a plain tensor, as bytes.

Callers write these bytes where they belong. Layout: APPNOTE.TXT (zip), and torch's own writer,
whose members are in one folder, with payloads at multiples of ALIGNMENT.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from megackpt.planning.manifest import ITEMSIZE
from megackpt.serialization.archive import LOCAL, STORAGES

ALIGNMENT = 64
LIMIT = 0xFFFF0000
"""Sizes and offsets from here on need zip64: with its header a payload may pass 4 GiB."""
WIDE = 1 << 31
"""A tensor of so many bytes is pickled with 8-byte numbers (LONG1), smaller ones with BININT."""

_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_FOLDER = b"archive/"
_UTF8 = 0x0800  # torch sets this flag in every header
_MAX32 = 0xFFFFFFFF  # the value is in the zip64 record
_MAX16 = 0xFFFF


@dataclass(frozen=True, slots=True)
class Member:
    """One stored file, with its header at ``header``. ``crc`` 0: not computed; torch accepts it."""

    name: bytes
    size: int
    header: int
    crc: int = 0


def aligned_start(member: Member) -> int:
    """The byte behind an aligned header."""
    end = member.header + LOCAL.size + len(_FOLDER) + len(member.name) + 4
    if member.size >= LIMIT:
        end += 20
    return -(-end // ALIGNMENT) * ALIGNMENT


def header(member: Member, aligned: bool = False) -> bytes:
    """The local header. ``aligned``: padded so that it ends at a multiple of ALIGNMENT."""
    name = _FOLDER + member.name
    size = member.size
    extra = b""
    if size >= LIMIT:
        extra = struct.pack("<2H2Q", 1, 16, size, size)
        size = _MAX32
    if aligned:  # by the extra field that torch uses
        end = member.header + LOCAL.size + len(name) + len(extra) + 4
        gap = aligned_start(member) - end
        extra += struct.pack("<2H", 0x4246, gap) + b"Z" * gap
    fields = (0, _UTF8, 0, 0, 0, member.crc, size, size, len(name), len(extra))
    return LOCAL.pack(b"PK\3\4", *fields) + name + extra


def directory(members: list[Member], start: int, wide: bool) -> bytes:
    """The end of an archive, from byte ``start``. ``wide``: in zip64, for large archives."""
    entries = []
    for member in members:
        name = _FOLDER + member.name
        size = member.size
        offset = member.header
        extra = b""
        if size >= LIMIT:
            extra += struct.pack("<2Q", size, size)
            size = _MAX32
        if offset >= LIMIT:
            extra += struct.pack("<Q", offset)
            offset = _MAX32
        if extra:
            extra = struct.pack("<2H", 1, len(extra)) + extra
        flags = (0, 0, _UTF8, 0, 0, 0)
        lengths = (size, size, len(name), len(extra))
        entries.append(
            _CENTRAL.pack(b"PK\1\2", *flags, member.crc, *lengths, 0, 0, 0, 0, offset)
        )
        entries += [name, extra]
    table = b"".join(entries)
    size = len(table)
    count = len(members)
    end64 = b""
    if wide:
        sizes = (count, count, size, start)
        end64 = _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, *sizes)
        end64 += _LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
        size = min(size, _MAX32)
        start = _MAX32
    count = min(count, _MAX16)
    return table + end64 + _END.pack(b"PK\5\6", 0, 0, count, count, size, start, 0)


def text(value: str) -> bytes:
    """The opcode of a text."""
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _number(value: int, wide: bool) -> bytes:
    if wide:
        return b"\x8a\x08" + struct.pack("<q", value)
    return b"J" + struct.pack("<i", value)


def _numbers(values: list[int], wide: bool) -> bytes:
    return b"(" + b"".join(_number(value, wide) for value in values) + b"t"


def tensor_opcodes(dtype: str, shape: tuple[int, ...], storage: str) -> bytes:
    """What torch.save pickles for a contiguous CPU tensor with a storage of its own.

    Numbers have a fixed width, so that the length does not depend on the shape's extents.
    """
    # C-order strides in elements, as torch has them: an extent of 0 counts as 1.
    strides = list[int]()
    step = 1
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= max(extent, 1)
    wide = step * ITEMSIZE[dtype] >= WIDE
    length = math.prod(shape)
    if typed := STORAGES.get(dtype):
        function = "v2"
        kind = f"torch\n{typed}Storage"
        last = b""
    else:
        function = "v3"
        kind = "torch.storage\nUntypedStorage"
        length *= ITEMSIZE[dtype]
        last = f"ctorch\n{dtype}\n".encode()
    return b"".join((
        f"ctorch._utils\n_rebuild_tensor_{function}\n".encode(),
        b"((X\x07\0\0\0storage",
        f"c{kind}\n".encode(),
        text(storage) + b"X\x03\0\0\0cpu",
        _number(length, wide) + b"tQK\0",
        _numbers(list(shape), wide),
        _numbers(strides, wide),
        b"\x89ccollections\nOrderedDict\n)R" + last + b"tR",
    ))  # fmt: skip
