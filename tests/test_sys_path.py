"""Entries of sys.path that Python passes over do not keep processes of ours from starting."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import ShardedTensor


class Odd(str):
    """A text that shows itself in another way."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Odd(...)"

    def __str__(self) -> str:
        return "somewhere else"


def test_writer_processes_and_workers_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(4.0))}
    # Python's own search for plug-ins fails at bytes: it is done before they are there, and once in a process.
    megackpt.save(state, tmp_path / "first")
    odd = [
        Path("/some/where"),
        b"/in/bytes",
        None,
        7,
        Odd("/odd"),
        "/quoted'\"{path}\\",
        "/\udc80",
    ]
    monkeypatch.setattr(sys, "path", [*odd, *sys.path])
    queue = megackpt.AsyncCallsQueue(persistent=True)
    request = megackpt.save(state, tmp_path / "a", async_sharded_save=True)
    assert request is not None
    queue.schedule_async_request(request)
    queue.close()
    megackpt.convert(tmp_path / "a", tmp_path / "b", "zarr", workers=2)
    for name in ("a", "b"):
        assert torch.equal(
            megackpt.load_plain_tensors(tmp_path / name)["w"], torch.arange(4.0)
        )
