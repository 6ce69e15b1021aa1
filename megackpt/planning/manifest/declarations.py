"""Declarations: the shards that ranks hold, as rows and as columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from megackpt.planning.box import Boxes, Groups, Int64, group_equal
from megackpt.planning.manifest.tensors import (
    Bool,
    Int32,
    ReplicaId,
    ShardId,
    TensorEntry,
    TensorMeta,
    is_main_replica,
    is_unnumbered,
    joined,
    merged_tables,
    pack_table,
    unpack_table,
)


@dataclass(frozen=True, slots=True)
class Declaration:
    """A ShardedTensor (or object) without its data: the view of one row of Declarations."""

    shard: ShardId
    meta: TensorMeta
    replica_id: ReplicaId
    flexible: bool
    nbytes: int
    rank: int

    @property
    def main(self) -> bool:
        return is_main_replica(self.replica_id)


@dataclass(frozen=True, eq=False)
class Declarations:
    """The shards of one rank or, after ``merge``, of all ranks in rank order.

    ``flexible`` is ShardedTensor.allow_shape_mismatch. ``nbytes`` is the size of the shard's
    data, for objects a nominal one. ``domains`` numbers, for each rank in these columns, the
    group of ranks in which one replica may be written for another.
    """

    tensors: tuple[TensorEntry, ...]
    tensor: Int32  # number in `tensors`
    boxes: Boxes
    replica_ids: tuple[ReplicaId, ...]  # distinct ones
    replica: Int32  # number in `replica_ids`
    flexible: Bool
    nbytes: Int64
    rank: Int32
    domains: tuple[int, ...] = (0,)  # one for each rank, in rank order

    def __len__(self) -> int:
        return len(self.tensor)

    @cached_property
    def main(self) -> Bool:
        table = np.array([is_main_replica(r) for r in self.replica_ids], dtype=np.bool_)
        return table[self.replica]

    @cached_property
    def shards(self) -> Groups:
        """The distinct shards: groups of rows with one box of one tensor, in tensors' order."""
        return group_equal(self.tensor, self.boxes)

    @property
    def mains(self) -> Int64:
        """The number of main replicas of each of ``shards``."""
        main = self.main[self.shards.order].astype(np.int64)
        return np.add.reduceat(main, self.shards.bounds[:-1])

    def numbered(self) -> Declarations:
        """All ranks' declarations, with a main replica for shards of unnumbered replicas only.

        It is the replica of the lowest rank. A shard with a main replica keeps it.
        """
        table = np.array([is_unnumbered(r) for r in self.replica_ids], dtype=np.bool_)
        if not table.any() or not len(self):
            return self
        shards = self.shards
        has_main = np.logical_or.reduceat(self.main[shards.order], shards.bounds[:-1])
        open_rows = table[self.replica[shards.order]] & ~has_main[shards.number]
        # Rows of a shard ascend, and ranks with them: the first one is the lowest rank's.
        _, first = np.unique(shards.number[open_rows], return_index=True)
        replica = self.replica.copy()
        replica[shards.order[open_rows][first]] = len(self.replica_ids)
        return replace(self, replica_ids=(*self.replica_ids, 0), replica=replica)

    def row(self, i: int) -> Declaration:
        entry = self.tensors[self.tensor[i]]
        return Declaration(
            ShardId(entry.key, self.boxes.row(i, len(entry.meta.shape))),
            entry.meta,
            self.replica_ids[self.replica[i]],
            bool(self.flexible[i]),
            int(self.nbytes[i]),
            int(self.rank[i]),
        )

    def rows(self) -> Iterator[Declaration]:
        return map(self.row, range(len(self)))

    def take(self, rows: Any) -> Declarations:
        """These rows (an index array or mask) with the same tables."""
        return replace(
            self,
            tensor=self.tensor[rows],
            boxes=self.boxes.take(rows),
            replica=self.replica[rows],
            flexible=self.flexible[rows],
            nbytes=self.nbytes[rows],
            rank=self.rank[rows],
        )

    @classmethod
    def of(cls, rows: Sequence[Declaration], domain: int = 0) -> Declarations:
        """The columns of one rank's declarations, in the order given."""
        tensors: dict[TensorEntry, int] = {}
        replicas: dict[ReplicaId, int] = {}
        number = [
            tensors.setdefault(TensorEntry(r.shard.key, r.meta), len(tensors))
            for r in rows
        ]
        replica = [replicas.setdefault(r.replica_id, len(replicas)) for r in rows]
        return cls(
            tuple(tensors),
            np.array(number, np.int32),
            Boxes.of(r.shard.box for r in rows),
            tuple(replicas),
            np.array(replica, np.int32),
            np.array([r.flexible for r in rows], np.bool_),
            np.array([r.nbytes for r in rows], np.int64),
            np.array([r.rank for r in rows], np.int32),
            (domain,),
        )

    @classmethod
    def of_boxes(
        cls,
        tensors: tuple[TensorEntry, ...],
        tensor: Int32,
        boxes: Boxes,
        nbytes: Int64,
        rank: Int32 | None = None,
    ) -> Declarations:
        """Each of these boxes declared once, by a main replica; without ``rank``, by rank 0."""
        zero = np.zeros(len(boxes), np.int32)
        if rank is None:
            rank = zero
        is_flexible = zero.astype(np.bool_)
        return cls(tensors, tensor, boxes, (0,), zero, is_flexible, nbytes, rank)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with a packed table: the coordinator receives one from every rank."""
        columns = [getattr(self, field.name) for field in fields(self)[1:]]
        return _received, (pack_table(self.tensors), *columns)

    @classmethod
    def merge(cls, parts: Sequence[Declarations]) -> Declarations:
        """All ranks' declarations in one: ``parts[i]`` are those of rank i. Tables are joined."""
        tensors, number = merged_tables(
            [p.tensors for p in parts], [p.tensor for p in parts]
        )
        replicas, replica = merged_tables(
            [p.replica_ids for p in parts], [p.replica for p in parts]
        )
        return cls(
            tensors,
            number,
            Boxes.concat([p.boxes for p in parts]),
            replicas,
            replica,
            joined([p.flexible for p in parts], np.bool_),
            joined([p.nbytes for p in parts], np.int64),
            joined([p.rank for p in parts], np.int32),
            tuple(d for p in parts for d in p.domains),
        )


def _received(table: bytes, *columns: Any) -> Declarations:
    return Declarations(unpack_table(table), *columns)
