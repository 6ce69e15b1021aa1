"""Sharing: what ranks read and hand on gives each exactly what it wants, and nothing is read twice in a group."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from megackpt.errors import CorruptCheckpoint
from megackpt.planning import exchange_plan
from megackpt.planning.box import Box, Boxes
from megackpt.planning.exchange_plan import ExchangePlan, plan_exchange
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    Chunks,
    Declaration,
    Declarations,
    Manifest,
    ShardId,
    TensorEntry,
    TensorMeta,
)

Row = tuple[str, Box, str]


def manifest_of(
    tensors: dict[str, tuple[tuple[int, ...], list[Box]]], dtype: str = "uint8"
) -> Manifest:
    entries = tuple(
        TensorEntry(key, TensorMeta(shape, dtype))
        for key, (shape, _) in tensors.items()
    )
    rows = [(i, box) for i, (_, boxes) in enumerate(tensors.values()) for box in boxes]
    zeros = np.zeros(len(rows), np.int64)
    chunks = Chunks(
        np.array([i for i, _ in rows], np.int32),
        Boxes.of(box for _, box in rows),
        zeros.astype(np.int32),
        zeros.astype(np.int32),
        zeros,
        zeros + 100,
        np.zeros((0, 16), np.uint8),
    )
    return Manifest(entries, (None,) * len(entries), chunks, ("file",))


def wanted_of(
    manifest: Manifest, rows: list[Row], rank: int, domain: int = 0
) -> Declarations:
    shapes = {entry.key: entry.meta.shape for entry in manifest.tensors}
    declared = [
        Declaration(
            ShardId(key, box),
            TensorMeta(shapes[key], dtype),
            0,
            False,
            box.volume,
            rank,
        )
        for key, box, dtype in rows
    ]
    return Declarations.of(declared, domain)


def tiles(rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    boxes = [Box.whole(shape)]
    for _ in range(rng.randrange(5)):
        box = boxes.pop(rng.randrange(len(boxes)))
        axes = [a for a, n in enumerate(box.shape) if n > 1]
        if not axes:
            return [*boxes, box]
        axis = rng.choice(axes)
        at = rng.randrange(1, box.shape[axis])
        for start, extent in ((0, at), (at, box.shape[axis] - at)):
            offset, size = list(box.offset), list(box.shape)
            offset[axis] += start
            size[axis] = extent
            boxes.append(Box(tuple(offset), tuple(size)))
    return boxes


def part(rng: random.Random, shape: tuple[int, ...]) -> Box:
    pairs = [sorted((rng.randrange(n + 1), rng.randrange(n + 1))) for n in shape]
    return Box(tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs))


def carried_out(
    manifest: Manifest,
    wanted: list[list[Row]],
    shares: list[ExchangePlan],
    whole: dict[str, np.ndarray],
) -> list[Counter[tuple[str, str, int]]]:
    """Do as the shares say and look at what every rank has then; gives the elements that each rank has read."""
    landed = [
        [np.full(box.shape, -1, np.int64) for _, box, _ in rows] for rows in wanted
    ]
    reads: list[Counter[tuple[str, str, int]]] = []
    numbers = {
        key: np.arange(full.size).reshape(full.shape) for key, full in whole.items()
    }

    def place(rank: int, row: int, box: Box) -> np.ndarray:
        return landed[rank][row][(*box.relative_to(wanted[rank][row][1]).slices(), ...)]

    for rank, share in enumerate(shares):
        seen: Counter[tuple[str, str, int]] = Counter()
        for item in share.reads(manifest).rows():
            key, _, dtype = wanted[rank][item.target]
            assert item.chunk.box.contains(item.box)
            place(rank, item.target, item.box)[...] = whole[key][item.box.slices()]
            seen.update(
                (key, dtype, n)
                for n in numbers[key][item.box.slices()].ravel().tolist()
            )
        reads.append(seen)
    for rank, share in enumerate(shares):
        for peer in range(len(shares)):
            sent = np.flatnonzero(share.sends.peer == peer).tolist()
            got = np.flatnonzero(shares[peer].receives.peer == rank).tolist()
            assert len(sent) == len(got)
            for a, b in zip(sent, got, strict=True):
                source, target = (
                    int(share.sends.row[a]),
                    int(shares[peer].receives.row[b]),
                )
                ndim = len(wanted[rank][source][1].shape)
                box = share.sends.boxes.row(a, ndim)
                assert box == shares[peer].receives.boxes.row(b, ndim)
                assert wanted[rank][source][0] == wanted[peer][target][0]
                assert wanted[rank][source][2] == wanted[peer][target][2]
                region = place(rank, source, box)
                assert (region >= 0).all(), "handed on before it was read"
                target_region = place(peer, target, box)
                assert (target_region == -1).all(), "landed twice"
                target_region[...] = region
    for rank, rows in enumerate(wanted):
        for (key, box, _), found in zip(rows, landed[rank], strict=True):
            assert (found == whole[key][box.slices()]).all()
    return reads


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a test are small; as many go together as of a model's large ones."""
    monkeypatch.setattr(exchange_plan, "SMALL_READS", 1)


