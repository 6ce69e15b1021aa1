"""P18: the share of a load from the disk that an asynchronous load hides beside a computation of one thread."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

import megackpt
from benchmarks.contestants import Megackpt
from benchmarks.figures import start_row
from benchmarks.ranks import BenchmarkFailed
from benchmarks.states import Spec, pieces
from benchmarks.table import Section, Value

LONGER = 1.5
"""The computation takes this many times the load."""
SIDE = 1024  # rows and columns of the matrices


def compare(root: Path, section: Section, nbytes: float, rounds: int) -> None:
    what = "load, verified, hidden beside a computation"
    row = start_row(section, "P18", what, ">= 0.9")
    for name in section.columns:
        folder = root / f"beside.{name.replace(' ', '-')}"
        # A fork: the process of the benchmark, which forks all ranks, has no threads.
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            taken = pool.submit(hidden, name, folder, nbytes, rounds).result()
        row.values[name] = Value.of(taken)
        shutil.rmtree(folder)


def hidden(name: str, folder: Path, nbytes: float, rounds: int) -> list[float]:
    """For each round 1 - (seconds of both together - of the computation alone) / of the load alone."""
    torch.set_num_threads(1)
    held = pieces(Spec.large(nbytes), 0, 1, 0)
    library = Megackpt(name.removeprefix("megackpt "))
    declared = library.declare(held)
    library.save(declared, folder)
    alone = partial(library.load, declared, folder, True)
    compute(1)
    # The first load and computation are not counted.
    forget(folder)
    steps = round(LONGER * seconds(alone) / seconds(partial(compute, 10)) * 10)
    found = []
    for _ in range(rounds):
        forget(folder)
        load = seconds(alone)
        computation = seconds(partial(compute, steps))
        for piece in held:
            piece.data.zero_()
        forget(folder)
        both = seconds(partial(together, declared, folder, steps))
        found.append(1 - (both - computation) / load)
        if not all(piece.is_filled() for piece in held):
            raise BenchmarkFailed(f"{name} loaded wrong values")
    return found


def together(
    declared: dict[str, megackpt.ShardedTensor], folder: Path, steps: int
) -> None:
    request = megackpt.load(declared, folder, asynchronous=True)
    compute(steps)
    request.wait()


def compute(steps: int) -> None:
    numbers = torch.ones(SIDE, SIDE, device="cpu")
    product = torch.empty(SIDE, SIDE, device="cpu")
    for _ in range(steps):
        torch.matmul(numbers, numbers, out=product)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    os.sync()
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
