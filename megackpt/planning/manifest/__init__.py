"""The values of planning: declarations of ranks, their plans, and the manifest of a checkpoint.

All are frozen. Many shards travel as columns (numpy arrays, one row a shard); the small
dataclasses are views of single rows. Keys and metas are in a table, and rows hold their numbers.

An object is a tensor of blobs: a ShardedObject of global shape (4, 2) at (1, 0) is the unit box
at (1, 0) of a tensor with dtype ``"object"``. The common state is such an object, with the
reserved key ``COMMON_KEY`` and without dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.errors import CorruptCheckpoint, join_truncated
from megackpt.planning.box import Box, Boxes, Int64, expand_ranges
from megackpt.planning.manifest.declarations import (
    COMMON as COMMON,
    COMMON_KEY as COMMON_KEY,
    DIGEST_BLOCK as DIGEST_BLOCK,
    DIGEST_SIZE as DIGEST_SIZE,
    ITEMSIZE as ITEMSIZE,
    LARGEST as LARGEST,
    MOST_AXES as MOST_AXES,
    NOMINAL_OBJECT as NOMINAL_OBJECT,
    OBJECT as OBJECT,
    UNNUMBERED as UNNUMBERED,
    Bool as Bool,
    Declaration as Declaration,
    Declarations as Declarations,
    Digests as Digests,
    Int32 as Int32,
    ReplicaId as ReplicaId,
    ShardId as ShardId,
    TensorEntry as TensorEntry,
    TensorMeta as TensorMeta,
    carried_dtype as carried_dtype,
    digest_rows as digest_rows,
    is_main_replica as is_main_replica,
    itemsizes as itemsizes,
    joined as joined,
    key_problem as key_problem,
    merged_tables,
    size_problem as size_problem,
    table_of as table_of,
    unique_key as unique_key,
)


@dataclass(frozen=True, slots=True, eq=False)
class WriteResult:
    """The chunks that one rank has written, in the order of its SavePlan.

    A format may cut a row of the plan (``item``) into several chunks, whose ``boxes`` (global
    coordinates) tile the row's. ``digests`` holds ceil(length / DIGEST_BLOCK) rows for each
    chunk: xxh3-128 of each block of its raw bytes (for objects: of the blob). ``note`` is for
    ``Backend.finish``, which finds it in ``Manifest.notes``.
    """

    item: Int64
    boxes: Boxes
    files: tuple[str, ...]
    file: Int32
    start: Int64
    length: Int64
    digests: Digests
    note: bytes = b""

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
        """The result for a plan with these ``boxes``: each row is one chunk."""
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


@dataclass(frozen=True, eq=False)
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

    @cached_property
    def block_bounds(self) -> Int64:
        """n + 1 row numbers into ``digests``: chunk i has the rows ``bounds[i]:bounds[i + 1]``."""
        counts = -(-self.length // DIGEST_BLOCK)
        return np.append(0, np.cumsum(counts, dtype=np.int64))

    def blocks(self, rows: Int64) -> Int64:
        """The rows of ``digests`` of these chunks."""
        starts = self.block_bounds[rows]
        return expand_ranges(starts, self.block_bounds[rows + 1] - starts)[1]

    def take(self, rows: Int64) -> Chunks:
        digests = self.digests
        if len(digests):
            digests = digests[self.blocks(rows)]
        return Chunks(
            self.tensor[rows],
            self.boxes.take(rows),
            self.writer[rows],
            self.file[rows],
            self.start[rows],
            self.length[rows],
            digests,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TensorValues:
    """A save's notes on the values of each tensor of a manifest.

    Attributes:
        nonfinite: how many elements are NaN or infinite; -1 if that was not counted.
        largest: the largest magnitude of the finite elements, as float32; -1 if it is not known.
    """

    nonfinite: Int64
    largest: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """Every tensor's meta, grid and chunks in a checkpoint.

    Attributes:
        encoding: the meaning of a chunk's location. "raw": the C-order bytes of its box (for
            objects: of the blob). "native": bytes that only the format's backend can decode.
            "noted": raw, but the common state holds notes of a file's author, which ``load``
            leaves out.
        save_id: the uuid (hex) of the save that wrote it; "" for foreign checkpoints.
        values: what the save has noted about the tensors' values, if it was asked to.
        differing: keys of the tensors whose replicas differed when they were saved; see
            ``Strategy.on_mismatch``.
        milliseconds: how long the save took up to its commit; 0 if that is not known.
        notes: for a save, the note of each rank in its WriteResult. The index does not have it.
        tables: the files without chunks that ``Backend.read_manifest`` read it from, but for
            ``metadata.json``. Our index does not have it: it names such files with their digests.
    """

    tensors: tuple[TensorEntry, ...]
    grids: tuple[tuple[int, ...] | None, ...]
    chunks: Chunks
    files: tuple[str, ...] = ()
    encoding: str = "raw"
    backend: tuple[str, int] = ("", 0)
    save_id: str = ""
    tables: tuple[str, ...] = ()
    values: TensorValues | None = None
    differing: tuple[str, ...] = ()
    milliseconds: int = 0
    notes: tuple[bytes, ...] = ()

    @classmethod
    def of(
        cls,
        tensors: Iterable[TensorEntry],
        rows: Sequence[tuple[int, Box, str, int, int]],
    ) -> Manifest:
        """Without digests. A row is a chunk: tensor's number, box, file, start, length."""
        entries = tuple(tensors)
        files, file = table_of(row[2] for row in rows)
        chunks = Chunks(
            np.array([row[0] for row in rows], np.int32),
            Boxes.of(row[1] for row in rows),
            np.full(len(rows), -1, np.int32),
            file,
            np.array([row[3] for row in rows], np.int64),
            np.array([row[4] for row in rows], np.int64),
            digest_rows(b""),
        )
        return cls(entries, (None,) * len(entries), chunks, files)

    def nonfinite(self) -> str:
        """The keys of tensors with noted NaN or infinite values, and how many; "" if none has."""
        if self.values is None:
            return ""
        counts = self.values.nonfinite
        named = [
            f"{self.tensors[i].key!r} ({counts[i]:,})"
            for i in np.flatnonzero(counts > 0).tolist()
        ]
        if not named:
            return ""
        return f"values that are NaN or infinite: {join_truncated(named, 10, ', ')}"

    def numbers(self) -> dict[str, int]:
        """Key -> number in ``tensors``."""
        return {entry.key: i for i, entry in enumerate(self.tensors)}

    def chunk(self, i: int) -> Chunk:
        """Row ``i``."""
        c = self.chunks
        digests = c.digests
        file = ""
        if len(digests):
            digests = digests[c.block_bounds[i] : c.block_bounds[i + 1]]
        if c.file[i] >= 0:
            file = self.files[c.file[i]]
        return Chunk(
            c.boxes.row(i, len(self.tensors[c.tensor[i]].meta.shape)),
            Location(file, int(c.start[i]), int(c.length[i])),
            digests,
            int(c.writer[i]),
        )

    def chunks_of(self, key: str) -> list[Chunk]:
        rows = np.flatnonzero(self.chunks.tensor == self.numbers()[key])
        return list(map(self.chunk, rows.tolist()))

    def located(self, results: Sequence[WriteResult]) -> Manifest:
        """This manifest with the chunks that the ranks report.

        Its chunks must be in the order of plan_save: by rank, and within a rank in the order of the
        rank's plan.
        """
        first = np.searchsorted(self.chunks.writer, np.arange(len(results)))
        counts = [len(result.item) for result in results]
        item = joined([result.item for result in results], np.int64)
        files, file = merged_tables(
            [result.files for result in results], [result.file for result in results]
        )
        chunks = Chunks(
            self.chunks.tensor[item + np.repeat(first, counts)],
            Boxes.concat([r.boxes for r in results]).widened(self.chunks.boxes.width),
            np.repeat(np.arange(len(results), dtype=np.int32), counts),
            file,
            joined([result.start for result in results], np.int64),
            joined([result.length for result in results], np.int64),
            np.concatenate(
                [self.chunks.digests, *(result.digests for result in results)]
            ),
        )
        notes = tuple(result.note for result in results)
        return replace(self, chunks=chunks, files=files, notes=notes)


