"""The items that ``.metadata`` lists, under torch DCP's flat names. Every number is checked, no
code runs.

Objects have Megatron-Core's names: ``key/shard_0.1_4.2`` is shard (0, 1) of an object of shape (4,
2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from megackpt import limits
from megackpt.backends.object_files import Dims, parse_offset
from megackpt.backends.torch_dist.metadata_pickle import (
    Record,
    Size,
    checked_size,
    read_metadata,
)
from megackpt.errors import (
    BackendError,
    CorruptCheckpoint,
    NotACheckpoint,
    UntrustedClass,
    join_truncated,
)
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    COMMON_KEY,
    ITEMSIZE,
    OBJECT,
    TensorEntry,
    TensorMeta,
    unique_key,
)
from megackpt.storage import Storage

LISTED_COMMON = unique_key(COMMON_KEY, (0,), (1,))
"""Megatron-Core from 0.19 on keeps the common state here, as ``[dict]``, not in common.pt."""
_UNKNOWN = -1  # an extent that the name leaves out

Name = tuple[str, Dims, Dims]
_TOO_LARGE = 1 << 63


class RecordPlace(NamedTuple):
    """The bytes of a record. ``through``: descriptors of DCP's extensions that encoded them."""

    file: str
    start: int
    length: int
    through: tuple[str, ...] = ()


class ListedItem(NamedTuple):
    """One chunk of a tensor, or (box ``()``) one object."""

    name: str
    box: Box
    place: RecordPlace


class Listing:
    """The items of a Metadata record: ``tensors`` by name, and iterated, their chunks.

    The dtype of an object is OBJECT; a tensor has any name of a dtype. Chunks of a known dtype fit
    into their records, if no extension encoded them.
    """

    def __init__(self, metadata: Record) -> None:
        self.record = metadata
        described = metadata.field("state_dict_metadata")
        if type(described) is not dict:
            raise CorruptCheckpoint("it lists no items")
        self._described: dict[str, Any] = described
        self._places = _places(metadata.field("storage_data"))
        self.tensors: dict[str, TensorMeta] = {}
        for name, item in described.items():
            if type(name) is not str:
                raise CorruptCheckpoint("an item has a name that is not a string")
            if _is(item, "BytesStorageMetadata"):
                self.tensors[name] = TensorMeta((), OBJECT)
                continue
            if not _is(item, "TensorStorageMetadata"):
                raise CorruptCheckpoint(f"{name!r} is neither a tensor nor an object")
            size, properties = item.field("size"), item.field("properties")
            # The properties are a tuple in torch's pickles, a dict in foreign ones.
            dtype = None
            if _is(properties, "TensorProperties"):
                dtype = properties.field("dtype")
                if type(properties.state) is tuple and properties.state:
                    dtype = properties.state[0]
            if type(dtype) is not str or dtype == OBJECT:
                raise CorruptCheckpoint(f"{name!r} has no dtype")
            if type(size) is not Size:
                raise CorruptCheckpoint(f"{name!r} has no size")
            most = math.prod(max(n, 1) for n in size)
            if most * ITEMSIZE.get(dtype, 1) >= _TOO_LARGE:
                raise CorruptCheckpoint(f"{name!r} of shape {tuple(size)} cannot exist")
            self.tensors[name] = TensorMeta(tuple(size), dtype)

    def __iter__(self) -> Iterator[ListedItem]:
        for name, meta in self.tensors.items():
            if meta.is_object:
                yield ListedItem(name, Box((), ()), self._place_of(name, None))
            else:
                yield from self._chunks(name, meta)

    def _chunks(self, name: str, meta: TensorMeta) -> Iterator[ListedItem]:
        chunks = self._described[name].field("chunks")
        if type(chunks) is not list:
            raise CorruptCheckpoint(f"{name!r} has no chunks")
        if not chunks and 0 not in meta.shape:
            raise CorruptCheckpoint(
                f"it lists no chunk of {name!r}, which has the shape {meta.shape}"
            )
        whole = Box.whole(meta.shape)
        itemsize = ITEMSIZE.get(meta.dtype, 0)
        taken: set[tuple[str, int]] = set()
        boxes = dict[Box, None]()
        for chunk in chunks:
            boxes[_box(name, chunk, len(meta.shape))] = None
        for box in boxes:
            if not whole.contains(box):
                raise CorruptCheckpoint(
                    f"the chunk {box} of {name!r} is outside of its shape {meta.shape}"
                )
            place = self._place_of(name, box.offset)
            if not place.through and place.length < box.volume * itemsize:
                raise CorruptCheckpoint(
                    f"{place.length} bytes cannot hold {name!r} {box} of {meta.dtype}"
                )
            if (place.file, place.start) in taken:
                raise CorruptCheckpoint(
                    f"two chunks of {name!r} begin at byte {place.start} of {place.file!r:.200}"
                )
            if box.volume:
                taken.add((place.file, place.start))
            yield ListedItem(name, box, place)

    def _place_of(self, name: str, offset: tuple[int, ...] | None) -> RecordPlace:
        try:
            return self._places[name, offset]
        except KeyError:
            raise CorruptCheckpoint(
                f"it lacks the place of {name!r:.300} (at {offset})"
            ) from None


