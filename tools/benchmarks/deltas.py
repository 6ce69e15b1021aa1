"""P19: versions of weights, each of which is published as what changed since the version before."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numcodecs.zstd import compress  # type: ignore[import-untyped]

import megackpt
from benchmarks.memory import taken
from benchmarks.pretrained import Pretrained
from benchmarks.ranks import BenchmarkFailed
from benchmarks.table import Row, Section, Value
from megackpt.deltas import WeightPublisher, apply, materialize

OURS, XOR, PAIRS = "megackpt", "XOR + zstd-1", "index and value"
SHARES = {0.011: "<= 1.4", 0.025: "<= 1.25"}
"""The share of the elements that change in a step -> the bound of the bytes for each of them."""
RATES = (1e-6, 1e-5)
TENSORS, COLUMNS = 8, 1024
WARMUP = 10
"""Steps of the optimizer before the first version."""
DISK = 0.7e9
"""Bytes that a slower disk writes in a second."""

Weights = dict[str, torch.Tensor]
Bits = dict[str, Any]  # arrays of uint16


def compare(root: Path, section: Section, nbytes: float, rounds: int) -> None:
    works: list[Callable[[], list[Row]]] = [
        *(partial(stepped, root, nbytes, share, rounds) for share in SHARES),
        partial(applied, root, nbytes, rounds),
        partial(blocked, root, nbytes, rounds),
        partial(held, root, nbytes),
        *(
            partial(learned, root, rate, 7 * rounds)
            for rate in RATES
            if not Pretrained.missing()
        ),
    ]
    for work in works:
        print(f"{time.strftime('%H:%M:%S')} P19", file=sys.stderr, flush=True)
        # A fork: the process of the benchmark, which forks all ranks, has no threads.
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            section.rows += pool.submit(work).result()


class Simulated:
    """bf16 weights N(0, 0.02), of which a step moves some by one unit in the last place."""

    def __init__(self, nbytes: float) -> None:
        torch.set_num_threads(1)
        shape = max(round(nbytes / TENSORS / COLUMNS / 2), 1), COLUMNS
        self.chance = np.random.default_rng(1)
        self.state: Weights = {}
        for number in range(TENSORS):
            drawn = self.chance.standard_normal(shape, np.float32) * np.float32(0.02)
            self.state[f"layers.{number}.weight"] = torch.from_numpy(drawn).bfloat16()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state.values())

    def step(self, share: float) -> None:
        for bits in bits_of(self.state).values():
            places = np.flatnonzero(self.chance.random(len(bits), np.float32) < share)
            up = self.chance.random(len(places), np.float32) < 0.5
            up |= bits[places] & 0x7FFF == 0  # 0 minus one unit would be NaN
            bits[places] += np.where(up, 1, 0xFFFF).astype(np.uint16)


def stepped(root: Path, nbytes: float, share: float, rounds: int) -> list[Row]:
    """Bytes, CPU time and time of synchronous publishes, and of full saves of the same weights."""
    weights = Simulated(nbytes)
    gib, what = weights.nbytes / 2**30, f"{share:.1%} of simulated weights changed"
    found = defaultdict(list)
    folder, full = root / "weights", root / "full"
    with WeightPublisher(folder) as publisher:
        publisher.publish(0, weights.state)
        for number in range(1, rounds + 2):
            before = copied(weights.state)
            weights.step(share)
            cpu, seconds = timed(partial(publisher.publish, number, weights.state))
            _, save = timed(
                partial(megackpt.save, megackpt.sharded(weights.state), full)
            )
            shutil.rmtree(full)
            if number == 1:
                continue  # plans and memory are new
            found["cpu"].append(cpu / gib)
            found["share"].append(seconds / save)
            found["slow"].append(seconds / (weights.nbytes / DISK))
            found["disk"].append(weights.nbytes / save / 1e9)
            for name, size in sizes(folder, number, before, weights.state).items():
                found[name].append(size / count(before, weights.state))
    check(version(folder, rounds + 1), weights.state)
    shutil.rmtree(folder)
    return [
        row(f"{what}: bytes for each", SHARES[share], found, OURS, XOR, PAIRS),
        row(f"{what}: CPU a GiB of a publish", "<= 1.5", found, "cpu", unit="s"),
        row(f"{what}: publish / full save", "", found, "share"),
        row(f"{what}: full save", "", found, "disk", unit="GB/s"),
        row(
            f"{what}: publish / full save at {DISK / 1e9} GB/s", "<= 0.5", found, "slow"
        ),
    ]


def applied(root: Path, nbytes: float, rounds: int) -> list[Row]:
    """Directories of an engine: one version more, and a full load and rewrite of all weights."""
    weights, folder = Simulated(nbytes), root / "weights"
    found = defaultdict(list)
    memory = copied(weights.state)
    full, copy, inside, rewritten = (
        root / name for name in ("full", "copy", "inside", "rewritten")
    )
    with WeightPublisher(folder) as publisher:
        publisher.publish(0, weights.state)
        for engine in (copy, inside):
            materialize(folder, 0, engine)
        for number in range(1, rounds + 2):
            weights.step(0.025)
            publisher.publish(number, weights.state)
            megackpt.save(megackpt.sharded(weights.state), full)
            _, rewrite = timed(partial(load_and_rewrite, full, memory, rewritten))
            for engine in (copy, inside):
                work = partial(apply, engine, folder, number, engine == inside)
                _, seconds = timed(work)
                if number > 1:
                    found[engine.name].append(seconds / rewrite)
            for each in (full, rewritten):
                shutil.rmtree(each)
    for engine in (copy, inside):
        check(engine, weights.state)
    for each in (folder, copy, inside):
        shutil.rmtree(each)
    what = "apply of a version / full load and rewrite"
    return [
        row(f"{what}, in place", "<= 0.5", found, "inside"),
        row(f"{what}, of a copy", "<= 0.5", found, "copy"),
    ]


def load_and_rewrite(full: Path, memory: Weights, rewritten: Path) -> None:
    megackpt.load(megackpt.sharded(memory), full)
    megackpt.save(megackpt.sharded(memory), rewritten, "safetensors")


def blocked(root: Path, nbytes: float, rounds: int) -> list[Row]:
    """How long the trainer waits for a publish whose predecessor is written meanwhile."""
    weights, folder = Simulated(nbytes), root / "weights"
    found = defaultdict(list)
    memory = copied(weights.state)
    with WeightPublisher(folder) as publisher:
        publisher.publish(0, weights.state)
        _, pause = timed(partial(publisher.publish, 1, weights.state))
        for number in range(2, rounds + 3):
            weights.step(0.025)
            _, copy = timed(partial(copy_into, memory, weights.state))
            publish = partial(
                publisher.publish, number, weights.state, asynchronous=True
            )
            _, seconds = timed(publish)
            time.sleep(4 * pause)  # until it is written
            if number > 2:
                found["blocked"].append(seconds / copy)
    check(version(folder, rounds + 2), weights.state)
    shutil.rmtree(folder)
    what = "asynchronous publish: trainer blocked / one copy"
    return [row(what, "<= 1.2", found, "blocked")]


def held(root: Path, nbytes: float) -> list[Row]:
    """The memory that a publisher keeps."""
    weights, folder = Simulated(nbytes), root / "weights"
    idle = taken(os.getpid())
    with WeightPublisher(folder) as publisher:
        publisher.publish(0, weights.state)
        for number in (1, 2):
            weights.step(0.025)
            publisher.publish(number, weights.state)
        gc.collect()
        kept = publisher.snapshot_bytes / weights.nbytes
        grown = (taken(os.getpid()) - idle) / weights.nbytes
    shutil.rmtree(folder)
    found = {"kept": [kept], "grown": [grown]}
    return [
        row("snapshot / bytes that the rank writes", "<= 1.1", found, "kept"),
        row("growth of the process / bytes that the rank writes", "", found, "grown"),
    ]


def learned(root: Path, rate: float, steps: int) -> list[Row]:
    """Versions of a real model. Each is one step of AdamW after the version before."""
    torch.set_num_threads(1)
    trainer, folder = Pretrained(rate), root / "weights"
    for _ in range(WARMUP):
        trainer.step()
    found = defaultdict(list)
    with WeightPublisher(folder, dtype=torch.bfloat16) as publisher:
        publisher.publish(0, trainer.masters)
        for number in range(1, steps + 1):
            before = copied(trainer.weights)
            trainer.step()
            publisher.publish(number, trainer.masters)
            changed = count(before, trainer.weights)
            least = entropy(before, trainer.weights) / 8
            found["share"].append(
                100 * changed / sum(map(torch.numel, before.values()))
            )
            for name, size in sizes(folder, number, before, trainer.weights).items():
                found[name].append(size / least)
                found[f"{name}, each"].append(size / changed)
            pieces = (version(folder, number) / "changes_00000.bin").stat().st_size
            found["pieces"].append(pieces / least)
    check(version(folder, steps), trainer.weights)
    shutil.rmtree(folder)
    what = f"a real model, learning rate {rate:.0e}"
    each = [f"{name}, each" for name in (OURS, XOR, PAIRS)]
    return [
        row(f"{what}: elements that a step changes", "", found, "share", unit="%"),
        row(f"{what}: bytes for each", "", found, *each),
        row(f"{what}: bytes / entropy", "<= 1.25", found, OURS, XOR, PAIRS),
        row(f"{what}: bytes without the index / entropy", "", found, "pieces"),
    ]


def row(what: str, reach: str, found: Any, *names: str, unit: str = "") -> Row:
    """One name: of ours."""
    columns = zip((OURS, XOR, PAIRS), names, strict=False)
    values = {column: Value.of(found[name]) for column, name in columns}
    return Row("P19", what, reach, unit, values)


def version(folder: Path, number: int) -> Path:
    return folder / f"version_{number:06d}"


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the CPU, and of the clock. The disk is idle before."""
    os.sync()
    cpu, start = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - start


