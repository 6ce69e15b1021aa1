"""A checkpoint mapped to Hugging Face's names and shapes by a table of rules. No data is copied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

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
            piece = next(filter(None, (p.within(box) for p in self.pieces[key])))
            inverse = piece.swapped(piece.key, piece.shape)
            rows.append((int(plan.target[row]), piece, inverse))
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
class _MappedTarget(Target):
    """Hands regions of ``into`` to the reader of the stored tensors, in their axes.

    ``rows``: for each row of the stored plan, the row of ``into``, the piece that it fills, and the
    piece in the opposite direction.
    """

    rows: Sequence[tuple[int, Piece, Piece]]
    into: Target

    def open(self, target: int, box: Box) -> NDArray[Any]:
        row, piece, inverse = self.rows[target]
        view: NDArray[Any] = piece.view(self.into.open(row, inverse.maps(box)))
        return view

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        row, _, inverse = self.rows[target]
        self.into.close(row, inverse.maps(box), inverse.view(filled))

    def blob(self, target: int, data: bytes) -> None:
        raise BackendError(
            f"row {target} is a tensor, and {len(data)} bytes of an object came"
        )
