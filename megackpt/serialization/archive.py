"""The zip archive of torch.save: where its members are, and the bytes around new ones.

Only stored, unencrypted members. Layout: APPNOTE.TXT (zip), and torch's writer, whose members are
in one folder, with payloads at multiples of ALIGNMENT.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megackpt.errors import CorruptCheckpoint

STORAGES = {
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
"""dtype to the typed storage that torch.save names; all other dtypes have an untyped storage."""
ALIGNMENT = 64
LIMIT = 0xFFFF0000
"""Sizes and offsets from here on need zip64: with its header a payload may pass 4 GiB."""
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_FOLDER = "archive/"
_UTF8 = 0x0800  # torch sets this flag in every header
_STREAMED = 8
_MAX32 = 0xFFFFFFFF  # the value is in the zip64 record
_MAX16 = 0xFFFF
_END_SIZE = 22  # bytes of the record that ends an archive without a comment
_MEMBERS = 1 << 20  # more than any state has

Read = Callable[[int, int], bytes]
"""Start and length to these bytes of the archive."""


@dataclass(frozen=True, slots=True)
class Member:
    """One stored file of ``size`` bytes, behind its local header at ``header``.

    ``crc`` 0: not computed; torch accepts it. ``streamed``: see ``descriptor``.
    """

    name: str
    size: int
    header: int
    crc: int = 0
    streamed: bool = False

    @property
    def flags(self) -> int:
        """Of both headers."""
        return _UTF8 | _STREAMED * self.streamed


class Archive:
    """An archive of ``size`` bytes.

    Raises CorruptCheckpoint for contents that torch.save does not write: members that are
    compressed, doubled, or outside of one folder; bytes after the directory.
    """

    def __init__(self, fetch: Read, size: int) -> None:
        self._fetch = fetch
        self.size = size
        try:
            self.members = self._read_directory()
        except (
            zipfile.BadZipFile, NotImplementedError, OSError, ValueError, struct.error
        ) as error:  # fmt: skip
            raise CorruptCheckpoint(
                f"the directory of a torch archive is damaged: {error}"
            ) from error

    @classmethod
    def of(cls, data: bytes) -> Archive:
        """One in memory."""
        return cls(lambda start, length: data[start : start + length], len(data))

    def _read_directory(self) -> dict[str, Member]:
        """Name without the archive's folder to member."""
        end = self.read(max(0, self.size - _END_SIZE), min(self.size, _END_SIZE))
        if not (end.startswith(b"PK\5\6") and end.endswith(b"\0\0")):
            raise CorruptCheckpoint("a torch archive is cut off, or is something else")
        found: dict[str, Member] = {}
        folders = set[str]()
        with zipfile.ZipFile(_File(self)) as file:
            begin, entries = file.start_dir, file.infolist()
        for info in entries:
            folder, _, name = info.filename.partition("/")
            folders.add(folder)
            if not name or name in found or len(folders) > 1:
                raise CorruptCheckpoint(
                    f"a torch archive has a doubled or misplaced member {info.filename!r}"
                )
            inside = 0 <= info.header_offset <= begin - info.file_size
            packed = info.compress_type or info.compress_size != info.file_size
            if packed or info.flag_bits & 1 or not inside:
                raise CorruptCheckpoint(
                    f"a torch archive's member {info.filename!r} is compressed, "
                    "or not inside the archive"
                )
            found[name] = Member(name, info.file_size, info.header_offset, info.CRC)
        if len(found) > _MEMBERS or sum(m.size for m in found.values()) > begin:
            raise CorruptCheckpoint(
                "the members of a torch archive lie in the same bytes"
            )
        return found

    @property
    def little_endian(self) -> bool:
        """Was it written on a little-endian machine? Old torch does not say; then True."""
        if "byteorder" not in self.members:
            return True
        return self.content("byteorder", 1 << 10) == b"little"

    def start(self, name: str) -> int:
        """The byte at which a member's content begins."""
        member = self.members.get(name)
        if member is None:
            raise CorruptCheckpoint(
                f"the archive has no {name}: torch.save did not write it"
            )
        fields = _LOCAL.unpack(self.read(member.header, _LOCAL.size))
        if fields[0] != b"PK\3\4":
            raise CorruptCheckpoint(
                "a torch archive has no member where its directory says"
            )
        return member.header + _LOCAL.size + int(fields[9]) + int(fields[10])

    def content(self, name: str, limit: int | None = None) -> bytes:
        """The bytes of a member, at most ``limit``, checked against their checksum."""
        start, member = self.start(name), self.members[name]
        if limit is not None and member.size > limit:
            raise CorruptCheckpoint(
                f"{name} has {member.size} bytes, more than {limit}"
            )
        content = self.read(start, member.size)
        # torch has an option to write no checksums; then they are 0.
        if member.crc not in (0, zlib.crc32(content)):
            raise CorruptCheckpoint(
                f"the bytes of {name} are damaged: their checksum is wrong"
            )
        return content

    def read(self, start: int, length: int) -> bytes:
        """Any bytes of it."""
        if start < 0 or length < 0 or start + length > self.size:
            raise CorruptCheckpoint(
                f"it is cut off: bytes {start} to {start + length} are missing"
            )
        return self._fetch(start, length)


