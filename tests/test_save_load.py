"""Save and load end to end, over ranks that are threads: resharding, strictness, one story, collectives counted."""

from __future__ import annotations

import io
import logging
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from fractions import Fraction
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
    StrictHandling,
)
from megackpt.distributed import RankGroup
from megackpt.errors import (
    CheckpointExists,
    CoverageError,
    MismatchError,
    NotACheckpoint,
    ShardingError,
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
        assert miss == ["all_agree", "gather", "scatter", "gather", "broadcast"]
        assert hit == ["all_agree", "gather", "broadcast"]
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
    writers = megackpt.checkpoint.open_checkpoint(
        tmp_path
    ).manifest.chunks.writer.tolist()
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


# ---- one story on all ranks


def stories(size: int, run: Callable[[ThreadedGroup], Any]) -> list[BaseException]:
    outcomes = ThreadedGroup.outcomes(size, run)
    assert all(isinstance(o, BaseException) for o in outcomes), outcomes
    return outcomes  # type: ignore[return-value]


def test_a_wrong_declaration_is_told_on_every_rank_and_leaves_nothing(
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


def test_ranks_that_name_different_directories_are_told_so(tmp_path: Path) -> None:
    def run(group: ThreadedGroup) -> None:
        megackpt.save(
            model(group.rank, 2, 1, 1), tmp_path / str(group.rank), process_group=group
        )

    assert all("different directories" in str(e) for e in stories(2, run))


@pytest.mark.parametrize("formats", [("zarr", "torch_dist"), ("torch_dist", "zarr")])
def test_ranks_that_name_different_formats_are_told_so(
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


def test_ranks_that_load_from_different_directories_are_told_so(tmp_path: Path) -> None:
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
        NotACheckpoint, match=r"'zarr' needs a package.*pip install tensorstore"
    ):
        megackpt.load({}, tmp_path)
    with pytest.raises(megackpt.BackendError, match="pip install tensorstore"):
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


def test_a_load_that_asks_twice_for_the_same_is_told(tmp_path: Path) -> None:
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


# ---- strictness


@pytest.fixture
def simple(tmp_path: Path) -> Path:
    state = {
        "a": ShardedTensor.from_rank_offsets("a", torch.ones(4)),
        "b": ShardedTensor.from_rank_offsets("b", torch.ones(4)),
        "o": ShardedObject("o", 1, (1,), (0,)),
    }
    megackpt.save(state, tmp_path / "simple")
    return tmp_path / "simple"


def asking(*keys: str) -> dict[str, Any]:
    return {k: ShardedTensor.from_rank_offsets(k, torch.zeros(4)) for k in keys}


@pytest.mark.parametrize(
    "strict", ["raise_unexpected", "raise_all", True, "assume_ok_unexpected"]
)
def test_unexpected_keys_raise(simple: Path, strict: Any) -> None:
    with pytest.raises(
        megackpt.CheckpointingException, match="Unexpected keys"
    ) as caught:
        megackpt.load(
            {**asking("a", "b", "c"), "o": ShardedObject("o", 1, (1,), (0,))},
            simple,
            strict=strict,
        )
    assert "'c'" in str(caught.value)
    assert "Missing keys" not in str(caught.value)


@pytest.mark.parametrize("strict", ["log_unexpected", "log_all", False])
def test_unexpected_keys_are_logged(
    simple: Path, strict: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        state = megackpt.load(asking("a", "b", "c"), simple, strict=strict)
    assert "c" not in state
    assert torch.equal(state["a"], torch.ones(4))
    assert "Unexpected keys" in caplog.text
    assert ("Missing keys" in caplog.text) is (strict != "log_unexpected")


def test_unexpected_and_missing_keys_are_returned(simple: Path) -> None:
    state, missing, unexpected = megackpt.load(
        asking("a", "c"), simple, strict=StrictHandling.RETURN_ALL
    )
    assert (set(state), missing, unexpected) == ({"a"}, {"b", "o"}, {"c"})
    state, missing, unexpected = megackpt.load(
        asking("a", "c"), simple, strict="return_unexpected"
    )
    assert (set(state), missing, unexpected) == ({"a"}, set(), {"c"})


def test_missing_keys_raise_only_where_asked(simple: Path) -> None:
    assert set(megackpt.load(asking("a"), simple)) == {"a"}
    assert set(megackpt.load(asking("a", "z"), simple, strict="ignore_all")) == {"a"}
    with pytest.raises(MismatchError, match="Missing keys"):
        megackpt.load(asking("a"), simple, strict="raise_all")
    with pytest.raises(ValueError, match="Invalid strict flag"):
        megackpt.load(asking("a"), simple, strict="perhaps")


def test_a_key_map_that_gives_no_key_is_told(simple: Path) -> None:
    asked = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(8))}
    with pytest.raises(MismatchError, match="key_map gives None for 'w'"):
        megackpt.load(asked, simple, key_map={"w": None})  # type: ignore[dict-item]


def test_an_object_whose_grid_changed_is_unexpected(simple: Path) -> None:
    with pytest.raises(MismatchError, match=re.escape("o/shard_0_2")):
        megackpt.load(
            {"o": ShardedObject("o", None, (2,), (0,))},
            simple,
            validate_access_integrity=False,
        )


# ---- what may differ


def test_shapes_must_agree_unless_a_mismatch_is_allowed(simple: Path) -> None:
    with pytest.raises(MismatchError, match=r"Global shape mismatch.*for key a"):
        megackpt.load(
            {"a": ShardedTensor.from_rank_offsets("a", torch.zeros(6))}, simple
        )
    longer = ShardedTensor.from_rank_offsets(
        "a", torch.full((6,), 9.0), allow_shape_mismatch=True
    )
    shorter = ShardedTensor.from_rank_offsets(
        "b", torch.full((2,), 9.0), allow_shape_mismatch=True
    )
    state = megackpt.load({"a": longer, "b": shorter}, simple)
    assert state["a"].tolist() == [1, 1, 1, 1, 0, 0]
    assert state["b"].tolist() == [1, 1]


def test_dtypes_are_converted_or_refused(simple: Path) -> None:
    def asked() -> dict[str, Any]:
        return {
            "a": ShardedTensor.from_rank_offsets(
                "a", torch.zeros(4, dtype=torch.float64)
            )
        }

    assert megackpt.load(asked(), simple)["a"].dtype == torch.float64
    assert torch.equal(
        megackpt.load(asked(), simple)["a"], torch.ones(4, dtype=torch.float64)
    )
    with pytest.raises(MismatchError, match=r"dtype mismatch.*key a"):
        megackpt.load(asked(), simple, dtype_policy="error")


def test_keys_can_be_mapped(simple: Path) -> None:
    asked = {"x": ShardedTensor.from_rank_offsets("model.a", torch.zeros(4))}
    assert torch.equal(
        megackpt.load(asked, simple, key_map={"model.a": "a"})["x"], torch.ones(4)
    )
    assert torch.equal(
        megackpt.load(asked, simple, key_map=lambda key: key.removeprefix("model."))[
            "x"
        ],
        torch.ones(4),
    )


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


# ---- the common state


def test_only_rank_zeros_common_state_is_stored_and_differences_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(group: ThreadedGroup) -> Any:
        state = {**model(group.rank, 2, 1, 1), "rank": group.rank}
        megackpt.save(state, tmp_path, process_group=group)
        return megackpt.load(model(group.rank, 2, 1, 1), tmp_path, process_group=group)[
            "rank"
        ]

    with caplog.at_level(logging.WARNING):
        assert ThreadedGroup.run(2, run) == [0, 0]
    expected = (
        "Rank 1 common state dict differs from rank 0 common state dict. "
        "Keys only on rank 0: [], Keys only on 1: [], Mismatched keys: "
        "[(('rank',), <class 'int'>, <class 'int'>)]"
    )
    assert [r.message for r in caplog.records if "common state" in r.message] == [
        expected
    ]


class OfRankZero:
    def __getstate__(self) -> int:
        return 1

    def __setstate__(self, _: object) -> None:
        if threading.current_thread().name == "rank 1":
            raise LookupError("not on this rank")


def test_a_common_state_that_one_rank_cannot_make_anew_is_a_warning_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(group: ThreadedGroup) -> None:
        state = {"x": OfRankZero() if group.rank == 0 else 1}
        megackpt.save(state, tmp_path, process_group=group)

    ThreadedGroup.run(2, run)
    assert "LookupError: not on this rank" in caplog.text
    assert megackpt.verify(tmp_path).ok


def test_views_in_the_common_state_are_stored_at_their_own_size(tmp_path: Path) -> None:
    big = torch.arange(1_000_000)
    megackpt.save(
        {"views": [big[:3], {"last": big[-1]}], "none": torch.empty(0)}, tmp_path
    )
    assert (tmp_path / "common.pt").stat().st_size < 10_000
    loaded = megackpt.load_common_state_dict(tmp_path)
    assert loaded["views"][0].tolist() == [0, 1, 2]
    assert loaded["views"][1]["last"].item() == 999_999


def test_what_will_need_trust_is_told_at_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {
        "half": Fraction(1, 2),
        "o": ShardedObject("o", Fraction(1, 3), (1,), (0,)),
        "plain": [1, "a"],
    }
    with caplog.at_level(logging.WARNING):
        megackpt.save(state, tmp_path)
    told = [r.message for r in caplog.records if "trusted=(Fraction,)" in r.message]
    assert len(told) == 2
    with pytest.raises(megackpt.UntrustedClass, match=r"fractions\.Fraction"):
        megackpt.load({}, tmp_path)
    assert megackpt.load({}, tmp_path, trusted=(Fraction,))["half"] == Fraction(1, 2)


def test_the_compared_view_can_be_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(group: ThreadedGroup) -> None:
        megackpt.save(
            {**model(group.rank, 2, 1, 1), "rank": group.rank},
            tmp_path,
            process_group=group,
            preprocess_common_before_consistancy_check=lambda c: {
                k: v for k, v in c.items() if k != "rank"
            },
        )

    with caplog.at_level(logging.WARNING):
        ThreadedGroup.run(2, run)
    assert "common state" not in caplog.text
    assert megackpt.load_common_state_dict(tmp_path)["rank"] == 0


def test_a_view_that_takes_entries_out_takes_none_from_what_is_saved(
    tmp_path: Path,
) -> None:
    def view(common: Any) -> Any:
        del common["rank"], common["args"]["local_rank"]
        return common

    state = {"rank": 0, "args": {"local_rank": 0, "lr": 1}}
    megackpt.save(state, tmp_path, preprocess_common_before_consistancy_check=view)
    assert (
        megackpt.load_common_state_dict(tmp_path)
        == state
        == {"rank": 0, "args": {"local_rank": 0, "lr": 1}}
    )


@pytest.mark.parametrize("view", [lambda _: None, lambda _: {}])
def test_a_view_of_nothing_leaves_the_validation_on(
    tmp_path: Path, view: Callable[[Any], Any]
) -> None:
    with pytest.raises(CoverageError):
        megackpt.save(
            {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, 0, 2))},
            tmp_path,
            preprocess_common_before_consistancy_check=view,
        )


