"""Directories of runs, in the styles of the field's trainers: which steps are there, complete or not, the latest."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.checkpoint.marker import Marker
from megackpt.manager import Run, Step, list_run
from megackpt.storage import LocalStorage

GOLDEN = Path(__file__).parent / "golden" / "mcore-0.16.1-tp2pp1dp2"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "ckpt"
    megackpt.save(
        {"w": ShardedTensor.from_rank_offsets("w", torch.arange(8.0))}, folder
    )
    return folder


def made(run: Path, checkpoint: Path, *names: str) -> Run:
    for name in names:
        shutil.copytree(checkpoint, run / name)
    return list_run(run)


def named(run: Run) -> dict[str, Step]:
    return {step.name: step for step in run.steps}


@pytest.mark.parametrize(
    ("style", "names", "steps"),
    [
        ("megatron", ("iter_0000100", "iter_0000020"), (20, 100)),
        ("torchtitan", ("step-100", "step-20"), (20, 100)),
        ("torchtitan", ("step_100", "step_20"), (20, 100)),
        ("transformers", ("checkpoint-500", "checkpoint-1000"), (500, 1000)),
        (
            "lightning",
            ("epoch=3-step=100.ckpt", "epoch=10-step=1000-v1.ckpt"),
            (100, 1000),
        ),
        (
            "lightning",
            ("model--val_loss=0.52-step=99-consumed_samples=800.0-last",),
            (99,),
        ),
        ("deepspeed", ("global_step100", "global_step20"), (20, 100)),
        ("composer", ("ep0-ba100", "ep1-ba200"), (100, 200)),
        ("plain", ("100", "000020"), (20, 100)),
    ],
)
def test_styles(
    tmp_path: Path,
    checkpoint: Path,
    style: str,
    names: tuple[str, ...],
    steps: tuple[int, ...],
) -> None:
    run = made(tmp_path, checkpoint, *names)
    assert tuple(step.step for step in run.steps) == steps
    assert {step.style for step in run.steps} == {style}
    assert all(step.complete for step in run.steps)
    assert run.latest is not None
    assert run.latest.step == max(steps)
    assert run.itself is None


def test_format_size_and_time_of_a_step(tmp_path: Path) -> None:
    run = made(tmp_path, GOLDEN, "iter_0000100")
    (step,) = run.steps
    files = [file for file in GOLDEN.rglob("*") if file.is_file()]
    assert (step.format, step.version, step.files) == ("torch_dist", 1, len(files))
    assert step.bytes == sum(file.stat().st_size for file in files)
    assert step.saved == max(
        file.stat().st_mtime for file in tmp_path.rglob("*") if file.is_file()
    )


def test_other_things_in_the_directory_are_none_of_ours(
    tmp_path: Path, checkpoint: Path
) -> None:
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "log.txt").write_text("step 100")
    (tmp_path / ".hidden").mkdir()
    run = made(tmp_path, checkpoint, "iter_0000100", "final")
    assert [(step.name, step.step) for step in run.steps] == [
        ("iter_0000100", 100),
        ("final", None),
    ]


def test_why_a_step_is_not_complete(tmp_path: Path, checkpoint: Path) -> None:
    made(tmp_path, checkpoint, "iter_0000001")
    (tmp_path / "iter_0000002").mkdir()
    shutil.copytree(
        GOLDEN,
        tmp_path / "iter_0000003",
        ignore=shutil.ignore_patterns("metadata.json", ".metadata"),
    )
    marker = Marker("0123", pid=1, started=0)
    (tmp_path / ".iter_0000004.megackpt-0123").mkdir()
    (tmp_path / ".iter_0000004.megackpt-0123" / marker.name).write_bytes(
        marker.encode()
    )
    steps = named(list_run(tmp_path))
    assert [step.complete for step in steps.values()] == [True, False, False, False]
    assert steps["iter_0000002"].reason.endswith("it is empty")
    assert "table of contents" in steps["iter_0000003"].reason
    assert "a save by process 1" in steps["iter_0000004"].reason
    assert list_run(tmp_path).latest == steps["iter_0000001"]


def test_what_others_left_unfinished(tmp_path: Path, checkpoint: Path) -> None:
    made(tmp_path, checkpoint, "model--step=10", "model--step=20")
    (tmp_path / "model--step=20-unfinished").touch()
    (tmp_path / "30.orbax-checkpoint-tmp-17").mkdir()
    steps = named(list_run(tmp_path))
    assert {name: step.complete for name, step in steps.items()} == {
        "model--step=10": True,
        "model--step=20": False,
        "30.orbax-checkpoint-tmp-17": False,
    }


@pytest.mark.parametrize(
    ("name", "file", "kind"),
    [
        ("global_step7", "mp_rank_00_model_states.pt", "deepspeed"),
        ("7", "_CHECKPOINT_METADATA", "orbax"),
        ("step_7", "weight/.zarray", "zarr"),
    ],
)
def test_steps_of_other_libraries_are_listed_by_their_names(
    tmp_path: Path, name: str, file: str, kind: str
) -> None:
    path = tmp_path / name / file
    path.parent.mkdir(parents=True)
    path.write_bytes(b"12345")
    (step,) = list_run(tmp_path).steps
    assert (step.complete, step.format, step.version) == (True, kind, None)
    assert (step.files, step.bytes) == (1, 5)


def test_megatrons_files_of_single_ranks_are_not_readable(tmp_path: Path) -> None:
    path = tmp_path / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"12345")
    (step,) = list_run(tmp_path).steps
    assert step.complete is None
    assert "Megatron" in step.reason
    assert (step.files, step.bytes) == (1, 5)
    assert list_run(tmp_path).latest is None


def test_a_checkpoint_below_a_step(tmp_path: Path, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "model--step=9" / "weights")
    (tmp_path / "model--step=9" / "context").mkdir()
    (step,) = list_run(tmp_path).steps
    assert (step.name, step.step, step.complete) == ("model--step=9/weights", 9, True)


@pytest.mark.parametrize(
    ("file", "says", "meant", "problem"),
    [
        ("latest_checkpointed_iteration.txt", "200\n", "iter_0000200", ""),
        (
            "latest_checkpointed_iteration.txt",
            "100",
            "iter_0000100",
            "iter_0000200 is newer, and complete",
        ),
        (
            "latest_checkpointed_iteration.txt",
            "300",
            "iter_0000300",
            "iter_0000300 is not complete",
        ),
        ("latest_checkpointed_iteration.txt", "400", "", "there is no such step"),
        (
            "latest_checkpointed_iteration.txt",
            "release",
            "release",
            "iter_0000200 is newer, and complete",
        ),
        ("latest", "iter_0000200", "iter_0000200", ""),
        ("latest", "", "", "there is no such step"),
    ],
)
def test_trackers(
    tmp_path: Path, checkpoint: Path, file: str, says: str, meant: str, problem: str
) -> None:
    made(tmp_path, checkpoint, "iter_0000100", "iter_0000200", "release")
    (tmp_path / "iter_0000300").mkdir()
    (tmp_path / file).write_text(says)
    (tracker,) = list_run(tmp_path).trackers
    assert (tracker.name, tracker.says) == (file, says.strip())
    assert (tracker.step, tracker.problem) == (meant, problem)


def test_links_are_trackers_too(tmp_path: Path, checkpoint: Path) -> None:
    made(tmp_path, checkpoint, "step-1", "step-2")
    (tmp_path / "latest").symlink_to("step-2")
    (tmp_path / "last").symlink_to("step-9")
    (tmp_path / "best").symlink_to("step-1")  # does not claim to be the latest
    run = list_run(tmp_path)
    assert [step.name for step in run.steps] == ["step-1", "step-2"]
    assert {t.name: (t.step, t.problem) for t in run.trackers} == {
        "latest": ("step-2", ""),
        "last": ("", "there is no such step"),
    }


def test_a_single_checkpoint_is_recognised(tmp_path: Path, checkpoint: Path) -> None:
    run = list_run(checkpoint)
    assert run.itself is not None
    assert run.itself.format == "torch_dist"
    assert not run.steps
    both = made(
        Path(shutil.copytree(checkpoint, tmp_path / "run")), checkpoint, "checkpoint-5"
    )
    assert both.itself is not None
    assert [step.step for step in both.steps] == [5]


def test_nothing(tmp_path: Path) -> None:
    assert list_run(tmp_path) == Run(str(tmp_path), None, (), ())
    with pytest.raises(megackpt.NotACheckpoint, match="does not exist"):
        list_run(tmp_path / "no")


def test_files_and_fifos_are_not_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hi")
    os.mkfifo(tmp_path / "fifo")
    assert [list_run(tmp_path / name).itself for name in ("file", "fifo")] == [
        None,
        None,
    ]


def test_a_damaged_step_does_not_hide_the_others(
    tmp_path: Path, checkpoint: Path
) -> None:
    made(tmp_path, checkpoint, "step-1", "step-2")
    (tmp_path / "step-2" / "metadata.json").write_text('{"sharded_backend": 5}')
    steps = named(list_run(tmp_path))
    assert [step.complete for step in steps.values()] == [True, None]
    assert "metadata.json is damaged" in steps["step-2"].reason


def test_what_is_no_step_is_not_walked_through(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "etc" / "default").mkdir(parents=True)
    looked: list[str] = []
    real = LocalStorage.list
    monkeypatch.setattr(
        LocalStorage,
        "list",
        lambda self, name="": (
            looked.append(f"{self.location}/{name}") or real(self, name)
        ),
    )
    assert [step.name for step in made(tmp_path, checkpoint, "step-1").steps] == [
        "step-1"
    ]
    assert not any("deeper" in name for name in looked)


def test_files_that_only_begin_like_those_of_others(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "default_config.yaml").touch()
    (step,) = list_run(tmp_path).steps
    assert step.complete is False


def test_a_tracker_that_is_no_tracker(tmp_path: Path, checkpoint: Path) -> None:
    made(tmp_path, checkpoint, "step-1")
    (tmp_path / "latest").write_bytes(b"x" * 5000)
    (tracker,) = list_run(tmp_path).trackers
    assert "5000 bytes" in tracker.problem
    os.remove(tmp_path / "latest")
    (tmp_path / "latest").write_bytes(b"\xff\xfe\x00")
    assert list_run(tmp_path).trackers[0].problem == "there is no such step"
