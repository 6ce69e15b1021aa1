"""A job's parallelism, and the declarations of each rank for tensors that are cut along its axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from megackpt.planning.box import Boxes, Int64
from megackpt.planning.manifest import Declarations, ReplicaId, TensorEntry

ANY = -1


@dataclass(frozen=True)
class Parallelism:
    """The shape of a job. Ranks are numbered as Megatron does: tensor first, then data, then pipeline."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1  # divides ``data``

    def __post_init__(self) -> None:
        if min(self.tensor, self.pipeline, self.data, self.expert) < 1:
            raise ValueError("every degree of parallelism is at least 1")
        if self.data % self.expert:
            raise ValueError(
                f"expert parallelism {self.expert} does not divide data parallelism {self.data}"
            )

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    def places(self) -> Iterator[tuple[int, int, int]]:
        """(stage, data, tensor) of each rank, in rank order."""
        for stage in range(self.pipeline):
            for data in range(self.data):
                for tensor in range(self.tensor):
                    yield stage, data, tensor


class Places:
    """Columns of boxes, and the ranks that hold each: one stage, expert group, tensor rank, data rank.

    Tensors that several ranks hold are replicas; ``ANY`` = on all of them.
    """

    def __init__(self, job: Parallelism) -> None:
        self.job = job
        self._boxes: list[Boxes] = []
        self._columns: list[
            Int64
        ] = []  # (n, 6): tensor, nbytes, stage, expert group, tensor rank, data rank

    def add(
        self,
        number: int | Int64,
        boxes: Boxes,
        nbytes: int | Int64,
        *,
        stage: int | Int64 = ANY,
        expert: int | Int64 = ANY,
        tensor: int | Int64 = ANY,
        data: int | Int64 = ANY,
    ) -> None:
        """Boxes of the tensors with these numbers; each argument one number for all boxes, or a column."""
        columns = np.empty((len(boxes), 6), np.int64)
        for i, column in enumerate((number, nbytes, stage, expert, tensor, data)):
            columns[:, i] = column
        self._boxes.append(boxes)
        self._columns.append(columns)

    def parts(self, tensors: Sequence[TensorEntry]) -> list[Declarations]:
        """The declarations of every rank. Common parts of ranks are worked out once, and are the same object."""
        job = self.job
        boxes, columns = Boxes.concat(self._boxes), np.concatenate(self._columns)
        by_stage = _by(2, columns, np.arange(len(columns)), job.pipeline)
        tables: dict[bytes, tuple[TensorEntry, ...]] = {}
        shared: dict[tuple[int, int, int], list[Declarations]] = {}
        found = []
        for rank, (stage, data, cut) in enumerate(job.places()):
            group = (stage, data % job.expert, cut)
            if group not in shared:
                rows = _living(columns, by_stage[stage % len(by_stage)], 4, cut)
                rows = _living(columns, rows, 3, data % job.expert)
                split = _by(5, columns, rows, job.data)
                shared[group] = [
                    _declared(tensors, boxes, columns, some, tables) for some in split
                ]
            several = shared[group]
            found.append(
                _of_rank(several[data % len(several)], rank, (stage, cut, data), job)
            )
        return found


def grid_pieces(shape: Sequence[int], pieces: Sequence[int]) -> tuple[Boxes, Int64]:
    """A tensor cut into ``pieces`` along each axis, which differ by one at most; and their numbers, a row an axis."""
    which = np.indices(pieces, np.int64).reshape(len(shape), math.prod(pieces))
    extents, counts = (
        np.array(shape, np.int64)[:, None],
        np.array(pieces, np.int64)[:, None],
    )
    low, high = which * extents // counts, (which + 1) * extents // counts
    # Contiguous rows: Boxes.take would copy all rows of another layout to give a few.
    return Boxes(
        np.ascontiguousarray(low.T), np.ascontiguousarray((high - low).T)
    ), which


def _living(columns: Int64, rows: Int64, column: int, place: int) -> Int64:
    there = columns[rows, column]
    found: Int64 = rows[(there == place) | (there == ANY)]
    return found


def _by(column: int, columns: Int64, rows: Int64, places: int) -> list[Int64]:
    """The rows of each position in this column; one entry if all positions have the same rows."""
    place = columns[rows, column]
    everywhere, own = rows[place == ANY], rows[place != ANY]
    if not len(own):
        return [rows]
    own = own[np.argsort(columns[own, column], kind="stable")]
    bounds = np.searchsorted(columns[own, column], np.arange(places + 1)).tolist()
    return [
        np.sort(np.concatenate([everywhere, own[low:high]]))
        for low, high in pairwise(bounds)
    ]


def _declared(
    tensors: Sequence[TensorEntry],
    boxes: Boxes,
    columns: Int64,
    rows: Int64,
    tables: dict[bytes, tuple[TensorEntry, ...]],
) -> Declarations:
    """Rows as some rank declares them; its replica ids are bits: the axes with copies (see _of_rank)."""
    mine = columns[rows]
    used, tensor = np.unique(mine[:, 0], return_inverse=True)
    table = tables.get(used.tobytes())
    if table is None:
        table = tables.setdefault(
            used.tobytes(), tuple(tensors[n] for n in used.tolist())
        )
    everywhere = mine[:, 2:] == ANY  # stage, expert group, tensor rank, data rank
    bits = (
        4 * everywhere[:, 0]
        + 2 * everywhere[:, 2]
        + everywhere[:, 3]
        + 8 * ~everywhere[:, 1]
    )
    copied, replica = np.unique(bits, return_inverse=True)
    return Declarations(
        table,
        tensor.astype(np.int32),
        boxes.take(rows),
        tuple(copied.tolist()),
        replica.astype(np.int32),
        np.zeros(len(rows), np.bool_),
        np.ascontiguousarray(mine[:, 1]),
        np.zeros(len(rows), np.int32),
    )


def _of_rank(
    shared: Declarations, rank: int, place: tuple[int, int, int], job: Parallelism
) -> Declarations:
    """These declarations as one rank's: its replica ids are (stage, tensor rank, data rank) where there are copies."""
    stage, cut, data = place
    table: list[ReplicaId] = [
        (
            stage * bool(bits & 4),
            cut * bool(bits & 2),
            (data // job.expert if bits & 8 else data) * (bits & 1),
        )
        for bits in shared.replica_ids
        if isinstance(bits, int)
    ]
    numbers = {replica_id: i for i, replica_id in enumerate(dict.fromkeys(table))}
    number = np.array([numbers[replica_id] for replica_id in table], np.int32)
    return replace(
        shared,
        replica_ids=tuple(numbers),
        replica=number[shared.replica],
        rank=np.full(len(shared), rank, np.int32),
    )
