"""Plans used again, on ranks that are threads: a change anywhere is a miss everywhere, and nothing is stale."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from base64 import b64decode
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor, Strategy
from megackpt.backends.torch_dist import TorchDist
from megackpt.backends.zarr import Zarr
from megackpt.checkpoint import open_checkpoint
from megackpt.planning.cache import cache_of
from megackpt.planning.manifest import SavePlan
from megackpt.runtime.collectives import SingleGroup
from megackpt.saver.asking import Request
from megackpt.state import extract
from megackpt.strategies import resolve
from megackpt.testing import ThreadedGroup

FORMATS = ("torch_dist", "zarr")
MISS = ["all_agree", "gather", "scatter", "gather", "broadcast"]
HIT = ["all_agree", "gather", "broadcast"]
RANKS = 3
State = dict[str, Any]
Run = Callable[[ThreadedGroup], Any]


def tensor(key: str, data: torch.Tensor, offset: int = 0, whole: int | None = None, replica: Any = 0) -> Any:
    shape = data.shape
    full = (whole or shape[0], *shape[1:])
    return ShardedTensor(
        key, data, data.dtype, shape, full, (offset, *[0] * (len(shape) - 1)), None, replica_id=replica
    )


def state_of(rank: int, value: float = 1.0) -> State:
    """A tensor cut over the ranks, one that all hold, two shards of one that this rank holds alone, an object."""
    return {
        "cut": tensor("cut", torch.full((4, 3), value + rank), 4 * rank, 4 * RANKS),
        "all": tensor("all", torch.full((5,), value), replica=rank),
        "own": [tensor(f"own.{rank}", torch.full((n,), value + n), at, 8) for n, at in ((4, 0), (4, 4))],
        "object": ShardedObject("object", {"value": value}, (RANKS,), (rank,)),
        "step": value,
    }


def shape(state: State, rank: int) -> None:
    state["own"] = [tensor(f"own.{rank}", torch.full((9,), 7.0))]


def dtype(state: State, rank: int) -> None:
    state["own"] = [
        tensor(f"own.{rank}", torch.full((n,), n).to(torch.int64), at, 8) for n, at in ((4, 0), (4, 4))
    ]


def key(state: State, rank: int) -> None:
    state["own"] = [tensor("another", torch.full((8,), 7.0))]


def offset(state: State, rank: int) -> None:
    state["own"] = [tensor(f"own.{rank}", torch.full((n,), 1.0 * n), at, 8) for n, at in ((3, 0), (5, 3))]


def swapped(state: State, rank: int) -> None:
    state["own"].reverse()


def replica(state: State, rank: int) -> None:
    state["all"].replica_id += 10 * (rank > 0)
    state["own"].append(tensor(f"own.{rank}", state["own"][0].data.clone(), 0, 8, replica=(0, 1)))


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
    assert all(torch.equal(a, s.data) for a, s in zip(found["own"], state["own"], strict=True))
    assert found["object"] == state["object"].data
    assert found["step"] == state["step"]


def logged(group: ThreadedGroup, step: Callable[[], Any]) -> list[str]:
    before = len(group.log)
    step()
    return group.log[before:]


def save(state: State, folder: Path, group: ThreadedGroup, strategy: Any = None, **options: Any) -> list[str]:
    return logged(group, lambda: megackpt.save(state, folder, strategy, process_group=group, **options))


@pytest.mark.parametrize("changed", [0, 2])
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
        turns = [(False, MISS), (False, HIT), (True, MISS), (True, HIT), (False, MISS), (False, HIT)]
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
        turns = [(before, MISS), (before, HIT), (changed, MISS), (changed, HIT), (after, MISS), (after, HIT)]
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
            assert save(state, tmp_path, group, validate_access_integrity=checked) == expected
            loaded(state, tmp_path, group)

    ThreadedGroup.run(RANKS, run)


def test_another_domain_on_one_rank_is_a_miss_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Real groups of ranks need processes; what is made of them is a number.
    monkeypatch.setattr("megackpt.saver.asking.domain_of", lambda given: given or 0)

    def run(group: ThreadedGroup) -> None:
        for turn, expected in enumerate([MISS, HIT, MISS, HIT]):
            state = state_of(group.rank, float(turn))
            domain = 1 if turn > 1 and group.rank == 1 else None
            assert save(state, tmp_path, group, Strategy(dedup_group=domain)) == expected
            loaded(state, tmp_path, group)

    ThreadedGroup.run(RANKS, run)


# ---- formats of others


class Mine(TorchDist):
    """Somebody's own, with another last file than ours, and smaller items."""

    max_item_bytes = 16

    def config(self) -> dict[str, bytes]:
        return {"metadata.json": super().config()["metadata.json"] + b" "}


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
            assert (folder / "metadata.json").read_bytes() == backend.config()["metadata.json"]

    ThreadedGroup.run(RANKS, run)


