"""Runs commands as users do: in this process, through pipes, and on terminals."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.__main__ import main

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "megackpt"]


def make_state(value: float = 0.0) -> dict[str, Any]:
    weight = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024) + value
    return {
        "halves": [
            ShardedTensor.from_rank_offsets("w", h, (0, i, 2))
            for i, h in enumerate(weight.chunk(2))
        ],
        "step": ShardedTensor.from_rank_offsets("step", torch.tensor(7)),
        "o": ShardedObject("rng", {"seed": 1}, (1,), (0,)),
        "iteration": 5,
    }


@pytest.fixture
def state() -> Callable[..., dict[str, Any]]:
    return make_state


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    megackpt.save(make_state(), tmp_path / "ckpt")
    return tmp_path / "ckpt"


@pytest.fixture
def plain(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command in this process; its exit status is checked, and its stdout returned."""

    def run(*arguments: str | Path, status: int = 0) -> str:
        assert main([str(a) for a in arguments]) == status
        return capsys.readouterr().out

    return run


@pytest.fixture
def asked(plain: Callable[..., str]) -> Callable[..., Any]:
    """Run a command with --json."""
    return lambda *arguments, status=0: json.loads(
        plain(*arguments, "--json", status=status)
    )


class Shown(NamedTuple):
    """What a command did on a terminal."""

    status: int
    raw: str

    @property
    def text(self) -> str:
        """What a person sees: without colours, trailing spaces, carriage returns."""
        bare = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.raw)
        return "\n".join(line.rstrip() for line in bare.replace("\r", "").split("\n"))


def run_on_terminal(*arguments: str | Path, width: int = 100, **env: str) -> Shown:
    """Run a command in a process whose stdin, stdout and stderr are a terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR", "LC_ALL", "LANG")
    }
    env = {**kept, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **env}
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=env,
        cwd=ROOT,
    )
    os.close(slave)
    parts = []
    while True:
        try:
            part = os.read(master, 1 << 16)
        except OSError:  # Linux reports the closed other end so
            break
        parts.append(part)
    os.close(master)
    return Shown(process.wait(), b"".join(parts).decode())


def run_piped(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **env},
    )


@pytest.fixture
def on_terminal() -> Callable[..., Shown]:
    """Run a command in a process on a terminal."""
    return run_on_terminal


@pytest.fixture
def piped() -> Callable[..., Any]:
    """Run a command in a process whose output is a pipe."""
    return run_piped
