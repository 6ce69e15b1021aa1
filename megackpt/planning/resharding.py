"""A stored checkpoint at another parallelism: what each rank of such a job would declare. For rehearsals of saves.

A manifest does not say which axis is cut by what; it is inferred, by these rules and no others:

* The leading axis of a tensor of several dimensions whose chunks all have extent 1 there is a stack of *layers*; so
  is a number in a key (``layers.12.``, ``blocks.12.``, ``h.12.``). Layers are dealt out to the pipeline stages in
  blocks. What belongs to no layer: keys with "embed" live on the first stage, keys with "output_layer", "lm_head" or
  "final" on the last; all others on every stage.
* In keys with "expert", the next such axis (or the number after ``experts.``) counts *experts*. They are dealt out
  to the expert-parallel groups in blocks.
* Of the axes that remain, the one with the most cuts is the *cut* axis: it is cut anew for the tensor-parallel ranks
  (and, ``fully_sharded``, for the data-parallel ones). Where a tensor has n times as many pieces as is usual, each
  rank gets n pieces (gated MLPs: 2).
* Whatever is not cut is a replica on each tensor-parallel and each data-parallel rank, and any of them may write it.
* Objects keep their shards, dealt out over the ranks; the common state is rank 0's.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megackpt.planning.box import Boxes, Int64
from megackpt.planning.manifest import (
    NOMINAL_OBJECT,
    Declarations,
    Manifest,
    ReplicaId,
    TensorEntry,
    TensorParts,
)

_NUMBERED = re.compile(r"(?:^|\.)(?:layers?|blocks?|h)\.(\d{1,9})\.")
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d{1,9})\.")
_LAST = ("output_layer", "lm_head", "final")
ANY = -1
_MOST = 8
"""Pieces that a rank may have of one tensor; where there are more, they have another reason."""


@dataclass(frozen=True)
class Parallelism:
    """The shape of a job. Ranks are numbered as Megatron does: tensor first, then data, then pipeline."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1  # divides ``data``
    fully_sharded: bool = False  # data-parallel ranks cut tensors, too (FSDP, ZeRO-3)

    def __post_init__(self) -> None:
        if min(self.tensor, self.pipeline, self.data, self.expert) < 1:
            raise ValueError("every degree of parallelism is at least 1")
        if self.data % self.expert:
            raise ValueError(f"expert parallelism {self.expert} does not divide data parallelism {self.data}")

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    def places(self) -> Iterator[tuple[int, int, int]]:
        """(stage, data, tensor) of each rank, in rank order."""
        for stage in range(self.pipeline):
            for data in range(self.data):
                for tensor in range(self.tensor):
                    yield stage, data, tensor


class Axes(NamedTuple):
    """What is known of one tensor: the axes that count layers, count experts, and are cut (None: there is none)."""

    layers: int | None
    experts: int | None
    cut: int | None
    pieces: int  # along the cut axis, as stored


@dataclass(frozen=True, eq=False)
class Resharded:
    """The declarations of all ranks, the axes of each tensor, and the keys whose cut axis does not divide evenly."""

    parts: list[Declarations]
    axes: dict[str, Axes]
    uneven: tuple[str, ...]


def reshard(manifest: Manifest, job: Parallelism) -> Resharded:
    """What every rank of a job of this shape would declare of the tensors and objects of a checkpoint."""
    stacked = TensorParts(manifest)
    axes = {e.key: _axes(e, stacked.part(i)) for i, e in enumerate(manifest.tensors) if not e.meta.is_object}
    usual = _usual_pieces(axes.values())
    rows = _Rows(job)
    counts = _numbered(manifest.tensors)
    uneven = []
    for number, entry in enumerate(manifest.tensors):
        if entry.meta.is_object:
            continue
        found = axes[entry.key]
        multiple = found.pieces // usual if usual and found.pieces % usual == 0 else 1
        multiple = multiple if multiple <= _MOST else 1
        if not rows.add_tensor(number, entry, found, multiple, counts):
            uneven.append(entry.key)
    objects = np.flatnonzero([e.meta.is_object for e in manifest.tensors])
    rows.add_objects(manifest, np.flatnonzero(np.isin(manifest.chunks.tensor, objects)))
    return Resharded(rows.parts(manifest.tensors), axes, tuple(uneven))


