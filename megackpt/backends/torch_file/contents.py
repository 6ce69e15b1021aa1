"""What a torch.save file holds, ours or anybody's: the tensors of a nested state by joined names, and the rest.

``{"model": {"weight": t}, "steps": [t, t], "epoch": 3}`` holds the tensors ``model.weight``, ``steps.0`` and
``steps.1``, and the common state ``{"epoch": 3}``. Only the pickle and the directory are read for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from megackpt import serialization, tree
from megackpt.backends.archives import Described, Refused, described
from megackpt.backends.base import Target
from megackpt.backends.torch_file.members import STATE
from megackpt.errors import BackendError, CorruptCheckpoint, UntrustedClass
from megackpt.planning.manifest import ITEMSIZE, Location, ReadItem
from megackpt.serialization.archive import Archive
from megackpt.storage import FileReader, Storage, allocate, read_dense

LARGEST = 1 << 30
"""Bytes of data.pkl: some millions of tensors."""

_LEGACY = bytes.fromhex(
    "80028a0a6cfc9c46f9206aa85019"
)  # torch's number in front of what was no archive yet
_MEMBERS = (
    "data.pkl",
    "data/",
)  # how the first one's name begins, in files of torch's and in ours
_DEEPEST = 500  # levels: what megackpt.serialization, too, takes for the deepest that can be right
_ALONE = "tensor"  # the name of one that is saved alone
_GONE: Any = object()


class Held(NamedTuple):
    """What one file holds. ``places``: for each tensor its bytes; None where they lie otherwise than in C order."""

    tensors: dict[str, Described]
    places: dict[str, Location | None]
    objects: dict[str, Location]  # the blobs of ours, by the names of shards
    rest: bool  # is there anything else?
    pickle: int  # where data.pkl begins


def looks_right(reader: FileReader) -> bool:
    """Could this be a torch.save file, by its first bytes? One of the old kind, too, is: to be refused later."""
    start = bytearray(min(256, reader.size))
    reader.read_into(0, [memoryview(start)])
    if start.startswith(_LEGACY):
        return True
    name = start[30 : 30 + int.from_bytes(start[26:28], "little")].decode(
        "utf-8", "replace"
    )
    return start.startswith(b"PK\3\4") and name.partition("/")[2].startswith(_MEMBERS)


class _File(Archive):
    """One file, open: its members, none of which lies in another."""

    def __init__(self, reader: FileReader) -> None:
        def fetch(start: int, length: int) -> bytes:
            return bytes(read_dense(reader, start, length, "a part of it"))

        if fetch(0, min(len(_LEGACY), reader.size)) == _LEGACY:
            raise BackendError(
                "it is of the kind that torch wrote before version 1.6: load it with torch.load(..., "
                "weights_only=True), and save that with torch.save"
            )
        super().__init__(fetch, reader.size)
        if "constants.pkl" in self.members or "data.pkl" not in self.members:
            raise BackendError(
                "it is an archive, but no torch.save wrote it (TorchScript files hold programs)"
            )
        if not self.little_endian:
            raise BackendError(
                "it was written on a big-endian machine: load it there with torch, and save it anew"
            )

    def starts(self) -> dict[str, int]:
        """Where each member's bytes begin. Members that overlap are refused."""
        begins = {name: self.start(name) for name in self.members}
        position = 0
        for name, member in sorted(
            self.members.items(), key=lambda item: item[1].header
        ):
            if member.header < position:
                raise CorruptCheckpoint(
                    f"the member {name!r} of the archive overlaps with another"
                )
            position = begins[name] + member.size
        if position > self.size:
            raise CorruptCheckpoint("a member of the archive reaches beyond its end")
        return begins


@dataclass
class _Walk:
    """One walk through a state: tensors are taken out of it."""

    limit: int  # nodes, and letters of names: what is shared again and again comes to an end
    tensors: dict[str, Described] = field(default_factory=dict)
    paths: dict[str, tree.Path] = field(default_factory=dict)

    def rest(self, value: Any, path: tree.Path = ()) -> Any:
        """What remains of a value without its tensors; _GONE if nothing does."""
        self.limit -= 1
        if self.limit < 0 or len(path) > _DEEPEST:
            raise CorruptCheckpoint(
                "its state holds itself, or the same parts again and again"
            )
        if isinstance(value, Described | Refused):
            self._take(path, value)
            return _GONE
        if not isinstance(value, dict | list | tuple):
            return value
        kept, changed = {}, False
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            below = self.rest(part, (*path, key))
            changed = changed or below is not part
            if below is not _GONE:
                kept[key] = below
        # A list that has lost some is a dict of the others, by their places.
        return (kept or _GONE) if changed else value

    def _take(self, path: tree.Path, value: Described | Refused) -> None:
        if not all(isinstance(key, str | int) for key in path):
            raise BackendError(
                f"a tensor stands at {tree.show(path)[:1000]}, which cannot be a name"
            )
        name = ".".join(map(str, path)) if path else _ALONE
        self.limit -= len(name)
        if isinstance(value, Refused):
            raise BackendError(
                f"{name!r} is no plain tensor ({value.kind}): make it a dense one, and save it anew"
            )
        if name in self.paths:
            both = f"{tree.show(self.paths[name])} and {tree.show(path)}"
            raise BackendError(
                f"two tensors would be named {name!r}: those at {both}. Rename one, and save it anew"
            )
        self.paths[name], self.tensors[name] = path, value


