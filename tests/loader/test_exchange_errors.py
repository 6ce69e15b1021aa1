"""An error in the exchange of one rank is raised on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor, Strategy
from megackpt.checkpoint import open_checkpoint
from megackpt.errors import RankFailure, RankLost
from megackpt.loader import load_operation
from megackpt.loader.load_session import LoadSession
from megackpt.testing import ThreadedGroup
from tests.loader.test_exchange import (
    ALWAYS,
    apart,  # noqa: F401 - a fixture for each test
    model,
    saved,
)


def stories(directory: Path, ranks: int = 3) -> list[BaseException]:
    def run(group: ThreadedGroup) -> None:
        megackpt.load(
            model(group.rank, 1, blank=True), directory, ALWAYS, process_group=group
        )

    found = ThreadedGroup.outcomes(ranks, run, timeout=10)
    assert all(isinstance(one, BaseException) for one in found), found
    return [one for one in found if isinstance(one, BaseException)]


def test_damage_that_one_rank_finds_is_everybodys(tmp_path: Path) -> None:
    saved(tmp_path, "torch_dist", 1, 3)
    manifest = open_checkpoint(tmp_path).manifest
    (chunk,) = manifest.chunks_of("float64")
    with open(tmp_path / chunk.location.file, "r+b") as file:
        file.seek(chunk.location.start)
        file.write(b"\xff\xfe\xfd")
    found = stories(tmp_path)
    assert {type(error) for error in found} == {megackpt.CorruptCheckpoint}
    assert {str(error) for error in found} == {str(found[0])}
    assert "'float64'" in str(found[0])
    assert str(found[0]).startswith("rank ")


def test_a_rank_that_cannot_read_stops_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, "torch_dist", 1, 3)
    read = LoadSession.read

    def refuse(*args: Any) -> None:
        if threading.current_thread().name == "rank 1":
            raise OSError(5, "Input/output error")
        read(*args)

    monkeypatch.setattr(LoadSession, "read", refuse)
    for error in stories(tmp_path):
        assert isinstance(error, megackpt.RankFailure)
        assert "rank 1: OSError: [Errno 5] Input/output error" in str(error)


@pytest.mark.parametrize("way", ["incoming", "outgoing"])
def test_an_error_while_bytes_are_handed_on_is_everybodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    saved(tmp_path, "torch_dist", 1, 3)
    whole = getattr(load_operation.TransferData, way)

    def fails(self: Any, rows: Any) -> Iterator[memoryview]:
        for number, piece in enumerate(whole(self, rows)):
            if number == 2 and threading.current_thread().name == "rank 2":
                raise RuntimeError("out of memory")
            yield piece

    monkeypatch.setattr(load_operation.TransferData, way, fails)
    for error in stories(tmp_path):
        assert isinstance(error, megackpt.RankFailure)
        assert list(error.failures) == [2]
        assert "failure in the stage 'exchange'" in str(error)
        assert "rank 2: RuntimeError: out of memory" in str(error)


def test_all_other_ranks_name_a_rank_that_leaves_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, "torch_dist", 1, 3)

    def interrupted(self: Any, rows: Any) -> Iterator[memoryview]:
        if threading.current_thread().name == "rank 1":
            raise KeyboardInterrupt
        yield from whole(self, rows)

    whole = load_operation.TransferData.outgoing
    monkeypatch.setattr(load_operation.TransferData, "outgoing", interrupted)
    found = stories(tmp_path)
    assert isinstance(found[1], KeyboardInterrupt)
    for error in (found[0], found[2]):
        assert isinstance(error, megackpt.RankLost)
        assert "rank 1 left: KeyboardInterrupt" in str(error)


def test_mismatches_raise_before_a_tensor_changes(tmp_path: Path) -> None:
    """What the planning of a shared load finds stands in one voice, and no tensor has changed."""

    def run(group: ThreadedGroup) -> None:
        megackpt.save(model(group.rank, 1), tmp_path, process_group=group)
        asked = model(group.rank, 1, blank=True)
        asked["bias"] = ShardedTensor.from_rank_offsets(
            "bias", torch.ones(8), replica_id=group.rank
        )
        with pytest.raises(megackpt.MismatchError, match="Global shape mismatch"):
            megackpt.load(asked, tmp_path, ALWAYS, process_group=group)
        assert not asked["float32"].data.any()

    ThreadedGroup.run(2, run)


def test_a_load_group_that_is_not_a_process_group_raises(tmp_path: Path) -> None:
    megackpt.save({"a": 1}, tmp_path)
    with pytest.raises(
        megackpt.CheckpointingException, match="load_group must be a process group"
    ):
        megackpt.load({}, tmp_path, Strategy(exchange="always", load_group=3))


def test_no_memory_between_two_collectives_raises_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = load_operation.TransferData.of

    def run(group: ThreadedGroup) -> None:
        def state():
            return {
                "w": ShardedTensor.from_rank_offsets(
                    "w", torch.ones(64), replica_id=group.rank
                )
            }

        megackpt.save(state(), tmp_path / "a", process_group=group)

        def of(*args: Any) -> Any:
            if threading.current_thread().name == "rank 1":
                raise MemoryError("no memory for the parcels")
            return real(*args)

        monkeypatch.setattr(load_operation.TransferData, "of", of)
        megackpt.load(
            state(), tmp_path / "a", Strategy(exchange="always"), process_group=group
        )

    waiting, failing = ThreadedGroup.outcomes(2, run)
    assert isinstance(failing, RankFailure)
    assert "no memory for the parcels" in str(failing)
    assert isinstance(waiting, RankLost)
    assert "MemoryError" in str(waiting)
