"""The bytes of one item in a ``.distcp`` file: a stored zip archive that ``torch.load(weights_only=True)`` reads.

An archive is head + payload + tail. The head holds the members ``data.pkl``, ``byteorder`` and ``version`` and
the local header of ``data/0``, padded so that the payload (the tensor's C-order bytes) starts at a multiple of
ALIGNMENT; the tail is the central directory. The lengths of head and tail follow from dtype, number of
dimensions and size alone, so that the place of a record follows from the place of its payload.

CRC fields are 0, as after ``torch.serialization.set_crc32_options(False)``: torch does not check them, and
megackpt has digests of its own. The layout is that of APPNOTE.TXT (zip) and of torch's serialization notes.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache

import numpy as np

from megackpt.planning.box import Int64
from megackpt.planning.manifest import ITEMSIZE

ALIGNMENT = 64

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

_SMALL = 1 << 31  # numbers below travel as BININT, others as an 8-byte LONG1
_LIMIT = 0xFFFF0000  # a payload from here on needs zip64: with its head it may pass 4 GiB
_FOLDER = b"archive/"
_MEMBERS = ((b"byteorder", b"little"), (b"version", b"3\n"))
_PAYLOAD = b"data/0"
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_UTF8 = 0x0800  # torch sets this flag in every header


def _number(value: int, wide: bool) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value) if wide else b"J" + struct.pack("<i", value)


def _numbers(values: tuple[int, ...], wide: bool) -> bytes:
    return b"(" + b"".join(_number(v, wide) for v in values) + b"t"


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """C-order strides in elements, as torch gives them (an extent of 0 counts as 1)."""
    result = [1]
    for extent in reversed(shape[1:]):
        result.append(result[-1] * max(extent, 1))
    return tuple(reversed(result)) if shape else ()


def _is_wide(shape: tuple[int, ...], itemsize: int) -> bool:
    return math.prod(max(n, 1) for n in shape) * itemsize >= _SMALL


def tensor_pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    """``data.pkl``: what torch.save pickles for a contiguous CPU tensor, in numbers of fixed width."""
    itemsize = ITEMSIZE[dtype]
    wide = _is_wide(shape, itemsize)
    count = math.prod(shape)
    if typed := _STORAGES.get(dtype):
        function, storage, length, last = "v2", f"torch\n{typed}Storage", count, b""
    else:
        function, storage, length = "v3", "torch.storage\nUntypedStorage", count * itemsize
        last = f"ctorch\n{dtype}\n".encode()
    return b"".join((
        f"\x80\x02ctorch._utils\n_rebuild_tensor_{function}\n".encode("latin-1"),
        b"((X\x07\0\0\0storage",
        f"c{storage}\n".encode(),
        b"X\x01\0\0\x000X\x03\0\0\0cpu",
        _number(length, wide) + b"tQK\0",
        _numbers(shape, wide),
        _numbers(strides(shape), wide),
        b"\x89ccollections\nOrderedDict\n)R" + last + b"tR.",
    ))  # fmt: skip


def _shown(size: int) -> int:
    return 0xFFFFFFFF if size >= _LIMIT else size


def _zip64(size: int) -> bytes:
    return struct.pack("<2H2Q", 1, 16, size, size) if size >= _LIMIT else b""


def _local(name: bytes, size: int, extra: bytes = b"") -> bytes:
    name = _FOLDER + name
    shown = _shown(size)
    return _LOCAL.pack(b"PK\3\4", 0, _UTF8, 0, 0, 0, 0, shown, shown, len(name), len(extra)) + name + extra


def _central(name: bytes, size: int, offset: int) -> bytes:
    name = _FOLDER + name
    shown, extra = _shown(size), _zip64(size)
    fixed = (0, 0, _UTF8, 0, 0, 0, 0, shown, shown, len(name), len(extra), 0, 0, 0, 0, offset)
    return _CENTRAL.pack(b"PK\1\2", *fixed) + name + extra


def _end(start: int, size: int, count: int, wide: bool) -> bytes:
    if not wide:
        return _END.pack(b"PK\5\6", 0, 0, count, count, size, start, 0)
    end = _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
    end += _LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
    return end + _END.pack(b"PK\5\6", 0, 0, count, count, size, 0xFFFFFFFF, 0)


@lru_cache(maxsize=16384)
def frame(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Head and tail of the record of a C-order tensor of this dtype (torch's name) and shape."""
    size = math.prod(shape) * ITEMSIZE[dtype]
    members = ((b"data.pkl", tensor_pickle(dtype, shape)), *_MEMBERS)
    head = table = b""
    for name, content in members:
        table += _central(name, len(content), len(head))
        head += _local(name, len(content)) + content
    table += _central(_PAYLOAD, size, len(head))
    extra = _zip64(size)
    gap = -(len(head) + len(_local(_PAYLOAD, size, extra)) + 4) % ALIGNMENT
    extra += struct.pack("<2H", 0x4246, gap) + b"Z" * gap  # the extra field by which torch aligns, too
    head += _local(_PAYLOAD, size, extra)
    return head, table + _end(len(head) + size, len(table), len(members) + 1, size >= _LIMIT)


def frame_lengths(dtype: str, shapes: Int64) -> tuple[Int64, Int64]:
    """Lengths of head and tail for each row of ``shapes`` (n, ndim): those of ``frame``, by columns."""
    itemsize = ITEMSIZE[dtype]
    filled = np.prod(np.maximum(shapes, 1), axis=1, dtype=np.int64) * itemsize
    size = np.prod(shapes, axis=1, dtype=np.int64) * itemsize
    kinds = (filled >= _SMALL).astype(np.int64) + (size >= _LIMIT)
    lengths = np.zeros((2, len(shapes)), np.int64)
    for kind in np.unique(kinds):
        rows = np.flatnonzero(kinds == kind)
        # One record of each kind tells the lengths of all.
        lengths[:, rows] = np.array([list(map(len, frame(dtype, tuple(shapes[rows[0]].tolist()))))]).T
    return lengths[0], lengths[1]
