"""The manager of a run's checkpoints: what it saves, finds, keeps and removes; and that all ranks do the same."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.checkpoint import (
    begin,
    buckets,
    clear,
    committing,
    marker,
    remove,
    removing,
)
from megackpt.checkpoint.marker import Marker
from megackpt.errors import (
    CheckpointingException,
    CheckpointReplaced,
    CorruptCheckpoint,
    MismatchError,
    NotACheckpoint,
    SaveInProgress,
    ShardingError,
    StorageError,
    UntrustedClass,
)
from megackpt.loader import load_operation
from megackpt.manager import (
    CheckpointManager,
    checkpoint_manager,
    latest_step,
    retention,
    run_directory,
)
from megackpt.manager.retention import Retention
from megackpt.manager.run_directory import NAMINGS
from megackpt.storage import LocalStorage
from megackpt.testing import ThreadedGroup

TRACKER = "latest_checkpointed_iteration.txt"


def state(value: float, rank: int = 0, size: int = 1) -> dict[str, Any]:
    half = torch.full((8 // size,), float(value))
    return {
        "w": ShardedTensor.from_rank_offsets("w", half, (0, rank, size)),
        "value": value,
    }


def saved(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        manager.save(step, state(step))


def restored(
    manager: CheckpointManager, **options: Any
) -> tuple[int, float, list[str]] | None:
    found = manager.restore(state(-1), **options)
    if found is None:
        return None
    assert found.state["w"].eq(found.state["value"]).all()
    return found.step, found.state["value"], [step.name for step in found.skipped]


def names(run: Path) -> list[str]:
    return sorted(os.listdir(run))


def stored(bucket: Any) -> list[str]:
    return list(bucket.keys())


def hurt(checkpoint: Path) -> None:
    """A byte of its largest file, in the middle."""
    data = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    octets = bytearray(data.read_bytes())
    at = octets.index(b"\x00\x00\x40\x40" * 8)  # 3.0
    octets[at] ^= 1
    data.write_bytes(octets)


def disowned(checkpoint: Path) -> None:
    """A save that goes on loses its marker, so it fails, however far it is."""
    for path in checkpoint.glob(".megackpt-saving-*"):
        path.unlink()


def test_a_run_from_its_first_step_to_a_restart(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", keep_last=2) as manager:
        assert manager.latest() is None
        assert manager.steps() == ()
        assert restored(manager) is None
        saved(manager, 1, 2, 3)
        assert names(tmp_path / "run") == ["iter_0000002", "iter_0000003", TRACKER]
        assert (tmp_path / "run" / TRACKER).read_text() == "3"
        latest = manager.latest(verify=True)
        assert latest is not None
        assert (latest.step, latest.name, latest.complete) == (3, "iter_0000003", True)
        assert [step.bytes > 0 for step in manager.steps()] == [True, True]
    again = CheckpointManager(tmp_path / "run")
    assert restored(again) == (3, 3, [])
    assert restored(again, step=2) == (2, 2, [])
    with pytest.raises(NotACheckpoint, match="iter_0000001 does not exist"):
        again.restore(state(-1), step=1)


@pytest.mark.parametrize(
    ("last", "every", "stay"),
    [(None, None, [0, 5, 7, 10, 12, 15]), (1, None, [15]), (3, None, [10, 12, 15]), (1, 5, [0, 5, 10, 15]),
     (9, 5, [0, 5, 7, 10, 12, 15]), (2, 7, [0, 7, 12, 15])],
)  # fmt: skip
def test_which_steps_stay(last: int | None, every: int | None, stay: list[int]) -> None:
    steps = [12, 0, 15, 5, 7, 10]
    rules = Retention("run", NAMINGS[0], last, every)
    assert rules.superfluous(steps, lambda _: True) == [
        s for s in sorted(steps) if s not in stay
    ]
    assert rules.superfluous(steps, lambda _: False) == []


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_last": True}, {"keep_last": 1, "keep_every": 0},
                                     {"keep_every": 5}, {"naming": "composer"}, {"asynchronous": "fork"}])  # fmt: skip
def test_wrong_arguments_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(reversed(options))):
        CheckpointManager(tmp_path, **options)


@pytest.mark.parametrize(
    ("naming", "name"),
    [
        ("torchtitan", "step-7"),
        ("transformers", "checkpoint-7"),
        ("deepspeed", "global_step7"),
        ("plain", "7"),
    ],
)
def test_other_naming_styles(tmp_path: Path, naming: str, name: str) -> None:
    manager = CheckpointManager(tmp_path, naming=naming, keep_last=1)
    saved(manager, 6, 7)
    assert names(tmp_path) == [name]
    assert restored(CheckpointManager(tmp_path)) == (
        7,
        7,
        [],
    )  # whatever the one that looks would call it
    assert restored(CheckpointManager(tmp_path), step=7) == (7, 7, [])


def test_checkpoints_of_others_are_never_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    saved(CheckpointManager(tmp_path), 1, 2)
    saved(CheckpointManager(tmp_path, naming="torchtitan"), 1)
    megackpt.save(state(1), tmp_path / "iter_1")  # another way of writing it
    (tmp_path / "iter_0000001" / "megackpt.index").unlink()  # a stranger's
    (tmp_path / "iter_0000002" / "notes.txt").write_text("mine")
    torch.save({}, tmp_path / "iter_0000000")
    saved(manager, 3)
    assert names(tmp_path) == [
        "iter_0000000", "iter_0000001", "iter_0000002", "iter_0000003", "iter_1", TRACKER, "step-1"
    ]  # fmt: skip
    assert names(tmp_path / "iter_0000002") == ["notes.txt"]
    assert "iter_0000001 was not written by megackpt, and is left alone" in caplog.text
    assert megackpt.check_is_distributed_checkpoint(tmp_path / "iter_0000001")
    caplog.clear()
    saved(manager, 4)
    assert names(tmp_path / "iter_0000002") == ["notes.txt"]
    assert caplog.text == ""  # what stays has been told


def test_damaged_ones_are_skipped_and_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path)
    saved(manager, 1, 2, 3, 4, 5)
    hurt(tmp_path / "iter_0000003")
    next((tmp_path / "iter_0000004").glob("*.distcp")).unlink()
    (tmp_path / "iter_0000005" / "metadata.json").unlink()
    (tmp_path / "iter_0000005" / ".metadata").unlink()
    found = manager.latest()
    assert found is not None
    assert found.step == 3  # no byte of its tensors has been looked at
    found = manager.latest(verify=True)
    assert found is not None
    assert found.step == 2
    assert restored(manager) == (2, 2, ["iter_0000005", "iter_0000004", "iter_0000003"])
    assert "iter_0000003 is damaged, going back to the one before: " in caplog.text
    assert "__0_0.distcp, written by rank 0, is missing" in caplog.text
    with pytest.raises(CorruptCheckpoint, match="block 0"):
        manager.restore(state(-1), step=3)
    CheckpointManager(tmp_path, keep_last=2).save(6, state(6))
    assert [step.step for step in manager.steps()] == [
        3,
        4,
        5,
        6,
    ]  # 4 shows its damage, so it does not count


def test_the_last_good_one_is_never_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    saved(manager, 1)
    real = Retention.apply

    def apply(self: Retention, newest: int) -> None:
        next((tmp_path / "iter_0000002").glob("*.distcp")).unlink()
        real(self, newest)

    monkeypatch.setattr(Retention, "apply", apply)
    saved(manager, 2)
    assert "iter_0000002 is damaged, so it does not count: __0_0" in caplog.text
    assert restored(manager) == (1, 1, ["iter_0000002"])


def test_a_run_with_only_damaged_steps_does_not_start_again(
    tmp_path: Path,
) -> None:
    manager = CheckpointManager(tmp_path)
    saved(manager, 3)
    hurt(tmp_path / "iter_0000003")
    with pytest.raises(
        CorruptCheckpoint,
        match=r"none of the checkpoints in .* can be loaded[\s\S]*iter_0000003: ",
    ):
        manager.restore(state(-1))


def test_a_mismatch_is_not_damage(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    saved(manager, 1)
    manager.save(2, state(2) | {"odd": Odd()})
    with pytest.raises(UntrustedClass):
        manager.restore(state(-1))
    assert manager.restore(state(-1), trusted=(Odd,)) is not None
    with pytest.raises(MismatchError):
        manager.restore(
            {"v": ShardedTensor.from_rank_offsets("v", torch.zeros(8))}, trusted=(Odd,)
        )


class Odd:
    """A class that nobody trusts."""


def test_leftovers_of_dead_saves_are_cleared(tmp_path: Path) -> None:
    saved(CheckpointManager(tmp_path), 1)
    dead = Marker(
        "ab" * 16, pid=2**22 + 5, started=1, names=("__0_0.distcp", "common.pt")
    )
    for name in (
        "iter_0000002",
        "iter_0000003",
        ".iter_0000001.megackpt-" + dead.save_id,
    ):
        (tmp_path / name).mkdir()
        dead.put(LocalStorage(tmp_path / name))
        (tmp_path / name / "__0_0.distcp").write_text("half")
    (tmp_path / "iter_0000003" / "notes.txt").write_text("mine")
    for name in ("iter_0000004", "iter_0000006"):
        (tmp_path / name).mkdir()  # somebody has just begun, perhaps
    os.utime(tmp_path / "iter_0000006", (1, 1))
    old, new = tmp_path / ".megackpt-put-1", tmp_path / ".megackpt-put-2"
    for torn in (old, new):
        torn.write_text("")
    os.utime(old, (1, 1))
    saved(CheckpointManager(tmp_path), 5)
    assert names(tmp_path) == [
        ".megackpt-put-2", "iter_0000001", "iter_0000003", "iter_0000004", "iter_0000005", TRACKER
    ]  # fmt: skip
    assert names(tmp_path / "iter_0000003") == ["notes.txt"]


def test_a_run_that_was_set_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps after the one that is saved are of another life: they neither count nor go."""
    manager = CheckpointManager(tmp_path, keep_last=2)
    saved(CheckpointManager(tmp_path), 10, 20, 30, 40)
    assert restored(manager, step=20) == (20, 20, [])
    saved(manager, 25)
    assert [step.step for step in manager.steps()] == [20, 25, 30, 40]
    assert (tmp_path / TRACKER).read_text() == "25"
    assert "holds step 40, which is after step 25" in caplog.text


