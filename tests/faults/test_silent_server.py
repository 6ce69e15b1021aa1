"""A network file system (sshfs) whose server stops in the middle of a call."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import AsyncCallsQueue, CheckpointManager, ShardedTensor
from megackpt.checkpoint import verifying
from megackpt.errors import StorageError
from megackpt.loader import load_session
from megackpt.manager import retention

SERVER = "/usr/lib/openssh/sftp-server"
TIMEOUT = timedelta(seconds=4)


def state(value: float) -> dict[str, Any]:
    tensor = torch.full((1 << 20,), value)
    return {"w": ShardedTensor.from_rank_offsets("w", tensor)}


@contextmanager
def mounted(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A mount, and the process that serves it."""
    real, folder = tmp_path / "real", tmp_path / "mount"
    real.mkdir()
    folder.mkdir()
    script, number = tmp_path / "server", tmp_path / "number"
    script.write_text(f"#!/bin/sh\necho $$ > {number}\nexec {SERVER}\n")
    script.chmod(0o755)
    options = f"direct_io,ssh_command={script}"
    subprocess.run(["sshfs", "-o", options, f"host:{real}", folder], check=True)
    try:
        yield folder, int(number.read_text())
    finally:
        subprocess.run(["fusermount3", "-u", "-z", folder], check=True)


CALLS: dict[str, tuple[Any, str, str]] = {
    "restore": (load_session, "counted_target", r"reading .* must not be used"),
    "latest": (verifying, "stored_manifest", "find steps in"),
    "close": (retention, "remove", "remove steps in"),
    "finalize": (AsyncCallsQueue, "maybe_finalize_async_calls", "not moved a byte"),
}


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("call", CALLS)
def test_a_server_stops_in_the_middle_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """For 30 seconds. The trainer's thread gets an error that names the path long before."""
    if shutil.which("sshfs") is None or not os.path.exists(SERVER):
        pytest.skip("needs sshfs and openssh-sftp-server")
    owner, name, text = CALLS[call]
    real = getattr(owner, name)
    with mounted(tmp_path) as (root, server):
        manager = CheckpointManager(
            root, keep_last=1, asynchronous=True, timeout=TIMEOUT
        )
        manager.save(1, state(1.0))
        manager.finalize()
        threads = threading.enumerate()
        stopped: list[float] = []

        def stop(*arguments: Any, **options: Any) -> Any:
            if not stopped:
                os.kill(server, signal.SIGSTOP)
                threading.Timer(30, os.kill, [server, signal.SIGCONT]).start()
                stopped.append(time.monotonic())
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, stop)

        def second() -> Any:
            manager.save(2, state(2.0))
            return manager.finalize()

        def close() -> None:
            second()
            manager.close()

        calls: dict[str, Callable[[], Any]] = {
            "restore": lambda: manager.restore(state(0.0)),
            "latest": lambda: manager.latest(verify=True),
            "close": close,
            "finalize": second,
        }
        try:
            with pytest.raises(StorageError, match=text) as raised:
                calls[call]()
            seconds = time.monotonic() - stopped[0]
            print(f"\n{call}: raised after {seconds:.1f} s: {raised.value}")
            assert seconds < 2 * TIMEOUT.total_seconds() + 5
            assert str(root) in str(raised.value)
            began = time.monotonic()
            assert manager.poll() == []
            manager.close(abort=True)
            assert time.monotonic() - began < 5
        finally:
            for thread in set(threading.enumerate()).difference(threads):
                thread.join()
        step = 2 if call == "close" else 1
        with CheckpointManager(root, timeout=TIMEOUT) as again:
            restored = again.restore(state(0.0))
            assert restored is not None
            assert restored.step == step
            assert restored.state["w"].unique().tolist() == [float(step)]
