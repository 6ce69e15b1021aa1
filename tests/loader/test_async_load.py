"""Loads whose reads run in a thread: the same values, one story on all ranks, nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import AsyncLoadRequest, Event, ShardedTensor, Strategy, StrictHandling
from megackpt.backends.base import Backend
from megackpt.backends.safetensors import Safetensors
from megackpt.backends.torch_dist import TorchDist
from megackpt.backends.torch_file import TorchFile
from megackpt.backends.zarr import Zarr
from megackpt.checkpoint import open_checkpoint
from megackpt.errors import BackendError, CheckpointingException, RankLost, StorageError
from megackpt.loader.load_session import NICE, LoadSession
from megackpt.storage.files import LocalReader
from megackpt.testing import ThreadedGroup
from tests.loader.test_exchange import (
    ALWAYS,
    PLAIN,
    SHARED,
    apart,  # noqa: F401 - a fixture for each test
    model,
    same,
    saved,
)
from tests.megatron.test_own_strategies import Loads, Saves
from tests.test_processes import state, trainer_still_works

WEIGHT = torch.arange(24.0).reshape(6, 4)


def weight(data: torch.Tensor) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", data), "step": 3}


def begun(asked: Any, folder: Path, *given: Any, **named: Any) -> AsyncLoadRequest:
    request = megackpt.load(asked, folder, *given, asynchronous=True, **named)
    assert isinstance(request, AsyncLoadRequest)
    return request


@contextmanager
def held_reads(
    kind: type[Backend] = TorchDist, answer: float | None = 0.005
) -> Iterator[threading.Event]:
    """Reads of the format wait for the event, and give a sign of life after each ``answer`` seconds.

    ``answer`` None: they hang.
    """
    going_on, read = threading.Event(), kind.read

    def late(self: Any, root: Any, *given: Any) -> None:
        (Path(root.called) / "reads").touch()
        while not going_on.wait(answer):
            root.moved()
        read(self, root, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "read", late)
        yield going_on
        going_on.set()


@pytest.fixture(autouse=True)
def earlier() -> Iterator[None]:
    """Threads that other tests of this process have left, such as those of unclosed queues."""
    _EARLIER.update(threading.enumerate())
    yield
    _EARLIER.clear()


_EARLIER: set[threading.Thread] = set()


def of_megackpt() -> list[str]:
    """Threads of megackpt that this test has started."""
    started = [each for each in threading.enumerate() if each not in _EARLIER]
    return [each.name for each in started if each.name.startswith("megackpt")]


def descriptors(folder: Path) -> list[str]:
    """The open files below a folder. Errors are in reference cycles, and hold some."""
    gc.collect()
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if os.path.lexists(link)]
    return [name for name in names if name.startswith(str(folder))]


def is_over(condition: Callable[[], object]) -> bool:
    """Whether the condition ends to hold. Idle threads last a second."""
    deadline = time.monotonic() + 20
    while condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not condition()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", [TorchDist, Zarr, Safetensors, TorchFile])
def test_other_work_runs_while_a_load_reads(
    tmp_path: Path, kind: type[Backend], verify: bool
) -> None:
    megackpt.save(weight(WEIGHT), tmp_path / "a")
    megackpt.convert(tmp_path / "a", tmp_path / "b", kind.properties.name)
    target = torch.zeros(6, 4)
    with held_reads(kind) as going_on:
        request = begun(weight(target), tmp_path / "b", verify=verify)
        assert not request.done()
        assert not (WEIGHT.T @ target).any()
        going_on.set()
        found = request.wait()
    assert request.done()
    assert found["w"] is target
    assert torch.equal(target, WEIGHT)
    assert found["step"] == 3
    with pytest.raises(CheckpointingException, match=r"wait\(\) or cancel\(\) was"):
        request.wait()
    request.cancel()  # no effect
    assert torch.equal(target, WEIGHT)


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no priority")
def test_only_the_threads_that_read_have_a_lower_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    megackpt.save(weight(WEIGHT), tmp_path)
    seen, read = set(), LocalReader.read_into

    def read_into(*given: Any) -> None:
        if threading.current_thread().name.startswith("megackpt-read"):
            seen.add(os.getpriority(os.PRIO_PROCESS, 0))  # of this thread
        read(*given)

    monkeypatch.setattr(LocalReader, "read_into", read_into)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    megackpt.load(weight(torch.zeros(6, 4)), tmp_path)
    assert seen == {own}
    seen.clear()
    begun(weight(torch.zeros(6, 4)), tmp_path).wait()
    assert seen == {min(own + NICE, 19)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


@pytest.mark.parametrize(
    ("strategy", "log"), [(None, PLAIN), (ALWAYS, SHARED)], ids=["alone", "exchange"]
)
def test_ranks_take_the_same_steps_as_at_once(
    tmp_path: Path, strategy: Any, log: list[str]
) -> None:
    saved(tmp_path, "torch_dist", 2, 4)

    def run(group: ThreadedGroup) -> list[str]:
        asked = model(group.rank, 2, blank=True)
        request = begun(asked, tmp_path, strategy, process_group=group)
        same(request.wait(), model(group.rank, 2))
        return group.log

    assert ThreadedGroup.run(4, run) == [log] * 4


def test_some_ranks_may_load_at_once(tmp_path: Path) -> None:
    """Also a tensor without memory, objects, and the keys that differ."""
    saved(tmp_path, "zarr", 2, 4)

    def run(group: ThreadedGroup) -> None:
        asked = model(group.rank, 2, blank=True)
        asked["columns"].data = None
        found = megackpt.load(
            asked,
            tmp_path,
            strict=StrictHandling.RETURN_ALL,
            asynchronous=group.rank > 1,
            process_group=group,
        )
        if group.rank > 1:
            found = found.wait()
        same(found[0], model(group.rank, 2))
        assert found[1:] == (set(), set())

    ThreadedGroup.run(4, run)


def test_a_load_that_does_not_fit_raises_before_it_reads(tmp_path: Path) -> None:
    megackpt.save(weight(WEIGHT), tmp_path)
    target = torch.zeros(6, 5)
    with pytest.raises(megackpt.MismatchError, match="Global shape mismatch"):
        begun(weight(target), tmp_path)
    assert not target.any()
    with pytest.raises(ValueError, match="dtype_policy"):
        begun(weight(target), tmp_path, dtype_policy="cast")


def damage(folder: Path, key: str) -> None:
    """Flip bytes of the last chunk of a tensor."""
    chunk = open_checkpoint(folder).manifest.chunks_of(key)[-1]
    with open(folder / chunk.location.file, "r+b") as file:
        file.seek(chunk.location.start)
        file.write(b"\xff\xfe\xfd")


@pytest.mark.parametrize("strategy", [None, ALWAYS], ids=["alone", "exchange"])
def test_damage_that_one_rank_reads_is_everybodys(
    tmp_path: Path, strategy: Any
) -> None:
    saved(tmp_path, "torch_dist", 2, 2)
    damage(tmp_path, "float64")

    def run(group: ThreadedGroup) -> None:
        asked = model(group.rank, 2, blank=True)
        begun(asked, tmp_path, strategy, process_group=group).wait()

    found = ThreadedGroup.outcomes(2, run)
    for error in found:
        assert isinstance(error, megackpt.CorruptCheckpoint)
        assert "'float64'" in str(error)
        assert "these tensors are undefined now" in str(error.__notes__)


def test_a_checkpoint_that_is_replaced_is_loaded_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    megackpt.save(weight(WEIGHT), tmp_path / "a")

    def run(group: ThreadedGroup) -> torch.Tensor:
        shard = ShardedTensor.from_rank_offsets(
            "w", torch.zeros(6, 4), replica_id=group.rank
        )
        request = begun({"w": shard}, tmp_path / "a", process_group=group)
        if group.all_agree(1) and group.is_coordinator:
            megackpt.save(weight(WEIGHT + 1), tmp_path / "a")
            going_on.set()
        return request.wait()["w"]

    with held_reads() as going_on:
        for found in ThreadedGroup.run(2, run):
            assert torch.equal(found, WEIGHT + 1)
    assert "was replaced while it was being loaded" in caplog.text


def test_a_checkpoint_that_is_replaced_while_it_is_opened_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    megackpt.save(weight(WEIGHT), tmp_path / "a")
    opened = LoadSession.open

    def late(self: Any, *given: Any) -> Any:
        monkeypatch.undo()
        found = opened(self, *given)
        megackpt.save(weight(WEIGHT + 1), tmp_path / "a")
        return found

    monkeypatch.setattr(LoadSession, "open", late)
    request = begun(weight(torch.zeros(6, 4)), tmp_path / "a")
    assert request.done()
    assert torch.equal(request.wait()["w"], WEIGHT + 1)


def test_events_name_each_stage_once(tmp_path: Path) -> None:
    megackpt.save(weight(WEIGHT), tmp_path)
    seen: list[Event] = []
    with megackpt.watching(seen.append):
        request = begun(weight(torch.zeros(6, 4)), tmp_path)
        enabled = gc.isenabled()
        request.wait()
    assert [e.stage for e in seen] == ["open", "compare", "read", "total"]
    assert {(e.operation, e.path) for e in seen} == {("load", str(tmp_path))}
    assert seen[-1].bytes == seen[-2].bytes > WEIGHT.nbytes
    assert enabled


def test_a_cancelled_load_stops_reading(tmp_path: Path) -> None:
    megackpt.save(weight(WEIGHT), tmp_path)
    target = torch.zeros(6, 4)
    with held_reads():
        request = begun(weight(target), tmp_path)
        request.cancel()
        assert request.done()
    assert not target.any()
    with pytest.raises(CheckpointingException, match="has ended"):
        request.wait()
    del request
    assert is_over(of_megackpt)
    assert descriptors(tmp_path) == []


def test_a_cancelled_load_names_reads_that_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megackpt.limits.WORKER_STOP_SECONDS", 0.05)
    megackpt.save(weight(WEIGHT), tmp_path)
    with held_reads(answer=None):
        request = begun(weight(torch.zeros(6, 4)), tmp_path)
        assert is_over(lambda: not (tmp_path / "reads").exists())
        with pytest.raises(StorageError, match="must not be used"):
            request.cancel()
    del request
    assert is_over(of_megackpt)
    assert descriptors(tmp_path) == []


def test_a_dropped_load_stops_reading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    megackpt.save(weight(WEIGHT), tmp_path)
    target = torch.zeros(6, 4)
    seen: list[Event] = []
    with held_reads(), megackpt.watching(seen.append):
        request = begun(weight(target), tmp_path)
        gc.disable()  # no reference cycle holds it
        try:
            del request
        finally:
            gc.enable()
        assert "its request was dropped before wait()" in caplog.text
        assert is_over(of_megackpt)
    assert not target.any()
    assert descriptors(tmp_path) == []
    (total,) = [e for e in seen if e.stage == "total"]
    assert "was dropped" in total.error


def test_an_interrupted_wait_stops_reading(tmp_path: Path) -> None:
    megackpt.save(weight(WEIGHT), tmp_path)
    target = torch.zeros(6, 4)
    with held_reads():
        request = begun(weight(target), tmp_path)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            with pytest.raises(KeyboardInterrupt):
                request.wait()
        finally:
            signal.signal(signal.SIGALRM, before)
        assert request.done()
    assert not target.any()
    assert is_over(of_megackpt)


ENDS = """
import sys, time
from pathlib import Path
import torch
import megackpt
from megackpt.backends.torch_dist import TorchDist
from megackpt.errors import CheckpointingException

