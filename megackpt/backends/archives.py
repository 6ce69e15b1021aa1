"""The tensors in archives of torch.save: pickles, frames, the contents of a pickle, checksums.

A writer writes these bytes to their places. A reader learns the contents of an archive from its
pickle alone, and whether the bytes of the archive are undamaged.

The *frame* of a tensor makes an archive of its bytes, the form of ``.distcp`` files:
``torch.load(weights_only=True)`` reads head + payload + tail. The head holds the members
``data.pkl``, ``byteorder`` and ``version`` and the local header of ``data/0``, padded so that the
payload (the tensor's C-order bytes) starts at a multiple of ALIGNMENT; the tail is the central
directory. The lengths of head and tail follow from dtype, number of dimensions and size alone, so
that the place of a record follows from the place of its payload. CRC fields are 0, the value after
``torch.serialization.set_crc32_options(False)``: torch does not check CRC fields, and megackpt
checks its digests.
"""

from __future__ import annotations

import math
import struct
import zlib
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.box import Int64
from megackpt.planning.manifest import ITEMSIZE
from megackpt.serialization.archive import (
    LIMIT,
    STORAGES,
    Archive,
    Member,
    directory,
    header,
)
from megackpt.serialization.unpickler import Find, Rule, unpickle
from megackpt.storage import FileReader

if TYPE_CHECKING:
    import torch  # imported late: recognising a file needs none

WIDE = 1 << 31
"""Tensors of this many bytes or more are pickled with 8-byte numbers (LONG1), else BININT."""

WINDOW = 4 << 20
"""Bytes that a check of checksums reads at once."""
_DIMENSIONS = 64
_FRAMED = (("byteorder", b"little"), ("version", b"3\n"))


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
    """The opcodes that torch.save pickles for a contiguous CPU tensor with an unshared storage.

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


@lru_cache(maxsize=16384)
def frame(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Head and tail of the record of a C-order tensor of this dtype (torch's name) and shape."""
    size = math.prod(shape) * ITEMSIZE[dtype]
    pickle = b"\x80\x02" + tensor_opcodes(dtype, shape, "0") + b"."
    head, members = b"", []
    for name, content in (("data.pkl", pickle), *_FRAMED):
        members.append(Member(name, len(content), len(head)))
        head += header(members[-1]) + content
    members.append(Member("data/0", size, len(head)))
    head += header(members[-1], aligned=True)
    return head, directory(members, len(head) + size, size >= LIMIT)


def frame_lengths(dtype: str, shapes: Int64) -> tuple[Int64, Int64]:
    """Lengths of ``frame``'s head and tail for each row of ``shapes`` (n, ndim)."""
    size = np.full(len(shapes), ITEMSIZE[dtype], np.int64)
    filled = size.copy()
    for extent in shapes.T:  # long columns are faster than many short rows
        size *= extent
        filled *= np.maximum(extent, 1)
    kinds = (filled >= WIDE).astype(np.int64) + (size >= LIMIT)
    lengths = np.zeros((2, len(shapes)), np.int64)
    for kind in range(3):
        rows = np.flatnonzero(kinds == kind)
        # All records of one kind have the same lengths.
        if len(rows):
            head, tail = frame(dtype, tuple(shapes[rows[0]].tolist()))
            lengths[0, rows] = len(head)
            lengths[1, rows] = len(tail)
    return lengths[0], lengths[1]


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
    """A tensor that is not a dense one in a storage. ``kind``: the function that makes it.

    ``local``: the part of a DTensor that the rank has.
    """

    kind: str
    local: StoredTensor | None = None


class _Storage(NamedTuple):
    name: str
    nbytes: int
    typed: torch.TypedStorage | None  # None: of a kind that cannot be read


def load_structure(
    pickle: bytes, *, stand_ins: bool = False, local_parts: bool = False
) -> Any:
    """The value of ``data.pkl``, with a StoredTensor (or UnsupportedTensor) for each tensor.

    ``stand_ins``: unknown classes become stand-ins; otherwise they raise UntrustedClass.
    ``local_parts``: a DTensor counts as its local tensor. Raises CorruptCheckpoint like
    ``serialization.load``.
    """
    from megackpt.serialization.allowlist import finder

    rest = finder(stand_ins=stand_ins)
    if local_parts:
        rest = partial(_find_local, rest, finder(stand_ins=True))
    return unpickle(pickle, partial(_find, rest), _storage)


def _find_local(rest: Find, stand_ins: Find, module: str, name: str) -> Rule:
    """A DTensor's class, mesh and placements become stand-ins."""
    if module.startswith("torch.distributed."):
        return stand_ins(module, name)
    return rest(module, name)


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


def _from_type(function: Any, _kind: Any, args: Any, state: Any) -> Any:
    """A tensor with attributes, or of a derived class."""
    if function in (_tensor, _parameter, _from_type):
        return function(*args)
    local = None
    if type(state) is tuple and len(state) == 2 and type(state[1]) is dict:
        local = state[1].get("_local_tensor")
    if type(local) is not StoredTensor:
        local = None
    return UnsupportedTensor("tensor of a class of its own", local)


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
