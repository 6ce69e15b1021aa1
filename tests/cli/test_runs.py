"""The directory of a run where a checkpoint is expected: its latest complete step, or a list."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.__main__ import main
from megackpt.checkpoint.run_directory import RunDirectory, Step, latest_step
from megackpt.errors import NotACheckpoint, StorageError
from megackpt.storage import LocalStorage
from megackpt.testing import ThreadedGroup
from tests.cli.conftest import make_state


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        megackpt.save(make_state(step), tmp_path / "run" / f"iter_{step:07d}")
    (tmp_path / "run" / "iter_0000003").mkdir()
    return tmp_path / "run"


def unchecked(where: Path) -> None:
    """A checkpoint without digests."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
    megackpt.save(state, where, "safetensors")
    (where / "megackpt.index").unlink()


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_the_latest_complete_step_is_read(
    run: Path, plain: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    assert f"location: {run}/iter_0000002\n" in plain("show", run)
    assert "same: no" in plain("diff", run, run / "iter_0000001", status=1)
    assert "same: yes" in plain("diff", run, run / "iter_0000002")
    plain("convert", run, run.parent / "out", "--to", "zarr")
    assert "same: yes" in plain("diff", run.parent / "out", run / "iter_0000002")
    assert megackpt.load_plain_tensors(run)["w"][0, 0] == 2
    assert "w" in megackpt.load_tensors_metadata(run)
    assert megackpt.load_common_state_dict(run) == {"iteration": 5}
    assert megackpt.verify(run).location == f"{run}/iter_0000002"
    assert not megackpt.check_is_distributed_checkpoint(run)
    said = {record.message for record in caplog.records}
    line = (
        "is the directory of a run: its latest complete step, iter_0000002, is read (newer, but "
        f"not complete: iter_0000003 ({run}/iter_0000003 is not a distributed checkpoint: it is "
        "empty))"
    )
    assert said >= {f"{run} {line}"}


def test_answers_name_the_step_that_was_read(
    run: Path, asked: Callable[..., Any]
) -> None:
    latest = str(run / "iter_0000002")
    assert asked("show", run)["location"] == latest
    found = asked("diff", run, run / "iter_0000002")
    assert (found["a"], found["b"]) == (latest, latest)
    found = asked("convert", run, run.parent / "out", "--to", "zarr")
    assert found["source"] == latest


def test_only_steps_down_to_the_first_complete_one_are_examined(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, examine = [], RunDirectory.examine

    def examined(self: RunDirectory, name: str) -> list[Step]:
        names.append(name)
        return examine(self, name)

    monkeypatch.setattr(RunDirectory, "examine", examined)
    assert megackpt.load_plain_tensors(run)["w"][0, 0] == 2
    assert names == ["iter_0000003", "iter_0000002"]


def test_a_large_directory_that_is_no_run_is_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        (tmp_path / f"folder{number}").mkdir()
        (tmp_path / str(number)).mkdir()
    listed, entries = [], LocalStorage.list

    def listing(self: LocalStorage, name: str = "") -> list[str]:
        listed.append(name)
        return entries(self, name)

    monkeypatch.setattr(LocalStorage, "list", listing)
    with pytest.raises(NotACheckpoint, match=r"contains 299 \(.*and 90 more: is one"):
        megackpt.load({}, tmp_path)
    assert len(listed) < 1000


def test_the_search_for_a_step_can_be_stopped(run: Path) -> None:
    problem, stopped = NotACheckpoint("none"), StorageError("given up")

    def moved() -> None:
        raise stopped

    with pytest.raises(StorageError) as raised:
        latest_step(run, problem, moved)
    assert raised.value is stopped


def test_all_ranks_read_the_same_step(run: Path) -> None:
    def load(group: ThreadedGroup) -> Any:
        w = torch.empty(1024, 1024)
        whole = ShardedTensor.from_rank_offsets("w", w, replica_id=group.rank)
        megackpt.load({"w": whole}, run, process_group=group)
        return float(w[0, 0])

    assert ThreadedGroup.run(2, load) == [2, 2]


def test_without_a_complete_step_the_steps_are_listed(run: Path) -> None:
    for step in (1, 2):
        shutil.rmtree(run / f"iter_{step:07d}")
    with pytest.raises(NotACheckpoint, match=r"contains iter_0000003 \(.*it is empty"):
        megackpt.load_plain_tensors(run)


def test_what_is_left_of_a_checkpoint_is_no_run(run: Path) -> None:
    step = run / "iter_0000002"
    shutil.copytree(run / "iter_0000001", step / "1")
    for name in (".metadata", "megackpt.index"):
        (step / name).unlink()
    with pytest.raises(NotACheckpoint):
        megackpt.verify(step)


def test_nothing_replaces_a_run(run: Path) -> None:
    with pytest.raises(NotACheckpoint):
        megackpt.remove_sharded_tensors(run, "w")
    assert sorted(path.name for path in run.iterdir()) == [
        f"iter_{step:07d}" for step in (1, 2, 3)
    ]


@pytest.mark.parametrize("jobs", [1, 3])
def test_verify_reads_all_steps(
    run: Path, plain: Callable[..., str], asked: Callable[..., Any], jobs: int
) -> None:
    more = ("--jobs", str(jobs))
    found = asked("verify", run, *more)
    assert found["ok"]
    assert [step["name"] for step in found["steps"]] == ["iter_0000001", "iter_0000002"]
    assert found["skipped"][0].startswith("iter_0000003: ")
    unchecked(run / "iter_0000004")
    found = asked("verify", run, *more, status=7)
    assert [step["checked"] for step in found["steps"]] == [True, True, False]
    assert asked("verify", run, *more, "--allow-unchecked")["ok"]
    damage(run / "iter_0000001" / "__0_0.distcp")
    found = asked("verify", run, *more, status=1)
    assert [step["ok"] for step in found["steps"]] == [False, True, True]
    assert found["problems"][0].startswith("iter_0000001: ")
    assert "'w'" in plain("verify", run, *more, status=1)


@pytest.mark.parametrize("name", ["__0_0.distcp", "metadata.json"])
def test_verify_finds_what_a_step_has_lost(
    run: Path, asked: Callable[..., Any], name: str
) -> None:
    (run / "iter_0000002" / name).unlink()
    found = asked("verify", run, status=1)
    assert [step["ok"] for step in found["steps"]] == [True, False]
    assert f"{name} is missing" in found["problems"][0].replace(
        ", written by rank 0,", ""
    )
    assert [text.split(":")[0] for text in found["skipped"]] == ["iter_0000003"]


def test_verify_finds_a_file_that_is_cut_off(
    run: Path, asked: Callable[..., Any]
) -> None:
    shutil.rmtree(run / "iter_0000001")
    with (run / "iter_0000002/__0_0.distcp").open("r+b") as file:
        file.truncate(1000)
    found = asked("verify", run, status=1)
    assert not found["ok"]
    assert "truncated" in found["problems"][0]


def test_verify_reads_steps_without_a_number(
    tmp_path: Path, asked: Callable[..., Any]
) -> None:
    megackpt.save(make_state(), tmp_path / "run/final")
    (step,) = asked("verify", tmp_path / "run")["steps"]
    assert (step["name"], step["ok"]) == ("final", True)


@pytest.mark.parametrize("jobs", ["x", "0", "-1", "1.5"])
def test_a_wrong_number_of_jobs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], jobs: str
) -> None:
    with pytest.raises(SystemExit):
        main(["verify", str(tmp_path), f"--jobs={jobs}"])
    assert f"{jobs!r} is not a whole number from 1 on" in capsys.readouterr().err


def test_a_checkpoint_without_digests_has_a_status_of_its_own(
    tmp_path: Path, plain: Callable[..., str]
) -> None:
    unchecked(tmp_path / "a")
    assert "checked: no" in plain("verify", tmp_path / "a", status=7)
    assert "checked: no" in plain("verify", tmp_path / "a", "--allow-unchecked")


def test_ls_compares_sizes_and_shows_metrics(
    tmp_path: Path, plain: Callable[..., str], asked: Callable[..., Any]
) -> None:
    with megackpt.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, make_state(), metrics={"loss": 0.25})
        manager.save(2, make_state())
        with (tmp_path / "run/iter_0000002/__0_0.distcp").open("r+b") as file:
            file.truncate(1000)
        assert [step.complete for step in manager.steps()] == [True, False]
    found = asked("ls", tmp_path / "run")
    assert found["latest"] == "iter_0000001"
    assert [step["metrics"] for step in found["steps"]] == [{"loss": 0.25}, {}]
    assert "__0_0.distcp" in found["steps"][1]["reason"]
    (tmp_path / "run/megackpt_metrics.json").write_text("[]")
    assert "iter_0000001" in plain("ls", tmp_path / "run")