@given(st.integers(0, 10**9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_everybody_gets_what_it_wants_and_nothing_is_read_twice_in_a_group(
    seed: int,
) -> None:
    rng = random.Random(seed)
    exchange_plan.SMALL_READS = rng.choice((1, 16))  # the fixture puts it back
    tensors = {}
    for i in range(rng.randrange(1, 4)):
        shape = tuple(rng.randrange(1, 7) for _ in range(rng.randrange(4)))
        tensors[f"t{i}"] = (shape, tiles(rng, shape))
    manifest = manifest_of(tensors)
    whole = {
        k: np.arange(int(np.prod(s, dtype=int))).reshape(s)
        for k, (s, _) in tensors.items()
    }
    ranks = rng.randrange(1, 5)
    domains = [rng.randrange(2) for _ in range(ranks)]
    usual = [(key, part(rng, shape)) for key, (shape, _) in tensors.items()]
    wanted: list[list[Row]] = []
    for _ in range(ranks):
        rows = []
        for _ in range(rng.randrange(5)):
            key = rng.choice(list(tensors))
            shape = tensors[key][0]
            key, box = rng.choice(
                [(key, part(rng, shape)), (key, Box.whole(shape)), rng.choice(usual)]
            )
            rows.append((key, box, rng.choice(["uint8", "uint8", "float64"])))
        wanted.append(rows)
    parts = [wanted_of(manifest, rows, r, domains[r]) for r, rows in enumerate(wanted)]
    shares = plan_exchange(parts, manifest)
    reads = carried_out(manifest, wanted, shares, whole)
    for domain in set(domains):
        members = [r for r in range(ranks) if domains[r] == domain]
        read = sum((reads[r] for r in members), Counter())
        needed = {
            (key, dtype, n)
            for r in members
            for key, box, dtype in wanted[r]
            for n in whole[key][box.slices()].ravel().tolist()
        }
        assert read == Counter(needed)
        for r in members:
            assert {
                domains[p] for p in [*shares[r].sends.peer, *shares[r].receives.peer]
            } <= {domain}


def test_replicas_read_about_equally_much_and_what_one_alone_wants_it_reads() -> None:
    tensors = {f"w{i}": ((8,), [Box.whole((8,))]) for i in range(12)}
    manifest = manifest_of({**tensors, "own": ((4, 8), [Box.whole((4, 8))])})
    wanted: list[list[Row]] = [
        [
            *((key, Box.whole((8,)), "uint8") for key in tensors),
            ("own", Box((rank, 0), (1, 8)), "uint8"),
        ]
        for rank in range(4)
    ]
    shares = plan_exchange(
        [wanted_of(manifest, rows, r) for r, rows in enumerate(wanted)], manifest
    )
    for rank, share in enumerate(shares):
        assert share.boxes.volume.sum() == 4 * 8
        assert [i for i in share.target.tolist() if i == 12] == [12], rank
        assert len(share.sends) == len(share.receives) == 9


def test_rows_that_stand_apart_are_neither_handed_on_nor_received() -> None:
    shapes = {
        "a": ((4, 6), [Box((0, 0), (2, 6)), Box((2, 0), (2, 6))]),
        "b": ((4,), [Box.whole((4,))]),
    }
    manifest = manifest_of(shapes)
    whole = {
        key: np.arange(int(np.prod(shape))).reshape(shape)
        for key, (shape, _) in shapes.items()
    }
    row = ("a", Box.whole((4, 6)), "uint8")
    wanted: list[list[Row]] = [
        [row, row, ("b", Box.whole((4,)), "uint8")],
        [row, row],
        [row],
    ]
    parts = [wanted_of(manifest, rows, r) for r, rows in enumerate(wanted)]
    apart = [np.array(rows, np.int64) for rows in ((1,), (0,), ())]
    shares = plan_exchange(parts, manifest, apart)
    reads = carried_out(manifest, wanted, shares, whole)
    assert (
        sum(reads[0].values()) + sum(reads[1].values()) + sum(reads[2].values())
        == 3 * 24 + 4
    )
    for share, rows in zip(shares, apart, strict=True):
        read = share.boxes.volume[np.isin(share.target, rows)].sum()
        assert read == 24 * len(rows)
        assert not np.isin([*share.sends.row, *share.receives.row], rows).any()


def test_a_large_chunk_is_read_by_all_and_cut_where_digest_blocks_end() -> None:
    row = 3 << 10  # bytes: 1024 rows are the fewest that end where a block ends
    shape = (1 << 15, row)
    manifest = manifest_of({"w": (shape, [Box.whole(shape)])})
    parts = [
        wanted_of(manifest, [("w", Box.whole(shape), "uint8")], rank)
        for rank in range(2)
    ]
    shares = plan_exchange(parts, manifest)
    read = [int(share.boxes.volume.sum()) for share in shares]
    assert sum(read) == (1 << 15) * row
    assert max(read) - min(read) <= exchange_plan.READ_UNIT
    for share in shares:
        assert (share.boxes.offset[:, 0] * row % DIGEST_BLOCK == 0).all()
        assert (share.boxes.volume < 2 * exchange_plan.READ_UNIT).all()
    whole = plan_exchange(parts, replace(manifest, encoding="native"))
    assert sorted(len(share.boxes) for share in whole) == [0, 1]


def test_objects_are_read_once_and_weigh_what_is_stored() -> None:
    manifest = manifest_of(
        {f"o{i}": ((1,), [Box((0,), (1,))]) for i in range(4)}, "object"
    )
    rows: list[Row] = [(f"o{i}", Box((0,), (1,)), "object") for i in range(4)]
    shares = plan_exchange(
        [wanted_of(manifest, rows, rank) for rank in range(2)], manifest
    )
    assert [len(share.chunk) for share in shares] == [2, 2]
    assert sorted(shares[0].target.tolist() + shares[0].receives.row.tolist()) == [
        0,
        1,
        2,
        3,
    ]


def test_small_neighbours_in_a_file_are_read_by_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange_plan, "SMALL_READS", 32)
    manifest = manifest_of({f"w{i}": ((8,), [Box.whole((8,))]) for i in range(16)})
    manifest = replace(
        manifest,
        chunks=replace(
            manifest.chunks, start=8 * manifest.chunks.tensor.astype(np.int64)
        ),
    )
    rows: list[Row] = [(f"w{i}", Box.whole((8,)), "uint8") for i in range(16)]
    wanted = [rows, rows[4:], rows]
    shares = plan_exchange(
        [wanted_of(manifest, rows, r) for r, rows in enumerate(wanted)], manifest
    )
    read = {
        (r, n)
        for r, share in enumerate(shares)
        for n in manifest.chunks.tensor[share.chunk].tolist()
    }
    assert len(read) == 16
    assert len({(r, n // 4) for r, n in read}) == 4
    assert {len(share.chunk) for share in shares} == {4, 8}


def test_nothing_wanted_and_holes() -> None:
    manifest = manifest_of({"w": ((4,), [Box((0,), (2,))])})
    (empty, some) = plan_exchange(
        [
            wanted_of(manifest, [], 0),
            wanted_of(manifest, [("w", Box((0,), (2,)), "uint8")], 1),
        ],
        manifest,
    )
    assert (len(empty.chunk), some.target.tolist(), len(some.sends)) == (0, [0], 0)
    with pytest.raises(CorruptCheckpoint, match="no stored chunk holds it"):
        plan_exchange(
            [wanted_of(manifest, [("w", Box((1,), (3,)), "uint8")], 0)], manifest
        )
