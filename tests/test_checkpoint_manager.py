"""The manager of a run's checkpoints: what it saves, finds, keeps and removes; and that all ranks do the same."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import ShardedTensor
from megackpt.checkpoint import begin, clear, directory_target, remove
from megackpt.checkpoint.marker import Marker
from megackpt.distributed import SingleGroup
from megackpt.errors import (
    CheckpointingException,
    NotACheckpoint,
    ShardingError,
)
from megackpt.manager import (
    CheckpointManager,
)
from megackpt.testing import ThreadedGroup
from tests.manager.runs import (
    TRACKER,
    names,
    restored,
    saved,
    state,
    stored,
)


def disowned(checkpoint: Path) -> None:
    """A save that goes on loses its marker, so it fails, however far it is."""
    staging = f".{checkpoint.name}.megackpt-*/.megackpt-saving-*"
    for path in checkpoint.parent.glob(staging):
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


def test_leftovers_of_dead_saves_are_cleared(tmp_path: Path) -> None:
    saved(CheckpointManager(tmp_path), 1)
    dead = Marker("ab" * 16, pid=2**22 + 5, started=1)
    for step in (1, 2):
        staging = tmp_path / f".iter_000000{step}.megackpt-{dead.save_id}"
        staging.mkdir()
        (staging / dead.name).write_bytes(dead.encode())
        (staging / "__0_0.distcp").write_text("half")
    (tmp_path / "iter_0000004").mkdir()
    old, new = tmp_path / ".megackpt-put-1", tmp_path / ".megackpt-put-2"
    for torn in (old, new):
        torn.write_text("")
    os.utime(old, (1, 1))
    saved(CheckpointManager(tmp_path), 5)
    assert names(tmp_path) == [
        ".megackpt-put-2", "iter_0000001", "iter_0000004", "iter_0000005", TRACKER
    ]  # fmt: skip


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


def test_after_an_error_in_the_loop_one_process_commits_running_saves(
    tmp_path: Path,
) -> None:
    def train() -> None:
        with CheckpointManager(tmp_path, asynchronous=True) as manager:
            manager.save(1, state(1))
            raise RuntimeError("in the loop")

    with pytest.raises(RuntimeError, match="in the loop"):
        train()
    assert restored(CheckpointManager(tmp_path)) == (1, 1, [])
    assert names(tmp_path) == ["iter_0000001", TRACKER]


def test_training_continues_after_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_target, "_PAUSES", (0.0,))
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
        for step in range(int(os.environ["RANK"]), 9, 3):
            manager.save(step, state(step))
            found = manager.restore(state(-1))
            assert found is None or found.state["w"].eq(found.state["value"]).all()
            assert found is None or found.step == found.state["value"]


def test_jobs_that_share_a_directory(ranks: Any, tmp_path: Path) -> None:
    """Each saves, looks for the latest and removes, whatever the others do; one finds itself set back, perhaps."""
    ranks(one_of_several_jobs, 3, tmp_path, init=False)
    manager = CheckpointManager(tmp_path, keep_last=1)
    assert restored(manager) == (8, 8, [])
    saved(manager, 9)
    assert names(tmp_path) == ["iter_0000009", TRACKER]


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


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("code", [None, 0, 1, "why"])
def test_leaving_by_sys_exit(
    tmp_path: Path, code: Any, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """After an error other ranks may not come; one process commits its save."""

    def train(group: ThreadedGroup) -> None:
        ranks = group if size > 1 else SingleGroup()
        with CheckpointManager(
            tmp_path, asynchronous=True, process_group=ranks
        ) as manager:
            manager.save(1, state(1, group.rank, size))
            sys.exit(code)

    def rank(group: ThreadedGroup) -> None:
        with pytest.raises(SystemExit):
            train(group)

    ThreadedGroup.run(size, rank)
    stays = size == 1 or not code
    assert (restored(CheckpointManager(tmp_path)) == (1, 1, [])) is stays
    lost = f"the process ends (SystemExit({code!r})) before these saves are committed"
    assert (lost in caplog.text) is not stays


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


def test_options_of_the_manager_are_refused_for_one_step(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, asynchronous=True)
    with pytest.raises(ValueError, match="the kind of worker is the manager's"):
        manager.save(1, state(1), asynchronous="process")  # type: ignore[arg-type]
    once = "give it once, to CheckpointManager: all steps have the same"
    with pytest.raises(TypeError, match=f"process_group=None is .*: {once}"):
        manager.save(1, state(1), process_group=None)
    with pytest.raises(TypeError, match=f"timeout=None is .*: {once}"):
        manager.restore(state(1), timeout=None)
    with pytest.raises(ValueError, match="0 or more"):
        manager.restore(state(1), step=-1)


def test_steps_committed_before_a_failure_are_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_target, "_PAUSES", (0.0,))
    with CheckpointManager(tmp_path, asynchronous=True) as manager:
        saved(manager, 1, 2)
        disowned(tmp_path / "iter_0000002")
        with pytest.raises(CheckpointingException):
            manager.finalize()
        assert manager.finalize() == [1]
        assert manager.finalize() == []


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
