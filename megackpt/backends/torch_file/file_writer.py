"""The layout of a torch.save file that ``convert`` writes: where payloads are, and all around them.

    data/0, data/1, ...    header, then payload: the tensors in the manifest's order, then the blobs
    data.pkl               pickle of {key: tensor}, and of STATE: {name: blob as a uint8 tensor}
    byteorder, version     as torch writes them
                           directory of all these, which makes a zip archive of the file

Payloads begin at multiples of 64. All checksums are right, because other programs check them.

``torch.save`` of tensors in a memory-mapped temporary file was measured instead. One GiB took 5.1 s
against 1.9 s (processor time 3.2 s against 1.2 s), twice the disk space, and a GiB of resident
pages, which ``max_memory`` does not bound. ``torch.serialization.skip_data`` leaves payloads out,
but writes 0 for their checksums.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from megackpt.backends.archives import tensor_opcodes, text
from megackpt.backends.torch_reader import STATE
from megackpt.errors import BackendError
from megackpt.planning.manifest import Location, Manifest, TensorEntry, unique_key
from megackpt.serialization.archive import (
    Member,
    aligned_start,
    directory,
    header,
)
from megackpt.storage import Storage

NAME = "model.pt"


def payloads(sizes: Iterable[int]) -> list[Member]:
    """The members with payloads of these sizes (bytes), one after the other from byte 0."""
    found: list[Member] = []
    position = 0
    for number, size in enumerate(sizes):
        member = Member(f"data/{number}", size, position)
        position = aligned_start(member) + size
        found.append(member)
    return found


def tensor_locations(manifest: Manifest) -> dict[str, Location]:
    """Key to the tensor's bytes. It depends on tensors alone: it is known before any write."""
    entries = list[TensorEntry]()
    sizes = list[int]()
    for entry in manifest.tensors:
        if not entry.meta.is_object:
            entries.append(entry)
            sizes.append(math.prod(entry.meta.shape) * entry.meta.itemsize)
    found = {}
    for entry, member in zip(entries, payloads(sizes), strict=True):
        found[entry.key] = Location(NAME, aligned_start(member), member.size)
    return found


def object_names(manifest: Manifest) -> dict[str, int]:
    """The name of each object's shard to its chunk. Raises BackendError for names used twice."""
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
        elif key == STATE:
            raise BackendError(
                f"{STATE!r} is where a torch file keeps objects: rename the tensor"
            )
    return names


def write_archive(
    root: Storage, manifest: Manifest, checksums: Mapping[int, int]
) -> None:
    """Write all but the payloads, which ``manifest`` locates.

    ``checksums``: chunk to its CRC-32. Raises BackendError for a gap between payloads, as where
    a tensor was not written.
    """
    chunks = manifest.chunks
    order = np.argsort(chunks.start)
    members: dict[int, Member] = {}  # by chunk, in the order of the file
    end = 0
    for row, member in zip(
        order.tolist(), payloads(chunks.length[order].tolist()), strict=True
    ):
        if chunks.start[row] != aligned_start(member):
            raise BackendError(
                f"{root.location}/{NAME}: a payload is missing before byte {chunks.start[row]}; "
                "convert again, or report this"
            )
        members[row] = replace(member, crc=checksums[row])
        end = aligned_start(member) + member.size
    tail = b""
    table = list(members.values())
    for name, content in (
        ("data.pkl", _pickle(manifest, members)),
        ("byteorder", b"little"),
        ("version", b"3\n"),
    ):
        table.append(Member(name, len(content), end + len(tail), zlib.crc32(content)))
        tail += header(table[-1]) + content
    begin = end + len(tail)
    tail += directory(table, begin)
    with root.update(NAME) as updater:
        for member in members.values():
            updater.write_at(member.header, [memoryview(header(member, aligned=True))])
        updater.write_at(end, [memoryview(tail)])


def _pickle(manifest: Manifest, members: Mapping[int, Member]) -> bytes:
    """``data.pkl``. ``members``: chunk to its payload, in the order of the file."""
    parts = [b"\x80\x02}("]
    storages = {}
    for row, member in members.items():
        key, meta = manifest.tensors[manifest.chunks.tensor[row]]
        storage = storages[row] = member.name.removeprefix("data/")
        if not meta.is_object:
            parts += [text(key), tensor_opcodes(meta.dtype, meta.shape, storage)]
    names = object_names(manifest)
    if names:
        parts += [text(STATE), b"}("]
        for name, row in names.items():
            shape = (members[row].size,)
            parts += [text(name), tensor_opcodes("uint8", shape, storages[row])]
        parts.append(b"u")
    return b"".join((*parts, b"u."))
