"""Which step a run continues from, and when none is found."""

from __future__ import annotations

import os
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.checkpoint import (
    remove,
    run_directory,
)
from megackpt.errors import (
    CheckpointReplaced,
    CorruptCheckpoint,
    MismatchError,
    NotACheckpoint,
    StorageError,
    UntrustedClass,
)
from megackpt.loader import load_session
from megackpt.manager import (
    CheckpointManager,
    restorer,
)
from megackpt.testing import ThreadedGroup
from tests.manager.runs import (
    TRACKER,
    hurt,
    names,
    restored,
    saved,
    state,
)


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


def test_a_step_that_is_completed_during_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on when it is looked at, and has lost its marker when it is asked what became of it."""
    other = CheckpointManager(tmp_path, asynchronous=True)
    other.save(5, state(5))
    real = restorer._was_complete

    def was_complete(root: str, step: run_directory.Step) -> bool:
        other.finalize()
        return real(root, step)

    monkeypatch.setattr(restorer, "_was_complete", was_complete)
    assert restored(CheckpointManager(tmp_path)) == (5, 5, [])
    other.close()


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


@pytest.mark.parametrize("lost", ["tables", "tables and index", "directory"])
def test_a_run_that_lost_its_steps_does_not_start_again(
    tmp_path: Path, lost: str
) -> None:
    manager = CheckpointManager(tmp_path)
    saved(manager, 3)
    if lost == "directory":
        remove(manager.path(3))
        reason = "names step '3': there is no such"
    else:
        (tmp_path / TRACKER).unlink()
        for name in ("metadata.json", ".metadata"):
            (tmp_path / "iter_0000003" / name).unlink()
        reason = r"iter_0000003: .*\.metadata is missing"
        if lost == "tables and index":
            (tmp_path / "iter_0000003" / "megackpt.index").unlink()
            reason = "iter_0000003: data files"
    with pytest.raises(CorruptCheckpoint, match=reason):
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

    replacing(2, restorer, "load")
    assert restored(manager) == (2, 2, [])
    replacing(2, restorer, "find_problems")
    latest = manager.latest()
    assert latest is not None
    assert latest.step == 2
    for place, name in ((restorer, "find_problems"), (restorer, "load")):
        replacing(3, place, name)
        with pytest.raises(CheckpointReplaced):
            manager.restore(state(-1))


def test_a_step_that_one_rank_cannot_see_is_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a network file system shows a rank the directory of a while ago."""
    saved(CheckpointManager(tmp_path), 1, 2)
    elsewhere = ContextVar("elsewhere", default="")
    real = load_session.open_same

    def open_same(directory: str, *args: Any) -> Any:
        return real(directory + elsewhere.get(), *args)

    monkeypatch.setattr(load_session, "open_same", open_same)

    def job(group: ThreadedGroup) -> None:
        if not group.is_coordinator:
            elsewhere.set("_as_it_was")
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
