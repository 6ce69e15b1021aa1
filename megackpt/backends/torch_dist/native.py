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
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from megackpt import objects
from megackpt.backends.base import Target
from megackpt.backends.ranges import read_raw
from megackpt.backends.torch_dist.records import strides
from megackpt.errors import CorruptCheckpoint
from megackpt.objects import archive
from megackpt.objects.machine import Machine, Rule, pairs
from megackpt.planning.box import Int64
from megackpt.planning.manifest import ITEMSIZE, LoadPlan
from megackpt.runtime.storage import FileReader, Storage, allocate

THREADS = 2
EDGE = 2048
"""Bytes read at either end of a record: enough for the directory, and for what stands before the payload."""


class _Described(NamedTuple):
    """What a record's pickle says: a tensor in a storage of its own."""

    dtype: str
    storage: str
    held: int  # elements of the storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read(root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
    """Fetch the plan's regions out of torch.save archives. Raises CorruptCheckpoint naming key, box and file."""
    chunks = plan.manifest.chunks
    is_object = np.array([entry.meta.is_object for entry in plan.manifest.tensors], np.bool_)
    needed = np.unique(plan.chunk).astype(np.int64)
    needed = needed[~is_object[chunks.tensor[needed]]]
    start = chunks.start.copy()
    length = chunks.length.copy()
    plain = np.ones(len(chunks), np.bool_)
    with ThreadPoolExecutor(THREADS, "megackpt-heads") as pool:
        jobs = [pool.submit(_payloads, root, plan, rows) for rows in _by_file(plan, needed)]
    for job in jobs:
        for chunk, place in job.result():
            plain[chunk] = place is not None
            if place is not None:
                start[chunk], length[chunk] = place
    located = replace(plan.manifest, chunks=replace(chunks, start=start, length=length), encoding="raw")
    read_raw(root, replace(plan, manifest=located).take(plain[plan.chunk]), into, verify)
    _read_odd(root, plan.take(~plain[plan.chunk]), into)


def _by_file(plan: LoadPlan, chunks: Int64) -> Iterator[Int64]:
    file = plan.manifest.chunks.file[chunks]
    for number in np.unique(file):
        yield chunks[file == number]


