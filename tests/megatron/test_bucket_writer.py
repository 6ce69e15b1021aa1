"""Megatron's FileSystemWriterAsync: what programs replace in it, call of it and pass to it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import megackpt
from megackpt.errors import CheckpointingException, SaveInProgress, StorageError
from megackpt.megatron.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megackpt.megatron.strategies.filesystem_async import (
    FileSystemWriterAsync,
    WriteBucket,
    _process_memory,
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


def planned(
    folder: Path, kind: Any = FileSystemWriterAsync, value: float = 1.0
) -> tuple[Any, Any]:
    writer = kind(folder, thread_count=3)
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


def restored(monkeypatch: pytest.MonkeyPatch, **methods: Any) -> None:
    """Replace methods of the class, as programs do, for one test."""
    for name, function in methods.items():
        monkeypatch.setattr(FileSystemWriterAsync, name, staticmethod(function))


def test_buckets_are_files_of_objects_and_tensors(tmp_path: Path) -> None:
    writer, handed = planned(tmp_path / "a")
    assert writer.checkpoint_dir == tmp_path / "a"
    buckets: list[WriteBucket] = writer.write_buckets
    names = {
        item.index.fqn: type(data)
        for _, _, (objects, tensors) in buckets
        for item, data in [*objects, *tensors]
    }
    assert names.keys() == state().keys()
    assert names["wide"] is torch.Tensor
    for path, name, _ in buckets:
        assert path.endswith(f"/{name}")
        assert Path(path).parent.is_dir()
    function, preload, arguments = writer.get_save_function_and_args()
    assert arguments == [0, buckets, writer.results_queue]
    arguments[1] = preload()
    buckets[0][2][1][0][1].zero_()  # copied before
    function(*arguments)
    assert {os.path.basename(path) for path, _, _ in buckets} == {
        path.name for path in Path(buckets[0][0]).parent.glob("*.distcp")
    }
    save_state_dict_async_finalize(*handed)
    check(tmp_path / "a")


def test_one_call_as_in_megatrons_worker(tmp_path: Path) -> None:
    """By place and by keyword; the queues are of processes or of threads, or None."""
    context = multiprocessing.get_context("fork")
    writer, handed = planned(tmp_path / "a")
    collected: dict[int, Any] = {}
    for number, bucket in enumerate(writer.write_buckets):
        results: Any = context.Queue()
        count: Any = context.JoinableQueue()
        count.put(number)
        arguments = ([writer.transforms], number, bucket, results, count, True)
        FileSystemWriterAsync.write_preloaded_data(*arguments)
        count.join()
        found, own = results.get(timeout=60)
        assert found == number
        assert all(result.size_in_bytes > 0 for result in own)
        collected[number] = own
    writer.results_queue.put(collected)
    save_state_dict_async_finalize(*handed)
    check(tmp_path / "a")

    writer, handed = planned(tmp_path / "b")
    collected = {}
    for number, bucket in enumerate(writer.write_buckets):
        place, own = FileSystemWriterAsync.write_preloaded_data(
            transform_list=[],
            local_proc_idx=number,
            write_bucket=bucket,
            results_queue=None,
            count_queue=None,
            use_fsync=False,
        )
        collected[place] = own
    writer.results_queue.put(collected)
    save_state_dict_async_finalize(*handed)
    check(tmp_path / "b")


def test_a_bucket_of_the_callers_own(tmp_path: Path) -> None:
    writer, _ = planned(tmp_path / "a")
    _, _, (_, tensors) = next(b for b in writer.write_buckets if b[2][1])
    bucket = tmp_path / "__7_0.distcp", "__7_0.distcp", ([], tensors)
    call = FileSystemWriterAsync.write_preloaded_data
    _, own = call([], 0, bucket, None, None, True)
    with open(bucket[0], "rb") as file:
        file.seek(own[0].storage_data.info.offset)
        assert torch.equal(torch.load(file), tensors[0][1])
    for wrong, told in (
        ((tmp_path / "x", "y", ([], tensors)), "ends in its name, 'y'"),
        ((tmp_path / "no" / "x", "x", ([], tensors)), "No such file"),
        ((), "not enough values"),
    ):
        results: Any = queue.Queue()
        assert call([], 5, wrong, results, None, True)[0] == 5
        number, error = results.get_nowait()
        assert number == 5
        assert told in str(error), error
    _, error = call([], 0, bucket, None, None, True, use_msc=True)
    assert "multi-storage client is not supported" in str(error)


def test_a_writer_in_line_in_place_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement, made when the module is imported, that calls the original for each bucket."""
    write, called = FileSystemWriterAsync.write_preloaded_data, []

    def in_line(
        transforms: Any, use_msc: bool, rank: int, buckets: Any, results: Any
    ) -> None:
        called.append(rank)
        local: Any = queue.Queue()
        count: Any = queue.Queue()
        outcome: Any = {}
        for number, bucket in enumerate(buckets):
            count.put(number)
            write(transforms, number, bucket, local, count, True, use_msc=use_msc)
            found, result = local.get()
            if isinstance(result, Exception):
                outcome = result
                break
            outcome[found] = result
        results.put(outcome)

    for number, name in enumerate(
        ("write_preloaded_data_multiproc", "write_preloaded_data_multithread")
    ):
        with monkeypatch.context() as context:
            restored(context, **{name: in_line})
            writer, handed = planned(tmp_path / name)
            perform(writer)
            save_state_dict_async_finalize(*handed)
        check(tmp_path / name)
        assert len(called) == number + 1