def read_listing(root: Storage, name: str) -> Listing:
    """The listing in this file. Raises NotACheckpoint, CorruptCheckpoint or UntrustedClass."""
    try:
        return Listing(read_metadata(root.get(name, limits.DCP_METADATA_BYTES)))
    except FileNotFoundError as error:
        raise NotACheckpoint(
            f"{root.location} has no {name}: it is not a complete torch_dist checkpoint "
            "(one saved with torch_metadata=False is read by its megackpt.index)"
        ) from error
    except UntrustedClass as error:
        raise UntrustedClass(f"{root.location}/{name}: {error}") from None
    except (CorruptCheckpoint, BackendError) as error:
        raise type(error)(f"{root.location}/{name}: {error}") from error


def check_files(root: Storage, items: Sequence[ListedItem]) -> None:
    """Raise CorruptCheckpoint unless all records are inside files, and files in the directory."""
    files = list(dict.fromkeys(item.place.file for item in items))
    sizes = dict(zip(files, root.sizes(files), strict=True))
    problems = []
    for file, size in sizes.items():
        if size is None:
            problems.append(
                f"the file {file!r} is missing, or is not a regular file (a link, a folder)"
            )
    for name, box, (file, start, length, _) in items:
        size = sizes[file]
        if size is not None and start + length > size:
            problems.append(
                f"{name!r} {box} should end at byte {start + length} of {file!r}, which has {size} "
                "bytes"
            )
    if problems:
        raise CorruptCheckpoint(f"{root.location}: {join_truncated(problems)}")


def parse_name(name: str) -> Name:
    """Key, offset and global shape of an object. If the last extent is left out, it is -1."""
    if name == LISTED_COMMON:
        return COMMON_KEY, (), ()
    key, slash, last = name.rpartition("/")
    found = parse_offset(last)
    if not slash or found is None or key == COMMON_KEY:
        return name, (), ()
    offset, shape = found
    if not offset or len(offset) - len(shape) not in (0, 1):
        return name, (), ()
    return key, offset, (*shape, _UNKNOWN)[: len(offset)]


def objects_named(names: Iterable[str]) -> dict[str, tuple[TensorEntry, Box]]:
    """The object of each name, and its box in it. The names determine an unknown extent."""
    parsed = {name: parse_name(name) for name in names}
    reach: dict[str, int] = {}
    for key, offset, shape in parsed.values():
        if _UNKNOWN in shape:
            reach[key] = max(reach.get(key, 0), offset[-1] + 1)
    found = {}
    for name, (key, offset, shape) in parsed.items():
        if _UNKNOWN in shape:
            shape = (*shape[:-1], reach[key])
        entry = TensorEntry(key, TensorMeta(shape, OBJECT))
        found[name] = entry, Box(offset, (1,) * len(shape))
    return found


def _places(stored: Any) -> dict[tuple[str, Any], RecordPlace]:
    """(name, offset or None) -> the place."""
    places = {}
    if type(stored) is not dict:
        raise CorruptCheckpoint("it has no table of places")
    for index, info in stored.items():
        if not _is(index, "MetadataIndex") or not _is(info, "_StorageInfo"):
            raise CorruptCheckpoint("its table of places holds something else")
        name, offset = index.field("fqn"), index.field("offset")
        if type(name) is not str or not (offset is None or type(offset) is Size):
            raise CorruptCheckpoint(
                "its table of places has an item without a name or offset"
            )
        file, start = info.field("relative_path"), info.field("offset")
        length = info.field("length")
        if type(file) is not str or type(start) is not int or type(length) is not int:
            raise CorruptCheckpoint(
                f"the place of {name!r} is not a file and two numbers"
            )
        # Also an absolute path, whose first part is empty, leads out of the checkpoint.
        if {"", ".", ".."}.intersection(file.split("/")) or "\0" in file:
            raise CorruptCheckpoint(
                f"the place of {name!r}, {file!r}, is not a file inside the checkpoint"
            )
        if min(start, length) < 0 or start + length >= _TOO_LARGE:
            raise CorruptCheckpoint(
                f"the place of {name!r} is {length} bytes from byte {start} on"
            )
        through = info.field("transform_descriptors") or []
        if type(through) is not list or not set(map(type, through)) <= {str}:
            raise CorruptCheckpoint(f"{name!r} has descriptors that are not strings")
        places[name, offset] = RecordPlace(file, start, length, tuple(through))
    return places


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, Record) and value.kind == kind


def _box(name: str, chunk: Any, ndim: int) -> Box:
    if isinstance(chunk, Record):
        offset, shape = chunk.field("offsets"), chunk.field("sizes")
        # Megatron-FSDP has plain tuples.
        if type(offset) is type(shape) is tuple:
            offset, shape = checked_size(offset), checked_size(shape)
        sizes = type(offset) is Size and type(shape) is Size
        if sizes and len(offset) == len(shape) == ndim:
            return Box(tuple(offset), tuple(shape))
    raise CorruptCheckpoint(
        f"a chunk of {name!r} is not a region of a tensor of {ndim} dimensions"
    )
