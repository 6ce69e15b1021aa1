"""Asynchronous saves, as trainers call them: for how long a save blocks, and how much steps slow down meanwhile."""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    async_save,
)

import megackpt
from benchmarks.contestants import Contestant, Megackpt, Place, StockDcp
from benchmarks.peers import Megatron

IDLE_STEPS = 8
STEP_SECONDS = 0.02
FINISHED = Callable[[], bool]
"""Collective, called after each step: is the save complete on all ranks?"""


class Trainer(ABC):
    """A library that saves during training."""

    who: Contestant

    @abstractmethod
    def begin(self, declared: Any, folder: Path) -> FINISHED:
        """When this returns the tensors may be changed."""


class Ours(Trainer):
    def __init__(
        self, format_name: str, persistent: bool, staging_bytes: int | None = None
    ) -> None:
        self.who = Megackpt(format_name)
        self._queue = megackpt.AsyncCallsQueue(persistent, staging_bytes=staging_bytes)

    def begin(self, declared: Any, folder: Path) -> FINISHED:
        request = megackpt.save(
            declared, folder, self.who.name, async_sharded_save=True
        )
        if request is None:
            raise RuntimeError("an asynchronous save gives a request")
        self._queue.schedule_async_request(request)
        return lambda: bool(self._queue.maybe_finalize_async_calls())


class Stock(Trainer):
    """dcp.async_save; ``reuse``: with a stager that keeps its buffers, and shares them with a process."""

    def __init__(self, place: Place, kind: AsyncCheckpointerType, reuse: bool) -> None:
        self.who = StockDcp(place)
        self._options: dict[str, Any] = {
            "async_checkpointer_type": kind,
            "process_group": dist.new_group(
                backend="gloo"
            ),  # the trainer's group is in use meanwhile
        }
        if reuse:
            keep = staging.StagingOptions(
                False, True, use_async_staging=False, use_non_blocking_copy=False
            )
            self._options["async_stager"] = staging.DefaultStager(keep)

    def begin(self, declared: Any, folder: Path) -> FINISHED:
        response = async_save(declared, checkpoint_id=folder, **self._options)
        if isinstance(response, Future):
            future = response
        else:  # its staging is asynchronous too
            response.staging_completion.result()
            future = response.upload_completion
        return lambda: _everywhere(future.done()) and future.exception() is None


class Megatrons(Trainer):
    """Its temporal caller, which forks. The persistent one is a new process that asks for CUDA, and hangs without."""

    def __init__(self) -> None:
        self.who: Megatron = Megatron(parallel=False)
        calls = importlib.import_module(
            "megatron.core.dist_checkpointing.strategies.async_utils"
        )
        self._queue = calls.AsyncCallsQueue()

    def begin(self, declared: Any, folder: Path) -> FINISHED:
        folder.mkdir(exist_ok=True)
        dist.barrier()
        self._queue.schedule_async_request(self.who.save_later(declared, folder))
        return lambda: bool(self._queue.maybe_finalize_async_calls(blocking=False))


TRAINERS: dict[str, Callable[[Place], Trainer]] = {
    "torch DCP, thread": lambda place: Stock(
        place, AsyncCheckpointerType.THREAD, False
    ),
    "torch DCP, thread, reuse": lambda place: Stock(
        place, AsyncCheckpointerType.THREAD, True
    ),
    "torch DCP, process": lambda place: Stock(
        place, AsyncCheckpointerType.PROCESS, False
    ),
    "Megatron, fork": lambda _: Megatrons(),
}
if not hasattr(staging, "DefaultStager"):  # torch 2.8
    del TRAINERS["torch DCP, thread, reuse"]


PREPARED = ", prepared"
"""The end of a trainer's name: it gives the queue the size of a rank's save beforehand."""


def trainer(name: str, place: Place, nbytes: int) -> Trainer:
    """``nbytes``: the bytes that this rank saves."""
    made = TRAINERS.get(name)
    if made is not None:
        return made(place)
    staging_bytes = nbytes if name.endswith(PREPARED) else None
    name = name.removesuffix(PREPARED)
    persistent = name.endswith(", process")
    return Ours(name.removesuffix(", process"), persistent, staging_bytes)


@dataclass(frozen=True)
class Trained:
    """Seconds of one rank: how long the save blocked it; a step alone, and during a save; and the extra time.

    The extra time is how much longer all steps took, until the save was complete, than the same steps alone.
    """

    blocked: float
    idle: float
    busy: float
    lost: float


class Training:
    """Steps of a trainer: work, and a message among all ranks at the end of each.

    The work is arithmetic that keeps a core busy, or work of a device: then the trainer waits for the same time.
    """

    def __init__(self) -> None:
        self._a = torch.rand(256, 256, device="cpu")
        self._b = torch.rand(256, 256, device="cpu")
        self._gradient = torch.zeros(1 << 16, device="cpu")
        began, products = time.perf_counter(), 0
        while time.perf_counter() - began < STEP_SECONDS:
            self._b.copy_(self._a @ self._b).div_(self._b.norm())
            products += 1
        counted = torch.tensor(products, device="cpu")
        dist.all_reduce(counted)
        self._products = max(1, int(counted) // dist.get_world_size())

    def step(self, on_device: bool) -> float:
        began = time.perf_counter()
        if on_device:
            time.sleep(STEP_SECONDS)
        else:
            for _ in range(self._products):
                self._b.copy_(self._a @ self._b).div_(self._b.norm())
        dist.all_reduce(self._gradient)
        return time.perf_counter() - began

    def beside(
        self,
        begin: Callable[[], FINISHED],
        change: Callable[[], None] | None,
        on_device: bool,
    ) -> Trained:
        """Train during a save; ``change`` is called as soon as the saved state may be changed."""
        idle = sum(self.step(on_device) for _ in range(IDLE_STEPS)) / IDLE_STEPS
        dist.barrier()
        began = time.perf_counter()
        finished = begin()
        blocked = time.perf_counter() - began
        if change is not None:
            change()
        steps = [self.step(on_device)]
        while not finished():
            steps.append(self.step(on_device))
        lost = time.perf_counter() - began - len(steps) * idle
        return Trained(blocked, idle, sum(steps) / len(steps), lost)


def _everywhere(done: bool) -> bool:
    flag = torch.tensor(int(done), device="cpu")
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def memcpy(tensors: list[torch.Tensor], nbytes: int) -> float:
    """Seconds of one copy of ``nbytes`` of these bytes into memory that has been written before."""
    parts, left = [], nbytes
    for tensor in tensors:
        octets = tensor.view(torch.uint8).reshape(-1)[:left]
        parts.append((octets, torch.zeros_like(octets)))
        left -= len(octets)
    taken = []
    for _ in range(2):
        dist.barrier()
        began = time.perf_counter()
        for source, target in parts:
            target.copy_(source)
        taken.append(time.perf_counter() - began)
    return taken[-1]
