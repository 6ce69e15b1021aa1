"""Saves through torch DCP on a storage that hangs: given up after the timeout, and cleared up when it answers."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megackpt import waiting
from megackpt.checkpoint.directory_target import DirectoryTarget
from megackpt.dcp import FileSystemReader, FileSystemWriter
from megackpt.storage import files

TIMEOUT = timedelta(seconds=0.5)


class Gate:
    """Calls of a function wait until the gate is opened."""

    def __init__(self) -> None:
        self.opens = threading.Event()
        self.answered = threading.Event()
        """The storage has answered a call that the gate held."""

    def stop(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def method(*args: Any, **options: Any) -> Any:
            self.opens.wait(60)
            self.answered.set()
            return real(*args, **options)

        patch.setattr(owner, name, method)

    def open(self) -> None:
        """The storage answers again. Wait for the thread that it held."""
        self.opens.set()
        deadline = time.monotonic() + 30
        while any(t.name == "megackpt-disk" for t in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opens.set()


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value)}


def value_of(where: Path) -> float:
    found = state(0.0)
    dcp.load(found, storage_reader=FileSystemReader(where))
    (value,) = found["w"].unique().tolist()
    return float(value)


@pytest.mark.parametrize(
    ("step", "owner", "name"),
    [
        ("begin", DirectoryTarget, "begin"),
        ("begin", DirectoryTarget, "refuse_collisions"),
        ("writing", files, "_sync_file"),
        ("commit", DirectoryTarget, "publish"),
    ],
)
def test_a_step_that_hangs_is_given_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gate: Gate,
    step: str,
    owner: Any,
    name: str,
) -> None:
    where = tmp_path / "c"
    dcp.save(state(1.0), storage_writer=FileSystemWriter(where))
    writer = FileSystemWriter(where, timeout=TIMEOUT)
    text = rf"{step} of the save to {where} \(rank 0, host '.*'\): the storage has not answered"
    with monkeypatch.context() as patch:
        gate.stop(patch, owner, name)
        with pytest.raises(CheckpointException, match=text):
            dcp.save(state(2.0), storage_writer=writer)
        assert not gate.answered.is_set()  # the save has ended before
        assert value_of(where) == 1.0
        writer.reset()  # torch tells no writer of an error in writing
        gate.open()
    assert (
        value_of(where) in (1.0, 2.0) if name == "publish" else value_of(where) == 1.0
    )
    dcp.save(state(3.0), storage_writer=writer)
    assert value_of(where) == 3.0
    assert os.listdir(tmp_path) == ["c"]


def test_a_long_wait_is_logged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gate: Gate,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(waiting.VARIABLE, "0.1")
    caplog.set_level(logging.WARNING)
    with monkeypatch.context() as patch:
        gate.stop(patch, DirectoryTarget, "publish")
        timer = threading.Timer(1.5, gate.opens.set)
        timer.start()
        dcp.save(
            state(1.0),
            storage_writer=FileSystemWriter(
                tmp_path / "c", timeout=timedelta(seconds=20)
            ),
        )
    (text,) = (r.getMessage() for r in caplog.records if r.name == "megackpt.waiting")
    assert "commit of the save to" in text
    assert "the storage has not answered for 0.1 s. It is given up after 18 s" in text
    assert value_of(tmp_path / "c") == 1.0
