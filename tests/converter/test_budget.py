"""Sizes as people write them, and how many workers a bound of memory allows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

import megackpt
from megackpt import ShardedObject, limits
from megackpt.checkpoint import open_checkpoint
from megackpt.converter.budget import parse_size, worker_count
from megackpt.converter.conversion import ConversionOptions
from megackpt.errors import BackendError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (5, 5), ("5", 5), ("64MiB", 64 << 20), ("1GB", 10**9), ("1.5 GiB", 3 << 29), ("512k", 512_000), ("2ki", 2048),
        ("1TiB", 1 << 40), (" 7 mb ", 7_000_000), ("0.5M", 500_000), ("100B", 100),
    ],
)  # fmt: skip
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "MiB", "-5", "1e9", "5XiB", "64 MiB!", "1,5GB", "i5", "5i"]
)
def test_a_text_that_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size in bytes"):
        parse_size(text)


def test_workers() -> None:
    alone = limits.CONVERT_SINGLE_PROCESS_BYTES
    large, many, each = 10 * alone, 100, 32 << 20
    assert worker_count(1 << 40, 7, many, large, each) == 7
    assert worker_count(1 << 40, 7, 3, large, each) == 3
    assert worker_count(1 << 40, 7, 0, 0, each) == 1
    assert worker_count(1 << 40, None, many, alone, each) == 1
    assert worker_count(64 << 20, 7, many, large, each) == 2
    assert worker_count(64 << 20, 7, many, large, each + 1) == 1
    with pytest.raises(ValueError, match="at least 1"):
        ConversionOptions(workers=0)


def test_a_limit_that_is_too_small_is_refused_with_one_that_fits(
    tmp_path: Path,
) -> None:
    megackpt.save(
        {"o": ShardedObject("blob", b"x" * (40 << 20), (1,), (0,)), "n": 1},
        tmp_path / "a",
    )
    with pytest.raises(
        BackendError,
        match=r"'blob' \[0:1\] is an object of 4194\d+ bytes.*64MiB.* Give 1\d\dMiB",
    ) as raised:
        megackpt.convert(tmp_path / "a", tmp_path / "b", "zarr", max_memory="64MiB")
    assert not (tmp_path / "b").exists()
    megackpt.convert(
        tmp_path / "a",
        tmp_path / "b",
        "torch_dist",
        max_memory=str(raised.value).split()[-1],
    )
    megackpt.convert(
        tmp_path / "a", tmp_path / "c", "torch_dist", max_memory="64MiB", exclude="blob"
    )
    with pytest.raises(BackendError, match="at least max_memory=32MiB"):
        megackpt.convert(
            tmp_path / "a", tmp_path / "d", "torch_dist", max_memory="1MiB"
        )


def test_a_chunk_that_is_compressed_in_one_piece(tmp_path: Path) -> None:
    """16 MiB in one chunk, as Megatron's zarr had it, but compressed: refused, or decoded once.

    A library may have the stored bytes and the elements in memory."""
    values = np.arange(1 << 22, dtype="f4").reshape(2048, 2048) % 1000
    array = zarr.create_array(
        tmp_path / "a" / "w",
        shape=values.shape,
        chunks=values.shape,
        dtype="f4",
        zarr_format=2,
    )
    array[:] = values
    torch.save({}, tmp_path / "a" / "common.pt")
    with pytest.raises(
        BackendError,
        match=r"'w' .* is a chunk that is decoded whole, in memory of 33554432 bytes.* Give 88MiB",
    ):
        megackpt.convert(
            tmp_path / "a", tmp_path / "b", "torch_dist", max_memory="40MiB"
        )
    megackpt.convert(tmp_path / "a", tmp_path / "b", "torch_dist", max_memory="88MiB")
    assert (megackpt.load_plain_tensors(tmp_path / "b")["w"].numpy() == values).all()
    assert len(open_checkpoint(tmp_path / "b").manifest.chunks_of("w")) == 1
