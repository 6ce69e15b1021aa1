"""Headers of stored members, zip directories, and the pickle of a plain tensor: what torch.load reads, as bytes.

Nothing here knows a file: callers put these bytes where they belong. Layout: APPNOTE.TXT (zip), and torch's own
writer, whose members stand in one folder, with payloads at multiples of ALIGNMENT.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from megackpt.planning.manifest import ITEMSIZE
from megackpt.serialization.archive import LOCAL

CENTRAL = struct.Struct("<4s6H3L5H2L")
END = struct.Struct("<4s4H2LH")
END64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR = struct.Struct("<4sLQL")

ALIGNMENT = 64
LIMIT = 0xFFFF0000
"""Sizes and places from here on need zip64: with its head a payload may pass 4 GiB."""

_STORAGES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "uint8": "Byte",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
"""dtypes that torch pickles by a typed storage (``_rebuild_tensor_v2``); all others by an untyped one (v3)."""

WIDE = 1 << 31
"""A tensor of so many bytes is described by 8-byte numbers (LONG1), smaller ones by BININT."""

_FOLDER = b"archive/"
_UTF8 = 0x0800  # torch sets this flag in every header
_BEYOND = 0xFFFFFFFF
_MANY = 0xFFFF


@dataclass(frozen=True, slots=True)
class Member:
    """One stored file: its header stands at ``header``. ``crc`` 0: none was computed, which torch does not mind."""

    name: bytes
    size: int
    header: int
    crc: int = 0


def aligned_start(member: Member) -> int:
    """Where what follows an aligned header begins."""
    extra = (20 if member.size >= LIMIT else 0) + 4
    return (
        -(
            -(member.header + LOCAL.size + len(_FOLDER) + len(member.name) + extra)
            // ALIGNMENT
        )
        * ALIGNMENT
    )


def header(member: Member, aligned: bool = False) -> bytes:
    """The local header. ``aligned``: filled up so that what follows it begins at a multiple of ALIGNMENT."""
    name, size = _FOLDER + member.name, member.size
    shown, extra = (
        (_BEYOND, struct.pack("<2H2Q", 1, 16, size, size))
        if size >= LIMIT
        else (size, b"")
    )
    if aligned:  # by the extra field that torch uses for it, too
        gap = aligned_start(member) - (
            member.header + LOCAL.size + len(name) + len(extra) + 4
        )
        extra += struct.pack("<2H", 0x4246, gap) + b"Z" * gap
    fixed = (0, _UTF8, 0, 0, 0, member.crc, shown, shown, len(name), len(extra))
    return LOCAL.pack(b"PK\3\4", *fixed) + name + extra


def directory(members: list[Member], start: int, wide: bool) -> bytes:
    """What ends an archive, at ``start``. ``wide``: in zip64, which large sizes, places and counts need."""
    table = b"".join(map(_entry, members))
    shown = min(len(members), _MANY)
    if not wide:
        return table + END.pack(b"PK\5\6", 0, 0, shown, shown, len(table), start, 0)
    end = END64.pack(
        b"PK\6\6", 44, 45, 45, 0, 0, len(members), len(members), len(table), start
    )
    end += LOCATOR.pack(b"PK\6\7", 0, start + len(table), 1)
    return (
        table
        + end
        + END.pack(b"PK\5\6", 0, 0, shown, shown, min(len(table), _BEYOND), _BEYOND, 0)
    )


def _entry(member: Member) -> bytes:
    name, size, place = _FOLDER + member.name, member.size, member.header
    wide = [size, size] if size >= LIMIT else []
    wide += [place] if place >= LIMIT else []
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    shown, at = (
        (_BEYOND if size >= LIMIT else size),
        (_BEYOND if place >= LIMIT else place),
    )
    fixed = (
        0,
        0,
        _UTF8,
        0,
        0,
        0,
        member.crc,
        shown,
        shown,
        len(name),
        len(extra),
        0,
        0,
        0,
        0,
        at,
    )
    return CENTRAL.pack(b"PK\1\2", *fixed) + name + extra


def text(value: str) -> bytes:
    """The opcode that puts a text on the pickle machine's stack."""
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def plain_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """C-order strides in elements, as torch gives them (an extent of 0 counts as 1)."""
    result = [1]
    for extent in reversed(shape[1:]):
        result.append(result[-1] * max(extent, 1))
    return tuple(reversed(result)) if shape else ()


def _number(value: int, wide: bool) -> bytes:
    return (
        b"\x8a\x08" + struct.pack("<q", value)
        if wide
        else b"J" + struct.pack("<i", value)
    )


def _numbers(values: tuple[int, ...], wide: bool) -> bytes:
    return b"(" + b"".join(_number(v, wide) for v in values) + b"t"


def tensor_opcodes(dtype: str, shape: tuple[int, ...], storage: str) -> bytes:
    """What torch.save pickles for a contiguous CPU tensor in a storage of its own, in numbers of fixed width."""
    itemsize = ITEMSIZE[dtype]
    wide = math.prod(max(n, 1) for n in shape) * itemsize >= WIDE
    count = math.prod(shape)
    if typed := _STORAGES.get(dtype):
        function, kind, length, last = "v2", f"torch\n{typed}Storage", count, b""
    else:
        function, kind, length = "v3", "torch.storage\nUntypedStorage", count * itemsize
        last = f"ctorch\n{dtype}\n".encode()
    return b"".join((
        f"ctorch._utils\n_rebuild_tensor_{function}\n".encode(),
        b"((X\x07\0\0\0storage",
        f"c{kind}\n".encode(),
        text(storage) + b"X\x03\0\0\0cpu",
        _number(length, wide) + b"tQK\0",
        _numbers(shape, wide),
        _numbers(plain_strides(shape), wide),
        b"\x89ccollections\nOrderedDict\n)R" + last + b"tR",
    ))  # fmt: skip
