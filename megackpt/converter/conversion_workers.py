"""The tasks of a conversion, performed in this process or by worker processes, and their journal.

The journal is a file for each finished task, which a later run does not repeat. The file holds the
xxh3-128 of the rest, and JSON. It is written when the task's files are durable.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt import limits
from megackpt.async_save.worker_process import WorkerProcess
from megackpt.backends.base import Backend
from megackpt.checkpoint import Opened, Writing, as_read_by, open_same
from megackpt.checkpoint.transaction import CheckedSource
from megackpt.converter.cells import ConversionTask
from megackpt.errors import RankLost, StorageError
from megackpt.loader.regions import Region, Regions
from megackpt.planning.box import Boxes
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    DIGEST_SIZE,
    WriteResult,
    digest_rows,
    itemsizes,
)
from megackpt.storage import Storage, digest, digest_blocks

JOURNAL = "megackpt.journal"


@dataclass(frozen=True, eq=False)
class TaskResult:
    """A finished task. ``overflows``: key -> values beyond the range of their new dtype."""

    task: int
    result: WriteResult
    overflows: Mapping[str, int]


class Journal:
    """The finished tasks of one conversion: tasks of an earlier run whose files are all present.

    Args:
        storage: where the target is written; None for object stores, which do not resume.
        reread: compare the files of an earlier run with their digests. Needed by formats that
            compute digests again in ``finish``, for these would confirm damaged bytes.
    """

    def __init__(self, storage: Storage | None, reread: bool = False) -> None:
        self.done: dict[int, TaskResult] = {}
        self._storage = storage
        if storage is None:
            return
        for entry in storage.list(JOURNAL):
            name = f"{JOURNAL}/{entry}"
            done = _read_task(storage, name)
            if done is not None and not (reread and _is_damaged(storage, done.result)):
                self.done[done.task] = done
            else:
                # The task is repeated. Until that is done, its files are not to be trusted.
                storage.delete(name)

    def add(self, done: TaskResult) -> None:
        """Record, durably, that a task is finished."""
        self.done[done.task] = done
        if self._storage is None:
            return
        result = done.result
        numbers = (result.item, result.file, result.start, result.length)
        record = {
            "task": done.task,
            "overflows": dict(done.overflows),
            "files": {name: self._storage.size(name) or 0 for name in result.files},
            "numbers": [column.tolist() for column in numbers],
            "width": result.boxes.width,
            "boxes": [result.boxes.offset.tolist(), result.boxes.shape.tolist()],
            "digests": result.digests.tobytes().hex(),
        }
        text = json.dumps(record).encode()
        self._storage.put(f"{JOURNAL}/{done.task}", digest(text) + text)


def _read_task(storage: Storage, name: str) -> TaskResult | None:
    """Return the task of this file; None if it is damaged, or if files of the task are missing."""
    data = storage.get(name)
    text = data[DIGEST_SIZE:]
    if digest(text) != data[:DIGEST_SIZE]:
        return None
    record = json.loads(text)
    files: dict[str, int] = record["files"]
    for file, size in files.items():
        if (storage.size(file) or 0) < size:
            return None
    item, number, start, length = np.array(record["numbers"], np.int64)
    shape = 2, len(item), record["width"]
    boxes = np.array(record["boxes"], np.int64).reshape(shape)
    result = WriteResult(
        item,
        Boxes(boxes[0], boxes[1]),
        tuple(files),
        number.astype(np.int32),
        start,
        length,
        digest_rows(bytes.fromhex(record["digests"])),
    )
    return TaskResult(record["task"], result, record["overflows"])


def _is_damaged(storage: Storage, result: WriteResult) -> bool:
    """Read all pieces, and compare them with their digests."""
    found = []
    for number, start, length in zip(
        result.file, result.start.tolist(), result.length.tolist(), strict=True
    ):
        with storage.open(result.files[number]) as reader:
            for offset in range(0, length, DIGEST_BLOCK):
                block = memoryview(bytearray(min(DIGEST_BLOCK, length - offset)))
                reader.read_into(start + offset, [block])
                found.append(digest_blocks(block))
    return b"".join(found) != result.digests.tobytes()


# Elements that are cast at once: they stay in the cache, and torch starts no threads for them.
_CAST_ELEMENTS = 1 << 15


class CellSource(CheckedSource):
    """The ``Source`` of a task.

    Neighbouring rows are read together, up to a cell's bytes. A row is dropped when it was used.
    A format that asks for the rows in another order than the plan's makes more, smaller reads.
    """

    def __init__(
        self,
        source: Storage,
        reader: Backend,
        task: ConversionTask,
        verify: bool,
    ) -> None:
        self.overflows: Counter[str] = Counter()
        """Key -> finite values beyond the range of the dtype that they were cast to."""
        self._plan = task.plan
        self._stored = [entry.meta for entry in task.part.tensors]
        self._regions = Regions(Opened(source, reader, task.part, {}), verify)
        itemsize = itemsizes(task.part.tensors)[task.plan.tensor]
        self._sizes = task.plan.boxes.volume * itemsize
        self._lock = threading.Lock()
        self._ready: dict[int, NDArray[Any] | bytes] = {}
        self._used: set[int] = set()

    def check(self) -> None:
        """No effect: this memory belongs to the conversion."""

    def blocks(self, row: int) -> Iterator[memoryview]:
        with self._lock:
            if row not in self._ready:
                self._read(row)
            value = self._ready.pop(row)
            self._used.add(row)
        if isinstance(value, bytes):
            yield memoryview(value)
            return
        number = self._plan.tensor[row]
        stored, (key, target) = self._stored[number], self._plan.tensors[number]
        if stored.dtype != target.dtype:
            value, overflows = cast(value, stored.dtype, target.dtype)
            if overflows:
                with self._lock:
                    self.overflows[key] += overflows
        yield value.reshape(-1).view(np.uint8).data

    def _read(self, row: int) -> None:
        number, _ = region = self._region(row)
        if self._stored[number].is_object:
            self._ready[row] = self._regions.blobs([region])[0]
            return
        rows = [row]
        regions = [region]
        total = sum(self._sizes[held] for held in (row, *self._ready))
        for other in range(
            row + 1, min(row + limits.CONVERT_READ_ROWS, len(self._plan))
        ):
            number, _ = region = self._region(other)
            total += self._sizes[other]
            known = other in self._used or other in self._ready
            is_object = self._stored[number].is_object
            if total > limits.CONVERT_CELL_BYTES or known or is_object:
                break
            rows.append(other)
            regions.append(region)
        self._ready.update(zip(rows, self._regions.arrays(regions), strict=True))

    def _region(self, row: int) -> Region:
        number = int(self._plan.tensor[row])
        return number, self._plan.boxes.row(row, len(self._stored[number].shape))


def cast(array: NDArray[Any], stored: str, wanted: str) -> tuple[NDArray[Any], int]:
    """Cast elements between floating dtypes by torch's rules.

    ``array`` holds the bits of its elements. Returns the bits of the result, and how many elements
    are finite and beyond the new range: they become infinite, or (float8_e4m3fn has no infinity)
    the largest value.
    """
    import torch  # here, because workers that do not cast start faster without

    source: torch.dtype = getattr(torch, stored)
    target: torch.dtype = getattr(torch, wanted)
    octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    values = torch.from_numpy(octets).view(source)
    result = torch.empty(values.numel(), dtype=target, device="cpu")
    largest = torch.finfo(target).max
    overflows = 0
    for start in range(0, values.numel(), _CAST_ELEMENTS):
        part = values[start : start + _CAST_ELEMENTS]
        result[start : start + _CAST_ELEMENTS].copy_(part)
        if largest < torch.finfo(source).max:
            # The narrow dtypes lack some of these operations.
            size = (part if part.itemsize >= 4 else part.float()).abs()
            beyond = (size > largest) & (size < torch.inf)
            overflows += int(beyond.count_nonzero())
    bits = result.view(torch.uint8).numpy().view(f"u{target.itemsize}")
    return bits.reshape(array.shape), overflows


_CHECK_SECONDS = 1.0


@dataclass(eq=False)
class TaskRunner:
    """Performs the tasks of one conversion, in this process or in a worker process.

    ``source_id`` is the save_id of the source's manifest, ``save_id`` the id of the target.
    ``open`` has to be called first.
    """

    source: str
    source_id: str
    reader: Backend
    target: str
    save_id: str
    writer: Backend
    verify: bool
    casts: bool

    def open(self) -> None:
        """Open the source. Raises what ``open_same`` raises."""
        if self.casts:  # now, because imports do not count as memory of the conversion
            importlib.import_module("torch")
        stored = open_same(self.source, self.source_id)
        self._stored = as_read_by(self.reader, stored)

    def perform(
        self, task: ConversionTask, advance: Callable[[int], None]
    ) -> TaskResult:
        """Read, convert and write the rows of one task, durably.

        ``advance`` takes the bytes done.
        """
        data = CellSource(self._stored, self.reader, task, self.verify)
        writing = Writing(self.target, self.save_id, self.writer, task.plan, data)
        return TaskResult(task.number, writing(advance), data.overflows)


_runners: list[TaskRunner] = []  # in a worker process: the one of its conversion


def open_runner(runner: TaskRunner, _: Callable[[int], None]) -> None:
    """The first work of a worker process."""
    runner.open()
    _runners.append(runner)


def _perform(task: ConversionTask, advance: Callable[[int], None]) -> TaskResult:
    """The further work of a worker process."""
    return _runners[0].perform(task, advance)


def run_tasks(
    runner: TaskRunner,
    workers: int,
    tasks: Iterator[ConversionTask],
    finished: Callable[[TaskResult], None],
    advance: Callable[[int], None],
    check: Callable[[], None],
    patience: float,
) -> None:
    """Have all tasks performed by worker processes. The callbacks are called on this thread.

    ``check`` is called at least once a second; it stops the work by raising. Raises the first error
    of a worker, RankLost where one died, and StorageError if none has reported progress for
    ``patience`` seconds. No process is left on return.
    """
    processes: dict[Connection, WorkerProcess] = {}
    numbers: dict[Connection, int] = {}  # of the tasks at work

    def send(
        connection: Connection, work: Callable[[Callable[[int], None]], object]
    ) -> None:
        try:
            processes[connection].send(work)
        except ConnectionError as error:
            raise _lost(processes[connection], numbers.get(connection)) from error

    try:
        for _ in range(workers):
            try:
                process = WorkerProcess()
            except OSError as error:
                raise StorageError(f"cannot start a worker process: {error}") from error
            processes[process.connection] = process
            send(process.connection, partial(open_runner, runner))
        busy, silent = set(processes), 0.0
        while busy:
            check()
            ready = wait(list(busy), _CHECK_SECONDS)
            silent = 0.0 if ready else silent + _CHECK_SECONDS
            if silent >= patience:
                raise StorageError(
                    f"the worker processes have not reported progress for {patience:g} s, and are "
                    "given up: check the disks; if they are only slow, give a longer timeout"
                )
            for connection in ready:
                process = processes[connection]  # type: ignore[index]
                try:
                    message = process.receive()
                except (EOFError, ConnectionError) as error:
                    raise _lost(process, numbers.get(process.connection)) from error
                if isinstance(message, int):
                    advance(message)
                    continue
                result = message.get()
                if result is not None:  # else the process has opened its context
                    finished(result)
                task = next(tasks, None)
                if task is None:
                    busy.remove(process.connection)
                else:
                    numbers[process.connection] = task.number
                    send(process.connection, partial(_perform, task))
    finally:
        for process in processes.values():
            process.kill()
        for process in processes.values():
            process.end()


def _lost(process: WorkerProcess, task: int | None) -> RankLost:
    text = f"the worker process {process.end()}"
    if task is None:
        return RankLost(f"{text} as it began; nothing is committed")
    text += f" at task {task}"
    return RankLost(f"{text}; nothing is committed", {task: text})
