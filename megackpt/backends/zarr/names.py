"""What things are called on disk: keys as folder names, cells as chunk files, objects as shard files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

import xxhash

from megackpt.planning.box import Box
from megackpt.planning.manifest import TensorEntry

ARRAY = "zarr.json"
COMMON = "common.pt"
METADATA = "metadata.json"
OBJECTS = ".objects"
"""The folder of an object's shards: the encoded key with this at its end, as no array's name has."""

_RESERVED = frozenset((ARRAY, COMMON, METADATA, "megackpt.index"))
_LONGEST = 200  # file systems take 255 bytes, of which endings and temporary names need some
_KEPT = 150  # what remains of a longer name, for people to read
_SHORTENED = "%~"  # followed by a hash; "%" is otherwise followed by two hexadecimal digits
_EMPTY = "%"

# The zarr specification forbids "/", names of dots only and names that begin with "__"; tensorstore keeps
# ".__lock" for itself; characters that a file system may fold, refuse or hide are not trusted either.
_UNSAFE = re.compile(r"[^A-Za-z0-9_.+=,@()\[\]-]|^\.|^_(?=_)|\.(?=(?:objects|__lock)$)")
_SHARD = re.compile(r"shard_([0-9.]*)_([0-9.]*)\.pt")


def encode_key(key: str) -> str:
    """The folder of a tensor: percent-encoded, no two alike; shortened with a hash where it is too long."""
    name = _UNSAFE.sub(lambda match: _escape(match.group()), key) or _EMPTY
    if name in _RESERVED:
        name = _escape(name[0]) + name[1:]
    if len(name) <= _LONGEST:
        return name
    mark = xxhash.xxh3_128(key.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{name[:_KEPT]}{_SHORTENED}{mark}"


def decode_key(name: str) -> str | None:
    """The key that ``encode_key`` made a name of; None where the name was shortened."""
    if _SHORTENED in name:
        return None
    if name == _EMPTY:
        return ""
    return unquote_to_bytes(name).decode("utf-8", "surrogatepass")


def _escape(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))


def folder(entry: TensorEntry) -> str:
    """The name in the root under which everything of this entry is kept."""
    if entry.is_common:
        return COMMON
    name = encode_key(entry.key)
    return name + OBJECTS if entry.meta.is_object else name


def cell_file(name: str, index: Sequence[int]) -> str:
    """The file of one cell of an array: zarr's default chunk keys with "/" between the numbers."""
    return "/".join([name, "c", *map(str, index)])


def shard_file(entry: TensorEntry, box: Box) -> str:
    """The file of one shard of an object, in Megatron-Core's manner: its offset, then the global shape."""
    if entry.is_common:
        return COMMON
    offset, shape = (".".join(map(str, numbers)) for numbers in (box.offset, entry.meta.shape))
    return f"{folder(entry)}/shard_{offset}_{shape}.pt"


def parse_shard(file: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offset and global shape told by the last part of a shard file's name; None if it is no such name."""
    match = _SHARD.fullmatch(file)
    if match is None:
        return None
    try:
        offset, shape = (tuple(map(int, part.split("."))) if part else () for part in match.groups())
    except ValueError:
        return None
    if len(offset) != len(shape) or not all(o < s < 1 << 31 for o, s in zip(offset, shape, strict=True)):
        return None
    return offset, shape