class TensorParts:
    """Manifests of a few tensors, each made in time that depends on these tensors alone."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._order = np.argsort(manifest.chunks.tensor, kind="stable")
        counts = np.bincount(manifest.chunks.tensor, minlength=len(manifest.tensors))
        self._first = np.append(0, np.cumsum(counts))

    def rows(self, number: int) -> Int64:
        """The chunks of tensor ``number``: row i of its part is ``rows(number)[i]`` here."""
        return self._order[self._first[number] : self._first[number + 1]]

    def excerpt(self, numbers: Sequence[int]) -> Manifest:
        """The manifest of these tensors, in this order, and of the files that they are in."""
        whole = self._manifest
        rows = [self.rows(number) for number in numbers]
        chunks = whole.chunks.take(joined(rows, np.int64))
        tensor = np.repeat(np.arange(len(rows), dtype=np.int32), list(map(len, rows)))
        used = np.unique(chunks.file[chunks.file >= 0])
        file = np.where(chunks.file < 0, -1, np.searchsorted(used, chunks.file))
        return replace(
            whole,
            tensors=tuple(whole.tensors[number] for number in numbers),
            grids=tuple(whole.grids[number] for number in numbers),
            chunks=replace(chunks, tensor=tensor, file=file.astype(np.int32)),
            files=tuple(whole.files[number] for number in used.tolist()),
            values=None,
            differing=(),
        )


def listed(
    tensors: Iterable[TensorEntry],
    chunks: Iterable[tuple[int, Box, Location]],
    backend: tuple[str, int],
) -> Manifest:
    """The manifest from a format's table of contents, without digests.

    ``chunks`` are for each chunk its tensor's number, its box, and the location of its raw
    bytes. Raises CorruptCheckpoint for impossible values, types included: keys twice, unknown
    dtypes, shapes too large for an index, boxes beyond their tensor, lengths that differ from
    the box's.
    """
    entries = tuple(tensors)
    seen: set[str] = set()
    for key, (shape, dtype) in entries:
        named = type(key) is str and type(dtype) is str
        if (
            not named
            or key in seen
            or dtype not in ITEMSIZE
            or not _are_counts(shape)
            or size_problem(shape, dtype)
        ):
            raise CorruptCheckpoint(
                f"the table of contents has, twice or with impossible values, {key!r} of shape "
                f"{shape!r} and dtype {dtype!r}"
            )
        seen.add(key)
    rows = []
    for number, box, location in chunks:
        if not _is_possible(entries, number, box, location):
            raise CorruptCheckpoint(
                f"the table of contents has {box!r} of tensor {number!r} of {len(entries)} in "
                f"{location}, which cannot be"
            )
        rows.append((number, box, location.file, location.start, location.length))
    return replace(Manifest.of(entries, rows), backend=backend)


def _is_possible(
    entries: Sequence[TensorEntry], number: int, box: Box, location: Location
) -> bool:
    file = location.file
    start = location.start
    length = location.length
    if not _are_counts((number, start, length, *box.offset, *box.shape)):
        return False
    if number >= len(entries) or type(file) is not str or start + length >= LARGEST:
        return False
    meta = entries[number].meta
    if len(box.shape) != len(meta.shape) or not Box.whole(meta.shape).contains(box):
        return False
    if meta.is_object:
        return box.volume == 1
    return box.volume * meta.itemsize == length


def _are_counts(numbers: Iterable[object]) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)


# ---- The plans of one rank: of its part of a save, and of a load


@dataclass(frozen=True, slots=True)
class WriteItem:
    """One piece that one rank writes; the view of one row of a SavePlan.

    ``source`` is the row of the rank's Declarations that holds the data of ``shard.box``.
    """

    shard: ShardId
    meta: TensorMeta
    grid: tuple[int, ...] | None
    source: int

    @property
    def nbytes(self) -> int:
        """Size of the raw bytes (0 for objects, which are not serialised yet)."""
        return self.shard.box.volume * self.meta.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """One rank's part of a save, in the order of writing.

    ``places`` is for formats that keep each tensor whole in a file into which all ranks write:
    the location of each of ``tensors``, or None; see ``Backend.layout``.
    """

    rank: int
    tensors: tuple[TensorEntry, ...]
    grids: tuple[tuple[int, ...] | None, ...]  # one for each of `tensors`
    tensor: Int32
    boxes: Boxes
    source: Int32
    places: tuple[Location | None, ...] | None = None

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def lengths(self) -> Int64:
        """The raw bytes of each row; 0 for objects, which are not serialised yet."""
        return self.boxes.volume * itemsizes(self.tensors)[self.tensor]

    @property
    def nbytes(self) -> int:
        """The raw bytes of all rows."""
        return int(self.lengths.sum())

    def placed(self, places: Mapping[str, Location]) -> SavePlan:
        """This plan with the places of its tensors, given by key."""
        return replace(
            self, places=tuple(places.get(entry.key) for entry in self.tensors)
        )

    def row(self, i: int) -> WriteItem:
        number = self.tensor[i]
        entry = self.tensors[number]
        box = self.boxes.row(i, len(entry.meta.shape))
        return WriteItem(
            ShardId(entry.key, box), entry.meta, self.grids[number], int(self.source[i])
        )

    def rows(self) -> Iterator[WriteItem]:
        return map(self.row, range(len(self)))


@dataclass(frozen=True, slots=True)
class ReadItem:
    """One region to fetch from one chunk; the view of one row of a LoadPlan.

    ``box`` (global coordinates) lies within the chunk's box and within the wanted one.
    ``target`` is its row in the Declarations of the rank.
    """

    entry: TensorEntry
    chunk: Chunk
    box: Box
    target: int


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """The regions that one rank reads, and the chunks that hold them."""

    manifest: Manifest
    chunk: Int64  # row in manifest.chunks
    boxes: Boxes
    target: Int64

    def __len__(self) -> int:
        return len(self.chunk)

    def rows(self) -> Iterator[ReadItem]:
        for i in range(len(self)):
            chunk = int(self.chunk[i])
            entry = self.manifest.tensors[self.manifest.chunks.tensor[chunk]]
            box = self.boxes.row(i, len(entry.meta.shape))
            yield ReadItem(entry, self.manifest.chunk(chunk), box, int(self.target[i]))

    def take(self, rows: Any) -> LoadPlan:
        """The part of the plan that consists of these rows (an index array or mask)."""
        return replace(
            self,
            chunk=self.chunk[rows],
            boxes=self.boxes.take(rows),
            target=self.target[rows],
        )
