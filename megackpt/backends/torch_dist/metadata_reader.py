"""What ``.metadata`` lists, as it stands there under torch DCP's flat names: every number checked, nothing run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megackpt import limits
from megackpt.backends.torch_dist.metadata_pickle import Record, Size, read_metadata
from megackpt.errors import (
    BackendError,
    CorruptCheckpoint,
    NotACheckpoint,
    UntrustedClass,
    join_truncated,
)
from megackpt.planning.box import Box
from megackpt.planning.manifest import ITEMSIZE, OBJECT, TensorMeta
from megackpt.storage import Storage


class Location(NamedTuple):
    """A record. ``through``: extensions of DCP's (their descriptors) that its bytes have gone through."""

    file: str
    start: int
    length: int
    through: tuple[str, ...] = ()


class Listed(NamedTuple):
    """One chunk of a tensor, or (box ``()``) one object."""

    name: str
    box: Box
    place: Location


class Listing:
    """The items that a Metadata record lists: ``tensors`` (OBJECT: an object), and iterated, their chunks.

    A dtype is any name; the chunks of one that we know, if they went through no extension, fit into their records.
    """

    def __init__(self, metadata: Record) -> None:
        self.record = metadata
        described = metadata.field("state_dict_metadata")
        if type(described) is not dict:
            raise CorruptCheckpoint("it lists no items")
        if not all(type(name) is str for name in described):
            raise CorruptCheckpoint("an item has a name that is no string")
        self._described: dict[str, Any] = described
        self._places = dict(_places(metadata.field("storage_data")))
        self.tensors = {name: _meta(name, item) for name, item in described.items()}

    def __iter__(self) -> Iterator[Listed]:
        for name, meta in self.tensors.items():
            if meta.is_object:
                yield Listed(name, Box((), ()), self._found(name, None))
            else:
                yield from self._chunks(
                    name, meta, self._described[name].field("chunks")
                )

    def _chunks(self, name: str, meta: TensorMeta, chunks: Any) -> Iterator[Listed]:
        if type(chunks) is not list:
            raise CorruptCheckpoint(f"{name!r} has no chunks")
        if not chunks and 0 not in meta.shape:
            raise CorruptCheckpoint(
                f"it lists no chunk of {name!r}, which has the shape {meta.shape}"
            )
        whole = Box.whole(meta.shape)
        taken: set[tuple[str, int]] = set()
        for box in dict.fromkeys(
            _box(name, chunk, len(meta.shape)) for chunk in chunks
        ):
            if not whole.contains(box):
                raise CorruptCheckpoint(
                    f"the chunk {box} of {name!r} lies outside of its shape {meta.shape}"
                )
            place = self._found(name, box.offset)
            if not place.through and place.length < box.volume * ITEMSIZE.get(
                meta.dtype, 0
            ):
                raise CorruptCheckpoint(
                    f"{place.length} bytes cannot hold {name!r} {box} of {meta.dtype}"
                )
            if (place.file, place.start) in taken:
                raise CorruptCheckpoint(
                    f"two chunks of {name!r} are to begin at byte {place.start} of {place.file!r}"
                )
            taken |= {(place.file, place.start)} if box.volume else set()
            yield Listed(name, box, place)

    def _found(self, name: str, offset: tuple[int, ...] | None) -> Location:
        try:
            return self._places[name, offset]
        except KeyError:
            raise CorruptCheckpoint(
                f"it does not tell where {name!r:.300} (at {offset}) is stored"
            ) from None


def read_listing(root: Storage, name: str) -> Listing:
    """The listing in this file. Raises NotACheckpoint, CorruptCheckpoint or UntrustedClass, naming it."""
    try:
        return Listing(read_metadata(root.get(name, limits.DCP_METADATA_BYTES)))
    except FileNotFoundError as error:
        raise NotACheckpoint(
            f"{root.location} has no {name}: it is no complete torch_dist checkpoint"
        ) from error
    except UntrustedClass as error:
        raise UntrustedClass(f"{root.location}/{name}: {error}") from None
    except (CorruptCheckpoint, BackendError) as error:
        raise type(error)(f"{root.location}/{name}: {error}") from error