def test_a_running_save_is_left_alone(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    saved(manager, 1)
    other = begin(tmp_path / "iter_0000001", save_id="cd" * 16)
    place = begin(tmp_path / "iter_0000002", save_id="ef" * 16)
    saved(manager, 3)
    for step in (1, 2):
        with pytest.raises(SaveInProgress):
            remove(manager.path(step))
        with pytest.raises(SaveInProgress):
            clear(manager.path(step))
    other.abort()
    place.abort()
    assert restored(manager, step=1) == (1, 1, [])
    saved(manager, 4)
    assert names(tmp_path) == ["iter_0000004", TRACKER]
    with pytest.raises(NotACheckpoint, match="does not exist"):
        remove(manager.path(9))


@pytest.mark.parametrize("how", [True, "process"])
def test_asynchronous_saves(tmp_path: Path, how: Any) -> None:
    weight = torch.zeros(8)
    declared = {"w": ShardedTensor.from_rank_offsets("w", weight), "value": 0}
    with CheckpointManager(tmp_path, keep_last=2, asynchronous=how) as manager:
        assert manager.poll() == []
        for step in (1, 2, 3):
            weight.fill_(step)
            manager.save(step, declared | {"value": step})
            weight.fill_(-1)
            manager.poll()
        manager.finalize()
        manager.save(4, state(4), asynchronous=False)
        assert manager.poll() == []
        weight.fill_(5)
        manager.save(5, declared | {"value": 5})
        assert manager.finalize() == [5]
        manager.save(6, declared | {"value": 6})  # which nobody finalizes but the end
        weight.fill_(6)
    assert names(tmp_path) == ["iter_0000005", "iter_0000006", TRACKER]
    assert (tmp_path / TRACKER).read_text() == "6"


def test_an_error_in_the_loop_drops_running_saves(tmp_path: Path) -> None:
    def train() -> None:
        with CheckpointManager(tmp_path, asynchronous=True) as manager:
            manager.save(1, state(1))
            raise RuntimeError("in the loop")

    with pytest.raises(RuntimeError, match="in the loop"):
        train()
    assert restored(CheckpointManager(tmp_path)) is None
    assert names(tmp_path) == []


def test_training_continues_after_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committing, "_PAUSES", (0.0,))
    with CheckpointManager(tmp_path, asynchronous=True, keep_last=1) as manager:
        saved(manager, 1)
        assert manager.finalize() == [1]
        manager.save(2, state(2))
        disowned(tmp_path / "iter_0000002")
        with pytest.raises(CheckpointingException):
            manager.finalize()
        saved(manager, 3)
        assert manager.finalize() == [3]
    assert (tmp_path / TRACKER).read_text() == "3"
    assert restored(manager) == (3, 3, [])


