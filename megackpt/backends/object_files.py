"""Objects and the common state as additional files, for formats that hold tensors only.

====================================  ===========================================================
``common.pt``                         the blob of the common state
``<key>.objects/shard_0.1_1.2.pt``    the blob of an object's shard at (0, 1) of global shape (1, 2)
``<key>.objects/key``                 the key in UTF-8, if it is too long for the name of the folder
====================================  ===========================================================

Shards have Megatron-Core's names. Keys are percent-encoded, so that each is a name on any file
system.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import xxhash
from numpy.typing import NDArray

from megackpt.backends.base import CONFIG, Target, WrittenRow
from megackpt.errors import CorruptCheckpoint
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    COMMON,
    OBJECT,
    Location,
    TensorEntry,
    TensorMeta,
)
from megackpt.storage import Batch, Storage, digest_blocks

COMMON_FILE = "common.pt"
OBJECTS = ".objects"
"""The folder of an object's shards is the encoded key with this ending. Other names do not have
it."""

_KEY = "key"
_RESERVED = frozenset(("zarr.json", COMMON_FILE, CONFIG, "megackpt.index"))
_LONGEST = 200  # file systems take 255 bytes, and endings and temporary names need some of them
_KEPT = 150  # what remains of a longer name, for people to read
_SHORTENED = (
    "%~"  # followed by a hash; "%" is otherwise followed by two hexadecimal digits
)
_EMPTY = "%"
_KEY_BYTES = 1 << 20

# The zarr specification forbids "/", names of dots only and names that begin with "__"; tensorstore
# keeps ".__lock" for itself; characters that a file system may fold, refuse or hide are not trusted
# either.
_UNSAFE = re.compile(r"[^A-Za-z0-9_.+=,@()\[\]-]|^\.|^_(?=_)|\.(?=(?:objects|__lock)$)")
_NUMBERS = r"((?:[0-9]{1,10}(?:\.[0-9]{1,10})*)?)"
_SHARD = re.compile(f"shard_{_NUMBERS}_{_NUMBERS}")

Dims = tuple[int, ...]


@lru_cache(maxsize=1 << 16)
def encode_key(key: str) -> str:
    """The key as a unique name: percent-encoded; shortened, with a hash, if it is too long."""
    name = _UNSAFE.sub(lambda match: _escape(match.group()), key) or _EMPTY
    if name in _RESERVED:
        name = _escape(name[0]) + name[1:]
    if len(name) <= _LONGEST:
        return name
    mark = xxhash.xxh3_128(key.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{name[:_KEPT]}{_SHORTENED}{mark}"


def decode_key(name: str) -> str | None:
    """The key that ``encode_key`` encoded.

    None if the name was shortened, or is not one of its names.
    """
    if _SHORTENED in name:
        return None
    try:
        if name == _EMPTY:
            return ""
        return unquote_to_bytes(name).decode("utf-8", "surrogatepass")
    except UnicodeError:
        return None


def _escape(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))


def folder(entry: TensorEntry) -> str:
    """The name in the root of all shards of this object (or of the common state)."""
    if entry.is_common:
        return COMMON_FILE
    return encode_key(entry.key) + OBJECTS


def shard_file(entry: TensorEntry, box: Box) -> str:
    """The file of one shard of an object: its offset, then the global shape."""
    if entry.is_common:
        return COMMON_FILE
    offset, shape = (
        ".".join(map(str, numbers)) for numbers in (box.offset, entry.meta.shape)
    )
    return f"{folder(entry)}/shard_{offset}_{shape}.pt"


def parse_offset(name: str) -> tuple[Dims, Dims] | None:
    """Offset and global shape in a name as ``shard_0.1_4.2``. None for other names.

    Old releases of Megatron-Core leave out the last extent of the shape.
    """
    match = _SHARD.fullmatch(name)
    if match is None:
        return None
    offset, shape = (
        tuple(map(int, part.split("."))) if part else () for part in match.groups()
    )
    inside = all(o < s for o, s in zip(offset, shape, strict=False))
    if not inside or max((*offset, *shape), default=0) >= 1 << 31:
        return None
    return offset, shape


def parse_shard(file: str) -> tuple[Dims, Dims] | None:
    """Offset and global shape in the last part of the name of a shard file.

    None for other names.
    """
    name = file.removesuffix(".pt")
    found = parse_offset(name)
    if name == file or found is None or len(found[0]) != len(found[1]):
        return None
    return found


def write_object(
    root: Storage,
    entry: TensorEntry,
    box: Box,
    blocks: Iterator[memoryview],
    batch: Batch | None = None,
) -> WrittenRow:
    """Write the blob of one shard, durable with its batch if it has one.

    Returns its location and digests.
    """
    file = shard_file(entry, box)
    digests = []
    with (batch or root).create(file) as writer:
        for block in blocks:
            digests.append(digest_blocks(block))
            writer.write([block])
        length = writer.position
    return Location(file, 0, length), b"".join(digests)


def key_files(tensors: Iterable[TensorEntry]) -> dict[str, bytes]:
    """The files that hold the keys of objects whose folders have shortened names."""
    files: dict[str, bytes] = {}
    for entry in tensors:
        if not entry.meta.is_object or entry.is_common:
            continue
        if decode_key(encode_key(entry.key)) is None:
            key = entry.key.encode("utf-8", "surrogatepass")
            files[f"{folder(entry)}/{_KEY}"] = key
    return files


class ObjectFile(NamedTuple):
    """One shard of an object, found on disk."""

    entry: TensorEntry
    box: Box
    location: Location


def objects_in(root: Storage) -> Iterator[ObjectFile]:
    """The objects in these files.

    Raises CorruptCheckpoint for folders with other contents.
    """
    for name in root.list():
        size = root.size(name)
        if name == COMMON_FILE:
            if size is None:
                raise CorruptCheckpoint(
                    f"{root.location}/{name} is not a regular file (a link, a folder)"
                )
            yield ObjectFile(COMMON, Box((), ()), Location(name, 0, size))
        elif name.endswith(OBJECTS) and size is None:
            files = [file for file in root.list(name) if file != _KEY]
            yield from object_shards(root, name, _key_of(root, name), files)


def object_shards(
    root: Storage, folder: str, key: str | None, files: list[str]
) -> Iterator[ObjectFile]:
    """The shards of one object in these files of a folder.

    Raises CorruptCheckpoint for other files.
    """
    shards = {file: shard for file in files if (shard := parse_shard(file)) is not None}
    shapes = {shape for _, shape in shards.values()}
    if key is None or len(shapes) != 1 or len(shards) != len(files):
        raise CorruptCheckpoint(
            f"{root.location}/{folder} is not the folder of one object's shards: it holds "
            f"{files[:20]}"
        )
    entry = TensorEntry(key, TensorMeta(shapes.pop(), OBJECT))
    for name, (offset, _) in shards.items():
        file = f"{folder}/{name}"
        size = root.size(file)
        if size is None:
            raise CorruptCheckpoint(f"{root.location}/{file} is not a regular file")
        yield ObjectFile(
            entry, Box(offset, (1,) * len(offset)), Location(file, 0, size)
        )


def _key_of(root: Storage, name: str) -> str | None:
    encoded = name.removesuffix(OBJECTS)
    if _SHORTENED not in encoded or root.size(f"{name}/{_KEY}") is None:
        return decode_key(encoded)
    try:
        key = root.get(f"{name}/{_KEY}", _KEY_BYTES).decode("utf-8", "surrogatepass")
    except UnicodeError:
        return None
    if encode_key(key) == encoded:
        return key
    return None


@dataclass(frozen=True)
class ConvertedObjects(Target):
    """A Target that gets each object as ``convert(row, blob)`` returns it."""

    into: Target
    convert: Callable[[int, bytes], bytes]

    def views(
        self, targets: Sequence[int], sizes: Sequence[int]
    ) -> Sequence[memoryview | None]:
        return self.into.views(targets, sizes)

    def open(self, target: int, box: Box) -> NDArray[Any]:
        return self.into.open(target, box)

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        self.into.close(target, box, filled)

    def blob(self, target: int, data: bytes) -> None:
        self.into.blob(target, self.convert(target, data))
