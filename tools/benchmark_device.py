"""Saves from a CUDA device and loads into it, compared with the limits of the bus and the disk.

    PYTHONPATH=. python3 tools/benchmark_device.py [--gib 4] [--tensors 64] [--to /dev/shm --to FOLDER] [--rounds 3]

For each folder: seconds and GB/s of a save, of a load and of an asynchronous save, over the limit: the slower one
of a pinned copy and of plain writes (or reads) of the same bytes. And the share of the time from the call of an
asynchronous ``save`` until its copy is complete in which no kernel could run. ``--device cpu`` tries the program
out where there is no device; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import cast

import torch

import megackpt
from megackpt import AsyncRequest, ShardedTensor
from megackpt.staging.devices import pinned

PART = 16 << 20  # bytes of one plain write or read
SIDE = 2048  # of the matrices of a kernel


@dataclass(frozen=True)
class Bench:
    device: torch.device
    tensors: Sequence[torch.Tensor]
    rounds: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """The median of all rounds but the first, which pays for memory and imports."""
        found = []
        for _ in range(self.rounds + 1):
            self.settle()
            began = time.perf_counter()
            work()
            self.settle()
            found.append(time.perf_counter() - began)
        return median(found[1:])

    def state(self) -> dict[str, ShardedTensor]:
        return {
            f"weight{number}": ShardedTensor.from_rank_offsets(
                f"weight{number}", tensor
            )
            for number, tensor in enumerate(self.tensors)
        }

    def copies(self) -> tuple[float, float]:
        """Seconds of a pinned copy of all bytes, to the host and back."""
        host = [pinned(t.nbytes).view(t.dtype).view(t.shape) for t in self.tensors]

        def copy(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
            for place, value in zip(into, values, strict=True):
                place.copy_(value, non_blocking=True)

        down = self.seconds(lambda: copy(host, self.tensors))
        return down, self.seconds(lambda: copy(self.tensors, host))

    def files(self, folder: Path) -> tuple[float, float]:
        """Seconds of plain writes of as many bytes, with fsync, and of plain reads of them."""
        data = memoryview(bytearray(PART))
        path = folder / "plain"

        def write() -> None:
            with open(path, "wb", buffering=0) as file:
                file.writelines(data for _ in range(0, self.nbytes, PART))
                os.fsync(file)

        def read() -> None:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(data):
                    pass

        try:
            return self.seconds(write), self.seconds(read)
        finally:
            path.unlink()

    def kernels(self, number: int) -> None:
        matrix = torch.ones(SIDE, SIDE, device=self.device)
        for _ in range(number):
            matrix @ matrix

    def without_kernels(self, folder: Path, copy: float, *, wait: bool) -> float:
        """The share of the time from the call until the copy is complete in which no kernel ran.

        Kernels that take twice as long as the copy follow the save. They cannot run while ``save`` occupies the
        thread that would launch them, nor as long as they end later than they would alone.
        """
        number = max(1, round(2 * copy / self.seconds(lambda: self.kernels(1))))
        alone = self.seconds(lambda: self.kernels(number))
        shares = []
        for _ in range(self.rounds + 1):
            self.settle()
            began = time.perf_counter()
            save = partial(megackpt.save, self.state(), folder / "asynchronous")
            request = save(async_sharded_save=True, wait_staged=wait)
            returned = time.perf_counter()
            self.kernels(number)
            self.settle()
            lost = max(0.0, time.perf_counter() - returned - alone)
            blocked = returned - began
            shares.append((blocked + lost) / (blocked + max(copy, lost)))
            cast(AsyncRequest, request).execute_sync()
        return median(shares[1:])


def measure(bench: Bench, folder: Path) -> None:
    down, up = bench.copies()
    write, read = bench.files(folder)
    gigabytes = bench.nbytes / 1e9
    path = folder / "checkpoint"

    def show(name: str, seconds: float, limit: float) -> None:
        ratio = f"{seconds / limit:8.2f}" if limit else " " * 8
        print(f"{name:50}{seconds:9.3f} s{gigabytes / seconds:9.2f} GB/s{ratio}")

    print(f"\n{folder}, {gigabytes:.2f} GB{'':36}{'/ limit':>16}")
    show("pinned copy to the host", down, 0)
    show("pinned copy to the device", up, 0)
    show("plain write, fsync", write, 0)
    show("plain read, warm", read, 0)
    save = bench.seconds(lambda: megackpt.save(bench.state(), path))
    show("save", save, max(down, write))
    for verify in (False, True):
        load = bench.seconds(lambda: megackpt.load(bench.state(), path, verify=verify))  # noqa: B023
        show(f"load, {'verified' if verify else 'unverified'}", load, max(up, read))
    for wait in (True, False):
        share = bench.without_kernels(folder, down, wait=wait)
        print(f"no kernel could run, wait_staged={wait!s:17}{share:11.1%}")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--to", type=Path, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    print(f"{name}; torch {torch.__version__}, Python {platform.python_version()}")
    rows = max(1, int(options.gib * 2**30) // (options.tensors * 4096))
    tensors = [torch.randn(rows, 1024, device=device) for _ in range(options.tensors)]
    bench = Bench(device, tensors, options.rounds)
    for parent in options.to or [Path("/dev/shm"), Path(tempfile.gettempdir())]:
        folder = Path(tempfile.mkdtemp(prefix="megackpt-device-", dir=parent))
        try:
            measure(bench, folder)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
