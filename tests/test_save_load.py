"""Save and load end to end, over ranks that are threads: resharding, strictness, one story, collectives counted."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.checkpoint import open_checkpoint
from megackpt.errors import (
    CheckpointExists,
)
from megackpt.testing import ThreadedGroup

FORMATS = ("torch_dist", "zarr")
FULL = torch.arange(48 * 16, dtype=torch.float32).reshape(48, 16)
EXPERTS = torch.arange(4 * 6 * 2, dtype=torch.int64).reshape(4, 6, 2)


def model(rank: int, tp: int, pp: int, dp: int, blank: bool = False) -> dict[str, Any]:
    """A small state of every kind, at TP x PP x DP (tp fastest)."""
    t, p, d = rank % tp, rank // tp % pp, rank // (tp * pp)
    rows = FULL.shape[0] // tp
    weight = FULL[t * rows : (t + 1) * rows].clone()
    layers = {}
    for layer in range(p * 4 // pp, (p + 1) * 4 // pp):
        columns = EXPERTS.shape[1] // tp
        piece = EXPERTS[layer, t * columns : (t + 1) * columns].clone()
        layers[f"layers.{layer}"] = ShardedTensor.from_rank_offsets(
            "layers.w",
            piece * (not blank),
            (0, layer, 4),
            (1, t, tp),
            prepend_axis_num=1,
            replica_id=(0, 0, d),
        )
    return {
        "weight": ShardedTensor.from_rank_offsets(
            "embedding", weight * (not blank), (0, t, tp), replica_id=(p, 0, d)
        ),
        "layers": layers,
        "bias": ShardedTensor.from_rank_offsets(
            "bias",
            torch.full((7,), 0.0 if blank else 1.5, dtype=torch.bfloat16),
            replica_id=rank,
        ),
        "step": ShardedTensor.from_rank_offsets(
            "step", torch.tensor(0 if blank else 11), replica_id=rank
        ),
        "object": ShardedObject(
            "meta", None if blank else {"who": (p, t)}, (pp, tp), (p, t), replica_id=d
        ),
        "local": LocalNonpersistentObject(rank),
        "iteration": -1 if blank else 100,
        "args": {"lr": 0.1, "betas": [0.9, 0.95]},
    }


def saved(
    directory: Path, strategy: str, tp: int, pp: int, dp: int, **options: Any
) -> list[list[str]]:
    """Saves the model at this parallelism; gives each rank's log of collectives."""

    def run(group: ThreadedGroup) -> list[str]:
        megackpt.save(
            model(group.rank, tp, pp, dp),
            directory,
            strategy,
            process_group=group,
            **options,
        )
        return group.log

    return ThreadedGroup.run(tp * pp * dp, run)


@pytest.mark.parametrize("strategy", FORMATS)
@pytest.mark.parametrize(
    ("tp", "pp", "dp"), [(1, 1, 1), (1, 4, 1), (3, 1, 2), (2, 2, 1), (1, 2, 2)]
)
def test_state_saved_at_one_parallelism_loads_at_another(
    tmp_path: Path, strategy: str, tp: int, pp: int, dp: int
) -> None:
    saved(tmp_path / "ckpt", strategy, 2, 2, 2)

    def run(group: ThreadedGroup) -> None:
        expected = model(group.rank, tp, pp, dp)
        asked = model(group.rank, tp, pp, dp, blank=True)
        del asked["object"]  # objects cannot be resharded
        state = megackpt.load(asked, tmp_path / "ckpt", process_group=group)
        assert state["weight"] is not None
        assert torch.equal(state["weight"], expected["weight"].data)
        assert state["weight"].data_ptr() == asked["weight"].data.data_ptr()
        for name, shard in expected["layers"].items():
            assert torch.equal(state["layers"][name], shard.data), name
        assert torch.equal(state["bias"], torch.full((7,), 1.5, dtype=torch.bfloat16))
        assert state["step"].item() == 11
        assert state["iteration"] == 100
        assert state["args"] == {"lr": 0.1, "betas": [0.9, 0.95]}
        assert state["local"] == group.rank

    ThreadedGroup.run(tp * pp * dp, run)


