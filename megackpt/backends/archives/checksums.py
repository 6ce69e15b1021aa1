"""An archive in a file against the CRC-32 that its directory keeps of each member. Reads everything."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from megackpt.serialization.archive import Archive
from megackpt.storage import FileReader

WINDOW = 4 << 20  # bytes read at once


class Checked:
    """One archive in a file, seen through a window. ``unchecked``: some bytes have no checksum."""

    def __init__(self, reader: FileReader, start: int, length: int) -> None:
        self.unchecked = False
        self._reader = reader
        self._start = start
        self._length = length
        self._at = 0
        self._window = b""

    def damage(self) -> Iterator[str]:
        """What is wrong with it. Raises CorruptCheckpoint where it is no archive as torch writes them."""
        held = Archive(self._read, self._length)
        for name, member in held.members.items():
            start = held.start(name)
            if not member.crc:  # so torch writes it where it was told to compute none
                self.unchecked = self.unchecked or member.size > 0
            elif self._crc(start, member.size) != member.crc:
                first = self._start + start
                yield f"{name} does not match its checksum, bytes {first} to {first + member.size}"

    def _crc(self, start: int, size: int) -> int:
        value = 0
        for at in range(start, start + size, WINDOW):
            value = zlib.crc32(self._read(at, min(WINDOW, start + size - at)), value)
        return value

    def _read(self, start: int, length: int) -> bytes:
        """These bytes of the record, fewer where it ends: out of the window, which moves to where they are."""
        inside = start - self._at
        if inside < 0 or inside + length > len(self._window):
            self._at, inside = max(0, min(start, self._length)), 0
            data = bytearray(max(0, min(max(length, WINDOW), self._length - self._at)))
            self._reader.read_into(self._start + self._at, [memoryview(data)])
            self._window = bytes(data)
        return self._window[inside : inside + length]
