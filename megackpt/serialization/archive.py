"""The zip archive of torch.save: where its members are. Only stored, unencrypted members."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megackpt.errors import CorruptCheckpoint

LOCAL = struct.Struct("<4s5H3L2H")
"""A member's local header, as in APPNOTE.TXT of the zip format."""
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
"""dtype to the typed storage that torch.save names; all others have an untyped one."""
_END_SIZE = 22  # bytes of the record that ends an archive without a comment
_MEMBERS = 1 << 20  # more than any state has

Read = Callable[[int, int], bytes]
"""Start and length to these bytes of the archive."""


@dataclass(frozen=True, slots=True)
class Member:
    """One file in the archive: ``size`` stored bytes behind the local header at ``header``."""

    header: int
    size: int
    crc: int


class Archive:
    """An archive of ``size`` bytes.

    Raises CorruptCheckpoint for what torch.save does not write: members that are compressed,
    doubled, or outside of one folder; bytes after the directory.
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
            found[name] = Member(info.header_offset, info.file_size, info.CRC)
        if len(found) > _MEMBERS or sum(m.size for m in found.values()) > begin:
            raise CorruptCheckpoint(
                "the members of a torch archive lie in the same bytes"
            )
        return found

    @property
    def little_endian(self) -> bool:
        """Was it written on a machine with the byte order of ours? Old torch does not say."""
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
        fields = LOCAL.unpack(self.read(member.header, LOCAL.size))
        if fields[0] != b"PK\3\4":
            raise CorruptCheckpoint(
                "a torch archive has no member where its directory says"
            )
        return member.header + LOCAL.size + int(fields[9]) + int(fields[10])

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
