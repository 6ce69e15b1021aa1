"""What an array's zarr.json says, and which cells of its grid boxes are. Knows no files' content."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import tensorstore as ts

from megackpt.backends.zarr.names import ARRAY
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.box import Boxes, Int64
from megackpt.planning.manifest import ITEMSIZE, Bool, Int32, TensorEntry

Grid = tuple[int, ...]

_MOST_DIMENSIONS = 32  # tensorstore's limit
_SUFFIX_SEPARATORS = ("/", ".")


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """An array as its zarr.json describes it.

    ``cell`` is the shape of a grid cell; ``raw``: a cell's file is its bytes, little-endian, C order, and
    nothing else; ``prefix`` and ``separator`` make the file's name of the cell's numbers.
    """

    shape: Grid
    dtype: str
    cell: Grid
    raw: bool
    prefix: str
    separator: str
    key: str | None

    @property
    def counts(self) -> Grid:
        """Cells along each axis."""
        return tuple(-(-extent // cell) for extent, cell in zip(self.shape, self.cell, strict=True))

    def indices(self) -> Iterator[Grid]:
        """The numbers of all cells, one after the other: there may be absurdly many in a file that lies."""
        counts = self.counts
        for number in range(math.prod(counts)):
            index = []
            for count in reversed(counts):
                number, i = divmod(number, count)
                index.append(i)
            yield tuple(reversed(index))

    def file(self, index: Sequence[int]) -> str:
        """The chunk key of a cell, relative to the array's folder."""
        numbers = [str(i) for i in index]
        if self.prefix:
            return self.separator.join([self.prefix, *numbers])
        return self.separator.join(numbers) or "0"


def grid_of(shape: Grid, grid: Grid | None) -> Grid:
    """The cell shape that is written down: that of the plan, without empty extents (zarr knows none)."""
    return tuple(max(1, extent) for extent in (shape if grid is None else grid))


@lru_cache(maxsize=4096)
def array_document(shape: Grid, dtype: str, cell: Grid) -> str:
    """The content of zarr.json, as tensorstore writes it. BackendError for a dtype that it does not know."""
    asked = {
        "shape": shape,
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": cell}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    memory = {"driver": "memory"}
    context = ts.Context()
    try:
        ts.open(
            {"driver": "zarr3", "kvstore": memory, "metadata": asked}, create=True, context=context
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
            unfit.append(f"{entry.key!r} is {entry.meta.dtype}, which zarr does not know")
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


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Boxes seen as cells of their tensors' grids: columns of shape (n, width).

    An object's box is its own cell.
    """

    grid: Int64
    shape: Int64
    index: Int64
    is_object: Bool
    whole: Bool
    """The box starts at a border of the grid and is the whole cell (up to the end of the tensor)."""

    @classmethod
    def of(
        cls, tensors: Sequence[TensorEntry], grids: Sequence[Grid | None], tensor: Int32, boxes: Boxes
    ) -> Cells:
        width = boxes.width
        used, number = np.unique(tensor, return_inverse=True)  # of a large table a plan may use a few
        shapes, cells = np.ones((len(used), width), np.int64), np.ones((len(used), width), np.int64)
        is_object = np.zeros(len(used), np.bool_)
        for i, t in enumerate(used.tolist()):
            meta = tensors[t].meta
            shapes[i, : len(meta.shape)] = meta.shape
            cells[i, : len(meta.shape)] = grid_of(meta.shape, grids[t])
            is_object[i] = meta.is_object
        is_object = is_object[number]
        grid = np.where(is_object[:, None], boxes.shape, cells[number])
        index = boxes.offset // np.maximum(grid, 1)
        end = np.minimum(index * grid + grid, shapes[number])
        whole = (index * grid == boxes.offset) & (boxes.stop == end)
        return cls(grid, boxes.shape, index, is_object, whole.all(axis=1) | is_object)

    @property
    def prefix(self) -> Bool:
        """True where the box's bytes stand at the front of the cell's file without gaps.

        Cells at the end of a tensor are stored at full size: padding along an axis parts the bytes if the
        box has an extent along an earlier one.
        """
        extended = np.cumsum(self.shape > 1, axis=1) - (self.shape > 1) > 0  # along an earlier axis
        gaps: Bool = ((self.grid != self.shape) & extended).any(axis=1)
        return ~gaps


def parse_array(text: bytes, where: str) -> ArrayLayout:
    """What a zarr.json says. CorruptCheckpoint if it is none, BackendError for a dtype that torch has not."""
    try:
        document = json.loads(text)
        shape, cell = (tuple(numbers) for numbers in (document["shape"], _cell(document)))
        prefix, separator = _chunk_keys(document.get("chunk_key_encoding", {"name": "default"}))
        dtype, codecs = document["data_type"], list(document["codecs"])
        key = document.get("attributes", {}).get("key")
        sound = document["zarr_format"] == 3 and document["node_type"] == "array" and len(codecs) > 0
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{where} does not describe a zarr array: {error!r}") from error
    numbers_fit = all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, *cell))
    if not sound or not numbers_fit or len(shape) != len(cell) or len(shape) > _MOST_DIMENSIONS or 0 in cell:
        raise CorruptCheckpoint(f"{where}: shape {shape} and chunk shape {cell} make no zarr array")
    if not isinstance(dtype, str) or dtype not in ITEMSIZE or not _knows(dtype):
        raise BackendError(f"{where}: data type {dtype!r} is none that a torch tensor has")
    if not isinstance(key, str | None):
        raise CorruptCheckpoint(f"{where}: the attribute 'key' is {key!r}, not a text")
    return ArrayLayout(shape, dtype, cell, _is_raw(codecs, ITEMSIZE[dtype]), prefix, separator, key)


def _cell(document: Any) -> Any:
    grid = document["chunk_grid"]
    if grid["name"] != "regular":
        raise ValueError(f"chunk grid {grid['name']!r}")
    return grid["configuration"]["chunk_shape"]


def _chunk_keys(encoding: Any) -> tuple[str, str]:
    name = encoding["name"]
    separator = encoding.get("configuration", {}).get("separator", "/" if name == "default" else ".")
    if name not in ("default", "v2") or separator not in _SUFFIX_SEPARATORS:
        raise ValueError(f"chunk key encoding {encoding!r}")
    return ("c" if name == "default" else ""), separator


def _is_raw(codecs: list[Any], itemsize: int) -> bool:
    if len(codecs) != 1 or not isinstance(codecs[0], dict):
        return False
    endian = (codecs[0].get("configuration") or {}).get("endian", "little" if itemsize == 1 else None)
    return codecs[0].get("name") == "bytes" and endian == "little"