def test_a_tracker_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it names stays."""
    manager = CheckpointManager(tmp_path, keep_last=1)
    saved(manager, 1)
    (tmp_path / TRACKER).unlink()
    (tmp_path / TRACKER).mkdir()
    saved(manager, 2)
    assert "step 2 is complete, but its tracker is not written" in caplog.text
    assert [step.step for step in manager.steps()] == [1, 2]


def test_all_ranks_continue_from_the_same_step(tmp_path: Path) -> None:
    """The byte that is damaged is read by one of them."""

    def job(group: ThreadedGroup) -> tuple[int, float, int]:
        manager = CheckpointManager(tmp_path, keep_last=3, process_group=group)
        assert manager.restore(state(-1, group.rank, group.size)) is None
        for step in (1, 2, 3):
            manager.save(step, state(step, group.rank, group.size))
        group.all_agree(1)
        if group.is_coordinator:
            (data,) = (tmp_path / "iter_0000003").glob("__1_0.distcp")
            octets = bytearray(data.read_bytes())
            octets[octets.index(b"\x00\x00\x40\x40")] ^= 1
            data.write_bytes(octets)
        group.all_agree(1)
        found = manager.restore(state(-1, group.rank, group.size))
        assert found is not None
        assert not manager.preempted()
        if group.rank == 1:
            manager._preemption.received = True
        assert manager.preempted()
        assert manager.preempted()
        manager.close()
        return found.step, float(found.state["w"].sum()), len(found.skipped)

    assert ThreadedGroup.run(2, job) == [(2, 8.0, 1)] * 2


def one_of_several_jobs(run: str) -> None:
    with CheckpointManager(
        run, keep_last=2, asynchronous=bool(int(os.environ["RANK"]))
    ) as manager:
        for step in range(int(os.environ["RANK"]), 15, 3):
            manager.save(step, state(step))
            found = manager.restore(state(-1))
            assert found is None or found.state["w"].eq(found.state["value"]).all()
            assert found is None or found.step == found.state["value"]


def test_a_step_that_is_completed_during_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on when it is looked at, and has lost its marker when it is asked what became of it."""
    other = CheckpointManager(tmp_path, asynchronous=True)
    other.save(5, state(5))
    real = latest_step._was_complete

    def was_complete(root: str, step: run_directory.Step) -> bool:
        other.finalize()
        return real(root, step)

    monkeypatch.setattr(latest_step, "_was_complete", was_complete)
    assert restored(CheckpointManager(tmp_path)) == (5, 5, [])
    other.close()


