"""Files of torch.save for the backends that read them: tensors by joined names, and all else.

``{"model": {"weight": t}, "steps": [t, t], "epoch": 3}`` has the tensors ``model.weight``,
``steps.0`` and ``steps.1``, and the common state ``{"epoch": 3}``. A listing reads only the pickle
and the directory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from megackpt import limits, serialization, tree
from megackpt.backends import object_files, shared_files
from megackpt.backends.archives import (
    StoredTensor,
    UnsupportedTensor,
    check_archive,
    load_structure,
)
from megackpt.backends.base import Backend, Target
from megackpt.backends.ranges import read_raw
from megackpt.errors import BackendError, CorruptCheckpoint, UntrustedClass
from megackpt.planning.box import Box, Int64
from megackpt.planning.manifest import (
    COMMON,
    ITEMSIZE,
    OBJECT,
    LoadPlan,
    Location,
    Manifest,
    ReadItem,
    TensorEntry,
    TensorMeta,
)
from megackpt.serialization.archive import Archive
from megackpt.storage import FileReader, Storage, allocate, read_dense

STATE = "megackpt.state"
"""The key of the common state and the objects in a file that ``convert`` wrote."""
_LEGACY = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")
"""The first bytes of what torch wrote before it wrote archives."""
_FIRST_MEMBERS = ("data.pkl", "data/")
"""The first member's name begins so: in torch's files, and in ours."""
SINGLE = "tensor"
"""The name of a tensor that is saved alone."""
_NOTHING: Any = object()
"""Remains of a value that has tensors only."""


class Shard(NamedTuple):
    """A tensor, or a shard of an object that ``convert`` wrote.

    ``has_bytes``: its bytes are at ``place``. Otherwise a view makes them, and ``place`` only has
    their length.
    """

    entry: TensorEntry
    box: Box
    place: Location
    has_bytes: bool


class _State(NamedTuple):
    tensors: dict[str, StoredTensor]
    blobs: dict[str, StoredTensor]
    rest: dict[Any, Any]


def is_torch_file(reader: FileReader) -> bool:
    """Could this be a torch.save file, by its first bytes? True also for the old kind."""
    start = bytearray(min(256, reader.size))
    reader.read_into(0, [memoryview(start)])
    if start.startswith(_LEGACY):
        return True
    length = int.from_bytes(start[26:28], "little")
    _, _, name = start[30 : 30 + length].decode("utf-8", "replace").partition("/")
    return start.startswith(b"PK\3\4") and name.startswith(_FIRST_MEMBERS)


class _TensorWalk:
    """One walk through a state, which takes the tensors out."""

    def __init__(self, limit: int, local_parts: bool) -> None:
        self.limit = limit  # parts and letters of names: shared parts could multiply
        self.local_parts = local_parts
        self.tensors: dict[str, StoredTensor] = {}
        self.paths: dict[str, tree.Path] = {}

    def take(self, value: Any, path: tree.Path = ()) -> Any:
        """The rest of a value without its tensors; _NOTHING if it has none."""
        self.limit -= 1
        if self.limit < 0 or len(path) > limits.PICKLE_DEPTH:
            raise CorruptCheckpoint(
                "its state contains itself, or the same parts again and again"
            )
        if self.local_parts and isinstance(value, UnsupportedTensor):
            value = value.local or value
        if isinstance(value, StoredTensor | UnsupportedTensor):
            if not all(isinstance(key, str | int) for key in path):
                raise BackendError(
                    f"a tensor is at {tree.show(path)[:1000]}, which cannot be a name"
                )
            name = SINGLE
            if path:
                name = ".".join(map(str, path))
            self.limit -= len(name)
            if isinstance(value, UnsupportedTensor):
                raise BackendError(
                    f"{name!r} is not a plain tensor ({value.kind}): make it dense, and save it "
                    "again"
                )
            if name in self.paths:
                both = f"{tree.show(self.paths[name])} and {tree.show(path)}"
                raise BackendError(
                    f"two tensors would be named {name!r}: those at {both}. "
                    "Rename one, and save it again"
                )
            self.paths[name] = path
            self.tensors[name] = value
            return _NOTHING
        if isinstance(value, dict):
            parts = value
        elif isinstance(value, list | tuple):
            parts = dict(enumerate(value))
        else:
            return value
        kept = {}
        changed = False
        for key, part in parts.items():
            rest = self.take(part, (*path, key))
            changed |= rest is not part
            if rest is not _NOTHING:
                kept[key] = rest
        if not changed:
            return value
        # A list without some of its items becomes a dict of the others by index.
        return kept or _NOTHING


@lru_cache(maxsize=2)
def _parse(pickle: bytes, stand_ins: bool, local_parts: bool) -> _State:
    value = load_structure(pickle, stand_ins=stand_ins, local_parts=local_parts)
    if isinstance(value, serialization.StandIn):
        raise BackendError(
            f"it holds an object of {value.qualified_name}, whose code does not run here: "
            "save its state_dict()"
        )
    blobs: dict[str, StoredTensor] = {}
    if isinstance(value, dict) and _are_blobs(value.get(STATE)):
        value = dict(value)
        blobs = value.pop(STATE)
    walk = _TensorWalk(64 * len(pickle) + (1 << 16), local_parts)
    rest = walk.take(value)
    if rest is _NOTHING:
        rest = {}
    elif isinstance(rest, list | tuple):
        rest = dict(enumerate(rest))
    elif not isinstance(rest, dict):
        rest = {"": rest}
    return _State(walk.tensors, blobs, rest)


def _are_blobs(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    for name, part in value.items():
        if type(name) is not str or not isinstance(part, StoredTensor):
            return False
        if part.dtype != "uint8" or len(part.shape) != 1 or not part.is_plain:
            return False
    return True


@contextmanager
def _opened(
    root: Storage, name: str, local_parts: bool, stand_ins: bool = True
) -> Iterator[tuple[FileReader, Archive, _State]]:
    """A file and what its pickle describes. Errors within name the file.

    ``stand_ins``, ``local_parts``: see ``load_structure``.
    """
    try:
        with root.open(name) as reader:

            def fetch(start: int, length: int) -> bytes:
                return bytes(read_dense(reader, start, length, "a part of it"))

            if fetch(0, min(len(_LEGACY), reader.size)) == _LEGACY:
                raise BackendError(
                    "it is of the kind that torch wrote before version 1.6: load it with "
                    "torch.load(..., weights_only=True), and save that with torch.save"
                )
            archive = Archive(fetch, reader.size)
            if "constants.pkl" in archive.members or "data.pkl" not in archive.members:
                raise BackendError(
                    "it is an archive, but no torch.save wrote it (TorchScript files hold programs)"
                )
            if not archive.little_endian:
                raise BackendError(
                    "it was written on a big-endian machine: load it there with torch, and save it "
                    "again"
                )
            pickle = archive.content("data.pkl", limits.TORCH_PICKLE_BYTES)
            yield reader, archive, _parse(pickle, stand_ins, local_parts)
    except (CorruptCheckpoint, BackendError) as error:
        raise type(error)(f"{root.location}/{name}: {error}") from error


def read_contents(
    root: Storage, name: str, local_parts: bool = False
) -> tuple[list[Shard], dict[Any, Any]]:
    """The tensors and objects of a file, and all else in it.

    All else, if any, is also one shard of the common state. ``local_parts``: a DTensor counts as
    the part that the rank has. Raises BackendError for kinds that cannot be read.
    """
    found: list[Shard] = []
    with _opened(root, name, local_parts) as (_, archive, state):
        for key, stored in state.tensors.items():
            meta = TensorMeta(stored.shape, stored.dtype)
            place = _locate(name, archive, stored)
            entry = TensorEntry(key, meta)
            found.append(Shard(entry, Box.whole(meta.shape), place, stored.is_plain))
        for unique, stored in state.blobs.items():
            place = _locate(name, archive, stored)
            # The name is that of ``unique_key``.
            key, _, cell = unique.rpartition("/")
            parsed = object_files.parse_shard(f"{cell}.pt")
            if parsed is None or not parsed[1]:
                key = unique
                parsed = ((), ())
            offset, shape = parsed
            entry = TensorEntry(key, TensorMeta(shape, OBJECT))
            found.append(Shard(entry, Box(offset, (1,) * len(offset)), place, True))
        if state.rest:
            place = Location(name, archive.start("data.pkl"), 0)
            found.append(Shard(COMMON, Box((), ()), place, False))
    return found, state.rest


def _locate(file: str, archive: Archive, found: StoredTensor) -> Location:
    """The bytes of a tensor, if it is plain; else only their length counts."""
    storage = f"data/{found.storage}"
    start = archive.start(storage)
    size = archive.members[storage].size
    if size != found.nbytes or start + size > archive.size:
        raise CorruptCheckpoint(
            f"{storage} should have {found.nbytes} bytes from {start} on, and has {size} in an "
            f"archive of {archive.size}"
        )
    itemsize = ITEMSIZE[found.dtype]
    length = math.prod(found.shape) * itemsize
    # A tensor without elements may have any offset.
    offset = 0
    if length:
        offset = int(found.view.storage_offset()) * itemsize
    return Location(file, start + offset, length)


def _blob(root: Storage, item: ReadItem, local_parts: bool) -> bytes:
    """All but the tensors of a file, as the blob of a common state or of an object.

    Raises UntrustedClass naming a class.
    """
    try:
        file = item.chunk.location.file
        with _opened(root, file, local_parts, stand_ins=False) as (_, _, state):
            rest = dict(state.rest)
            if item.entry.is_common:
                return serialization.dump(rest)
            # A file of one value has it under the empty name. An object of a grid is in a list.
            value = rest.get("", rest)
            if item.entry.meta.shape:
                value = [value]
            return serialization.dump(value)
    except UntrustedClass as error:
        reason = str(error).partition("\n")[0]
        raise UntrustedClass(
            f"{reason}\n  hint: load_plain_tensors reads the tensors all "
            "the same. If you trust the file's author, call torch.serialization.add_safe_globals "
            "with the class before loading"
        ) from None


def manifest_of(
    root: Storage, shards: Sequence[Shard], backend: tuple[str, int]
) -> Manifest:
    """The manifest of these shards. Raises CorruptCheckpoint for impossible ones."""
    found = [(shard.entry, shard.box, shard.place) for shard in shards]
    manifest = shared_files.manifest_from_files(root, found, backend)
    has_bytes = [shard.has_bytes for shard in shards]
    if all(has_bytes):
        return manifest
    # A shard without bytes of its own has no length: ``decoded_bytes`` goes by that.
    length = np.where(has_bytes, manifest.chunks.length, 0)
    chunks = replace(manifest.chunks, length=length)
    return replace(manifest, chunks=chunks, encoding="native")


class TorchReader(Backend):
    """Reads manifests of ``manifest_of``."""

    local_parts: ClassVar[bool] = False
    """Whether a DTensor in a file counts as the part that a rank has."""

    def name_in_file(self, key: str) -> str:
        """The name that a tensor has in its file."""
        return key

    def decoded_bytes(self, manifest: Manifest) -> Int64:
        # A view in another order, or a common state that is not a blob yet, has no length.
        decoded = super().decoded_bytes(manifest)
        chunks = manifest.chunks
        return np.where((chunks.length > 0) | (chunks.boxes.volume == 0), 0, decoded)

    def read(self, root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
        raw = self.decoded_bytes(plan.manifest)[plan.chunk] == 0
        read_raw(root, plan.take(raw), into, verify)
        for item in plan.take(~raw).rows():
            if item.entry.meta.is_object:
                into.blob(item.target, _blob(root, item, self.local_parts))
            else:
                name = self.name_in_file(item.entry.key)
                read_view(root, item, into, name, self.local_parts)

    def verify_native(self, root: Storage, manifest: Manifest) -> list[str] | None:
        problems: list[str] = []
        complete = True
        for name in manifest.files:
            try:
                with root.open(name) as reader:
                    damage, unchecked = check_archive(reader, 0, reader.size)
            except (CorruptCheckpoint, FileNotFoundError) as error:
                problems.append(f"{root.location}/{name}: {error}")
                continue
            problems += [f"{problem}: {root.location}/{name}" for problem in damage]
            complete &= not unchecked
        if complete or problems:
            return problems
        return None


def read_view(
    root: Storage, item: ReadItem, into: Target, name: str, local_parts: bool
) -> None:
    """Read a region of a tensor that is not in C order: the bytes that it spans, then a view.

    ``name``: of the tensor in the file.
    """
    import torch  # here, because recognising a file needs none

    file = item.chunk.location.file
    with _opened(root, file, local_parts) as (reader, archive, state):
        found = state.tensors[name]
        region = found.view[item.box.relative_to(item.chunk.box).slices()]
        span = 0
        if region.numel():
            steps = zip(region.shape, region.stride(), strict=True)
            span = 1 + sum((extent - 1) * stride for extent, stride in steps)
        itemsize = region.dtype.itemsize
        data = allocate(span * itemsize, repr(item.entry.key))
        begin = archive.start(f"data/{found.storage}")
        begin += int(region.storage_offset()) * itemsize
        reader.read_into(begin, [memoryview(data)])
    flat = torch.frombuffer(data, dtype=torch.uint8).view(region.dtype)
    values = flat.as_strided(region.shape, region.stride())
    if region.is_conj():
        values = values.conj_physical()
    if region.is_neg():
        values = values.neg()
    # clone, because contiguous() keeps odd strides of single elements.
    values = values.clone(memory_format=torch.contiguous_format)
    octets = values.reshape(-1).view(torch.uint8).numpy()
    target = into.open(item.target, item.box)
    target[...] = octets.view(target.dtype).reshape(np.shape(target))
    into.close(item.target, item.box, target)
