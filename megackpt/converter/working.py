"""One task of a conversion, and the worker process that does one after the other."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from megackpt.backends.base import Backend
from megackpt.checkpoint import as_read_by, open_same
from megackpt.converter.cell_source import CellSource
from megackpt.converter.cells import ConversionTask
from megackpt.converter.journal import TaskResult
from megackpt.errors import CheckpointingException
from megackpt.storage import Storage, kernel, root_at


@dataclass(frozen=True, eq=False)
class Bench:
    """Where tasks are worked on: the open source, the place that the target grows in, and the formats of both."""

    source: Storage
    reader: Backend
    target: Storage
    writer: Backend
    verify: bool
    casts: bool

    def __post_init__(self) -> None:
        if self.casts:  # now: what imports take is no memory of the conversion
            importlib.import_module("torch")

    def perform(self, task: ConversionTask, moved: Callable[[int], None]) -> TaskResult:
        """Read, change and write the rows of one task, durably. ``moved`` hears the bytes on the way."""
        data = CellSource(self.source, self.reader, task, self.verify, moved)
        result = self.writer.write(self.target, task.plan, data)
        return TaskResult(task.number, result, data.overflows)


@dataclass(frozen=True)
class Assignment:
    """What a worker process is told of its bench. ``source_id`` is the save_id of the source's manifest."""

    source: str
    source_id: str
    reader: Backend
    target: str
    writer: Backend
    verify: bool
    casts: bool

    def bench(self) -> Bench:
        source = as_read_by(self.reader, open_same(self.source, self.source_id))
        return Bench(
            source,
            self.reader,
            root_at(self.target),
            self.writer,
            self.verify,
            self.casts,
        )


@dataclass(frozen=True)
class Failed:
    """What a worker answers where a task (or its beginning) went wrong."""

    error: CheckpointingException


def main(descriptor: int, parent: int) -> None:
    """A worker: an Assignment comes in, then Tasks; out go None (ready), bytes, TaskResult, Failed. EOF is the end."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the parent is interrupted too, and ends us
    kernel.die_with_parent()
    if os.getppid() != parent:
        return
    with Connection(descriptor) as parents:
        try:
            bench = parents.recv().bench()
            parents.send(None)
            while True:
                parents.send(bench.perform(parents.recv(), parents.send))
        except (EOFError, ConnectionError):
            return  # the parent is gone
        except CheckpointingException as error:
            parents.send(Failed(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent tells it
            story = traceback.format_exc()
            parents.send(
                Failed(
                    CheckpointingException(f"{type(error).__name__}: {error}\n{story}")
                )
            )
            sys.exit(1)