@pytest.mark.parametrize(
    ("name", "value"), [("encoding", "native"), ("gridded", True), ("max_item_bytes", 8)]
)
def test_what_a_format_says_of_itself_counts(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> int | None:
        return Request.of(extract(state_of(0)), "/c", resolve(Mine()), SingleGroup()).fingerprint

    before = asked()
    assert before is not None
    assert asked() == before
    monkeypatch.setattr(Mine, name, value)
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
    assert open_checkpoint(tmp_path).manifest.fingerprints == b""


# ---- the table of contents


@pytest.fixture
def finishes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The formats whose table of contents was made, in order."""
    made: list[str] = []
    for kind in (TorchDist, Zarr):
        finish = kind.finish

        def counted(self: Any, root: Any, manifest: Any, finish: Any = finish) -> Any:
            made.append(self.name)
            return finish(self, root, manifest)

        monkeypatch.setattr(kind, "finish", counted)
    return made


def contents(folder: Path) -> dict[str, bytes]:
    """The small files, with a constant in place of the save's id."""
    save_id = open_checkpoint(folder).manifest.save_id.encode()
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    small = [n for n in names if n.endswith((".metadata", ".json"))]
    return {name: (folder / name).read_bytes().replace(save_id, b"-" * 32) for name in sorted(small)}


@pytest.mark.parametrize("strategy", FORMATS)
def test_the_table_of_contents_is_made_once_for_as_long_as_all_stays_where_it_is(
    tmp_path: Path, strategy: str, finishes: list[str]
) -> None:
    sizes = [1, 1, 1, 5000, 5000, 1]

    def state(rank: int, turn: int) -> State:
        made = state_of(rank, float(turn))
        grown = "x" * sizes[turn] if rank == 1 else ""
        return {**made, "object": ShardedObject("object", grown, (RANKS,), (rank,))}

    def run(group: ThreadedGroup) -> list[int]:
        counts = []
        for turn in range(len(sizes)):
            expected = HIT if turn else MISS
            assert save(state(group.rank, turn), tmp_path / str(turn), group, strategy) == expected
            loaded(state(group.rank, turn), tmp_path / str(turn), group)
            counts.append(len(finishes))
        return counts

    assert ThreadedGroup.run(RANKS, run)[0] == [1, 1, 1, 2, 2, 3]
    for turn in range(len(sizes)):
        fresh = tmp_path / f"fresh {turn}"
        ThreadedGroup.run(
            RANKS, lambda group, turn=turn, fresh=fresh: save(state(group.rank, turn), fresh, group, strategy)
        )
        assert contents(tmp_path / str(turn)) == contents(fresh)
        assert megackpt.verify(tmp_path / str(turn)).ok
    if strategy == "torch_dist":
        ids = {open_checkpoint(tmp_path / str(turn)).manifest.save_id for turn in range(len(sizes))}
        assert len(ids) == len(sizes)
        for turn in range(len(sizes)):  # each in its own .metadata
            found = [i for i in ids if i.encode() in (tmp_path / str(turn) / ".metadata").read_bytes()]
            assert found == [open_checkpoint(tmp_path / str(turn)).manifest.save_id]


def test_cells_that_ranks_share_are_assembled_in_every_save(tmp_path: Path, finishes: list[str]) -> None:
    full = torch.arange(200, dtype=torch.float32)

    def run(group: ThreadedGroup) -> None:
        a, b = (0, 77) if group.rank == 0 else (77, 200)
        for turn in range(3):
            state = {"b": tensor("b", full[a:b] + turn, a, 200)}
            assert save(state, tmp_path / "c", group, "zarr") == (HIT if turn else MISS)
            if group.is_coordinator:
                assert torch.equal(megackpt.load_plain_tensors(tmp_path / "c")["b"], full + turn)
            group.broadcast("looked at", lambda: None)
            group.reduce_broadcast("looked at", lambda: None, lambda _: None)

    ThreadedGroup.run(2, run)
    assert len(finishes) == 3


class Counting(TorchDist):
    """A format of somebody's own, on top of one of ours."""

    made = 0

    def finish(self, root: Any, manifest: Any) -> Any:
        type(self).made += 1
        return super().finish(root, manifest)


def test_a_format_that_has_its_own_finish_is_asked_every_time(tmp_path: Path) -> None:
    backend = Counting()
    for _ in range(3):
        megackpt.save(state_of(0), tmp_path, backend, validate_access_integrity=False)
    assert Counting.made == 3


# ---- after a resume


def plans(group: ThreadedGroup) -> list[SavePlan]:
    return [held.plan for held in cache_of(group)._plans.values()]


def described(plan: SavePlan) -> list[Any]:
    return [plan.rank, plan.grids, plan.source.tolist(), list(plan.rows())]


def resumed_plans_are_those_planned(
    folder: Path, ranks: int, state: Callable[[int], State], strategy: str
) -> None:
    """Save, resume in new groups, save again: by one vote, with the same plans, files and index."""

    def first(group: ThreadedGroup) -> Any:
        assert save(state(group.rank), folder / "a", group, strategy) == MISS
        return described(*plans(group))

    def second(group: ThreadedGroup) -> Any:
        megackpt.load(state(group.rank), folder / "a", process_group=group)
        assert save(state(group.rank), folder / "b", group, strategy) == HIT
        assert save(state(group.rank), folder / "c", group, strategy) == HIT
        return described(*plans(group))

    assert ThreadedGroup.run(ranks, first) == ThreadedGroup.run(ranks, second)
    names = [{p.relative_to(folder / x) for p in (folder / x).rglob("*")} for x in "abc"]
    assert names[0] == names[1] == names[2]
    first_manifest = open_checkpoint(folder / "a").manifest
    for x in "bc":
        assert megackpt.verify(folder / x).ok
        assert contents(folder / x) == contents(folder / "a")
        found = open_checkpoint(folder / x).manifest
        assert (found.tensors, found.grids, found.files, found.fingerprints) == (
            first_manifest.tensors, first_manifest.grids, first_manifest.files, first_manifest.fingerprints,
        )  # fmt: skip
        for name in ("tensor", "writer", "file", "start", "length", "digests"):
            assert np.array_equal(getattr(found.chunks, name), getattr(first_manifest.chunks, name)), name


def parallel(tp: int, pp: int, dp: int) -> Callable[[int], State]:
    def state(rank: int) -> State:
        t, p, d = rank % tp, rank // tp % pp, rank // (tp * pp)
        made: State = {"iteration": 3, "all": tensor("all", torch.full((7,), 1.5), replica=rank)}
        for layer in range(p * 4 // pp, (p + 1) * 4 // pp):
            for name, axis in (("column", 0), ("row", 1)):
                data = torch.arange(24, dtype=torch.float32).reshape(6, 4) + layer + t
                made[f"{layer}.{name}"] = ShardedTensor.from_rank_offsets(
                    f"layers.{name}",
                    data,
                    (0, layer, 4),
                    (1 + axis, t, tp),
                    replica_id=(0, 0, d),
                    prepend_axis_num=1,
                )
            made[f"{layer}.norm"] = ShardedTensor.from_rank_offsets(
                f"{layer}.norm", torch.ones(8, dtype=torch.bfloat16), replica_id=(0, t, d)
            )
            rows = ShardedTensor.from_rank_offsets(
                f"{layer}.moment", torch.full((6, 4), float(rank)), (0, t * dp + d, tp * dp)
            )
            made[f"{layer}.moment"] = rows
        made["rng"] = ShardedObject("rng", ["state", rank], (tp * pp, dp), (t * pp + p, d))
        made["scalar"] = tensor_of_no_dimensions(rank)
        return made

    return state


def tensor_of_no_dimensions(rank: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("scalar", torch.tensor(11), replica_id=rank)


@pytest.mark.parametrize("strategy", FORMATS)
@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 2), (2, 2, 2), (1, 1, 4)])
def test_the_first_save_after_a_resume_goes_on_with_the_plan(
    tmp_path: Path, strategy: str, tp: int, pp: int, dp: int
) -> None:
    resumed_plans_are_those_planned(tmp_path, tp * pp * dp, parallel(tp, pp, dp), strategy)


