"""The processes of a benchmark: teams of ranks that run one command at a time.

Contestants that cannot share processes (Megatron changes torch) have separate teams; an idle team waits for its next
message. If any rank fails or dies, the whole run ends with its traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megackpt
from benchmarks import scale
from benchmarks.contestants import Contestant, Megackpt, Place, StockDcp
from benchmarks.doors import DOORS, ENGINES
from benchmarks.limit import Limit
from benchmarks.peers import (
    Megatron,
    Orbax,
    Safetensors,
    Tensorstore,
    TorchCheckpointing,
    ZarrPython,
)
from benchmarks.states import Piece, Spec, pieces
from benchmarks.trainer_doors import TRAINER_DOORS, TRAINER_ENGINES
from benchmarks.training import Trained, Trainer, Training, memcpy, trainer
from megackpt.async_save.worker_process import die_with_parent
from megackpt.staging.buffers import POOL

STEP = 300  # seconds after which a step has failed


class BenchmarkFailed(Exception):
    """A rank failed or died, or took too long: which one, and its error."""


@dataclass(frozen=True)
class Taken:
    """The resources that one rank took for one step."""

    seconds: float
    cpu: float
    read: int  # bytes asked of the kernel


@dataclass(frozen=True)
class _Failure:
    traceback_text: str


def contestant(name: str, place: Place) -> Contestant:
    match name:
        case "limit":
            return Limit(place)
        case "torch DCP":
            return StockDcp(place)
        case "Megatron" | "Megatron FP":
            return Megatron(name == "Megatron FP")
        case "safetensors":
            return Safetensors()
        case "tensorstore":
            return Tensorstore()
        case "zarr-python":
            return ZarrPython()
        case "torch_checkpointing":
            return TorchCheckpointing()
        case "orbax":
            return Orbax()
    doors = {**ENGINES, **TRAINER_ENGINES, **DOORS, **TRAINER_DOORS}
    if name in doors:
        return doors[name](place)
    return Megackpt(name.removeprefix("megackpt "))


class Rank:
    """One process of a team. Its public methods are the commands; all ranks get the same ones."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._contestants: dict[str, Contestant] = {}
        self._state: list[Piece] = []
        self._declared: dict[str, Any] = {}
        self._loaded: Any = None
        self._trainers: dict[str, Trainer] = {}
        self._training: Training | None = None

    def hold(self, spec: Spec | None, parts: int, strided: bool = False) -> None:
        """Hold this state from now on, cut into ``parts`` parts; None: no state. Caches of contestants are cleared."""
        self._contestants, self._state, self._declared, self._loaded = {}, [], {}, None
        if spec is not None:
            index, copy = self.place.rank % parts, self.place.rank // parts
            self._state = pieces(spec, index, parts, copy, strided=strided)

    def declare(self, name: str) -> None:
        """Get a contestant ready for the state that is held."""
        self._loaded = None
        if name not in self._contestants:
            self._contestants[name] = contestant(name, self.place)
        if name not in self._declared or self._contestants[name].wears_out:
            self._declared[name] = self._contestants[name].declare(self._state)

    def save(self, name: str, folder: Path) -> Taken:
        who, declared = self._contestants[name], self._declared[name]
        return _timed(lambda: who.save(declared, folder))

    def load(self, name: str, folder: Path, verify: bool) -> Taken:
        who, declared = self._contestants[name], self._declared[name]

        def step() -> None:
            self._loaded = who.load(declared, folder, verify)

        return _timed(step)

    def train(self, name: str, folder: Path, change: bool, on_device: bool) -> Trained:
        """Steps during an asynchronous save. ``change``: change all tensors as soon as the save allows it."""
        if name not in self._trainers:
            held = sum(piece.data.nbytes for piece in self._state)
            share = held * self.place.parts // self.place.ranks
            self._trainers[name] = trainer(name, self.place, share)
        self._training = self._training or Training()
        who = self._trainers[name]
        declared = who.who.declare(self._state)
        changing = self.blank if change else None
        return self._training.beside(
            lambda: who.begin(declared, folder), changing, on_device
        )

    def bare(self) -> None:
        """Let go of the memory that our trainers keep: it would not be seen as what the next one takes."""
        POOL.forget()

    def look_up(self) -> None:
        """Import what our users import, as P15 leaves that out."""
        for name in ("save", "load", "AsyncCallsQueue"):
            getattr(megackpt, name)

    def declare_for(self, name: str) -> None:
        """Get ready for a load of the checkpoint that this trainer saved."""
        who = self._trainers[name].who
        self._loaded, self._contestants[name] = None, who
        self._declared[name] = who.declare(self._state)

    def memcpy(self, nbytes: int) -> float:
        return memcpy([piece.data for piece in self._state], nbytes)

    def blank(self) -> None:
        for piece in self._state:
            piece.data.zero_()

    def wrong(self) -> list[str]:
        """The keys with wrong values."""
        loaded = self._loaded or {}
        return [p.key for p in self._state if not p.is_filled(loaded.get(p.key))]

    def fill(self) -> None:
        for piece in self._state:
            piece.fill()

    def figure(self, name: str, *arguments: Any) -> Any:
        """One of scale.py's."""
        return getattr(scale, name)(*arguments)