folder = Path(sys.argv[1])


def read(self, root, *given):
    try:
        while True:
            (folder / "reads").touch()
            root.moved()
            time.sleep(0.01)
    except CheckpointingException:
        time.sleep(0.5)
        (folder / "ended").touch()
        raise


TorchDist.read = read
target = {"w": megackpt.ShardedTensor.from_rank_offsets("w", torch.zeros(6, 4))}


def begin():
    request = megackpt.load(target, folder / "a", asynchronous=True)
    while not (folder / "reads").exists():
        time.sleep(0.01)
    return request


request = begin()
if sys.argv[2] == "dropped":
    del request
"""


@pytest.mark.parametrize("request_is", ["dropped", "kept"])
def test_a_process_that_ends_waits_for_the_end_of_the_reads(
    tmp_path: Path, request_is: str
) -> None:
    """The interpreter ends while a thread is in torch: torch aborts the process."""
    megackpt.save(weight(WEIGHT), tmp_path / "a")
    command = [sys.executable, "-c", ENDS, str(tmp_path), request_is]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "its request was dropped before wait()" in done.stderr
    assert (tmp_path / "ended").exists()


def test_a_fork_does_not_wait_for_the_load_of_its_parent(tmp_path: Path) -> None:
    megackpt.save(weight(WEIGHT), tmp_path)
    with held_reads() as going_on:
        request = begun(weight(torch.zeros(6, 4)), tmp_path)
        pid = os.fork()
        if not pid:
            signal.alarm(20)
            refused = 0
            for call in (request.wait, request.done, request.cancel):
                try:
                    call()
                except CheckpointingException as error:
                    refused += "belongs to process" in str(error)
            os._exit(refused)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 3
        going_on.set()
        assert torch.equal(request.wait()["w"], WEIGHT)


def test_a_custom_strategy_refuses(tmp_path: Path) -> None:
    megackpt.save(weight(WEIGHT), tmp_path, Saves())
    with pytest.raises(BackendError, match="asynchronous cannot be given"):
        begun(weight(torch.zeros(6, 4)), tmp_path, Loads())


def of_processes(directory: str) -> None:
    """A load beside a save and the messages of a trainer, an error, a cancelled and a dropped one."""
    rank, path = dist.get_rank(), Path(directory) / "ckpt"
    megackpt.save(state(1.0, rank, 4), path)
    for strategy in (None, Strategy(exchange="always")):
        request = begun(state(0.0, rank, 4), path, strategy)
        trainer_still_works()
        megackpt.save(state(2.0, rank, 4), Path(directory) / "next")
        found = request.wait()
        assert found["value"] == 1.0
        assert all((found[f"w{i}"] == 1.0).all() for i in range(8))
    if rank == 0:
        damage(path, "w3")
    dist.barrier()
    request = begun(state(0.0, rank, 4), path)
    with pytest.raises(megackpt.CorruptCheckpoint, match=r"rank 3\b.*'w3'"):
        request.wait()
    short = timedelta(seconds=20)
    request = begun(state(0.0, rank, 4), Path(directory) / "next", timeout=short)
    if rank == 2:
        request.cancel()
    else:
        with pytest.raises(RankLost, match="rank 2 gave it up"):
            request.wait()
    request = begun(state(0.0, rank, 4), Path(directory) / "next")
    del request  # on all ranks
    found = begun(state(0.0, rank, 4), Path(directory) / "next").wait()
    assert found["value"] == 2.0
    trainer_still_works()


def test_loads_of_processes(ranks: Any, tmp_path: Path) -> None:
    ranks(of_processes, 4, tmp_path, timeout=120)