def _axes(entry: TensorEntry, part: Manifest) -> Axes:
    boxes, shape = part.chunks.boxes, entry.meta.shape
    cuts = [len(np.unique(boxes.offset[:, axis])) for axis in range(len(shape))]
    single = [1 < n == shape[axis] and bool((boxes.shape[:, axis] == 1).all()) for axis, n in enumerate(cuts)]
    free = 0
    layers = experts = None
    if len(shape) > 1 and single[0] and not _NUMBERED.search(entry.key):
        layers, free = 0, 1
    stacked = "expert" in entry.key and not _EXPERT.search(entry.key) and len(shape) > free + 1
    if stacked and single[free] and math.prod(shape[: free + 1]) <= len(boxes):
        experts, free = free, free + 1
    cut = max(range(free, len(shape)), key=lambda axis: cuts[axis], default=None)
    if cut is None or cuts[cut] < 2:
        return Axes(layers, experts, None, 1)
    return Axes(layers, experts, cut, cuts[cut])


def _usual_pieces(axes: Iterable[Axes]) -> int:
    """The number of pieces that most tensors have, or have twice (gated MLPs do); 0 if none is cut."""
    votes = Counter(found.pieces for found in axes if found.cut is not None)
    return max(votes, key=lambda n: (votes[n] + votes[2 * n], -n), default=0)


def _numbered(tensors: Sequence[TensorEntry]) -> dict[str, int]:
    """For each prefix of keys with a number in them (of a layer, of an expert) how many there are."""
    counts: dict[str, int] = defaultdict(int)
    for entry in tensors:
        for match in filter(None, (_NUMBERED.search(entry.key), _EXPERT.search(entry.key))):
            prefix = entry.key[: match.start(1)]
            counts[prefix] = max(counts[prefix], int(match[1]) + 1)
    return counts


class Places:
    """Columns of boxes, and on which ranks each is held: those of one stage, expert group, tensor rank, data rank.

    What is held on several ranks is replicas there; ``ANY`` = on all of them.
    """

    def __init__(self, job: Parallelism) -> None:
        self.job = job
        self._boxes: list[Boxes] = []
        self._columns: list[Int64] = []  # (n, 6): tensor, nbytes, stage, expert group, tensor rank, data rank

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
        """The declarations of every rank. What ranks have in common is worked out once, and is the same object."""
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
                shared[group] = [_declared(tensors, boxes, columns, some, tables) for some in split]
            several = shared[group]
            found.append(_of_rank(several[data % len(several)], rank, (stage, cut, data), job))
        return found


