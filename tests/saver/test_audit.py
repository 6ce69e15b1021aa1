"""The audit: replicas that differ are found, located and named; equal ones are not."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor, Strategy, events
from megackpt.checkpoint import open_checkpoint
from megackpt.errors import CheckpointingException, NotACheckpoint, ReplicaMismatch
from megackpt.manager import CheckpointManager
from megackpt.saver import audit
from megackpt.testing import ThreadedGroup

MIB = 1 << 20


def replicated(key: str, value: torch.Tensor, rank: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, value, replica_id=rank)


def state(group: ThreadedGroup, large: int = 3 * MIB) -> dict[str, Any]:
    """A large replicated tensor, small ones, and one of which each rank holds a half."""
    seed = torch.Generator().manual_seed(1)
    values = {
        "large": torch.randint(0, 255, (large,), generator=seed, dtype=torch.uint8),
        "small": torch.randn(100, generator=seed),
        "step": torch.tensor(7.0),
        "strided": torch.randn(64, 64, generator=seed).T,
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0),
    }
    shards = {key: replicated(key, t, group.rank) for key, t in values.items()}
    own = torch.full((1000,), float(group.rank))
    shards["own"] = ShardedTensor.from_rank_offsets(
        "own", own, (0, group.rank, group.size)
    )
    return shards


def flip(tensor: torch.Tensor, byte: int, bit: int = 0) -> None:
    """Flip a bit of a contiguous tensor."""
    tensor.view(-1).view(torch.uint8)[byte] ^= 1 << bit


def saves(
    path: Path,
    change: Callable[[dict[str, Any], int], None],
    ranks: int = 4,
    **options: Any,
) -> list[BaseException | None]:
    """The error of each rank of a save; ``change`` gets a rank's state before it is saved."""

    def run(group: ThreadedGroup) -> BaseException | None:
        mine = state(group)
        change(mine, group.rank)
        try:
            megackpt.save(mine, path, Strategy(**options), process_group=group)
        except CheckpointingException as error:
            return error
        return None

    return ThreadedGroup.run(ranks, run)


def nothing(_state: dict[str, Any], _rank: int) -> None:
    """Leave the replicas equal."""


@pytest.mark.parametrize("amount", ["sample", "full"])
@pytest.mark.parametrize("backend", ["torch_dist", "zarr", "safetensors"])
def test_equal_replicas_pass(tmp_path: Path, amount: str, backend: str) -> None:
    assert saves(tmp_path / "a", nothing, audit=amount, backend=backend) == [None] * 4


def test_a_flipped_bit_is_located(tmp_path: Path) -> None:
    def change(mine: dict[str, Any], rank: int) -> None:
        if rank == 2:
            flip(mine["large"].data, 2 * MIB + 5)

    errors = saves(tmp_path / "a", change, audit="full")
    assert {type(error) for error in errors} == {ReplicaMismatch}
    text = str(errors[0])
    assert all(str(error) == text for error in errors)
    assert "large" in text
    assert (
        "ranks 0, 1, 3 (majority) against rank 2, block 2 (from byte 2,097,152 of"
        in text
    )
    with pytest.raises(NotACheckpoint):
        megackpt.verify(tmp_path / "a")


def test_off_compares_nothing(tmp_path: Path) -> None:
    def change(mine: dict[str, Any], rank: int) -> None:
        mine["small"].data.fill_(rank)

    assert saves(tmp_path / "a", change) == [None] * 4


