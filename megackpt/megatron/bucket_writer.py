"""Megatron's ``FileSystemWriterAsync``: buckets, one a file, and the functions that write them."""

from __future__ import annotations

import itertools
import os
import queue
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from megackpt import dcp
from megackpt.checkpoint import staging_storage
from megackpt.dcp.item_writer import (
    Assignment,
    ItemWriter,
    StoredItem,
    copy_to_host,
    divide,
    is_plain,
    stable_resolver,
    synchronize_stream,
)
from megackpt.errors import CheckpointingException
from megackpt.storage import root_at

WriteBucket = tuple[str, str, tuple[list[Any], list[Any]]]
"""One file: its path, its name in the checkpoint, and ``(item, data)`` pairs of its objects and
tensors."""

_MULTI_STORAGE = (
    "the multi-storage client is not supported: megackpt.save takes s3://, gs:// and az:// paths "
    "itself"
)

_results_queue = None
"""No other process has a queue here; Megatron's training imports the name."""


class ResultsQueue(queue.Queue[Any]):
    """A queue between threads of this process."""

    def __reduce__(self) -> NoReturn:
        raise CheckpointingException(
            "the second stage of a save runs in its own process, in any thread. To write in "
            "another process, use megackpt.save with async_sharded_save"
        )


def get_write_results_queue(mp_mode: str = "spawn") -> ResultsQueue:
    """A new queue for the results of one save. ``mp_mode`` has no effect: no process is started."""
    return ResultsQueue()