@pytest.mark.parametrize("content", [{}, {"sharding": "fully", "n": [1, 2]}])
def test_content_metadata(tmp_path: Path, content: dict[str, Any]) -> None:
    group = object()  # a process group cannot be stored
    megackpt.save(
        model(0, 1, 1, 1), tmp_path, content_metadata={**content, "dp_cp_group": group}
    )
    assert megackpt.load_content_metadata(tmp_path) == content
    state = megackpt.load(model(0, 1, 1, 1, blank=True), tmp_path)
    assert megackpt.load_content_metadata(preloaded_state_dict=state) == content
    with pytest.raises(ValueError, match="both are None"):
        megackpt.load_content_metadata()


# ---- relatives


@pytest.mark.parametrize("strategy", FORMATS)
def test_metadata_and_plain_tensors(tmp_path: Path, strategy: str) -> None:
    saved(tmp_path, strategy, 2, 2, 1)
    metadata = megackpt.load_tensors_metadata(tmp_path)
    assert set(metadata) == {"embedding", "layers.w", "bias", "step"}
    layers = metadata["layers.w"]
    assert (layers.local_shape, layers.global_shape, layers.global_offset) == (
        (4, 6, 2),
        (4, 6, 2),
        (0, 0, 0),
    )
    assert layers.axis_fragmentations == (1, 1, 1)
    assert layers.data is None
    everything = megackpt.load_sharded_metadata(tmp_path)
    assert set(everything) == {
        *metadata,
        *(f"meta/shard_{p}.{t}_2.2" for p in (0, 1) for t in (0, 1)),
    }

    def whole(group: RankGroup) -> Any:
        return megackpt.load(
            dict(everything),
            tmp_path,
            validate_access_integrity=False,
            process_group=group,
        )

    for state in ThreadedGroup.run(2, whole):
        assert torch.equal(state["embedding"], FULL)
        assert state["meta/shard_1.0_2.2"] == {"who": (1, 0)}
    plain = megackpt.load_plain_tensors(tmp_path)
    assert torch.equal(plain["layers.w"], EXPERTS)
    assert megackpt.get_default_load_sharded_strategy(tmp_path).backend == strategy


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