def test_a_class_that_copies_in_another_way(tmp_path: Path) -> None:
    asked = []

    class Blocking(FileSystemWriterAsync):  # type: ignore[misc, valid-type]
        @staticmethod
        def preload_tensors(*args: Any, **kwargs: Any) -> Any:
            asked.append(args[-1])
            return FileSystemWriterAsync.preload_tensors(*args[:-1], False, **kwargs)

    writer, handed = planned(tmp_path / "a", Blocking)
    perform(writer)
    save_state_dict_async_finalize(*handed)
    check(tmp_path / "a")
    assert asked == [True]


def worker_fails(
    transform_list: Any,
    local_proc_idx: int,
    write_bucket: Any,
    results_queue: Any,
    count_queue: Any,
    use_fsync: bool,
) -> None:
    error = OSError("worker #1 critical failure") if local_proc_idx == 1 else []
    results_queue.put((local_proc_idx, error))
    count_queue.get()
    count_queue.task_done()


def test_the_error_of_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        restored(context, write_preloaded_data=worker_fails)
        writer, handed = planned(tmp_path / "a")
        perform(writer)
        with pytest.raises(CheckpointingException, match="worker #1 critical failure"):
            save_state_dict_async_finalize(*handed)
    assert not (tmp_path / "a").exists()

    writer, handed = planned(tmp_path / "a")
    path = writer.write_buckets[0][0]
    os.mkdir(path)
    perform(writer)
    with pytest.raises(StorageError, match=r"rank 0 cannot write .*distcp"):
        save_state_dict_async_finalize(*handed)
    assert not (tmp_path / "a").exists()


def test_results_that_are_not_whole(tmp_path: Path) -> None:
    writer, handed = planned(tmp_path / "a")
    with pytest.raises(CheckpointingException, match="has not written yet"):
        save_state_dict_async_finalize(*handed)

    writer, handed = planned(tmp_path / "a")
    writer.results_queue.put({})
    with pytest.raises(CheckpointingException, match="results of 0 of 2 buckets lack"):
        save_state_dict_async_finalize(*handed)

    writer, handed = planned(tmp_path / "a")
    item = writer.write_buckets[0][2][1][0][0]
    stored = dcp.filesystem._StorageInfo("__0_0.distcp", 0, 4)
    result = dcp.storage.WriteResult(item.index, 4, stored)
    writer.results_queue.put({0: [result]})
    with pytest.raises(CheckpointingException, match="lack digests, as megackpt"):
        save_state_dict_async_finalize(*handed)
    assert not (tmp_path / "a").exists()


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


def test_other_processes_are_refused_by_name(tmp_path: Path) -> None:
    writer, handed = planned(tmp_path / "a")
    _, _, arguments = writer.get_save_function_and_args()
    with pytest.raises(CheckpointingException, match="in its own process"):
        pickle.dumps(arguments)
    copied = pickle.loads(pickle.dumps(writer))
    assert copied.write_buckets is copied.results_queue is None
    forked = multiprocessing.get_context("fork").Process(target=perform, args=(writer,))
    forked.start()
    forked.join(60)
    with pytest.raises(CheckpointingException, match="in this process"):
        save_state_dict_async_finalize(*handed)


def test_queues_and_what_is_refused(tmp_path: Path) -> None:
    assert _results_queue is None
    results = get_write_results_queue(mp_mode="fork")
    thread = threading.Thread(target=results.put, args=(3,))
    thread.start()
    assert results.get(timeout=60) == 3
    thread.join()
    with pytest.raises(CheckpointingException, match="_process_memory is not offered"):
        _process_memory()
    for options, told in (
        ({"separation_hint": "w"}, "give it to TorchDistSaveShardedStrategy"),
        ({"use_msc": True}, "s3://, gs:// and az:// paths"),
    ):
        with pytest.raises(CheckpointingException, match=told):
            FileSystemWriterAsync(tmp_path, thread_count=2, **options)
    writer, _ = planned(tmp_path / "a")
    assert not writer.can_run_decentralized_global_plan
    with pytest.raises(CheckpointingException, match="save_state_dict_async_plan"):
        writer.prepare_decentralized_global_plan(None)


def test_an_ordinary_save_of_dcp_takes_it(tmp_path: Path) -> None:
    given = state()
    dcp.save(given, storage_writer=FileSystemWriterAsync(tmp_path / "a"), no_dist=True)
    check(tmp_path / "a")