class FileSystemWriterAsync(dcp.FileSystemWriterAsync):
    """``megackpt.dcp.FileSystemWriterAsync`` with Megatron's arguments, attributes and methods.

    ``save_state_dict_async_plan`` fills ``write_buckets``. The function that
    ``get_save_function_and_args`` returns writes them with ``write_preloaded_data``, each in a
    thread, and puts a dict of their results, or an exception, into ``results_queue``. From there
    ``save_state_dict_async_finalize`` takes it. Derived classes and patches may replace
    ``preload_tensors``, and what calls ``write_preloaded_data``.
    """

    can_run_decentralized_global_plan = False

    def __init__(
        self,
        path: Any,
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        **kwargs: Any,
    ) -> None:
        if separation_hint is not None:
            raise CheckpointingException(
                "FileSystemWriterAsync does not support separation_hint: give it to "
                "TorchDistSaveShardedStrategy, and call save"
            )
        if use_msc:
            raise CheckpointingException(f"FileSystemWriterAsync: {_MULTI_STORAGE}")
        super().__init__(path, *args, **kwargs)
        self.separation_hint, self.use_msc = separation_hint, use_msc
        self.write_buckets: list[WriteBucket] | None = None
        self.results_queue: ResultsQueue | None = None

    @property
    def checkpoint_dir(self) -> Any:
        """The directory, as it was given."""
        return self.path

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "write_buckets": None, "results_queue": None}

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Divide what this rank writes into ``write_buckets``. Nothing is written yet."""
        super().prepare_write_data(plan, planner)
        prepared = self._get_prepared()
        assignment = prepared.assignment
        resolve = stable_resolver(planner)
        self.write_buckets = []
        self.results_queue = None
        with staging_storage(assignment.directory, assignment.save_id) as root:
            for name, items in divide(plan.items, assignment.files):
                objects, tensors = [], []
                for item in items:
                    data = resolve(item)
                    if not isinstance(data, torch.Tensor):
                        objects.append((item, data))
                        continue
                    if not is_plain(data):
                        data = copy_to_host(data)
                    tensors.append((item, data))
                path = f"{root.location}/{name}"
                self.write_buckets.append((path, name, (objects, tensors)))
        if self.write_buckets:
            self.results_queue = get_write_results_queue()

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., None] | None, Callable[[], Any] | None, list[Any]]:
        """As the writer of ``megackpt.dcp``; ``function`` writes the buckets."""
        prepared = self._get_prepared()
        if not self.write_buckets:
            return None, None, []
        function = partial(
            self.write_preloaded_data_multithread, [*prepared.transforms], False
        )
        preload = partial(self.preload_tensors, self.write_buckets, True)
        rank = prepared.assignment.rank
        return function, preload, [rank, self.write_buckets, self.results_queue]

    @staticmethod
    def preload_tensors(
        write_buckets: Sequence[WriteBucket], non_blocking: bool = True
    ) -> list[WriteBucket]:
        """The buckets with copies in new host memory.

        ``non_blocking``: start the copies from devices at once, and wait for all of them.
        """
        result = []
        for path, name, (objects, tensors) in write_buckets:
            objects = [(item, copy_to_host(data)) for item, data in objects]
            tensors = [
                (item, data.detach().to("cpu", non_blocking=non_blocking, copy=True))
                for item, data in tensors
            ]
            result.append((path, name, (objects, tensors)))
        synchronize_stream()
        return result

    @staticmethod
    def write_preloaded_data(
        transform_list: Sequence[Any],
        local_proc_idx: int,
        write_bucket: WriteBucket,
        results_queue: Any,
        count_queue: Any,
        use_fsync: bool = True,
        **kwargs: Any,
    ) -> tuple[int, Any]:
        """Write one bucket to its file, or write it anew, durably, whatever ``use_fsync``.

        ``(local_proc_idx, results)`` is put into ``results_queue`` and returned, with an exception
        in place of the results if there was one. Then one item is taken from ``count_queue``, and
        ``task_done`` called. Either queue may be None.
        """
        outcome: list[WriteResult] | Exception
        try:
            if kwargs.get("use_msc"):
                raise CheckpointingException(_MULTI_STORAGE)
            path, name, (objects, tensors) = write_bucket
            folder = os.fspath(path).removesuffix(f"/{name}")
            if folder == os.fspath(path):
                raise CheckpointingException(
                    f"the path of a bucket ends in its name, {name!r}, unlike {path!r}"
                )
            root = root_at(folder or "/")
            found = {item.index: data for item, data in [*objects, *tensors]}
            rank = 0
            if dist.is_available() and dist.is_initialized():
                rank = dist.get_rank()
            part = Assignment(root.location, "", rank, (name,))
            writer = ItemWriter(
                root, part, lambda item: found[item.index], transform_list
            )
            items = [item for item, _ in [*objects, *tensors]]
            if root.size(name) is not None:
                root.delete(name)
            outcome = writer.write_file(name, items)
        except Exception as error:  # noqa: BLE001 - raised by the last stage
            outcome = error
        if results_queue is not None:
            results_queue.put((local_proc_idx, outcome))
        if count_queue is not None:
            count_queue.get()
            count_queue.task_done()
        return local_proc_idx, outcome

    @staticmethod
    def write_preloaded_data_multiproc(
        transform_list: Sequence[Any],
        use_msc: bool,
        rank: int,
        write_buckets: Sequence[WriteBucket],
        global_results_queue: Any,
    ) -> None:
        """Write all buckets, each in a thread: no process is started.

        Puts a dict of the results by the number of the bucket into ``global_results_queue``, or the
        first exception.
        """
        local: queue.Queue[Any] = queue.Queue()
        count: queue.Queue[Any] = queue.Queue()
        options: dict[str, Any] = {"use_msc": use_msc} if use_msc else {}

        def write(number: int) -> None:
            count.put(number)
            FileSystemWriterAsync.write_preloaded_data(
                transform_list=transform_list,
                local_proc_idx=number,
                write_bucket=write_buckets[number],
                results_queue=local,
                count_queue=count,
                use_fsync=True,
                **options,
            )

        outcome: dict[int, Any] | Exception = {}
        try:
            with ThreadPoolExecutor(len(write_buckets) or 1, "megackpt-write") as pool:
                list(pool.map(write, range(len(write_buckets))))
            outcome = dict(local.get_nowait() for _ in write_buckets)
            failed = [v for _, v in sorted(outcome.items()) if isinstance(v, Exception)]
            if failed:
                outcome = failed[0]
        except Exception as error:  # noqa: BLE001 - raised by the last stage
            outcome = error
        global_results_queue.put(outcome)

    @staticmethod
    def write_preloaded_data_multithread(*args: Any, **kwargs: Any) -> None:
        """``write_preloaded_data_multiproc``, by its name in Megatron-Core 0.17 and later."""
        FileSystemWriterAsync.write_preloaded_data_multiproc(*args, **kwargs)

    def retrieve_write_results(self) -> list[WriteResult]:
        """What was put into ``results_queue``, as one list; an exception is raised.

        CheckpointingException where nothing was put, or what others than ``write_preloaded_data``
        made.
        """
        assignment = self._get_prepared().assignment
        rank = f"rank {assignment.rank}"
        if self.results_queue is None or self.write_buckets is None:
            return []
        try:
            outcome = self.results_queue.get_nowait()
        except queue.Empty:
            raise CheckpointingException(
                f"{rank} has not written yet: call the function of get_save_function_and_args, in "
                "this process, and finalize when it has returned"
            ) from None
        if isinstance(outcome, Exception):
            with staging_storage(assignment.directory, assignment.save_id):
                raise outcome
        results = [*itertools.chain.from_iterable(outcome.values())]
        foreign = [r for r in results if not isinstance(r.storage_data, StoredItem)]
        if foreign:
            raise CheckpointingException(
                f"{rank}: the results of write_preloaded_data lack digests, as megackpt's own did "
                f"not write {foreign[0].index.fqn!r}: a function that replaces it should call it"
            )
        lacking = {item.index for item in self._get_prepared().plan.items}
        lacking -= {result.index for result in results}
        if lacking:
            raise CheckpointingException(
                f"{rank}: the results of {len(outcome)} of {len(self.write_buckets)} buckets lack "
                f"{min(index.fqn for index in lacking)!r}"
            )
        return results

    def prepare_decentralized_global_plan(self, local_plan: Iterable[Any]) -> NoReturn:
        raise CheckpointingException(
            "the coordinator names the files of all ranks: call save_state_dict_async_plan of "
            "megackpt.megatron.strategies.state_dict_saver"
        )
