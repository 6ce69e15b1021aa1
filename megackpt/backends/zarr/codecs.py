"""The stored bytes of a chunk: compressed and decompressed, with the crc32c and the index of a shard."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numcodecs  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from megackpt.backends.zarr.grid import ArrayLayout
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.box import Int64
from megackpt.planning.manifest import ITEMSIZE, carried_dtype
from megackpt.storage import Storage, read_dense

Octets = NDArray[np.uint8]

MISSING = -1
"""The start and the length of a chunk that a shard does not have."""

LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}
DECODED = frozenset(("crc32c", "zstd", "blosc", "gzip", "zlib"))
"""Codecs on bytes that can be read."""

_ABSENT = (1 << 64) - 1  # in an index: the start and the length of a missing chunk
_CRC_BYTES = 4
_LEVELS = {"zstd": (range(1, 23), 3), "blosc": (range(1, 10), 5)}
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOSC_HEADER, _ZSTD_HEADER = 16, 18  # bytes, at most


@dataclass(frozen=True)
class Packing:
    """How chunks are stored: ``compression`` ("zstd", "zstd:5", "blosc", None), and a crc32c.

    Raises BackendError, naming all compressions, for an unknown one.
    """

    compression: str | None = None
    checksum: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.checksum, bool):
            raise BackendError(f"checksum must be True or False, not {self.checksum!r}")
        if self.compression is not None:
            self._name_and_level()

    def codecs(self, itemsize: int) -> list[dict[str, Any]]:
        """The codecs of a chunk of elements of this size, as zarr.json lists them."""
        codecs: list[dict[str, Any]] = [LITTLE]
        if self.compression is not None:
            name, level = self._name_and_level()
            options: dict[str, Any] = {"level": level, "checksum": False}
            if name == "blosc":
                options = {"cname": "lz4", "clevel": level, "shuffle": "bitshuffle"}
                options |= {"typesize": itemsize, "blocksize": 0}
            codecs.append({"name": name, "configuration": options})
        if self.checksum:
            codecs.append(CRC)
        return codecs

    def compress(self, chunk: Octets, itemsize: int) -> bytes:
        """The compressed bytes of a chunk, without a crc32c."""
        name, level = self._name_and_level()
        codec: Any = numcodecs.Zstd(level)
        if name == "blosc":
            # Blosc shuffles items of the size that the array has.
            codec = numcodecs.Blosc("lz4", level, numcodecs.Blosc.BITSHUFFLE, 0)
        return bytes(codec.encode(chunk.view(carried_dtype(itemsize))))

    def _name_and_level(self) -> tuple[str, int]:
        name, colon, number = str(self.compression).partition(":")
        levels, level = _LEVELS.get(name, (range(0), 0))
        if colon:
            level = int(number) if number.isdecimal() else 0
        if level not in levels:
            known = [
                f"'{n}' or '{n}:LEVEL' ({r[0]} to {r[-1]}, else {default})"
                for n, (r, default) in _LEVELS.items()
            ]
            raise BackendError(
                f"zarr has no compression {self.compression!r}; choose None; {'; '.join(known)}"
            )
        return name, level


def crc32c(data: Octets | bytes | memoryview, before: int = 0) -> int:
    """The crc32c of ``data`` after bytes whose crc32c is ``before``."""
    array = np.frombuffer(data, np.uint8)
    return int(google_crc32c.extend(before, array))


def decode_chunk(data: bytearray, layout: ArrayLayout, where: str) -> NDArray[Any]:
    """The elements of a stored chunk, in the shape ``layout.inner``, as unsigned integers.

    Raises CorruptCheckpoint for a wrong checksum, and for bytes that do not decompress to just this
    size: no more memory than that is taken, whatever a header asks for.
    """
    # The number of bytes that went into each codec. After a compressor it is not known, so
    # parse_array accepts one compressor, at most.
    sizes = []
    size = layout.chunk_bytes
    for name in layout.codecs:
        sizes.append(size)
        size += _CRC_BYTES if name == "crc32c" else 0
    found: Octets = np.frombuffer(data, np.uint8)
    for name, size in zip(reversed(layout.codecs), reversed(sizes), strict=True):
        if name == "crc32c":
            body, crc = found[:-_CRC_BYTES], found[-_CRC_BYTES:]
            if crc32c(body) != int.from_bytes(crc.tobytes(), "little"):
                raise CorruptCheckpoint(f"{where}: the chunk does not match its crc32c")
            found = body
        else:
            found = _decompress(name, found, size, where)
    if len(found) != layout.chunk_bytes:
        raise CorruptCheckpoint(
            f"{where}: the chunk has {len(found)} bytes instead of {layout.chunk_bytes}"
        )
    itemsize = ITEMSIZE[layout.dtype]
    if layout.big_endian:
        unit = itemsize // 2 if layout.dtype.startswith("complex") else itemsize
        found = found.view(f"u{unit}").byteswap().view(np.uint8)
    stored = [layout.inner[axis] for axis in layout.order]
    axes = [layout.order.index(axis) for axis in range(len(stored))]
    return found.view(carried_dtype(itemsize)).reshape(stored).transpose(axes)


def _decompress(name: str, data: Octets, size: int, where: str) -> Octets:
    try:
        if name in ("gzip", "zlib"):
            stream = zlib.decompressobj(31 if name == "gzip" else 15)
            decoded = np.frombuffer(stream.decompress(data.data, size + 1), np.uint8)
            if len(decoded) != size:
                raise ValueError(f"not {size} bytes")
            return decoded
        # These two trust the sizes in their headers, so they are compared first.
        header = data[:_ZSTD_HEADER].tobytes()
        if name == "blosc":
            said = int.from_bytes(header[4:8], "little")
            stored = int.from_bytes(header[12:16], "little")
            if len(header) < _BLOSC_HEADER or stored != len(data):
                raise ValueError(
                    f"{len(data)} bytes are stored, its header says {stored}"
                )
        else:
            said = _zstd_content_size(header)
        if said != size:
            raise ValueError(f"its header says {said} bytes, and the chunk has {size}")
        decoded = np.empty(size, np.uint8)
        codec: Any = numcodecs.Blosc() if name == "blosc" else numcodecs.Zstd()
        codec.decode(data, decoded)
    except (ValueError, RuntimeError, MemoryError, zlib.error) as error:
        raise CorruptCheckpoint(
            f"{where}: {name} cannot decompress the chunk: {error}"
        ) from error
    return decoded


def _zstd_content_size(header: bytes) -> int:
    """The size of the content that a frame declares (RFC 8878, 3.1.1); -1 if it does not."""
    if header[:4] != _ZSTD_MAGIC or len(header) < 6:
        return -1
    flags = header[4]
    single_segment = flags >> 5 & 1
    start = 5 + (1 - single_segment) + (0, 1, 2, 4)[flags & 3]
    width = (single_segment, 2, 4, 8)[flags >> 6]
    if not width:
        return -1
    size = int.from_bytes(header[start : start + width], "little")
    return size + 256 if width == 2 else size


def encode_index(count: int, numbers: Int64, starts: Int64, lengths: Int64) -> bytes:
    """The index of a shard of up to ``count`` chunks, with these in it."""
    table = np.full((count, 2), _ABSENT, "<u8")
    table[numbers, 0] = starts
    table[numbers, 1] = lengths
    index = table.tobytes()
    return index + crc32c(index).to_bytes(_CRC_BYTES, "little")


def shard_index(
    root: Storage, file: str, count: int, index: tuple[str, bool]
) -> tuple[Int64, Int64]:
    """Start and length of each of the ``count`` chunks of a shard; MISSING for those that it lacks.

    Raises CorruptCheckpoint if the file is missing or too short, or if its index is damaged or
    points beyond its end.
    """
    where = f"{root.location}/{file}"
    at, checked = index
    size = 16 * count
    total = size + _CRC_BYTES * checked
    try:
        with root.open(file) as reader:
            end = reader.size
            if end < total:
                raise CorruptCheckpoint(
                    f"{where} has {end} bytes, and its index alone should have {total}"
                )
            start = 0 if at == "start" else end - total
            data = read_dense(reader, start, total, f"the index of {where}")
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{where} is missing") from None
    if checked and crc32c(bytes(data[:size])) != int.from_bytes(data[size:], "little"):
        raise CorruptCheckpoint(
            f"{where}: the index of the shard does not match its crc32c"
        )
    table = np.frombuffer(data, "<u8", 2 * count).reshape(count, 2)
    absent = (table == _ABSENT).all(axis=1)
    starts, lengths = table[:, 0], table[:, 1]
    beyond = ~absent & ((starts > end) | (lengths > end - np.minimum(starts, end)))
    if beyond.any():
        number = int(np.flatnonzero(beyond)[0])
        raise CorruptCheckpoint(
            f"{where}: by its index, chunk {number} has {lengths[number]} bytes from byte "
            f"{starts[number]} on, and the file has {end}"
        )
    found = np.where(absent[:, None], np.uint64(_ABSENT), table).astype(np.int64)
    return found[:, 0], found[:, 1]
