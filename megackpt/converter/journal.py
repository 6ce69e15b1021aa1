"""The journal of a conversion: a line for each finished task, which a later run does not repeat.

A line is the xxh3-128 of the rest, a space, and JSON. It is appended when the task's files are
durable. A torn or damaged line ends the journal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megackpt.planning.box import Boxes
from megackpt.planning.manifest import DIGEST_BLOCK, DIGEST_SIZE, WriteResult
from megackpt.storage import Storage, digest, digest_blocks

JOURNAL = "megackpt.journal"


@dataclass(frozen=True, eq=False)
class TaskResult:
    """A finished task. ``overflows``: key -> values beyond the range of their new dtype."""

    task: int
    result: WriteResult
    overflows: Mapping[str, int]


class Journal:
    """The finished tasks of one conversion: those of an earlier run whose files are all there.

    Args:
        storage: where the target is written; None for object stores, where no file can grow, so
            that nothing is resumed.
        reread: compare what an earlier run wrote with its digests. Needed by formats that compute
            digests again in ``finish``, for these would confirm damaged bytes.
    """

    def __init__(self, storage: Storage | None, reread: bool = False) -> None:
        self.done: dict[int, TaskResult] = {}
        self._storage = storage
        self._length = 0
        if storage is None:
            return
        kept = b""
        text = storage.get(JOURNAL) if storage.size(JOURNAL) is not None else b""
        for line in text.splitlines(keepends=True):
            try:
                done, sizes = _parse(line)
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError,
                    RecursionError):  # fmt: skip
                break
            complete = all((storage.size(name) or 0) >= n for name, n in sizes.items())
            if complete and not (reread and _is_damaged(storage, done.result)):
                self.done[done.task] = done
                kept += line
        storage.put(JOURNAL, kept)
        self._length = len(kept)

    def add(self, done: TaskResult) -> None:
        """Record, durably, that a task is finished."""
        if self._storage is not None:
            result = done.result
            columns: list[NDArray[Any]]
            columns = [result.item, result.file, result.start, result.length]
            record = {
                "task": done.task,
                "overflows": dict(done.overflows),
                "files": {name: self._storage.size(name) or 0 for name in result.files},
                "width": result.boxes.width,
                "boxes": [result.boxes.offset.tolist(), result.boxes.shape.tolist()],
                "columns": [column.tolist() for column in columns],
                "digests": result.digests.tobytes().hex(),
            }
            text = json.dumps(record, separators=(",", ":")).encode()
            line = digest(text).hex().encode() + b" " + text + b"\n"
            with self._storage.update(JOURNAL) as updater:
                updater.write_at(self._length, [memoryview(line)])
            self._length += len(line)
        self.done[done.task] = done


def _parse(line: bytes) -> tuple[TaskResult, dict[str, int]]:
    """Return the task of a line, and the sizes of its files. Raises ValueError and others."""
    checksum, _, text = line.partition(b" ")
    if not line.endswith(b"\n") or digest(text[:-1]).hex().encode() != checksum:
        raise ValueError("the line is torn or damaged")
    record: dict[str, Any] = json.loads(text)
    sizes = {str(name): int(size) for name, size in record["files"].items()}
    columns = np.array(record["columns"], np.int64)
    item, file, start, length = columns
    boxes = np.array(record["boxes"], np.int64).reshape(2, len(item), record["width"])
    digests = np.frombuffer(bytes.fromhex(record["digests"]), np.uint8)
    digests = digests.reshape(-1, DIGEST_SIZE)
    blocks = -(-length // DIGEST_BLOCK)
    task, overflows = record["task"], dict(record["overflows"])
    if type(task) is not int or (columns < 0).any() or (file >= len(sizes)).any():
        raise ValueError("the line names pieces that cannot exist")
    if len(digests) != blocks.sum():
        raise ValueError("the line has digests of other pieces")
    result = WriteResult(
        item,
        Boxes(boxes[0], boxes[1]),
        tuple(sizes),
        file.astype(np.int32),
        start,
        length,
        digests,
    )
    return TaskResult(task, result, overflows), sizes


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
