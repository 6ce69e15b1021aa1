"""The headers of safetensors files, written and read; and which tensors go into which file. Knows no tensor's bytes.

A file is 8 bytes (the header's length, little-endian), the header (JSON, filled up with spaces to a multiple of 8),
and the tensors' C-order bytes, without holes. Source: the README of huggingface/safetensors, and its reader.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from megackpt import limits
from megackpt.backends.weight_maps import unique_pairs
from megackpt.errors import BackendError, CorruptCheckpoint, join_truncated
from megackpt.planning.manifest import Location, TensorEntry, TensorMeta
from megackpt.storage import FileReader, Storage, read_dense

METADATA = "__metadata__"

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
DTYPES = frozenset(_NAMES)
"""torch's names of the dtypes that these files can hold (safetensors 0.8)."""

_PREFIX = 8
_TOO_MUCH = 1 << 63


@dataclass(frozen=True)
class TensorFile:
    """One file: its first bytes, and where each of its tensors is."""

    name: str
    head: bytes
    places: dict[str, Location]


def refuse_unfit(tensors: Sequence[TensorEntry]) -> None:
    """Raise BackendError naming the tensors that no safetensors file can hold."""
    wrong = [f"{key!r}: {why}" for key, meta in tensors if (why := _unfit(key, meta))]
    if wrong:
        raise BackendError(
            f"safetensors cannot hold {join_truncated(wrong)}. hint: write torch_dist, or change the dtype first"
        )


def _unfit(key: str, meta: TensorMeta) -> str:
    if meta.is_object:
        return ""
    if meta.dtype not in DTYPES:
        return f"the format has no {meta.dtype}"
    if key == METADATA:
        return "the name is the format's own"
    try:
        key.encode()
    except UnicodeEncodeError:
        return "the name cannot be encoded as UTF-8"
    return ""


@lru_cache(maxsize=4)  # asked for several times in a save, and in the next one
def arranged(
    tensors: tuple[TensorEntry, ...], stem: str, shards: int | None, max_bytes: int
) -> tuple[TensorFile, ...]:
    """Tensors over files, in the order given: ``shards`` files of about the same size, or as few as the limit allows.

    One file is ``<stem>.safetensors``, several (also where there are too few tensors for all that were asked for)
    are ``<stem>-00001-of-0000N.safetensors``.
    """
    parts = list(
        _within(tensors, max_bytes) if shards is None else _divided(tensors, shards)
    ) or [[]]
    count = len(parts)
    several = count > 1 or (shards or 1) > 1
    names = (
        [f"{stem}-{i + 1:05}-of-{count:05}" for i in range(count)]
        if several
        else [stem]
    )
    return tuple(
        _file(f"{name}.safetensors", part)
        for name, part in zip(names, parts, strict=True)
    )


def _size(meta: TensorMeta) -> int:
    return math.prod(meta.shape) * meta.itemsize


def _within(tensors: Sequence[TensorEntry], limit: int) -> Iterator[list[TensorEntry]]:
    """Consecutive tensors of at most so many bytes together; a larger one is alone."""
    part: list[TensorEntry] = []
    filled = 0
    for entry in tensors:
        size = _size(entry.meta)
        if part and filled + size > limit:
            yield part
            part, filled = [], 0
        part.append(entry)
        filled += size
    if part:
        yield part


def _divided(tensors: Sequence[TensorEntry], count: int) -> Iterator[list[TensorEntry]]:
    """So many parts (or as many as there are tensors) of consecutive tensors, of about the same bytes."""
    waiting = deque(tensors)
    left = sum(_size(meta) for _, meta in tensors)
    for parts in range(min(count, len(tensors)), 0, -1):
        part = [waiting.popleft()]
        filled = _size(part[0].meta)
        # Of the tensors that are left each of the other parts gets one at the least.
        while len(waiting) >= parts:
            size = _size(waiting[0].meta)
            if parts > 1 and (2 * filled + size) * parts > 2 * left:
                break
            part.append(waiting.popleft())
            filled += size
        left -= filled
        yield part