def test_a_sample_sees_every_block_within_its_turns(tmp_path: Path) -> None:
    """A flipped bit in a block is found in one of 16 saves, and small shards in each."""

    def run(group: ThreadedGroup) -> list[bool]:
        mine = state(group, 20 * MIB)
        found = []
        for turn in range(audit.TURNS + 1):
            if group.rank == 1 and turn == 1:
                flip(mine["large"].data, 7 * MIB)
            try:
                megackpt.save(
                    mine, tmp_path / "a", Strategy(audit="sample"), process_group=group
                )
                found.append(False)
            except ReplicaMismatch:
                found.append(True)
        return found

    one, *others = ThreadedGroup.run(2, run)
    assert all(other == one for other in others)
    assert sum(one[1:]) == 1

    def change(mine: dict[str, Any], rank: int) -> None:
        mine["step"].data += rank == 3

    errors = saves(tmp_path / "b", change, audit="sample")
    assert "'step'" in str(errors[0])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_warn_saves_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    def run(group: ThreadedGroup) -> Any:
        mine = state(group)
        if group.rank == 0:
            mine["small"].data[3] = 5.0
        strategy = Strategy(audit="full", on_mismatch="warn", balance=False)
        request = megackpt.save(
            mine,
            tmp_path / "a",
            strategy,
            async_sharded_save=asynchronous,
            process_group=group,
        )
        mine["small"].data.zero_()
        if request is not None:
            request.execute_sync()
        return megackpt.load(state(group), tmp_path / "a", process_group=group)

    seen: list[events.Event] = []
    with caplog.at_level(logging.WARNING, "megackpt"), events.watching(seen.append):
        loaded = ThreadedGroup.run(3, run)
    assert "ranks 1, 2 (majority) against rank 0, block 0" in caplog.text
    assert "stored is that of rank 0 (not the majority's)" in caplog.text
    assert loaded[2]["small"][3] == 5.0
    assert {event.error for event in seen} == {None}


def test_excluded_keys_are_not_compared(tmp_path: Path) -> None:
    def change(mine: dict[str, Any], rank: int) -> None:
        mine["small"].data[0] = rank

    options = {"audit": "full", "audit_exclude": ["sm*", "other"]}
    assert saves(tmp_path / "a", change, **options) == [None] * 4


def test_no_majority(tmp_path: Path) -> None:
    def change(mine: dict[str, Any], rank: int) -> None:
        mine["small"].data[0] = rank // 2

    errors = saves(tmp_path / "a", change, audit="full")
    assert "ranks 0, 1 against ranks 2, 3, no majority" in str(errors[3])


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1, 2], "rank 0 [1.0] against rank 1 [2.0], no majority"),
        ([1, 2, 1], "ranks 0, 2 [1.0] (majority) against rank 1 [2.0]"),
        ([1, 2, 3], "rank 0 [1.0] against rank 1 [2.0] against rank 2 [3.0], no maj"),
        ([1, 2, 2, 2], "ranks 1-3 [2.0] (majority) against rank 0 [1.0]; stored"),
        ([1, 2, 1, 2], "ranks 0, 2 [1.0] against ranks 1, 3 [2.0], no majority; stor"),
        (
            [1, 2, 3, 2],
            "ranks 1, 3 [2.0] against rank 0 [1.0] against rank 2 [3.0], no majority",
        ),
    ],
)
def test_the_sides_and_the_majority(
    tmp_path: Path, values: list[float], text: str
) -> None:
    """Replicas of a few bytes are shown, as are those of bfloat16."""

    def change(mine: dict[str, Any], rank: int) -> None:
        mine["step"].data.fill_(values[rank])
        half = torch.tensor([0.0, values[rank] / 8], dtype=torch.bfloat16)
        mine["half"] = replicated("half", half, rank)

    errors = saves(tmp_path / "a", change, len(values), audit="full")
    lines = str(errors[0]).splitlines()
    (step,) = [line for line in lines if line.startswith("  'step' []: ")]
    assert text in step
    (half,) = [line for line in lines if line.startswith("  'half' [0:2]: ")]
    eighths = re.sub(r"\[(\d)\.0\]", lambda found: f"[0.0, {int(found[1]) / 8}]", text)
    assert eighths in half


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.int8])
def test_small_values_of_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    def change(mine: dict[str, Any], rank: int) -> None:
        value = torch.full((2,), rank + 1.0).to(dtype)
        mine["value"] = replicated("value", value, rank)

    errors = saves(tmp_path / "a", change, 2, audit="full")
    text = "'value' [0:2]: rank 0 against rank 1, no majority"
    if dtype == torch.int8:
        text = "'value' [0:2]: rank 0 [1, 1] against rank 1 [2, 2], no majority"
    assert text in str(errors[0])


