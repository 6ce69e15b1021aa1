"""The stored bytes of a chunk, compressed or not, and the index of a shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import google_crc32c
import numcodecs  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.box import Int64
from megackpt.planning.manifest import carried_dtype
from megackpt.storage import Storage, read_dense

Octets = NDArray[np.uint8]

MISSING = -1
"""The start and the length of a chunk that a shard does not have."""
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}
COMPRESSORS = frozenset(("zstd", "blosc"))
"""The compressors of the plain form, which this module reads and writes."""
TENSORSTORE = "tensorstore"
ZARR_PYTHON = "zarr-python"
LIBRARIES = frozenset((TENSORSTORE, ZARR_PYTHON))
"""What decodes all other chunks: see library_decoders.py."""

_LEVELS = {"zstd": (22, 3), "blosc": (9, 5)}  # the highest, and the default
_CRC_BYTES = 4
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOSC_HEADER, _ZSTD_HEADER = 16, 18  # bytes, at most


@dataclass(frozen=True)
class Packing:
    """How the chunks of an array are stored.

    Attributes:
        compressor: the codec that their bytes went through, if any. One of LIBRARIES: codecs that
            this library decodes.
        checksum: whether a crc32c follows.
        level: of the compressor; it matters only to a writer.
    """

    compressor: str | None = None
    checksum: bool = True
    level: int = 0

    @classmethod
    def chosen(cls, compression: str | None, checksum: bool) -> Packing:
        """By the options of ``Zarr``. Raises BackendError for an unknown compression."""
        if not isinstance(checksum, bool):
            raise BackendError(f"checksum must be True or False, not {checksum!r}")
        if compression is None:
            return cls(None, checksum)
        name, colon, number = str(compression).partition(":")
        highest, level = _LEVELS.get(name, (0, 0))
        if colon:
            level = 0
            if number.isdecimal():
                level = int(number)
        if not 1 <= level <= highest:
            raise BackendError(
                f"zarr has no compression {compression!r}; choose None; "
                "'zstd' or 'zstd:LEVEL' (1 to 22, else 3); "
                "'blosc' or 'blosc:LEVEL' (1 to 9, else 5)"
            )
        return cls(name, checksum, level)

    def codecs(self, itemsize: int) -> list[dict[str, Any]]:
        """The codecs as zarr.json lists them, for elements of this size."""
        codecs: list[dict[str, Any]] = [LITTLE]
        options: dict[str, Any] = {"level": self.level, "checksum": False}
        if self.compressor == "blosc":
            options = {
                "cname": "lz4",
                "clevel": self.level,
                "shuffle": "bitshuffle",
                "typesize": itemsize,
                "blocksize": 0,
            }
        if self.compressor is not None:
            codecs.append({"name": self.compressor, "configuration": options})
        if self.checksum:
            codecs.append(CRC)
        return codecs

    def pack(self, chunk: Octets, itemsize: int) -> list[memoryview]:
        """The stored bytes of a chunk that is in memory at full size."""
        body = chunk.data
        if self.compressor is not None:
            codec: Any = numcodecs.Zstd(self.level)
            if self.compressor == "blosc":
                codec = numcodecs.Blosc(
                    "lz4", self.level, numcodecs.Blosc.BITSHUFFLE, 0
                )
            # Blosc shuffles items of the size that the array has.
            body = memoryview(codec.encode(chunk.view(carried_dtype(itemsize))))
        if not self.checksum:
            return [body]
        return [body, crc_bytes(crc32c(body))]

    def library(self, data: bytearray) -> str:
        """The library that decodes this chunk; "" if ``unpack`` does."""
        if self.compressor in LIBRARIES:
            return str(self.compressor)
        # A frame need not declare the size of its content. tensorstore decodes it to an end.
        if self.compressor == "zstd" and _zstd_content_size(data[:_ZSTD_HEADER]) < 0:
            return TENSORSTORE
        return ""

    def unpack(self, data: bytearray, size: int, where: str) -> Octets:
        """The bytes of a chunk.

        Raises CorruptCheckpoint for a wrong checksum, and for bytes that do not decompress to just
        this size. It takes no more memory than that, whatever a header claims.
        """
        found: Octets = np.frombuffer(data, np.uint8)
        if self.checksum:
            found, crc = found[:-_CRC_BYTES], found[-_CRC_BYTES:]
            if crc.tobytes() != crc_bytes(crc32c(found)):
                raise CorruptCheckpoint(f"{where}: the chunk does not match its crc32c")
        if self.compressor is not None:
            found = decompress(self.compressor, found, size, where)
        if len(found) != size:
            raise CorruptCheckpoint(
                f"{where}: the chunk has {len(found)} bytes instead of {size}"
            )
        return found


def crc32c(data: Octets | bytes | bytearray | memoryview, before: int = 0) -> int:
    """The crc32c of ``data`` after bytes whose crc32c is ``before``."""
    return int(google_crc32c.extend(before, np.frombuffer(data, np.uint8)))


def crc_bytes(crc: int) -> memoryview:
    """A crc32c as it is stored."""
    return memoryview(crc.to_bytes(_CRC_BYTES, "little"))


def decompress(name: str, data: Octets, size: int, where: str) -> Octets:
    """The content of a frame of "zstd" or "blosc"; CorruptCheckpoint unless it has this size."""
    try:
        # Both codecs trust the sizes in their headers, so these are compared first.
        header = data[:_ZSTD_HEADER].tobytes()
        codec: Any = numcodecs.Zstd()
        if name == "blosc":
            codec = numcodecs.Blosc()
            claimed = int.from_bytes(header[4:8], "little")
            stored = int.from_bytes(header[12:16], "little")
            if len(header) < _BLOSC_HEADER or stored != len(data):
                raise ValueError(f"{len(data)} bytes, and its header claims {stored}")
        else:
            claimed = _zstd_content_size(header)
        if claimed != size:
            raise ValueError(f"its header claims {claimed} bytes instead of {size}")
        decoded = np.empty(size, np.uint8)
        codec.decode(data, decoded)
    except (ValueError, RuntimeError, MemoryError) as error:
        raise CorruptCheckpoint(
            f"{where}: {name} cannot decompress it: {error}"
        ) from error
    return decoded


def _zstd_content_size(header: bytes | bytearray) -> int:
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
    if width == 2:
        return size + 256
    return size


def encode_index(count: int, numbers: Int64, stored: list[tuple[int, int]]) -> bytes:
    """The index of a shard of up to ``count`` chunks.

    ``stored``: start and length of the chunks with these numbers.
    """
    table = np.full((count, 2), MISSING, "<i8")
    table[numbers] = stored
    index = table.tobytes()
    return index + crc_bytes(crc32c(index))


def shard_index(
    root: Storage, file: str, count: int, first: bool = False, checksum: bool = True
) -> tuple[Int64, Int64]:
    """Start and length of each of the ``count`` chunks of a shard; MISSING for absent chunks.

    The index is at the end of the file (``first``: at the start), and a ``checksum`` ends it.
    Raises CorruptCheckpoint if the file is missing or too short, or if its index is damaged or
    points beyond its end.
    """
    where = f"{root.location}/{file}"
    total = 16 * count + _CRC_BYTES * checksum
    try:
        with root.open(file) as reader:
            end = reader.size
            if end < total:
                raise CorruptCheckpoint(
                    f"{where} has {end} bytes, and its index alone should have {total}"
                )
            start = 0 if first else end - total
            data = read_dense(reader, start, total, f"the index of {where}")
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{where} is missing") from None
    crc = crc_bytes(crc32c(data[: 16 * count]))
    if checksum and data[16 * count :] != crc:
        raise CorruptCheckpoint(
            f"{where}: the index of the shard does not match its crc32c"
        )
    table = np.frombuffer(data, "<u8", 2 * count).reshape(count, 2)
    starts = table[:, 0]
    lengths = table[:, 1]
    found = table.astype(np.int64)
    beyond = (starts > end) | (lengths > end - np.minimum(starts, end))
    beyond &= (found != MISSING).any(axis=1)
    if beyond.any():
        number = int(np.flatnonzero(beyond)[0])
        raise CorruptCheckpoint(
            f"{where}: by its index, chunk {number} has {lengths[number]} bytes from byte "
            f"{starts[number]} on, and the file has {end}"
        )
    return found[:, 0], found[:, 1]
