"""The journal of a conversion: a file for each finished task, which a later run does not repeat.

The file holds the xxh3-128 of the rest, and JSON. It is written when the task's files are durable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megackpt.planning.box import Boxes
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    DIGEST_SIZE,
    WriteResult,
    digest_rows,
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
