"""FileSystemWriter under stock torch DCP: save, async_save, failures and leftovers."""

from __future__ import annotations

import inspect
import os
import pickle
import textwrap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

import megackpt
from megackpt import ShardedTensor, checkpoint
from megackpt.checkpoint.records import Record
from megackpt.dcp import FileSystemReader, FileSystemWriter, FileSystemWriterAsync
from megackpt.errors import CheckpointingException, SaveInProgress, StorageError
from megackpt.storage.objects import BucketWriter
from tests.buckets import Bucket
from tests.dcp.states import (
    READERS,
    Failing,
    assert_same,
    loaded,
    nested,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]


@pytest.mark.parametrize("thread_count", [1, 3])
def test_what_we_save_is_read_by_stock_and_by_us(
    where: Path, thread_count: int, tmp_path: Path
) -> None:
    for seed in (1, 2):  # the second replaces the first
        dcp.save(
            nested(seed),
            storage_writer=FileSystemWriter(where, thread_count=thread_count),
        )
        assert len(list(where.glob("*.distcp"))) == thread_count
        for reader in (*READERS, lambda path: FileSystemReader(path, verify=False)):
            assert_same(loaded(reader(where), nested(seed)), nested(seed))
        report = megackpt.verify(where)
        assert (report.ok, report.checked, report.foreign) == (True, True, ()), report
        dcp_to_torch_save(where, tmp_path / "one.pt")
        assert_same(torch.load(tmp_path / "one.pt", weights_only=False), nested(seed))
    assert os.listdir(where.parent) == ["c"]


