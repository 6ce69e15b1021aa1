"""What tests of objects share."""

from __future__ import annotations

from megackpt.storage import (
    BucketStorage,
)

MIB = 1 << 20


def views(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def read(storage: BucketStorage, name: str, start: int, *lengths: int) -> list[bytes]:
    buffers = [bytearray(length) for length in lengths]
    with storage.open(name) as reader:
        reader.read_into(start, [memoryview(b) for b in buffers])
    return [bytes(b) for b in buffers]
