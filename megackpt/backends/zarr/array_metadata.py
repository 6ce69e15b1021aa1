"""The descriptions of arrays and of the group, written and parsed: zarr.json, and .zarray of version 2."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from megackpt import limits
from megackpt.backends.zarr.codecs import CRC, DECODED, LITTLE, Packing
from megackpt.backends.zarr.grid import (
    ARRAY,
    SEPARATOR,
    VERSION,
    ZARRAY,
    ArrayLayout,
    Grid,
    entry_name,
    grid_of,
    inner_of,
)
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.manifest import ITEMSIZE, OBJECT, Manifest, TensorEntry
from megackpt.storage import Storage

DTYPES = frozenset(ITEMSIZE) - {OBJECT, "complex32"}
"""torch's names of the dtypes that an array can have."""
EXOTIC = frozenset(d for d in DTYPES if "float8" in d or d == "bfloat16")
"""Data types that zarr-python has after ``import megackpt.zarr_dtypes`` only."""

_MEMBERS = frozenset(
    (
        "zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs",
        "attributes", "dimension_names", "consolidated_metadata",
    )
)  # fmt: skip
_MOST_DIMENSIONS = 32  # of numpy and of tensorstore
_MOST_CONSOLIDATED = 10_000  # arrays; a longer list costs readers more than it saves
_SEPARATORS = ("/", ".")
_HINT = "import megackpt.zarr_dtypes"
_V2_DTYPES = {np.dtype(d).str: d for d in sorted(DTYPES - EXOTIC)}
_V2_DTYPES.update((d, d) for d in EXOTIC)
_PARSE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def array_document(
    shape: Grid, dtype: str, cell: Grid, packing: Packing
) -> dict[str, Any]:
    """The content of an array's zarr.json, without attributes and names of dimensions."""
    itemsize = ITEMSIZE[dtype]
    inner = inner_of(cell, itemsize)
    codecs = packing.codecs(itemsize)
    if inner != cell:
        sharding = {
            "chunk_shape": inner,
            "codecs": codecs,
            "index_codecs": [LITTLE, CRC],
        }
        codecs = [{"name": "sharding_indexed", "configuration": sharding}]
    fill: object = 0
    if dtype == "bool":
        fill = False
    elif dtype.startswith("complex"):
        fill = [0.0, 0.0]
    elif "float" in dtype:
        fill = 0.0
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": cell}},
        "chunk_key_encoding": {
            "name": "default",
            "configuration": {"separator": SEPARATOR},
        },
        "fill_value": fill,
        "codecs": codecs,
    }


def metadata_files(manifest: Manifest, packing: Packing) -> dict[str, bytes]:
    """The zarr.json of every array, and then the group's."""
    files: dict[str, bytes] = {}
    documents: dict[str, Any] = {}
    for entry, grid in zip(manifest.tensors, manifest.grids, strict=True):
        shape, dtype = entry.meta
        if entry.meta.is_object:
            continue
        name = entry_name(entry)
        document = array_document(shape, dtype, grid_of(shape, grid), packing)
        document["attributes"] = {"key": entry.key}
        if dtype in EXOTIC:
            document["attributes"]["megackpt"] = _HINT
        # xarray opens no array without names, and takes axes of one name to have one length.
        names = [f"{name}.dim_{axis}" for axis in range(len(shape))]
        document["dimension_names"] = names
        documents[name] = document
        files[f"{name}/{ARRAY}"] = json.dumps(document).encode()
    about: dict[str, Any] = {"version": VERSION, "arrays": len(documents)}
    group: dict[str, Any] = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"megackpt": about},
    }
    # With consolidated metadata zarr-python lists the arrays without a look at our other files. It
    # does not open a group at all that lists an array of an unknown data type.
    if any(entry.meta.dtype in EXOTIC for entry in manifest.tensors):
        about["zarr-python"] = _HINT
    elif len(documents) <= _MOST_CONSOLIDATED:
        group["consolidated_metadata"] = {
            "kind": "inline",
            "must_understand": False,
            "metadata": documents,
        }
    files[ARRAY] = json.dumps(group).encode()
    return files


