"""A save of torch DCP's in three stages: what each returns, what is used again, and how failures reach all ranks."""

from __future__ import annotations

import logging
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import megackpt
from megackpt.dcp import (
    FileSystemReader,
    FileSystemWriterAsync,
    SavePlanner,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
    verify_global_md_reuse,
)
from megackpt.errors import (
    CheckpointingException,
    CoverageError,
    NotACheckpoint,
    SaveInProgress,
    StorageError,
)


def state_of(value: float, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A DTensor cut over all ranks, what all hold, what rank 2 alone holds, and objects."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = distribute_tensor(torch.arange(10.0).reshape(5, 2) + value, mesh, [Shard(0)])
    own = {"own": torch.full((4,), value, dtype=dtype)} if dist.get_rank() == 2 else {}
    return {
        "cut": cut,
        "layers": [{"same": torch.full((64,), value)}],
        "step": int(value),
        **own,
    }


def check(folder: str, value: float, dtype: torch.dtype = torch.float32) -> None:
    """Both readers find it, on all ranks."""
    expected = state_of(value, dtype)
    for reader in (dcp.FileSystemReader(folder), FileSystemReader(folder)):
        found = state_of(-1, dtype)
        dcp.load(found, storage_reader=reader)
        assert torch.equal(found["cut"].to_local(), expected["cut"].to_local())
        assert torch.equal(found["layers"][0]["same"], expected["layers"][0]["same"])
        assert found["step"] == value
        if "own" in expected:
            assert torch.equal(found["own"], expected["own"])
    dist.barrier()


def run(writer: FileSystemWriterAsync) -> None:
    """The second stage, in a thread of its own."""
    function, preload, args = writer.get_save_function_and_args()
    if function is not None and preload is not None:
        args[1] = preload()
        thread = threading.Thread(target=function, args=args)
        thread.start()
        thread.join()


class Counting(SavePlanner):
    planned = 0

    def create_global_plan(self, all_plans: Any) -> Any:
        Counting.planned += 1
        return super().create_global_plan(all_plans)


class Refusing(SavePlanner):
    """Cannot give its tensors on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._refusing = dist.get_rank() == rank

    def resolve_data(self, write_item: Any) -> Any:
        if self._refusing:
            raise OSError("not today")
        return super().resolve_data(write_item)


def same_story(error: BaseException) -> str:
    """Its text, once it has been seen that all ranks have the same."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (type(error).__name__, str(error)))
    assert len(set(told)) == 1, told
    return str(error)


# ---- on 4 ranks


def staged(folder: str) -> None:
    state = state_of(1)
    writer = FileSystemWriterAsync(folder)
    handed, central, local, unchanged, reused = save_state_dict_async_plan(
        state, writer, None
    )
    assert handed[0] is writer
    assert (handed[1] is not None) == (dist.get_rank() == 0)
    assert not unchanged
    assert not reused
    assert {item.index.fqn for item in central.items} <= {
        item.index.fqn for item in local.items
    }
    function, preload, args = writer.get_save_function_and_args()
    assert not Path(folder, ".metadata").exists()
    if function is not None and preload is not None:
        with pytest.raises(CheckpointingException, match="in its own process"):
            pickle.dumps(args)
        args[1] = preload()
        state["cut"].to_local().zero_()
        state["layers"][0]["same"].zero_()
        function(*args)
    save_state_dict_async_finalize(*handed)
    check(folder, 1)


def cached(folder: str) -> None:
    kept: Any = None
    structure: Any = None
    flags = []
    for step in range(1, 5):
        dtype = torch.bfloat16 if step == 4 else torch.float32  # on rank 2 alone
        writer = FileSystemWriterAsync(f"{folder}/{step}")
        handed, central, local, unchanged, _ = save_state_dict_async_plan(
            state_of(step, dtype),
            writer,
            planner=Counting(),
            cached_ckpt_structure=structure,
        )
        run(writer)
        kept = handed[1] or kept
        save_state_dict_async_finalize(writer, kept, handed[2])
        check(f"{folder}/{step}", step, dtype)
        structure = central, local, unchanged
        flags.append((unchanged, handed[1] is not None))
    first = dist.get_rank() == 0
    last = dist.get_rank() != 2, first
    assert flags == [(False, first), (True, first), (True, False), last], flags
    assert Counting.planned == (3 if first else 0)


def loaded(folder: str) -> None:
    """The plans in the metadata of a checkpoint, used by the first save after it."""
    metadata = dcp.FileSystemReader(f"{folder}/1").read_metadata()
    plans = metadata.all_local_plans  # type: ignore[attr-defined]
    for value, expected in ((7, True), (8, False)):
        state = state_of(value) | ({"new": 1} if not expected else {})
        writer = FileSystemWriterAsync(f"{folder}/{value}")
        handed, _, local, _, reused = save_state_dict_async_plan(
            state, writer, loaded_all_plans=plans
        )
        assert reused is expected
        assert (
            verify_global_md_reuse(plans, local, dist.get_rank(), handed[2]) is expected
        )
        assert not verify_global_md_reuse(plans[:2], local, dist.get_rank(), handed[2])
        run(writer)
        save_state_dict_async_finalize(writer, handed[1] or metadata, handed[2])
        if expected:
            check(f"{folder}/{value}", value)


def failing(folder: str) -> None:
    rank = dist.get_rank()
    odd = state_of(1) | {"odd": torch.zeros(4 + (rank == 3))}
    with pytest.raises(CoverageError) as coverage:
        save_state_dict_async_plan(odd, FileSystemWriterAsync(folder))
    assert "'odd'" in same_story(coverage.value)

    writer = FileSystemWriterAsync(folder)
    handed, *_ = save_state_dict_async_plan(state_of(1), writer, planner=Refusing(1))
    function, _, args = writer.get_save_function_and_args()
    if function is not None:
        function(*args)
    with pytest.raises(CheckpointingException) as refused:
        save_state_dict_async_finalize(*handed)
    assert "rank 1" in same_story(refused.value)
    assert "not today" in str(refused.value)

    writer = FileSystemWriterAsync(folder)
    handed, *_ = save_state_dict_async_plan(state_of(1), writer)
    if rank == 0:
        run(writer)
    with pytest.raises(CheckpointingException) as early:
        save_state_dict_async_finalize(*handed)
    assert "has not written yet" in same_story(early.value)

    writer = FileSystemWriterAsync(folder)
    if rank == 1:
        writer.prepare_write_data = None  # type: ignore[method-assign, assignment] # not callable
    with pytest.raises(CheckpointingException) as unprepared:
        save_state_dict_async_plan(state_of(1), writer)
    assert "rank 1" in same_story(unprepared.value)

    with pytest.raises(CheckpointingException, match="coordinator_rank is 1"):
        save_state_dict_async_plan(
            state_of(1), FileSystemWriterAsync(folder), coordinator_rank=1
        )

    dist.barrier()
    assert not Path(folder).exists() or not list(Path(folder).iterdir())
    writer = FileSystemWriterAsync(folder)
    handed, *_ = save_state_dict_async_plan(state_of(6), writer)
    run(writer)
    save_state_dict_async_finalize(*handed)
    check(folder, 6)


def all_of_it(folder: str) -> None:
    if dist.get_rank() == 2:
        logging.basicConfig(level=logging.DEBUG)
        logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.ERROR)
    staged(f"{folder}/staged")
    cached(f"{folder}/cached")
    loaded(f"{folder}/cached")
    failing(f"{folder}/failing")