def _file(name: str, tensors: list[TensorEntry]) -> TensorFile:
    # As the reference writer does it: large items first, so that each tensor is aligned to its items.
    ordered = sorted(tensors, key=lambda entry: (-entry.meta.itemsize, entry.key))
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for key, meta in ordered:
        begin, end = end, end + _size(meta)
        header[key] = {
            "dtype": _NAMES[meta.dtype],
            "shape": meta.shape,
            "data_offsets": (begin, end),
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _PREFIX)
    if len(text) > limits.SAFETENSORS_HEADER_BYTES:
        raise BackendError(
            f"{name} would need a header of {len(text)} bytes: choose more files (shards)"
        )
    first = _PREFIX + len(text)
    places = {
        key: Location(name, first + header[key]["data_offsets"][0], _size(meta))
        for key, meta in ordered
    }
    return TensorFile(name, len(text).to_bytes(_PREFIX, "little") + text, places)


class Contents(NamedTuple):
    """What one file holds. ``metadata`` is what its author noted, whatever that is."""

    tensors: list[tuple[TensorEntry, Location]]
    metadata: dict[str, str]


def looks_right(reader: FileReader) -> bool:
    """Could this be a safetensors file, by its first bytes?"""
    if reader.size <= _PREFIX:
        return False
    start = bytearray(_PREFIX + 1)
    reader.read_into(0, [memoryview(start)])
    return start[-1:] == b"{" and int.from_bytes(start[:_PREFIX], "little") <= min(
        reader.size - _PREFIX, limits.SAFETENSORS_HEADER_BYTES
    )


def read_header(root: Storage, name: str) -> Contents:
    """What a file says of itself. Raises CorruptCheckpoint, or BackendError for dtypes that are not known."""
    try:
        with root.open(name) as reader:
            if not looks_right(reader):
                raise CorruptCheckpoint(
                    "it does not begin as a safetensors file does, or its header is cut off"
                )
            length = bytearray(_PREFIX)
            reader.read_into(0, [memoryview(length)])
            text = read_dense(
                reader, _PREFIX, int.from_bytes(length, "little"), "its header"
            )
            return _parsed(text, name, reader.size)
    except (CorruptCheckpoint, BackendError) as error:
        raise type(error)(f"{root.location}/{name}: {error}") from error


def _parsed(text: bytearray, name: str, size: int) -> Contents:
    try:
        header = json.loads(text, object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"its header cannot be parsed: {error}") from error
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise CorruptCheckpoint(f"its {METADATA} is not a dict of texts")
    first = _PREFIX + len(text)
    found = [
        (TensorEntry(key, _meta(key, info)), *_offsets(key, info))
        for key, info in header.items()
    ]
    _check_places(found, size - first)
    return Contents(
        [
            (entry, Location(name, first + begin, end - begin))
            for entry, begin, end in found
        ],
        metadata,
    )


def _meta(key: str, info: Any) -> TensorMeta:
    dtype, shape = (
        (info.get("dtype"), info.get("shape"))
        if isinstance(info, dict)
        else (None, None)
    )
    if (
        not isinstance(dtype, str)
        or not isinstance(shape, list)
        or not _are_counts(shape)
    ):
        raise CorruptCheckpoint(f"{key!r} has no dtype or no shape")
    if dtype not in _DTYPES:
        raise BackendError(f"{key!r} is of {dtype!r}, which this release does not know")
    meta = TensorMeta(tuple(shape), _DTYPES[dtype])
    if math.prod(max(n, 1) for n in shape) * meta.itemsize >= _TOO_MUCH:
        raise CorruptCheckpoint(f"{key!r} of shape {meta.shape} cannot exist")
    return meta


def _offsets(key: str, info: dict[str, Any]) -> tuple[int, int]:
    offsets = info.get("data_offsets")
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_counts(offsets):
        raise CorruptCheckpoint(f"{key!r} has no data_offsets")
    return offsets[0], offsets[1]


def _are_counts(numbers: list[Any]) -> bool:
    return len(numbers) <= 64 and all(
        type(n) is int and 0 <= n < _TOO_MUCH for n in numbers
    )


def _check_places(found: list[tuple[TensorEntry, int, int]], size: int) -> None:
    """The tensors must follow one another without holes, from the first byte to the last, each as long as it is."""
    position = 0
    for (key, meta), begin, end in sorted(found, key=lambda item: item[1:]):
        if end - begin != _size(meta):
            raise CorruptCheckpoint(
                f"{key!r}, {meta.dtype} of shape {meta.shape}, is said to have {end - begin} bytes"
            )
        if begin != position:
            raise CorruptCheckpoint(
                f"{key!r} should begin at byte {position} of the data, not {begin}"
            )
        position = end
    if position != size:
        raise CorruptCheckpoint(
            f"its tensors have {position} bytes, and {size} follow the header"
        )
