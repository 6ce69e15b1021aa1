"""Small checkpoints that are cut into many tasks, and what their files hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor, limits
from megackpt.checkpoint import open_checkpoint
from megackpt.loader.regions import Regions
from megackpt.planning.box import Box


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of 4 KiB and tasks of 16 KiB, in this process, so that a small checkpoint has many."""
    monkeypatch.setattr(limits, "CONVERT_CELL_BYTES", 4 << 10)
    monkeypatch.setattr(limits, "CONVERT_TASK_BYTES_MIN", 16 << 10)


def shard(key: str, value: torch.Tensor, *cuts: tuple[int, int, int]) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, value, *cuts)


def mixed() -> dict[str, Any]:
    """Tensors of many dtypes, shapes and shardings, objects, common state: about 100 KiB."""
    random = torch.Generator().manual_seed(1)
    wide = torch.rand(96, 128, generator=random)
    tall = torch.rand(50, 77, generator=random).to(torch.bfloat16)
    runs = torch.arange(3001, dtype=torch.int64)
    return {
        "columns": [
            shard("model.columns", part.contiguous(), (1, i, 4))
            for i, part in enumerate(wide.chunk(4, 1))
        ],
        "rows": [
            shard("model.rows", part, (0, i, 3))
            for i, part in enumerate((wide * 2).chunk(3))
        ],
        "tall": shard("model.tall", tall),
        "irregular": [
            ShardedTensor(
                "optim.runs", runs[a:b], runs.dtype, (b - a,), (3001,), (a,), None
            )
            for a, b in ((0, 999), (999, 1000), (1000, 3001))
        ],
        "small": [
            shard(f"model.bias.{i}", torch.full((i + 1,), i, dtype=torch.float16))
            for i in range(20)
        ],
        "scalar": shard("step", torch.tensor(7)),
        "flag": shard("flag", torch.tensor([True, False])),
        "complex": shard(
            "complex", torch.randn(5, 6, dtype=torch.complex64, generator=random)
        ),
        "empty": shard("empty", torch.zeros(0, 4)),
        "objects": [
            ShardedObject("rng", {"at": (i, j)}, (2, 2), (i, j))
            for i in range(2)
            for j in range(2)
        ],
        "iteration": 5,
        "args": {"lr": 0.1},
    }


@pytest.fixture
def state() -> dict[str, Any]:
    return mixed()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    megackpt.save(mixed(), tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def files() -> Callable[[Path], dict[str, bytes]]:
    """Every file of a folder, by its path below it."""
    return lambda folder: {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def assert_same() -> Callable[..., None]:
    return _assert_same


def _assert_same(one: Path, other: Path, state: bool = True) -> None:
    """Tensors bit by bit, objects and common state."""
    first, second = megackpt.load_plain_tensors(one), megackpt.load_plain_tensors(other)
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert tensor.dtype == second[key].dtype, key
        assert tensor.shape == second[key].shape, key
        assert torch.equal(octets(tensor), octets(second[key])), key
    if state:
        assert blobs(one) == blobs(other)


def blobs(folder: Path) -> dict[tuple[str, Box], bytes]:
    """Every object and the common state, as they are stored."""
    opened = open_checkpoint(folder)
    manifest, found = opened.manifest, {}
    for row, number in enumerate(manifest.chunks.tensor.tolist()):
        key, meta = manifest.tensors[number]
        if meta.is_object:
            box = manifest.chunks.boxes.row(row, len(meta.shape))
            (found[key, box],) = Regions(opened).blobs([(number, box)])
    return found


def octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