def copy_into(memory: Weights, state: Weights) -> None:
    for key, tensor in state.items():
        memory[key].copy_(tensor)


def copied(state: Weights) -> Weights:
    return {key: tensor.clone() for key, tensor in state.items()}


def bits_of(state: Weights) -> Bits:
    return {
        key: tensor.view(torch.int16).numpy().view(np.uint16).reshape(-1)
        for key, tensor in state.items()
    }


def count(before: Weights, after: Weights) -> int:
    pairs = zip(bits_of(before).values(), bits_of(after).values(), strict=True)
    return sum(int(np.count_nonzero(old != new)) for old, new in pairs)


def sizes(folder: Path, number: int, before: Weights, after: Weights) -> dict[str, int]:
    """Bytes of all files of a version; of one frame of zstd for each tensor; of 4 + 2 bytes."""
    pairs = list(zip(bits_of(before).values(), bits_of(after).values(), strict=True))
    files = version(folder, number).iterdir()
    return {
        OURS: sum(file.stat().st_size for file in files),
        XOR: sum(len(compress(old ^ new, 1)) for old, new in pairs),
        PAIRS: 6 * count(before, after),
    }


def entropy(before: Weights, after: Weights) -> float:
    """Bits of the places and of the differences, if each tensor has a distribution of its own."""
    total = 0.0
    pairs = zip(bits_of(before).values(), bits_of(after).values(), strict=True)
    for old, new in pairs:
        differences = (new - old)[old != new]
        changed = np.array([len(differences), len(old) - len(differences)])
        _, counts = np.unique(differences, return_counts=True)
        for numbers in (changed, counts):
            shares = numbers[numbers > 0] / numbers.sum()
            total -= numbers.sum() * float((shares * np.log2(shares)).sum())
    return total


def check(folder: Path, state: Weights) -> None:
    loaded = {key: torch.empty_like(tensor) for key, tensor in state.items()}
    megackpt.load(megackpt.sharded(loaded), folder)
    if count(loaded, state):
        raise BenchmarkFailed(f"{folder} has other weights than were published")
