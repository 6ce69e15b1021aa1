"""The memory that conversions take: all processes together, above what they take before the first tensor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import ShardedTensor

FORMATS = ("torch_dist", "zarr", "safetensors", "torch")
CAP = 64 << 20
ROOT = Path(__file__).resolve().parent.parent.parent

# Tells how much it and a worker take when all is imported and the source is open, waits for a line, and converts.
SCRIPT = """
import importlib, os, sys
import megackpt.converter
from megackpt.checkpoint import open_checkpoint
from megackpt.async_save.worker_process import WorkerProcess
from functools import partial
from megackpt.converter.conversion_workers import TaskRunner, open_runner
from megackpt.strategies import resolve

def taken(pid):
    lines = open(f"/proc/{pid}/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

source, target, to, cap, cast = sys.argv[1:]
opened, writer = open_checkpoint(source), resolve(to).make_backend()
importlib.import_module("torch")
runner = TaskRunner(source, opened.manifest.save_id, opened.backend, "/tmp", "", writer, True, bool(cast))
worker = WorkerProcess()
worker.send(partial(open_runner, runner))
while isinstance(worker.receive(), int):
    pass
idle = taken(worker.process.pid)
worker.end()
print(taken(os.getpid()), idle, flush=True)
sys.stdin.readline()
megackpt.convert(source, target, to, workers=2, max_memory=int(cap), cast=cast or None)
"""


def peak(source: Path, target: Path, to: str, cap: int = CAP, cast: str = "") -> int:
    """Bytes of anonymous memory of a conversion by two workers, at the most, beyond the idle ones'."""
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        str(source),
        str(target),
        to,
        str(cap),
        cast,
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, cwd=ROOT, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        idle, idle_worker = map(int, process.stdout.readline().split())
        process.stdin.write("\n")
        process.stdin.flush()
        most = samples = 0
        while process.poll() is None:
            workers = [
                pid
                for pid in _children(process.pid)
                if _command(pid) != _command(process.pid)
            ]
            above = [_taken(pid) - idle_worker for pid in workers]
            most = max(
                most, _taken(process.pid) - idle + sum(max(0, count) for count in above)
            )
            samples += 1
            time.sleep(0.002)
    assert process.returncode == 0
    assert samples > 50
    return most


def _children(pid: int) -> Iterator[int]:
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            yield from map(
                int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
            )
    except OSError:
        return


def _command(pid: int) -> bytes:
    """Between fork and exec a child shows its parent's, and its parent's memory."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _taken(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """640 MiB in every format: one tensor of 256 MiB, columns of tensor-parallel ranks, many small ones."""
    folder = tmp_path_factory.mktemp("sources")
    random = torch.Generator().manual_seed(1)
    large = torch.rand(16384, 4096, generator=random)
    wide = torch.rand(4096, 16384, generator=random)
    state = {
        "large": ShardedTensor.from_rank_offsets("large", large),
        "wide": [
            ShardedTensor.from_rank_offsets("wide", w.contiguous(), (1, i, 4))
            for i, w in enumerate(wide.chunk(4, 1))
        ],
        "small": [
            ShardedTensor.from_rank_offsets(f"s{i}", row)
            for i, row in enumerate(large[:1024])
        ],
        "iteration": 1,
    }
    megackpt.save(state, folder / "torch_dist")
    for to in FORMATS[1:]:
        megackpt.convert(folder / "torch_dist", folder / to, to)
    yield folder
    shutil.rmtree(folder)


PAIRS = [(source, to) for source in FORMATS for to in FORMATS]
SAMPLE = {("torch_dist", "zarr"), ("zarr", "safetensors")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "to"),
    [
        pytest.param(*pair, marks=() if pair in SAMPLE else pytest.mark.campaign)
        for pair in PAIRS
    ],
)
def test_no_pair_of_formats_exceeds_the_limit(tmp_path, sources, source, to) -> None:
    """A checkpoint ten times the cap."""
    taken = peak(sources / source, tmp_path / "out", to)
    shutil.rmtree(tmp_path / "out")
    assert taken <= 1.1 * CAP, f"{taken / CAP:.2f} x the cap"


@pytest.mark.campaign
@pytest.mark.parametrize("to", FORMATS)
def test_casting_does_not_exceed_the_limit(tmp_path, sources, to) -> None:
    taken = peak(sources / "torch_dist", tmp_path / "out", to, cast="bf16")
    shutil.rmtree(tmp_path / "out")
    assert taken <= 1.1 * CAP, f"{taken / CAP:.2f} x the cap"
