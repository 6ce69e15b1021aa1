"""The descriptions of arrays and of the group: zarr.json, and .zarray of version 2."""

from __future__ import annotations

import json
import operator
import re
import reprlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from megackpt import limits
from megackpt.backends.zarr.codecs import (
    COMPRESSORS,
    CRC,
    LIBRARIES,
    LITTLE,
    Packing,
)
from megackpt.backends.zarr.grid import (
    ARRAY,
    SEPARATOR,
    VERSION,
    ZARRAY,
    ArrayLayout,
    Grid,
    entry_name,
    join,
)
from megackpt.backends.zarr.library_decoders import (
    decode,
    library_of_v2,
    library_of_v3,
)
from megackpt.errors import BackendError, CorruptCheckpoint, join_truncated
from megackpt.planning.manifest import ITEMSIZE, OBJECT, Manifest, TensorEntry
from megackpt.storage import Storage

DTYPES = frozenset(ITEMSIZE) - {OBJECT, "complex32"}
"""torch's names of the dtypes that an array can have."""
EXOTIC = frozenset(d for d in DTYPES if "float8" in d or d == "bfloat16")
"""Data types that zarr-python has after ``import megackpt.zarr_dtypes`` only."""

_MEMBERS = frozenset(
    (
        "zarr_format",
        "node_type",
        "shape",
        "data_type",
        "chunk_grid",
        "chunk_key_encoding",
        "fill_value",
        "codecs",
        "attributes",
        "dimension_names",
        "consolidated_metadata",
    )
)
_MOST_DIMENSIONS = 32  # of numpy and of tensorstore
_MOST_CONSOLIDATED = 10_000  # arrays; a longer list costs readers more than it saves
_SEPARATORS = ("/", ".")
_HINT = "import megackpt.zarr_dtypes"
_NAMINGS = {"default": ("c", "/"), "v2": ("", ".")}
"""The prefix of the names of chunks, and the separator if none is given."""
_PLACES = ("start", "end")
_COPIED = ("zarr_format", "node_type", "data_type", "fill_value")
_COPIED_V2 = ("zarr_format", "dtype", "compressor", "fill_value", "order", "filters")
_V2_DTYPE = re.compile(r"[<>|=][biufc][0-9]{1,2}")
PARSE_ERRORS = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)


def array_document(layout: ArrayLayout) -> dict[str, Any]:
    """The content of an array's zarr.json, without attributes and names of dimensions."""
    dtype = layout.dtype
    codecs = layout.packing.codecs(ITEMSIZE[dtype])
    if layout.sharded:
        sharding = {
            "chunk_shape": layout.inner,
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
        "shape": layout.shape,
        "data_type": dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": layout.cell},
        },
        "chunk_key_encoding": {
            "name": "default",
            "configuration": {"separator": SEPARATOR},
        },
        "fill_value": fill,
        "codecs": codecs,
    }


def array_file(entry: TensorEntry, layout: ArrayLayout) -> bytes:
    """The zarr.json of a tensor's array: the fields of its layout, then of the tensor."""
    attributes = f'"key": {json.dumps(entry.key)}'
    if entry.meta.dtype in EXOTIC:
        attributes += f', "megackpt": {json.dumps(_HINT)}'
    # xarray opens no array without names, and takes axes of one name to have one length.
    name = entry_name(entry)  # without characters that JSON escapes
    names = ", ".join(f'"{name}.dim_{axis}"' for axis in range(len(layout.shape)))
    own = f'"attributes": {{{attributes}}}, "dimension_names": [{names}]'
    return f"{_layout_text(layout)[:-1]}, {own}}}".encode()


@lru_cache(maxsize=1024)
def _layout_text(layout: ArrayLayout) -> str:
    """The fields as JSON. Thousands of arrays have one layout, so it is formatted once."""
    return json.dumps(array_document(layout))