def test_jobs_that_share_a_directory(ranks: Any, tmp_path: Path) -> None:
    """Each saves, looks for the latest and removes, whatever the others do; one finds itself set back, perhaps."""
    ranks(one_of_several_jobs, 3, tmp_path, init=False)
    manager = CheckpointManager(tmp_path, keep_last=1)
    assert restored(manager) == (14, 14, [])
    saved(manager, 15)
    assert names(tmp_path) == ["iter_0000015", TRACKER]


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


def test_in_a_bucket(bucket: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "megackpt")
    root = f"{bucket.url}/run"
    with CheckpointManager(
        root, keep_last=2, keep_every=4, asynchronous=True
    ) as manager:
        saved(manager, 4, 5, 6, 7)
    assert [step.step for step in manager.steps()] == [4, 6, 7]
    assert {key.split("/")[1] for key in stored(bucket)} == {
        "iter_0000004", "iter_0000006", "iter_0000007", TRACKER
    }  # fmt: skip
    assert (
        bucket.client.get_object(Bucket=bucket.name, Key=f"run/{TRACKER}")[
            "Body"
        ].read()
        == b"7"
    )
    assert restored(CheckpointManager(root)) == (7, 7, [])
    # Removals that died: after the record, and before it.
    bucket.client.delete_object(
        Bucket=bucket.name, Key="run/iter_0000006/megackpt.commit"
    )
    place = begin(f"{root}/iter_0000007", save_id="ab" * 16)
    place.storage.put("data", b"half")
    place.abandon()
    assert restored(CheckpointManager(root)) == (7, 7, [])
    saved(CheckpointManager(root, keep_last=2), 8)
    assert {key.split("/")[1] for key in stored(bucket)} == {
        "iter_0000007",
        "iter_0000008",
        TRACKER,
    }
    with pytest.raises(NotACheckpoint, match="no save of megackpt is complete"):
        remove(f"{root}/iter_0000009")
    clear(f"{root}/iter_0000007")
    assert not [key for key in stored(bucket) if "abab" in key]
    assert restored(CheckpointManager(root), step=7) == (7, 7, [])


def two(value: float) -> dict[str, Any]:
    return state(value) | {
        "a": ShardedTensor.from_rank_offsets("a", torch.full((8,), float(value)))
    }


@pytest.mark.parametrize("strict", ["log_all", "ignore_all", False, "return_all"])
def test_no_mix_of_two_steps(tmp_path: Path, strict: Any) -> None:
    """The damaged step has more keys than the one before, and has been loaded in part."""
    manager = CheckpointManager(tmp_path)
    manager.save(1, two(1))
    manager.save(2, state(2))
    manager.save(3, two(3))
    hurt(tmp_path / "iter_0000003")
    with pytest.raises(CorruptCheckpoint if strict == "return_all" else MismatchError):
        manager.restore(two(-1), strict=strict)
    megackpt.save(two(2), tmp_path / "iter_0000002")
    if strict == "return_all":
        loaded = manager.restore(two(-1), step=2, strict=strict)
        assert loaded is not None
        assert (loaded.state[0]["a"][0], *loaded.state[1:]) == (2, set(), set())
        return
    loaded = manager.restore(two(-1), strict=strict)
    assert loaded is not None
    assert (loaded.step, loaded.state["a"][0], loaded.state["w"][0]) == (2, 2, 2)


