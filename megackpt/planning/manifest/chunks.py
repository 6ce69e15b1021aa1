"""Chunks, and the manifest of all chunks of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megackpt.planning.box import Box, Boxes, Int64
from megackpt.planning.manifest.columns import joined, renumbered
from megackpt.planning.manifest.tensors import (
    DIGEST_BLOCK,
    DIGEST_SIZE,
    Digests,
    Int32,
    TensorEntry,
)


@dataclass(frozen=True, slots=True, eq=False)
class WriteResult:
    """The chunks that one rank has written, in the order of its SavePlan.

    A format may cut a row of the plan (``item``) into several chunks, whose ``boxes`` (global
    coordinates) tile the row's. ``digests`` holds ceil(length / DIGEST_BLOCK) rows for each
    chunk: xxh3-128 of each block of its raw bytes (for objects: of the blob).
    """

    item: Int64
    boxes: Boxes
    files: tuple[str, ...]
    file: Int32
    start: Int64
    length: Int64
    digests: Digests

    @classmethod
    def of_rows(
        cls,
        boxes: Boxes,
        files: Sequence[str],
        file: Int32,
        start: Int64,
        length: Int64,
        digests: Digests,
    ) -> WriteResult:
        """The result for a plan with these ``boxes``, each row of which is one chunk."""
        rows = np.arange(len(boxes), dtype=np.int64)
        return cls(rows, boxes, tuple(files), file, start, length, digests)


@dataclass(frozen=True, slots=True)
class Location:
    """Bytes ``[start, start + length)`` of a file named relative to the checkpoint's directory."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The view of one row of Chunks. ``digests`` is empty if none were computed."""

    box: Box
    location: Location
    digests: Digests = field(repr=False)
    writer: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The stored chunks of all tensors. ``file`` is -1 before they are written.

    ``digests`` has the rows that ``block_bounds`` numbers, or is empty.
    """

    tensor: Int32
    boxes: Boxes
    writer: Int32  # rank that wrote it
    file: Int32
    start: Int64
    length: Int64
    digests: Digests

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def block_bounds(self) -> Int64:
        """n + 1 row numbers into ``digests``: those of chunk i are ``bounds[i]:bounds[i + 1]``."""
        counts = -(-self.length // DIGEST_BLOCK)
        return np.concatenate(
            [np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)]
        )

    def blocks(self, rows: Int64, bounds: Int64) -> Int64:
        """The rows of ``digests`` of these chunks; ``bounds`` are ``block_bounds``."""
        counts = np.diff(bounds)[rows]
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        starts: Int64 = np.repeat(bounds[rows] - (ends - counts), counts)
        return starts + np.arange(total)

    def take(self, rows: Int64, bounds: Int64) -> Chunks:
        """These rows; ``bounds`` are ``block_bounds``."""
        return Chunks(
            self.tensor[rows],
            self.boxes.take(rows),
            self.writer[rows],
            self.file[rows],
            self.start[rows],
            self.length[rows],
            self.digests[self.blocks(rows, bounds)]
            if len(self.digests)
            else self.digests,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """Every tensor's meta, grid and chunks in a checkpoint.

    Attributes:
        encoding: the meaning of a chunk's location. "raw": the C-order bytes of its box (for
            objects: of the blob). "native": bytes that only the format's backend can decode.
            "noted": raw, but the common state holds notes of a file's author, which ``load``
            leaves out.
        save_id: the uuid (hex) of the save that wrote it; "" for foreign checkpoints.
    """

    tensors: tuple[TensorEntry, ...]
    grids: tuple[tuple[int, ...] | None, ...]
    chunks: Chunks
    files: tuple[str, ...] = ()
    encoding: str = "raw"
    backend: tuple[str, int] = ("", 0)
    save_id: str = ""

    @classmethod
    def of(
        cls,
        tensors: Iterable[TensorEntry],
        rows: Sequence[tuple[int, Box, str, int, int]],
    ) -> Manifest:
        """Without digests. A row is a chunk: tensor's number, box, file, start, length."""
        entries = tuple(tensors)
        files: dict[str, int] = {}
        chunks = Chunks(
            np.array([number for number, *_ in rows], np.int32),
            Boxes.of(box for _, box, *_ in rows),
            np.full(len(rows), -1, np.int32),
            np.array(
                [files.setdefault(file, len(files)) for _, _, file, _, _ in rows],
                np.int32,
            ),
            np.array([start for *_, start, _ in rows], np.int64),
            np.array([length for *_, length in rows], np.int64),
            np.zeros((0, DIGEST_SIZE), np.uint8),
        )
        return cls(entries, (None,) * len(entries), chunks, tuple(files))

    def numbers(self) -> dict[str, int]:
        """Key -> number in ``tensors``."""
        return {entry.key: i for i, entry in enumerate(self.tensors)}

    def chunk(self, i: int, bounds: Int64 | None = None) -> Chunk:
        """Row ``i``; pass ``chunks.block_bounds`` when asking for many."""
        c = self.chunks
        bounds = c.block_bounds if bounds is None else bounds
        digests = c.digests[bounds[i] : bounds[i + 1]] if len(c.digests) else c.digests
        file = self.files[c.file[i]] if c.file[i] >= 0 else ""
        return Chunk(
            c.boxes.row(i, len(self.tensors[c.tensor[i]].meta.shape)),
            Location(file, int(c.start[i]), int(c.length[i])),
            digests,
            int(c.writer[i]),
        )

    def chunks_of(self, key: str) -> list[Chunk]:
        number = self.numbers()[key]
        bounds = self.chunks.block_bounds
        return [
            self.chunk(int(i), bounds)
            for i in np.flatnonzero(self.chunks.tensor == number)
        ]

    def located(self, results: Sequence[WriteResult]) -> Manifest:
        """This manifest with the chunks that the ranks report.

        Its chunks must be in the order of plan_save: by rank, and within a rank as in its plan.
        """
        files: dict[str, int] = {}
        file = [renumbered(r.file, r.files, files) for r in results]
        first = np.searchsorted(self.chunks.writer, np.arange(len(results))).tolist()
        tensor = [
            self.chunks.tensor[r.item + begin]
            for r, begin in zip(results, first, strict=True)
        ]
        chunks = Chunks(
            joined(tensor, np.int32),
            Boxes.concat([r.boxes for r in results]).widened(self.chunks.boxes.width),
            np.repeat(
                np.arange(len(results), dtype=np.int32), [len(r.item) for r in results]
            ),
            file=joined(file, np.int32),
            start=joined([r.start for r in results], np.int64),
            length=joined([r.length for r in results], np.int64),
            digests=np.concatenate(
                [r.digests for r in results] or [np.zeros((0, DIGEST_SIZE), np.uint8)]
            ),
        )
        return replace(self, chunks=chunks, files=tuple(files))


