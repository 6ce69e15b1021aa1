"""The journal of a conversion: one line for each finished task, so that a later run need not do it again.

A line is the xxh3-128 of what follows it, a space, and JSON: the task's number, its WriteResult, the size of each of
its files, and what overflowed. It is written when the task's files are durable. A line that is torn or damaged ends
the journal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megackpt.planning.box import Boxes
from megackpt.planning.manifest import DIGEST_BLOCK, DIGEST_SIZE, WriteResult
from megackpt.storage import Storage, digest, digest_blocks

JOURNAL = "megackpt.journal"


@dataclass(frozen=True, eq=False)
class Done:
    """A finished task. ``overflows``: key -> values beyond the range of what they were cast to."""

    task: int
    result: WriteResult
    overflows: Mapping[str, int]


class Journal:
    """The finished tasks of the conversion in this place; those of an earlier run whose files are all here.

    ``storage`` is None where no file can grow (in a bucket): then only this run knows of them. ``reread``: what an
    earlier run has written is compared with its digests, too. For formats that take new ones in
    ``finish``: they would vouch for whatever has become of the bytes since.
    """

    def __init__(self, storage: Storage | None, reread: bool = False) -> None:
        self._storage = storage
        self.done: dict[int, Done] = {}
        self._length = 0 if storage is None else self._resume(storage, reread)

    def _resume(self, storage: Storage, reread: bool) -> int:
        """The bytes of the journal that hold."""
        text = storage.get(JOURNAL) if storage.size(JOURNAL) is not None else b""
        kept = b""
        for line in text.splitlines(keepends=True):
            done, sizes = _parsed(line)
            if done is None:
                break
            there = all(
                (storage.size(name) or 0) >= size for name, size in sizes.items()
            )
            if there and (not reread or _intact(storage, done.result)):
                self.done[done.task] = done
                kept += line
        storage.put(JOURNAL, kept)
        return len(kept)

    def files(self) -> set[str]:
        """All files of finished tasks."""
        return {name for done in self.done.values() for name in done.result.files}

    def add(self, done: Done) -> None:
        """Note, durably, that a task is finished."""
        if self._storage is not None:
            sizes = {name: self._storage.size(name) or 0 for name in done.result.files}
            line = _line(done, sizes)
            with self._storage.update(JOURNAL) as updater:
                updater.write_at(self._length, [memoryview(line)])
            self._length += len(line)
        self.done[done.task] = done


def _intact(storage: Storage, result: WriteResult) -> bool:
    """Are the bytes of each piece those that its digests were taken of?"""
    taken = []
    for number, start, length in zip(
        result.file, result.start.tolist(), result.length.tolist(), strict=True
    ):
        with storage.open(result.files[number]) as reader:
            for at in range(0, length, DIGEST_BLOCK):
                block = memoryview(bytearray(min(DIGEST_BLOCK, length - at)))
                reader.read_into(start + at, [block])
                taken.append(digest_blocks(block))
    return b"".join(taken) == result.digests.tobytes()


def _line(done: Done, sizes: Mapping[str, int]) -> bytes:
    result = done.result
    told = {
        "task": done.task,
        "item": result.item.tolist(),
        "offset": result.boxes.offset.tolist(),
        "shape": result.boxes.shape.tolist(),
        "width": result.boxes.width,
        "files": result.files,
        "file": result.file.tolist(),
        "start": result.start.tolist(),
        "length": result.length.tolist(),
        "digests": result.digests.tobytes().hex(),
        "sizes": sizes,
        "overflows": dict(done.overflows),
    }
    text = json.dumps(told, separators=(",", ":")).encode()
    return digest(text).hex().encode() + b" " + text + b"\n"


def _parsed(line: bytes) -> tuple[Done | None, dict[str, int]]:
    checksum, _, text = line.partition(b" ")
    if not line.endswith(b"\n") or digest(text[:-1]).hex().encode() != checksum:
        return None, {}
    try:
        told = json.loads(text)
        return _done(told)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ):
        return None, {}  # somebody else's idea of a journal


def _done(told: dict[str, Any]) -> tuple[Done, dict[str, int]]:
    rows, width = len(told["item"]), told["width"]
    boxes = Boxes(
        *(
            np.array(told[name], np.int64).reshape(rows, width)
            for name in ("offset", "shape")
        )
    )
    result = WriteResult(
        np.array(told["item"], np.int64),
        boxes,
        tuple(told["files"]),
        np.array(told["file"], np.int32),
        np.array(told["start"], np.int64),
        np.array(told["length"], np.int64),
        np.frombuffer(bytes.fromhex(told["digests"]), np.uint8).reshape(
            -1, DIGEST_SIZE
        ),
    )
    places = np.concatenate([result.item, result.file, result.start, result.length])
    blocks = (-(-result.length // DIGEST_BLOCK)).sum()
    sound = (
        type(told["task"]) is int and not (places < 0).any() and len(places) == 4 * rows
    )
    if (
        not sound
        or (result.file >= len(result.files)).any()
        or len(result.digests) != blocks
    ):
        raise ValueError("a line tells of no pieces that can be")
    sizes = {str(name): int(size) for name, size in told["sizes"].items()}
    return Done(told["task"], result, dict(told["overflows"])), sizes
