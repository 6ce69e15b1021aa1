"""What zarr.json, and version 2's .zarray, say of an array: written as tensorstore does it, parsed with mistrust."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import tensorstore as ts

from megackpt.backends.zarr.layout import ArrayLayout, Grid, inner_of
from megackpt.backends.zarr.names import ARRAY, SEPARATOR
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.manifest import ITEMSIZE, OBJECT, TensorEntry

EXOTIC = frozenset(d for d in ITEMSIZE if "float8" in d or d == "bfloat16")
"""Data types that zarr-python knows only once megackpt.zarr_dtypes is imported."""

_MEMBERS = frozenset(
    (
        "zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs",
        "attributes", "dimension_names", "consolidated_metadata",
    )
)  # fmt: skip
_MOST_DIMENSIONS = 32  # tensorstore's limit
_SEPARATORS = ("/", ".")
_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC = {"name": "crc32c"}
_LEVELS = {"zstd": (range(1, 23), 3), "blosc": (range(1, 10), 5)}
_V2_NAMES = {
    **{
        np.dtype(d).str: d
        for d in sorted(ITEMSIZE)
        if d not in {*EXOTIC, OBJECT, "complex32"}
    },
    **{d: d for d in EXOTIC},
}


@dataclass(frozen=True)
class Packing:
    """What is done to the bytes of a chunk: compressed (``"zstd"``, ``"zstd:5"``, ``"blosc"``), followed by a crc32c.

    Raises BackendError, naming all compressions, for one that is unknown.
    """

    compression: str | None = None
    checksum: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.checksum, bool):
            raise BackendError(f"checksum is True or False, not {self.checksum!r}")
        self.codecs(1)

    def codecs(self, itemsize: int) -> list[dict[str, Any]]:
        """The codecs of a chunk of elements of this size."""
        packed = [] if self.compression is None else [self._compressor(itemsize)]
        return [_LITTLE, *packed, *([_CRC] if self.checksum else [])]

    def _compressor(self, itemsize: int) -> dict[str, Any]:
        name, colon, number = str(self.compression).partition(":")
        levels, level = _LEVELS.get(name, (range(0), 0))
        if colon:
            level = int(number) if number.isdecimal() else 0
        if level not in levels:
            known = "; ".join(
                f"'{n}' or '{n}:LEVEL' ({r[0]} to {r[-1]}, else {d})"
                for n, (r, d) in _LEVELS.items()
            )
            raise BackendError(
                f"zarr knows no compression {self.compression!r}; known are None; {known}"
            )
        how: dict[str, Any] = {"level": level, "checksum": False}
        if name == "blosc":
            how = {
                "cname": "lz4",
                "clevel": level,
                "shuffle": "bitshuffle",
                "typesize": itemsize,
                "blocksize": 0,
            }
        return {"name": name, "configuration": how}


PLAIN = Packing()


@lru_cache(maxsize=4096)
def array_document(
    shape: Grid, dtype: str, cell: Grid, packing: Packing = PLAIN
) -> str:
    """The content of zarr.json, as tensorstore writes it. BackendError for a dtype that it does not know."""
    inner = inner_of(cell, ITEMSIZE[dtype])
    codecs = packing.codecs(ITEMSIZE[dtype])
    if inner != cell:
        sharding = {
            "chunk_shape": inner,
            "codecs": codecs,
            "index_codecs": [_LITTLE, _CRC],
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": sharding}]
    asked = {
        "shape": shape,
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": cell}},
        "chunk_key_encoding": {
            "name": "default",
            "configuration": {"separator": SEPARATOR},
        },
        "codecs": codecs,
    }
    memory = {"driver": "memory"}
    context = ts.Context()
    try:
        ts.open(
            {"driver": "zarr3", "kvstore": memory, "metadata": asked},
            create=True,
            context=context,
        ).result()
    except ValueError as error:
        raise BackendError(
            f"zarr cannot hold a tensor of shape {shape} and dtype {dtype}: {error}"
        ) from error
    return ts.KvStore.open(memory, context=context).result()[ARRAY].decode()


def refuse_unfit(tensors: Iterable[TensorEntry], grids: Iterable[Grid | None]) -> None:
    """BackendError naming every tensor that a zarr array cannot hold, each with the way out."""
    unfit = []
    for entry, grid in zip(tensors, grids, strict=True):
        if entry.meta.is_object:
            continue
        if len(entry.meta.shape) > _MOST_DIMENSIONS:
            unfit.append(
                f"{entry.key!r} has {len(entry.meta.shape)} dimensions, zarr takes {_MOST_DIMENSIONS}"
            )
        elif not _knows(entry.meta.dtype):
            unfit.append(
                f"{entry.key!r} is {entry.meta.dtype}, which zarr does not know"
            )
        elif grid is None:
            unfit.append(f"{entry.key!r} has no regular grid")
    if unfit:
        raise BackendError(
            "zarr cannot hold these tensors: "
            + "; ".join(unfit)
            + ". hint: store complex32 as its real and imaginary parts (torch.view_as_real), other tensors "
            "through a view of another dtype or shape, or save as torch_dist"
        )


@lru_cache
def _knows(dtype: str) -> bool:
    try:
        array_document((1,), dtype, (1,))
    except BackendError:
        return False
    return True


def _is_understood(member: str, value: Any) -> bool:
    """A member that the specification knows and we heed, or one that it allows to pass over."""
    return member in _MEMBERS or (
        isinstance(value, dict) and value.get("must_understand") is False
    )


def parse_array(text: bytes, where: str) -> ArrayLayout:
    """What a zarr.json says. CorruptCheckpoint if it is none, BackendError for what we cannot hold or read."""
    try:
        document = json.loads(text)
        shape, cell = (
            tuple(numbers) for numbers in (document["shape"], _cell(document))
        )
        prefix, separator = _chunk_keys(
            document.get("chunk_key_encoding", {"name": "default"})
        )
        dtype, key = document["data_type"], document.get("attributes", {}).get("key")
        sound = document["zarr_format"] == 3 and document["node_type"] == "array"
        inner, codecs, index = _sharding(cell, _named(document["codecs"]))
        names = [name for name, _ in codecs]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{where} does not describe a zarr array: {error!r}"
        ) from error
    _check(where, shape, cell, dtype, sound)
    _check_numbers(where, cell, inner)
    if strange := [
        name
        for name, value in document.items()
        if value and not _is_understood(name, value)
    ]:
        raise BackendError(
            f"{where}: the array cannot be read without understanding {', '.join(strange)}"
        )
    if any(extent % step for extent, step in zip(cell, inner, strict=True)):
        raise CorruptCheckpoint(
            f"{where}: chunks of {inner} do not make up a shard of {cell}"
        )
    known = set(names) <= {"bytes", "crc32c", "transpose", "zstd", "gzip", "blosc"}
    if not known or (
        "blosc" in names
        and names not in (["bytes", "blosc"], ["bytes", "blosc", "crc32c"])
    ):
        raise BackendError(
            f"{where}: the codecs {', '.join(map(str, names))} cannot be read"
        )
    if not isinstance(key, str | None):
        raise CorruptCheckpoint(f"{where}: the attribute 'key' is {key!r}, not a text")
    spec = {
        k: document[k]
        for k in ("shape", "data_type", "chunk_grid", "codecs", "fill_value")
        if k in document
    }
    spec["chunk_key_encoding"] = {
        "name": "default" if prefix else "v2",
        "configuration": {"separator": separator},
    }
    raw = names in (["bytes"], ["bytes", "crc32c"]) and _is_little(
        codecs[0][1], ITEMSIZE[dtype]
    )
    return ArrayLayout(
        shape, dtype, cell, {"driver": "zarr3", "metadata": spec}, raw, prefix, separator, key, inner,
        checksum=names[-1:] == ["crc32c"], blosc="blosc" in names, index=index,
    )  # fmt: skip


def parse_zarray(text: bytes, where: str) -> ArrayLayout:
    """What a .zarray of zarr version 2 says; raises as ``parse_array``."""
    try:
        document = json.loads(text)
        shape, cell = tuple(document["shape"]), tuple(document["chunks"])
        dtype, order, packed = (
            document["dtype"],
            document["order"],
            document["compressor"],
        )
        separator = document.get("dimension_separator", ".")
        little = str(dtype).replace(">", "<")
        sound = (
            document["zarr_format"] == 2
            and order in ("C", "F")
            and separator in _SEPARATORS
        )
        kind = None if packed is None else packed["id"]
        filtered = bool(document.get("filters"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{where} does not describe a zarr array: {error!r}"
        ) from error
    _check(where, shape, cell, _V2_NAMES.get(little, dtype), sound)
    if filtered:
        raise BackendError(f"{where}: filters cannot be read")
    raw = kind is None and order == "C" and little == dtype
    return ArrayLayout(
        shape, _V2_NAMES[little], cell, {"driver": "zarr", "metadata": document}, raw, "", separator,
        inner=cell, blosc=kind == "blosc",
    )  # fmt: skip


def _check(
    where: str, shape: Sequence[Any], cell: Sequence[Any], dtype: Any, sound: bool
) -> None:
    if not sound:
        raise CorruptCheckpoint(f"{where} does not describe a zarr array")
    _check_numbers(where, shape, cell)
    if not isinstance(dtype, str) or dtype not in ITEMSIZE or not _knows(dtype):
        raise BackendError(
            f"{where}: data type {dtype!r} is none that a torch tensor has"
        )


def _check_numbers(where: str, shape: Sequence[Any], cell: Sequence[Any]) -> None:
    numbers_fit = all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, *cell))
    if (
        not numbers_fit
        or len(shape) != len(cell)
        or len(shape) > _MOST_DIMENSIONS
        or 0 in cell
    ):
        raise CorruptCheckpoint(
            f"{where}: shape {reprlib.repr(tuple(shape))} and chunk shape {reprlib.repr(tuple(cell))} "
            "make no zarr array"
        )


def _cell(document: Any) -> Any:
    grid = document["chunk_grid"]
    if grid["name"] != "regular":
        raise ValueError(f"chunk grid {grid['name']!r}")
    return grid["configuration"]["chunk_shape"]


def _chunk_keys(encoding: Any) -> tuple[str, str]:
    name = encoding["name"]
    separator = (encoding.get("configuration") or {}).get(
        "separator", "/" if name == "default" else "."
    )
    if name not in ("default", "v2") or separator not in _SEPARATORS:
        raise ValueError(f"chunk key encoding {encoding!r}")
    return ("c" if name == "default" else ""), separator


def _named(codecs: Any) -> list[tuple[str, dict[str, Any]]]:
    """Name and configuration of each codec of a list that is not empty."""
    given = [
        (c, {}) if isinstance(c, str) else (c["name"], c.get("configuration") or {})
        for c in list(codecs)
    ]
    if not given or not all(
        isinstance(name, str) and isinstance(how, dict) for name, how in given
    ):
        raise ValueError(f"codecs {codecs!r}")
    return given


def _sharding(
    cell: Grid, codecs: list[tuple[str, Any]]
) -> tuple[Grid, list[tuple[str, Any]], tuple[str, bool] | None]:
    """The inner chunk's shape and codecs, and where a shard's index is."""
    if codecs[0][0] != "sharding_indexed":
        return cell, codecs, None
    how = codecs[0][1]
    order, location = _named(how["index_codecs"]), how.get("index_location", "end")
    plain = [name for name, _ in order] in (
        ["bytes"],
        ["bytes", "crc32c"],
    ) and _is_little(order[0][1], 8)
    if len(codecs) > 1 or not plain or location not in ("start", "end"):
        raise ValueError(f"sharding {how!r}")
    return tuple(how["chunk_shape"]), _named(how["codecs"]), (location, len(order) > 1)


def _is_little(how: dict[str, Any], itemsize: int) -> bool:
    return how.get("endian", "little" if itemsize == 1 else None) == "little"
