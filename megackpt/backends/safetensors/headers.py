"""The headers of safetensors files, and which tensors go into which file.

A file is 8 bytes (the header's length, little-endian), the header (JSON, filled up with spaces to a
multiple of 8), and the tensors' C-order bytes, without holes. Source: the README of
huggingface/safetensors, and its reader.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from megackpt import limits
from megackpt.backends.weight_maps import unique_pairs
from megackpt.errors import BackendError, CorruptCheckpoint, join_truncated
from megackpt.planning.box import Box
from megackpt.planning.manifest import Location, TensorEntry, TensorMeta, size_problem
from megackpt.storage import FileReader, Storage, read_dense

METADATA = "__metadata__"
_SHARDING = "DCP_SHARDING_INFO"
FORMATS_OWN = frozenset({"format", "DCP_VERSION", _SHARDING})
"""Metadata that do not describe the model. Hugging Face's tools and torch DCP write them."""

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
_FORMAT = {"format": "pt"}


@dataclass(frozen=True)
class TensorFile:
    """One file: its first bytes, and where each of its tensors is."""

    name: str
    head: bytes
    places: dict[str, Location]


def refuse_unfit(tensors: Sequence[TensorEntry]) -> None:
    """Raise BackendError naming the tensors that no safetensors file can hold."""
    wrong = []
    for key, meta in tensors:
        if meta.is_object:
            continue
        if meta.dtype not in DTYPES:
            wrong.append(f"{key!r}: the format has no {meta.dtype}")
        elif key == METADATA:
            wrong.append(f"{key!r}: the name is the format's own")
        elif key.encode(errors="replace").decode() != key:
            wrong.append(f"{key!r}: the name cannot be encoded as UTF-8")
    if wrong:
        raise BackendError(
            f"safetensors cannot hold {join_truncated(wrong)}. "
            "hint: write torch_dist, or change the dtype first"
        )


def arranged(
    tensors: Sequence[TensorEntry], stem: str, shards: int | None, max_bytes: int
) -> list[TensorFile]:
    """Tensors over files, in the order given.

    There are ``shards`` files of about the same size, or as few as ``max_bytes`` a file allow.
    One file is ``<stem>.safetensors``, several are ``<stem>-00001-of-0000N.safetensors``.
    """
    ends = [0]
    for entry in tensors:
        ends.append(ends[-1] + _size(entry.meta))
    cuts: list[int] = []
    first = 0
    if shards is None:
        # At most ``max_bytes`` in a part; a larger tensor is alone.
        for number in range(1, len(tensors)):
            if ends[number + 1] - ends[first] > max_bytes:
                cuts.append(number)
                first = number
    else:
        # About the same bytes in each part, and one tensor at least.
        for left in range(min(shards, len(tensors)), 1, -1):
            goal = ends[first] + (ends[-1] - ends[first]) / left
            first += 1
            # Each of the remaining parts gets at least one of the remaining tensors.
            while (
                first + left < len(ends) and ends[first] + ends[first + 1] <= 2 * goal
            ):
                first += 1
            cuts.append(first)
    parts = [tensors[a:b] for a, b in pairwise([0, *cuts, len(tensors)])]
    if len(parts) == 1:
        return [tensor_file(f"{stem}.safetensors", parts[0])]
    return numbered(dict(enumerate(parts, start=1)), stem, len(parts))


def numbered(
    parts: Mapping[int, Sequence[TensorEntry]], stem: str, count: int
) -> list[TensorFile]:
    """Files with numbers in their names. ``parts``: a number, from 1 to ``count`` -> tensors."""
    files = []
    for number, part in parts.items():
        name = f"{stem}-{number:05}-of-{count:05}.safetensors"
        files.append(tensor_file(name, part))
    return files


def _size(meta: TensorMeta) -> int:
    return math.prod(meta.shape) * meta.itemsize


def tensor_file(
    name: str,
    tensors: Sequence[TensorEntry],
    metadata: Mapping[str, str] = _FORMAT,
) -> TensorFile:
    """A file of these tensors, with the notes of its author."""
    # As the reference writer does it: with large items first, each tensor is aligned to its items.
    ordered = sorted(tensors, key=lambda entry: (-entry.meta.itemsize, entry.key))
    header: dict[str, Any] = {METADATA: metadata}
    starts = []
    end = 0
    for key, meta in ordered:
        starts.append(end)
        end += _size(meta)
        header[key] = {
            "dtype": _NAMES[meta.dtype],
            "shape": meta.shape,
            "data_offsets": (starts[-1], end),
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _PREFIX)
    if len(text) > limits.SAFETENSORS_HEADER_BYTES:
        raise BackendError(
            f"{name} would need a header of {len(text)} bytes: choose more files (shards)"
        )
    head = len(text).to_bytes(_PREFIX, "little") + text
    places = {}
    for (key, meta), start in zip(ordered, starts, strict=True):
        places[key] = Location(name, len(head) + start, _size(meta))
    return TensorFile(name, head, places)


