"""torch_dist without ``.metadata``: megackpt reads it by its index, stock DCP finds no checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import megackpt
from megackpt import ShardedObject, ShardedTensor, Strategy
from megackpt.checkpoint.run_directory import list_run
from megackpt.dcp import FileSystemReader
from megackpt.errors import BackendError, CorruptCheckpoint, NotACheckpoint
from megackpt.manager import CheckpointManager
from megackpt.strategies import backend_named
from megackpt.testing import ThreadedGroup

WITHOUT = Strategy("torch_dist", options={"torch_metadata": False})
WITH = Strategy("torch_dist")
ROWS = 12


def state(rank: int, ranks: int, value: float) -> dict[str, Any]:
    """The even rows of a tensor, one object of each rank, and the common state."""
    count = ROWS // ranks
    first = rank * count
    rows = torch.arange(first, first + count, dtype=torch.float32)[:, None]
    weight = (rows + value).expand(count, 8).contiguous()
    return {
        "w": ShardedTensor.from_rank_offsets("w", weight, (0, rank, ranks)),
        "rng": ShardedObject("rng", {"value": value}, (1,), (0,), rank),
        "step": value,
    }


def save(path: Path, value: float, strategy: Strategy = WITHOUT) -> None:
    def run(group: ThreadedGroup) -> None:
        held = state(group.rank, group.size, value)
        megackpt.save(held, path, strategy, process_group=group)

    ThreadedGroup.run(2, run)


def check(path: Path, value: float, ranks: int) -> None:
    """The checkpoint holds this, bit for bit, for so many ranks."""

    def run(group: ThreadedGroup) -> None:
        asked = state(group.rank, ranks, -1.0)
        got = megackpt.load(asked, path, process_group=group)
        wanted = state(group.rank, ranks, value)
        assert torch.equal(got["w"], wanted["w"].data)
        assert (got["rng"], got["step"]) == ({"value": value}, value)

    ThreadedGroup.run(ranks, run)
    assert megackpt.verify(path).ok


def names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def test_it_has_our_index_only_and_is_read_at_other_parallelism(tmp_path: Path) -> None:
    save(tmp_path / "a", 1.0)
    save(tmp_path / "b", 1.0, WITH)
    assert names(tmp_path / "b") - names(tmp_path / "a") == {".metadata"}
    for ranks in (1, 2, 3):
        check(tmp_path / "a", 1.0, ranks)
    whole = megackpt.load_plain_tensors(tmp_path / "a")
    assert torch.equal(whole["w"], state(0, 1, 1.0)["w"].data)
    assert not megackpt.verify(tmp_path / "a").foreign


def test_damage_is_found(tmp_path: Path) -> None:
    save(tmp_path / "a", 1.0)
    file = max((tmp_path / "a").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[data.index(torch.tensor([2.0] * 8).numpy().tobytes())] ^= 1
    file.write_bytes(data)
    assert any("'w'" in problem for problem in megackpt.verify(tmp_path / "a").problems)
    with pytest.raises(CorruptCheckpoint, match="'w'"):
        check(tmp_path / "a", 1.0, 1)


@pytest.mark.parametrize("order", [(WITH, WITHOUT), (WITHOUT, WITH)])
def test_one_kind_replaces_the_other(
    tmp_path: Path, order: tuple[Strategy, Strategy]
) -> None:
    for value, strategy in enumerate(order):
        save(tmp_path / "a", value, strategy)
        check(tmp_path / "a", value, 1)
        there = ".metadata" in names(tmp_path / "a")
        assert there == (strategy is WITH)
    assert names(tmp_path) == {"a"}


def test_a_conversion_writes_the_metadata(tmp_path: Path) -> None:
    save(tmp_path / "a", 1.0)
    megackpt.convert(tmp_path / "a", tmp_path / "b", "torch_dist")
    check(tmp_path / "b", 1.0, 3)
    found = {"w": torch.zeros(ROWS, 8)}
    dcp.load(found, checkpoint_id=tmp_path / "b")
    assert torch.equal(found["w"], state(0, 1, 1.0)["w"].data)
    megackpt.convert(tmp_path / "b", tmp_path / "c", WITHOUT)
    assert ".metadata" not in names(tmp_path / "c")
    check(tmp_path / "c", 1.0, 2)


def test_stock_dcp_finds_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "a", 1.0)
    with pytest.raises(CheckpointException, match=r"a/\.metadata"):
        dcp.load({"w": torch.zeros(ROWS, 8)}, checkpoint_id=tmp_path / "a")
    with pytest.raises(NotACheckpoint, match=r"no \.metadata.*megackpt\.convert"):
        FileSystemReader(tmp_path / "a").read_metadata()


def test_a_save_of_stock_dcp_over_it_is_noticed(tmp_path: Path) -> None:
    save(tmp_path / "a", 1.0)
    dcp.save({"other": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    with pytest.raises(CorruptCheckpoint, match="holds two checkpoints"):
        check(tmp_path / "a", 1.0, 1)
    save(tmp_path / "a", 2.0)
    check(tmp_path / "a", 2.0, 1)
    assert ".metadata" not in names(tmp_path / "a")


def test_without_the_index_it_is_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "iter_0000001"
    save(path, 1.0)
    (path / "megackpt.index").unlink()
    with pytest.raises(NotACheckpoint, match="torch_metadata=False"):
        megackpt.load_plain_tensors(path)
    (step,) = list_run(tmp_path).steps
    assert step.complete is None
    assert "has neither megackpt.index nor .metadata" in step.reason


@pytest.mark.parametrize("strategy", [WITH, WITHOUT])
def test_a_damaged_index_is_moved_away_where_there_is_another_table(
    tmp_path: Path, strategy: Strategy
) -> None:
    save(tmp_path / "a", 1.0, strategy)
    index = tmp_path / "a" / "megackpt.index"
    data = bytearray(index.read_bytes())
    data[-20] ^= 1
    index.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="its own digest") as caught:
        check(tmp_path / "a", 1.0, 1)
    (problem,) = megackpt.verify(tmp_path / "a").problems
    for text in (problem, str(caught.value)):
        assert ("move megackpt.index away" in text) == (strategy is WITH)
    if strategy is WITH:
        index.unlink()  # the advice
        check(tmp_path / "a", 1.0, 2)


@pytest.mark.parametrize("damage", [lambda path: path.write_text("{}"), Path.unlink])
def test_no_message_advises_to_remove_the_only_table(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    save(tmp_path / "a", 1.0)
    config = tmp_path / "a" / "metadata.json"
    damage(config)
    with pytest.raises(CorruptCheckpoint, match=r"keep megackpt\.index") as caught:
        check(tmp_path / "a", 1.0, 1)
    assert "remove" not in str(caught.value)
    (problem,) = megackpt.verify(tmp_path / "a").problems
    assert "metadata.json" in problem
    assert "remove" not in problem
    save(tmp_path / "b", 5.0, WITH)
    config.write_bytes((tmp_path / "b" / "metadata.json").read_bytes())  # the advice
    check(tmp_path / "a", 1.0, 1)


@pytest.mark.parametrize("asynchronous", [False, "thread"])
def test_a_run(tmp_path: Path, asynchronous: bool | str) -> None:
    with CheckpointManager(
        tmp_path, WITHOUT, keep_last=1, asynchronous=asynchronous
    ) as manager:
        for step in (1, 2):
            manager.save(step, state(0, 1, step))
    assert ".metadata" not in names(tmp_path / "iter_0000002")
    assert not (tmp_path / "iter_0000001").exists()
    restored = CheckpointManager(tmp_path).restore(state(0, 1, -1), verify=True)
    assert restored is not None
    assert (restored.step, restored.state["step"]) == (2, 2)
    check(tmp_path / "iter_0000002", 2.0, 1)


def test_a_run_skips_a_step_that_lost_its_metadata_json(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path, WITHOUT) as manager:
        for step in (1, 2):
            manager.save(step, state(0, 1, step))
    (tmp_path / "iter_0000002" / "metadata.json").unlink()
    restored = CheckpointManager(tmp_path).restore(state(0, 1, -1))
    assert restored is not None
    assert restored.step == 1
    assert "iter_0000002/metadata.json is missing" in caplog.text
    listed = {step.name: step.format for step in list_run(tmp_path).steps}
    assert listed["iter_0000002"] == "torch_dist"


def test_commands_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megackpt.__main__ import main

    save(tmp_path / "a", 1.0)
    assert main(["show", str(tmp_path / "a")]) == 0
    assert "torch_dist" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "a")]) == 0
    options = ["--to", "torch_dist", "--option", "torch_metadata=false"]
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), *options]) == 0
    assert ".metadata" not in names(tmp_path / "b")
    check(tmp_path / "b", 1.0, 1)


def test_the_option_is_true_or_false() -> None:
    with pytest.raises(BackendError, match="torch_metadata must be True or False"):
        backend_named("torch_dist", torch_metadata=0)
