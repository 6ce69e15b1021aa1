"""Signals that announce the end of a process."""

from __future__ import annotations

import gc
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megackpt.manager import (
    CheckpointManager,
)


def test_handlers_are_restored(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        with CheckpointManager(tmp_path) as manager:
            manager.on_signal(signal.SIGUSR1)
            manager.on_signal(signal.SIGUSR1, signal.SIGUSR2)
            assert not manager.preempted()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert manager.preempted()
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
        assert heard == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_managers_that_listen_to_one_signal(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    first, second = CheckpointManager(tmp_path / "a"), CheckpointManager(tmp_path / "b")
    for manager in (first, second):
        manager.on_signal(signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert first.preempted()
    assert second.preempted()
    first.close()
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="main thread"):
        pool.submit(second.close).result()
    assert signal.getsignal(signal.SIGUSR1) != before
    second.close()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_signal_without_listeners_is_passed_on(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        manager = CheckpointManager(tmp_path)
        manager.on_signal(signal.SIGUSR1)
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0 if heard else 1)
        assert os.waitpid(child, 0)[1] == 0
        ours = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a library's
        manager.close()
        signal.signal(signal.SIGUSR1, ours)  # which puts back what it found
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        manager = CheckpointManager(tmp_path)
        manager.on_signal(signal.SIGUSR1)
        del manager
        gc.collect()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_while_a_manager_starts_to_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = signal.signal

    def at_once(number: int, handler: Any) -> Any:
        before = real(number, handler)
        signal.raise_signal(number)
        return before

    manager = CheckpointManager(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(signal, "signal", at_once)
        manager.on_signal(signal.SIGUSR2)
    assert manager.preempted()
    manager.close()