def test_unpickling_a_plan_has_no_effect(where: Path) -> None:
    """The plan of another save to this directory, unpickled meanwhile, changes nothing."""

    class Meanwhile(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            other = replace(new_plan.storage_data, save_id="other", files=("other",))
            plan = replace(new_plan, storage_data=other)
            assert pickle.loads(pickle.dumps(plan)).storage_data == other
            return super().finish_plan(new_plan)

    dcp.save(nested(1), storage_writer=FileSystemWriter(where), planner=Meanwhile())
    assert megackpt.verify(where).ok
    assert not (where / "other").exists()


def test_the_plan_of_another_save_is_refused(where: Path) -> None:
    plans: list[SavePlan] = []

    class Kept(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            plans.append(super().finish_plan(new_plan))
            return plans[-1]

    planner = Kept()
    dcp.save(nested(1), storage_writer=FileSystemWriter(where), planner=planner)
    for path, error in ((where, StorageError), (where / "x", CheckpointingException)):
        late = FileSystemWriter(path).write_data(plans[0], planner)
        with pytest.raises(error, match=r"is not visible|must name the same"):
            late.value()
    assert megackpt.verify(where).ok


def test_megackpt_loads_what_was_saved_through_dcp(where: Path) -> None:
    state = nested(4)
    dcp.save(state, checkpoint_id=where, storage_writer=FileSystemWriter("elsewhere"))
    assert megackpt.load_common_state_dict(where) == {}
    asked = {
        "half": ShardedTensor.from_rank_offsets(
            "big", torch.zeros(400, 2400), (0, 1, 2)
        ),
        "step": megackpt.ShardedObject("step", None, (), ()),
    }
    found = megackpt.load(asked, where, validate_access_integrity=False)
    assert_same(found, {"half": state["big"][400:], "step": 4})
    assert {str(key) for key in megackpt.load_tensors_metadata(where)} >= {
        "model.layers.0.w",
        "model.empty",
        "big",
    }


def test_names_of_files_are_the_callers(where: Path) -> None:
    class Named(FileSystemWriter):
        names: Callable[[int, int], str] = staticmethod(
            lambda rank, n: f"data/rank{rank}.{n}"
        )

        def file_name(self, rank: int, n: int) -> str:
            return self.names(rank, n)

    dcp.save(nested(1), storage_writer=Named(where))
    assert sorted(os.listdir(where / "data")) == ["rank0.0", "rank0.1"]
    for reader in READERS:
        assert_same(loaded(reader(where), nested(1)), nested(1))
    for names, told in (
        (lambda *_: "same", r"file_name\(0, 1\) gives 'same', as file_name\(0, 0\)"),
        (lambda *_: "../out", "cannot be a file"),
        (lambda *_: None, "cannot be a file"),
        (lambda *_: ".metadata", "the checkpoint's own"),
    ):
        Named.names = staticmethod(names)  # type: ignore[assignment]
        with pytest.raises(CheckpointException, match=told):
            dcp.save(nested(2), storage_writer=Named(where))
    assert_same(loaded(FileSystemReader(where), nested(1)), nested(1))


def test_what_stock_callers_pass(where: Path) -> None:
    assert FileSystemWriterAsync is FileSystemWriter
    writer = FileSystemWriter(
        where, False, False, 1, 0, cache_staged_state_dict=True, overwrite=False
    )
    assert isinstance(writer, dcp.StorageWriter)
    assert writer.checkpoint_id == where
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    with pytest.raises(CheckpointException, match="CheckpointExists"):
        dcp.save({"w": torch.zeros(2)}, storage_writer=writer)
    writer.reset(where.parent / "other")
    dcp.save({"w": torch.zeros(2)}, storage_writer=writer)
    assert sorted(os.listdir(where.parent)) == ["c", "other"]
    with pytest.raises(CheckpointingException, match="thread_count"):
        FileSystemWriter(where, thread_count=0)
    with pytest.raises(CheckpointingException, match="convert"):
        FileSystemWriter(where, serialization_format=SerializationFormat.SAFETENSORS)
    assert FileSystemWriter.validate_checkpoint_id(where)
    assert FileSystemReader.validate_checkpoint_id(str(where))
    assert not FileSystemWriter.validate_checkpoint_id("")
    with pytest.raises(CheckpointingException, match="has been begun"):
        FileSystemWriter(where).finish(dcp.Metadata({}), [[]])
    with pytest.raises(CheckpointingException, match="call it first"):
        FileSystemReader(where).prepare_local_plan(dcp.LoadPlan([]))


def test_an_error_of_a_thread_reaches_the_caller_and_is_cleared_up(where: Path) -> None:
    good = {"w": torch.ones(5), "x": torch.zeros(70_000)}
    bad = {**good, "bad": torch.ones(3)}
    dcp.save(bad, storage_writer=FileSystemWriter(where))
    for number in range(2):
        writer = FileSystemWriter(where)
        with pytest.raises(CheckpointException) as caught:
            dcp.save(
                {**bad, "w": torch.full((5,), 2.0)},
                storage_writer=writer,
                planner=Failing(),
            )
        told = str(caught.value)
        assert "rank 0 cannot write " in told
        assert "at 'bad': ValueError: no such thing" in told
        assert ".distcp" in told
        assert_same(loaded(FileSystemReader(where), bad), bad)
        if (
            number
        ):  # the same writer, or (the failed one is held by the exception) another one
            writer = FileSystemWriter(where)
        dcp.save(good, storage_writer=writer)
        assert os.listdir(where.parent) == ["c"]
        assert_same(loaded(FileSystemReader(where), good), good)
        dcp.save(bad, storage_writer=writer)
    with pytest.raises(CheckpointException):
        dcp.save(bad, storage_writer=writer, planner=Failing())
    writer.reset()
    assert os.listdir(where.parent) == ["c"]


def test_a_failed_save_is_over_for_a_save_in_the_background(where: Path) -> None:
    writer = FileSystemWriter(where)
    state, bad = {"w": torch.ones(5)}, {"bad": torch.ones(3)}
    other = where.parent / "other"
    with pytest.raises(CheckpointException) as caught:
        dcp.save(bad, checkpoint_id=where, storage_writer=writer, planner=Failing())
    dcp.async_save(state, checkpoint_id=other, storage_writer=writer).result()
    with pytest.raises(CheckpointException) as again:
        dcp.save(bad, checkpoint_id=where, storage_writer=writer, planner=Failing())
    dcp.async_save(
        state, storage_writer=FileSystemWriter(where)
    ).result()  # the failed one is held by the error
    assert caught.value is not again.value
    assert sorted(os.listdir(where.parent)) == ["c", "other"]
    for folder in (where, other):
        assert_same(loaded(FileSystemReader(folder), state), state)


def test_a_save_of_the_main_thread_is_over_when_its_writer_begins_another(
    where: Path,
) -> None:
    writer, state = FileSystemWriter(where), {"w": torch.ones(5)}
    # Then another rank fails, and torch does not call the coordinator's writer.
    writer.prepare_global_plan([SavePlan([])])
    dcp.async_save(state, storage_writer=FileSystemWriter(where)).result()
    assert_same(loaded(FileSystemReader(where), state), state)
    dcp.async_save(state, storage_writer=writer).result()
    assert_same(loaded(FileSystemReader(where), state), state)
    assert os.listdir(where.parent) == ["c"]


def test_a_save_of_another_thread_is_left_alone_by_a_reset(where: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            begun.set()
            go_on.wait(60)
            return super().resolve_data(write_item)

    writer, state = FileSystemWriter(where), {"w": torch.ones(5)}
    future = dcp.async_save(state, storage_writer=writer, planner=Slow())
    try:
        assert begun.wait(60)
        with pytest.raises(CheckpointException, match=r"SaveInProgress.*Executor"):
            dcp.save(state, checkpoint_id=where.parent / "other", storage_writer=writer)
    finally:
        go_on.set()
    future.result()
    assert os.listdir(where.parent) == ["c"]
    assert_same(loaded(FileSystemReader(where), state), state)


def test_of_two_saves_to_one_directory_the_first_to_commit_wins(where: Path) -> None:
    place = checkpoint.begin(where, save_id="another")
    record = Record("another", 0.0, (0, b""), 0, 0)
    dcp.save({"w": torch.ones(5)}, storage_writer=FileSystemWriter(where))
    with pytest.raises(SaveInProgress):
        place.target.publish(record, (), (), lambda: None)
    place.abort()
    assert megackpt.verify(where).ok


def test_an_asynchronous_save_in_a_thread(where: Path) -> None:
    writer = FileSystemWriter(where, cache_staged_state_dict=False)
    for seed in (1, 2):
        state = nested(seed)
        future = dcp.async_save(state, storage_writer=writer)
        with torch.no_grad():
            for tensor in (state["big"], state["model"]["parameter"]):
                tensor.zero_()
        future.result()
        assert_same(loaded(FileSystemReader(where), nested(seed)), nested(seed))
    for _ in range(3):
        with pytest.raises(CheckpointException, match="at 'bad'"):
            dcp.async_save(
                {"bad": torch.ones(1)}, storage_writer=writer, planner=Failing()
            ).result()
    dcp.async_save(nested(3), storage_writer=writer).result()
    assert_same(loaded(FileSystemReader(where), nested(3)), nested(3))
    assert os.listdir(where.parent) == ["c"]


def test_a_bucket(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    where = f"{bucket.url}/run/c"
    assert FileSystemWriter.validate_checkpoint_id(where)
    for seed in (1, 2):
        dcp.save(nested(seed), storage_writer=FileSystemWriter(where))
        assert_same(loaded(FileSystemReader(where), nested(seed)), nested(seed))
    with pytest.raises(CheckpointException, match="at 'bad'"):
        dcp.save(
            {"w": torch.ones(3), "bad": 1},
            storage_writer=FileSystemWriter(where),
            planner=Failing(),
        )
    assert megackpt.verify(where).ok
    dcp.save(nested(3), storage_writer=FileSystemWriter(where))
    assert_same(loaded(FileSystemReader(where), nested(3)), nested(3))
    told: list[int] = []  # how much will come, by which the store chooses its parts
    monkeypatch.setattr(BucketWriter, "expect", lambda _, size: told.append(size))
    state = {"w": torch.ones(1000), "x": torch.ones(500, dtype=torch.int64), "o": 1}
    dcp.save(state, storage_writer=FileSystemWriter(where, thread_count=1))
    assert told == [8000]


def test_a_bucket_in_the_background(bucket: Bucket) -> None:
    writer = FileSystemWriter(f"{bucket.url}/run/1")
    for seed in (1, 2):
        state, where = nested(seed), f"{bucket.url}/run/{seed}"
        future = dcp.async_save(state, checkpoint_id=where, storage_writer=writer)
        with torch.no_grad():
            state["big"].zero_()
        future.result()
        assert_same(loaded(FileSystemReader(where), nested(seed)), nested(seed))
    with pytest.raises(CheckpointException, match="at 'bad'"):
        dcp.async_save(
            {"bad": torch.ones(1)}, storage_writer=writer, planner=Failing()
        ).result()
    assert_same(loaded(FileSystemReader(where), nested(2)), nested(2))
    assert megackpt.verify(where).ok
    dcp.async_save(
        nested(3), storage_writer=writer
    ).result()  # it clears the failed save away
    assert_same(loaded(FileSystemReader(where), nested(3)), nested(3))
    assert not bucket.uploads()


def test_the_example_of_the_docstring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    doc = inspect.getdoc(FileSystemWriter) or ""
    example = [
        line
        for line in doc.partition("::")[2].partition("Rank 0")[0].splitlines()
        if line
    ]
    exec(compile(textwrap.dedent("\n".join(example)), "docstring", "exec"), {})  # noqa: S102
    assert megackpt.load_plain_tensors("checkpoints/3")["model.w"].tolist() == [1.0] * 4
