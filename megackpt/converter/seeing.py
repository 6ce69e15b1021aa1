"""A checkpoint seen through a table: its tensors under Hugging Face's names, in their shapes. Nothing is copied."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from megackpt.adapters.huggingface import Piece, Table, link
from megackpt.backends.base import Backend, Target
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

_NO_DIGESTS = np.zeros((0, 16), np.uint8)


def seen_through(table: Table, opened: Opened) -> Opened:
    """The checkpoint as the table has it. MismatchError where the table does not fit, with all that does not."""
    manifest = opened.manifest
    tensors = {
        (e.key, e.meta.shape): n
        for n, e in enumerate(manifest.tensors)
        if not e.meta.is_object
    }
    links = link(table, tensors, complete=True)
    entries: dict[str, TensorEntry] = {}
    made_of: dict[str, list[Piece]] = {}
    parts, chunks = TensorParts(manifest), _ChunkList()
    problems = []
    for (key, shape), pieces in links.items():
        number = tensors[key, shape]
        rows = parts.rows(number)
        boxes, dtype = (
            manifest.chunks.boxes.take(rows),
            manifest.tensors[number].meta.dtype,
        )
        for piece in pieces:
            if piece.tied:
                continue
            entry = TensorEntry(piece.key, TensorMeta(piece.shape, dtype))
            if entries.setdefault(piece.key, entry) != entry:
                problems.append(
                    f"{piece.key!r} would be of {dtype} and {entries[piece.key].meta.dtype}: cast the checkpoint before"
                )
            made_of.setdefault(piece.key, []).append(piece.swapped(key, shape))
            chunks.add(piece, entry, rows, boxes)
    if problems:
        raise MismatchError("\n".join(problems))
    seen = chunks.manifest(list(entries.values()), manifest)
    return replace(
        opened, backend=_Seen(opened.backend, manifest, made_of), manifest=seen
    )


class _ChunkList:
    """The parts of stored chunks that are pieces. As its ``start`` each bears the row of the chunk that it is of."""

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[Boxes, Int64]]] = {}

    def add(self, piece: Piece, entry: TensorEntry, rows: Int64, boxes: Boxes) -> None:
        ndim = len(piece.box.shape)
        low = np.maximum(boxes.offset[:, :ndim], piece.box.offset)
        extent = np.minimum(boxes.stop[:, :ndim], piece.box.stop) - low
        there = np.flatnonzero((extent > 0).all(axis=1))
        low, extent = low[there], extent[there]
        offset = np.tile(np.array(piece.there.offset, np.int64), (len(there), 1))
        shape = np.ones_like(offset)
        for axis, ours in enumerate(piece.axes):
            if ours is not None:
                offset[:, axis] += low[:, ours] - piece.box.offset[ours]
                shape[:, axis] = extent[:, ours]
        self.found.setdefault(entry.key, []).append((Boxes(offset, shape), rows[there]))

    def manifest(self, entries: Sequence[TensorEntry], source: Manifest) -> Manifest:
        found = [self.found[entry.key] for entry in entries]
        counts = [sum(len(rows) for _, rows in parts) for parts in found]
        tensor = np.repeat(np.arange(len(entries), dtype=np.int32), counts)
        boxes = Boxes.concat([boxes for parts in found for boxes, _ in parts])
        itemsize = np.array([entry.meta.itemsize for entry in entries], np.int64)[
            tensor
        ]
        nowhere = np.full(len(tensor), -1, np.int32)
        start = np.concatenate(
            [np.zeros(0, np.int64), *(rows for parts in found for _, rows in parts)]
        )
        chunks = Chunks(
            tensor, boxes, nowhere, nowhere, start, boxes.volume * itemsize, _NO_DIGESTS
        )
        grids = (None,) * len(entries)
        return replace(
            source,
            tensors=tuple(entries),
            grids=grids,
            chunks=chunks,
            encoding="native",
        )


@dataclass(frozen=True, eq=False)
class _Seen(Backend):
    """Reads what is seen out of what is stored: by the format ``of``, which knows the ``stored`` manifest."""

    of: Backend
    stored: Manifest
    made_of: Mapping[str, Sequence[Piece]]

    name: ClassVar[str] = "seen"
    version: ClassVar[int] = 1
    reads: ClassVar[Collection[int]] = ()

    def decoded(self, manifest: Manifest) -> Int64:
        return self.of.decoded(self.stored)[manifest.chunks.start]

    def read(self, root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
        chunks = plan.manifest.chunks
        landing, boxes = [], []
        for row, chunk in enumerate(plan.chunk.tolist()):
            key, meta = plan.manifest.tensors[chunks.tensor[chunk]]
            box = plan.boxes.row(row, len(meta.shape))
            piece = next(
                inside for piece in self.made_of[key] if (inside := piece.within(box))
            )
            landing.append((int(plan.target[row]), piece))
            boxes.append(piece.there)
        inner = LoadPlan(
            self.stored,
            chunks.start[plan.chunk],
            Boxes.of(boxes),
            np.arange(len(boxes)),
        )
        self.of.read(as_read_by(self.of, root), inner, _Landing(landing, into), verify)

    def files(self, *_: object, **__: object) -> NoReturn:
        raise BackendError(
            "a checkpoint that is seen through a table is read, not written"
        )

    write = finish = read_manifest = files


@dataclass(frozen=True, eq=False)
class _Landing:
    """The Target of what is stored: regions of ``into``, turned as they are stored."""

    rows: Sequence[tuple[int, Piece]]
    into: Target

    def open(self, target: int, box: Box) -> NDArray[Any]:
        row, piece = self.rows[target]
        view: NDArray[Any] = piece.view(self.into.open(row, self._wanted(target, box)))
        return view

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        row, piece = self.rows[target]
        back = piece.swapped(piece.key, piece.shape)
        self.into.close(row, self._wanted(target, box), back.view(filled))

    def blob(self, target: int, data: bytes) -> None:
        raise BackendError(
            f"row {target} is no tensor, and {len(data)} bytes of an object came"
        )

    def _wanted(self, target: int, box: Box) -> Box:
        """The region that is wanted where ``box`` is stored."""
        piece = self.rows[target][1]
        return piece.swapped(piece.key, piece.shape).maps(box)