# ---- directories


def test_missing_and_empty_directories(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match=r"directory .*nowhere does not exist"):
        megackpt.load({}, tmp_path / "nowhere")
    with pytest.raises(NotACheckpoint, match="is not a distributed checkpoint"):
        megackpt.load({}, tmp_path)
    assert not megackpt.check_is_distributed_checkpoint(tmp_path)
    assert not megackpt.check_is_distributed_checkpoint(tmp_path / "nowhere")


def test_an_empty_state_is_a_checkpoint(tmp_path: Path) -> None:
    megackpt.save({}, tmp_path / "deep" / "down" / "ckpt")
    assert megackpt.load({}, tmp_path / "deep/down/ckpt") == {}
    assert megackpt.check_is_distributed_checkpoint(tmp_path / "deep/down/ckpt")


def test_overwriting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    megackpt.save({"n": 1}, tmp_path / "c")
    with pytest.raises(CheckpointExists):
        megackpt.save({"n": 2}, tmp_path / "c", overwrite=False)
    assert megackpt.load({}, tmp_path / "c") == {"n": 1}
    with caplog.at_level(logging.DEBUG, "megackpt.checkpoint"):
        megackpt.save({"n": 2}, tmp_path / "c", "zarr")
    replaced = [
        record
        for record in caplog.records
        if "replacing the checkpoint" in record.message
    ]
    assert [record.levelname for record in replaced] == [
        "DEBUG"
    ]  # overwriting is the default
    assert megackpt.load({}, tmp_path / "c") == {"n": 2}
    assert megackpt.get_default_load_sharded_strategy(tmp_path / "c").backend == "zarr"


