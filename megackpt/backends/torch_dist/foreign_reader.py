"""Reading records that others wrote: where each payload is, then the same engine as for our own.

Archives as torch.save writes them for a contiguous CPU tensor are read by ranges; all others (other strides, a
shared or larger storage) as objects are, which runs nothing, one record at a time; what torch wrote before there
were archives, through ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from megackpt import serialization
from megackpt.backends.archives import StoredTensor, load_structure
from megackpt.backends.base import THREADS, Target
from megackpt.backends.object_files import ConvertedObjects
from megackpt.backends.ranges import read_raw, refuse_hollow
from megackpt.backends.torch_dist.distcp_writer import COMMON_FILE
from megackpt.backends.torch_dist.flattened import Part, Parts
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Int64
from megackpt.planning.manifest import ITEMSIZE, LoadPlan
from megackpt.serialization.archive import Archive
from megackpt.storage import FileReader, Storage, allocate

EDGE = 2048
"""Bytes read at either end of a record: enough for the directory, and for what stands before the payload."""


def read(root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
    """Fetch the plan's regions out of torch.save archives. Raises CorruptCheckpoint naming key, box and file."""
    chunks = plan.manifest.chunks
    parts = Parts(chunks)
    into = _bare_common(root, plan, into)
    is_object = np.array(
        [entry.meta.is_object for entry in plan.manifest.tensors], np.bool_
    )
    needed = np.unique(plan.chunk).astype(np.int64)
    needed = needed[~is_object[chunks.tensor[needed]]]
    start = chunks.start.copy()
    length = chunks.length.copy()
    plain = np.ones(len(chunks), np.bool_)
    with ThreadPoolExecutor(THREADS, "megackpt-heads") as pool:
        jobs = [
            pool.submit(_payloads, root, plan, parts, rows)
            for rows in _by_file(plan, needed)
        ]
    for job in jobs:
        for chunk, place in job.result():
            plain[chunk] = place is not None
            if place is not None:
                start[chunk], length[chunk] = place
    located = replace(
        plan.manifest,
        chunks=replace(chunks, start=start, length=length),
        encoding="raw",
    )
    read_raw(
        root, replace(plan, manifest=located).take(plain[plan.chunk]), into, verify
    )
    _read_odd(root, plan.take(~plain[plan.chunk]), parts, into)


def _bare_common(root: Storage, plan: LoadPlan, into: Target) -> Target:
    """The same Target, to which a common state that was stored in a list of one is handed without the list."""
    chunks, files = plan.manifest.chunks, plan.manifest.files
    common = [
        number for number, entry in enumerate(plan.manifest.tensors) if entry.is_common
    ]
    rows = np.flatnonzero(np.isin(chunks.tensor[plan.chunk], common))
    listed = {
        int(plan.target[row])
        for row in rows
        if files[chunks.file[plan.chunk[row]]] != COMMON_FILE
    }

    def bare(target: int, data: bytes) -> bytes:
        try:
            return serialization.unwrapped(data) if target in listed else data
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(
                f"{root.location}: the common state: {error}"
            ) from error

    return ConvertedObjects(into, bare) if listed else into


def _by_file(plan: LoadPlan, chunks: Int64) -> Iterator[Int64]:
    file = plan.manifest.chunks.file[chunks]
    for number in np.unique(file):
        yield chunks[file == number]


def _payloads(
    root: Storage, plan: LoadPlan, parts: Parts, chunks: Int64
) -> list[tuple[int, tuple[int, int] | None]]:
    """For each of these chunks of one file the place of its raw bytes, or None where they are in no plain form."""
    found = []
    with root.open(plan.manifest.files[plan.manifest.chunks.file[chunks[0]]]) as reader:
        for number in chunks.tolist():
            chunk = plan.manifest.chunk(number, np.zeros(number + 2, np.int64))
            meta = plan.manifest.tensors[plan.manifest.chunks.tensor[number]].meta
            record = _Record(reader, chunk.location.start, chunk.location.length)
            found.append(
                (number, record.payload(meta.dtype, chunk.box.shape, parts[number]))
            )
    return found


