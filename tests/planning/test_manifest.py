"""Columns and their rows: nothing is lost between the two forms."""

from __future__ import annotations

import numpy as np
import pytest

from megackpt.distributed.wire_format import pack, unpack
from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    Chunks,
    Declaration,
    Declarations,
    Manifest,
    SavePlan,
    ShardId,
    TensorEntry,
    TensorMeta,
    WriteResult,
    is_main_replica,
)


def row(
    key: str,
    box: Box,
    shape: tuple[int, ...],
    rank: int,
    replica: int | tuple[int, ...] = 0,
) -> Declaration:
    meta = TensorMeta(shape, "bfloat16")
    return Declaration(ShardId(key, box), meta, replica, False, 2 * box.volume, rank)


RANKS = [
    [row("a", Box((0, 0), (2, 4)), (4, 4), 0), row("b", Box((), ()), (), 0, (0, 0, 0))],
    [],
    [row("b", Box((), ()), (), 2, (0, 0, 1)), row("a", Box((2, 0), (2, 4)), (4, 4), 2)],
]


@pytest.mark.parametrize(
    ("replica", "main"),
    [(0, True), (1, False), ((0, 0, 0), True), ((0, 1, 0), False), ((), True)],
)
def test_main_replicas(replica: int | tuple[int, ...], main: bool) -> None:
    assert is_main_replica(replica) is main


def test_rows_come_back_from_columns() -> None:
    for rows in RANKS:
        assert list(Declarations.of(rows).rows()) == rows


def test_merging_joins_tables_and_keeps_rank_order() -> None:
    merged = Declarations.merge(
        [Declarations.of(rows, domain=i) for i, rows in enumerate(RANKS)]
    )
    assert list(merged.rows()) == [r for rows in RANKS for r in rows]
    assert [entry.key for entry in merged.tensors] == ["a", "b"]
    assert merged.domains == (0, 1, 2)
    assert merged.main.tolist() == [True, True, False, True]
    assert len(Declarations.merge([])) == 0


@pytest.mark.parametrize("rows", RANKS)
def test_declarations_arrive_as_they_were_sent(rows: list[Declaration]) -> None:
    sent = Declarations.of(rows, domain=3)
    came: Declarations = unpack(pack(sent))
    assert list(came.rows()) == rows
    assert (came.tensors, came.replica_ids, came.domains) == (
        sent.tensors,
        sent.replica_ids,
        sent.domains,
    )


def test_numbers_that_need_eight_bytes_arrive() -> None:
    far = row("a", Box((1 << 40, 0), (1 << 33, 4)), (1 << 50, 4), 0)
    assert list(unpack(pack(Declarations.of([far]))).rows()) == [far]


@pytest.mark.parametrize("grids", [((2, 4), ()), (None, ()), (None, None)])
def test_a_plan_arrives_as_it_was_sent(
    grids: tuple[tuple[int, ...] | None, ...],
) -> None:
    """A grid of no axes, that of a tensor of no axes, is a grid, too."""
    own = Declarations.of(RANKS[0])
    sent = SavePlan(
        5, own.tensors, grids, own.tensor, own.boxes, np.arange(2, dtype=np.int32)
    )
    came: SavePlan = unpack(pack(sent))
    assert list(came.rows()) == list(sent.rows())
    assert (came.rank, came.grids) == (5, grids)


def test_shards_are_the_distinct_boxes() -> None:
    merged = Declarations.merge([Declarations.of(rows) for rows in RANKS])
    shards = merged.shards
    assert sorted(shards.rows(g).tolist() for g in range(len(shards))) == [
        [0],
        [1, 2],
        [3],
    ]


def test_located_puts_the_ranks_reports_in_plan_order() -> None:
    zeros = np.zeros(3, np.int64)
    chunks = Chunks(
        np.array([0, 0, 1], np.int32),
        Boxes.of([Box((0,), (4,)), Box((4,), (4,)), Box((0,), (2,))]),
        np.array([0, 1, 1], np.int32),
        np.full(3, -1, np.int32),
        zeros,
        zeros,
        np.zeros((0, 16), np.uint8),
    )
    tensors = (
        TensorEntry("a", TensorMeta((8,), "int8")),
        TensorEntry("b", TensorMeta((2,), "int8")),
    )
    manifest = Manifest(tensors, (None, None), chunks)
    assert manifest.chunk(0).location.file == ""

    def result(
        files: tuple[str, ...], file: list[int], length: list[int]
    ) -> WriteResult:
        blocks = sum(-(-n // DIGEST_BLOCK) for n in length)
        digests = np.full((blocks, 16), len(length), np.uint8)
        column = np.array(length, np.int64)
        boxes = {
            2: manifest.chunks.boxes.take([1, 2]),
            1: manifest.chunks.boxes.take([0]),
        }[len(length)]
        return WriteResult.of_rows(
            boxes, files, np.array(file, np.int32), column * 10, column, digests
        )

    located = manifest.located(
        [
            result(("x",), [0], [DIGEST_BLOCK + 1]),
            result(("unused", "y"), [1, 1], [4, 2]),
        ]
    )
    assert [located.chunk(i).location.file for i in range(3)] == ["x", "y", "y"]
    assert [located.chunk(i).location.start for i in range(3)] == [
        10 * (DIGEST_BLOCK + 1),
        40,
        20,
    ]
    assert [len(located.chunk(i).digests) for i in range(3)] == [2, 1, 1]
    assert [c.box for c in located.chunks_of("a")] == [Box((0,), (4,)), Box((4,), (4,))]
    assert located.numbers() == {"a": 0, "b": 1}
