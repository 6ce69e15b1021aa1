"""The codec of changes: places and differences of the elements that changed, in byte planes.

docs/delta-format.md describes each byte.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numcodecs.zstd import compress  # type: ignore[import-untyped]
from numpy.typing import NDArray

from megackpt.backends.zarr.codecs import decompress
from megackpt.errors import CorruptCheckpoint

Bits = NDArray[Any]
"""The bits of elements in one dimension: an array of a little-endian unsigned dtype, as <u2."""
Kind = Literal["same", "changes", "whole"]

_KINDS: tuple[Kind, ...] = ("same", "changes", "whole")
_HEADER = struct.Struct("<BB6xQ")  # kind, gap_bytes, changes
_LEVEL = 1  # of zstd
_AT_ONCE = 1 << 17  # elements
_WHOLE = 0.5
"""The share of changed elements from which all elements are stored."""


@dataclass(frozen=True)
class Encoded:
    """The elements of a box, in row-major order, as they differ from the version before.

    ``gap_bytes`` is the number of byte planes of the gaps. ``payload`` is one frame of zstd, empty
    if no element changed.
    """

    kind: Kind
    changes: int
    gap_bytes: int
    payload: bytes

    def packed(self) -> bytes:
        """The bytes of a piece in its file: the header, and the payload."""
        kind = _KINDS.index(self.kind)
        return _HEADER.pack(kind, self.gap_bytes, self.changes) + self.payload

    @classmethod
    def parsed(cls, data: bytes) -> Encoded:
        """Raises CorruptCheckpoint for bytes that do not begin with a header."""
        if len(data) < _HEADER.size or data[0] >= len(_KINDS):
            raise CorruptCheckpoint("a piece of a delta does not begin with a header")
        kind, gap_bytes, changes = _HEADER.unpack_from(data)
        return cls(_KINDS[kind], changes, gap_bytes, data[_HEADER.size :])


@dataclass(frozen=True)
class Changes:
    """Places of elements in row-major order, ascending, and new bits minus old bits."""

    places: NDArray[np.int64]
    differences: Bits


def update(bits: Bits, new: Bits) -> tuple[NDArray[np.int64], Bits, Bits]:
    """Turn ``bits`` into ``new``. Returns the places that differ, and old and new bits there.

    Blocks stay in the processor's cache.
    """
    places, old, found = [np.empty(0, np.int64)], [bits[:0]], [bits[:0]]
    for start in range(0, len(new), _AT_ONCE):
        block, wanted = bits[start : start + _AT_ONCE], new[start : start + _AT_ONCE]
        changed = np.flatnonzero(block != wanted)
        old.append(block[changed])
        found.append(wanted[changed])
        block[changed] = found[-1]
        places.append(changed + start)
    return np.concatenate(places), np.concatenate(old), np.concatenate(found)


def encode(new: Bits, places: NDArray[np.int64], differences: Bits) -> Encoded:
    """Encode a box whose bits are ``new``. ``differences``: new bits minus old bits, at places."""
    if not len(places):
        return Encoded("same", 0, 0, b"")
    if len(places) >= _WHOLE * len(new):
        payload = compress(b"".join(_planes(new)), _LEVEL)
        return Encoded("whole", len(new), 0, payload)
    gaps = np.diff(places, prepend=-1)
    gaps -= 1
    gap_bytes = max(1, -(-int(gaps.max()).bit_length() // 8))
    narrow = gaps.astype(_gap_dtype(gap_bytes))
    planes = [*_planes(narrow)[:gap_bytes], *_planes(_zigzag(differences))]
    payload = compress(b"".join(planes), _LEVEL)
    return Encoded("changes", len(places), gap_bytes, payload)


def decode(encoded: Encoded, dtype: np.dtype[Any], length: int) -> Changes | Bits:
    """The changes of a box of ``length`` elements, or all its bits.

    Raises CorruptCheckpoint for a payload that is not of such a box.
    """
    size, count, gap_bytes = dtype.itemsize, encoded.changes, encoded.gap_bytes
    if encoded.kind == "whole":
        return _from_planes(_unpacked(encoded, length * size), dtype)
    if encoded.kind == "same":
        return Changes(np.empty(0, np.int64), np.empty(0, dtype))
    if not (0 < count <= length and 0 < gap_bytes <= 8):
        raise CorruptCheckpoint(
            f"{count} changes with gaps of {gap_bytes} bytes do not fit {length} elements"
        )
    raw = _unpacked(encoded, count * (gap_bytes + size))
    narrow = _gap_dtype(gap_bytes)
    planes = np.zeros((narrow.itemsize, count), np.uint8)
    planes[:gap_bytes] = raw[: count * gap_bytes].reshape(gap_bytes, count)
    gaps = _from_planes(planes.reshape(-1), narrow)
    # Compared one by one first: a forged sum could wrap around.
    if int(gaps.max()) < length:
        places = np.cumsum(gaps.astype(np.int64) + 1) - 1
        if int(places[-1]) < length:
            zigzag = _from_planes(raw[count * gap_bytes :], dtype)
            return Changes(places, _unzigzag(zigzag))
    raise CorruptCheckpoint(f"a changed element is not one of the {length} of its box")


def apply(found: Changes | Bits, bits: Bits) -> None:
    """Turn the bits of the version before into the bits of this version, in place."""
    if isinstance(found, Changes):
        bits[found.places] += found.differences
    else:
        bits[:] = found


def _gap_dtype(gap_bytes: int) -> np.dtype[Any]:
    """The smallest dtype that has this number of bytes."""
    return np.dtype(f"<u{1 << (gap_bytes - 1).bit_length()}")


def _zigzag(differences: Bits) -> Bits:
    """Map 0, -1, 1, -2, 2 to 0, 1, 2, 3, 4: small differences have small numbers."""
    signed = differences.view(differences.dtype.str.replace("u", "i"))
    shift = 8 * differences.dtype.itemsize - 1
    zigzag: Bits = ((signed << 1) ^ (signed >> shift)).view(differences.dtype)
    return zigzag


def _unzigzag(zigzag: Bits) -> Bits:
    one = zigzag.dtype.type(1)
    differences: Bits = (zigzag >> one) ^ (~(zigzag & one) + one)
    return differences


def _planes(bits: Bits) -> list[bytes]:
    """The lowest bytes of all elements, then the second ones, and so on."""
    table = np.ascontiguousarray(bits).view(np.uint8).reshape(len(bits), -1)
    return [table[:, plane].tobytes() for plane in range(table.shape[1])]


def _from_planes(raw: NDArray[np.uint8], dtype: np.dtype[Any]) -> Bits:
    planes = raw.reshape(dtype.itemsize, -1)
    bits: Bits = np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
    return bits


def _unpacked(encoded: Encoded, size: int) -> NDArray[np.uint8]:
    payload = np.frombuffer(encoded.payload, np.uint8)
    return decompress("zstd", payload, size, "a piece of a delta")
