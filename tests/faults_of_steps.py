"""Faults of one step of a save or load, in this process and in the process of an ``async_save``."""

from __future__ import annotations

import gc
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.dcp import FileSystemWriter
from megackpt.errors import CorruptCheckpoint

Step = Callable[..., Any]

PAUSE = 0.02


def tensor(value: float) -> torch.Tensor:
    return torch.full((6, 2), value)


def declared(value: float) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", tensor(value))}


def held(real: Step, place: Path) -> Step:
    """The step hangs, but for the main thread, until there is an answer (see ``answer``).

    It waits in the kernel: a thread that uses the processor does not hang.
    """

    def hold(*given: Any, **named: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            pipe = os.open(place / "answers", os.O_RDWR)
            (place / "hangs").touch()
            select.select([pipe], [], [], 60)
            os.close(pipe)
        return real(*given, **named)

    return hold


@contextmanager
def answer(place: Path) -> Iterator[Callable[[], object]]:
    """A function that lets all steps answer that are held at this place."""
    os.mkfifo(place / "answers")
    with open(place / "answers", "r+b", buffering=0) as pipe:
        yield lambda: pipe.write(b"x")


def refused(_: Step, __: Path) -> Step:
    """The step fails."""

    def refuse(*_: object, **__: object) -> None:
        raise CorruptCheckpoint("what was read back differs")

    return refuse


def overtaken(real: Step, place: Path) -> Step:
    """Another save commits to ``place`` just before the step."""
    others: list[int] = []

    def late(*given: Any, **named: Any) -> Any:
        if not others:
            others.append(1)
            megackpt.save(declared(7.0), place)
        return real(*given, **named)

    return late


@dataclass(frozen=True)
class Fault:
    """What happens to a method: ``kind`` makes the method that takes its place.

    ``owner``: a class; or a module, whose faults stay in this process.
    """

    owner: Any
    method: str
    kind: Callable[[Step, Path], Step]
    place: Path

    def put(self, patch: pytest.MonkeyPatch) -> None:
        real = getattr(self.owner, self.method)
        patch.setattr(self.owner, self.method, self.kind(real, self.place))

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """In this block, here and in the process of an ``async_save``."""
        with pytest.MonkeyPatch.context() as patch:
            self.put(patch)
            patch.setattr(CarriesFaults, "fault", self)
            yield


class CarriesFaults(FileSystemWriter):
    """Puts the present fault into the process that it is sent to, until the next save there."""

    fault: ClassVar[Fault | None] = None
    there: ClassVar[pytest.MonkeyPatch] = pytest.MonkeyPatch()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "carried": self.fault}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.there.undo()
        gc.collect()  # the error of the save before is in cycles
        fault: Fault | None = state.pop("carried")
        vars(self).update(state)
        if fault is not None:
            fault.put(self.there)


class PausesSince:
    """Counts the pauses of this process since a file is there, while the block runs.

    Under load a pause takes longer, as the pauses do by which the product counts.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)
        self.seconds = 0.0

    def _count(self) -> None:
        while not self._ends.wait(PAUSE):
            if self.seconds or self._file.exists():
                self.seconds += PAUSE

    def __enter__(self) -> PausesSince:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
