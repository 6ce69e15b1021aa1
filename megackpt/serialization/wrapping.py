"""Blobs of ``value`` made into blobs of ``[value]`` and back, by their opcodes: nothing is unpickled.

Some of Megatron's formats keep an object in a list of one, others bare. Only the opcodes that make the list come
or go: what is in it keeps its bytes, whatever classes it names. Opcodes and what they take: Python's pickletools.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pickletools import genops, markobject

from megackpt.errors import CorruptCheckpoint
from megackpt.serialization.archive import LOCAL, Archive

_ALIGNMENT = 64  # of the storages' bytes, as torch has it
_FRAME = b"\x95"


def wrapped(blob: bytes) -> bytes:
    """What torch.save writes of ``[value]``, made of what it wrote of ``value``.

    Raises CorruptCheckpoint where the blob is damaged, or is nothing that torch.save wrote.
    """
    return _rewritten(blob, _listed)


def unwrapped(blob: bytes) -> bytes:
    """What torch.save writes of ``value``, made of what it wrote of ``[value]``.

    Raises CorruptCheckpoint where the blob is damaged, or holds anything but a list of one value.
    """
    return _rewritten(blob, _bare)


def _rewritten(blob: bytes, change: Callable[[bytes], bytes]) -> bytes:
    archive = Archive.of(blob)
    contents = {name: archive.content(name) for name in ("data.pkl", *archive.members)}
    try:
        contents["data.pkl"] = change(_unframed(contents["data.pkl"]))
    # DeprecationWarning: names with odd escapes, where warnings are errors.
    except (ValueError, IndexError, DeprecationWarning) as error:
        raise CorruptCheckpoint(f"a pickle is damaged: {error}") from error
    return _zipped(contents)


def _unframed(pickle: bytes) -> bytes:
    """The same pickle without frames, which tell lengths that are to change. No reader needs them."""
    if pickle[:1] != b"\x80" or len(pickle) < 4:
        raise CorruptCheckpoint(
            "a pickle does not begin with its protocol: torch.save did not write it"
        )
    if pickle[1] < 4 or _FRAME not in pickle:
        return pickle
    starts = [
        at
        for opcode, _, at in genops(pickle)
        if opcode.name == "FRAME" and at is not None
    ]
    parts = zip((0, *(at + 9 for at in starts)), (*starts, len(pickle)), strict=True)
    return b"".join(pickle[begin:end] for begin, end in parts)


def _listed(pickle: bytes) -> bytes:
    _check_single(pickle)
    # The list goes unmemoized, so that the numbers of all that is memoized stay as they are.
    return pickle[:2] + b"]" + pickle[2:-1] + b"a."


def _bare(pickle: bytes) -> bytes:
    opcodes = genops(pickle)
    names = [
        (opcode.name, arg, at or 0)
        for (opcode, arg, at), _ in zip(opcodes, range(4), strict=False)
    ]
    if names[1][0] != "EMPTY_LIST" or pickle[-2:] != b"a.":
        raise CorruptCheckpoint("a pickle holds no list of one")
    (put, number, _), (_, _, after) = names[2:4]
    begin, instead = names[2][2], b""
    if (
        put == "MEMOIZE"
    ):  # this one numbers by counting: somebody else must take the list's number
        number, begin, instead = 0, after, b"N\x940"
    elif put in ("BINPUT", "LONG_BINPUT", "PUT"):
        begin = after
    else:
        number = None
    bare = pickle[:2] + instead + pickle[begin:-2] + b"."
    _check_single(bare, number)
    return bare


def _check_single(pickle: bytes, gone: int | None = None) -> None:
    """Raise CorruptCheckpoint unless the pickle leaves one value, ends there, and fetches no memo entry ``gone``."""
    height, marks, stop = 0, list[int](), -1
    for opcode, arg, at in genops(pickle):
        before = opcode.stack_before
        if opcode.name == "STOP":
            stop = at or 0
            break
        if opcode.name in ("GET", "BINGET", "LONG_BINGET") and arg == gone:
            raise CorruptCheckpoint(
                "a pickle refers to the list that it holds its value in"
            )
        if markobject in before:
            height = marks.pop() - before.index(markobject)
        elif opcode.name == "POP" and marks and marks[-1] == height - 1:
            height = marks.pop()
        else:
            height -= len(before)
        if height < (marks[-1] + 1 if marks else 0):
            raise CorruptCheckpoint(
                "a pickle takes what it has not made, or holds no list of one"
            )
        if opcode.name == "MARK":
            marks.append(height)
        height += len(opcode.stack_after)
    if height != 1 or marks or stop != len(pickle) - 1:
        raise CorruptCheckpoint(
            "a pickle leaves another number of values than one, or goes on after its end"
        )


def _zipped(contents: dict[str, bytes]) -> bytes:
    """A torch archive of these members, with checksums."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in contents.items():
            member = zipfile.ZipInfo(f"archive/{name}")
            if name.startswith("data/"):
                gap = (
                    -(buffer.tell() + LOCAL.size + len(member.filename) + 4)
                    % _ALIGNMENT
                )
                member.extra = struct.pack("<2H", 0x4246, gap) + b"Z" * gap
            file.writestr(member, content)
    return buffer.getvalue()