def test_chunks_of_shards_are_cells_again(tmp_path: Path) -> None:
    """zarr's shards are larger than what the index lists: its chunks."""

    def state(rank: int) -> State:
        whole = torch.arange(6 << 20, dtype=torch.int16).reshape(-1, 64)
        half = len(whole) // 2
        return {"large": tensor("large", whole[rank * half :][:half].clone(), rank * half, len(whole))}

    resumed_plans_are_those_planned(tmp_path, 2, state, "zarr")
    assert len(open_checkpoint(tmp_path / "b").manifest.chunks) > 3


def test_shards_of_any_lengths(tmp_path: Path) -> None:
    cuts = [0, 7, 7, 20, 31]

    def state(rank: int) -> State:
        a, b = cuts[rank], cuts[rank + 1]
        return {
            "uneven": tensor("uneven", torch.arange(a, b), a, 31),
            "none": tensor("none", torch.zeros(0, 3)),
        } | ({} if rank else {"step": 1})

    def declared(rank: int) -> State:
        made = state(rank)
        made["none"].replica_id = rank
        return made

    resumed_plans_are_those_planned(tmp_path, 4, declared, "torch_dist")


def test_saves_of_two_runs_never_bear_one_id(tmp_path: Path) -> None:
    ThreadedGroup.run(2, lambda group: save(parallel(2, 1, 1)(group.rank), tmp_path / "a", group))

    def resume(group: ThreadedGroup, name: str) -> None:
        megackpt.load(parallel(2, 1, 1)(group.rank), tmp_path / "a", process_group=group)
        assert save(parallel(2, 1, 1)(group.rank), tmp_path / name, group) == HIT

    for name in "bc":
        ThreadedGroup.run(2, lambda group, name=name: resume(group, name))
    ids = {open_checkpoint(tmp_path / name).manifest.save_id for name in "abc"}
    assert len(ids) == 3