@pytest.mark.parametrize("strategy", FORMATS)
def test_objects_come_back_to_their_own_ranks(tmp_path: Path, strategy: str) -> None:
    saved(tmp_path, strategy, 2, 2, 2)

    def run(group: ThreadedGroup) -> Any:
        return megackpt.load(
            model(group.rank, 2, 2, 2, blank=True), tmp_path, process_group=group
        )["object"]

    assert ThreadedGroup.run(8, run) == [{"who": (r // 2 % 2, r % 2)} for r in range(8)]


def test_the_callers_state_is_not_changed(tmp_path: Path) -> None:
    state = model(0, 1, 1, 1)
    before = {key: id(value) for key, value in state.items()}
    replicas = state["weight"].replica_id
    megackpt.save(state, tmp_path, content_metadata={"a": 1})
    megackpt.load(state, tmp_path)
    assert {key: id(value) for key, value in state.items()} == before
    assert state["weight"].replica_id == replicas


def test_collectives_are_counted(tmp_path: Path) -> None:
    """As docs/concepts.md tells them: a save that plans, one that need not, and a load."""

    def run(group: ThreadedGroup) -> list[list[str]]:
        logs = []
        for step in (
            lambda: megackpt.save(
                model(group.rank, 2, 1, 2), tmp_path / "a", process_group=group
            ),
            lambda: megackpt.save(
                model(group.rank, 2, 1, 2), tmp_path / "b", process_group=group
            ),
            lambda: megackpt.load(
                model(group.rank, 2, 1, 2), tmp_path / "b", process_group=group
            ),
        ):
            before = len(group.log)
            step()
            logs.append(group.log[before:])
        return logs

    for miss, hit, load in ThreadedGroup.run(4, run):
        assert miss == ["lowest", "gather", "scatter", "gather", "broadcast"]
        assert hit == ["lowest", "gather", "broadcast"]
        assert load == ["broadcast", "gather", "broadcast", "gather", "broadcast"]


@pytest.mark.parametrize("strategy", FORMATS)
def test_a_reused_plan_saves_the_new_values(tmp_path: Path, strategy: str) -> None:
    def run(group: ThreadedGroup) -> None:
        for value in range(4):
            data = torch.full((4,), float(value))
            state = {
                "w": ShardedTensor.from_rank_offsets("w", data, (0, group.rank, 4)),
                "value": value,
            }
            megackpt.save(state, tmp_path / "ckpt", strategy, process_group=group)

    ThreadedGroup.run(4, run)
    assert torch.equal(
        megackpt.load_plain_tensors(tmp_path / "ckpt")["w"], torch.full((16,), 3.0)
    )
    assert megackpt.load_common_state_dict(tmp_path / "ckpt") == {"value": 3}


def test_a_change_on_one_rank_plans_anew_on_all(tmp_path: Path) -> None:
    def run(group: ThreadedGroup) -> list[str]:
        for size in (4, 4, 5, 4):
            mine = size if group.rank == 1 else 4
            start = 0 if group.rank == 0 else 4
            shard = ShardedTensor(
                "w",
                torch.ones(mine),
                torch.float32,
                (mine,),
                (4 + size,),
                (start,),
                None,
            )
            megackpt.save({"w": shard}, tmp_path / str(size), process_group=group)
        return group.log

    for log in ThreadedGroup.run(2, run):
        assert (
            log.count("scatter") == 2
        )  # the first 4, the first 5; the last 4 is remembered
    assert megackpt.load_plain_tensors(tmp_path / "5")["w"].shape == (9,)


def test_plans_of_different_rounds_are_never_mixed(tmp_path: Path) -> None:
    """Rank 0 declares the same in A and B, rank 1 does not: what rank 0 remembers must be of the same round."""

    def run(group: ThreadedGroup) -> None:
        for kind in "ABAB":
            keys = ["x"] if group.rank == 0 else [f"only.{kind}", "x"]
            state = {
                key: ShardedTensor.from_rank_offsets(
                    key,
                    torch.full((8,), float(ord(kind))),
                    replica_id=group.rank if key == "x" else 0,
                )
                for key in keys
            }
            megackpt.save(state, tmp_path / "ckpt", process_group=group)
            group.broadcast("wait", lambda: None)
            found = megackpt.load_plain_tensors(tmp_path / "ckpt")
            assert set(found) == {"x", f"only.{kind}"}
            assert all((tensor == ord(kind)).all() for tensor in found.values())
            group.reduce_broadcast("wait", lambda: None, lambda _: None)

    ThreadedGroup.run(2, run)


@pytest.mark.parametrize("strategy", FORMATS)
def test_the_work_is_spread_over_replicas(tmp_path: Path, strategy: str) -> None:
    def run(group: ThreadedGroup) -> None:
        state = {
            f"w{i}": ShardedTensor.from_rank_offsets(
                f"w{i}", torch.ones(1000), replica_id=group.rank
            )
            for i in range(8)
        }
        megackpt.save(state, tmp_path, strategy, process_group=group)

    ThreadedGroup.run(4, run)
    writers = open_checkpoint(tmp_path).manifest.chunks.writer.tolist()
    assert (
        sorted(w for w in writers) == [0, 0, 0, 1, 1, 2, 2, 3, 3]
        or sorted(writers).count(0) <= 3
    )


@pytest.mark.parametrize("strategy", FORMATS)
def test_shards_of_uneven_length_on_a_grid(tmp_path: Path, strategy: str) -> None:
    """The last along an axis may be shorter: padded cells in zarr, cut along every axis."""
    full = torch.arange(10 * 7).reshape(10, 7)
    shards = [
        ShardedTensor(
            "w",
            full[a : a + 4, b : b + 3],
            full.dtype,
            full[a : a + 4, b : b + 3].shape,
            (10, 7),
            (a, b),
            None,
        )
        for a in (0, 4, 8)
        for b in (0, 3, 6)
    ]
    megackpt.save({"shards": shards}, tmp_path, strategy)
    assert torch.equal(megackpt.load_plain_tensors(tmp_path)["w"], full)
    assert megackpt.verify(tmp_path).ok


@pytest.mark.parametrize("strategy", FORMATS)
def test_tensors_of_every_memory_layout(tmp_path: Path, strategy: str) -> None:
    grid = torch.arange(300 * 500, dtype=torch.float32).reshape(300, 500)
    state = {
        "transposed": grid.t(),
        "strided": grid[::3, ::2],
        "expanded": torch.ones(3, 1).expand(3, 4),
        "conjugated": torch.complex(torch.ones(3), torch.ones(3)).conj(),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }
    megackpt.save(
        {k: ShardedTensor.from_rank_offsets(k, v) for k, v in state.items()},
        tmp_path,
        strategy,
    )
    plain = megackpt.load_plain_tensors(tmp_path)
    for key, tensor in state.items():
        assert torch.equal(plain[key], tensor.detach().resolve_conj()), key
    target = torch.zeros(300, 500).t()  # a destination with strides of its own
    asked = {"transposed": ShardedTensor.from_rank_offsets("transposed", target)}
    assert torch.equal(megackpt.load(asked, tmp_path)["transposed"], grid.t())


def test_large_strided_tensors_are_staged_in_pieces(tmp_path: Path) -> None:
    big = (
        torch.arange(3000 * 4000, dtype=torch.int32).reshape(3000, 4000).t()
    )  # 46 MiB, three pieces
    megackpt.save({"big": ShardedTensor.from_rank_offsets("big", big)}, tmp_path)
    assert torch.equal(megackpt.load_plain_tensors(tmp_path)["big"], big)


def test_factories_build_and_merge(tmp_path: Path) -> None:
    def factory(data: torch.Tensor) -> ShardedTensorFactory:
        def build(key: str, data: torch.Tensor, replica_id: Any, _: Any) -> Any:
            halves = torch.chunk(data, 2)
            return [
                ShardedTensor.from_rank_offsets(
                    key, half, (0, i, 2), replica_id=replica_id
                )
                for i, half in enumerate(halves)
            ]

        return ShardedTensorFactory("fc1", data, build, torch.cat)

    data = torch.arange(8.0)
    megackpt.save({"fc1": factory(data)}, tmp_path)
    assert torch.equal(
        megackpt.load({"fc1": factory(torch.zeros(8))}, tmp_path)["fc1"], data
    )


def test_a_bytes_io_object_survives(tmp_path: Path) -> None:
    buffer = io.BytesIO(b"extra state")
    megackpt.save({"x": ShardedObject("x", buffer, (1,), (0,))}, tmp_path)
    loaded = megackpt.load({"y": ShardedObject("x", None, (1,), (0,))}, tmp_path)["y"]
    assert loaded.getvalue() == b"extra state"


def test_an_object_without_a_grid_has_its_key_for_a_name(tmp_path: Path) -> None:
    megackpt.save({"n": ShardedObject("n", 7, (), ())}, tmp_path)
    assert set(megackpt.load_sharded_metadata(tmp_path)) == {"n"}
    state, missing, unexpected = megackpt.load({}, tmp_path, strict="return_all")
    assert (state, missing, unexpected) == ({}, {"n"}, set())
    assert megackpt.load({"n": ShardedObject("n", None, (), ())}, tmp_path) == {"n": 7}


@pytest.mark.parametrize("strategy", FORMATS)
def test_sharded_tensors_can_be_removed(tmp_path: Path, strategy: str) -> None:
    saved(tmp_path / "ckpt", strategy, 2, 2, 1)
    (tmp_path / "ckpt" / "notes.txt").write_text("mine")
    before = (tmp_path / "ckpt" / "megackpt.index").read_bytes()
    megackpt.remove_sharded_tensors(tmp_path / "ckpt", "no.such.key")
    assert (tmp_path / "ckpt" / "megackpt.index").read_bytes() == before
    megackpt.remove_sharded_tensors(tmp_path / "ckpt", "layers")
    assert set(megackpt.load_plain_tensors(tmp_path / "ckpt")) == {
        "embedding",
        "bias",
        "step",
    }
    assert megackpt.load_common_state_dict(tmp_path / "ckpt")["iteration"] == 100
    assert (tmp_path / "ckpt" / "notes.txt").read_text() == "mine"
    assert not megackpt.verify(tmp_path / "ckpt").problems


def test_formats_convert_into_each_other(tmp_path: Path) -> None:
    saved(tmp_path / "a", "torch_dist", 3, 2, 1)
    megackpt.convert(tmp_path / "a", tmp_path / "b", "zarr")
    megackpt.convert(tmp_path / "b", tmp_path / "c", ("torch_dist", 1))
    with pytest.raises(CheckpointExists):
        megackpt.convert(tmp_path / "a", tmp_path / "b", "zarr")
    first, last = (
        megackpt.load_plain_tensors(tmp_path / "a"),
        megackpt.load_plain_tensors(tmp_path / "c"),
    )
    assert first.keys() == last.keys()
    assert all(torch.equal(first[key], last[key]) for key in first)
    assert megackpt.load_common_state_dict(
        tmp_path / "c"
    ) == megackpt.load_common_state_dict(tmp_path / "a")
    asked = {"o": ShardedObject("meta", None, (2, 3), (1, 2))}
    assert megackpt.load(asked, tmp_path / "c", validate_access_integrity=False)[
        "o"
    ] == {"who": (1, 2)}


def test_irregular_shards_convert_to_a_grid(tmp_path: Path) -> None:
    shards = [
        ShardedTensor("w", torch.arange(a, b), torch.int64, (b - a,), (10,), (a,), None)
        for a, b in ((0, 3), (3, 3), (3, 9), (9, 10))
    ]
    megackpt.save({"shards": shards}, tmp_path / "a")
    megackpt.save({"shards": shards}, tmp_path / "grid", "zarr")
    megackpt.convert(tmp_path / "a", tmp_path / "b", "zarr")
    for name in ("a", "grid", "b"):
        assert torch.equal(
            megackpt.load_plain_tensors(tmp_path / name)["w"], torch.arange(10)
        )
