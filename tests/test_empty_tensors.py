"""Tensors without elements, declared in whatever pieces, in every format: saved, loaded, saved again, converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import megackpt
from megackpt import ShardedTensor
from megackpt.testing import ThreadedGroup

FORMATS = ("torch_dist", "zarr", "safetensors")
Piece = tuple[tuple[int, ...], tuple[int, ...]]
PIECES: dict[str, tuple[tuple[int, ...], list[Piece]]] = {
    "whole": ((0, 4), [((0, 0), (0, 4))]),
    "halves": ((0, 4), [((0, 0), (0, 2)), ((0, 2), (0, 2))]),
    "uneven": ((0, 4), [((0, 0), (0, 1)), ((0, 1), (0, 3))]),
    "along the other axis": ((4, 0), [((0, 0), (1, 0)), ((1, 0), (3, 0))]),
    "the second first": ((0, 4), [((0, 1), (0, 3)), ((0, 0), (0, 1))]),
    "nothing, and all": ((0, 4), [((0, 1), (0, 0)), ((0, 0), (0, 4))]),
    "nothing, and uneven": (
        (0, 4),
        [((0, 1), (0, 0)), ((0, 0), (0, 1)), ((0, 1), (0, 3))],
    ),
    "a long axis": ((0, 1 << 40), [((0, 5), (0, 7))]),
}


def declared(whole: tuple[int, ...], pieces: list[Piece]) -> list[ShardedTensor]:
    return [
        ShardedTensor(
            "e", torch.zeros(shape), torch.float32, shape, whole, offset, None
        )
        for offset, shape in pieces
    ]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("what", PIECES)
def test_pieces_of_one_rank(tmp_path: Path, what: str, name: str) -> None:
    whole, pieces = PIECES[what]
    for _ in range(2):  # the second time with the same plan, over the first one
        megackpt.save(
            {"l": declared(whole, pieces), "w": torch.ones(1)}, tmp_path / "a", name
        )
        assert tuple(megackpt.load_plain_tensors(tmp_path / "a")["e"].shape) == whole
    asked = [shard.without_data() for shard in declared(whole, pieces)]
    got = megackpt.load({"l": asked}, tmp_path / "a")["l"]
    assert [tuple(piece.shape) for piece in got] == [shape for _, shape in pieces]
    assert megackpt.verify(tmp_path / "a").ok
    (tmp_path / "a" / "megackpt.index").unlink()  # by the format's own account
    assert tuple(megackpt.load_plain_tensors(tmp_path / "a")["e"].shape) == whole


@pytest.mark.parametrize("name", FORMATS)
def test_pieces_of_several_ranks_and_conversions(tmp_path: Path, name: str) -> None:
    whole, pieces = PIECES["the second first"]

    def run(group: ThreadedGroup) -> None:
        held = declared(whole, [pieces[group.rank]])
        for directory in ("a", "b", "b"):
            request = megackpt.save(
                {"l": held},
                tmp_path / directory,
                name,
                async_sharded_save=directory == "b",
                process_group=group,
            )
            if request is not None:
                queue = megackpt.AsyncCallsQueue(process_group=group)
                queue.schedule_async_request(request)
                queue.close()
        megackpt.load(
            {"l": [held[0].without_data()]}, tmp_path / "a", process_group=group
        )
        megackpt.save({"l": held}, tmp_path / "c", name, process_group=group)

    ThreadedGroup.run(2, run)
    for directory in ("a", "b", "c"):
        assert (
            tuple(megackpt.load_plain_tensors(tmp_path / directory)["e"].shape) == whole
        )
    for other in (*FORMATS, "torch"):
        megackpt.convert(tmp_path / "a", tmp_path / other, other, workers=1)
        assert tuple(megackpt.load_plain_tensors(tmp_path / other)["e"].shape) == whole


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_pieces(tmp_path: Path, data: st.DataObject) -> None:
    axes = data.draw(st.integers(1, 3))
    whole = [data.draw(st.integers(0, 5)) for _ in range(axes)]
    whole[data.draw(st.integers(0, axes - 1))] = 0
    pieces: list[Piece] = []
    for _ in range(data.draw(st.integers(1, 4))):
        offset = tuple(data.draw(st.integers(0, size)) for size in whole)
        shape = tuple(
            data.draw(st.integers(0, size - o))
            for size, o in zip(whole, offset, strict=True)
        )
        pieces.append((offset, shape))
    beside: dict[str, Any] = {
        "w": ShardedTensor.from_rank_offsets("w", torch.arange(3.0))
    }
    megackpt.save(
        {"l": declared(tuple(whole), pieces), **beside}, tmp_path / "h", "zarr"
    )
    got = megackpt.load_plain_tensors(tmp_path / "h")
    assert tuple(got["e"].shape) == tuple(whole)
    assert torch.equal(got["w"], torch.arange(3.0))
