"""Plans used again, on ranks that are threads: a change anywhere is a miss everywhere, and nothing is stale."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor, Strategy
from megackpt.backends import Finished
from megackpt.backends.torch_dist import TorchDist
from megackpt.checkpoint import open_checkpoint
from megackpt.distributed import SingleGroup
from megackpt.planning.manifest import Manifest
from megackpt.saver.save_request import SaveRequest
from megackpt.storage import Storage
from megackpt.testing import ThreadedGroup

FORMATS = ("torch_dist", "zarr")
MISS = ["lowest", "gather", "scatter", "gather", "broadcast"]
HIT = ["lowest", "gather", "broadcast"]
RANKS = 3
State = dict[str, Any]
Run = Callable[[ThreadedGroup], Any]


def tensor(
    key: str,
    data: torch.Tensor,
    offset: int = 0,
    whole: int | None = None,
    replica: Any = 0,
) -> Any:
    shape = data.shape
    full = (whole or shape[0], *shape[1:])
    return ShardedTensor(
        key,
        data,
        data.dtype,
        shape,
        full,
        (offset, *[0] * (len(shape) - 1)),
        None,
        replica_id=replica,
    )


def state_of(rank: int, value: float = 1.0) -> State:
    """A tensor cut over the ranks, one that all hold, two shards of one that this rank holds alone, an object."""
    return {
        "cut": tensor("cut", torch.full((4, 3), value + rank), 4 * rank, 4 * RANKS),
        "all": tensor("all", torch.full((5,), value), replica=rank),
        "own": [
            tensor(f"own.{rank}", torch.full((n,), value + n), at, 8)
            for n, at in ((4, 0), (4, 4))
        ],
        "object": ShardedObject("object", {"value": value}, (RANKS,), (rank,)),
        "step": value,
    }


def shape(state: State, rank: int) -> None:
    state["own"] = [tensor(f"own.{rank}", torch.full((9,), 7.0))]


def dtype(state: State, rank: int) -> None:
    state["own"] = [
        tensor(f"own.{rank}", torch.full((n,), n).to(torch.int64), at, 8)
        for n, at in ((4, 0), (4, 4))
    ]


def key(state: State, rank: int) -> None:
    state["own"] = [tensor("another", torch.full((8,), 7.0))]


def offset(state: State, rank: int) -> None:
    state["own"] = [
        tensor(f"own.{rank}", torch.full((n,), 1.0 * n), at, 8)
        for n, at in ((3, 0), (5, 3))
    ]


def swapped(state: State, rank: int) -> None:
    state["own"].reverse()


def replica(state: State, rank: int) -> None:
    state["all"].replica_id += 10 * (rank > 0)
    state["own"].append(
        tensor(f"own.{rank}", state["own"][0].data.clone(), 0, 8, replica=(0, 1))
    )


def another(state: State, rank: int) -> None:
    state["object2"] = ShardedObject("object2", "a new one", (1,), (0,))


CHANGES = (shape, dtype, key, offset, swapped, replica, another)


def loaded(state: State, folder: Path, group: ThreadedGroup) -> None:
    """What is in the checkpoint is what the state holds, on this rank."""
    blank = {
        **state,
        "cut": tensor("cut", torch.zeros(4, 3), 4 * group.rank, 4 * RANKS),
        "all": tensor("all", torch.zeros(5), replica=state["all"].replica_id),
        "own": [
            ShardedTensor(s.key, torch.zeros_like(s.data), s.dtype, s.local_shape, s.global_shape, s.global_offset,
                          None, s.replica_id)
            for s in state["own"]
        ],
    }  # fmt: skip
    found = megackpt.load(blank, folder, process_group=group)
    assert torch.equal(found["cut"], state["cut"].data)
    assert torch.equal(found["all"], state["all"].data)
    assert all(
        torch.equal(a, s.data) for a, s in zip(found["own"], state["own"], strict=True)
    )
    assert found["object"] == state["object"].data
    assert found["step"] == state["step"]


def logged(group: ThreadedGroup, step: Callable[[], Any]) -> list[str]:
    before = len(group.log)
    step()
    return group.log[before:]


def save(
    state: State,
    folder: Path,
    group: ThreadedGroup,
    strategy: Any = None,
    **options: Any,
) -> list[str]:
    return logged(
        group,
        lambda: megackpt.save(state, folder, strategy, process_group=group, **options),
    )


@pytest.mark.parametrize("changed", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("strategy", FORMATS)
def test_any_change_on_one_rank_is_a_miss_on_all(
    tmp_path: Path, strategy: str, change: Callable[[State, int], None], changed: int
) -> None:
    def run(group: ThreadedGroup) -> None:
        def state(value: float, other: bool) -> State:
            made = state_of(group.rank, value)
            if other and group.rank == changed:
                change(made, group.rank)
            return made

        folder = tmp_path / "c"
        turns = [
            (False, MISS),
            (False, HIT),
            (True, MISS),
            (True, HIT),
            (False, MISS),
            (False, HIT),
        ]
        for turn, (other, expected) in enumerate(turns):
            now = state(float(turn), other)
            assert save(now, folder, group, strategy) == expected, turn
            loaded(now, folder, group)
        if group.is_coordinator:
            assert megackpt.verify(folder).ok

    ThreadedGroup.run(RANKS, run)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Strategy("torch_dist"), Strategy("torch_dist", options={"files_per_rank": 1})),
        (Strategy("torch_dist"), Strategy("torch_dist", balance=False)),
        (Strategy("zarr"), Strategy("zarr", options={"checksum": False})),
    ],
    ids=["files", "balance", "checksum"],
)
def test_other_options_on_one_rank_are_a_miss_on_all(
    tmp_path: Path, before: Strategy, after: Strategy, rank: int
) -> None:
    def run(group: ThreadedGroup) -> None:
        changed = after if group.rank == rank else before
        turns = [
            (before, MISS),
            (before, HIT),
            (changed, MISS),
            (changed, HIT),
            (after, MISS),
            (after, HIT),
        ]
        for turn, (strategy, expected) in enumerate(turns):
            state = state_of(group.rank, float(turn))
            assert save(state, tmp_path / "c", group, strategy) == expected, turn
            loaded(state, tmp_path / "c", group)

    ThreadedGroup.run(RANKS, run)


@pytest.mark.parametrize("rank", [0, 2])
def test_validation_is_part_of_what_is_agreed_on(tmp_path: Path, rank: int) -> None:
    def run(group: ThreadedGroup) -> None:
        for turn, expected in enumerate([MISS, HIT, MISS, HIT]):
            state = state_of(group.rank, float(turn))
            checked = turn < 2 or group.rank != rank
            assert (
                save(state, tmp_path, group, validate_access_integrity=checked)
                == expected
            )
            loaded(state, tmp_path, group)

    ThreadedGroup.run(RANKS, run)


def test_another_domain_on_one_rank_is_a_miss_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Real groups of ranks need processes; what is made of them is a number.
    monkeypatch.setattr(
        "megackpt.saver.save_request.domain_of", lambda given: given or 0
    )

    def run(group: ThreadedGroup) -> None:
        for turn, expected in enumerate([MISS, HIT, MISS, HIT]):
            state = state_of(group.rank, float(turn))
            domain = 1 if turn > 1 and group.rank == 1 else None
            assert (
                save(state, tmp_path, group, Strategy(dedup_group=domain)) == expected
            )
            loaded(state, tmp_path, group)

    ThreadedGroup.run(RANKS, run)


# ---- formats of others


class Mine(TorchDist):
    """Somebody's own, with another last file than ours, and smaller items."""

    properties = replace(TorchDist.properties, max_item_bytes=16)

    def finish(self, root: Storage, manifest: Manifest) -> Finished:
        done = super().finish(root, manifest)
        config = done.files["metadata.json"] + b" "
        return replace(done, files={**done.files, "metadata.json": config})


