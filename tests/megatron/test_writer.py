"""Megatron's FileSystemWriterAsync, as Megatron's training uses it; what it refuses."""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import megackpt
from megackpt.errors import CheckpointingException, SaveInProgress
from megackpt.megatron.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megackpt.megatron.strategies.filesystem_async import (
    FileSystemWriterAsync,
    WriteBucket,
    _results_queue,
    get_write_results_queue,
)
from megackpt.megatron.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)


def state(value: float = 1.0) -> dict[str, Any]:
    return {
        "wide": torch.full((64, 64), value),
        "half": torch.full((32, 64), value, dtype=torch.bfloat16),
        "step": int(value),
    }


def planned(folder: Path, value: float = 1.0) -> tuple[Any, Any]:
    writer = FileSystemWriterAsync(folder, thread_count=3)
    handed, *_ = save_state_dict_async_plan(state(value), writer)
    return writer, handed


def perform(writer: Any) -> None:
    function, preload, arguments = writer.get_save_function_and_args()
    arguments[1] = preload()
    function(*arguments)


def check(folder: Path, value: float = 1.0) -> None:
    assert megackpt.verify(folder).ok
    for reader in (dcp.FileSystemReader(folder), None):
        found = state(-1)
        dcp.load(found, storage_reader=reader, checkpoint_id=folder, no_dist=True)
        for key, expected in state(value).items():
            assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(expected))


def test_of_two_saves_the_late_one_learns_of_the_other(tmp_path: Path) -> None:
    late, late_handed = planned(tmp_path / "a")
    writer, handed = planned(tmp_path / "a", value=2.0)
    perform(writer)
    save_state_dict_async_finalize(*handed)
    perform(late)
    with pytest.raises(SaveInProgress, match="another save has committed"):
        save_state_dict_async_finalize(*late_handed)
    check(tmp_path / "a", 2.0)


def test_requests_made_of_it_by_hand(tmp_path: Path) -> None:
    calls = AsyncCallsQueue()
    for step in (1.0, 2.0):
        writer, handed = planned(tmp_path / str(step), value=step)
        function, preload, arguments = writer.get_save_function_and_args()
        finish = [lambda handed=handed: save_state_dict_async_finalize(*handed)]
        calls.schedule_async_request(
            AsyncRequest(function, arguments, finish, preload_fn=preload)
        )
    assert calls.maybe_finalize_async_calls(blocking=True) == [0, 1]
    calls.close()
    check(tmp_path / "1.0", 1.0)
    check(tmp_path / "2.0", 2.0)


def test_other_processes_are_refused(tmp_path: Path) -> None:
    writer, handed = planned(tmp_path / "a")
    _, _, arguments = writer.get_save_function_and_args()
    with pytest.raises(CheckpointingException, match="in its own process"):
        pickle.dumps(arguments)
    forked = multiprocessing.get_context("fork").Process(target=perform, args=(writer,))
    forked.start()
    forked.join(60)
    with pytest.raises(CheckpointingException, match="in this process"):
        save_state_dict_async_finalize(*handed)


@pytest.mark.parametrize(
    "method",
    [
        "preload_tensors",
        "write_preloaded_data",
        "write_preloaded_data_multiproc",
        "write_preloaded_data_multithread",
        "prepare_decentralized_global_plan",
    ],
)
def test_methods_of_buckets_are_refused(method: str, tmp_path: Path) -> None:
    for holder in (FileSystemWriterAsync, FileSystemWriterAsync(tmp_path)):
        with pytest.raises(CheckpointingException, match="get_save_function_and_args"):
            getattr(holder, method)([], 0, buckets=[])
    bucket: WriteBucket = None  # Annotations stay possible.
    assert bucket is None


def test_a_patched_method_has_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs replace it where Megatron's writer forks; this writer never calls it."""
    monkeypatch.setattr(
        FileSystemWriterAsync,
        "write_preloaded_data_multiproc",
        staticmethod(pytest.fail),
    )
    writer, handed = planned(tmp_path / "a")
    perform(writer)
    save_state_dict_async_finalize(*handed)
    check(tmp_path / "a")


def test_arguments_and_queues_of_megatrons_training(tmp_path: Path) -> None:
    assert _results_queue is None
    assert "mp_mode" in inspect.signature(get_write_results_queue).parameters
    get_write_results_queue(mp_mode="fork")
    for options, told in (
        ({"separation_hint": "w"}, "give it to TorchDistSaveShardedStrategy"),
        ({"use_msc": True}, "s3://, gs:// and az:// paths"),
    ):
        with pytest.raises(CheckpointingException, match=told):
            FileSystemWriterAsync(tmp_path, thread_count=2, **options)
    FileSystemWriterAsync(tmp_path, thread_count=2, use_msc=False)


def test_an_ordinary_save_of_dcp_takes_it(tmp_path: Path) -> None:
    given = state()
    dcp.save(given, storage_writer=FileSystemWriterAsync(tmp_path / "a"), no_dist=True)
    check(tmp_path / "a")
