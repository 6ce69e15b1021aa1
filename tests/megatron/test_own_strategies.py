"""Strategies of the caller's own, given to save and load: alone, derived from ours, and in the wrappers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt.megatron import load, save
from megackpt.megatron.mapping import ShardedObject, ShardedTensor, is_main_replica
from megackpt.megatron.strategies.async_utils import AsyncRequest
from megackpt.megatron.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
    StrategyAction,
    register_default_strategy,
)
from megackpt.megatron.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megackpt.megatron.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megackpt.strategies import default_strategies
from megackpt.testing import ThreadedGroup
from megackpt.tree import dict_list_map_outplace, nested_values

WEIGHT = torch.arange(12.0).reshape(6, 2)


def state(
    weight: torch.Tensor, rank: int = 0, ranks: int = 1, **common: Any
) -> dict[str, Any]:
    return {
        "model": {
            "w": ShardedTensor.from_rank_offsets("w", weight, (0, rank, ranks)),
            "o": ShardedObject("o", {"rank": rank}, (ranks,), (rank,), 0),
        },
        **common,
    }


def file_of(shard: Any) -> str:
    return f"{shard.key}_{'.'.join(map(str, shard.global_offset))}.bin"


class Saves(SaveShardedStrategy):
    """Tensors only, as Megatron's strategies without a flag."""

    def __init__(self) -> None:
        super().__init__("mine", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        for shard in nested_values(sharded_state_dict):
            assert isinstance(shard, ShardedTensor)
            shard.key = shard.key + "!"  # the caller's shards are not these
            if is_main_replica(shard.replica_id):
                (Path(checkpoint_dir) / "data").mkdir(exist_ok=True)
                path = Path(checkpoint_dir) / "data" / file_of(shard)
                path.write_bytes(shard.data.numpy().tobytes())


class SavesChecked(Saves):
    def __init__(self, **checks: Any) -> None:
        SaveShardedStrategy.__init__(self, "mine", 1, **checks)


class SavesNothing(Saves):
    """Removes the directory that it is to save to."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        super().save(sharded_state_dict, checkpoint_dir)
        shutil.rmtree(checkpoint_dir)


class SavesLater(AsyncSaveShardedStrategy):
    def __init__(self) -> None:
        super().__init__("mine", 1)
        self.steps: list[str] = []

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        def write() -> None:
            self.steps.append("write")
            Saves().save(sharded_state_dict, checkpoint_dir)

        return AsyncRequest(write, (), [lambda: self.steps.append("finish")])

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()


class Loads(LoadShardedStrategy):
    def __init__(self) -> None:  # as in Megatron, the base needs no call
        self.asked: list[str] = []

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        def read(shard: Any) -> Any:
            self.asked.append(shard.key)
            shard.key = shard.key + "!"
            data = (Path(checkpoint_dir) / "data" / file_of(shard)).read_bytes()
            found = torch.frombuffer(bytearray(data), dtype=torch.float32)
            return found.reshape(shard.local_shape)

        return dict_list_map_outplace(read, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: Any, metadata: Any = None) -> Any:
        return {
            "w": ShardedTensor.from_rank_offsets(
                "w", torch.empty(6, 2, device="meta")
            ).without_data()
        }

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        if loaded_backend != "mine":
            raise megackpt.CheckpointingException(f"not mine, but {loaded_backend}")


def test_a_format_of_the_callers_own(tmp_path: Path) -> None:
    """Two ranks. The common state and the objects are stored beside what the strategy writes."""

    def run(group: ThreadedGroup) -> None:
        given = state(WEIGHT.chunk(2)[group.rank], group.rank, 2, step=3)
        for _ in range(2):  # the second one replaces the first
            megackpt.save(
                given,
                tmp_path / "a",
                Saves(),
                content_metadata={"x": 1},
                process_group=group,
            )
        assert given["model"]["w"].key == "w"
        asked = state(torch.zeros(3, 2), group.rank, 2)
        reader = Loads()
        found = megackpt.load(asked, tmp_path / "a", reader, process_group=group)
        assert torch.equal(found["model"]["w"], WEIGHT.chunk(2)[group.rank])
        assert found["model"]["o"] == {"rank": group.rank}
        assert (found["step"], found["content_metadata"]) == (3, {"x": 1})
        assert reader.asked == ["w"]
        assert asked["model"]["w"].key == "w"

    ThreadedGroup.run(2, run)
    folder = tmp_path / "a"
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == (
        "mine"
    )
    assert torch.load(folder / "o" / "shard_1_2.pt") == {"rank": 1}  # as Megatron's
    assert torch.load(folder / "common.pt")["step"] == 3
    (folder / "mine.txt").write_text("of the user")
    save(state(WEIGHT), folder)  # another format replaces it, and leaves no file of it
    assert not (folder / "data").exists()
    assert (folder / "mine.txt").exists()


def test_each_file_has_its_digest(tmp_path: Path) -> None:
    save(state(WEIGHT), tmp_path / "a", Saves())
    file = next((tmp_path / "a" / "data").iterdir())
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    with pytest.raises(megackpt.CorruptCheckpoint, match=r"data/w!_0\.0\.bin"):
        load(state(WEIGHT.clone()), tmp_path / "a", Loads())
    found = load(state(WEIGHT.clone()), tmp_path / "a", Loads(), verify=False)
    assert not torch.equal(found["model"]["w"], WEIGHT)
    file.unlink()
    with pytest.raises(megackpt.CheckpointingException, match=r"data/w!_0\.0\.bin"):
        load(state(WEIGHT.clone()), tmp_path / "a", Loads())


def test_a_request_of_the_callers_own(tmp_path: Path) -> None:
    strategy = SavesLater()
    request = save(
        state(WEIGHT, step=1), tmp_path / "a", strategy, async_sharded_save=True
    )
    assert strategy.steps == []
    assert not (tmp_path / "a").exists()
    queue = megackpt.AsyncCallsQueue()
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    assert strategy.steps == ["write", "finish"]
    found = load(state(torch.zeros(6, 2)), tmp_path / "a", Loads())
    assert torch.equal(found["model"]["w"], WEIGHT)
    save(
        state(WEIGHT + 1, step=2),
        tmp_path / "a",
        FullyParallelSaveStrategyWrapper(strategy),
    )
    reader = FullyParallelLoadStrategyWrapper(Loads())
    assert torch.equal(
        load(state(torch.zeros(6, 2)), tmp_path / "a", reader)["model"]["w"], WEIGHT + 1
    )
    with pytest.raises(megackpt.CheckpointingException, match="Cannot apply async"):
        save(state(WEIGHT), tmp_path / "a", Saves(), async_sharded_save=True)


@pytest.mark.parametrize("later", [False, True])
def test_a_failure_leaves_the_old_checkpoint(later: bool, tmp_path: Path) -> None:
    class Fails(SavesLater):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

        def async_save(self, given: Any, checkpoint_dir: Any) -> AsyncRequest:
            def write() -> None:
                Path(checkpoint_dir, f"half{self.rank}").touch()
                if self.rank == 1:
                    raise OSError("no disk")

            return AsyncRequest(write, (), [])

    save(state(WEIGHT, step=1), tmp_path / "a", Saves())

    def run(group: ThreadedGroup) -> None:
        given = state(WEIGHT.chunk(2)[group.rank], group.rank, 2)
        request = save(
            given,
            tmp_path / "a",
            Fails(group.rank),
            async_sharded_save=later,
            process_group=group,
        )
        request.execute_sync()

    for error in ThreadedGroup.outcomes(2, run):
        assert isinstance(error, megackpt.CheckpointingException)
        assert "no disk" in str(error)
    assert load(state(WEIGHT.clone()), tmp_path / "a", Loads())["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_method_that_calls_ours(tmp_path: Path) -> None:
    """The engine saves what the strategy passes, under the arguments of the caller."""

    class Halves(TorchDistSaveShardedStrategy):
        def async_save(self, given: Any, checkpoint_dir: Any, *_: Any) -> AsyncRequest:
            for shard in nested_values(given):
                if isinstance(shard, ShardedTensor):
                    shard.data = shard.data.to(torch.bfloat16)
                    shard.dtype = torch.bfloat16
            return super().async_save(given, checkpoint_dir)

        def save(self, given: Any, checkpoint_dir: Any, *_: Any) -> None:
            self.async_save(given, checkpoint_dir).execute_sync()

    class Doubles(TorchDistLoadShardedStrategy):
        def load(self, given: Any, checkpoint_dir: Any, *_: Any) -> Any:
            found = super().load(given, checkpoint_dir)
            assert list(found) == ["model"]
            found["model"]["w"] = found["model"]["w"] * 2
            return found

    def run(group: ThreadedGroup) -> None:
        given = state(WEIGHT.chunk(2)[group.rank], group.rank, 2, step=4)
        for later in (False, True):
            request = save(
                given,
                tmp_path / "a",
                Halves(),
                async_sharded_save=later,
                content_metadata={"later": later},
                process_group=group,
            )
            if later:
                request.execute_sync()
            asked = state(torch.zeros(3, 2), group.rank, 2)
            found = load(asked, tmp_path / "a", Doubles(), process_group=group)
            assert torch.equal(found["model"]["w"], WEIGHT.chunk(2)[group.rank] * 2)
            assert found["model"]["o"] == {"rank": group.rank}
            assert found["content_metadata"] == {"later": later}
            assert found["step"] == 4

    ThreadedGroup.run(2, run)
    assert megackpt.load_tensors_metadata(tmp_path / "a")["w"].dtype == torch.bfloat16
    assert megackpt.verify(tmp_path / "a").ok
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_a_method_that_calls_ours_may_not(tmp_path: Path) -> None:
    class Beside(TorchDistSaveShardedStrategy):
        def save(self, given: Any, checkpoint_dir: Any, *_: Any) -> None:
            Path(checkpoint_dir, "notes.txt").touch()
            super().save(given, checkpoint_dir)

    class Sometimes(TorchDistSaveShardedStrategy):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

        def save(self, given: Any, checkpoint_dir: Any, *_: Any) -> None:
            if self.rank:
                super().save(given, checkpoint_dir)

    with pytest.raises(megackpt.BackendError, match=r"has written notes\.txt beside"):
        save(state(WEIGHT), tmp_path / "a", Beside())

    def run(group: ThreadedGroup) -> None:
        given = state(WEIGHT.chunk(2)[group.rank], group.rank, 2)
        save(given, tmp_path / "a", Sometimes(group.rank), process_group=group)

    for error in ThreadedGroup.outcomes(2, run):
        assert isinstance(error, megackpt.CheckpointingException)
    assert not list(tmp_path.iterdir()) or not (tmp_path / "a").exists()


def test_strictness(tmp_path: Path) -> None:
    save(state(WEIGHT), tmp_path / "a", Saves())
    asked = state(torch.zeros(6, 2))
    asked["more"] = ShardedTensor.from_rank_offsets("more", torch.zeros(2))
    found, missing, unexpected = load(
        asked, tmp_path / "a", Loads(), strict="return_all"
    )
    assert (missing, unexpected) == (set(), {"more"})
    assert "more" not in found
    del asked["model"]["o"]
    asked["model"]["w"] = state(WEIGHT)["model"]["w"]
    assert load(asked, tmp_path / "a", Loads(), strict="return_all")[1] == {"o"}
    with pytest.raises(megackpt.MismatchError, match="Unexpected keys"):
        load(asked, tmp_path / "a", Loads(), strict="raise_all")
    asked = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4, 2))}
    with pytest.raises(megackpt.MismatchError, match="Global shape mismatch"):
        load(asked, tmp_path / "a", Loads(), strict="log_all")
    half = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3, 2), (0, 0, 2))}
    with pytest.raises(megackpt.CoverageError):
        load(half, tmp_path / "a", Loads())


def bad(given: Callable[[Path], Any], match: str) -> Any:
    return pytest.param(given, match, id=match)


@pytest.mark.parametrize(
    ("act", "match"),
    [
        bad(lambda _: save(state(WEIGHT), "s3://b/a", Saves()), "needs a directory"),
        bad(
            lambda at: save(
                state(WEIGHT), at / "a", SavesChecked(check_values="raise")
            ),
            "check_values='raise' and reuse_unchanged=False have no effect",
        ),
        bad(
            lambda at: save(state(WEIGHT), at / "a", SavesChecked(audit="full")),
            "audit='full', .* have no effect",
        ),
        bad(
            lambda at: save(state(WEIGHT), at / "a", SavesNothing()),
            "has removed the directory that it saves to",
        ),
        bad(lambda at: load(state(WEIGHT), at / "none", Loads()), "does not exist"),
        bad(
            lambda at: load(state(WEIGHT), at / "torch", Loads()),
            "not mine, but torch_dist",
        ),
        bad(
            lambda at: load(state(WEIGHT), at / "mine", Loads(), key_map={"w": "v"}),
            "key_map cannot be given",
        ),
        bad(lambda at: load(state(WEIGHT), at / "mine"), "unknown format 'mine'"),
    ],
)
def test_refusals(act: Callable[[Path], Any], match: str, tmp_path: Path) -> None:
    save(state(WEIGHT), tmp_path / "torch")
    save(state(WEIGHT), tmp_path / "mine", Saves())
    with pytest.raises(megackpt.CheckpointingException, match=match):
        act(tmp_path)


def test_registered_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for action, strategy in (("save_sharded", Saves()), ("load_sharded", Loads())):
        monkeypatch.setitem(default_strategies, action, {})
        register_default_strategy(StrategyAction(action), "mine", 1, strategy)
    save(state(WEIGHT), tmp_path / "a", ("mine", 1))
    found = load(state(torch.zeros(6, 2)), tmp_path / "a")
    assert torch.equal(found["model"]["w"], WEIGHT)