def test_on_four_ranks(ranks: Any, tmp_path: Path) -> None:
    *_, two, _ = ranks(all_of_it, 4, tmp_path, timeout=120)
    assert "rank 2, local plan: the items of ['own'] differ" in two.stderr
    assert "rank 2, loaded plan: the items of ['new'] differ" in two.stderr
    assert megackpt.verify(tmp_path / "cached" / "3").ok


# ---- on one


def test_one_process_needs_no_process_group(tmp_path: Path) -> None:
    state = {"w": torch.arange(4.0), "n": 3}
    writer = FileSystemWriterAsync(tmp_path / "x")
    handed, *_ = save_state_dict_async_plan(state, writer)
    with pytest.raises(NotACheckpoint):
        megackpt.load_tensors_metadata(tmp_path / "x")
    run(writer)
    save_state_dict_async_finalize(*handed)
    assert torch.equal(megackpt.load_plain_tensors(tmp_path / "x")["w"], state["w"])


def test_the_last_stage_without_metadata_says_whose_is_meant(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "x")
    (_, _, wrapper), *_ = save_state_dict_async_plan({"w": torch.ones(2)}, writer)
    run(writer)
    with pytest.raises(CheckpointingException, match="no metadata for this save"):
        save_state_dict_async_finalize(writer, None, wrapper)


