"""Reads records that others wrote: finds each payload, then reads ranges as for our own.

Archives of contiguous CPU tensors, as torch.save writes them, are read by ranges. Others (other
strides, a shared or larger storage) are read as objects are, one record at a time, and no code of
theirs runs. What torch wrote before it wrote archives goes through ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from megackpt import serialization
from megackpt.backends.archives import StoredTensor, load_structure
from megackpt.backends.base import THREADS, Target
from megackpt.backends.object_files import COMMON_FILE, ConvertedObjects
from megackpt.backends.ranges import read_raw, refuse_sparse
from megackpt.backends.torch_dist.flattened import Part, Parts
from megackpt.backends.torch_dist.foreign_manifest import EDGE
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Int64
from megackpt.planning.manifest import ITEMSIZE, LoadPlan
from megackpt.serialization.archive import Archive
from megackpt.storage import FileReader, Storage, allocate

_PICKLE_LIMIT = 1 << 20


def read(root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
    """Read the regions of a plan from torch.save archives. Raises CorruptCheckpoint naming key, box and file."""
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
    """For each of these chunks of one file, the place of its raw bytes. None: they have no plain form."""
    manifest = plan.manifest
    found = []
    with root.open(manifest.files[manifest.chunks.file[chunks[0]]]) as reader:
        for number in chunks.tolist():
            chunk = manifest.chunk(number)
            dtype = manifest.tensors[manifest.chunks.tensor[number]].meta.dtype
            record = _Record(reader, chunk.location.start, chunk.location.length)
            place = record.payload(dtype, chunk.box.shape, parts[number])
            found.append((number, place))
    return found


class _Record:
    """One archive in a file. Both of its ends are in memory."""

    def __init__(self, reader: FileReader, start: int, length: int) -> None:
        self._reader = reader
        self._start = start
        self._length = length
        if length <= 2 * EDGE:
            self._head = self._tail = self._fetch(0, length)
        else:
            self._head = self._fetch(0, EDGE)
            self._tail = self._fetch(length - EDGE, EDGE)

    def payload(
        self, dtype: str, shape: tuple[int, ...], part: Part
    ) -> tuple[int, int] | None:
        """Start in the file and length of the C-order bytes of a region of this shape."""
        try:
            archive = Archive(self._read, self._length)
            found = _describe(archive.content("data.pkl", _PICKLE_LIMIT))
            name = f"data/{found.storage}"
            start, size = archive.start(name), archive.members[name].size
            little_endian = archive.little_endian
        except CorruptCheckpoint:
            return None  # torch itself has the last word
        itemsize = ITEMSIZE[dtype]
        fits = found.dtype == dtype and part.may_be_in(found.shape, shape)
        if not little_endian or not fits or size < part.held * itemsize:
            return None
        return self._start + start + part.before * itemsize, part.volume * itemsize

    def _read(self, start: int, length: int) -> bytes:
        if start + length <= len(self._head):
            return self._head[start : start + length]
        tail = self._length - len(self._tail)
        if start >= tail and start + length <= self._length:
            return self._tail[start - tail : start - tail + length]
        return self._fetch(start, length)

    def _fetch(self, start: int, length: int) -> bytes:
        data = bytearray(length)
        self._reader.read_into(self._start + start, [memoryview(data)])
        return bytes(data)


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
    """Read regions of records that only torch can read, one record after the other."""
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
        refuse_sparse(reader, chunk.location.start, chunk.location.length, name)
        data = allocate(chunk.location.length, name)
        reader.read_into(chunk.location.start, [memoryview(data)])
    value: Any
    if data.startswith(b"PK"):
        value = serialization.load(bytes(data), where=name)
    else:
        # What torch wrote before it wrote archives.
        try:
            value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise CorruptCheckpoint(
                f"{name}: torch cannot read the record: {error}"
            ) from error
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