def test_a_forked_process_saves_under_ids_of_its_own(tmp_path: Path) -> None:
    """After a load, and after a save."""
    code = """if True:
        import os, torch, megackpt
        state = {"w": megackpt.ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        megackpt.save(state, "a")
        megackpt.load(state, "a")
        megackpt.planning.cache.cache_of(megackpt.runtime.collectives.group_over())._plans.clear()
        for parents, childs in (("b", "c"), ("d", "e")):
            pid = os.fork()
            megackpt.save(state, parents if pid else childs)
            if not pid:
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        """
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)
    assert len({open_checkpoint(tmp_path / name).manifest.save_id for name in "abcde"}) == 5


def test_ranks_that_loaded_otherwise_plan_anew_on_all(tmp_path: Path) -> None:
    """One rank's job has loaded something else, or nothing: nobody goes on with the plan of what the others loaded."""
    state = parallel(2, 1, 1)
    for name in "ab":
        ThreadedGroup.run(2, lambda group, name=name: save(state(group.rank), tmp_path / name, group))

    def run(group: ThreadedGroup) -> None:
        for name in ("a", "b"):
            megackpt.load(state(group.rank), tmp_path / name, process_group=group)
            cache = cache_of(group)
            if name == "a":
                held = cache.resumed
                cache.resumed = held if group.rank == 0 else None
            assert save(state(group.rank), tmp_path / f"of {name}", group) == (MISS if name == "a" else HIT)
        megackpt.load(state(group.rank), tmp_path / "b", process_group=group)
        cache._plans.clear()
        if group.rank == 0:
            cache.resumed = held  # of another load than the other rank's
        assert save(state(group.rank), tmp_path / "of both", group) == MISS
        assert megackpt.verify(tmp_path / "of both").ok

    ThreadedGroup.run(2, run)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_since_the_checkpoint_is_a_miss_on_all(
    tmp_path: Path, change: Callable[[State, int], None]
) -> None:
    ThreadedGroup.run(RANKS, lambda group: save(state_of(group.rank), tmp_path / "a", group))

    def run(group: ThreadedGroup) -> None:
        megackpt.load(state_of(group.rank), tmp_path / "a", process_group=group)
        now = state_of(group.rank, 2.0)
        if group.rank == 1:
            change(now, 1)
        assert save(now, tmp_path / "b", group) == MISS
        loaded(now, tmp_path / "b", group)
        assert save(now, tmp_path / "b", group) == HIT

    ThreadedGroup.run(RANKS, run)