def _payloads(root: Storage, plan: LoadPlan, chunks: Int64) -> list[tuple[int, tuple[int, int] | None]]:
    """For each of these chunks of one file the place of its raw bytes, or None where they are in no plain form."""
    found = []
    with root.open(plan.manifest.files[plan.manifest.chunks.file[chunks[0]]]) as reader:
        for number in chunks.tolist():
            chunk = plan.manifest.chunk(number, np.zeros(number + 2, np.int64))
            meta = plan.manifest.tensors[plan.manifest.chunks.tensor[number]].meta
            record = _Record(reader, chunk.location.start, chunk.location.length)
            found.append((number, record.payload(meta.dtype, chunk.box.shape)))
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
            self._head, self._tail = self._fetch(0, EDGE), self._fetch(length - EDGE, EDGE)

    def payload(self, dtype: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Start in the file and length of the C-order bytes of a tensor of this dtype and shape."""
        try:
            members = archive.members(self._read, self._length)
            described = _describe(self._content(members["data.pkl"]))
            order = members.get("byteorder")
            data = members[f"data/{described.storage}"]
            if order is not None and self._content(order) != b"little":
                return None
        except (CorruptCheckpoint, KeyError):
            return None  # torch itself has the last word on what this is
        expected = _Described(dtype, described.storage, described.held, 0, shape, strides(shape))
        size = int(np.prod(shape, dtype=np.int64)) * ITEMSIZE[dtype]
        if not _alike(described, expected) or data.size < size:
            return None
        return self._start + data.start(self._read), size

    def _content(self, member: archive.Member) -> bytes:
        return self._read(member.start(self._read), member.size)

    def _read(self, start: int, length: int) -> bytes:
        if start + length <= len(self._head):
            return self._head[start : start + length]
        tail = self._length - len(self._tail)
        if start >= tail and start + length <= self._length:
            return self._tail[start - tail : start - tail + length]
        return self._fetch(start, length)

    def _fetch(self, start: int, length: int) -> bytes:
        if start < 0 or length < 0 or start + length > self._length:
            raise CorruptCheckpoint("a torch archive refers to bytes beyond its end")
        data = bytearray(length)
        self._reader.read_into(self._start + start, [memoryview(data)])
        return bytes(data)


def _alike(found: _Described, expected: _Described) -> bool:
    """The same elements in the same order: strides count only along axes that have more than one element."""
    if found[:1] + found[3:5] != expected[:1] + expected[3:5]:
        return False
    axes = zip(expected.shape, found.strides, expected.strides, strict=True)
    return all(extent < 2 or a == b for extent, a, b in axes)


@lru_cache(maxsize=4096)
def _describe(pickle: bytes) -> _Described:
    """What ``data.pkl`` says. Raises CorruptCheckpoint where it is anything but a plain tensor."""
    value = Machine(pickle, _find, tuple).load()
    if not isinstance(value, _Described):
        raise CorruptCheckpoint("a record holds no plain tensor")
    return value


_TYPED = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip


def _find(module: str, name: str) -> Rule:
    if module == "torch" and name.removesuffix("Storage") in _TYPED:
        return Rule(_TYPED[name.removesuffix("Storage")])
    if module == "torch.storage" and name == "UntypedStorage":
        return Rule("")
    if module == "torch" and name in ITEMSIZE:
        return Rule(name)
    if (module, name) == ("collections", "OrderedDict"):
        return Rule(dict, partial(pairs, dict))
    if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        return Rule(_rebuilt, _rebuilt)
    raise CorruptCheckpoint(f"a record names {module}.{name}")


def _rebuilt(storage: Any, offset: int, shape: Any, stride: Any, *rest: Any) -> _Described:
    _, dtype, name, _, count = storage
    if not dtype:
        dtype = rest[2]
    elif len(rest) > 2:
        raise CorruptCheckpoint("a tensor with more to it than its elements")
    if type(dtype) is not str or type(name) is not str:
        raise CorruptCheckpoint("a record's tensor is of no known dtype")
    return _Described(dtype, name, count, offset, tuple(shape), tuple(stride))


def _read_odd(root: Storage, plan: LoadPlan, into: Target) -> None:
    """Regions of records that only torch can read, one record after the other."""
    order = np.argsort(plan.chunk, kind="stable")
    number, tensor = -1, torch.empty(0)
    for item in plan.take(order).rows():
        current = int(plan.chunk[order[0]])
        order = order[1:]
        if current != number:
            number, tensor = current, _loaded(root, plan, current)
        region = tensor[item.box.relative_to(item.chunk.box).slices()].contiguous()
        place = into.open(item.target, item.box)
        octets = region.reshape(-1).view(torch.uint8).numpy()
        place[...] = octets.view(place.dtype).reshape(place.shape)
        into.close(item.target, item.box, place)


def _legacy(data: bytearray, name: str) -> Any:
    """What torch wrote before it wrote archives."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CorruptCheckpoint(f"{name}: torch cannot read the record: {error}") from error


def _loaded(root: Storage, plan: LoadPlan, number: int) -> torch.Tensor:
    chunk = plan.manifest.chunk(number, np.zeros(number + 2, np.int64))
    entry = plan.manifest.tensors[plan.manifest.chunks.tensor[number]]
    name = f"{root.location}: {entry.key!r} {chunk.box} in {chunk.location.file}"
    data = allocate(chunk.location.length, name)
    with root.open(chunk.location.file) as reader:
        reader.read_into(chunk.location.start, [memoryview(data)])
    value = objects.load(bytes(data), where=name) if data.startswith(b"PK") else _legacy(data, name)
    expected = torch.Size(chunk.box.shape), getattr(torch, entry.meta.dtype)
    if not isinstance(value, torch.Tensor):
        raise CorruptCheckpoint(f"{name}: the record holds a {type(value).__name__}, not {expected}")
    found = value.shape, value.dtype
    if found != expected or value.layout != torch.strided or value.device.type != "cpu":
        raise CorruptCheckpoint(
            f"{name}: the record holds {found} ({value.layout}, {value.device}), not {expected}"
        )
    return value.detach().resolve_conj().resolve_neg()
