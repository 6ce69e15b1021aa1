"""A checkpoint mapped to Hugging Face's names and shapes by a table of rules. No data is copied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from megackpt.adapters.huggingface import Piece, Table, link
from megackpt.backends.base import Backend, Properties, Target
from megackpt.checkpoint import Opened, as_read_by
from megackpt.errors import BackendError, MismatchError
from megackpt.planning.box import Box, Boxes, Int64
from megackpt.planning.manifest import (
    Chunks,
    LoadPlan,
    Manifest,
    TensorEntry,
    TensorMeta,
    TensorParts,
)
from megackpt.storage import Storage


def map_checkpoint(table: Table, opened: Opened) -> Opened:
    """Return the checkpoint with the tensors that the table makes of its own.

    Raises MismatchError with everything that does not fit the table.
    """
    stored = opened.manifest
    numbers: dict[tuple[str, tuple[int, ...]], int] = {}
    for number, entry in enumerate(stored.tensors):
        if not entry.meta.is_object:
            numbers[entry.key, entry.meta.shape] = number
    entries: dict[str, TensorEntry] = {}
    pieces: defaultdict[str, list[Piece]] = defaultdict(list)
    # For each mapped tensor: the boxes of its chunks, and the stored chunk of each.
    boxes: defaultdict[str, list[Boxes]] = defaultdict(list)
    origins: defaultdict[str, list[Int64]] = defaultdict(list)
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
            pieces[piece.key].append(piece.swapped(key, shape))
            boxes[piece.key].append(mapped)
            origins[piece.key].append(rows[inside])
    if problems:
        raise MismatchError("\n".join(problems))
    counts = [sum(len(rows) for rows in origins[key]) for key in entries]
    tensor = np.repeat(np.arange(len(entries), dtype=np.int32), counts)
    itemsize = np.array([e.meta.itemsize for e in entries.values()], np.int64)
    all_boxes = Boxes.concat([part for key in entries for part in boxes[key]])
    no_file = np.full(len(tensor), -1, np.int32)
    chunk = [np.zeros(0, np.int64), *(r for key in entries for r in origins[key])]
    mapped_chunks = Chunks(
        tensor,
        all_boxes,
        no_file,
        no_file,
        np.concatenate(chunk),  # as "start": _MappedReader looks the stored chunk up
        all_boxes.volume * itemsize[tensor],
        np.zeros((0, 16), np.uint8),
    )
    manifest = replace(
        stored,
        tensors=tuple(entries.values()),
        grids=(None,) * len(entries),
        chunks=mapped_chunks,
        encoding="native",
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
        rows, boxes = [], []
        for row, chunk in enumerate(plan.chunk.tolist()):
            key, meta = plan.manifest.tensors[chunks.tensor[chunk]]
            box = plan.boxes.row(row, len(meta.shape))
            # A chunk is a part of one piece, so one piece has the whole box.
            piece = next(filter(None, (p.within(box) for p in self.pieces[key])))
            rows.append((int(plan.target[row]), piece))
            boxes.append(piece.there)
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


@dataclass(frozen=True, eq=False)
class _MappedTarget:
    """Hands regions of ``into`` to the reader of the stored tensors, in their axes.

    ``rows``: for each row of the stored plan, the row of ``into``, and the piece that it fills.
    """

    rows: Sequence[tuple[int, Piece]]
    into: Target

    def open(self, target: int, box: Box) -> NDArray[Any]:
        row, piece = self.rows[target]
        region = self.into.open(row, self._inverse(piece).maps(box))
        view: NDArray[Any] = piece.view(region)
        return view

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        row, piece = self.rows[target]
        inverse = self._inverse(piece)
        self.into.close(row, inverse.maps(box), inverse.view(filled))

    def blob(self, target: int, data: bytes) -> None:
        raise BackendError(
            f"row {target} is a tensor, and {len(data)} bytes of an object came"
        )

    @staticmethod
    def _inverse(piece: Piece) -> Piece:
        return piece.swapped(piece.key, piece.shape)