@dataclass(frozen=True, slots=True)
class Slotted(TorchDist):
    prefix: str = "a"


class Holding(TorchDist):
    """A format with an option of any kind."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        object.__setattr__(self, "held", held)


class Level:
    """Whose repr tells an address at the most."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "<Level>"


def array(value: float) -> Any:
    """The repr leaves out what differs."""
    made = np.zeros(5000)
    made[2500] = value
    return made


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (TorchDist(), Mine()),
        (Mine(), TorchDist()),
        (Slotted(prefix="a"), Slotted(prefix="b")),
        (Holding(array(0)), Holding(array(1))),
        (Holding([Level(0)]), Holding([Level(1)])),
    ],
    ids=["subclass", "base", "slots", "array", "repr"],
)
def test_formats_of_others_share_no_plan_and_no_table_of_contents(
    tmp_path: Path, before: TorchDist, after: TorchDist
) -> None:
    def run(group: ThreadedGroup) -> None:
        for turn, (backend, expected) in enumerate(
            [(before, MISS), (before, HIT), (after, MISS), (after, HIT)]
        ):
            folder, equal = tmp_path / str(turn), deepcopy(backend)
            assert save(state_of(group.rank), folder, group, equal) == expected, turn
            loaded(state_of(group.rank), folder, group)
            config = (folder / "metadata.json").read_bytes()
            assert config.endswith(b" ") == isinstance(backend, Mine)

    ThreadedGroup.run(RANKS, run)


@pytest.mark.parametrize(
    ("name", "value"),
    [("gridded", True), ("max_item_bytes", 8)],
)
def test_what_a_format_says_of_itself_counts(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked() -> int | None:
        request = SaveRequest.of(state_of(0), "/c", Mine(), SingleGroup())
        return request.fingerprint

    before = asked()
    assert before is not None
    assert asked() == before
    changed = replace(Mine.properties, **{name: value})
    monkeypatch.setattr(Mine, "properties", changed)
    assert asked() != before


def test_a_format_that_cannot_be_pickled_on_one_rank_is_planned_anew_on_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(group: ThreadedGroup) -> None:
        backend = Holding(threading.Lock() if group.rank == 1 else None)
        for turn in range(3):
            assert save(state_of(group.rank, turn), tmp_path, group, backend) == MISS
            loaded(state_of(group.rank, turn), tmp_path, group)

    with caplog.at_level(logging.DEBUG, "megackpt"):
        ThreadedGroup.run(RANKS, run)
    assert "this Holding cannot be pickled: cannot pickle '_thread.lock'" in caplog.text


def test_a_forked_process_saves_under_ids_of_its_own(tmp_path: Path) -> None:
    code = """if True:
        import os, torch, megackpt
        state = {"w": megackpt.ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        megackpt.save(state, "a")
        for parents, childs in (("b", "c"), ("d", "e")):
            pid = os.fork()
            megackpt.save(state, parents if pid else childs)
            if not pid:
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        """
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
    assert (
        len({open_checkpoint(tmp_path / name).manifest.save_id for name in "abcde"})
        == 5
    )