@pytest.mark.parametrize(
    "key", ["a/b", "../up", "/abs", ".hidden", "ключ", "a b\n%41", "x" * 300, "__0"]
)
@pytest.mark.parametrize("strategy", FORMATS)
def test_odd_keys(tmp_path: Path, strategy: str, key: str) -> None:
    state = {
        "t": ShardedTensor.from_rank_offsets(key, torch.arange(5)),
        "o": ShardedObject(key + "!", [1], (1,), (0,)),
    }
    megackpt.save(state, tmp_path / "c" / "d", strategy)
    assert torch.equal(
        megackpt.load_plain_tensors(tmp_path / "c/d")[key], torch.arange(5)
    )
    assert megackpt.load(
        {"o": ShardedObject(key + "!", None, (1,), (0,))}, tmp_path / "c/d"
    )["o"] == [1]
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["d"]


def test_wrong_calls_are_told() -> None:
    with pytest.raises(NotImplementedError, match="common_strategy"):
        megackpt.save({}, "x", common_strategy=("torch", 1))
    with pytest.raises(megackpt.BackendError, match="did you mean 'torch_dist'"):
        megackpt.save({}, "x", "torch_dst")
    with pytest.raises(ValueError, match="dtype_policy"):
        megackpt.load({}, "x", dtype_policy="maybe")
    with pytest.raises(ValueError, match="key_map"):
        megackpt.load({}, "x", key_map=[("a", "b")])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="trusted takes classes, not 'os'"):
        megackpt.load({}, "x", trusted=("os",))  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match="content_metadata must be a dict"):
        megackpt.save({}, "x", content_metadata=[1])  # type: ignore[arg-type]
    with pytest.raises(
        megackpt.BackendError, match=r"does not take the options \{'files': 3\}"
    ):
        megackpt.save({}, "x", megackpt.Strategy(options={"files": 3}))
    with pytest.raises(
        megackpt.CheckpointingException, match="dedup_group must be a process group"
    ):
        megackpt.save({}, "x", megackpt.Strategy(dedup_group=3))
    with pytest.raises(megackpt.CheckpointingException, match="timeout must be"):
        megackpt.save({}, "x", timeout=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["", None, 3, b"x", "a\0b"])
