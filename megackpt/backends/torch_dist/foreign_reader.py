"""Reads foreign records: finds each payload, then reads its ranges with the common reader.

Archives of contiguous CPU tensors, in the form of torch.save, are read by ranges. All other
archives (other strides, a shared or larger storage) are read like objects, one record at a time,
and no code in them runs.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from megackpt import serialization
from megackpt.backends.archives import StoredTensor, load_structure
from megackpt.backends.base import THREADS, Target
from megackpt.backends.object_files import COMMON_FILE, ConvertedObjects
from megackpt.backends.ranges import read_raw, read_record
from megackpt.backends.torch_dist.flattened import Part, Parts
from megackpt.backends.torch_dist.foreign_manifest import EDGE
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Int64
from megackpt.planning.manifest import ITEMSIZE, Chunk, LoadPlan
from megackpt.serialization.archive import Archive
from megackpt.storage import FileReader, Storage

_PICKLE_LIMIT = 1 << 20


def read(root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
    """Read the regions of a plan from torch.save archives.

    Raises CorruptCheckpoint naming key, box and file.
    """
    manifest, chunks = plan.manifest, plan.manifest.chunks
    parts = Parts(chunks)
    into = _without_lists(root, plan, into)
    is_object = np.array([entry.meta.is_object for entry in manifest.tensors], np.bool_)
    needed = np.unique(plan.chunk).astype(np.int64)
    needed = needed[~is_object[chunks.tensor[needed]]]
    start, length = chunks.start.copy(), chunks.length.copy()
    plain = np.ones(len(chunks), np.bool_)
    by_file = [needed[chunks.file[needed] == n] for n in np.unique(chunks.file[needed])]
    with ThreadPoolExecutor(THREADS, "megackpt-heads") as pool:
        jobs = [pool.submit(_payloads, root, plan, parts, rows) for rows in by_file]
    for job in jobs:
        for chunk, place in job.result():
            if place is None:
                plain[chunk] = False
            else:
                start[chunk], length[chunk] = place
    located = replace(chunks, start=start, length=length)
    raw = replace(plan, manifest=replace(manifest, chunks=located, encoding="raw"))
    read_raw(root, raw.take(plain[plan.chunk]), into, verify)
    _read_odd(root, plan.take(~plain[plan.chunk]), parts, into)


def _without_lists(root: Storage, plan: LoadPlan, into: Target) -> Target:
    """The target; a common state that is stored in a list of one reaches it without the list."""
    chunks, files = plan.manifest.chunks, plan.manifest.files
    listed = set()
    for row, chunk in enumerate(plan.chunk.tolist()):
        is_common = plan.manifest.tensors[chunks.tensor[chunk]].is_common
        if is_common and files[chunks.file[chunk]] != COMMON_FILE:
            listed.add(int(plan.target[row]))
    if not listed:
        return into

    def convert(target: int, data: bytes) -> bytes:
        if target not in listed:
            return data
        try:
            return serialization.unwrapped(data)
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(
                f"{root.location}: the common state: {error}"
            ) from error

    return ConvertedObjects(into, convert)


def _payloads(
    root: Storage, plan: LoadPlan, parts: Parts, chunks: Int64
) -> list[tuple[int, tuple[int, int] | None]]:
    """The place of the raw bytes of each of these chunks of one file. None: no plain form."""
    manifest = plan.manifest
    found = []
    with root.open(manifest.files[manifest.chunks.file[chunks[0]]]) as reader:
        for number in chunks.tolist():
            chunk = manifest.chunk(number)
            dtype = manifest.tensors[manifest.chunks.tensor[number]].meta.dtype
            try:
                place = _payload(reader, chunk, dtype, parts[number])
            except CorruptCheckpoint:
                place = None  # torch itself has the last word
            found.append((number, place))
    return found


def _payload(
    reader: FileReader, chunk: Chunk, dtype: str, part: Part
) -> tuple[int, int] | None:
    """Start in the file and length of the C-order bytes of a chunk, if its record has them."""
    record, length = chunk.location.start, chunk.location.length

    def read(start: int, count: int) -> bytes:
        data = bytearray(count)
        reader.read_into(record + start, [memoryview(data)])
        return bytes(data)

    ends = [(0, read(0, min(length, 2 * EDGE)))]
    if length > 2 * EDGE:
        ends = [(0, read(0, EDGE)), (length - EDGE, read(length - EDGE, EDGE))]

    def fetch(start: int, count: int) -> bytes:
        for first, data in ends:
            if first <= start and start + count <= first + len(data):
                return data[start - first : start - first + count]
        return read(start, count)

    archive = Archive(fetch, length)
    found = _describe(archive.content("data.pkl", _PICKLE_LIMIT))
    name = f"data/{found.storage}"
    start, size = archive.start(name), archive.members[name].size
    itemsize = ITEMSIZE[dtype]
    fits = found.dtype == dtype and part.may_be_in(found.shape, chunk.box.shape)
    if not archive.little_endian or not fits or size < part.held * itemsize:
        return None
    return record + start + part.before * itemsize, part.volume * itemsize


@lru_cache(maxsize=4096)
def _describe(pickle: bytes) -> StoredTensor:
    """The plain tensor that ``data.pkl`` describes. Raises CorruptCheckpoint for anything else."""
    value = load_structure(pickle)
    if not isinstance(value, StoredTensor) or not value.is_plain:
        raise CorruptCheckpoint("a record holds no plain tensor")
    if value.view.storage_offset():
        raise CorruptCheckpoint("a record holds a part of a storage")
    return value


def _read_odd(root: Storage, plan: LoadPlan, parts: Parts, into: Target) -> None:
    """Read regions of records that only torch can read, record by record."""
    order = np.argsort(plan.chunk, kind="stable")
    numbers = plan.chunk[order].tolist()
    loaded, tensor = -1, torch.empty(0, device="cpu")
    for number, item in zip(numbers, plan.take(order).rows(), strict=True):
        if number != loaded:
            loaded, tensor = number, _load_record(root, plan, number, parts[number])
        region = tensor[item.box.relative_to(item.chunk.box).slices()]
        # contiguous() would keep odd strides of single elements.
        region = region.clone(memory_format=torch.contiguous_format)
        place = into.open(item.target, item.box)
        octets = region.reshape(-1).view(torch.uint8).numpy()
        place[...] = octets.view(place.dtype).reshape(place.shape)
        into.close(item.target, item.box, place)


def _load_record(
    root: Storage, plan: LoadPlan, number: int, part: Part
) -> torch.Tensor:
    """The elements of a chunk, from its whole record."""
    chunk = plan.manifest.chunk(number)
    entry = plan.manifest.tensors[plan.manifest.chunks.tensor[number]]
    name = f"{root.location}: {entry.key!r} {chunk.box} in {chunk.location.file}"
    with root.open(chunk.location.file) as reader:
        location = chunk.location
        data = read_record(reader, location.start, location.length, name)
    value = serialization.load(bytes(data), where=name)
    dtype = getattr(torch, entry.meta.dtype)
    if not isinstance(value, torch.Tensor):
        raise CorruptCheckpoint(
            f"{name}: the record holds a {type(value).__name__}, not a tensor of {dtype}"
        )
    fits = value.dtype == dtype and part.may_be_in(tuple(value.shape), chunk.box.shape)
    if not fits or value.layout != torch.strided or value.device.type != "cpu":
        raise CorruptCheckpoint(
            f"{name}: the record holds {tuple(value.shape)} of {value.dtype} ({value.layout}, "
            f"{value.device}), not {part.held} elements of {dtype}"
        )
    elements = value.detach().resolve_conj().resolve_neg().reshape(-1)
    return elements[part.before : part.before + part.volume].reshape(chunk.box.shape)
