"""The zip archive that torch.save writes: where its members are. Strict, bounded, stored members only.

The archive must end with its directory and nothing after it, and all members stand in one folder. Sizes are
believed only where they lie inside the archive. Layout: APPNOTE.TXT of the zip format, as torch's writer uses it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from megackpt.errors import CorruptCheckpoint

LOCAL = struct.Struct("<4s5H3L2H")
CENTRAL = struct.Struct("<4s6H3L5H2L")
END = struct.Struct("<4s4H2LH")
END64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR = struct.Struct("<4sLQL")
_ENDS = END.size + LOCATOR.size + END64.size
_MEMBERS = 1 << 20  # more than this cannot be right

Read = Callable[[int, int], bytes]
"""Bytes [start, start + length) of the archive, exactly as many."""


@dataclass(frozen=True, slots=True)
class Member:
    """One file in the archive: ``size`` stored bytes behind the local header at ``header``."""

    header: int
    size: int
    crc: int


class Archive:
    """An archive of so many bytes. Raises CorruptCheckpoint for what is not there, or not as it was written."""

    def __init__(self, fetch: Read, size: int) -> None:
        self._fetch = fetch
        self.size = size
        self.members = members(self.read, size)

    @classmethod
    def of(cls, data: bytes) -> Archive:
        """One in memory."""
        return cls(lambda start, length: data[start : start + length], len(data))

    @property
    def little_endian(self) -> bool:
        """Is it of a machine whose numbers are ours? Old releases of torch do not say."""
        return (
            "byteorder" not in self.members
            or self.content("byteorder", 1 << 10) == b"little"
        )

    def start(self, name: str) -> int:
        """Where a member's bytes begin."""
        member = self.members.get(name)
        if member is None:
            raise CorruptCheckpoint(
                f"the archive has no {name}: torch.save did not write it"
            )
        fields = LOCAL.unpack(self.read(member.header, LOCAL.size))
        if fields[0] != b"PK\3\4":
            raise CorruptCheckpoint(
                "a torch archive has no member where its directory says"
            )
        return member.header + LOCAL.size + int(fields[9]) + int(fields[10])

    def content(self, name: str, limit: int | None = None) -> bytes:
        """The bytes of a member, against their checksum: at most so many."""
        start, member = self.start(name), self.members[name]
        if limit is not None and member.size > limit:
            raise CorruptCheckpoint(
                f"{name} has {member.size} bytes: at most {limit} can be right there"
            )
        content = self.read(start, member.size)
        # torch can be told to write no checksums; then they are 0.
        if member.crc not in (0, zlib.crc32(content)):
            raise CorruptCheckpoint(
                f"the bytes of {name} are damaged: their checksum is wrong"
            )
        return content

    def read(self, start: int, length: int) -> bytes:
        """Bytes from anywhere in it."""
        if start < 0 or length < 0 or start + length > self.size:
            raise CorruptCheckpoint(
                f"it is cut off: bytes {start} to {start + length} are missing"
            )
        return self._fetch(start, length)


def members(read: Read, size: int) -> dict[str, Member]:
    """Name (without the archive's folder) -> member, for an archive of ``size`` bytes.

    Raises CorruptCheckpoint for what torch.save does not write: compressed or encrypted members, doubled names.
    """
    start, length, count = _directory(read, size)
    table = read(start, length)
    found: dict[str, Member] = {}
    folder, at = None, 0
    for _ in range(count):
        name, member, at = _entry(table, at, start)
        top, _, rest = name.partition("/")
        folder = top if folder is None else folder
        if top != folder or not rest or rest in found:
            raise CorruptCheckpoint(
                f"a torch archive has a doubled or misplaced member {name!r}"
            )
        found[rest] = member
    if sum(member.size for member in found.values()) > start:
        raise CorruptCheckpoint("the members of a torch archive lie in the same bytes")
    if at != length:
        raise CorruptCheckpoint(
            "a torch archive's directory is longer than its entries"
        )
    return found


def _directory(read: Read, size: int) -> tuple[int, int, int]:
    """Start and length of the central directory, and the number of its entries."""
    if size < END.size:
        raise CorruptCheckpoint(f"{size} bytes are too few for a torch archive")
    tail = read(max(0, size - _ENDS), min(size, _ENDS))
    end = END.unpack(tail[-END.size :])
    if end[0] != b"PK\5\6" or end[7]:
        raise CorruptCheckpoint(
            "a torch archive does not end as one: it is cut off, or something else"
        )
    count, length, start = end[4], end[5], end[6]
    stop = size - END.size
    locator = tail[-END.size - LOCATOR.size : -END.size]
    if len(tail) == _ENDS and locator[:4] == b"PK\6\7":
        _, _, at, _ = LOCATOR.unpack(locator)
        end64 = END64.unpack(tail[: END64.size])
        stop = size - _ENDS
        if end64[0] != b"PK\6\6" or at != stop:
            raise CorruptCheckpoint(
                "a torch archive's zip64 record is not where it should be"
            )
        count, length, start = end64[7], end64[8], end64[9]
    if start + length != stop or count > _MEMBERS:
        raise CorruptCheckpoint("a torch archive's directory is not where it should be")
    return start, length, count


def _entry(table: bytes, at: int, limit: int) -> tuple[str, Member, int]:
    """The directory's entry at this byte: name, member, and where the next entry begins."""
    try:
        magic, _, _, flags, method, _, _, crc, *numbers, header = CENTRAL.unpack_from(
            table, at
        )
    except struct.error as error:
        raise CorruptCheckpoint("a torch archive's directory is cut off") from error
    packed, size, names, extras, comment = numbers[:5]
    at += CENTRAL.size
    name = table[at : at + names].decode("utf-8", "replace")
    extra = table[at + names : at + names + extras]
    size, packed, header = _widened(extra, size, packed, header)
    if (
        magic != b"PK\1\2"
        or method
        or flags & 1
        or packed != size
        or header + size > limit
    ):
        raise CorruptCheckpoint(
            f"a torch archive's member {name!r} is compressed, or not inside the archive"
        )
    return name, Member(header, size, crc), at + names + extras + comment


def _widened(extra: bytes, *values: int) -> tuple[int, ...]:
    """Sizes and offset with those that do not fit 32 bits taken from the zip64 extra field."""
    wide: list[int] = []
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            wide = [
                n for (n,) in struct.iter_unpack("<Q", extra[4 : 4 + length // 8 * 8])
            ]
        extra = extra[4 + length :]
    return tuple(
        wide.pop(0) if value == 0xFFFFFFFF and wide else value for value in values
    )
