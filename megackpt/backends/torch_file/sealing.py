"""Writing one torch.save file of which the ranks have filled the payloads: where these are, and all that frames them.

    data/0, data/1, ...    header, then payload: the tensors, in the manifest's order; then the blobs of objects
    data.pkl               pickle of {key: tensor}, and of STATE: {name: blob as a uint8 tensor}
    byteorder, version     as torch writes them
                           directory of all these, which makes a zip archive of the file: so it comes last

Every payload begins at a multiple of 64. All checksums are true, for this file is one that others look at.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from megackpt.backends.archives import LIMIT, Member, aligned_start, directory, header, tensor_opcodes, text
from megackpt.errors import BackendError
from megackpt.planning.box import Int64
from megackpt.planning.manifest import Location, Manifest, TensorEntry, unique_key
from megackpt.runtime.storage import FileUpdater, Storage

NAME = "model.pt"
STATE = "megackpt.state"
"""The key under which the common state and the objects stand, beside the tensors."""

WINDOW = 8 << 20  # bytes copied at a time
_MANY = 0xFFFF  # members from which on the directory must be a wide one


def framed(sizes: Iterable[int], at: int = 0, number: int = 0) -> list[Member]:
    """The members ``data/<number>``, ... of these sizes, the first header at byte ``at``."""
    found: list[Member] = []
    for size in sizes:
        found.append(Member(b"data/%d" % (number + len(found)), size, at))
        at = end(found[-1])
    return found


def end(member: Member) -> int:
    return aligned_start(member) + member.size


def tensors_of(manifest: Manifest) -> list[TensorEntry]:
    return [entry for entry in manifest.tensors if not entry.meta.is_object]


def tensor_members(manifest: Manifest) -> list[Member]:
    """Of each tensor, in the manifest's order. They depend on nothing else, so they are known before the save."""
    return framed(math.prod(meta.shape) * meta.itemsize for _, meta in tensors_of(manifest))


def places(manifest: Manifest) -> dict[str, Location]:
    """Key -> where the tensor's bytes are."""
    found = zip(tensors_of(manifest), tensor_members(manifest), strict=True)
    return {entry.key: Location(NAME, aligned_start(member), member.size) for entry, member in found}


def object_names(manifest: Manifest) -> dict[str, int]:
    """The name of each object's shard -> its chunk. Raises BackendError for names that mean two things."""
    names: dict[str, int] = {}
    for row, number in enumerate(manifest.chunks.tensor.tolist()):
        key, meta = manifest.tensors[number]
        if meta.is_object:
            name = unique_key(key, manifest.chunks.boxes.row(row, len(meta.shape)).offset, meta.shape)
            if names.setdefault(name, row) != row:
                raise BackendError(f"two objects would both be named {name!r} in a torch file")
    if any(entry.key == STATE for entry in tensors_of(manifest)):
        raise BackendError(f"a torch file keeps objects under {STATE!r}, so no tensor can have this name")
    return names


def adopt(root: Storage, manifest: Manifest) -> tuple[Manifest, list[Member]]:
    """Copy the blobs of objects out of the ranks' own files to where they belong. Returns where everything is now.

    The members are those of the chunks, in their order.
    """
    chunks = manifest.chunks
    members = tensor_members(manifest)
    numbers = {entry.key: i for i, entry in enumerate(tensors_of(manifest))}
    held = list(object_names(manifest).values())
    sizes = chunks.length[held].tolist()
    blobs = framed(sizes, end(members[-1]) if members else 0, len(members))
    with root.update(NAME) as updater:
        for row, blob in zip(held, blobs, strict=True):
            _copy(root, manifest.chunk(row).location, updater, aligned_start(blob))
    by_row = dict(zip(held, blobs, strict=True))
    found = [
        by_row[row] if row in by_row else members[numbers[manifest.tensors[number].key]]
        for row, number in enumerate(chunks.tensor.tolist())
    ]
    begins: Int64 = np.array([aligned_start(member) for member in found], np.int64)
    moved = replace(chunks, file=np.zeros_like(chunks.file), start=begins)
    return replace(manifest, chunks=moved, files=(NAME,)), found


def _copy(root: Storage, source: Location, updater: FileUpdater, at: int) -> None:
    buffer = memoryview(bytearray(min(WINDOW, source.length)))
    with root.open(source.file) as reader:
        for done in range(0, source.length, WINDOW):
            part = buffer[: source.length - done]
            reader.read_into(source.start + done, [part])
            updater.write_at(at + done, [part])


def seal(root: Storage, manifest: Manifest, members: Sequence[Member]) -> None:
    """Write everything but the payloads. ``members`` are the chunks' own, with checksums."""
    last = max((end(member) for member in members), default=0)
    tail, table = bytearray(), sorted(members, key=lambda member: member.header)
    small = {b"data.pkl": _pickle(manifest, members), b"byteorder": b"little", b"version": b"3\n"}
    for name, content in small.items():
        member = Member(name, len(content), last + len(tail), zlib.crc32(content))
        tail += header(member) + content
        table.append(member)
    begin = last + len(tail)
    tail += directory(table, begin, begin >= LIMIT or len(table) >= _MANY)
    with root.update(NAME) as updater:
        for member in members:
            updater.write_at(member.header, [memoryview(header(member, aligned=True))])
        updater.write_at(last, [memoryview(tail)])


def _pickle(manifest: Manifest, members: Sequence[Member]) -> bytes:
    chunks = manifest.chunks
    tensors = []
    for number, member in zip(chunks.tensor.tolist(), members, strict=True):
        key, meta = manifest.tensors[number]
        if not meta.is_object:
            tensors.append(
                (member.header, text(key) + tensor_opcodes(meta.dtype, meta.shape, _storage(member)))
            )
    items = [opcodes for _, opcodes in sorted(tensors)]
    blobs = [
        text(name) + tensor_opcodes("uint8", (members[row].size,), _storage(members[row]))
        for name, row in object_names(manifest).items()
    ]
    if blobs:
        items.append(text(STATE) + _dict(blobs))
    return b"\x80\x02" + _dict(items) + b"."


def _dict(items: Sequence[bytes]) -> bytes:
    return b"}(" + b"".join(items) + b"u"


def _storage(member: Member) -> str:
    return member.name.decode().removeprefix("data/")


def with_checksums(members: Sequence[Member], checksums: Mapping[int, int]) -> list[Member]:
    return [replace(member, crc=checksums[row]) for row, member in enumerate(members)]