class _State(NamedTuple):
    tensors: dict[str, Described]
    blobs: dict[str, Described]
    rest: Any


@lru_cache(maxsize=2)
def _state(pickle: bytes, stand_ins: bool) -> _State:
    value = described(pickle, stand_ins=stand_ins)
    if isinstance(value, serialization.StandIn):
        raise BackendError(
            f"it holds an object of {value.qualified_name}, whose code does not run here: save its state_dict()"
        )
    blobs: dict[str, Described] = {}
    if isinstance(value, dict) and _are_blobs(value.get(STATE)):
        blobs = value[STATE]
        value = {key: part for key, part in value.items() if key != STATE}
    walk = _Walk(64 * len(pickle) + (1 << 16))
    rest = walk.rest(value)
    if rest is _GONE or (not rest and isinstance(rest, dict)):
        rest = {}
    elif not isinstance(rest, dict):
        rest = dict(enumerate(rest)) if isinstance(rest, list | tuple) else {"": rest}
    return _State(walk.tensors, blobs, rest)


def _are_blobs(value: Any) -> bool:
    return isinstance(value, dict) and all(
        type(name) is str
        and isinstance(part, Described)
        and part.dtype == "uint8"
        and len(part.shape) == 1
        and part.is_plain
        for name, part in value.items()
    )


def held_in(root: Storage, name: str) -> Held:
    """What a file says that it holds. Raises BackendError for what is of no kind that can be read."""
    try:
        with root.open(name) as reader:
            file = _File(reader)
            starts = file.starts()
            state = _state(file.content("data.pkl", LARGEST), True)
            places = {
                key: _place(name, file, starts, found)
                for key, found in state.tensors.items()
            }
            blobs = {
                key: _place(name, file, starts, found)
                for key, found in state.blobs.items()
            }
    except (CorruptCheckpoint, BackendError) as error:
        raise type(error)(f"{root.location}/{name}: {error}") from error
    return Held(
        state.tensors,
        places,
        {key: place for key, place in blobs.items() if place is not None},
        bool(state.rest),
        starts["data.pkl"],
    )


def _place(
    name: str, file: _File, starts: dict[str, int], found: Described
) -> Location | None:
    storage = f"data/{found.storage.name}"
    if (
        storage not in file.members
        or file.members[storage].size != found.storage.nbytes
    ):
        held = file.members[storage].size if storage in file.members else "none"
        raise CorruptCheckpoint(
            f"{storage} should have {found.storage.nbytes} bytes, and has {held}"
        )
    if not found.is_plain:
        return None
    size = math.prod(found.shape) * ITEMSIZE[found.dtype]
    return Location(
        name,
        starts[storage] + (found.offset * ITEMSIZE[found.dtype] if size else 0),
        size,
    )


def common_blob(root: Storage, name: str) -> bytes:
    """All that a file holds beside tensors, as the blob of a common state. Raises UntrustedClass naming a class."""
    try:
        with root.open(name) as reader:
            return serialization.dump(
                dict(_state(_File(reader).content("data.pkl", LARGEST), False).rest)
            )
    except UntrustedClass as error:
        told = str(error).partition("\n")[0]
        raise UntrustedClass(
            f"{root.location}/{name}: {told}\n  hint: the tensors alone can be read all the same "
            "(load_plain_tensors). If you trust the file's author, call torch.serialization.add_safe_globals with "
            "the class before loading"
        ) from None
    except (CorruptCheckpoint, BackendError) as error:
        raise type(error)(f"{root.location}/{name}: {error}") from error


def read_view(root: Storage, item: ReadItem, into: Target) -> None:
    """A region of a tensor that does not lie in C order: the bytes that it reaches over, then torch's own view."""
    import torch  # here, so that whoever only recognises files goes without

    name, where = (
        item.chunk.location.file,
        f"{root.location}: {item.entry.key!r} in {item.chunk.location.file}",
    )
    with root.open(name) as reader:
        file = _File(reader)
        found = _state(file.content("data.pkl", LARGEST), True).tensors[item.entry.key]
        steps = zip(item.box.offset, found.strides, strict=True)
        region = found._replace(
            offset=found.offset + sum(o * s for o, s in steps), shape=item.box.shape
        )
        itemsize = ITEMSIZE[found.dtype]
        data = allocate(region.reach * itemsize, where)
        begin = file.start(f"data/{found.storage.name}") + region.offset * itemsize
        reader.read_into(begin, [memoryview(data)])
    flat = torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, found.dtype))
    values = flat.as_strided(region.shape, region.strides)
    values = values.conj() if "conj" in found.lazily else values
    values = values.neg() if "neg" in found.lazily else values
    values = values.resolve_conj().resolve_neg()
    values = values.clone(
        memory_format=torch.contiguous_format
    )  # contiguous() keeps odd strides of single elements
    octets = values.reshape(-1).view(torch.uint8).numpy()
    place = into.open(item.target, item.box)
    place[...] = octets.view(place.dtype).reshape(np.shape(place))
    into.close(item.target, item.box, place)
