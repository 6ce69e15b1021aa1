"""What the shard map is told: exactly what the manifest or the declarations say, and every flaw."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.checkpoint import open_checkpoint
from megackpt.cli.report.map_data import (
    MAX_AXES,
    MAX_REGIONS,
    declarations_data,
    manifest_data,
)
from megackpt.planning.box import Box, Boxes
from megackpt.planning.coverage import uncovered
from megackpt.planning.manifest import (
    Chunks,
    Declaration,
    Declarations,
    Manifest,
    ReplicaId,
    ShardId,
    TensorEntry,
    TensorMeta,
)
from megackpt.planning.save_plan import assign, plan_save

Row = tuple[
    int, str, tuple[int, ...], Box, ReplicaId
]  # rank, key, global shape, box, replica id


def world(*rows: Row, dtypes: dict[int, str] | None = None) -> Declarations:
    """The declarations of all ranks; ``dtypes`` of those whose dtype is not float32."""
    parts: list[list[Declaration]] = [
        [] for _ in range(1 + max(row[0] for row in rows))
    ]
    for rank, key, shape, box, replica in rows:
        meta = TensorMeta(shape, (dtypes or {}).get(rank, "float32"))
        parts[rank].append(
            Declaration(ShardId(key, box), meta, replica, False, 4 * box.volume, rank)
        )
    return Declarations.merge([Declarations.of(part) for part in parts])


def stored(shape: tuple[int, ...], *boxes: Box) -> Manifest:
    """A checkpoint of one tensor, chunk i written by rank i."""
    count = len(boxes)
    length = np.array([4 * box.volume for box in boxes], np.int64)
    number = np.arange(count, dtype=np.int32)
    nothing = np.zeros((0, 16), np.uint8)
    chunks = Chunks(
        np.zeros(count, np.int32),
        Boxes.of(boxes, len(shape)),
        number,
        number,
        length,
        length,
        nothing,
    )
    entry = TensorEntry("w", TensorMeta(shape, "float32"))
    return Manifest(
        (entry,), (None,), chunks, tuple(f"{i}.bin" for i in range(count)), save_id="ab"
    )


def ragged(flat: list[int], lengths: list[int]) -> list[tuple[int, ...]]:
    return [tuple(flat[a:b]) for a, b in pairwise(accumulate(lengths, initial=0))]


def pieces(told) -> list[tuple]:
    """(key, offset, extent, writer, file, start, length) of each piece."""
    tensors, columns = told["tensors"], told["pieces"]
    owner = [t for t, count in enumerate(columns["count"]) for _ in range(count)]
    ndims = [tensors["ndim"][t] for t in owner]
    boxes = zip(
        ragged(columns["offset"], ndims), ragged(columns["extent"], ndims), strict=True
    )
    rest = [
        columns.get(name, [None] * len(owner))
        for name in ("writer", "file", "start", "length")
    ]
    return [
        (tensors["key"][t], *box, *place)
        for t, box, *place in zip(owner, boxes, *rest, strict=True)
    ]


def flaws(told) -> list[tuple]:
    """(key, box, count) of each region."""
    columns = told["flaws"]
    ndims = [told["tensors"]["ndim"][t] for t in columns["tensor"]]
    boxes = map(Box, ragged(columns["offset"], ndims), ragged(columns["extent"], ndims))
    keys = [told["tensors"]["key"][t] for t in columns["tensor"]]
    return list(zip(keys, boxes, columns["count"], strict=True))


@pytest.mark.parametrize("strategy", ["torch_dist", "zarr"])
def test_every_chunk_of_a_checkpoint_is_in_the_data(tmp_path, strategy) -> None:
    state = {
        "a": ShardedTensor.from_rank_offsets("a.weight", torch.ones(6, 4)),
        "b": ShardedTensor.from_rank_offsets("b", torch.tensor(1, dtype=torch.int64)),
        "c": ShardedTensor.from_rank_offsets(
            "c", torch.ones(3, 5, dtype=torch.bfloat16), prepend_axis_num=0
        ),
        "o": ShardedObject("o", {"x": 1}, (1,), (0,)),
        "iteration": 3,
    }
    megackpt.save(state, tmp_path / "checkpoint", strategy)
    manifest = open_checkpoint(tmp_path / "checkpoint").manifest
    told = manifest_data(manifest)
    expected = {
        (
            key,
            chunk.box.offset,
            chunk.box.shape,
            chunk.writer,
            *place(manifest, chunk.location),
        )
        for key, _ in manifest.tensors
        for chunk in manifest.chunks_of(key)
    }
    assert set(pieces(told)) == expected
    assert len(pieces(told)) == len(manifest.chunks)
    assert told["files"] == list(manifest.files)
    shapes = ragged(told["tensors"]["shape"], told["tensors"]["ndim"])
    dtypes = [told["dtypes"][n] for n in told["tensors"]["dtype"]]
    metas = zip(told["tensors"]["key"], map(TensorMeta, shapes, dtypes), strict=True)
    assert [TensorEntry(key, meta) for key, meta in metas] == list(manifest.tensors)
    assert not told["problems"]
    assert not flaws(told)


def place(manifest: Manifest, location) -> tuple[int, int, int]:
    file = manifest.files.index(location.file) if location.file else -1
    return file, location.start, location.length


def test_holders_and_the_writer_are_in_the_data() -> None:
    left, right = Box((0, 0), (2, 4)), Box((2, 0), (2, 4))
    declared = world(
        (0, "w", (4, 4), left, (0, 0)),
        (1, "w", (4, 4), right, (0, 0)),
        (2, "w", (4, 4), left, (0, 1)),
        (3, "w", (4, 4), right, (0, 1)),
    )
    told = declarations_data(declared, balance=True)
    writers = {
        tuple(declared.row(int(i)).shard.box.offset): int(declared.rank[i])
        for i in assign(declared)
    }
    assert {piece[1]: piece[3] for piece in pieces(told)} == writers
    assert told["ranks"] == 4
    assert not told["problems"]
    holders = told["holders"]
    assert ragged(holders["rank"], holders["count"]) == [(0, 2), (1, 3)]
    assert [told["replicas"][n] for n in holders["replica"]] == [
        ["(0, 0)", True],
        ["(0, 1)", False],
    ] * 2


def test_ranks_that_hold_nothing_are_idle() -> None:
    box = Box((0,), (4,))
    told = declarations_data(
        world((0, "w", (4,), box, 0), (3, "w", (4,), box, 1)), balance=True
    )
    assert (told["ranks"], told["idle"]) == (4, [1, 2])
    alone = Declarations.of(
        [
            Declaration(
                ShardId("w", box), TensorMeta((4,), "float32"), 0, False, 16, rank=5
            )
        ]
    )
    told = declarations_data(alone, balance=True)
    assert (told["ranks"], told["idle"]) == (1, [])


def test_without_balance_the_main_replicas_write() -> None:
    box = Box((0,), (4,))
    declared = world((0, "w", (4,), box, 1), (1, "w", (4,), box, 0))
    assert [p[3] for p in pieces(declarations_data(declared, balance=False))] == [1]


def test_holes_overlaps_and_boxes_out_of_bounds_are_located() -> None:
    declared = world(
        (0, "hole", (4, 4), Box((0, 0), (2, 4)), 0),
        (0, "overlap", (4,), Box((0,), (3,)), 0),
        (1, "overlap", (4,), Box((2,), (2,)), 0),
        (0, "outside", (4,), Box((0,), (4,)), 0),
        (1, "outside", (4,), Box((3,), (2,)), 1),
        (0, "copies", (), Box((), ()), 0),
        (1, "copies", (), Box((), ()), 0),
        (0, "sound", (4,), Box((0,), (4,)), 0),
        (0, "orphan", (4,), Box((0,), (4,)), 1),
    )
    told = declarations_data(declared, balance=True)
    assert flaws(told) == [
        ("hole", Box((2, 0), (2, 4)), 0),
        ("overlap", Box((2,), (1,)), 2),
        ("outside", Box((3,), (2,)), -1),
        ("copies", Box((), ()), 2),
        ("orphan", Box((0,), (4,)), 0),
    ]
    texts = uncovered(declared)
    keys = told["tensors"]["key"]
    assert {keys[number]: text for number, text in told["problems"]} == texts
    writers = {key: writer for key, _, _, writer, *_ in pieces(told)}
    assert writers["orphan"] == -1
    assert writers["sound"] == 0


def test_a_key_declared_in_two_ways_is_listed_twice_without_flaws() -> None:
    box = Box((0,), (4,))
    declared = world(
        (0, "w", (4,), box, 0), (1, "w", (4,), box, 0), dtypes={1: "int32"}
    )
    told = declarations_data(declared, balance=True)
    assert told["tensors"]["key"] == ["w", "w"]
    assert [n for n, _ in told["problems"]] == [0, 1]
    assert "in 2 ways" in told["problems"][0][1]
    assert not flaws(told)


def test_a_stored_tensor_with_a_hole_and_one_without_chunks() -> None:
    told = manifest_data(stored((4, 4), Box((0, 0), (1, 4)), Box((2, 0), (2, 4))))
    assert flaws(told) == [("w", Box((1, 0), (1, 4)), 0)]
    assert told["problems"] == [[0, ""]]
    assert flaws(manifest_data(stored((4, 4)))) == [("w", Box((0, 0), (4, 4)), 0)]
    assert not manifest_data(stored((0, 4)))["problems"]


def test_pieces_stand_in_the_order_of_their_places() -> None:
    told = manifest_data(
        stored(
            (4, 4), *(Box((r, c), (2, 2)) for r, c in [(2, 2), (0, 2), (2, 0), (0, 0)])
        )
    )
    assert [offset for _, offset, *_ in pieces(told)] == [
        (0, 0),
        (0, 2),
        (2, 0),
        (2, 2),
    ]


def test_regions_are_counted_only_so_far() -> None:
    told = manifest_data(stored((1000,), *(Box((2 * i,), (1,)) for i in range(500))))
    assert len(flaws(told)) == MAX_REGIONS == told["flaws"]["most"]


def test_a_plan_that_is_not_written_yet_has_no_files() -> None:
    part = Declarations.of(
        [
            Declaration(
                ShardId("w", Box((0,), (4,))),
                TensorMeta((4,), "float32"),
                0,
                False,
                16,
                0,
            )
        ]
    )
    told = manifest_data(plan_save([part])[1])
    assert pieces(told) == [("w", (0,), (4,), 0, -1, 0, 16)]
    assert told["facts"][0] == [
        "format",
        "not written yet",
    ]


def test_a_forged_tensor_of_many_axes_is_not_judged() -> None:
    ndim = 40  # judging that many would take years
    assert ndim > MAX_AXES
    chunks = Box((0,) * ndim, (2,) * ndim), Box((1,) * ndim, (2,) * ndim)
    told = manifest_data(stored((3,) * ndim, *chunks))
    assert len(pieces(told)) == 2
    assert not flaws(told)


def test_nothing_at_all() -> None:
    empty = Declarations.of([])
    assert pieces(declarations_data(empty, balance=True)) == []
    assert declarations_data(Declarations.merge([]), balance=True)["ranks"] == 0
    assert pieces(manifest_data(plan_save([empty])[1])) == []