class Contents(NamedTuple):
    """The contents of one file. ``metadata`` has the notes of its author, of any kind."""

    tensors: list[tuple[TensorEntry, Location]]
    metadata: dict[str, str]


def piece_offsets(contents: Contents, where: str) -> dict[str, tuple[int, ...]]:
    """Where each tensor begins in the tensor of all files; empty if torch DCP did not note it.

    Raises CorruptCheckpoint.
    """
    noted = contents.metadata.get(_SHARDING)
    if noted is None:
        return {}
    offsets = {}
    try:
        info = json.loads(noted, object_pairs_hook=unique_pairs)
        for (key, meta), _ in contents.tensors:
            offset = tuple(info[key]["saved_offsets"])
            if [type(number) for number in offset] != [int] * len(meta.shape):
                raise TypeError(f"{key!r} begins at {offset}")
            offsets[key] = offset
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"the {_SHARDING} of {where} cannot be parsed: {error!r}"
        ) from error
    return offsets


def joined(found: Sequence[tuple[TensorEntry, Box, Location]]) -> list[Any]:
    """Pieces as chunks of whole tensors, which are as large as their pieces reach."""
    shapes: dict[tuple[str, str, int], tuple[int, ...]] = {}
    for (key, meta), box, _ in found:
        name = key, meta.dtype, len(box.offset)
        ends = [a + b for a, b in zip(box.offset, box.shape, strict=True)]
        shapes[name] = tuple(map(max, ends, shapes.get(name, ends)))
    chunks = []
    for (key, meta), box, place in found:
        shape = shapes[key, meta.dtype, len(box.offset)]
        entry = TensorEntry(key, TensorMeta(shape, meta.dtype))
        chunks.append((entry, box, place))
    return chunks


def looks_right(reader: FileReader) -> bool:
    """Could this be a safetensors file, by its first bytes?"""
    if reader.size <= _PREFIX:
        return False
    start = bytearray(_PREFIX + 1)
    reader.read_into(0, [memoryview(start)])
    length = int.from_bytes(start[:_PREFIX], "little")
    most = min(reader.size - _PREFIX, limits.SAFETENSORS_HEADER_BYTES)
    return start.endswith(b"{") and length <= most


def read_header(root: Storage, name: str) -> Contents:
    """The contents of a file, by its header.

    Raises CorruptCheckpoint, or BackendError for dtypes that are not known.
    """
    where = f"{root.location}/{name}"
    with root.open(name) as reader:
        if not looks_right(reader):
            raise CorruptCheckpoint(
                f"{where} does not begin as a safetensors file does, or its header is cut off"
            )
        prefix = bytearray(_PREFIX)
        reader.read_into(0, [memoryview(prefix)])
        length = int.from_bytes(prefix, "little")
        text = read_dense(reader, _PREFIX, length, f"the header of {where}")
        size = reader.size
    rows = []
    try:
        header = json.loads(text, object_pairs_hook=unique_pairs)
        metadata = header.pop(METADATA, {})
        if not {type(value) for value in metadata.values()} <= {str}:
            raise TypeError(f"{METADATA} is not a dict of texts")
        for key, info in header.items():
            begin, end = info["data_offsets"]
            shape = tuple(info["shape"])
            dtype = info["dtype"]
            integers = {type(number) for number in (begin, end, *shape)} <= {int}
            if not integers or type(dtype) is not str:
                raise TypeError(
                    f"{key!r} has a dtype, shape or offsets of another type"
                )
            rows.append((begin, end, key, shape, dtype))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"the header of {where} cannot be parsed: {error!r}"
        ) from error
    tensors = []
    position = 0
    for begin, end, key, shape, dtype in sorted(rows, key=lambda row: row[:2]):
        if dtype not in _DTYPES:
            raise BackendError(
                f"{where}: {key!r} is of {dtype!r}, which this release does not know"
            )
        meta = TensorMeta(shape, _DTYPES[dtype])
        impossible = min(shape, default=0) < 0 or size_problem(shape, meta.dtype)
        if impossible or end - begin != _size(meta):
            raise CorruptCheckpoint(
                f"{where}: {key!r}, {dtype} of shape {shape}, cannot be bytes {begin} to {end}"
            )
        if begin != position:
            raise CorruptCheckpoint(
                f"{where}: {key!r} should begin at byte {position} of the data, not {begin}"
            )
        place = Location(name, _PREFIX + length + begin, end - begin)
        tensors.append((TensorEntry(key, meta), place))
        position = end
    if position != size - _PREFIX - length:
        raise CorruptCheckpoint(
            f"{where}: its tensors have {position} bytes, and "
            f"{size - _PREFIX - length} follow the header"
        )
    return Contents(tensors, metadata)