def test_what_is_no_directory_is_told(where: Any) -> None:
    for call in (
        lambda: megackpt.save({}, where),
        lambda: megackpt.load({}, where),
        lambda: megackpt.load_plain_tensors(where),
        lambda: megackpt.check_is_distributed_checkpoint(where),
    ):
        with pytest.raises(megackpt.CheckpointingException, match=r"directory"):
            call()


def test_a_directory_whose_name_is_no_text_can_be_saved_to_again(
    tmp_path: Path,
) -> None:
    for _ in range(3):  # the third one reuses the plan
        megackpt.save({"n": 1}, f"{tmp_path}/\udcff")


def test_one_ranks_wrong_argument_is_everybodys(tmp_path: Path) -> None:
    saved(tmp_path, "torch_dist", 3, 1, 1)
    arguments: list[tuple[dict[str, Any], str]] = [
        ({"strict": "maybe"}, "rank 1: ValueError: Invalid strict flag"),
        ({"checkpoint_dir": None}, "rank 1: a checkpoint's directory must be"),
        ({"sharded_strategy": "torch_dst"}, "rank 1: unknown format 'torch_dst'"),
        (
            {"sharded_strategy": "zarr"},
            "rank 1: .* holds the format 'torch_dist', not 'zarr'",
        ),
    ]
    for wrong, text in arguments:

        def run(group: ThreadedGroup, wrong: dict[str, Any] = wrong) -> None:
            right: dict[str, Any] = {"checkpoint_dir": tmp_path}
            given = right | wrong if group.rank == 1 else right
            megackpt.load(model(group.rank, 3, 1, 1), process_group=group, **given)

        told = {str(outcome) for outcome in ThreadedGroup.outcomes(3, run)}
        assert len(told) == 1
        assert re.search(text, told.pop())


def test_a_damaged_byte_is_found_and_named(tmp_path: Path) -> None:
    saved(tmp_path, "torch_dist", 1, 1, 1)
    manifest = megackpt.checkpoint.open_checkpoint(tmp_path).manifest
    chunk = manifest.chunks_of("embedding")[0]
    file = tmp_path / chunk.location.file
    content = bytearray(file.read_bytes())
    content[chunk.location.start + 100] ^= 4
    file.write_bytes(content)
    asked = {"w": ShardedTensor.from_rank_offsets("embedding", torch.zeros(48, 16))}
    with pytest.raises(megackpt.CorruptCheckpoint, match="embedding"):
        megackpt.load(asked, tmp_path)
    assert torch.equal(
        megackpt.load(asked, tmp_path, verify=False)["w"] != FULL,
        FULL.reshape(-1)[25] == FULL,
    )
    assert any(
        "embedding" in str(problem) for problem in megackpt.verify(tmp_path).problems
    )


def test_other_formats_name_themselves(tmp_path: Path) -> None:
    saved(tmp_path, "zarr", 1, 1, 1)
    with pytest.raises(megackpt.BackendError, match="holds the format 'zarr'"):
        megackpt.load({}, tmp_path, "torch_dist")


def test_a_checkpoint_can_be_moved(tmp_path: Path) -> None:
    saved(tmp_path / "a", "torch_dist", 2, 1, 1)
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert torch.equal(megackpt.load_plain_tensors(tmp_path / "b")["embedding"], FULL)
