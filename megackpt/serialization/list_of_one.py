"""Blobs of ``value`` to blobs of ``[value]`` and back, by their opcodes, without unpickling.

Some of Megatron's formats keep an object in a list of one, and the rest keep it bare. Only the
opcodes of the list change, so classes that this module does not know survive. Opcodes: Python's
pickletools.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from itertools import islice
from pickletools import dis, genops
from typing import Any

from megackpt.errors import CorruptCheckpoint
from megackpt.serialization.archive import Archive, Member, directory, header


def wrapped(blob: bytes) -> bytes:
    """The blob of ``[value]``, from the blob of ``value``.

    Raises CorruptCheckpoint where the blob is damaged, or torch.save did not write it.
    """
    return _rewritten(blob, _wrap)


def unwrapped(blob: bytes) -> bytes:
    """The blob of ``value``, from the blob of ``[value]``.

    Raises CorruptCheckpoint where the blob is damaged, or has no list of one value.
    """
    return _rewritten(blob, _unwrap)


def _rewritten(blob: bytes, change: Callable[[bytes], bytes]) -> bytes:
    archive = Archive.of(blob)
    contents = {}
    for name in ("data.pkl", *archive.members):
        contents[name] = archive.content(name)
    try:
        contents["data.pkl"] = change(_without_frames(contents["data.pkl"]))
    # A DeprecationWarning comes from names with odd escapes, where warnings are errors.
    except (ValueError, IndexError, DeprecationWarning) as error:
        raise CorruptCheckpoint(f"a pickle is damaged: {error}") from error
    data = bytearray()
    members = []
    for name, content in contents.items():
        member = Member(name, len(content), len(data), zlib.crc32(content))
        data += header(member, aligned=name.startswith("data/"))
        data += content
        members.append(member)
    return bytes(data + directory(members, len(data)))


def _without_frames(pickle: bytes) -> bytes:
    """The same pickle without frames, whose lengths would change. No reader needs them."""
    if pickle[:1] != b"\x80" or len(pickle) < 4:
        raise CorruptCheckpoint(
            "a pickle does not begin with its protocol: torch.save did not write it"
        )
    if pickle[1] < 4:
        return pickle
    parts, copied = [], 0
    for opcode, _, at in genops(pickle):
        if opcode.name == "FRAME" and at is not None:
            parts.append(pickle[copied:at])
            copied = at + 9
    return b"".join((*parts, pickle[copied:]))


def _wrap(pickle: bytes) -> bytes:
    _check_single(pickle)
    # The list gets no memo entry, so that all other objects keep their numbers.
    return pickle[:2] + b"]" + pickle[2:-1] + b"a."


def _unwrap(pickle: bytes) -> bytes:
    opcodes = list(islice(genops(pickle), 4))
    if opcodes[1][0].name != "EMPTY_LIST" or pickle[-2:] != b"a.":
        raise CorruptCheckpoint("a pickle holds no list of one")
    (put, number, begin), (_, _, after) = opcodes[2:]
    filler = b""
    if put.name == "MEMOIZE":
        # MEMOIZE counts, so another value has to take the number of the list.
        number, begin, filler = 0, after, b"N\x940"
    elif put.name in ("BINPUT", "LONG_BINPUT", "PUT"):
        begin = after
    else:
        number = None
    bare = pickle[:2] + filler + pickle[begin:-2] + b"."
    _check_single(bare, number)
    return bare


def _check_single(pickle: bytes, removed: int | None = None) -> None:
    """Check that the pickle leaves one value, ends there, and does not fetch memo ``removed``."""
    for opcode, arg, _ in genops(pickle):
        if opcode.name in ("GET", "BINGET", "LONG_BINGET") and arg == removed:
            raise CorruptCheckpoint("a pickle refers to the list around its value")
    file = io.BytesIO(pickle)
    try:
        dis(
            file, out=io.TextIOWrapper(_Discard())
        )  # which checks the stack and the memo
    except ValueError as error:
        raise CorruptCheckpoint(
            f"a pickle holds no list of one, or another number of values: {error}"
        ) from error
    if file.read(1):
        raise CorruptCheckpoint("a pickle has bytes after its end")


class _Discard(io.BytesIO):
    def write(self, data: Any) -> int:
        return len(data)
