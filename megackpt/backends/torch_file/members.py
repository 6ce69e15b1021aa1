"""The members of one torch.save file: where each payload begins, and the bytes that frame the payloads.

    data/0, data/1, ...    header, then payload: the tensors in the manifest's order, then the blobs
    data.pkl               pickle of {key: tensor}, and of STATE: {name: blob as a uint8 tensor}
    byteorder, version     as torch writes them
                           directory of all these, which makes a zip archive of the file

Every payload begins at a multiple of 64. All checksums are true, because other programs check them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megackpt.backends.archives import (
    LIMIT,
    Member,
    aligned_start,
    directory,
    header,
    tensor_opcodes,
    text,
)
from megackpt.errors import BackendError
from megackpt.planning.manifest import Location, Manifest, TensorEntry, unique_key
from megackpt.storage import Storage

NAME = "model.pt"
STATE = "megackpt.state"
"""The key of the common state and the objects in the dict of tensors."""

_MANY = 0xFFFF  # members from which on the directory must be a wide one


def payload_name(number: int) -> bytes:
    return b"data/%d" % number


def framed(sizes: Iterable[int]) -> list[Member]:
    """The members that hold payloads of these sizes (bytes), one after the other from byte 0."""
    found: list[Member] = []
    position = 0
    for number, size in enumerate(sizes):
        found.append(Member(payload_name(number), size, position))
        position = end(found[-1])
    return found


def end(member: Member) -> int:
    return aligned_start(member) + member.size


def tensors_of(manifest: Manifest) -> list[TensorEntry]:
    return [entry for entry in manifest.tensors if not entry.meta.is_object]


def tensor_locations(manifest: Manifest) -> dict[str, Location]:
    """Key -> where the tensor's bytes are. Tensors alone decide it: it is known before the first write."""
    tensors = tensors_of(manifest)
    members = framed(math.prod(meta.shape) * meta.itemsize for _, meta in tensors)
    return {
        entry.key: Location(NAME, aligned_start(member), member.size)
        for entry, member in zip(tensors, members, strict=True)
    }


def object_names(manifest: Manifest) -> dict[str, int]:
    """The name of each object's shard -> its chunk. BackendError for names that mean two things."""
    names: dict[str, int] = {}
    for row, number in enumerate(manifest.chunks.tensor.tolist()):
        key, meta = manifest.tensors[number]
        if meta.is_object:
            offset = manifest.chunks.boxes.row(row, len(meta.shape)).offset
            name = unique_key(key, offset, meta.shape)
            if names.setdefault(name, row) != row:
                raise BackendError(
                    f"two objects would both be named {name!r} in a torch file"
                )
    if any(entry.key == STATE for entry in tensors_of(manifest)):
        raise BackendError(
            f"{STATE!r} is where a torch file keeps objects: rename the tensor"
        )
    return names


def write_archive(
    root: Storage, manifest: Manifest, checksums: Mapping[int, int]
) -> None:
    """Write everything but the payloads, whose places ``manifest`` has.

    ``checksums``: chunk -> its CRC-32. Raises BackendError where the payloads do not follow one
    another, as where a tensor was not written.
    """
    chunks = manifest.chunks
    order = np.argsort(chunks.start)
    placed = framed(chunks.length[order].tolist())
    starts = chunks.start[order].tolist()
    if wrong := [
        s
        for s, member in zip(starts, placed, strict=True)
        if s != aligned_start(member)
    ]:
        raise BackendError(
            f"{root.location}/{NAME}: a payload is missing before byte {wrong[0]}; "
            "convert again, or report this"
        )
    payloads = {}
    for row, member in zip(order.tolist(), placed, strict=True):
        payloads[row] = replace(member, crc=checksums[row])
    last = end(placed[-1]) if placed else 0
    tail, table = bytearray(), list(payloads.values())
    pickle = _pickle(manifest, payloads)
    for name, content in (
        (b"data.pkl", pickle),
        (b"byteorder", b"little"),
        (b"version", b"3\n"),
    ):
        member = Member(name, len(content), last + len(tail), zlib.crc32(content))
        tail += header(member) + content
        table.append(member)
    begin = last + len(tail)
    tail += directory(table, begin, begin >= LIMIT or len(table) >= _MANY)
    with root.update(NAME) as updater:
        for member in payloads.values():
            updater.write_at(member.header, [memoryview(header(member, aligned=True))])
        updater.write_at(last, [memoryview(tail)])


def _pickle(manifest: Manifest, payloads: Mapping[int, Member]) -> bytes:
    """``data.pkl``. ``payloads``: chunk -> the member that holds it, in the order of the file."""
    tensors = []
    for row, member in payloads.items():
        key, meta = manifest.tensors[manifest.chunks.tensor[row]]
        if not meta.is_object:
            tensors.append(
                text(key) + tensor_opcodes(meta.dtype, meta.shape, _storage(member))
            )
    blobs = []
    for name, row in object_names(manifest).items():
        size, storage = payloads[row].size, _storage(payloads[row])
        blobs.append(text(name) + tensor_opcodes("uint8", (size,), storage))
    if blobs:
        tensors.append(text(STATE) + _dict(blobs))
    return b"\x80\x02" + _dict(tensors) + b"."


def _dict(items: Sequence[bytes]) -> bytes:
    return b"}(" + b"".join(items) + b"u"


def _storage(member: Member) -> str:
    return member.name.decode().removeprefix("data/")
