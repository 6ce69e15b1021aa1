"""Megatron's strategies: called by themselves, poked at as trainers do, and given to save and load."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt.megatron import load, load_common_state_dict, load_plain_tensors, save
from megackpt.megatron.core import CheckpointingConfig, maybe_load_config
from megackpt.megatron.mapping import ShardedObject, ShardedTensor
from megackpt.megatron.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_common_strategy,
    get_default_save_sharded_strategy,
)
from megackpt.megatron.strategies.async_utils import (
    AsyncCallsQueue,
    warmup_persistent_caller,
)
from megackpt.megatron.strategies.base import (
    LoadShardedStrategy,
    SaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
    register_default_strategy,
)
from megackpt.megatron.strategies.common import (
    TorchCommonLoadStrategy,
    TorchCommonSaveStrategy,
)
from megackpt.megatron.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megackpt.megatron.strategies.tensorstore import TensorStoreLoadShardedStrategy
from megackpt.megatron.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megackpt.megatron.strategies.two_stage import (
    TwoStageDataParallelLoadShardedStrategy,
)
from megackpt.megatron.strategies.zarr import (
    ZarrLoadShardedStrategy,
    ZarrSaveShardedStrategy,
)
from megackpt.megatron.validation import (
    StrictHandling,
    verify_checkpoint,
    verify_checkpoint_and_load_strategy,
    verify_integrity_manifest,
)
from megackpt.strategies import default_strategies
from megackpt.testing import ThreadedGroup

WEIGHT = torch.arange(12.0).reshape(6, 2)


def state(
    weight: torch.Tensor, rank: int = 0, ranks: int = 1, copies: int = 0
) -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets(
            "w", weight, (0, rank, ranks), replica_id=copies
        ),
        "o": ShardedObject("o", {"rank": rank}, (ranks,), (rank,), copies),
    }


def whole(folder: Path) -> torch.Tensor:
    return load_plain_tensors(folder)["w"]


def test_a_trainer_with_its_context(tmp_path: Path) -> None:
    """The calls that megatron.training makes, in their order, on four ranks: TP 2 x DP 2."""
    contexts: list[dict[str, Any]] = [{} for _ in range(4)]

    def save_as_training_does(group: ThreadedGroup, folder: Path, value: float) -> None:
        context, rank = contexts[group.rank], group.rank
        if "save_strategy" in context:
            strategy, validate = context["save_strategy"], False
        else:
            strategy, validate = get_default_save_sharded_strategy("torch_dist"), True
            strategy.use_cached_ckpt_structure = True
            if (
                found := getattr(
                    context.get("load_strategy"), "cached_global_metadata", None
                )
            ) is not None:
                strategy.cached_global_metadata = found
            strategy = FullyParallelSaveStrategyWrapper(strategy, None, True)
        context["save_strategy"] = strategy
        declared = state(WEIGHT.chunk(2)[rank % 2] + value, rank % 2, 2, rank // 2)
        request = save(
            {**declared, "iteration": value, "args": rank},
            str(folder),
            strategy,
            async_sharded_save=True,
            validate_access_integrity=validate,
            preprocess_common_before_consistancy_check=lambda common: {
                **common,
                "args": None,
            },
            content_metadata={"singleton_local_shards": False},
            process_group=group,
        )
        called = []
        request.add_finalize_fn(lambda: called.append(rank))
        queue = AsyncCallsQueue(persistent=False)
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
        assert called == [rank]
        queue.close()

    def run(group: ThreadedGroup) -> None:
        for step in range(3):
            save_as_training_does(group, tmp_path / f"iter_{step}", float(step))
        blank = torch.zeros(2, 2) if group.rank < 3 else torch.zeros(0, 2)
        folder = str(tmp_path / "iter_2")
        strategy = get_default_load_sharded_strategy(folder)
        strategy = FullyParallelLoadStrategyWrapper(
            strategy, None, exchange_algo="gather_object"
        )
        contexts[group.rank]["load_strategy"] = strategy
        asked = {"w": state(blank, group.rank, 3)["w"]} if group.rank < 3 else {}
        loaded, missing, unexpected = load(
            asked,
            folder,
            strategy,
            strict=StrictHandling.RETURN_ALL,
            process_group=group,
        )
        assert loaded["iteration"] == 2.0
        assert loaded["args"] == 0
        assert loaded["content_metadata"] == {"singleton_local_shards": False}
        assert missing == {"o"}
        assert unexpected == set()
        if group.rank < 3:
            assert torch.equal(blank, WEIGHT[2 * group.rank : 2 * group.rank + 2] + 2)

    ThreadedGroup.run(4, run)
    assert torch.equal(whole(tmp_path / "iter_1"), WEIGHT + 1)


def test_arguments_in_the_order_of_0_16_and_of_0_19(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save({"n": 1, **state(WEIGHT)}, old, None, None, False, False, None, {"a": 1})
    save(
        {"n": 1, **state(WEIGHT)},
        new,
        None,
        False,
        False,
        None,
        {"a": 1},
        "mcore",
        True,
    )
    for folder in (old, new):
        for order in (
            (None, None, False, "return_all"),
            (None, False, "return_all", True, None),
        ):
            asked, blank = state(torch.zeros(3, 2)), torch.zeros(3, 2)
            asked["w"] = ShardedTensor.from_rank_offsets("w", blank, (0, 1, 2))
            loaded, missing, unexpected = load(asked, folder, *order)
            assert (missing, unexpected) == (set(), set())
            assert loaded["content_metadata"] == {"a": 1}
            assert torch.equal(blank, WEIGHT[3:])
    with pytest.raises(NotImplementedError):
        save(state(WEIGHT), old, common_strategy=get_default_save_common_strategy())
    with pytest.raises(megackpt.CheckpointExists):
        save(state(WEIGHT), old, overwrite=False)  # ours, too


@pytest.mark.parametrize(
    "made",
    [
        lambda: TorchDistSaveShardedStrategy("torch_dist", 1),
        lambda: FullyParallelSaveStrategyWrapper(
            TorchDistSaveShardedStrategy("torch_dist", 1)
        ),
        lambda: get_default_strategy(StrategyAction.SAVE_SHARDED, "torch_dist", 1),
        ZarrSaveShardedStrategy,
        lambda: get_default_save_sharded_strategy("zarr"),
    ],
)
def test_a_strategy_saves_when_it_is_called(
    made: Callable[[], Any], tmp_path: Path
) -> None:
    strategy = made()
    assert isinstance(strategy, SaveShardedStrategy)
    assert isinstance(strategy, megackpt.Strategy)
    assert strategy.can_handle_sharded_objects
    declared = state(WEIGHT)
    strategy.save(declared, tmp_path / "now")
    assert torch.equal(whole(tmp_path / "now"), WEIGHT)
    request = copy.deepcopy(strategy).async_save(
        declared, tmp_path / "later", async_strategy="mcore"
    )
    request.execute_sync()
    assert torch.equal(whole(tmp_path / "later"), WEIGHT)
    reader = get_default_load_sharded_strategy(tmp_path / "now")
    assert isinstance(reader, LoadShardedStrategy)
    assert reader.backend == strategy.backend


def test_an_export_format_is_no_strategy_of_a_save() -> None:
    with pytest.raises(
        megackpt.BackendError,
        match=r"Cannot find a default strategy .* is an export format",
    ):
        get_default_save_sharded_strategy("torch")


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("torch_dist", TorchDistLoadShardedStrategy),
        (
            "torch_dist",
            lambda: FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy()),
        ),
        (
            "torch_dist",
            lambda: get_default_strategy(StrategyAction.LOAD_SHARDED, "torch_dist", 1),
        ),
        ("zarr", ZarrLoadShardedStrategy),
        ("zarr", lambda: TensorStoreLoadShardedStrategy(load_directly_on_device=True)),
        (
            "zarr",
            lambda: TwoStageDataParallelLoadShardedStrategy(None, cpu_transfer=True),
        ),
    ],
)
def test_a_strategy_loads_when_it_is_called(
    name: str, made: Callable[[], Any], tmp_path: Path
) -> None:
    folder, strategy = tmp_path / "ckpt", made()
    save({**state(WEIGHT), "n": 1, "deep": {"n": 1}}, folder, name, content_metadata={})
    assert isinstance(strategy, LoadShardedStrategy)
    blank = torch.zeros(6, 2)
    asked = {
        "deep": {"here": state(blank)["w"]},
        "list": [state(torch.zeros(6, 2))["o"]],
    }
    found = strategy.load(asked, folder)
    assert found["deep"]["here"] is not None
    assert torch.equal(blank, WEIGHT)
    assert {**found, "deep": list(found["deep"])} == {
        "deep": ["here"],
        "list": [{"rank": 0}],
    }
    assert set(strategy.load_tensors_metadata(folder)) == {"w"}
    assert set(strategy.load_sharded_metadata(folder)) == {"w", "o/shard_0_1"}
    assert torch.equal(load({"w": state(blank)["w"]}, folder, strategy)["w"], WEIGHT)
    if name == "torch_dist":
        strategy.remove_sharded_tensors(folder, "w")
        assert set(strategy.load_sharded_metadata(folder)) == {"o/shard_0_1"}


def test_attributes_that_callers_poke(tmp_path: Path) -> None:
    strategy = TorchDistSaveShardedStrategy(
        "torch_dist", 1, cached_metadata=True, thread_count=3
    )
    assert strategy.use_cached_ckpt_structure
    assert strategy.thread_count == 3
    for name in (
        "cached_central_plan",
        "cached_local_plan",
        "cached_global_metadata",
        "validated_cache_reuse",
        "use_cached_ckpt_structure",
        "validated_loaded_metadata_reuse",
    ):
        assert not getattr(TorchDistSaveShardedStrategy(), name)
        setattr(strategy, name, object())
    wrapper = FullyParallelSaveStrategyWrapper(strategy, do_cache_distribution=True)
    wrapper.cached_distribution = object()
    assert wrapper.base_strategy is strategy
    assert len({strategy, wrapper, TorchDistSaveShardedStrategy()}) == 3
    many = {
        f"{i}": ShardedTensor.from_rank_offsets(f"{i}", torch.ones(2)) for i in range(3)
    }
    for _ in range(2):
        save(many, tmp_path / "ckpt", wrapper)
    assert sorted(path.name for path in (tmp_path / "ckpt").glob("*.distcp")) == [
        f"__0_{i}.distcp" for i in range(3)
    ]


def test_separation_hint(tmp_path: Path) -> None:
    save(
        {**state(WEIGHT)},
        tmp_path / "ckpt",
        TorchDistSaveShardedStrategy(separation_hint="w"),
    )
    assert [path.name for path in (tmp_path / "ckpt").glob("w*")] == ["w__0_0.distcp"]


def test_registered_strategies_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_strategies, "save_sharded", {})
    mine = TorchDistSaveShardedStrategy(thread_count=1)
    register_default_strategy(StrategyAction.SAVE_SHARDED, "torch_dist", 1, mine)
    assert get_default_save_sharded_strategy("torch_dist", 1) is mine
    with pytest.raises(
        megackpt.CheckpointingException, match="Cannot find a default strategy"
    ):
        get_default_strategy(StrategyAction.SAVE_SHARDED, "nothing", 1)


def test_zarr_of_megatrons_own_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(
        megackpt.BackendError, match="version 1 of the format 'zarr' is not written"
    ):
        save(state(WEIGHT), tmp_path / "ckpt", ZarrSaveShardedStrategy("zarr", 1))


def test_a_group_that_has_been_destroyed_is_named(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0])
    strategy = FullyParallelSaveStrategyWrapper("torch_dist", group)
    save(state(WEIGHT), tmp_path, strategy)
    dist.destroy_process_group(group)
    try:
        with pytest.raises(
            megackpt.CheckpointingException,
            match="dedup_group is a process group that has been destr",
        ):
            save(state(WEIGHT), tmp_path, strategy)
    finally:
        dist.destroy_process_group()


def test_the_common_state(tmp_path: Path) -> None:
    save({**state(WEIGHT), "n": 1}, tmp_path / "ckpt")
    strategy = TorchCommonLoadStrategy()
    assert (
        strategy.load_common(tmp_path / "ckpt")
        == load_common_state_dict(tmp_path / "ckpt")
        == {"n": 1}
    )
    assert strategy.load_sharded_objects(
        {"o": state(WEIGHT)["o"]}, tmp_path / "ckpt"
    ) == {"o": {"rank": 0}}
    assert "o/shard_0_1" in strategy.load_sharded_metadata(tmp_path / "ckpt")
    with pytest.raises(
        megackpt.CheckpointingException, match="stores the common state itself"
    ):
        TorchCommonSaveStrategy("torch", 1).save_common({}, tmp_path / "ckpt")


def test_is_it_a_checkpoint(tmp_path: Path) -> None:
    assert maybe_load_config(tmp_path) is None
    with pytest.raises(megackpt.NotACheckpoint):
        verify_checkpoint(tmp_path)
    folder = tmp_path / "ckpt"
    save(state(WEIGHT), folder)
    assert maybe_load_config(folder) == CheckpointingConfig("torch_dist", 1, "torch", 1)
    verify_checkpoint(folder)
    strategy, common = verify_checkpoint_and_load_strategy(folder)
    assert isinstance(strategy, TorchDistLoadShardedStrategy)
    assert common is None
    verify_integrity_manifest(folder)
    file = next(folder.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[data.index(WEIGHT.numpy().tobytes())] ^= 1
    file.write_bytes(data)
    with pytest.raises(megackpt.CorruptCheckpoint, match="w"):
        verify_integrity_manifest(folder)


def test_warming_up_is_harmless() -> None:
    assert warmup_persistent_caller(0, nice=10) is None


def test_metadata_json_has_the_four_fields_that_0_16_takes(tmp_path: Path) -> None:
    save(state(WEIGHT), tmp_path / "ckpt", get_default_save_sharded_strategy())
    told = json.loads((tmp_path / "ckpt" / "metadata.json").read_text())
    assert told == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