class _Record:
    """One archive in a file, of which both ends are at hand."""

    def __init__(self, reader: FileReader, start: int, length: int) -> None:
        self._reader = reader
        self._start = start
        self._length = length
        if length <= 2 * EDGE:
            self._head = self._tail = self._fetch(0, length)
        else:
            self._head, self._tail = (
                self._fetch(0, EDGE),
                self._fetch(length - EDGE, EDGE),
            )

    def payload(
        self, dtype: str, shape: tuple[int, ...], part: Part
    ) -> tuple[int, int] | None:
        """Start in the file and length of the C-order bytes of a region of this shape, which is a part of all."""
        try:
            held = Archive(self._read, self._length)
            found = _describe(held.content("data.pkl", 1 << 20))
            name = f"data/{found.storage}"
            start, size = held.start(name), held.members[name].size
            if not held.little_endian:
                return None
        except CorruptCheckpoint:
            return None  # torch itself has the last word on what this is
        itemsize = ITEMSIZE[dtype]
        fits = found.dtype == dtype and part.may_be_in(found.shape, shape)
        if not fits or size < part.held * itemsize:
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
    """What ``data.pkl`` says. Raises CorruptCheckpoint where it is anything but a plain tensor."""
    value = load_structure(pickle)
    if not isinstance(value, StoredTensor) or not value.is_plain:
        raise CorruptCheckpoint("a record holds no plain tensor")
    if value.view.storage_offset():
        raise CorruptCheckpoint("a record holds no plain tensor")
    return value


def _read_odd(root: Storage, plan: LoadPlan, parts: Parts, into: Target) -> None:
    """Regions of records that only torch can read, one record after the other."""
    order = np.argsort(plan.chunk, kind="stable")
    number, tensor = -1, torch.empty(0, device="cpu")
    for item in plan.take(order).rows():
        current = int(plan.chunk[order[0]])
        order = order[1:]
        if current != number:
            number, tensor = current, _loaded(root, plan, current, parts[current])
        region = tensor[item.box.relative_to(item.chunk.box).slices()]
        # contiguous() would keep odd steps of single elements.
        region = region.clone(memory_format=torch.contiguous_format)
        place = into.open(item.target, item.box)
        octets = region.reshape(-1).view(torch.uint8).numpy()
        place[...] = octets.view(place.dtype).reshape(place.shape)
        into.close(item.target, item.box, place)


def _legacy(data: bytearray, name: str) -> Any:
    """What torch wrote before it wrote archives."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CorruptCheckpoint(
            f"{name}: torch cannot read the record: {error}"
        ) from error


def _loaded(root: Storage, plan: LoadPlan, number: int, part: Part) -> torch.Tensor:
    chunk = plan.manifest.chunk(number, np.zeros(number + 2, np.int64))
    entry = plan.manifest.tensors[plan.manifest.chunks.tensor[number]]
    name = f"{root.location}: {entry.key!r} {chunk.box} in {chunk.location.file}"
    with root.open(chunk.location.file) as reader:
        refuse_hollow(reader, chunk.location.start, chunk.location.length, name)
        data = allocate(chunk.location.length, name)
        reader.read_into(chunk.location.start, [memoryview(data)])
    value = (
        serialization.load(bytes(data), where=name)
        if data.startswith(b"PK")
        else _legacy(data, name)
    )
    dtype = getattr(torch, entry.meta.dtype)
    if not isinstance(value, torch.Tensor):
        raise CorruptCheckpoint(
            f"{name}: the record holds a {type(value).__name__}, not a tensor of {dtype}"
        )
    fits = value.dtype == dtype and part.may_be_in(tuple(value.shape), chunk.box.shape)
    if not fits or value.layout != torch.strided or value.device.type != "cpu":
        raise CorruptCheckpoint(
            f"{name}: the record holds {tuple(value.shape)} of {value.dtype} ({value.layout}, {value.device}), "
            f"not {part.held} elements of {dtype}"
        )
    elements = value.detach().resolve_conj().resolve_neg().reshape(-1)
    return elements[part.before : part.before + part.volume].reshape(chunk.box.shape)
