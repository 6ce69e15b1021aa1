"""Each way to save or load (a door) keeps each promise, or a table says why it does not apply."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    CheckpointException,
    _async_process_executor as executor,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import megackpt
import megackpt.dcp
from megackpt import AsyncCallsQueue, CheckpointManager, LocalTier
from megackpt.checkpoint import verifying
from megackpt.checkpoint.directory_target import DirectoryTarget
from megackpt.errors import CheckpointingException
from megackpt.storage import files
from tests.faults_of_steps import (
    CarriesFaults,
    Fault,
    PausesSince,
    answer,
    declared,
    held,
    overtaken,
    refused,
    tensor,
)
from tests.megatron.test_own_strategies import Loads, Saves
from tests.torch_names import PROCESS_OUTLIVES_ERRORS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PATIENT = timedelta(seconds=60)
ERRORS = CheckpointingException, CheckpointException

Save = Callable[[Path, float, timedelta], object]
Load = Callable[[Path, timedelta], float]


def left_beside(where: Path) -> list[str]:
    known = {where.name, "latest_checkpointed_iteration.txt"}
    return [name for name in os.listdir(where.parent) if name not in known]


@dataclass(frozen=True)
class Door:
    save: Save
    load: Load
    left: Callable[[Path], list[str]] = left_beside


def load(where: Path, timeout: timedelta, **options: Any) -> float:
    found = megackpt.load(declared(0.0), where, timeout=timeout, **options)
    return float(found["w"].mean())


def save_as(strategy: Any) -> Save:
    def save(where: Path, value: float, timeout: timedelta) -> None:
        megackpt.save(declared(value), where, strategy, timeout=timeout)

    return save


def save_by(persistent: bool) -> Save:
    def save(where: Path, value: float, timeout: timedelta) -> None:
        queue = AsyncCallsQueue(persistent, timeout=timeout)
        try:
            request = megackpt.save(
                declared(value), where, async_sharded_save=True, timeout=timeout
            )
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
        finally:
            queue.close()

    return save


def save_a_step(where: Path, value: float, timeout: timedelta) -> None:
    with CheckpointManager(where.parent, timeout=timeout) as checkpoints:
        checkpoints.save(1, declared(value))


def on_the_host(where: Path, timeout: timedelta) -> CheckpointManager:
    """A manager that saves steps in ``where`` alone."""
    run, local = where.parent.parent / "steps", LocalTier(where, every=1, copies=0)
    return CheckpointManager(run, save_interval=10, local=local, timeout=timeout)


def save_on_the_host(where: Path, value: float, timeout: timedelta) -> None:
    with on_the_host(where, timeout) as checkpoints:
        assert checkpoints.should_save(1)
        checkpoints.save(1, declared(value))


def load_from_the_host(where: Path, timeout: timedelta) -> float:
    with on_the_host(where, timeout) as checkpoints:
        found = checkpoints.restore(declared(0.0))
    assert found is not None
    assert found.source == "local"
    return float(found.state["w"].mean())


def left_on_the_host(where: Path) -> list[str]:
    """What is no complete piece of a step, in the directory of the run."""
    found = [str(path.relative_to(where)) for path in where.glob("*/*/*")]
    return [name for name in found if not name.endswith("/rank_0_of_1")]


def convert(where: Path, value: float, timeout: timedelta) -> None:
    source = where.parent.parent / f"source-{value}"
    megackpt.convert(source, where, "zarr", overwrite=True, timeout=timeout)


def dcp_save(where: Path, value: float, timeout: timedelta) -> None:
    writer = megackpt.dcp.FileSystemWriter(where, timeout=timeout)
    with megackpt.dcp.install():
        dcp.save({"w": tensor(value)}, storage_writer=writer)


def dcp_async_save(where: Path, value: float, timeout: timedelta) -> None:
    writer = megackpt.dcp.FileSystemWriter(where, timeout=timeout)
    with megackpt.dcp.install():
        future: Any = dcp.async_save({"w": tensor(value)}, storage_writer=writer)
        future.result()


def dcp_async_save_by_process(where: Path, value: float, timeout: timedelta) -> None:
    writer = CarriesFaults(where, timeout=timeout)
    kind = AsyncCheckpointerType.PROCESS
    state = {"w": tensor(value)}
    with megackpt.dcp.install():
        future: Any = dcp.async_save(
            state, storage_writer=writer, async_checkpointer_type=kind
        )
        try:
            future.result()
        except BaseException:
            if not PROCESS_OUTLIVES_ERRORS:
                executor._CHECKPOINT_PROCESS = None
            raise


def dcp_by_hand(where: Path, value: float, timeout: timedelta) -> None:
    writer = megackpt.dcp.FileSystemWriter(where, timeout=timeout)
    try:
        dcp.save({"w": tensor(value)}, storage_writer=writer)
    finally:
        writer.reset()  # torch's flow tells the writer of no error


def dcp_hugging_face(where: Path, value: float, timeout: timedelta) -> None:
    shutil.rmtree(where, ignore_errors=True)
    writer = megackpt.dcp.HuggingFaceStorageWriter(where, timeout=timeout)
    with megackpt.dcp.install():
        dcp.save({"w": tensor(value)}, storage_writer=writer)


def dcp_load(where: Path, timeout: timedelta) -> float:
    found = {"w": tensor(0.0)}
    reader = megackpt.dcp.FileSystemReader(where, timeout=timeout)
    with megackpt.dcp.install():
        dcp.load(found, storage_reader=reader)
    return float(found["w"].mean())


def load_by_hand(where: Path, timeout: timedelta) -> float:
    found = {"w": tensor(0.0)}
    reader = megackpt.dcp.FileSystemReader(where, timeout=timeout)
    dcp.load(found, storage_reader=reader)
    return float(found["w"].mean())


def load_own(where: Path, timeout: timedelta) -> float:
    return load(where, timeout, sharded_strategy=Loads())


def load_later(where: Path, timeout: timedelta) -> float:
    found = megackpt.load(declared(0.0), where, asynchronous=True, timeout=timeout)
    return float(found.wait()["w"].mean())


DOORS = {
    "torch_dist": Door(save_as("torch_dist"), load),
    "zarr": Door(save_as("zarr"), load),
    "safetensors": Door(save_as("safetensors"), load),
    "custom strategy": Door(save_as(Saves()), load_own),
    "thread": Door(save_by(persistent=False), load_later),
    "process": Door(save_by(persistent=True), load),
    "manager": Door(save_a_step, load),
    "local tier": Door(save_on_the_host, load_from_the_host, left_on_the_host),
    "convert": Door(convert, load),
    "dcp.save": Door(dcp_save, dcp_load),
    "dcp.async_save": Door(dcp_async_save, dcp_load),
    "dcp.async_save by process": Door(dcp_async_save_by_process, dcp_load),
    "dcp by hand": Door(dcp_by_hand, load_by_hand),
    "dcp Hugging Face": Door(dcp_hugging_face, load),
}

HELD = {
    "begin": (DirectoryTarget, "begin"),
    "write": (DirectoryTarget, "staging"),
    "commit": (DirectoryTarget, "publish"),
    "read": (files.LocalReader, "read_into"),
}
HELD_OF_DOOR: dict[tuple[str, str], tuple[Any, str]] = {
    # Before the pieces, a restore reads in the storage of the run which steps count.
    ("local tier", "read"): (verifying, "stored_manifest"),
}
REASONS = {
    "writes": "the code of the strategy writes",
    "reads": "the code of the strategy reads",
    "process": "test_slow_disks.py freezes the disk of a writer process",
    "torch": "torch's own flow makes no events",
    "names": "each save on a host has a directory of its name; only one job may save there",
    "files": "Hugging Face's files are never replaced, so each save has a new directory",
}
NOT_APPLICABLE = {
    ("custom strategy", "write"): "writes",
    ("custom strategy", "read"): "reads",
    ("process", "write"): "process",
    ("local tier", "one wins"): "names",
    ("dcp by hand", "one line"): "torch",
    ("dcp.async_save by process", "one line"): "torch",
    ("dcp Hugging Face", "files of others"): "files",
    ("dcp Hugging Face", "one wins"): "files",
}


def applies(door: str, promise: str) -> None:
    if reason := NOT_APPLICABLE.get((door, promise)):
        pytest.skip(REASONS[reason])


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def where(tmp_path: Path, door: str) -> Iterator[Path]:
    (tmp_path / "run").mkdir()
    for value in (1.0, 2.0, 3.0):  # for conversions
        megackpt.save(declared(value), tmp_path / f"source-{value}")
    if door.startswith("dcp.async_save"):
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield tmp_path / "run" / "iter_0000001"
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def one_process_for_all() -> Iterator[None]:
    """The process of ``async_save`` stays until the last test has ended."""
    yield
    executor._CHECKPOINT_PROCESS = None


def pids() -> list[str]:
    """This process, and the process of ``async_save``."""
    process = executor._CHECKPOINT_PROCESS
    return ["self"] + [str(p._save_process.pid) for p in (process,) if p]


def threads() -> list[str]:
    """The threads of megackpt here, and all threads of the process of ``async_save``."""
    own = sorted(t.name for t in threading.enumerate() if "megackpt" in t.name)
    others = [os.listdir(f"/proc/{pid}/task") for pid in pids()[1:]]
    return own + ["in the process of async_save"] * sum(map(len, others))


def descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for pid in pids():
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                name = os.readlink(f"/proc/{pid}/fd/{number}")
                if not name.startswith("/dev/shm/torch_"):  # the tensors of a request
                    found[name] += 1
    return found


def settled(before: list[str]) -> bool:
    """Whether the threads of a save have ended. An idle one lasts a second."""
    deadline = time.monotonic() + 20
    while (
        more := Counter(threads()) - Counter(before)
    ) and time.monotonic() < deadline:
        time.sleep(0.02)
    gc.collect()
    return not more


@pytest.mark.slow
@pytest.mark.parametrize("step", HELD)
def test_a_storage_that_hangs(
    where: Path, monkeypatch: pytest.MonkeyPatch, door: str, step: str
) -> None:
    """The step is given up and named. When the storage answers, it ends, aborts and closes."""
    applies(door, step)
    monkeypatch.setattr("megackpt.limits.WORKER_STOP_SECONDS", 0.1)
    save, read = DOORS[door].save, DOORS[door].load
    save(where, 1.0, PATIENT)
    before = threads()
    place = where.parent.parent
    short = timedelta(seconds=1)
    fault = Fault(*HELD_OF_DOOR.get((door, step), HELD[step]), held, place)
    with answer(place) as answers, fault.everywhere():
        # Not from the call on: a process that the call starts may take long on a busy machine.
        with (
            PausesSince(place / "hangs") as since,
            pytest.raises(ERRORS, match=r"not (answered|moved a byte)") as caught,
        ):
            read(where, short) if step == "read" else save(where, 2.0, short)
        assert 0 < since.seconds < 20
        text = str(caught.value)
        assert str(where) in text
        words = {"write": ["writing"], "read": ["reading", "opening", "verifying"]}
        assert any(word in text for word in words.get(step, [step])), text
        answers()
        del caught
        assert settled(before)
    if door != "dcp Hugging Face":
        assert read(where, PATIENT) in ((1.0, 2.0) if step == "commit" else (1.0,))
    save(where, 3.0, PATIENT)
    assert read(where, PATIENT) == 3.0
    assert DOORS[door].left(where) == []


def test_files_of_others_stay(where: Path, door: str) -> None:
    applies(door, "files of others")
    save, read = DOORS[door].save, DOORS[door].load
    save(where, 1.0, PATIENT)
    (where / "notes").mkdir()
    paths = [where / "mine.txt", where / "notes" / "more.txt"]
    for path in paths:
        path.write_text(path.name)
    inodes = [path.stat().st_ino for path in paths]
    save(where, 2.0, PATIENT)
    assert read(where, PATIENT) == 2.0
    assert [path.stat().st_ino for path in paths] == inodes
    assert [path.read_text() for path in paths] == ["mine.txt", "more.txt"]


def test_a_failed_save_leaves_nothing(where: Path, door: str) -> None:
    """No file, no thread, no descriptor; and the old checkpoint."""
    save, read = DOORS[door].save, DOORS[door].load
    save(where, 1.0, PATIENT)
    gc.collect()
    before, opened = threads(), descriptors()
    fault = Fault(DirectoryTarget, "publish", refused, where)
    with fault.everywhere(), pytest.raises(ERRORS, match="read back differs"):
        save(where, 2.0, PATIENT)
    if door == "dcp.async_save by process":
        # The process of torch holds a request and its error until the next one.
        save(where.parent.parent / "next", 2.0, PATIENT)
    assert settled(before)
    assert descriptors() - opened == Counter()
    if door != "dcp Hugging Face":
        assert read(where, PATIENT) == 1.0
    assert DOORS[door].left(where) == []


def test_of_two_saves_one_wins(where: Path, door: str) -> None:
    """Another save commits while this one is about to."""
    applies(door, "one wins")
    save = DOORS[door].save
    save(where, 1.0, PATIENT)
    fault = Fault(DirectoryTarget, "publish", overtaken, where)
    with fault.everywhere(), pytest.raises(ERRORS, match="another save"):
        save(where, 2.0, PATIENT)
    assert load(where, PATIENT) == 7.0
    assert DOORS[door].left(where) == []


def test_one_line_tells_of_a_save(
    where: Path, caplog: pytest.LogCaptureFixture, door: str
) -> None:
    applies(door, "one line")
    caplog.set_level("INFO", "megackpt")
    DOORS[door].save(where, 1.0, PATIENT)
    texts = [r.getMessage() for r in caplog.records if r.levelname == "INFO"]
    kind = "convert" if door == "convert" else "save"
    below = "/" if door == "local tier" else " "
    assert (
        len([text for text in texts if text.startswith(f"{kind} {where}{below}")]) == 1
    )