def test_ranks_that_differ_in_different_blocks(tmp_path: Path) -> None:
    def change(mine: dict[str, Any], rank: int) -> None:
        if rank > 1:
            flip(mine["large"].data, (rank - 2) * 2 * MIB)

    errors = saves(tmp_path / "a", change, audit="full")
    assert "ranks 0, 1, 3 (majority) against rank 2, block 0 (from" in str(errors[0])
    assert "ranks 0-2 (majority) against rank 3, block 2 (from" in str(errors[0])


def test_objects_are_not_compared(tmp_path: Path) -> None:
    """States of random number generators differ, and pickles of equal objects may."""

    def change(mine: dict[str, Any], rank: int) -> None:
        mine["rng"] = ShardedObject("rng", {"seed": rank}, (1,), (0,), rank)

    assert saves(tmp_path / "a", change, audit="full") == [None] * 4
    assert megackpt.verify(tmp_path / "a").ok


def test_experts_under_one_name(tmp_path: Path) -> None:
    """Ranks of expert parallelism whose different experts have one key."""

    def change(mine: dict[str, Any], rank: int) -> None:
        expert = torch.full((8, 8), float(rank))
        mine["expert"] = replicated("mlp.experts.weight", expert, rank)

    errors = saves(tmp_path / "a", change, audit="full")
    assert "mlp.experts.weight" in str(errors[1])
    assert "no majority" in str(errors[1])


def test_adapters_of_which_each_rank_holds_its_own_part(tmp_path: Path) -> None:
    """LoRA shards that are declared as replicas: without an audit only one rank's is kept."""

    def change(mine: dict[str, Any], rank: int) -> None:
        part = torch.arange(64.0).chunk(4)[rank]
        mine["lora"] = replicated("layer.lora_A.weight", part, rank)

    assert saves(tmp_path / "a", change) == [None] * 4
    errors = saves(tmp_path / "b", change, audit="sample")
    assert "layer.lora_A.weight" in str(errors[0])


@pytest.mark.parametrize("amount", ["sample", "full"])
def test_every_third_save_is_audited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, amount: str
) -> None:
    """Small shards in all saves. With the plan of the first one, and after a restart."""
    options = {"audit": amount, "audit_every": 3, "on_mismatch": "warn"}
    strategy = Strategy(**options, audit_exclude=["bool"])
    found: list[set[str]] = []

    def run(group: ThreadedGroup) -> None:
        for _ in range(7):
            mine = state(group)
            if group.rank == 1:
                mine[
                    "large"
                ].data.zero_()  # all blocks differ, so that a sample sees it
                mine["step"].data += 1
                mine["bool"].data.zero_()
            megackpt.save(mine, tmp_path / "a", strategy, process_group=group)
            if group.rank == 0:
                found.append(set(re.findall(r"^  '(\w+)'", caplog.text, re.MULTILINE)))
                caplog.clear()

    for _ in range(2):
        with caplog.at_level(logging.WARNING, "megackpt"):
            ThreadedGroup.run(3, run)
    small, every = {"step"}, {"large", "step"}
    if amount == "sample":
        # Of three blocks, only some of the first saves compare one.
        assert [keys - {"large"} for keys in found] == [small] * 14
        assert all(keys == small for i, keys in enumerate(found) if i % 7 % 3)
    else:
        assert found == [every, small, small] * 2 + [every] + (
            [every, small, small] * 2 + [every]
        )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_second_save_of_a_run(tmp_path: Path, asynchronous: bool) -> None:
    """Of a manager, and from the first one on after a restart."""
    strategy = Strategy(audit="full", audit_every=2, on_mismatch="warn")

    def run(group: ThreadedGroup, first: int) -> None:
        with CheckpointManager(
            tmp_path, strategy, asynchronous=asynchronous, process_group=group
        ) as manager:
            mine = state(group)
            if first > 1:
                assert manager.restore(mine) is not None
            if group.rank == 1:
                mine["large"].data.fill_(10 + first)
            for step in range(first, first + 4):
                manager.save(step, mine)

    for first in (1, 5):
        ThreadedGroup.run(2, lambda group, first=first: run(group, first))
    found = {}
    for step in range(1, 9):
        opened = open_checkpoint(tmp_path / f"iter_{step:07d}")
        found[step] = opened.manifest.differing
    assert [step for step, keys in found.items() if keys == ("large",)] == [1, 3, 5, 7]
    assert not any(found[step] for step in (2, 4, 6, 8))