def refuse_unfit(tensors: Iterable[TensorEntry], grids: Iterable[Grid | None]) -> None:
    """Raise BackendError naming every tensor that a zarr array cannot hold."""
    unfit = []
    for entry, grid in zip(tensors, grids, strict=True):
        key, meta = entry.key, entry.meta
        if meta.is_object:
            continue
        if len(meta.shape) > _MOST_DIMENSIONS:
            unfit.append(
                f"{key!r} has {len(meta.shape)} dimensions, zarr takes {_MOST_DIMENSIONS}"
            )
        elif meta.dtype not in DTYPES:
            unfit.append(f"{key!r} is {meta.dtype}, which zarr does not know")
        elif grid is None:
            unfit.append(f"{key!r} has no regular grid")
    if unfit:
        raise BackendError(
            f"zarr cannot hold these tensors: {'; '.join(unfit)}. "
            "hint: store complex32 as its real and imaginary parts (torch.view_as_real), other tensors "
            "through a view of another dtype or shape, or save as torch_dist"
        )


def read_layout(root: Storage, folder: str) -> ArrayLayout | None:
    """The array in a folder, by its zarr.json or .zarray; None without either. Raises as ``parse_array``."""
    for name, parse in ((ARRAY, parse_array), (ZARRAY, parse_zarray)):
        file = f"{folder}/{name}"
        if root.size(file) is not None:
            return parse(
                root.get(file, limits.ZARR_DESCRIPTION_BYTES), f"{root.location}/{file}"
            )
    return None


def parse_array(text: bytes, where: str) -> ArrayLayout:
    """The array that a zarr.json describes.

    Raises CorruptCheckpoint if it describes none, BackendError if it is one that we cannot hold or read.
    """
    try:
        document = json.loads(text)
        shape, dtype = tuple(document["shape"]), document["data_type"]
        grid = document["chunk_grid"]
        cell = tuple(grid["configuration"]["chunk_shape"])
        prefix, separator = _chunk_keys(
            document.get("chunk_key_encoding", {"name": "default"})
        )
        key = document.get("attributes", {}).get("key")
        sound = document["zarr_format"] == 3 and document["node_type"] == "array"
        sound = sound and grid["name"] == "regular"
        inner, codecs, index = _sharding(cell, _named(document["codecs"]))
    except _PARSE_ERRORS as error:
        raise CorruptCheckpoint(
            f"{where} does not describe a zarr array: {error!r}"
        ) from error
    _check(where, shape, cell, dtype, sound)
    _check_numbers(where, cell, inner)
    unknown = [
        name
        for name, value in document.items()
        if value and name not in _MEMBERS and not _may_be_ignored(value)
    ]
    if unknown:
        raise BackendError(
            f"{where}: the array cannot be read without understanding {', '.join(unknown)}"
        )
    if any(extent % step for extent, step in zip(cell, inner, strict=True)):
        raise CorruptCheckpoint(
            f"{where}: chunks of {inner} do not make up a shard of {cell}"
        )
    if not isinstance(key, str | None):
        raise CorruptCheckpoint(f"{where}: the attribute 'key' is {key!r}, not a text")
    order, big_endian, names = _codecs(where, codecs, len(shape), ITEMSIZE[dtype])
    return ArrayLayout(
        shape, dtype, cell, inner, order, big_endian, names, prefix, separator, index, key
    )  # fmt: skip


def parse_zarray(text: bytes, where: str) -> ArrayLayout:
    """The array that a .zarray of zarr version 2 describes; raises as ``parse_array``."""
    try:
        document = json.loads(text)
        shape, cell = tuple(document["shape"]), tuple(document["chunks"])
        dtype, order = str(document["dtype"]), document["order"]
        compressor = document["compressor"]
        codecs: tuple[str, ...] = ()
        if compressor is not None:
            codecs = (compressor["id"],)
        separator = document.get("dimension_separator", ".")
        sound = document["zarr_format"] == 2 and order in ("C", "F")
        sound = sound and separator in _SEPARATORS
        filtered = bool(document.get("filters"))
    except _PARSE_ERRORS as error:
        raise CorruptCheckpoint(
            f"{where} does not describe a zarr array: {error!r}"
        ) from error
    little = dtype.replace(">", "<")
    name = _V2_DTYPES.get(little, dtype)
    _check(where, shape, cell, name, sound)
    if filtered:
        raise BackendError(f"{where}: filters cannot be read")
    if not DECODED.issuperset(codecs):
        raise BackendError(f"{where}: the compressor {codecs[0]!r} cannot be read")
    axes = tuple(range(len(shape)))
    if order == "F":
        axes = axes[::-1]
    return ArrayLayout(
        shape, name, cell, cell, axes, little != dtype, codecs, "", separator
    )


