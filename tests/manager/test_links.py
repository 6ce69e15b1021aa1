"""Symbolic links in the directory of a step: to folders, to files, to nothing, in a circle."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import CheckpointManager, ShardedTensor
from megackpt.__main__ import main
from megackpt.errors import CorruptCheckpoint

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = ("torch_dist", "zarr", "safetensors")
LINKS = {
    "tokenizer": "../../tokenizer",
    "notes": "../../notes.txt",
    "nowhere": "../../nowhere",
    "circle": "circle",
    "here": ".",
    "above": "..",
}


def state(value: float = 0.0) -> dict[str, Any]:
    tensor = torch.full((8,), float(value))
    return {"w": ShardedTensor.from_rank_offsets("w", tensor), "iteration": value}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer/merges").mkdir(parents=True)
    (tmp_path / "tokenizer/vocabulary.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("of the user")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def add_links(step: Path, *names: str) -> None:
    for name in names or LINKS:
        (step / name).symlink_to(LINKS[name])


def check_readers(run: Path, key: str | None) -> None:
    """All that looks at a run, or at its second step. ``key``: of a tensor to restore."""
    step, manager = run / "iter_0000002", CheckpointManager(run)
    asked = {} if key is None else {key: state()["w"]}
    assert [(found.step, found.complete) for found in manager.steps()] == [
        (1, True),
        (2, True),
    ]
    assert all(found.bytes < 1 << 20 for found in manager.steps())
    assert manager.latest().step == 2
    assert manager.latest(verify=True).step == 2
    for wanted in (None, 1, 2):
        assert manager.restore(dict(asked), wanted).step == (wanted or 2)
    assert megackpt.verify(step).ok
    assert main(["ls", str(run)]) == 0
    assert main(["show", str(step)]) == 0
    assert main(["diff", str(step), str(step)]) == 0
    assert (
        main(["convert", str(step), str(run.parent / "new"), "--to", "torch_dist"]) == 0
    )


@pytest.mark.parametrize("kept", [True, False], ids=["with index", "without index"])
@pytest.mark.parametrize("strategy", FORMATS)
def test_in_steps_of_every_format(run: Path, strategy: str, kept: bool) -> None:
    with CheckpointManager(run, strategy) as manager:
        for number in (1, 2):
            manager.save(number, state(number))
    for number in (1, 2):
        if not kept:
            (run / f"iter_000000{number}/megackpt.index").unlink()
    add_links(run / "iter_0000002")
    check_readers(run, "w")
    with CheckpointManager(run, strategy, keep_last=1) as manager:
        for number in (3, 4, 5):
            manager.save(number, state(number))
        complete = {found.step for found in manager.steps() if found.complete}
    # What was written without an index is not known to be ours, and stays.
    assert complete == ({5} if kept else {1, 2, 5})
    assert sorted(os.listdir(run.parent / "tokenizer")) == ["merges", "vocabulary.json"]
    assert (run.parent / "notes.txt").read_text() == "of the user"
    assert all((run / "iter_0000002" / name).is_symlink() for name in LINKS)


def test_in_the_root_of_a_run(run: Path) -> None:
    with CheckpointManager(run) as manager:
        for number in (1, 2):
            manager.save(number, state(number))
    add_links(run)
    check_readers(run, "w")


def test_in_a_hugging_face_folder(run: Path) -> None:
    """Whose files are links to a cache, as in the hub's snapshots."""
    from safetensors.torch import save_file

    for number in (1, 2):
        step = run / f"iter_000000{number}"
        step.mkdir()
        blob = run.parent / f"blob{number}"
        save_file({"w": torch.full((8,), float(number))}, blob)
        (step / "model.safetensors").symlink_to(f"../../blob{number}")
    add_links(run / "iter_0000002")
    check_readers(run, "w")
    sizes = [found.bytes for found in CheckpointManager(run).steps()]
    assert (
        sizes[0] >= (run.parent / "blob1").stat().st_size
    )  # of what the link leads to
    assert main(["ls", str(run.parent)]) == 0


@pytest.mark.parametrize(
    "golden", ["mcore-0.16.1-tp2pp1dp2", "mcore-0.12.3-zarr-tp2pp1dp2"]
)
def test_in_steps_of_megatron(run: Path, golden: str) -> None:
    for number in (1, 2):
        shutil.copytree(GOLDEN / golden, run / f"iter_000000{number}")
    add_links(run / "iter_0000002", "tokenizer", "notes", "here", "above")
    check_readers(run, None)


@pytest.mark.parametrize("lost", [False, True])
def test_an_array_behind_a_link_is_not_passed_over(tmp_path: Path, lost: bool) -> None:
    """In Megatron's zarr any folder may be a tensor: what cannot be followed may be lost data."""
    folder = shutil.copytree(GOLDEN / "mcore-0.12.3-zarr-tp2pp1dp2", tmp_path / "c")
    shutil.move(folder / "misc.fp64", tmp_path / "elsewhere")
    (folder / "misc.fp64").symlink_to("../nowhere" if lost else "../elsewhere")
    with pytest.raises(CorruptCheckpoint, match=r"misc\.fp64 is not a directory"):
        megackpt.load_plain_tensors(folder)
