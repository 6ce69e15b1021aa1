"""Processes without standard streams (daemons, ``2>&-``), or with streams that cannot be written to."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.__main__ import main

SCRIPT = """
    import os, sys
    import torch, megackpt
    from megackpt import ShardedTensor

    class Noisy:
        def __getstate__(self):  # while files are being written, as a C library might
            for stream in range(3):
                try:
                    os.write(stream, b"noise" * 100)
                except OSError:
                    pass
            return {"kept": 1}

    assert sys.stderr is None
    state = {
        "w": ShardedTensor.from_rank_offsets("w", torch.arange(1000.0)),
        **{f"o{i}": megackpt.ShardedObject(f"o{i}", Noisy(), (1,), (0,)) for i in range(8)},
    }
    with megackpt.progress():
        megackpt.save(state, "progress")
    with megackpt.progress(force=True):
        megackpt.save(state, "forced")
    queue = megackpt.AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(megackpt.save(state, "queue", async_sharded_save=True))
    queue.close()
    megackpt.convert("queue", "converted", "zarr", workers=2)
    for name in ("progress", "forced", "queue", "converted"):
        assert megackpt.verify(name).ok, name
        assert torch.equal(megackpt.load_plain_tensors(name)["w"], torch.arange(1000.0))
    open("done", "w").close()
"""


def run(command: str, *arguments: str, where: Path) -> int:
    """The exit status of a shell's command, in which "$@" are the arguments."""
    return subprocess.run(
        ["sh", "-c", command, "sh", *arguments], cwd=where, check=False, timeout=240
    ).returncode


@pytest.mark.parametrize(
    "closed", [pytest.param("2>&-", marks=pytest.mark.slow), "<&- >&- 2>&-"]
)
def test_saves_queues_and_conversions(tmp_path: Path, closed: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    assert run(f'exec "$@" {closed}', sys.executable, str(script), where=tmp_path) == 0
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("streams", "arguments", "status"),
    [
        ("2>&-", ["verify", "good"], 0),
        (">/dev/full", ["verify", "good", "--json"], 6),
    ],
)
def test_exit_statuses(
    tmp_path: Path, streams: str, arguments: list[str], status: int
) -> None:
    megackpt.save(
        {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}, tmp_path / "good"
    )
    command = [sys.executable, "-m", "megackpt", *arguments]
    assert run(f'exec "$@" {streams}', *command, where=tmp_path) == status


class Full:
    """A stream on a full disk."""

    closed = False
    encoding = "utf-8"

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("command", ["verify", "show", "convert"])
def test_the_command_line_without_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    good, bad, nothing = (str(tmp_path / name) for name in ("good", "bad", "nothing"))
    for name in (good, bad):
        megackpt.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}, name)
    for path in Path(bad).glob("*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))
    rest = (
        [str(tmp_path / "out"), "--to", "zarr", "--workers", "1"]
        if command == "convert"
        else []
    )
    expected = {good: 0, nothing: 3} | ({bad: 1} if command == "verify" else {})
    for stdout, stderr in (
        (None, None),
        (sys.stdout, None),
        (None, sys.stderr),
        (sys.stdout, Full()),
    ):
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", stderr)
        for name, status in expected.items():
            more = [*rest, "--overwrite"] if rest else []
            assert main([command, name, *more]) == status
            if stdout is not None:
                assert main([command, name, *more, "--json"]) == status
    monkeypatch.undo()
