"""Directories and arguments: overwriting, odd names, wrong calls, moved and damaged files."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import (
    ShardedObject,
    ShardedTensor,
)
from megackpt.checkpoint import open_checkpoint
from megackpt.errors import (
    CheckpointExists,
    NotACheckpoint,
    ShardingError,
)
from megackpt.testing import ThreadedGroup
from tests.test_save_load import FORMATS, FULL, model, saved


def test_missing_and_empty_directories(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match=r"directory .*nowhere does not exist"):
        megackpt.load({}, tmp_path / "nowhere")
    with pytest.raises(NotACheckpoint, match="is not a distributed checkpoint"):
        megackpt.load({}, tmp_path)
    assert not megackpt.check_is_distributed_checkpoint(tmp_path)
    assert not megackpt.check_is_distributed_checkpoint(tmp_path / "nowhere")


def test_an_empty_state_is_a_checkpoint(tmp_path: Path) -> None:
    megackpt.save({}, tmp_path / "deep" / "down" / "ckpt")
    assert megackpt.load({}, tmp_path / "deep/down/ckpt") == {}
    assert megackpt.check_is_distributed_checkpoint(tmp_path / "deep/down/ckpt")


def test_overwriting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    megackpt.save({"n": 1}, tmp_path / "c")
    with pytest.raises(CheckpointExists):
        megackpt.save({"n": 2}, tmp_path / "c", overwrite=False)
    assert megackpt.load({}, tmp_path / "c") == {"n": 1}
    with caplog.at_level(logging.DEBUG, "megackpt.checkpoint"):
        megackpt.save({"n": 2}, tmp_path / "c", "zarr")
    replaced = [
        record
        for record in caplog.records
        if "replacing the checkpoint" in record.message
    ]
    assert [record.levelname for record in replaced] == [
        "DEBUG"
    ]  # overwriting is the default
    assert megackpt.load({}, tmp_path / "c") == {"n": 2}
    assert megackpt.get_default_load_sharded_strategy(tmp_path / "c").backend == "zarr"


@pytest.mark.parametrize(
    "key", ["a/b", "../up", "/abs", ".hidden", "ключ", "a b\n%41", "x" * 300, "__0"]
)
@pytest.mark.parametrize("strategy", FORMATS)
def test_odd_keys(tmp_path: Path, strategy: str, key: str) -> None:
    state = {
        "t": ShardedTensor.from_rank_offsets(key, torch.arange(5)),
        "o": ShardedObject(key + "!", [1], (1,), (0,)),
    }
    megackpt.save(state, tmp_path / "c" / "d", strategy)
    assert torch.equal(
        megackpt.load_plain_tensors(tmp_path / "c/d")[key], torch.arange(5)
    )
    assert megackpt.load(
        {"o": ShardedObject(key + "!", None, (1,), (0,))}, tmp_path / "c/d"
    )["o"] == [1]
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["d"]


def test_wrong_calls_raise() -> None:
    with pytest.raises(NotImplementedError, match="common_strategy"):
        megackpt.save({}, "x", common_strategy=("torch", 1))
    with pytest.raises(
        megackpt.BackendError, match="unknown format 'torch_dst': known are "
    ):
        megackpt.save({}, "x", "torch_dst")
    with pytest.raises(ValueError, match="dtype_policy"):
        megackpt.load({}, "x", dtype_policy="maybe")
    with pytest.raises(ValueError, match="key_map"):
        megackpt.load({}, "x", key_map=[("a", "b")])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="trusted takes classes, not 'os'"):
        megackpt.load({}, "x", trusted=("os",))  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match="content_metadata must be a dict"):
        megackpt.save({}, "x", content_metadata=[1])  # type: ignore[arg-type]
    with pytest.raises(
        megackpt.BackendError, match=r"does not take the options \{'files': 3\}"
    ):
        megackpt.save({}, "x", megackpt.Strategy(options={"files": 3}))
    with pytest.raises(
        megackpt.CheckpointingException, match="dedup_group must be a process group"
    ):
        megackpt.save({}, "x", megackpt.Strategy(dedup_group=3))
    with pytest.raises(megackpt.CheckpointingException, match="timeout must be"):
        megackpt.save({}, "x", timeout=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["", None, 3, b"x", "a\0b"])
def test_a_path_that_is_not_a_directory_raises(where: Any) -> None:
    for call in (
        lambda: megackpt.save({}, where),
        lambda: megackpt.load({}, where),
        lambda: megackpt.load_plain_tensors(where),
        lambda: megackpt.check_is_distributed_checkpoint(where),
    ):
        with pytest.raises(megackpt.CheckpointingException, match=r"directory"):
            call()


def test_a_directory_whose_name_is_no_text_can_be_saved_to_again(
    tmp_path: Path,
) -> None:
    for _ in range(3):  # the third one reuses the plan
        megackpt.save({"n": 1}, f"{tmp_path}/\udcff")


def test_one_ranks_wrong_argument_is_everybodys(tmp_path: Path) -> None:
    saved(tmp_path, "torch_dist", 3, 1, 1)
    arguments: list[tuple[dict[str, Any], str]] = [
        ({"strict": "maybe"}, "rank 1: ValueError: Invalid strict flag"),
        ({"checkpoint_dir": None}, "rank 1: a checkpoint's directory must be"),
        ({"sharded_strategy": "torch_dst"}, "rank 1: unknown format 'torch_dst'"),
        (
            {"sharded_strategy": "zarr"},
            "rank 1: .* holds the format 'torch_dist', not 'zarr'",
        ),
    ]
    for wrong, text in arguments:

        def run(group: ThreadedGroup, wrong: dict[str, Any] = wrong) -> None:
            right: dict[str, Any] = {"checkpoint_dir": tmp_path}
            given = right | wrong if group.rank == 1 else right
            megackpt.load(model(group.rank, 3, 1, 1), process_group=group, **given)

        told = {str(outcome) for outcome in ThreadedGroup.outcomes(3, run)}
        assert len(told) == 1
        assert re.search(text, told.pop())


def test_a_damaged_byte_is_found_and_named(tmp_path: Path) -> None:
    saved(tmp_path, "torch_dist", 1, 1, 1)
    manifest = open_checkpoint(tmp_path).manifest
    chunk = manifest.chunks_of("embedding")[0]
    file = tmp_path / chunk.location.file
    content = bytearray(file.read_bytes())
    content[chunk.location.start + 100] ^= 4
    file.write_bytes(content)
    asked = {"w": ShardedTensor.from_rank_offsets("embedding", torch.zeros(48, 16))}
    with pytest.raises(megackpt.CorruptCheckpoint, match="embedding"):
        megackpt.load(asked, tmp_path)
    assert torch.equal(
        megackpt.load(asked, tmp_path, verify=False)["w"] != FULL,
        FULL.reshape(-1)[25] == FULL,
    )
    assert any(
        "embedding" in str(problem) for problem in megackpt.verify(tmp_path).problems
    )


def test_other_formats_name_themselves(tmp_path: Path) -> None:
    saved(tmp_path, "zarr", 1, 1, 1)
    with pytest.raises(megackpt.BackendError, match="holds the format 'zarr'"):
        megackpt.load({}, tmp_path, "torch_dist")


def test_a_checkpoint_can_be_moved(tmp_path: Path) -> None:
    saved(tmp_path / "a", "torch_dist", 2, 1, 1)
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert torch.equal(megackpt.load_plain_tensors(tmp_path / "b")["embedding"], FULL)
