"""``dcp.save`` and ``dcp.load`` after ``install``: bounded, confirmed, and a lost rank is named."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.storage import (
    StorageReader,
    StorageWriter,
    WriteResult,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.futures import Future

import megackpt
from megackpt.checkpoint import open_checkpoint
from megackpt.dcp import (
    FileSystemReader,
    FileSystemWriter,
    SavePlanner,
    install,
    sessions,
    storage_reader,
)
from megackpt.errors import CheckpointReplaced, RankLost

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TIMEOUT = timedelta(seconds=20)


def state(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(torch.full((8, 3), value), mesh, [Shard(0)])
    return {"m": {"w": sharded, "b": torch.full((2,), value)}, "step": int(value)}


def values(where: object) -> list[float]:
    found = state(0.0)
    dcp.load(found, checkpoint_id=str(where))
    local = found["m"]["w"].to_local()
    return [*local.unique().tolist(), *found["m"]["b"].tolist(), found["step"]]


def dies_before(name: str, rank: int, call: Any) -> list[Any]:
    """What the other ranks get from a save in which a rank dies before a step of its writer."""
    got: list[Any] = []
    if dist.get_rank() == rank:
        setattr(FileSystemWriter, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        call()
    except CheckpointException as error:
        got.append(error)
    return got


def a_rank_dies(folder: str) -> None:
    with install():
        dcp.save(state(1.0), checkpoint_id=f"{folder}/c")
        assert values(f"{folder}/c") == [1, 1, 1, 1]
        new = state(2.0)
        writer = FileSystemWriter(f"{folder}/c", timeout=TIMEOUT)
        (error,) = dies_before(
            "write_data",
            1,
            lambda: dcp.save(new, storage_writer=writer, planner=SavePlanner()),
        )
    assert isinstance(error.__cause__, RankLost)
    assert [*error.failures] == [1]
    assert "rank 1" in str(error)
    assert "rank 2" not in str(error.__cause__)
    Path(f"{folder}/named{dist.get_rank()}").touch()


@pytest.mark.slow
def test_a_lost_rank_is_named_on_all_others(ranks: Any, tmp_path: Path) -> None:
    ranks(a_rank_dies, 3, tmp_path, timeout=120, check=False)
    assert {"named0", "named2"} <= set(os.listdir(tmp_path))
    found = {"step": 0}
    dcp.load(found, storage_reader=FileSystemReader(tmp_path / "c"))
    assert found == {"step": 1}


def a_rank_dies_after_it_has_written(folder: str) -> None:
    """Its results are with the coordinator, which asks once more before it commits."""
    with install():
        dcp.save(state(1.0), checkpoint_id=f"{folder}/c")
        new = state(2.0)
        if dist.get_rank() == 0:
            finish = FileSystemWriter.finish

            def late(*given: Any, **named: Any) -> None:
                os.kill(int(Path(f"{folder}/pid").read_text()), signal.SIGKILL)
                finish(*given, **named)

            FileSystemWriter.finish = late  # type: ignore[method-assign]
        else:
            Path(f"{folder}/pid").write_text(str(os.getpid()))
        dist.barrier()
        writer = FileSystemWriter(f"{folder}/c", timeout=TIMEOUT)
        with pytest.raises(CheckpointException, match="rank 1") as caught:
            dcp.save(new, storage_writer=writer, planner=SavePlanner())
        assert isinstance(caught.value.__cause__, RankLost)
    Path(f"{folder}/named").touch()


@pytest.mark.slow
def test_nothing_is_committed_without_all_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks(a_rank_dies_after_it_has_written, 2, tmp_path, timeout=120, check=False)
    assert (tmp_path / "named").exists()
    found = {"step": 0}
    dcp.load(found, storage_reader=FileSystemReader(tmp_path / "c"))
    assert found == {"step": 1}


class Mine(DefaultSavePlanner):
    """A planner of the caller's own: torch's flow."""


def several_calls(folder: str) -> None:
    first, second, third = (state(float(value)) for value in (1, 2, 3))
    with install():
        # A save, a load and a save of Megatron's kind beside a save in the background.
        future: Any = dcp.async_save(first, checkpoint_id=f"{folder}/1")
        megackpt.save({"x": 1}, f"{folder}/x")
        metadata = dcp.save(second, checkpoint_id=f"{folder}/2")
        future.result(60)
        assert values(f"{folder}/1") == [1, 1, 1, 1]
        assert values(f"{folder}/2") == [2, 2, 2, 2]
        dcp.save(third, checkpoint_id=f"{folder}/3", planner=Mine())
        assert values(f"{folder}/3") == [3, 3, 3, 3]
        # An error of one rank is that of all.
        wrong = dict(third)
        if dist.get_rank() == 1:
            wrong["s"] = torch.eye(2).to_sparse()
        with pytest.raises(CheckpointException, match="to_dense") as caught:
            dcp.save(wrong, checkpoint_id=f"{folder}/4")
        assert [*caught.value.failures] == [0]  # it refuses the plan of all
        assert not os.path.exists(f"{folder}/4")
        with pytest.raises(CheckpointException, match="not mine") as caught:
            dcp.save(first, checkpoint_id=f"{folder}/4", planner=refusing(1))
        assert [*caught.value.failures] == [1]
        assert caught.value.args[0] == "plan", caught.value.args
        replaced = dcp.save(first, checkpoint_id=f"{folder}/5")
        dcp.save({"x": 1}, checkpoint_id=f"{folder}/5")
    stored = FileSystemReader(f"{folder}/2").read_metadata()
    copy = pickle.loads(pickle.dumps(metadata))
    for name in ("state_dict_metadata", "planner_data", "storage_data"):
        assert getattr(copy, name) == getattr(metadata, name) == getattr(stored, name)
    assert type(copy) is Metadata
    with pytest.raises(CheckpointReplaced):
        len(replaced.state_dict_metadata)


def refusing(rank: int) -> DefaultSavePlanner:
    """torch's planner, which fails on one rank."""
    planner = DefaultSavePlanner()
    if dist.get_rank() == rank:

        def refuse() -> None:
            raise ValueError("not mine")

        planner.create_local_plan = refuse  # type: ignore[method-assign]
    return planner