def metadata_files(manifest: Manifest, packing: Packing) -> dict[str, bytes]:
    """The zarr.json of every array, and then the group's."""
    files: dict[str, bytes] = {}
    documents = []
    exotic = False
    for entry, grid in zip(manifest.tensors, manifest.grids, strict=True):
        if entry.meta.is_object:
            continue
        exotic |= entry.meta.dtype in EXOTIC
        name = entry_name(entry)
        document = array_file(entry, ArrayLayout.planned(entry.meta, grid, packing))
        documents.append(f'"{name}": {document.decode()}')
        files[f"{name}/{ARRAY}"] = document
    about: dict[str, Any] = {"version": VERSION, "arrays": len(documents)}
    group: dict[str, Any] = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"megackpt": about},
    }
    text = json.dumps(group)
    # With consolidated metadata zarr-python lists the arrays without a look at our other files. It
    # does not open a group at all that lists an array of an unknown data type.
    if exotic:
        about["zarr-python"] = _HINT
        text = json.dumps(group)
    elif len(documents) <= _MOST_CONSOLIDATED:
        kind = '"kind": "inline", "must_understand": false'
        listed = f'{{{kind}, "metadata": {{{", ".join(documents)}}}}}'
        text = f'{text[:-1]}, "consolidated_metadata": {listed}}}'
    files[ARRAY] = text.encode()
    return files


def refuse_unfit(tensors: Iterable[TensorEntry], grids: Iterable[Grid | None]) -> None:
    """Raise BackendError naming every tensor that a zarr array cannot hold."""
    unfit = []
    for entry, grid in zip(tensors, grids, strict=True):
        key = entry.key
        meta = entry.meta
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
            "hint: store complex32 as its real and imaginary parts (torch.view_as_real), other "
            "tensors through a view of another dtype or shape, or save as torch_dist"
        )


def read_layout(root: Storage, folder: str) -> ArrayLayout | None:
    """The array in a folder ("": the root), by its zarr.json or .zarray.

    None without one, or if it is a group. Raises as ``parse_array``.
    """
    for name, parse in ((ARRAY, parse_array), (ZARRAY, parse_zarray)):
        file = join(folder, name)
        if root.size(file) is not None:
            text = root.get(file, limits.ZARR_DESCRIPTION_BYTES)
            return parse(text, f"{root.location}/{file}")
    return None


def parse_array(text: bytes, where: str) -> ArrayLayout | None:
    """The array that a zarr.json describes; None if it describes a group.

    Raises CorruptCheckpoint if it describes neither, BackendError if it is one that we cannot read.
    """
    try:
        document = json.loads(text)
        if document["node_type"] == "group":
            return None
        shape = tuple(document["shape"])
        dtype = str(document["data_type"])
        grid = document["chunk_grid"]
        naming = document["chunk_key_encoding"]
        cell = inner = tuple(grid["configuration"]["chunk_shape"])
        prefix, separator = _NAMINGS.get(naming["name"], ("", ""))
        separator = naming.get("configuration", {}).get("separator", separator)
        key = document.get("attributes", {}).get("key")
        codecs = document["codecs"]
        # The index of other shards is left to a library, with the chunks.
        index = {}
        sharded = len(codecs) == 1 and codecs[0]["name"] == "sharding_indexed"
        if sharded:
            index = codecs[0]["configuration"]
            sharded = index["index_codecs"] in ([LITTLE, CRC], [LITTLE])
        if sharded:
            inner = tuple(index["chunk_shape"])
            codecs = index["codecs"]
        packing = _packing(where, codecs, dtype)
        kind = [document["zarr_format"], document["node_type"], grid["name"]]
        kind += [naming["name"], separator]
        unknown = naming["name"] not in _NAMINGS or separator not in _SEPARATORS
        place = index.get("index_location", "end")
        if kind[:3] != [3, "array", "regular"] or unknown or place not in _PLACES:
            raise ValueError(f"it is {kind}, {place}")
        single = {
            **{name: document[name] for name in _COPIED if name in document},
            "shape": inner,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": inner}},
            "chunk_key_encoding": {"name": "default"},
            "codecs": codecs,
        }
    except PARSE_ERRORS as error:
        raise CorruptCheckpoint(
            f"{where} does not describe a zarr array that can be read: {error!r}"
        ) from error
    _check(where, shape, cell, inner, dtype)
    for name, value in document.items():
        optional = isinstance(value, dict) and value.get("must_understand") is False
        if value and name not in _MEMBERS and not optional:
            raise BackendError(
                f"{where}: the array cannot be read without understanding {name}"
            )
    if not isinstance(key, str | None):
        raise CorruptCheckpoint(f"{where}: the attribute 'key' is {key!r}, not a text")
    layout = ArrayLayout(
        shape, dtype, cell, inner, sharded, packing, prefix, separator, key,
        (place == "start", not sharded or CRC in index["index_codecs"]),
        document=json.dumps(single),
    )  # fmt: skip
    return _accepted(layout, where)


