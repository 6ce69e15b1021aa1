"""The zip archives of torch.save: headers and directories, the tensors in them, checksums.

Those who write an archive write these bytes where they belong. Layout: APPNOTE.TXT (zip), and
torch's own writer, whose members are in one folder, with payloads at multiples of ALIGNMENT.
Those who read one get what it holds from its pickle alone, and whether its bytes are undamaged.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.manifest import ITEMSIZE
from megackpt.serialization.archive import LOCAL, STORAGES, Archive
from megackpt.serialization.unpickler import Find, Rule, unpickle
from megackpt.storage import FileReader

if TYPE_CHECKING:
    import torch  # imported late: recognising a file needs none

ALIGNMENT = 64
LIMIT = 0xFFFF0000
"""Sizes and offsets from here on need zip64: with its header a payload may pass 4 GiB."""
WIDE = 1 << 31
"""A tensor of so many bytes is pickled with 8-byte numbers (LONG1), smaller ones with BININT."""

_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_FOLDER = b"archive/"
_UTF8 = 0x0800  # torch sets this flag in every header
_MAX32 = 0xFFFFFFFF  # the value is in the zip64 record
_MAX16 = 0xFFFF
WINDOW = 4 << 20
"""Bytes that a check of checksums reads at once."""
_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class Member:
    """One stored file, with its header at ``header``. ``crc`` 0: not computed; torch accepts it."""

    name: bytes
    size: int
    header: int
    crc: int = 0


def aligned_start(member: Member) -> int:
    """The byte behind an aligned header."""
    end = member.header + LOCAL.size + len(_FOLDER) + len(member.name) + 4
    if member.size >= LIMIT:
        end += 20
    return -(-end // ALIGNMENT) * ALIGNMENT


def header(member: Member, aligned: bool = False) -> bytes:
    """The local header. ``aligned``: padded so that it ends at a multiple of ALIGNMENT."""
    name = _FOLDER + member.name
    size = member.size
    extra = b""
    if size >= LIMIT:
        extra = struct.pack("<2H2Q", 1, 16, size, size)
        size = _MAX32
    if aligned:  # by the extra field that torch uses
        end = member.header + LOCAL.size + len(name) + len(extra) + 4
        gap = aligned_start(member) - end
        extra += struct.pack("<2H", 0x4246, gap) + b"Z" * gap
    fields = (0, _UTF8, 0, 0, 0, member.crc, size, size, len(name), len(extra))
    return LOCAL.pack(b"PK\3\4", *fields) + name + extra


def directory(members: list[Member], start: int, wide: bool) -> bytes:
    """The end of an archive, from byte ``start``. ``wide``: in zip64, for large archives."""
    entries = []
    for member in members:
        name = _FOLDER + member.name
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
        flags = (0, 0, _UTF8, 0, 0, 0)
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


def text(value: str) -> bytes:
    """The opcode of a text."""
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _number(value: int, wide: bool) -> bytes:
    if wide:
        return b"\x8a\x08" + struct.pack("<q", value)
    return b"J" + struct.pack("<i", value)


def _numbers(values: list[int], wide: bool) -> bytes:
    return b"(" + b"".join(_number(value, wide) for value in values) + b"t"


def tensor_opcodes(dtype: str, shape: tuple[int, ...], storage: str) -> bytes:
    """What torch.save pickles for a contiguous CPU tensor with a storage of its own.

    Numbers have a fixed width, so that the length does not depend on the shape's extents.
    """
    # C-order strides in elements, as torch has them: an extent of 0 counts as 1.
    strides = list[int]()
    step = 1
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= max(extent, 1)
    wide = step * ITEMSIZE[dtype] >= WIDE
    length = math.prod(shape)
    if typed := STORAGES.get(dtype):
        function = "v2"
        kind = f"torch\n{typed}Storage"
        last = b""
    else:
        function = "v3"
        kind = "torch.storage\nUntypedStorage"
        length *= ITEMSIZE[dtype]
        last = f"ctorch\n{dtype}\n".encode()
    return b"".join((
        f"ctorch._utils\n_rebuild_tensor_{function}\n".encode(),
        b"((X\x07\0\0\0storage",
        f"c{kind}\n".encode(),
        text(storage) + b"X\x03\0\0\0cpu",
        _number(length, wide) + b"tQK\0",
        _numbers(list(shape), wide),
        _numbers(strides, wide),
        b"\x89ccollections\nOrderedDict\n)R" + last + b"tR",
    ))  # fmt: skip


# ---- Reading


class StoredTensor(NamedTuple):
    """A tensor in a storage of an archive.

    Args:
        storage: the storage's name.
        nbytes: the storage's size.
        view: a tensor on the device "meta" with the offset, shape and strides in the storage.
    """

    storage: str
    nbytes: int
    view: torch.Tensor

    @property
    def dtype(self) -> str:
        return str(self.view.dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.view.shape)

    @property
    def is_plain(self) -> bool:
        """Do its elements lie in the storage as they are, in C order?"""
        lazy = self.view.is_conj() or self.view.is_neg()
        return self.view.is_contiguous() and not lazy

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise BackendError(
            "a tensor is inside an object that is neither a dict nor a list"
        )


class UnsupportedTensor(NamedTuple):
    """A tensor that is not a dense one in a storage. ``kind``: the function that makes it."""

    kind: str


class _Storage(NamedTuple):
    name: str
    nbytes: int
    typed: torch.TypedStorage | None  # None: of a kind that cannot be read


def load_structure(pickle: bytes, *, stand_ins: bool = False) -> Any:
    """The value of ``data.pkl``, with a StoredTensor (or UnsupportedTensor) for each tensor.

    ``stand_ins``: unknown classes become stand-ins; otherwise they raise UntrustedClass. Raises
    CorruptCheckpoint as ``serialization.load`` does.
    """
    from megackpt.serialization.allowlist import finder

    return unpickle(pickle, partial(_find, finder(stand_ins=stand_ins)), _storage)


def _find(rest: Find, module: str, name: str) -> Rule:
    if module == "torch._utils" and name.startswith("_rebuild_tensor"):
        return Rule(_tensor, _tensor)
    if module == "torch._utils" and name.startswith("_rebuild_parameter"):
        return Rule(_parameter, _parameter)
    if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
        return Rule(_from_type, _from_type)
    if module in ("torch._utils", "torch._tensor") and name.startswith("_rebuild"):
        unsupported = partial(_unsupported, name)
        return Rule(unsupported, unsupported)
    return rest(module, name)


def _storage(persistent_id: tuple[Any, ...]) -> _Storage:
    import torch

    from megackpt.serialization.allowlist import make_storage, parse_storage_id

    dtype, name, count = parse_storage_id(persistent_id)
    if not isinstance(dtype, torch.dtype):
        return _Storage(name, 0, None)
    nbytes = count * dtype.itemsize
    if nbytes >= 1 << 63:
        raise CorruptCheckpoint(f"the storage {name!r} is larger than any can be")
    octets = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    return _Storage(name, nbytes, make_storage(octets, dtype))


def _tensor(storage: Any, *args: Any) -> StoredTensor | UnsupportedTensor:
    """``args``: offset, shape, strides, requires_grad, hooks[, dtype][, metadata]."""
    from megackpt.serialization.allowlist import rebuild_tensor

    if type(storage) is not _Storage:
        raise CorruptCheckpoint("a tensor is made without a storage")
    dtype = None
    if storage.typed is not None:
        dtype = storage.typed.dtype
    if len(args) > 5 and type(args[5]) is not dict:
        dtype = args[5]
    name = str(dtype or "a quantized kind").removeprefix("torch.")
    if name not in ITEMSIZE or storage.typed is None:
        return UnsupportedTensor(f"tensor of {name}")
    try:
        view = rebuild_tensor(storage.typed, *args).detach()
    except RuntimeError as error:
        raise CorruptCheckpoint(f"torch cannot make a tensor: {error}") from error
    if view.dim() > _DIMENSIONS:
        raise CorruptCheckpoint(f"a tensor has more than {_DIMENSIONS} dimensions")
    return StoredTensor(storage.name, storage.nbytes, view)


def _parameter(data: Any, *_: Any) -> Any:
    if type(data) not in (StoredTensor, UnsupportedTensor):
        raise CorruptCheckpoint("a parameter is not made of a tensor")
    return data


def _from_type(function: Any, _kind: Any, args: Any, _state: Any) -> Any:
    """A tensor with attributes, or of a class of its own."""
    if function in (_tensor, _parameter, _from_type):
        return function(*args)
    return UnsupportedTensor("tensor of a class of its own")


def _unsupported(name: str, *_: Any, **__: Any) -> UnsupportedTensor:
    return UnsupportedTensor(name)


def check_archive(
    reader: FileReader, start: int, length: int
) -> tuple[list[str], bool]:
    """The damage of an archive, by the CRC-32 of its members, and whether some have none.

    Reads all of its ``length`` bytes from ``start``. Raises CorruptCheckpoint if they are not an
    archive as torch writes it.
    """
    # A small archive takes one read; of a large one the directory and headers are read alone.
    whole = b""
    if length <= WINDOW:
        whole = _read(reader, start, length)

    def fetch(at: int, size: int) -> bytes:
        if whole:
            return whole[at : at + size]
        return _read(reader, start + at, size)

    archive = Archive(fetch, length)
    damage: list[str] = []
    unchecked = False
    for name, member in archive.members.items():
        begin = archive.start(name)
        if not member.crc:  # torch writes 0 where checksums are off
            unchecked |= member.size > 0
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