class TensorParts:
    """The manifests of single tensors, each made in time that depends on that tensor alone."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._bounds = manifest.chunks.block_bounds
        self._order = np.argsort(manifest.chunks.tensor, kind="stable")
        counts = np.bincount(manifest.chunks.tensor, minlength=len(manifest.tensors))
        self._first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    def rows(self, number: int) -> Int64:
        """The chunks of tensor ``number``: row i of its part is ``rows(number)[i]`` here."""
        return self._order[self._first[number] : self._first[number + 1]]

    def part(self, number: int) -> Manifest:
        """The manifest of tensor ``number`` alone."""
        chunks = self._manifest.chunks.take(self.rows(number), self._bounds)
        return replace(
            self._manifest,
            tensors=self._manifest.tensors[number : number + 1],
            grids=self._manifest.grids[number : number + 1],
            chunks=replace(chunks, tensor=np.zeros_like(chunks.tensor)),
        )

    def excerpt(self, numbers: Sequence[int]) -> Manifest:
        """The manifest of these tensors, in this order, and of the files that they are in."""
        whole = self._manifest
        rows = [self.rows(number) for number in numbers]
        chunks = whole.chunks.take(
            np.concatenate([np.zeros(0, np.int64), *rows]), self._bounds
        )
        used, file = np.unique(chunks.file, return_inverse=True)
        tensor: Int32 = np.repeat(np.arange(len(rows)), list(map(len, rows))).astype(
            np.int32
        )
        return replace(
            whole,
            tensors=tuple(whole.tensors[number] for number in numbers),
            grids=tuple(whole.grids[number] for number in numbers),
            chunks=replace(
                chunks,
                tensor=tensor,
                file=(file - (used[:1] < 0).sum()).astype(np.int32),
            ),
            files=tuple(whole.files[number] for number in used.tolist() if number >= 0),
        )