def _packing(where: str, codecs: list[dict[str, Any]], dtype: str) -> Packing:
    """The packing by these codecs: our own is bytes, at most one compressor, perhaps a crc32c.

    Raises BackendError for codecs that nothing decodes.
    """
    names = [codec["name"] for codec in codecs]
    options = codecs[0].get("configuration", {})
    little = ITEMSIZE.get(dtype) == 1 or options.get("endian") == "little"
    checksum = names[-1] == "crc32c"
    packed = names[1 : len(names) - checksum]
    known = len(packed) <= 1 and COMPRESSORS.issuperset(packed)
    if names[0] == "bytes" and little and known:
        return Packing(packed[0] if packed else None, checksum)
    library = library_of_v3(codecs)
    if not library:
        raise BackendError(
            f"{where}: the codecs {join_truncated(names, 20, ', ')} of {dtype} cannot be read. "
            "hint: move the array out of the directory"
        )
    return Packing(library, checksum=False)


def parse_zarray(text: bytes, where: str) -> ArrayLayout:
    """The array that a .zarray of zarr version 2 describes; raises as ``parse_array``."""
    try:
        document = json.loads(text)
        shape = tuple(document["shape"])
        cell = tuple(document["chunks"])
        dtype = str(document["dtype"])
        order = document["order"]
        compressor = document["compressor"]
        if compressor is not None:
            compressor = compressor["id"]
        filters = document.get("filters") or ()
        separator = document.get("dimension_separator", ".")
        if document["zarr_format"] != 2 or separator not in _SEPARATORS:
            raise ValueError(f"separator {separator!r}")
        library = library_of_v2(compressor, filters)
        name = dtype
        big = False
        if _V2_DTYPE.fullmatch(dtype):
            name = np.dtype(dtype).name
            big = np.dtype(dtype).byteorder == ">"
        single = {
            **{member: document.get(member) for member in _COPIED_V2},
            "shape": cell,
            "chunks": cell,
        }
    except PARSE_ERRORS as error:
        raise CorruptCheckpoint(
            f"{where} does not describe a zarr array that can be read: {error!r}"
        ) from error
    _check(where, shape, cell, cell, name)
    if not library or order not in ("C", "F"):
        ids = join_truncated([codec["id"] for codec in filters], 20, ", ") or "none"
        raise BackendError(
            f"{where}: order {order!r}, the filters {ids} or the compressor {compressor!r} "
            "cannot be read. hint: move the array out of the directory"
        )
    packing = Packing(library, checksum=False)
    plain = order == "C" and not big and not filters
    if plain and (compressor is None or compressor in COMPRESSORS):
        packing = Packing(compressor, checksum=False)
    layout = ArrayLayout(
        shape, name, cell, cell, False, packing, "", separator,
        description=ZARRAY, document=json.dumps(single),
    )  # fmt: skip
    return _accepted(layout, where)


def _accepted(layout: ArrayLayout, where: str) -> ArrayLayout:
    """The layout, if the library that decodes its chunks, if any, takes its document."""
    library = layout.packing.compressor
    if library in LIBRARIES:
        decode(library, layout.document, None, where)
    return layout


def _check(where: str, shape: Grid, cell: Grid, inner: Grid, dtype: str) -> None:
    """Raise CorruptCheckpoint if these make no array, BackendError for an unknown dtype."""
    fit = len(shape) == len(cell) == len(inner) <= _MOST_DIMENSIONS
    fit = fit and 0 not in (*cell, *inner)
    for number in (*shape, *cell, *inner):
        fit = fit and type(number) is int and 0 <= number < 1 << 63
    if not fit or any(map(operator.mod, cell, inner)):
        sizes = [reprlib.repr(numbers) for numbers in (shape, cell, inner)]
        raise CorruptCheckpoint(
            f"{where}: shape {sizes[0]}, grid {sizes[1]} and chunks {sizes[2]} make no zarr array"
        )
    if dtype not in DTYPES:
        raise BackendError(
            f"{where}: arrays of the data type {dtype!r} cannot be read: no tensor holds texts, "
            "dates, objects or records. hint: move such arrays out of the directory"
        )
