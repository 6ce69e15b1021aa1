"""A checkpoint mapped to Hugging Face's names and shapes by a table of rules. No data is copied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import ml_dtypes  # noqa: F401 - numpy's names of bfloat16 and float8
import numpy as np
from numpy.typing import NDArray

from megackpt.backends.base import Backend, Properties, Target
from megackpt.checkpoint import Opened, as_read_by
from megackpt.errors import BackendError, MismatchError
from megackpt.huggingface.rules import Piece
from megackpt.huggingface.table_links import Table, link
from megackpt.planning.box import Box, Boxes, Int64
from megackpt.planning.manifest import (
    Chunks,
    LoadPlan,
    Manifest,
    TensorEntry,
    TensorMeta,
    TensorParts,
    carried_dtype,
    digest_rows,
    itemsizes,
)
from megackpt.storage import Storage


def map_checkpoint(table: Table, opened: Opened) -> Opened:
    """Return the checkpoint with the tensors that the table makes of the stored ones.

    Raises MismatchError with everything that does not fit the table.
    """
    stored = opened.manifest
    numbers: dict[tuple[str, tuple[int, ...]], int] = {}
    for number, entry in enumerate(stored.tensors):
        if not entry.meta.is_object:
            numbers[entry.key, entry.meta.shape] = number
    entries: dict[str, TensorEntry] = {}
    pieces: defaultdict[str, list[Piece]] = defaultdict(list)
    # For each piece: the number of its mapped tensor, the boxes of its chunks in that tensor, and
    # the stored chunk of each box.
    numbered: dict[str, int] = {}
    owners: list[int] = []
    boxes: list[Boxes] = []
    origins: list[Int64] = [np.zeros(0, np.int64)]
    parts = TensorParts(stored)
    problems = []
    for (key, shape), linked in link(table, numbers, complete=True).items():
        number = numbers[key, shape]
        rows = parts.rows(number)
        chunks = stored.chunks.boxes.take(rows)
        dtype = stored.tensors[number].meta.dtype
        for piece in linked:
            if piece.tied:
                continue
            entry = TensorEntry(piece.key, TensorMeta(piece.shape, dtype))
            known = entries.setdefault(piece.key, entry)
            if known != entry:
                problems.append(
                    f"{piece.key!r} would be of {dtype} and {known.meta.dtype}: "
                    "cast the checkpoint before"
                )
            mapped, inside = _map_chunks(piece, chunks)
            axis = piece.alternating
            if axis is not None and (
                chunks.offset[inside, axis].max(initial=0) > piece.box.offset[axis]
                or chunks.stop[inside, axis].min() < piece.box.stop[axis]
            ):
                problems.append(
                    f"{key!r} is stored in chunks that cut its axis {axis}, which has to be put "
                    "into another order: save it with whole extents of this axis in each chunk"
                )
                break
            pieces[piece.key].append(piece.swapped(key, shape))
            owners += [numbered.setdefault(piece.key, len(numbered))] * len(inside)
            boxes.append(mapped)
            origins.append(rows[inside])
    if problems:
        raise MismatchError("\n".join(problems))
    order = np.argsort(owners, kind="stable")
    tensor = np.array(owners, np.int32)[order]
    all_boxes = Boxes.concat(boxes).take(order)
    tensors = tuple(entries.values())
    no_file = np.full(len(tensor), -1, np.int32)
    mapped_chunks = Chunks(
        tensor,
        all_boxes,
        no_file,
        no_file,
        np.concatenate(origins)[order],  # as "start": _MappedReader looks the chunk up
        all_boxes.volume * itemsizes(tensors)[tensor],
        digest_rows(b""),
    )
    manifest = replace(
        stored,
        tensors=tensors,
        grids=(None,) * len(tensors),
        chunks=mapped_chunks,
        encoding="native",
        values=None,
        differing=(),
    )
    reader = _MappedReader(opened.backend, stored, dict(pieces))
    return replace(opened, backend=reader, manifest=manifest)


def _map_chunks(piece: Piece, chunks: Boxes) -> tuple[Boxes, Int64]:
    """Return the boxes that parts of these chunks have in the mapped tensor, and which chunks."""
    ndim = len(piece.box.shape)
    low = np.maximum(chunks.offset[:, :ndim], piece.box.offset)
    extent = np.minimum(chunks.stop[:, :ndim], piece.box.stop) - low
    inside = np.flatnonzero((extent > 0).all(axis=1))
    offset = np.tile(np.array(piece.there.offset, np.int64), (len(inside), 1))
    shape = np.ones_like(offset)
    for axis, stored_axis in enumerate(piece.axes):
        if stored_axis is not None:
            start = low[inside, stored_axis] - piece.box.offset[stored_axis]
            offset[:, axis] += start
            shape[:, axis] = extent[inside, stored_axis]
    return Boxes(offset, shape), inside


@dataclass(frozen=True, eq=False)
class _MappedReader(Backend):
    """Reads mapped tensors through ``reader``, the format of the ``stored`` checkpoint."""

    reader: Backend
    stored: Manifest
    pieces: Mapping[str, Sequence[Piece]]

    properties: ClassVar[Properties] = Properties("mapped", 1, ())

    def decoded_bytes(self, manifest: Manifest) -> Int64:
        return self.reader.decoded_bytes(self.stored)[manifest.chunks.start]

    def read(self, root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
        chunks = plan.manifest.chunks
        rows = []
        boxes = []
        for row, chunk in enumerate(plan.chunk.tolist()):
            key, meta = plan.manifest.tensors[chunks.tensor[chunk]]
            box = plan.boxes.row(row, len(meta.shape))
            # A chunk is a part of one piece, so one piece has the whole box.
            whole = next(p for p in self.pieces[key] if p.within(box) is not None)
            part = _Part.of(int(plan.target[row]), whole, box, meta)
            rows.append(part)
            boxes.append(part.stored)
        stored = LoadPlan(
            self.stored,
            chunks.start[plan.chunk],
            Boxes.of(boxes),
            np.arange(len(boxes)),
        )
        target = _MappedTarget(rows, into)
        self.reader.read(as_read_by(self.reader, root), stored, target, verify)

    def layout(self, *_: object, **__: object) -> NoReturn:
        raise BackendError("a mapped checkpoint can be read, and not written")

    write = finish = read_manifest = layout


@dataclass(frozen=True)
class _Part:
    """One row of a plan. ``piece`` maps regions of the mapped tensor, ``inverse`` stored regions.

    ``stored``: the region to read. ``order``: which elements of the axis ``piece.alternating`` of
    this region are wanted, in their order; None: all of them, in the order stored.
    """

    row: int
    piece: Piece
    inverse: Piece
    stored: Box
    meta: TensorMeta
    order: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, row: int, whole: Piece, box: Box, meta: TensorMeta) -> _Part:
        piece = whole.within(box) or whole
        inverse = piece.swapped(piece.key, piece.shape)
        axis = piece.alternating
        if axis is None:
            return cls(row, piece, inverse, piece.there, meta)
        extent = whole.there.shape[axis]
        order = np.r_[0:extent:2, 1:extent:2]
        first = piece.there.offset[axis] - whole.there.offset[axis]
        order = order[first : first + piece.there.shape[axis]]
        stored = _with_axis(piece.there, whole.there, axis)
        return cls(row, piece, inverse, stored, meta, order)

    @property
    def is_changed(self) -> bool:
        return self.order is not None or self.piece.factor != 1

    def changed(self, box: Box, filled: NDArray[Any]) -> tuple[Box, NDArray[Any]]:
        """The wanted elements of a stored region, in their order, and multiplied.

        Their box is in the coordinates of ``piece.there``.
        """
        axis = self.piece.alternating
        if self.order is not None and axis is not None:
            filled = filled.take(self.order, axis)
            box = _with_axis(box, self.piece.there, axis)
        if self.piece.factor != 1:
            dtype = np.dtype(self.meta.dtype)
            values = filled.view(dtype).astype(np.result_type(dtype, np.float32))
            values *= values.dtype.type(self.piece.factor)
            filled = values.astype(dtype).view(filled.dtype)
        return box, filled


def _with_axis(box: Box, other: Box, axis: int) -> Box:
    """The box with the range of another one along an axis."""
    offset = list(box.offset)
    shape = list(box.shape)
    offset[axis] = other.offset[axis]
    shape[axis] = other.shape[axis]
    return Box(tuple(offset), tuple(shape))


@dataclass(frozen=True, eq=False)
class _MappedTarget(Target):
    """Hands regions of ``into`` to the reader of the stored tensors, in their axes."""

    rows: Sequence[_Part]
    into: Target

    def open(self, target: int, box: Box) -> NDArray[Any]:
        part = self.rows[target]
        if part.is_changed:
            return np.empty(box.shape, carried_dtype(part.meta.itemsize))
        return self._view(part, box)

    def _view(self, part: _Part, box: Box) -> NDArray[Any]:
        opened = self.into.open(part.row, part.inverse.maps(box))
        view: NDArray[Any] = part.piece.view(opened)
        return view

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        part = self.rows[target]
        if part.is_changed:
            box, changed = part.changed(box, filled)
            filled = self._view(part, box)
            filled[...] = changed
        self.into.close(part.row, part.inverse.maps(box), part.inverse.view(filled))

    def blob(self, target: int, data: bytes) -> None:
        raise BackendError(
            f"row {target} is a tensor, and {len(data)} bytes of an object came"
        )
