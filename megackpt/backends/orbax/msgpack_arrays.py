"""Reads msgpack as flax and orbax write it: plain values, and the places of the bytes of arrays.

Source: the specification of msgpack, and ``msgpack_utils.py`` of orbax-checkpoint 0.12.8. Extension
1 is an array (shape, dtype, bytes), 2 a complex number, 3 a scalar of numpy (as 1), 4 a tuple.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Box
from megackpt.planning.manifest import ITEMSIZE, Location, size_problem
from megackpt.storage import FileReader, Storage

_TEXT_BYTES = 1 << 20
_MOST_VALUES = 1 << 19
_DEEPEST = 100
_BUFFER_BYTES = 1 << 16
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = dict(
    enumerate((">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"), 0xCA)
)
_SIZED = {
    0xC4: ("bytes", 1),
    0xC5: ("bytes", 2),
    0xC6: ("bytes", 4),
    0xC7: ("extension", 1),
    0xC8: ("extension", 2),
    0xC9: ("extension", 4),
    0xD9: ("text", 1),
    0xDA: ("text", 2),
    0xDB: ("text", 4),
    0xDC: ("list", 2),
    0xDD: ("list", 4),
    0xDE: ("map", 2),
    0xDF: ("map", 4),
}
"""The first byte of a value -> its kind, and the bytes of its size."""
_CHUNKED = "__msgpack_chunked_array__"
"""A map with this key is one array of more than 1 GiB, in flat pieces."""


class Inline(NamedTuple):
    """An array: its C-order bytes, in consecutive boxes."""

    shape: tuple[int, ...]
    dtype: str
    pieces: list[tuple[Box, Location]]


def unpack(root: Storage, file: str) -> Any:
    """The value in a file. Arrays are Inline, bytes a Location.

    Raises CorruptCheckpoint for everything that is not msgpack of flax or orbax.
    """
    with root.open(file) as reader:
        unpacker = _Unpacker(reader, file)
        try:
            value = unpacker.value(0)
            if unpacker.at != reader.size:
                raise ValueError("more bytes follow the value")
            return value
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CorruptCheckpoint(
                f"{root.location}/{file} is damaged before byte {unpacker.at}: {error}"
            ) from error


class _Unpacker:
    def __init__(self, reader: FileReader, file: str) -> None:
        self.at = 0
        self._reader = reader
        self._file = file
        self._buffer = b""
        self._start = 0
        self._values = 0
        self._kinds: dict[str, Callable[[int, int], Any]] = {
            "bytes": self._bytes,
            "extension": self._extension,
            "list": self._list,
            "map": self._map,
            "text": self._text,
        }

    def value(self, depth: int) -> Any:
        self._values += 1
        if depth > _DEEPEST or self._values > _MOST_VALUES:
            raise ValueError("it has too many values, or too many in one another")
        code = self._take(1)[0]
        if code < 0x80:
            return code
        if code >= 0xE0:
            return code - 256
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _NUMBERS:
            form = _NUMBERS[code]
            return struct.unpack(form, self._take(struct.calcsize(form)))[0]
        if code < 0xA0:
            kind = "map" if code < 0x90 else "list"
            size = code & 15
        elif code < 0xC0:
            kind = "text"
            size = code & 31
        elif 0xD4 <= code <= 0xD8:
            kind = "extension"
            size = 1 << (code - 0xD4)
        else:
            kind, width = _SIZED[code]
            size = int.from_bytes(self._take(width), "big")
        return self._kinds[kind](size, depth)

    def _take(self, count: int) -> bytes:
        begin = self.at - self._start
        if begin + count > len(self._buffer):
            left = self._reader.size - self.at
            if count > min(left, _TEXT_BYTES):
                raise ValueError(f"{count} bytes were to follow, and {left} do")
            data = bytearray(min(max(count, _BUFFER_BYTES), left))
            self._reader.read_into(self.at, [memoryview(data)])
            self._buffer = bytes(data)
            self._start = self.at
            begin = 0
        self.at += count
        return self._buffer[begin : begin + count]

    def _text(self, size: int, _: int) -> str:
        return self._take(size).decode()

    def _bytes(self, size: int, _: int) -> Location:
        place = Location(self._file, self.at, size)
        self.at += size
        if self.at > self._reader.size:
            raise ValueError(f"the file ends before the {size} bytes of an array")
        return place

    def _list(self, size: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(size)]

    def _map(self, size: int, depth: int) -> Any:
        found: dict[Any, Any] = {}
        for _ in range(size):
            key = self.value(depth + 1)
            if key in found:
                raise ValueError(f"a map has the key {key!r} twice")
            found[key] = self.value(depth + 1)
        if _CHUNKED in found:
            return _joined(found)
        return found

    def _extension(self, size: int, depth: int) -> Any:
        kind = self._take(1)[0]
        end = self.at + size
        value = self.value(depth + 1)
        if kind in (1, 3):
            value = _array(*value)
        elif kind == 2:
            value = complex(*value)
        elif kind == 4:
            value = tuple(value)
        else:
            raise ValueError(f"the extension {kind} is not known")
        if self.at != end:
            raise ValueError(f"an extension of {size} bytes ends elsewhere")
        return value


def _array(shape: Any, dtype: Any, place: Any) -> Inline:
    return _checked(shape, dtype, [(Box.whole(shape), place)], place.length)


def _checked(
    shape: Any, dtype: Any, pieces: list[tuple[Box, Location]], nbytes: int
) -> Inline:
    are_counts = all(type(extent) is int and extent >= 0 for extent in shape)
    if dtype not in ITEMSIZE or not are_counts or size_problem(shape, dtype):
        raise ValueError(f"it has an array of shape {shape} and dtype {dtype}")
    if math.prod(shape) * ITEMSIZE[dtype] != nbytes:
        raise ValueError(f"{nbytes} bytes are not {shape} of {dtype}")
    return Inline(tuple(shape), dtype, pieces)


def _joined(found: dict[Any, Any]) -> Inline:
    """One array of its flat pieces."""
    extents = found["shape"]
    shape = [extents[str(axis)] for axis in range(len(extents))]
    pieces = []
    start = nbytes = 0
    dtype = ""
    for number in range(len(found["chunks"])):
        chunk: Inline = found["chunks"][str(number)]
        dtype = dtype or chunk.dtype
        (count,) = chunk.shape
        at = chunk.pieces[0][1].start
        if chunk.dtype != dtype:
            raise ValueError("the pieces of an array differ in dtype")
        for box in Box.whole(shape).runs(start, start + count):
            length = box.volume * ITEMSIZE[dtype]
            pieces.append((box, Location(chunk.pieces[0][1].file, at, length)))
            at += length
        start += count
        nbytes += count * ITEMSIZE[dtype]
    return _checked(shape, dtype, pieces, nbytes)