def _check(
    where: str, shape: Sequence[Any], cell: Sequence[Any], dtype: Any, sound: bool
) -> None:
    if not sound:
        raise CorruptCheckpoint(f"{where} does not describe a zarr array")
    _check_numbers(where, shape, cell)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BackendError(f"{where}: torch has no tensors of the data type {dtype!r}")


def _check_numbers(where: str, shape: Sequence[Any], cell: Sequence[Any]) -> None:
    fit = len(shape) == len(cell) <= _MOST_DIMENSIONS and 0 not in cell
    for number in (*shape, *cell):
        fit = fit and type(number) is int and 0 <= number < 1 << 63
    if not fit:
        raise CorruptCheckpoint(
            f"{where}: shape {reprlib.repr(tuple(shape))} and chunk shape {reprlib.repr(tuple(cell))} "
            "make no zarr array"
        )


def _may_be_ignored(member: Any) -> bool:
    """The specification lets readers ignore members that say so."""
    return isinstance(member, dict) and member.get("must_understand") is False


def _chunk_keys(encoding: Any) -> tuple[str, str]:
    """Prefix and separator in the names of files."""
    name = encoding["name"]
    default = "/" if name == "default" else "."
    separator = (encoding.get("configuration") or {}).get("separator", default)
    if name not in ("default", "v2") or separator not in _SEPARATORS:
        raise ValueError(f"chunk key encoding {encoding!r}")
    return ("c" if name == "default" else ""), separator


def _named(codecs: Any) -> list[tuple[str, dict[str, Any]]]:
    """Name and configuration of each codec of a list, which must not be empty."""
    found = []
    for codec in list(codecs):
        name = codec
        options: Any = {}
        if not isinstance(codec, str):
            name, options = codec["name"], codec.get("configuration") or {}
        if not isinstance(name, str) or not isinstance(options, dict):
            raise ValueError(f"codecs {codecs!r}")
        found.append((name, options))
    if not found:
        raise ValueError("no codecs")
    return found


def _sharding(
    cell: Grid, codecs: list[tuple[str, Any]]
) -> tuple[Grid, list[tuple[str, Any]], tuple[str, bool] | None]:
    """The shape and the codecs of the chunks, and the place of a shard's index."""
    if codecs[0][0] != "sharding_indexed":
        return cell, codecs, None
    options = codecs[0][1]
    index, location = (
        _named(options["index_codecs"]),
        options.get("index_location", "end"),
    )
    names = [name for name, _ in index]
    plain = names in (["bytes"], ["bytes", "crc32c"])
    plain = plain and index[0][1].get("endian") == "little"
    if len(codecs) > 1 or not plain or location not in ("start", "end"):
        raise ValueError(f"sharding {options!r}")
    place = location, len(index) > 1
    return tuple(options["chunk_shape"]), _named(options["codecs"]), place


def _codecs(
    where: str, codecs: list[tuple[str, Any]], ndim: int, itemsize: int
) -> tuple[Grid, bool, tuple[str, ...]]:
    """The stored order of the axes, whether items are big-endian, and the codecs on bytes.

    Raises BackendError for those that cannot be read.
    """
    names = [name for name, _ in codecs]
    order = tuple(range(ndim))
    big_endian = False
    packed: tuple[str, ...] = ()
    readable = names.count("bytes") == 1
    if readable:
        at = names.index("bytes")
        packed = tuple(names[at + 1 :])
        # After a second compressor the size of what the first one made is not known.
        compressors = [name for name in packed if name != "crc32c"]
        readable = DECODED.issuperset(packed) and len(compressors) <= 1
        for name, options in codecs[:at]:
            axes = options.get("order")
            if name != "transpose" or not _is_permutation(axes, ndim):
                readable = False
                break
            order = tuple(order[axis] for axis in axes)
        endian = codecs[at][1].get("endian", "little" if itemsize == 1 else None)
        readable = readable and endian in ("little", "big")
        big_endian = endian == "big" and itemsize > 1
    if not readable:
        raise BackendError(f"{where}: the codecs {', '.join(names)} cannot be read")
    return order, big_endian, packed


def _is_permutation(axes: Any, ndim: int) -> bool:
    if not isinstance(axes, list) or not all(type(axis) is int for axis in axes):
        return False
    return sorted(axes) == list(range(ndim))