def ends_while_it_saves(folder: str) -> None:
    """``uninstall`` when the thread of rank 1 has not begun yet."""
    new = state(1.0)
    held = threading.Event()
    if dist.get_rank() == 1:
        real = state_dict_saver.save
        state_dict_saver.save = lambda *a, **k: held.wait(60) and real(*a, **k)
    with install():
        future: Any = dcp.async_save(new, checkpoint_id=f"{folder}/c")
        assert gc.isenabled()
    held.set()
    future.result(60)
    assert state_dict_saver._save_state_dict is sessions.stock_save
    with install():
        assert values(f"{folder}/c") == [1, 1, 1, 1]


@pytest.mark.slow
def test_a_save_that_has_begun_keeps_our_messages(ranks: Any, tmp_path: Path) -> None:
    ranks(ends_while_it_saves, 2, tmp_path, timeout=120)


@pytest.mark.slow
def test_calls_beside_one_another(ranks: Any, tmp_path: Path) -> None:
    ranks(several_calls, 2, tmp_path, timeout=120)


def test_one_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with install():
        made = dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c")
        found = {"w": torch.zeros(3)}
        dcp.load(found, checkpoint_id=tmp_path / "c")
        with pytest.raises(CheckpointException, match="NotACheckpoint"):
            dcp.load(found, checkpoint_id=tmp_path / "d")
    assert found["w"].tolist() == [1, 1, 1]
    assert isinstance(made, Metadata)
    assert set(made.state_dict_metadata) == {"w"}
    texts = [record.getMessage() for record in caplog.records]
    for kind in ("save", "load"):
        lines = [
            text for text in texts if text.startswith(f"{kind} {tmp_path / 'c'} (")
        ]
        assert [": total, rank 0 of 1: " in line for line in lines] == [True]


class InMemory(StorageWriter, StorageReader):
    """A storage of the caller's own, with the methods that torch's interface requires alone."""

    def __init__(self) -> None:
        self.stored: dict[Any, Any] = {}

    def reset(self, checkpoint_id: object = None) -> None: ...

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None: ...

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        results = []
        for item in plan.items:
            self.stored[item.index.fqn] = planner.resolve_data(item).clone()
            results.append(WriteResult(item.index, 1, item.index.fqn))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: Any) -> None:
        self.stored[Metadata] = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        made: Metadata = self.stored[Metadata]
        return made

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        for item in plan.items:
            tensor = planner.resolve_tensor(item)
            tensor.copy_(self.stored[item.storage_index.fqn])
            planner.commit_tensor(item, tensor)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:  # noqa: ARG003
        return True

    def storage_meta(self) -> None: ...


def test_a_storage_of_the_callers_own_needs_no_path() -> None:
    storage = InMemory()
    found = {"w": torch.zeros(3)}
    with install():
        dcp.save({"w": torch.ones(3)}, storage_writer=storage)
        dcp.load(found, storage_reader=storage)
    assert found["w"].tolist() == [1, 1, 1]


def test_a_save_does_not_open_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def count(directory: str, *given: Any, **named: Any) -> Any:
        opened.append(str(directory))
        return open_checkpoint(directory, *given, **named)

    for module in (sessions, storage_reader):
        monkeypatch.setattr(module, "open_checkpoint", count, raising=False)
    with install():
        made = dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c")
        assert opened == []
        assert set(made.state_dict_metadata) == {"w"}
        assert opened == [str(tmp_path / "c")]
        replaced = dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c")
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c")
    with pytest.raises(CheckpointReplaced):
        len(replaced.state_dict_metadata)
