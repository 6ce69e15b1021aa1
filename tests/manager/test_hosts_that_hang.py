"""The storage of a host that hangs: steps of the local tier are given up, and change no later step."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from megackpt import CheckpointManager, LocalTier
from megackpt.errors import StorageError
from megackpt.manager.local import lineage, pieces
from megackpt.manager.local.pieces import HostPieces
from tests.faults_of_steps import Fault, answer, declared, held

SHORT = timedelta(seconds=1)


def wait_for_the_disk() -> None:
    deadline = time.monotonic() + 30
    while any(t.name == "megackpt-disk" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("owner", "method", "words"),
    [
        (pieces, "_superfluous", "free_bytes of local pieces in "),
        (lineage, "_write", "noting that local step 1 counts"),
    ],
)
def test_a_save_on_a_host_that_hangs_is_given_up(
    tmp_path: Path, owner: Any, method: str, words: str
) -> None:
    local = LocalTier(tmp_path / "host", every=1, copies=0)
    options: dict[str, Any] = {"save_interval": 10, "local": local}
    fault = Fault(owner, method, held, tmp_path)
    with answer(tmp_path) as answers:
        with CheckpointManager(tmp_path / "run", timeout=SHORT, **options) as manager:
            assert manager.should_save(1)
            with fault.everywhere(), pytest.raises(StorageError, match=words):
                manager.save(1, declared(1.0))
        answers()
        wait_for_the_disk()
    with CheckpointManager(tmp_path / "run", **options) as manager:
        assert manager.should_save(2)
        manager.save(2, declared(2.0))
        found = manager.restore(declared(0.0))
    assert found is not None
    assert (found.step, found.source) == (2, "local")


def test_a_removal_that_was_given_up_removes_nothing_later(tmp_path: Path) -> None:
    host = HostPieces(str(tmp_path / "host"), "run", SHORT)
    with answer(tmp_path) as answers:
        fault = Fault(HostPieces, "_made", held, tmp_path)
        with (
            fault.everywhere(),
            pytest.raises(StorageError, match="removal of older steps"),
        ):
            host.clear([])
        host.mark("later")
        answers()
        wait_for_the_disk()
    assert host.marks("later") == {"later"}