def test_another_number_of_ranks_plans_anew(tmp_path: Path) -> None:
    def state(rank: int) -> State:
        return {"all": tensor("all", torch.ones(8), replica=rank)}

    ThreadedGroup.run(2, lambda group: save(state(group.rank), tmp_path / "a", group))

    def run(group: ThreadedGroup) -> None:
        megackpt.load(state(group.rank), tmp_path / "a", process_group=group)
        assert cache_of(group).resumed is None
        assert save(state(group.rank), tmp_path / "b", group) == MISS

    ThreadedGroup.run(3, run)


def test_shared_cells_and_chosen_places_are_planned_anew_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def shared(rank: int) -> State:
        a, b = (0, 77) if rank == 0 else (77, 200)
        return {"b": tensor("b", torch.arange(200.0)[a:b], a, 200)}

    for strategy, said in (("zarr", "planning anew"), ("safetensors", "planning anew")):
        folder = tmp_path / strategy
        ThreadedGroup.run(2, lambda group, f=folder, s=strategy: save(shared(group.rank), f / "a", group, s))

        def run(group: ThreadedGroup, folder: Path = folder, strategy: str = strategy) -> None:
            megackpt.load(shared(group.rank), folder / "a", process_group=group)
            assert save(shared(group.rank), folder / "b", group, strategy) == MISS
            assert save(shared(group.rank), folder / "b", group, strategy) == HIT

        with caplog.at_level(logging.DEBUG, "megackpt"):
            caplog.clear()
            ThreadedGroup.run(2, run)
        assert said in caplog.text
        assert torch.equal(megackpt.load_plain_tensors(folder / "b")["b"], torch.arange(200.0))


def test_an_index_that_leaves_something_out_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever forges one may know all fingerprints: what is saved next is whole all the same."""
    from dataclasses import replace

    from megackpt.loader import order

    state = parallel(2, 1, 1)
    ThreadedGroup.run(2, lambda group: save(state(group.rank), tmp_path / "a", group))
    opened = order.open_checkpoint

    def forged(*given: Any) -> Any:
        found = opened(*given)
        chunks = found.manifest.chunks
        kept = np.flatnonzero(chunks.tensor != found.manifest.numbers()["all"])
        return replace(found, manifest=replace(found.manifest, chunks=chunks.take(kept, chunks.block_bounds)))

    monkeypatch.setattr(order, "open_checkpoint", forged)

    def run(group: ThreadedGroup) -> None:
        asked = state(group.rank)
        del asked["all"]
        megackpt.load(asked, tmp_path / "a", process_group=group)
        assert save(state(group.rank), tmp_path / "b", group) == MISS

    ThreadedGroup.run(2, run)
    assert set(megackpt.load_plain_tensors(tmp_path / "b")) >= {"all", "scalar"}


def test_the_index_has_a_fingerprint_of_each_rank_and_no_plan(tmp_path: Path) -> None:
    ThreadedGroup.run(RANKS, lambda group: save(state_of(group.rank), tmp_path, group))
    index = (tmp_path / "megackpt.index").read_bytes()
    head = json.loads(index[16 : 16 + int.from_bytes(index[12:16], "little")])
    assert len(b64decode(head["fingerprints"])) == 8 * RANKS
    assert b64decode(head["fingerprints"]) == open_checkpoint(tmp_path).manifest.fingerprints
    assert b"SavePlan" not in index


def test_ranks_keep_little_of_what_they_load(tmp_path: Path) -> None:
    """Other ranks than the coordinator: their own chunks, and the tables of these."""

    def state(rank: int) -> State:
        return {f"{i}": tensor(f"{i}.{rank}", torch.ones(1)) for i in range(20)}

    ThreadedGroup.run(4, lambda group: save(state(group.rank), tmp_path, group))

    def run(group: ThreadedGroup) -> None:
        megackpt.load(state(group.rank), tmp_path, process_group=group)
        held = cache_of(group).resumed
        assert held is not None
        assert (held.manifest is not None) is group.is_coordinator
        assert len(held.wrote.tensors) == len(held.wrote.boxes) == 20 + group.is_coordinator
        assert len(held.wrote.grids) == len(held.wrote.tensors)

    ThreadedGroup.run(4, run)
