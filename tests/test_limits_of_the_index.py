"""What a save writes every reader takes.

Sizes, dimensions, places and keys that an index cannot hold are refused before anything is written, by an error that
names the key, and the checkpoint that was there remains.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.distributed.checkpoint.api import CheckpointException

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.dcp import FileSystemWriter
from megackpt.errors import CheckpointingException, ShardingError
from megackpt.testing import ThreadedGroup

FORMATS = ("torch_dist", "zarr", "safetensors")
PAIR = "\ud83d\ude00"  # U+1F600 in two halves, as JSON writes it
SMILE = "\U0001f600"


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "megackpt")


def piece(
    shape: tuple[int, ...],
    whole: tuple[int, ...],
    offset: tuple[int, ...],
    key: str = "large",
) -> ShardedTensor:
    return ShardedTensor(
        key, torch.ones(shape), torch.float32, shape, whole, offset, None
    )


def large_object(shape: tuple[int, ...]) -> ShardedObject:
    return ShardedObject("large", 1, shape, (0,) * len(shape))


REFUSED: dict[str, tuple[Callable[[], Any], bool]] = {
    "65 dimensions": (lambda: piece((1,) * 65, (1,) * 65, (0,) * 65), True),
    "empty, and 2^61": (lambda: piece((0, 1 << 61), (0, 1 << 61), (0, 0)), True),
    "empty, and 2^62": (lambda: piece((0, 1 << 62), (0, 1 << 62), (0, 0)), True),
    "a product beyond 2^63": (lambda: piece((2, 4), (1 << 40, 1 << 20), (0, 0)), False),
    "a product of 2^64": (lambda: piece((2, 4), (1 << 32, 1 << 32), (0, 0)), False),
    "an overflow that passes for covered": (
        lambda: piece((1, 8), ((1 << 61) + 1, 8), (0, 0)),
        True,
    ),
    "an expanded piece beyond 2^63": (
        lambda: ShardedTensor(
            "large",
            torch.ones(1, 1).expand(1 << 31, 1 << 31),
            torch.float32,
            (1 << 31, 1 << 31),
            (4, 4),
            (0, 0),
            None,
        ),
        False,
    ),
    "a piece outside": (lambda: piece((4,), (6,), (4,)), False),
    "a piece larger than all": (lambda: piece((4,), (2,), (0,)), False),
    "an empty piece outside": (lambda: piece((0, 4), (0, 4), (5, 0)), False),
    "an object of a grid of 65 axes": (lambda: large_object((1,) * 65), True),
    "an object of a grid beyond 2^62": (
        lambda: large_object((1 << 32, 1 << 30)),
        False,
    ),
}


@pytest.mark.parametrize("name", ["torch_dist", "zarr"])
@pytest.mark.parametrize("what", REFUSED)
def test_is_refused_before_a_byte(tmp_path: Path, what: str, name: str) -> None:
    made, validated = REFUSED[what]
    good = tmp_path / "a"
    megackpt.save(
        {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}, good, name
    )
    before = {path: path.read_bytes() for path in good.rglob("*") if path.is_file()}
    for asynchronous, validate in itertools.product((False, True), {validated, False}):
        options: dict[str, Any] = {
            "validate_access_integrity": validate,
            "async_sharded_save": asynchronous,
        }
        for directory in (good, tmp_path / "new"):
            with pytest.raises(ShardingError, match="large"):
                megackpt.save({"s": made()}, directory, name, **options)
    assert {
        path: path.read_bytes() for path in good.rglob("*") if path.is_file()
    } == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert torch.equal(megackpt.load_plain_tensors(good)["w"], torch.ones(3))


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_just_small_enough(tmp_path: Path, name: str) -> None:
    """The most dimensions; pieces of tensors of almost 2^62 bytes, at their ends; many empty tensors of many axes."""
    axes = 32 if name == "zarr" else 64  # more, zarr does not take
    held: dict[str, Any] = {
        "most": ShardedTensor.from_rank_offsets("most", torch.ones((1,) * axes)),
        "empty": ShardedTensor.from_rank_offsets("empty", torch.ones(0, (1 << 59) + 1)),
    }
    if name == "torch_dist":  # the others hold whole tensors, or cells of a grid
        whole = (1 << 40, (1 << 20) - 1)
        held["end"] = piece((2, 4), whole, (whole[0] - 2, whole[1] - 4), "end")
    held |= {
        f"{i}": ShardedTensor.from_rank_offsets(f"{i}", torch.ones((0,) * axes))
        for i in range(300)
    }
    options: dict[str, Any] = {"validate_access_integrity": False}
    megackpt.save(held, tmp_path / "a", name, **options)
    asked = {key: shard.without_data() for key, shard in held.items()}
    got = megackpt.load(asked, tmp_path / "a", **options)
    assert all(torch.equal(got[key], shard.data) for key, shard in held.items())
    assert not [
        p for p in megackpt.verify(tmp_path / "a").problems if "end" not in str(p)
    ]
    if name == "safetensors":
        megackpt.convert(tmp_path / "a", tmp_path / "b", "torch", workers=1)
        got = megackpt.load(asked, tmp_path / "b", **options)
        assert all(torch.equal(got[key], shard.data) for key, shard in held.items())


extents = st.one_of(
    st.integers(0, 3),
    st.sampled_from([1 << k for k in (10, 20, 30, 31, 32, 40, 59, 61, 62)]),
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_what_is_saved_is_loaded(tmp_path: Path, data: st.DataObject) -> None:
    """Small pieces anywhere in tensors of any size, and outside: refused by key, or had back."""
    axes = data.draw(st.integers(0, 4))
    whole = tuple(data.draw(extents) for _ in range(axes))
    shape = tuple(min(data.draw(st.integers(0, 2)), size) for size in whole)
    offset = tuple(
        data.draw(st.sampled_from([0, size - n, max(0, size - n - 1), size]))
        for size, n in zip(whole, shape, strict=True)
    )
    dtype = data.draw(st.sampled_from([torch.uint8, torch.float32, torch.complex128]))
    values = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    shard = ShardedTensor("drawn", values, dtype, shape, whole, offset, None)
    validate = data.draw(st.booleans())
    options: dict[str, Any] = {"validate_access_integrity": validate}
    try:
        megackpt.save({"s": shard}, tmp_path / "h", **options)
    except ShardingError as error:
        if "drawn" not in str(error):
            raise
        return
    got = megackpt.load(
        {"s": shard.without_data()}, tmp_path / "h", validate_access_integrity=False
    )
    assert torch.equal(got["s"], values)


def test_on_every_rank_alike(tmp_path: Path) -> None:
    def run(group: ThreadedGroup) -> None:
        shard = piece((1,), (2,), (group.rank,), "w")
        bad = piece((1,) * 65, (1,) * 65, (0,) * 65) if group.rank == 1 else shard
        megackpt.save({"a": shard, "b": bad}, tmp_path / "a", process_group=group)

    outcomes = ThreadedGroup.outcomes(2, run)
    assert all(isinstance(found, CheckpointingException) for found in outcomes)
    assert len({str(found) for found in outcomes}) == 1
    assert "large" in str(outcomes[0])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", FORMATS)
def test_a_key_of_two_surrogates_is_not_taken_for_the_character(
    tmp_path: Path, name: str
) -> None:
    def shard(key: str, value: float) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(f"x{key}y", torch.full((2,), value))

    megackpt.save({"a": shard(SMILE, 1.0)}, tmp_path / "a", name)
    for held in (
        {"a": shard(SMILE, 2.0), "b": shard(PAIR, 3.0)},
        {"b": shard(PAIR, 3.0)},
        {"a": ShardedObject(PAIR, 1, (1,), (0,))},
    ):
        with pytest.raises(ShardingError, match=r"\\ud83d\\ude00"):
            megackpt.save(held, tmp_path / "a", name)
    assert torch.equal(
        megackpt.load({"a": shard(SMILE, 0.0)}, tmp_path / "a")["a"], torch.ones(2)
    )


def test_ranks_do_not_mix_up_such_keys(tmp_path: Path) -> None:
    """A load asks for one of them on each rank: the coordinator must not take them for two main replicas of one."""
    smile = ShardedTensor.from_rank_offsets(SMILE, torch.ones(2))
    megackpt.save({"a": smile}, tmp_path / "a")

    def run(group: ThreadedGroup) -> set[str]:
        key = PAIR if group.rank else SMILE
        asked = ShardedTensor.from_rank_offsets(key, torch.zeros(2))
        _, missing, unexpected = megackpt.load(
            {"a": asked}, tmp_path / "a", process_group=group, strict="return_all"
        )
        assert not missing
        return unexpected

    assert ThreadedGroup.run(2, run) == [set(), {PAIR}]


def test_conversions_and_dcp(tmp_path: Path) -> None:
    """Other ways into an index refuse the same, before anything is there."""
    dims = torch.ones((1,) * 65)
    dcp.save({PAIR: torch.ones(2)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    with pytest.raises(ShardingError, match=r"\\ud83d\\ude00"):
        megackpt.convert(tmp_path / "stock", tmp_path / "b", "zarr", workers=1)
    for bad in (
        {"large": dims},
        {PAIR: torch.ones(2)},
        {"large": torch.ones(0, 1 << 61)},
    ):
        with pytest.raises(CheckpointException, match=r"large|\\ud83d\\ude00"):
            dcp.save(bad, storage_writer=FileSystemWriter(tmp_path / "b"), no_dist=True)
    assert not (tmp_path / "b").exists()