class _Rows(Places):
    """Places of the tensors and objects of a checkpoint."""

    def add_tensor(
        self, number: int, entry: TensorEntry, axes: Axes, multiple: int, counts: dict[str, int]
    ) -> bool:
        """All pieces of one tensor. False where the cut axis does not divide evenly."""
        job, shape = self.job, entry.meta.shape
        counted = [axis for axis in (axes.layers, axes.experts) if axis is not None]
        pieces = [extent if axis in counted else 1 for axis, extent in enumerate(shape)]
        wanted = job.tensor * (job.data if job.fully_sharded else 1) * multiple
        if axes.cut is not None:
            pieces[axes.cut] = min(wanted, shape[axes.cut])
        boxes, which = grid_pieces(shape, pieces)
        stage = _dealt(which, axes.layers, shape, _NUMBERED, entry.key, counts, job.pipeline)
        tensor = data = np.full(len(boxes), ANY)
        if axes.cut is not None:
            tensor = which[axes.cut] % job.tensor
            data = which[axes.cut] // job.tensor % job.data if job.fully_sharded else data
        self.add(
            number,
            boxes,
            boxes.volume * entry.meta.itemsize,
            stage=self._stage(entry.key) if isinstance(stage, int) and stage == ANY else stage,
            expert=_dealt(which, axes.experts, shape, _EXPERT, entry.key, counts, job.expert),
            tensor=tensor,
            data=data,
        )
        return axes.cut is None or shape[axes.cut] % wanted == 0

    def _stage(self, key: str) -> int:
        if "embed" in key:
            return 0
        return self.job.pipeline - 1 if any(word in key for word in _LAST) else ANY

    def add_objects(self, manifest: Manifest, chunks: Int64) -> None:
        """The stored shards of objects, dealt out over the ranks; the common state goes to rank 0."""
        job = self.job
        tensor = manifest.chunks.tensor[chunks].astype(np.int64)
        common = np.array([manifest.tensors[n].is_common for n in tensor], np.bool_)
        rank = np.where(common, 0, np.arange(len(chunks)) * job.ranks // max(1, len(chunks)))
        stage, inner = np.divmod(rank, job.data * job.tensor)
        data, cut = np.divmod(inner, job.tensor)
        boxes = manifest.chunks.boxes.take(chunks)
        self.add(tensor, boxes, NOMINAL_OBJECT, stage=stage, tensor=cut, data=data)


def grid_pieces(shape: Sequence[int], pieces: Sequence[int]) -> tuple[Boxes, Int64]:
    """A tensor cut into ``pieces`` along each axis, which differ by one at most; and their numbers, a row an axis."""
    which = np.indices(pieces, np.int64).reshape(len(shape), math.prod(pieces))
    extents, counts = np.array(shape, np.int64)[:, None], np.array(pieces, np.int64)[:, None]
    low, high = which * extents // counts, (which + 1) * extents // counts
    # Rows that lie together: of others, Boxes.take would copy all to give a few.
    return Boxes(np.ascontiguousarray(low.T), np.ascontiguousarray((high - low).T)), which


def _dealt(
    which: Int64,
    axis: int | None,
    shape: Sequence[int],
    pattern: re.Pattern[str],
    key: str,
    counts: dict[str, int],
    groups: int,
) -> Int64 | int:
    """To which of the groups each piece belongs: by its number on this axis, or the one in its key; else ANY."""
    if axis is not None:
        group: Int64 = which[axis] * groups // shape[axis]
        return group
    match = pattern.search(key)
    return int(match[1]) * groups // counts[key[: match.start(1)]] if match else ANY


def _living(columns: Int64, rows: Int64, column: int, place: int) -> Int64:
    there = columns[rows, column]
    found: Int64 = rows[(there == place) | (there == ANY)]
    return found


def _by(column: int, columns: Int64, rows: Int64, places: int) -> list[Int64]:
    """The rows of each of the places that this column tells; once, where these are all alike."""
    place = columns[rows, column]
    everywhere, own = rows[place == ANY], rows[place != ANY]
    if not len(own):
        return [rows]
    own = own[np.argsort(columns[own, column], kind="stable")]
    bounds = np.searchsorted(columns[own, column], np.arange(places + 1)).tolist()
    return [np.sort(np.concatenate([everywhere, own[low:high]])) for low, high in pairwise(bounds)]


def _declared(
    tensors: Sequence[TensorEntry],
    boxes: Boxes,
    columns: Int64,
    rows: Int64,
    tables: dict[bytes, tuple[TensorEntry, ...]],
) -> Declarations:
    """Rows as some rank declares them; its replica ids are bits that tell over what there are copies (see _of_rank)."""
    mine = columns[rows]
    used, tensor = np.unique(mine[:, 0], return_inverse=True)
    table = tables.get(used.tobytes())
    if table is None:
        table = tables.setdefault(used.tobytes(), tuple(tensors[n] for n in used.tolist()))
    everywhere = mine[:, 2:] == ANY  # stage, expert group, tensor rank, data rank
    bits = 4 * everywhere[:, 0] + 2 * everywhere[:, 2] + everywhere[:, 3] + 8 * ~everywhere[:, 1]
    copied, replica = np.unique(bits, return_inverse=True)
    return Declarations(
        table,
        tensor.astype(np.int32),
        boxes.take(rows),
        tuple(copied.tolist()),
        replica.astype(np.int32),
        np.zeros(len(rows), np.bool_),
        mine[:, 1],
        np.zeros(len(rows), np.int32),
    )


def _of_rank(shared: Declarations, rank: int, place: tuple[int, int, int], job: Parallelism) -> Declarations:
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
    return replace(shared, replica_ids=tuple(table), rank=np.full(len(shared), rank, np.int32))
