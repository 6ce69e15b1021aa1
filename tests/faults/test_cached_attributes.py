"""Overwriting saves of two hosts, each with a mount of its own of a file system that caches attributes (sshfs)."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from tests.faults.share import part

SERVER = "/usr/lib/openssh/sftp-server"
ROWS = 1 << 18  # of each rank: 1 MiB


def mounted(real: str, folder: str) -> None:
    """In this process alone, ``folder`` becomes a mount of ``real`` by sshfs."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x00020000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWNS
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    server = Path(f"{real}.{os.environ['RANK']}")
    server.write_text(f"#!/bin/sh\nexec {SERVER}\n")
    server.chmod(0o755)
    subprocess.run(
        ["sshfs", "-o", f"ssh_command={server}", f"host:{real}", folder], check=True
    )


def saves_of_a_rank(real: str, folder: str, count: int) -> None:
    mounted(real, folder)
    rank, where = int(os.environ["RANK"]), f"{folder}/c"
    failed, retries = [], []
    watch = megackpt.watching(
        lambda e: e.stage == "total" and retries.append(e.retries)
    )
    try:
        for value in range(count):
            half = torch.full((ROWS,), float(value))
            declared = ShardedTensor.from_rank_offsets("w", half, (0, rank, 2))
            try:
                megackpt.save({"w": declared}, where, timeout=timedelta(seconds=30))
            except megackpt.CheckpointingException as error:
                failed.append(f"{value}: {str(error).splitlines()[0]}")
    finally:
        watch.stop()
        subprocess.run(["fusermount3", "-u", "-z", folder], check=True)
    print(len(failed), sum(map(bool, retries)), *failed, sep="\n")


@pytest.mark.root
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(10, marks=pytest.mark.slow),
        pytest.param(part(300), marks=pytest.mark.campaign),
    ],
)
def test_overwriting_saves_over_two_mounts(
    ranks: Callable[..., list[Any]],
    tmp_path: Path,
    note: Callable[..., None],
    count: int,
) -> None:
    if shutil.which("sshfs") is None or not os.path.exists(SERVER):
        pytest.skip("needs sshfs and openssh-sftp-server")
    real, folder = tmp_path / "real", tmp_path / "mount"
    real.mkdir()
    folder.mkdir()
    done = ranks(
        saves_of_a_rank, 2, str(real), str(folder), count, timeout=60 + count * 6
    )
    told = [rank.stdout.splitlines() for rank in done]
    head = "saves over two mounts of sshfs", "failed", "looked again"
    note(head, count, told[0][0], told[0][1])
    assert [lines[0] for lines in told] == ["0", "0"], told
    state = megackpt.load_plain_tensors(real / "c")
    assert state["w"].eq(count - 1).all()
    assert os.listdir(real) == ["c"]