def check_files(root: Storage, found: Sequence[Listed]) -> None:
    """Every record lies inside its file, and every file inside the directory."""
    files = list(dict.fromkeys(item.place.file for item in found))
    sizes = dict(zip(files, root.sizes(files), strict=True))
    problems = [
        f"the file {file!r} is missing, or is no file of its own (a link, a folder)"
        for file in files
        if sizes[file] is None
    ]
    for name, box, (file, start, length, _) in found:
        size = sizes[file]
        if size is not None and start + length > size:
            problems.append(
                f"{name!r} {box} should end at byte {start + length} of {file!r}, which has {size} bytes"
            )
    if problems:
        raise CorruptCheckpoint(f"{root.location}: {join_truncated(problems)}")


def _places(stored: Any) -> Iterator[tuple[tuple[str, Any], Location]]:
    """(name, offset or None) -> where."""
    if type(stored) is not dict:
        raise CorruptCheckpoint("it tells no places of items")
    for index, info in stored.items():
        if not _is(index, "MetadataIndex") or not _is(info, "_StorageInfo"):
            raise CorruptCheckpoint("its table of places holds something else")
        name, offset = index.field("fqn"), index.field("offset")
        if type(name) is not str or not (offset is None or type(offset) is Size):
            raise CorruptCheckpoint(
                "its table of places tells of an item without a name or offset"
            )
        yield (name, offset), _place(name, info)


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, Record) and value.kind == kind


def _meta(name: str, item: Any) -> TensorMeta:
    if _is(item, "BytesStorageMetadata"):
        return TensorMeta((), OBJECT)
    if not _is(item, "TensorStorageMetadata"):
        raise CorruptCheckpoint(f"{name!r} is neither a tensor nor an object")
    size, dtype = item.field("size"), _dtype(name, item.field("properties"))
    if type(size) is not Size:
        raise CorruptCheckpoint(f"{name!r} has no size")
    if math.prod(max(n, 1) for n in size) * ITEMSIZE.get(dtype, 1) >= 1 << 63:
        raise CorruptCheckpoint(f"{name!r} of shape {tuple(size)} cannot exist")
    return TensorMeta(tuple(size), dtype)


def _dtype(name: str, properties: Any) -> str:
    state = properties.state if _is(properties, "TensorProperties") else None
    dtype = (
        state[0]
        if type(state) is tuple and state
        else properties.field("dtype")
        if state
        else None
    )
    if type(dtype) is not str or dtype == OBJECT:
        raise CorruptCheckpoint(f"{name!r} has no dtype")
    return dtype


def _box(name: str, chunk: Any, ndim: int) -> Box:
    offset, shape = (
        (chunk.field("offsets"), chunk.field("sizes"))
        if isinstance(chunk, Record)
        else (None, None)
    )
    if (
        type(offset) is not Size
        or type(shape) is not Size
        or not len(offset) == len(shape) == ndim
    ):
        raise CorruptCheckpoint(
            f"a chunk of {name!r} is no region of a tensor of {ndim} dimensions"
        )
    return Box(tuple(offset), tuple(shape))


def _place(name: str, info: Record) -> Location:
    file, start, length = (
        info.field("relative_path"),
        info.field("offset"),
        info.field("length"),
    )
    if type(file) is not str or type(start) is not int or type(length) is not int:
        raise CorruptCheckpoint(f"the place of {name!r} is none")
    if any(part in ("", ".", "..") for part in file.split("/")) or "\0" in file:
        raise CorruptCheckpoint(
            f"the place of {name!r}, {file!r}, is no file inside the checkpoint"
        )
    if min(start, length) < 0 or start + length >= 1 << 63:
        raise CorruptCheckpoint(
            f"the place of {name!r} is {length} bytes from {start} on"
        )
    through = info.field("transform_descriptors") or []
    if type(through) is not list or not all(type(one) is str for one in through):
        raise CorruptCheckpoint(
            f"{name!r} is stored through something that is no extension"
        )
    return Location(file, start, length, tuple(through))
