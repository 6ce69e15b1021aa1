"""In one process: torch's functions that choose the storage themselves, and its other storage."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from tests.dcp.behaviours.catalogue import behaviour
from tests.dcp.behaviours.local_values import Net, Stateful
from tests.dcp.states import assert_same, emptied

STATE = {"m": {"w": torch.arange(8.0), "v": torch.ones(3)}, "n": [1]}


def loaded(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = emptied(STATE)
    dcp.load(state, checkpoint_id=folder)
    return state


def with_group(function: Any) -> None:
    """``async_save`` needs a process group."""
    from torch import distributed

    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        function()
    finally:
        distributed.destroy_process_group()


@behaviour(quick=True)
def a_checkpoint_becomes_a_torch_file(folder: Path) -> None:
    model = Net(1)
    dcp.save({"model": model, "n": [1]}, checkpoint_id=folder / "c")
    format_utils.dcp_to_torch_save(folder / "c", folder / "model.pt")
    found = torch.load(folder / "model.pt", weights_only=False)
    assert_same(dict(found.pop("model")), dict(model.state_dict()))
    assert found == {"n": [1]}


@behaviour(quick=True)
def a_torch_file_becomes_a_checkpoint(folder: Path) -> None:
    torch.save({"model": Net(1).state_dict(), "n": 5}, folder / "model.pt")
    format_utils.torch_save_to_dcp(folder / "model.pt", folder / "c")
    found = {"model": Net(2), "n": 0}
    dcp.load(found, checkpoint_id=folder / "c")
    assert found["n"] == 5
    assert_same(dict(found["model"].state_dict()), dict(Net(1).state_dict()))


@behaviour()
def a_torch_file_beside_the_checkpoint(folder: Path) -> None:
    model = nn.Linear(5, 3)
    dcp.save({"model": model}, checkpoint_id=folder)
    format_utils.dcp_to_torch_save(str(folder), str(folder / "model.pt"))
    assert_same(
        dict(torch.load(folder / "model.pt")["model"]), dict(model.state_dict())
    )


@behaviour(keys=("m", "m.w", "n", None))
def a_load_by_keys(folder: Path, keys: str | None) -> None:
    dcp.save(STATE, checkpoint_id=folder)
    found = _load_state_dict_from_keys(keys, checkpoint_id=folder)
    expected: Any = {
        "m": {"m": STATE["m"]},
        "m.w": {"m": {"w": torch.arange(8.0)}},
        "n": {"n": [1]},
        None: STATE,
    }[keys]
    assert_same(found, expected)


@behaviour()
def old_names_of_save_and_load(folder: Path) -> None:
    writer = dcp.FileSystemWriter(folder)
    dcp.save_state_dict(STATE, writer, no_dist=True)
    found = emptied(STATE)
    dcp.load_state_dict(found, dcp.FileSystemReader(folder), no_dist=True)
    assert_same(found, STATE)


@behaviour()
def without_process_groups(folder: Path) -> None:
    dcp.save(STATE, checkpoint_id=folder, no_dist=True)
    found = emptied(STATE)
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert_same(found, STATE)


@behaviour(commits=False)
def no_id_and_no_storage(folder: Path) -> None:
    for call in (dcp.save, dcp.load):
        with pytest.raises(RuntimeError) as caught:
            call(STATE)
        assert "must be specified" in str(caught.value)


@behaviour(commits=False)
def an_id_of_an_unknown_scheme(folder: Path) -> None:
    for call in (dcp.save, dcp.load):
        with pytest.raises(RuntimeError) as caught:
            call(STATE, checkpoint_id="abc://abc.abc")
        assert "Cannot detect" in str(caught.value)


@behaviour(commits=False)
def other_storage_if_these_refuse_the_id(folder: Path) -> None:
    writer, reader = dcp.FileSystemWriter, dcp.FileSystemReader
    with (
        patch.object(writer, "validate_checkpoint_id", return_value=False) as asked,
        patch.object(reader, "validate_checkpoint_id", return_value=False) as asked_too,
    ):
        dcp.save(STATE, checkpoint_id=str(folder / "c"))
        found = emptied(STATE)
        dcp.load(found, checkpoint_id=str(folder / "c"))
    assert_same(found, STATE)
    assert asked.called
    assert asked_too.called


@behaviour(since=(2, 9), commits=False)
def saves_without_collectives(folder: Path) -> None:
    dcp.save(STATE, checkpoint_id=folder, use_collectives=False)
    found = emptied(STATE)
    dcp.load(found, checkpoint_id=folder)
    assert_same(found, STATE)


@behaviour(commits=False)
def fsspec_to_fsspec(folder: Path) -> None:
    dcp.save(STATE, storage_writer=FsspecWriter(str(folder)))
    found = emptied(STATE)
    dcp.load(found, storage_reader=FsspecReader(str(folder)))
    assert_same(found, STATE)


@behaviour(commits=False)
def fsspec_to_files(folder: Path) -> None:
    dcp.save(STATE, storage_writer=FsspecWriter(str(folder)))
    assert_same(loaded(folder), STATE)


@behaviour()
def files_to_fsspec(folder: Path) -> None:
    dcp.save(STATE, checkpoint_id=folder)
    found = emptied(STATE)
    dcp.load(found, storage_reader=FsspecReader(str(folder)))
    assert_same(found, STATE)


@behaviour(commits=False)
def fsspec_in_memory_by_its_id(folder: Path) -> None:
    url = f"memory:/{folder}"
    dcp.save(STATE, checkpoint_id=url)
    found = emptied(STATE)
    dcp.load(found, checkpoint_id=url)
    assert_same(found, STATE)


@behaviour(commits=False)
def fsspec_without_overwrite(folder: Path) -> None:
    dcp.save(STATE, storage_writer=FsspecWriter(str(folder), overwrite=False))
    dcp.save(STATE, storage_writer=FsspecWriter(str(folder), overwrite=True))
    with pytest.raises(CheckpointException) as caught:
        dcp.save(STATE, storage_writer=FsspecWriter(str(folder), overwrite=False))
    assert "Checkpoint already exists" in str(caught.value)


@behaviour(commits=False, since=(2, 9))
def hugging_face_files(folder: Path) -> None:
    from safetensors.torch import load_file

    saved = dict(Net(1).state_dict())
    writer = dcp.HuggingFaceStorageWriter(path=str(folder))
    dcp.save(saved, storage_writer=writer)
    assert_same(load_file(folder / "model-00001-of-00001.safetensors"), saved)
    found = dict(Net(2).state_dict())
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(path=str(folder)))
    assert_same(found, saved)


@behaviour(quick=True, named=(True, False))
def saved_in_a_thread(folder: Path, named: bool) -> None:
    def run() -> None:
        state = {"w": torch.ones(1000), "s": Stateful(3)}
        if named:
            writer = dcp.FileSystemWriter(folder)
            future: Any = dcp.async_save(state, storage_writer=writer)
        else:
            future = dcp.async_save(state, checkpoint_id=folder)
        state["w"].zero_()  # type: ignore[attr-defined]
        future.result()
        found = {"w": torch.zeros(1000), "s": Stateful(0)}
        dcp.load(found, checkpoint_id=folder)
        assert found["w"].sum() == 1000
        assert found["s"].value == 3

    with_group(run)


@behaviour(named=(True, False))
def saved_in_a_process(folder: Path, named: bool) -> None:
    from torch.distributed.checkpoint import _async_process_executor as executors
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    def run() -> None:
        for step in (1, 2):
            state = {"w": torch.full((1000,), float(step)), "n": step}
            where: dict[str, Any] = {"checkpoint_id": folder / str(step)}
            if named:
                where = {"storage_writer": dcp.FileSystemWriter(folder / str(step))}
            kind = AsyncCheckpointerType.PROCESS
            future: Any = dcp.async_save(state, **where, async_checkpointer_type=kind)
            future.result()
            found = {"w": torch.zeros(1000), "n": 0}
            dcp.load(found, checkpoint_id=folder / str(step))
            assert found["w"].mean() == step
            assert found["n"] == step

    try:
        with_group(run)
    finally:
        executors._CHECKPOINT_PROCESS = None


@behaviour()
def staged_again_and_again(folder: Path) -> None:
    def run() -> None:
        weight = torch.zeros(5000)
        writer = dcp.FileSystemWriter(folder)
        for step in range(3):
            weight.fill_(step)
            path = folder / str(step)
            future: Any = dcp.async_save(
                {"w": weight}, storage_writer=writer, checkpoint_id=path
            )
            weight.fill_(-1)
            future.result()
            found = {"w": torch.ones(5000)}
            dcp.load(found, checkpoint_id=path)
            assert torch.equal(found["w"], torch.full((5000,), float(step)))

    with_group(run)


@behaviour(since=(2, 9), asynchronous=(True, False))
def a_stager_of_the_callers(folder: Path, asynchronous: bool) -> None:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    def run() -> None:
        options = StagingOptions(
            use_async_staging=asynchronous,
            use_shared_memory=False,
            use_pinned_memory=False,
            use_non_blocking_copy=False,
        )
        response: Any = dcp.async_save(
            STATE, checkpoint_id=folder, async_stager=DefaultStager(options)
        )
        if asynchronous:
            response.staging_completion.result()
            response = response.upload_completion
        response.result()
        assert_same(loaded(folder), STATE)

    with_group(run)


@behaviour(commits=False)
def an_error_in_the_background(folder: Path) -> None:
    class Slow(dcp.FileSystemWriter):  # type: ignore[misc]
        def write_data(self, plan: Any, planner: Any) -> Any:
            time.sleep(0.05)
            raise ValueError("injected")

    def run() -> None:
        future: Any = dcp.async_save(STATE, storage_writer=Slow(folder))
        with pytest.raises(CheckpointException) as caught:
            future.result()
        assert "injected" in str(caught.value)

    with_group(run)
