"""Stock DCP, or Megatron, saves into a directory that holds a checkpoint of ours, and the other way round."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import megackpt
from megackpt import ShardedTensor
from megackpt.errors import CheckpointingException, CorruptCheckpoint
from megackpt.testing import ThreadedGroup

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FORMATS = ("torch_dist", "zarr", "safetensors")


def state(
    value: float, rank: int = 0, ranks: int = 1, step: bool = True
) -> dict[str, Any]:
    rows = 4 // ranks
    whole = torch.full((4, 2), value)[rows * rank :][:rows].clone()
    tensors = {"w": ShardedTensor.from_rank_offsets("w", whole, (0, rank, ranks))}
    return tensors | ({"step": value} if step else {})


def save(value: float, where: Path, form: str, ranks: int, step: bool = True) -> None:
    def run(group: ThreadedGroup) -> None:
        megackpt.save(
            state(value, group.rank, ranks, step), where, form, process_group=group
        )

    ThreadedGroup.run(ranks, run)


def save_as_megatron(value: float, where: Path, ranks: int) -> None:
    """In place, file over file: what is left of an index of ours stays."""
    made = where.with_name("made")
    save(value, made, "torch_dist", ranks)
    (made / "megackpt.index").unlink()
    shutil.copytree(made, where, dirs_exist_ok=True)
    shutil.rmtree(made)


def save_with_stock_dcp(value: float, where: Path, _: int) -> None:
    dcp.save({"w": torch.full((4, 2), value)}, checkpoint_id=where, no_dist=True)


@pytest.mark.parametrize("other", [save_as_megatron, save_with_stock_dcp])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1)])
def test_another_library_saves_over_a_checkpoint_of_ours(
    tmp_path: Path, form: str, before: int, after: int, other: Any
) -> None:
    where = tmp_path / "c"
    save(1, where, form, before, step=False)
    (where / "notes.txt").write_text("mine")
    notes = (where / "notes.txt").stat().st_ino
    other(2, where, after)
    # It is unknown which of the two is meant: no load gives the older one silently.
    with pytest.raises(
        CorruptCheckpoint, match=r"two checkpoints|written by another program"
    ):
        megackpt.load(state(-1, step=False), where)
    assert not megackpt.verify(where).ok
    for value, ranks in (
        (3, 1),
        (4, 4),
        (5, 1),
    ):  # never refused, and nothing of the other's is left
        save(value, where, form, ranks)
        assert megackpt.load(state(-1), where)["w"].tolist() == [[value] * 2] * 4
        save(value, tmp_path / "fresh", form, ranks)
        assert {file.name for file in where.iterdir()} == {
            "notes.txt", *(file.name for file in (tmp_path / "fresh").iterdir())
        }  # fmt: skip
        shutil.rmtree(tmp_path / "fresh")
    assert (where / "notes.txt").stat().st_ino == notes


def test_the_other_checkpoint_is_read_once_the_index_is_moved_away(
    tmp_path: Path,
) -> None:
    save(1, tmp_path / "c", "safetensors", 1)
    save_as_megatron(2, tmp_path / "c", 1)
    (tmp_path / "c/megackpt.index").unlink()
    (tmp_path / "c/model.safetensors").unlink()
    assert megackpt.load(state(-1), tmp_path / "c")["step"] == 2


def die_while_writing(where: Path) -> None:
    """A process that saves is killed when it has begun to write."""
    process = os.fork()
    if process:
        assert os.waitpid(process, 0)[1] != 0
        return

    def look(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).endswith(".distcp"):
            os._exit(9)

    sys.addaudithook(look)
    megackpt.save(state(1), where)
    os._exit(0)


def test_a_save_that_died_takes_no_later_one_of_another_library_with_it(
    tmp_path: Path,
) -> None:
    where = tmp_path / "c"
    die_while_writing(where)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".c.megackpt-")]
    save_as_megatron(2, where, 1)
    size = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, size[1]))
    try:  # the next save clears up, and then fails
        with pytest.raises(CheckpointingException):
            megackpt.save(
                {"w": ShardedTensor.from_rank_offsets("w", torch.ones(100_000))}, where
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, size)
    assert megackpt.load(state(-1), where)["step"] == 2
    save(3, where, "torch_dist", 1)
    assert megackpt.load(state(-1), where)["step"] == 3