class _File(io.RawIOBase):
    """The archive as a file, for zipfile."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._at = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        origin = (0, self._at, self._archive.size)[whence]
        self._at = origin + offset
        if self._at < 0:
            raise OSError("an offset lies before the archive")
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> Any:
        length = max(0, self._archive.size - self._at)
        if 0 <= size < length:
            length = size
        if not length:
            return b""
        data = self._archive.read(self._at, length)
        self._at += length
        return data


# ---- Writing


def aligned_start(member: Member) -> int:
    """The byte behind an aligned header."""
    end = member.header + _LOCAL.size + len(_FOLDER) + len(member.name.encode()) + 4
    if member.size >= LIMIT:
        end += 20
    return -(-end // ALIGNMENT) * ALIGNMENT


def header(member: Member, aligned: bool = False) -> bytes:
    """The local header. ``aligned``: padded so that it ends at a multiple of ALIGNMENT."""
    name = (_FOLDER + member.name).encode()
    size = member.size
    extra = b""
    if size >= LIMIT:
        extra = struct.pack("<2H2Q", 1, 16, size, size)
        size = _MAX32
    if aligned:  # by the extra field that torch uses
        end = member.header + _LOCAL.size + len(name) + len(extra) + 4
        gap = aligned_start(member) - end
        extra += struct.pack("<2H", 0x4246, gap) + b"Z" * gap
    fields = (0, member.flags, 0, 0, 0, member.crc, size, size, len(name), len(extra))
    return _LOCAL.pack(b"PK\3\4", *fields) + name + extra


def descriptor(member: Member) -> bytes:
    """The checksum and the size of a streamed member, which follow its content."""
    form = "<4s3L"
    if member.size >= LIMIT:
        form = "<4sL2Q"
    return struct.pack(form, b"PK\7\x08", member.crc, member.size, member.size)


def directory(members: list[Member], start: int, wide: bool | None = None) -> bytes:
    """The end of an archive, from byte ``start``. ``wide``: in zip64, by default where needed."""
    if wide is None:
        wide = start >= LIMIT or len(members) >= _MAX16
    entries = []
    for member in members:
        name = (_FOLDER + member.name).encode()
        size = member.size
        offset = member.header
        extra = b""
        if size >= LIMIT:
            extra += struct.pack("<2Q", size, size)
            size = _MAX32
        if offset >= LIMIT:
            extra += struct.pack("<Q", offset)
            offset = _MAX32
        if extra:
            extra = struct.pack("<2H", 1, len(extra)) + extra
        flags = (0, 0, member.flags, 0, 0, 0)
        lengths = (size, size, len(name), len(extra))
        entries.append(
            _CENTRAL.pack(b"PK\1\2", *flags, member.crc, *lengths, 0, 0, 0, 0, offset)
        )
        entries += [name, extra]
    table = b"".join(entries)
    size = len(table)
    count = len(members)
    end64 = b""
    if wide:
        sizes = (count, count, size, start)
        end64 = _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, *sizes)
        end64 += _LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
        size = min(size, _MAX32)
        start = _MAX32
    count = min(count, _MAX16)
    return table + end64 + _END.pack(b"PK\5\6", 0, 0, count, count, size, start, 0)