def test_of_two_saves_to_one_directory_the_first_to_finalize_wins(
    tmp_path: Path,
) -> None:
    first, second = (
        FileSystemWriterAsync(tmp_path / "x"),
        FileSystemWriterAsync(tmp_path / "x"),
    )
    handed, *_ = save_state_dict_async_plan({"w": torch.ones(2)}, first)
    later, *_ = save_state_dict_async_plan({"w": torch.zeros(2)}, second)
    run(first)
    run(second)
    save_state_dict_async_finalize(*later)
    with pytest.raises(SaveInProgress, match="another save has committed"):
        save_state_dict_async_finalize(*handed)
    assert megackpt.verify(tmp_path / "x").ok
    assert megackpt.load_plain_tensors(tmp_path / "x")["w"].tolist() == [0, 0]
    save_state_dict_async_plan({"w": torch.ones(2)}, first)
    with pytest.raises(SaveInProgress, match="this writer is saving to"):
        save_state_dict_async_plan({"w": torch.ones(2)}, first)


class Late(SavePlanner):
    """Fails, but not before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = threading.Event(), threading.Event()

    def resolve_data(self, write_item: Any) -> Any:
        self.asked.set()
        assert self.may.wait(60)
        raise OSError("too late")


def test_the_late_error_of_a_save_given_up_spares_what_was_committed_since(
    tmp_path: Path,
) -> None:
    where, planner = tmp_path / "x", Late()
    given_up = FileSystemWriterAsync(where)
    save_state_dict_async_plan({"w": torch.ones(2)}, given_up, planner=planner)
    function, _, args = given_up.get_save_function_and_args()
    assert function is not None
    thread = threading.Thread(target=function, args=args)
    thread.start()
    assert planner.asked.wait(60)
    given_up.reset()
    writer = FileSystemWriterAsync(where)
    handed, *_ = save_state_dict_async_plan({"w": torch.ones(2)}, writer)
    run(writer)
    save_state_dict_async_finalize(*handed)
    planner.may.set()
    thread.join()
    assert megackpt.verify(where).ok
    assert megackpt.load_plain_tensors(where)["w"].tolist() == [1, 1]


def test_an_error_of_the_second_stage_is_raised_by_the_last_stage_in_another_thread(
    tmp_path: Path,
) -> None:
    planner, told = Late(), []
    planner.may.set()
    writer = FileSystemWriterAsync(tmp_path / "x")
    handed, *_ = save_state_dict_async_plan(
        {"w": torch.ones(2)}, writer, planner=planner
    )
    function, _, args = writer.get_save_function_and_args()
    assert function is not None
    function(*args)

    def finalize() -> None:
        with pytest.raises(StorageError) as caught:
            save_state_dict_async_finalize(*handed)
        told.append(str(caught.value))

    thread = threading.Thread(target=finalize)
    thread.start()
    thread.join()
    assert "too late" in told[0]
    assert not (tmp_path / "x").exists()