def test_the_step_just_saved_stays(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    saved(manager, 10, 5)
    assert names(tmp_path) == ["iter_0000005", "iter_0000010", TRACKER]
    assert (tmp_path / TRACKER).read_text() == "5"


def test_set_back_while_a_save_is_under_way(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=1, asynchronous=True) as manager:
        saved(manager, 20)
        manager.finalize()
        saved(manager, 30)
        assert restored(manager, step=20) == (20, 20, [])
        assert manager.finalize() == [30]
        assert (tmp_path / TRACKER).read_text() == "20"
        saved(manager, 25)
        assert manager.finalize() == [25]
    assert names(tmp_path) == ["iter_0000025", "iter_0000030", TRACKER]
    assert (tmp_path / TRACKER).read_text() == "25"


@pytest.mark.parametrize(
    ("code", "stays"), [(None, True), (0, True), (1, False), ("why", False)]
)
def test_leaving_by_sys_exit(
    tmp_path: Path, code: Any, stays: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        with CheckpointManager(tmp_path, asynchronous=True) as manager:
            manager.save(1, state(1))
            sys.exit(code)

    with pytest.raises(SystemExit):
        train()
    assert (restored(CheckpointManager(tmp_path)) == (1, 1, [])) is stays
    assert (
        "given up, as other ranks may not come: iter_0000001" in caplog.text
    ) is not stays


def test_other_checkpoints_in_the_directory_of_a_step(
    tmp_path: Path,
) -> None:
    manager = CheckpointManager(tmp_path)
    saved(manager, 1)
    megackpt.save(
        state(99), tmp_path / "iter_0000002" / "ema"
    )  # and killed before the save of the step
    assert restored(manager) == (1, 1, ["iter_0000002"])
    with pytest.raises(NotACheckpoint):
        manager.restore(state(-1), step=2)


def test_a_step_that_cannot_be_read_now_is_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    saved(manager, 1, 2)
    real = os.open

    def refusing(path: Any, *args: Any, **options: Any) -> int:
        if "iter_0000002" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(StorageError, match="iter_0000002"):
        manager.restore(state(-1))
    monkeypatch.setattr(os, "open", real)
    assert restored(manager) == (2, 2, [])


def test_steps_behind_links(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", keep_last=1)
    saved(CheckpointManager(tmp_path / "run"), 1, 2)
    (tmp_path / "run" / "iter_0000002").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "iter_0000002").symlink_to(tmp_path / "elsewhere")
    assert restored(manager) == (2, 2, [])
    saved(manager, 3)
    assert names(tmp_path / "run") == ["iter_0000002", "iter_0000003", TRACKER]
    assert restored(manager, step=2) == (2, 2, [])
    remove(manager.path(3))
    (tmp_path / "elsewhere").rename(tmp_path / "away")
    (tmp_path / "run" / TRACKER).unlink()
    with pytest.raises(CorruptCheckpoint, match="iter_0000002: a link"):
        manager.restore(state(-1))


@pytest.mark.parametrize("lost", ["tables", "directory"])
def test_a_run_that_lost_its_steps_does_not_start_again(
    tmp_path: Path, lost: str
) -> None:
    manager = CheckpointManager(tmp_path)
    saved(manager, 3)
    if lost == "tables":
        (tmp_path / TRACKER).unlink()
        for name in ("metadata.json", ".metadata"):
            (tmp_path / "iter_0000003" / name).unlink()
    else:
        remove(manager.path(3))
    with pytest.raises(
        CorruptCheckpoint,
        match=r"iter_0000003: data files|names step '3': there is no such",
    ):
        manager.restore(state(-1))


def test_two_names_of_one_step(tmp_path: Path) -> None:
    megackpt.save(state(1), tmp_path / "step-100")
    saved(CheckpointManager(tmp_path), 100)
    (tmp_path / "global_step7").mkdir()
    (tmp_path / "global_step7" / "mp_rank_00_model_states.pt").touch()
    saved(CheckpointManager(tmp_path), 7)
    for naming, value in (("megatron", 100), ("torchtitan", 1)):
        manager = CheckpointManager(tmp_path, naming=naming)
        latest = manager.latest()
        assert latest is not None
        assert latest.name == os.path.basename(manager.path(100))
        assert restored(manager) == restored(manager, step=100) == (100, value, [])
        assert restored(manager, step=7) == (7, 7, [])


def test_later_steps_of_any_style_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    megackpt.save(state(1), tmp_path / "20261122")
    saved(CheckpointManager(tmp_path), 100)
    assert "holds step 20261122, which is after step 100" in caplog.text


def test_ranks_that_ask_for_different_steps(tmp_path: Path) -> None:
    saved(CheckpointManager(tmp_path), 5, 6)

    def job(group: ThreadedGroup) -> None:
        manager = CheckpointManager(tmp_path, process_group=group)
        for step in (5 + group.rank, (None, 5)[group.rank]):
            with pytest.raises(
                ShardingError, match="the ranks restore different steps"
            ):
                manager.restore(state(-1, group.rank, group.size), step=step)
        assert manager.restore(state(-1, group.rank, group.size), step=6) is not None

    ThreadedGroup.run(2, job)
    found = CheckpointManager(tmp_path).restore(state(-1), step=torch.tensor(5))  # type: ignore[arg-type]
    assert found is not None
    assert type(found.step) is int


def test_a_step_that_is_replaced_meanwhile_is_examined_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    saved(manager, 1, 2)

    def replacing(times: int, place: Any, name: str) -> None:
        real, left = getattr(place, name), [times]

        def once(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                raise CheckpointReplaced("replaced")
            return real(*args, **options)

        monkeypatch.setattr(place, name, once)

    replacing(2, checkpoint_manager, "load")
    assert restored(manager) == (2, 2, [])
    replacing(2, latest_step, "find_damage")
    latest = manager.latest()
    assert latest is not None
    assert latest.step == 2
    for place, name in ((latest_step, "find_damage"), (checkpoint_manager, "load")):
        replacing(3, place, name)
        with pytest.raises(CheckpointReplaced):
            manager.restore(state(-1))


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


def test_options_of_the_manager_are_refused_for_one_step(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, asynchronous=True)
    with pytest.raises(ValueError, match="the kind of worker is the manager's"):
        manager.save(1, state(1), asynchronous="process")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="process_group cannot be given"):
        manager.save(1, state(1), process_group=None)
    with pytest.raises(ValueError, match="timeout cannot be given"):
        manager.restore(state(1), timeout=None)
    with pytest.raises(ValueError, match="0 or more"):
        manager.restore(state(1), step=-1)


def test_steps_committed_before_a_failure_are_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committing, "_PAUSES", (0.0,))
    with CheckpointManager(tmp_path, asynchronous=True) as manager:
        saved(manager, 1, 2)
        disowned(tmp_path / "iter_0000002")
        with pytest.raises(CheckpointingException):
            manager.finalize()
        assert manager.finalize() == [1]
        assert manager.finalize() == []


def test_a_removal_in_a_bucket_keeps_its_lock_and_stops_without(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bucket.url}/step"
    megackpt.save(state(1), url)
    monkeypatch.setattr(marker, "HEARTBEAT", 0.01)
    renewed = threading.Event()
    renew, read = buckets.Lock.renew, removing.read_record
    monkeypatch.setattr(
        buckets.Lock, "renew", lambda self: renew(self) and (renewed.set() or True)
    )

    def reading(outer: Any) -> Any:
        found = read(outer)
        assert renewed.wait(20)
        return found

    def robbed(outer: Any) -> Any:
        found = read(outer)
        bucket.client.delete_object(Bucket=bucket.name, Key="step/.megackpt-saving")
        return found

    def outrun(outer: Any) -> Any:
        found, version = read(outer)
        key = "step/megackpt.commit"
        body = bucket.client.get_object(Bucket=bucket.name, Key=key)["Body"].read()
        bucket.client.put_object(
            Bucket=bucket.name, Key=key, Body=body.rstrip() + b" " * (len(body) % 7 + 1)
        )
        return found, version

    for reader, told in (
        (robbed, "took the removal"),
        (outrun, "saved to by another job"),
    ):
        monkeypatch.setattr(removing, "read_record", reader)
        with pytest.raises(SaveInProgress, match=told):
            remove(url)
        assert megackpt.verify(url).ok
    monkeypatch.setattr(removing, "read_record", reading)
    remove(url)
    assert stored(bucket) == []


def test_only_the_newest_steps_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(CheckpointManager(tmp_path), *range(8))
    looked: list[int | None] = []
    opened: list[int] = []
    look, opening = run_directory._examine, retention.open_checkpoint
    monkeypatch.setattr(
        run_directory,
        "_examine",
        lambda path, step: looked.append(step.step) or look(path, step),
    )
    monkeypatch.setattr(
        retention,
        "open_checkpoint",
        lambda path: opened.append(int(path[-7:])) or opening(path),
    )

    def counted(call: Callable[[], object]) -> tuple[list[int | None], list[int]]:
        looked.clear()
        opened.clear()
        call()
        return looked, opened

    manager = CheckpointManager(tmp_path, keep_last=3)
    assert counted(manager.latest) == ([7], [7])
    assert counted(lambda: manager.restore(state(-1))) == ([7], [7])
    assert counted(lambda: manager.restore(state(-1), step=4)) == ([4], [])
    assert counted(lambda: saved(manager, 8)) == ([8, 7, 6], [8, 7, 6])
    assert names(tmp_path) == ["iter_0000006", "iter_0000007", "iter_0000008", TRACKER]
    assert counted(lambda: saved(manager, 9)) == ([9, 8, 7], [9])
    assert counted(lambda: saved(CheckpointManager(tmp_path), 10)) == ([10, 9], [])


@pytest.mark.parametrize("again", [None, False])
def test_a_running_step_is_saved_again(tmp_path: Path, again: bool | None) -> None:
    """The last save of a loop, of a step that the loop has saved."""

    def train(group: ThreadedGroup) -> None:
        with CheckpointManager(
            tmp_path, asynchronous=True, process_group=group
        ) as manager:
            for step in (10, 20):
                manager.save(step, state(step, group.rank, group.size))
            manager.save(20, state(21, group.rank, group.size), asynchronous=again)
            assert manager.finalize() == ([10, 20, 20] if again is None else [10, 20])

    ThreadedGroup.run(2, train)
    manager = CheckpointManager(tmp_path)
    assert restored(manager) == (20, 21, [])
    assert restored(manager, step=10) == (10, 10, [])


def test_a_step_that_one_rank_cannot_see_is_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a network file system shows a rank the directory of a while ago."""
    saved(CheckpointManager(tmp_path), 1, 2)
    blind = threading.local()
    real = load_operation.open_same

    def open_same(directory: str, *args: Any) -> Any:
        return real(directory + getattr(blind, "elsewhere", ""), *args)

    monkeypatch.setattr(load_operation, "open_same", open_same)

    def job(group: ThreadedGroup) -> None:
        if not group.is_coordinator:
            blind.elsewhere = "_as_it_was"
        manager = CheckpointManager(tmp_path, process_group=group)
        with pytest.raises(NotACheckpoint, match="which cannot be seen on host"):
            manager.restore(state(-1, group.rank, group.size))

    ThreadedGroup.run(2, job)


def test_a_run_starts_from_a_release_of_megatron(tmp_path: Path) -> None:
    megackpt.save(state(7), tmp_path / "release")
    (tmp_path / TRACKER).write_text("release")
    manager = CheckpointManager(tmp_path, keep_last=1)
    assert restored(manager) == restored(manager, step=0) == (0, 7, [])
    saved(manager, 5, 6)
    assert names(tmp_path) == ["iter_0000006", TRACKER, "release"]
    (tmp_path / TRACKER).write_text("release")
    remove(manager.path(6))
    remove(tmp_path / "release")
    with pytest.raises(
        CorruptCheckpoint, match="names step 'release': there is no such step"
    ):
        manager.restore(state(-1))


def test_a_warning_when_a_run_starts_beside_other_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    megackpt.save(state(1), tmp_path / "run" / "last.ckpt")
    assert CheckpointManager(tmp_path / "run").restore(state(-1)) is None
    assert "the name of the torch_dist checkpoint last.ckpt has no step" in caplog.text
    megackpt.save(state(1), tmp_path / "stray", "safetensors")
    for path in (tmp_path / "stray").iterdir():
        if path.suffix != ".safetensors":
            path.unlink()
    assert CheckpointManager(tmp_path / "stray").restore(state(-1)) is None
    assert "the name of the safetensors checkpoint . has no step" in caplog.text
    with pytest.raises(CorruptCheckpoint, match="is a checkpoint itself"):
        restored(CheckpointManager(tmp_path / "run" / "last.ckpt"))
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a disk that is away")
    for name in ("file", "file/run", "link"):
        with pytest.raises(StorageError, match="is not a directory"):
            restored(CheckpointManager(tmp_path / name))


def test_a_step_that_proved_damaged_does_not_count(tmp_path: Path) -> None:
    saved(CheckpointManager(tmp_path), 1, 2, 3)
    hurt(tmp_path / "iter_0000003")
    manager = CheckpointManager(tmp_path, keep_last=2)
    assert restored(manager) == (2, 2, ["iter_0000003"])
    latest = manager.latest()
    assert latest is not None
    assert latest.step == 2
    saved(manager, 4)
    assert names(tmp_path) == ["iter_0000002", "iter_0000003", "iter_0000004", TRACKER]
    saved(manager, 3, 4)
    assert names(tmp_path) == ["iter_0000003", "iter_0000004", TRACKER]


@pytest.mark.parametrize("door", ["restore", "latest", "step"])
def test_a_damaged_step_counts_again_when_it_has_changed(
    tmp_path: Path, door: str
) -> None:
    manager, other = (
        CheckpointManager(tmp_path, keep_last=2),
        CheckpointManager(tmp_path),
    )
    saved(other, 1, 2, 3)
    hurt(tmp_path / "iter_0000003")
    if door == "step":
        with pytest.raises(CorruptCheckpoint, match="block 0"):
            manager.restore(state(-1), step=3)
    else:
        assert manager.latest(verify=True) if door == "latest" else restored(manager)
    assert restored(manager, step=2) == (2, 2, [])
    saved(manager, 4)
    assert restored(manager) == (4, 4, [])  # a rollback
    saved(manager, 4)
    assert names(tmp_path) == ["iter_0000002", "iter_0000003", "iter_0000004", TRACKER]
    saved(manager, 5)
    assert names(tmp_path) == ["iter_0000004", "iter_0000005", TRACKER]
    manager.save(6, state(3))
    hurt(tmp_path / "iter_0000006")
    assert restored(manager) == (5, 5, ["iter_0000006"])
    saved(manager, 7)
    assert names(tmp_path) == ["iter_0000005", "iter_0000006", "iter_0000007", TRACKER]
    remove(tmp_path / "iter_0000007")
    saved(other, 6)
    latest = manager.latest()
    assert latest is not None
    assert latest.step == 6


def test_a_damaged_later_step_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(CheckpointManager(tmp_path), 10, 40)
    os.truncate(max((tmp_path / "iter_0000040").glob("*.distcp")), 10)
    saved(CheckpointManager(tmp_path, keep_last=2), 20, 21, 22)
    assert caplog.text.count("iter_0000040 is damaged, so it does not count") == 1


def test_a_step_that_was_kept_is_removed_after_it_is_saved_again(
    tmp_path: Path,
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    saved(manager, 1)
    (tmp_path / "iter_0000001" / "notes.txt").touch()
    saved(manager, 2)
    saved(CheckpointManager(tmp_path), 1)
    saved(manager, 3)
    assert names(tmp_path / "iter_0000001") == ["notes.txt"]


@pytest.mark.parametrize("naming", ["megatron", "torchtitan"])
def test_a_step_that_was_set_aside_is_found(tmp_path: Path, naming: str) -> None:
    """By a save that was to replace it, and died between the two renames."""
    manager = CheckpointManager(tmp_path, naming=naming, keep_last=1)
    saved(manager, 2)
    name = os.path.basename(manager.path(2))
    (tmp_path / name).rename(tmp_path / f".{name}.megackpt-{'ab' * 16}.old")
    assert restored(manager) == (2, 2, [])
    latest = manager.latest()
    assert latest is not None
    assert (latest.name, latest.complete) == (name, True)
    saved(manager, 3)
    assert [step.step for step in manager.steps()] == [3]
    assert not [entry for entry in names(tmp_path) if entry.startswith(".")]


def test_a_tracker_of_a_missing_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path)
    saved(manager, 50, 100)
    remove(manager.path(100))
    assert restored(manager) == (50, 50, ["iter_0000100"])
    assert f"{TRACKER} names step '100': there is no such step" in caplog.text
    caplog.clear()
    saved(manager, 75)
    assert caplog.text == ""
    assert restored(manager) == (75, 75, [])
    (tmp_path / TRACKER).write_text("9" * 300)
    found = manager.restore(state(-1))
    assert found is not None
    assert (found.step, len(found.skipped)) == (75, 1)
    remove(manager.path(50))
    remove(manager.path(75))
    with pytest.raises(CorruptCheckpoint, match="999': there is no such step"):
        manager.restore(state(-1))


def test_leftovers_of_a_later_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    saved(manager, 10, 40)
    (tmp_path / "iter_0000040" / "eval.json").touch()
    remove(manager.path(40))
    (tmp_path / "20261122").mkdir()  # logs of a day
    assert restored(manager) == (10, 10, ["iter_0000040"])
    assert "20261122" not in caplog.text
    caplog.clear()
    saved(manager, 35)
    assert caplog.text == ""


@pytest.mark.parametrize("kind", ["link", "directory"])
def test_an_index_that_is_no_file_is_damage(tmp_path: Path, kind: str) -> None:
    manager = CheckpointManager(tmp_path)
    saved(manager, 1, 2)
    index = tmp_path / "iter_0000002" / "megackpt.index"
    index.rename(tmp_path / "index")
    if kind == "link":
        index.symlink_to(tmp_path / "index")
    else:
        index.mkdir()
    Retention(str(tmp_path), NAMINGS[0], 1).apply(lambda: (2, ()))
    assert restored(manager) == (1, 1, ["iter_0000002"])


def test_restoring_a_step_waits_for_removals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        retention, "remove", lambda path: threading.Event().wait(0.5) or remove(path)
    )
    with CheckpointManager(tmp_path, keep_last=1, asynchronous=True) as manager:
        saved(manager, 1, 2)
        assert manager.finalize() == [1, 2]
        with pytest.raises(NotACheckpoint, match="iter_0000001 does not exist"):
            manager.restore(state(-1), step=1)


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
