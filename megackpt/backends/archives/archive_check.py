"""An archive in a file against the CRC-32 of each member in its directory. Reads everything."""

from __future__ import annotations

import zlib

from megackpt.serialization.archive import Archive
from megackpt.storage import FileReader

WINDOW = 4 << 20
"""Bytes read at once."""


def check_archive(
    reader: FileReader, start: int, length: int
) -> tuple[list[str], bool]:
    """The damage of ``length`` bytes from ``start``, and whether some have no checksum.

    Raises CorruptCheckpoint where they are not an archive as torch writes it.
    """
    # A small archive takes one read; of a large one the directory and headers are read alone.
    whole = _read(reader, start, length) if length <= WINDOW else b""

    def fetch(at: int, size: int) -> bytes:
        return whole[at : at + size] if whole else _read(reader, start + at, size)

    archive = Archive(fetch, length)
    damage: list[str] = []
    unchecked = False
    for name, member in archive.members.items():
        begin = archive.start(name)
        if not member.crc:  # torch writes 0 where checksums are off
            unchecked = unchecked or member.size > 0
            continue
        crc = 0
        for at in range(begin, begin + member.size, WINDOW):
            size = min(WINDOW, begin + member.size - at)
            crc = zlib.crc32(archive.read(at, size), crc)
        if crc != member.crc:
            first = start + begin
            damage.append(
                f"{name} does not match its checksum, bytes {first} to {first + member.size}"
            )
    return damage, unchecked


def _read(reader: FileReader, start: int, length: int) -> bytes:
    data = bytearray(length)
    reader.read_into(start, [memoryview(data)])
    return bytes(data)
