"""The layout of a torch.save file that ``convert`` writes: where payloads are, and all around them.

    data/0, data/1, ...    header, payload, checksum: the manifest's tensors in order, then blobs
    data.pkl               pickle of {key: tensor}, and of STATE: {name: blob as a uint8 tensor}
    byteorder, version     as torch writes them
                           directory of all these, which makes a zip archive of the file

Payloads begin at multiples of 64. All checksums are right, because other programs check them. As
in torch's own files, the checksum of a payload comes after it, so that the file is written from
front to back.

``torch.save`` of tensors in a memory-mapped temporary file was measured instead. One GiB took 5.1 s
against 1.9 s (processor time 3.2 s against 1.2 s), twice the disk space, and a GiB of resident
pages, which ``max_memory`` does not bound. ``torch.serialization.skip_data`` leaves payloads out,
but writes 0 for their checksums.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from megackpt.backends.archives import tensor_opcodes, text
from megackpt.backends.base import Source, WrittenRow
from megackpt.backends.shared_files import byte_runs
from megackpt.backends.torch_reader import STATE
from megackpt.errors import BackendError
from megackpt.planning.manifest import (
    Location,
    Manifest,
    SavePlan,
    TensorEntry,
    unique_key,
)
from megackpt.serialization.archive import (
    Member,
    aligned_start,
    descriptor,
    directory,
    header,
)
from megackpt.storage import FileWriter, digest_blocks

NAME = "model.pt"


def payloads(sizes: Iterable[int]) -> list[Member]:
    """The members with payloads of these sizes (bytes), one after the other from byte 0."""
    found: list[Member] = []
    position = 0
    for number, size in enumerate(sizes):
        member = Member(f"data/{number}", size, position, streamed=True)
        position = aligned_start(member) + size + len(descriptor(member))
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


def check_names(manifest: Manifest) -> None:
    """Raise BackendError for names of objects that the file could not keep apart."""
    names: set[str] = set()
    for row, number in enumerate(manifest.chunks.tensor.tolist()):
        key, meta = manifest.tensors[number]
        if meta.is_object:
            offset = manifest.chunks.boxes.row(row, len(meta.shape)).offset
            name = unique_key(key, offset, meta.shape)
            if name in names:
                raise BackendError(
                    f"two objects would both be named {name!r} in a torch file"
                )
            names.add(name)
        elif key == STATE:
            raise BackendError(
                f"{STATE!r} is where a torch file keeps objects: rename the tensor"
            )


def write_archive(
    writer: FileWriter, plan: SavePlan, data: Source
) -> dict[int, WrittenRow]:
    """Write the file. A tensor whose rows do not follow one another takes its bytes of memory."""
    if plan.places is None:
        raise BackendError(
            "this format writes to known places: plan with plan_for_backend"
        )
    places = plan.places
    numbers = plan.tensor.tolist()
    offsets = plan.boxes.offset.tolist()

    def order(row: int) -> tuple[bool | int, ...]:
        place = places[numbers[row]]
        # Objects come after all tensors, because their sizes are known only when they are written.
        if place is None:
            return True, row
        return False, numbers[row], *offsets[row]

    written: dict[int, WrittenRow] = {}
    members: dict[int, Member] = {}  # by their first row
    for _, group in groupby(
        sorted(range(len(plan)), key=order), lambda row: order(row)[:2]
    ):
        rows = list(group)
        first_row = rows[0]
        place = places[numbers[first_row]]
        size = place.length if place else 0
        name = f"data/{len(members)}"
        member = Member(name, size, writer.position, streamed=True)
        writer.write([memoryview(header(member, aligned=True))])
        first = writer.position
        crc = 0
        if place and not _follow(plan, rows):
            payload = bytearray(size)
            for row in rows:
                value = memoryview(b"".join(data.blocks(row)))
                written[row] = Location(NAME, first, len(value)), digest_blocks(value)
                run, starts = _runs(plan, row)
                for start in starts:
                    payload[start : start + run] = value[:run]
                    value = value[run:]
            writer.write([memoryview(payload)])
            crc = zlib.crc32(payload)
            rows = []
        for row in rows:
            start = writer.position
            digests = []
            for block in data.blocks(row):
                digests.append(digest_blocks(block))
                crc = zlib.crc32(block, crc)
                writer.write([block])
            location = Location(NAME, start, writer.position - start)
            written[row] = location, b"".join(digests)
        size = writer.position - first
        if place and (place.start, place.length) != (first, size):
            raise BackendError(
                f"{plan.row(first_row).shard} should end {NAME} at byte "
                f"{place.start + place.length}, but other bytes came from the model"
            )
        member = members[first_row] = replace(member, size=size, crc=crc)
        writer.write([memoryview(descriptor(member))])
    table = list(members.values())
    for name, content in (
        ("data.pkl", _pickle(plan, members)),
        ("byteorder", b"little"),
        ("version", b"3\n"),
    ):
        table.append(Member(name, len(content), writer.position, zlib.crc32(content)))
        writer.write([memoryview(header(table[-1]) + content)])
    writer.write([memoryview(directory(table, writer.position))])
    return written


def _runs(plan: SavePlan, row: int) -> tuple[int, Iterator[int]]:
    item = plan.row(row)
    return byte_runs(item.shard.box, item.meta)


def _follow(plan: SavePlan, rows: Sequence[int]) -> bool:
    """Do these rows of a tensor follow one another, each as one run of bytes?"""
    end = 0
    for row in rows:
        nbytes = plan.row(row).nbytes
        run, starts = _runs(plan, row)
        if nbytes and (run, next(starts)) != (nbytes, end):
            return False
        end += nbytes
    return True


def _pickle(plan: SavePlan, members: Mapping[int, Member]) -> bytes:
    """``data.pkl``. ``members``: row of the plan to its payload, in the order of the file."""
    tensors = [b"\x80\x02}("]
    objects = [text(STATE), b"}("]
    for row, member in members.items():
        item = plan.row(row)
        key = item.shard.key
        meta = item.meta
        storage = member.name.removeprefix("data/")
        if meta.is_object:
            name = unique_key(key, item.shard.box.offset, meta.shape)
            objects += [text(name), tensor_opcodes("uint8", (member.size,), storage)]
        else:
            tensors += [text(key), tensor_opcodes(meta.dtype, meta.shape, storage)]
    if len(objects) > 2:
        tensors += [*objects, b"u"]
    return b"".join((*tensors, b"u."))