def test_small_shards_are_at_most_a_mebibyte_together(tmp_path: Path) -> None:
    """Between audits the smallest replicas are compared. Ranks hold different ones."""
    strategy = Strategy(audit="full", audit_every=100)
    sizes = {"a": 600 << 10, "b": 500 << 10, "c": 400 << 10, "d": 8}

    def run(group: ThreadedGroup) -> list[str]:
        found = []
        for changed in ["", *sizes]:
            mine = {}
            for key, size in sizes.items():
                value = torch.zeros(size, dtype=torch.uint8)
                value += key == changed and group.rank == 2
                if key != "c" or group.rank:
                    replica = group.rank - (key == "c")
                    mine[key] = replicated(key, value, replica)
            try:
                megackpt.save(mine, tmp_path / "a", strategy, process_group=group)
            except ReplicaMismatch as error:
                found += [key for key in sizes if f"'{key}'" in str(error)]
        return found

    # b, c and d are together less than a mebibyte, on each rank.
    assert ThreadedGroup.run(3, run) == [["b", "c", "d"]] * 3


def test_no_small_replicas_between_audits(tmp_path: Path) -> None:
    strategy = Strategy(audit="full", audit_every=2)

    def run(group: ThreadedGroup) -> None:
        large = torch.zeros(2 * MIB, dtype=torch.uint8)
        for _ in range(3):
            mine = {"large": replicated("large", large, group.rank)}
            megackpt.save(mine, tmp_path / "a", strategy, process_group=group)

    ThreadedGroup.run(2, run)


@pytest.mark.parametrize(
    "options",
    [
        {"audit": "all"},
        {"audit_every": 0},
        {"on_mismatch": "ignore"},
        {"audit_exclude": "a*"},
    ],
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(megackpt.BackendError, match=next(iter(options))):
        Strategy(**options)


def found_of(tmp_path: Path, count: int) -> int:
    """How many of so many single flipped bits are located: key, block and rank."""
    dice = random.Random(5)
    located = 0
    for number in range(count):
        key = dice.choice(["large", "small", "step"])
        wrong = dice.randrange(4)

        place = dice.randrange(3 * MIB)
        block = place // MIB

        def change(
            mine: dict[str, Any],
            rank: int,
            key: str = key,
            wrong: int = wrong,
            place: int = place,
        ) -> None:
            if rank == wrong:
                data = mine[key].data.view(-1)
                flip(data, place % data.nbytes, place % 8)

        if key != "large":
            block = 0
        errors = saves(tmp_path / str(number), change, audit="full")
        text = str(errors[0])
        place_in_text = rf" against rank {wrong}, block {block} "
        if key == "step":
            place_in_text = rf"\[7\.0\] \(majority\) against rank {wrong} \["
        located += (
            all(type(error) is ReplicaMismatch for error in errors)
            and f"'{key}'" in text
            and re.search(place_in_text, text) is not None
        )
    return located


def test_flipped_bits_are_located(tmp_path: Path) -> None:
    assert found_of(tmp_path, 6) == 6


@pytest.mark.campaign
def test_many_flipped_bits_are_located(tmp_path: Path) -> None:
    assert found_of(tmp_path, 300) == 300