def _timed(step: Any) -> Taken:
    """From the moment all ranks start to the moment all are done."""
    dist.barrier()
    start, cpu, read = time.perf_counter(), _cpu(), _read_bytes()
    step()
    cpu, read = _cpu() - cpu, _read_bytes() - read
    dist.barrier()
    return Taken(time.perf_counter() - start, cpu, read)


def _cpu() -> float:
    """Of this process and of the children that it waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _read_bytes() -> int:
    fields = dict(
        line.split(": ") for line in Path("/proc/self/io").read_text().splitlines()
    )
    return int(fields["rchar"])


def _serve(place: Place, rendezvous: str, pipe: Connection) -> None:
    die_with_parent()
    os.setpgrp()  # so that processes of a contestant can be ended with it
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # warnings of the peers about themselves
    try:
        dist.init_process_group(
            "gloo",
            init_method=rendezvous,
            rank=place.rank,
            world_size=place.ranks,
            timeout=timedelta(seconds=STEP),
        )
        rank = Rank(place)
        while (command := pipe.recv()) is not None:
            method, arguments = command
            pipe.send(getattr(rank, method)(*arguments))
        dist.destroy_process_group()
    except EOFError:
        return
    except BaseException:  # noqa: BLE001 - it is reported, and ends the run
        pipe.send(_Failure(traceback.format_exc()))
    sys.stdout.flush()


class Team:
    """A number of ranks. ``with`` ends them, whatever happened."""

    def __init__(self, name: str, ranks: int, root: Path) -> None:
        self.name = name
        # A fork of a process that has imported torch and started no thread: ready at once.
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._ranks: list[BaseProcess] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = (Place(rank, ranks), f"file://{root}/rendezvous.{name}", theirs)
            process = context.Process(target=_serve, args=arguments, daemon=False)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._ranks.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._ranks if process.pid is not None]

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all ranks, in rank order. Raises BenchmarkFailed with the traceback of a rank that fails."""
        self.send(method, *arguments)
        return self.answers()

    def send(self, method: str, *arguments: Any) -> None:
        for pipe in self._pipes:
            pipe.send((method, arguments))

    def answers(self) -> list[Any]:
        found: dict[int, Any] = {}
        deadline = time.monotonic() + STEP
        while len(found) < len(self._pipes):
            late = [pipe for rank, pipe in enumerate(self._pipes) if rank not in found]
            ready = wait(late, max(deadline - time.monotonic(), 0))
            if not ready:
                raise BenchmarkFailed(f"team {self.name}: no answer within {STEP} s")
            for rank, pipe in enumerate(self._pipes):
                if pipe in ready:
                    found[rank] = self._answer(rank, pipe)
        return [found[rank] for rank in sorted(found)]

    def _answer(self, rank: int, pipe: Connection) -> Any:
        try:
            answer = pipe.recv()
        except EOFError:
            self._ranks[rank].join(5)
            code = self._ranks[rank].exitcode
            raise BenchmarkFailed(
                f"team {self.name}: rank {rank} died, exit status {code}"
            ) from None
        if isinstance(answer, _Failure):
            raise BenchmarkFailed(
                f"team {self.name}: rank {rank} failed\n{answer.traceback_text}"
            )
        return answer

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for pipe in self._pipes:
                pipe.send(None)
        for process in self._ranks:
            if kind is None:
                process.join(10)
            if process.is_alive() and process.pid is not None:
                os.killpg(process.pid, signal.SIGKILL)
                process.join()
