"""An error of one rank is raised on all ranks, and no files are left behind."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import (
    ShardedObject,
    ShardedTensor,
)
from megackpt.errors import (
    CoverageError,
    MismatchError,
    NotACheckpoint,
    ShardingError,
)
from megackpt.testing import ThreadedGroup
from tests.test_save_load import FULL, model, saved


def stories(size: int, run: Callable[[ThreadedGroup], Any]) -> list[BaseException]:
    outcomes = ThreadedGroup.outcomes(size, run)
    assert all(isinstance(o, BaseException) for o in outcomes), outcomes
    return outcomes  # type: ignore[return-value]


def test_a_wrong_declaration_raises_on_every_rank_and_leaves_no_directory(
    tmp_path: Path,
) -> None:
    def run(group: ThreadedGroup) -> None:
        shard = ShardedTensor.from_rank_offsets(
            "fc1.weight", torch.ones(4, 2)
        )  # the TP rank is forgotten
        megackpt.save({"w": shard}, tmp_path / "new", process_group=group)

    told = stories(2, run)
    assert len({str(e) for e in told}) == 1
    assert all(isinstance(e, CoverageError) for e in told)
    assert "'fc1.weight'" in str(told[0])
    assert "rank" in str(told[0])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("failing", [0, 1])
def test_one_ranks_failure_in_writing_is_everybodys(
    tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "ckpt", "torch_dist", 2, 1, 1)
    from megackpt.backends.torch_dist import TorchDist

    original = TorchDist.write

    def write(self: Any, root: Any, plan: Any, data: Any) -> Any:
        if plan.rank == failing:
            raise OSError(28, "No space left on device", "__1_0.distcp")
        return original(self, root, plan, data)

    monkeypatch.setattr(TorchDist, "write", write)

    def run(group: ThreadedGroup) -> None:
        state = model(group.rank, 2, 1, 1)
        state["iteration"] = 200
        megackpt.save(state, tmp_path / "ckpt", process_group=group)

    told = stories(2, run)
    assert len({str(e) for e in told}) == 1
    assert isinstance(told[0], megackpt.RankFailure)
    assert re.search(rf"rank {failing}\b", str(told[0]))
    assert "Worker failure" in str(told[0])
    assert "No space left" in str(told[0])
    monkeypatch.undo()
    assert megackpt.load_common_state_dict(tmp_path / "ckpt")["iteration"] == 100
    assert not megackpt.verify(tmp_path / "ckpt").problems
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]
    saved(tmp_path / "ckpt", "torch_dist", 2, 1, 1)


def test_what_a_lost_rank_writes_late_is_cleaned_up_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megackpt.backends.torch_dist import TorchDist

    original = TorchDist.write

    def slow(self: Any, root: Any, plan: Any, data: Any) -> Any:
        if plan.rank == 1:
            time.sleep(1.0)
        return original(self, root, plan, data)

    monkeypatch.setattr(TorchDist, "write", slow)

    def run(group: ThreadedGroup) -> None:
        megackpt.save(model(group.rank, 2, 1, 1), tmp_path / "c", process_group=group)

    assert isinstance(ThreadedGroup.outcomes(2, run, timeout=0.4)[0], megackpt.RankLost)
    time.sleep(1.0)
    assert not megackpt.check_is_distributed_checkpoint(tmp_path / "c")
    monkeypatch.undo()
    saved(tmp_path / "c", "torch_dist", 2, 1, 1)
    assert megackpt.verify(tmp_path / "c").ok
    assert not [
        p.name
        for p in (tmp_path / "c").iterdir()
        if p.name.endswith(".old") or "saving" in p.name
    ]


def test_a_rank_with_a_broken_state_stops_all(tmp_path: Path) -> None:
    def run(group: ThreadedGroup) -> None:
        state: Any = (
            model(group.rank, 2, 1, 1) if group.rank == 0 else ["not", "a", "dict"]
        )
        megackpt.save(state, tmp_path / "x", process_group=group)

    told = stories(2, run)
    assert all(
        isinstance(e, ShardingError) and "rank 1" in str(e) and "dict" in str(e)
        for e in told
    )


def test_a_save_to_different_directories_raises_on_all_ranks(tmp_path: Path) -> None:
    def run(group: ThreadedGroup) -> None:
        megackpt.save(
            model(group.rank, 2, 1, 1), tmp_path / str(group.rank), process_group=group
        )

    assert all("different directories" in str(e) for e in stories(2, run))


@pytest.mark.parametrize("formats", [("zarr", "torch_dist"), ("torch_dist", "zarr")])
def test_a_save_in_different_formats_raises_on_all_ranks(
    tmp_path: Path, formats: tuple[str, str]
) -> None:
    def run(group: ThreadedGroup) -> None:
        state = {
            f"t{i}": ShardedTensor.from_rank_offsets(
                f"t{i}", FULL, replica_id=group.rank
            )
            for i in (0, 1)
        }
        megackpt.save(state, tmp_path / "c", formats[group.rank], process_group=group)

    for error in ThreadedGroup.outcomes(2, run):
        assert isinstance(error, ShardingError)
        assert "different formats: rank 0: zarr 2" in str(
            error
        ) or "rank 0: torch_dist 1" in str(error)
    assert not (tmp_path / "c").exists()


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    common = {"args": {"lr": 1, "open": [0, len, lambda: 0]}}
    with pytest.raises(
        ShardingError, match=r"the common state .* at \['args'\]\['open'\]\[2\]: "
    ):
        megackpt.save(common, tmp_path / "c")
    for validate in (True, False):
        state = {"o": ShardedObject("rng", lambda: 0, (1,), (0,))}
        with pytest.raises(
            ShardingError, match="the object 'rng/shard_0_1' cannot be pickled"
        ):
            megackpt.save(state, tmp_path / "c", validate_access_integrity=validate)
    assert not (tmp_path / "c").exists()


def test_an_expanded_tensor_cannot_be_loaded_into(tmp_path: Path) -> None:
    megackpt.save({"t": ShardedTensor.from_rank_offsets("t", FULL)}, tmp_path)
    asked = {
        "t": ShardedTensor.from_rank_offsets("t", torch.zeros(48, 1).expand(48, 16))
    }
    with pytest.raises(ShardingError, match="'t': cannot load into an expanded tensor"):
        megackpt.load(asked, tmp_path)


def test_a_load_from_different_directories_raises_on_all_ranks(tmp_path: Path) -> None:
    saved(tmp_path / "0", "torch_dist", 2, 1, 1)
    saved(tmp_path / "1", "torch_dist", 2, 1, 1)

    def run(group: ThreadedGroup) -> None:
        megackpt.load(
            model(group.rank, 2, 1, 1), tmp_path / str(group.rank), process_group=group
        )

    assert all("different directories" in str(e) for e in stories(2, run))


def test_a_missing_package_makes_no_directory_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log.txt").write_text("no checkpoint")
    monkeypatch.setitem(sys.modules, "megackpt.backends.zarr", None)
    assert not megackpt.check_is_distributed_checkpoint(tmp_path)
    with pytest.raises(
        NotACheckpoint, match=r"'zarr' needs a package.*pip install numcodecs"
    ):
        megackpt.load({}, tmp_path)
    with pytest.raises(megackpt.BackendError, match="pip install numcodecs"):
        megackpt.save({}, tmp_path / "c", "zarr")


def test_a_load_that_does_not_fit_changes_nothing_anywhere(tmp_path: Path) -> None:
    saved(tmp_path, "torch_dist", 2, 1, 1)
    touched = [torch.full((24, 16), -1.0) for _ in range(2)]

    def run(group: ThreadedGroup) -> None:
        state = {
            "w": ShardedTensor.from_rank_offsets(
                "embedding", touched[group.rank], (0, group.rank, 2)
            )
        }
        if group.rank == 1:
            state["typo"] = ShardedTensor.from_rank_offsets("embeding", torch.zeros(3))
        megackpt.load(state, tmp_path, process_group=group)

    told = stories(2, run)
    assert all(isinstance(e, MismatchError) for e in told)
    assert "'embeding'" in str(told[0])
    assert "did you mean 'embedding'" in str(told[0])
    assert all((t == -1).all() for t in touched)


def test_a_load_that_asks_twice_for_the_same_region_raises(tmp_path: Path) -> None:
    saved(tmp_path, "torch_dist", 2, 1, 1)

    def run(group: ThreadedGroup, **options: Any) -> Any:
        state = {
            "w": ShardedTensor.from_rank_offsets(
                "embedding", torch.zeros(24, 16), (0, 0, 2)
            )
        }
        return megackpt.load(state, tmp_path, process_group=group, **options)["w"]

    assert all(isinstance(e, CoverageError) for e in stories(2, run))
    parts = ThreadedGroup.run(2, lambda g: run(g, validate_access_integrity=False))
    assert all(torch.equal(part, FULL[:24]) for part in parts)
