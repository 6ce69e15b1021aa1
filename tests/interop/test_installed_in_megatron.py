"""megackpt under Megatron-Core's own names: real models of 0.16.1, and the lines of a trainer that was not changed."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import pytest
import torch

import megackpt.megatron
from megackpt.megatron.import_hook import THEIRS
from megackpt.megatron.module_table import Refused
from megackpt.megatron.table import MODULES
from megackpt.tree import walk

pytestmark = pytest.mark.megatron

STEPS = (
    ("trained", (2, 1), (1, 1), "fully_reshardable"),
    ("trained", (1, 1), (2, 1), "fully_reshardable"),
    ("trained", (1, 1), (1, 1), "dp_reshardable"),
    ("layerwise", (1, 1), (1, 1), "fully_reshardable"),
)
"""What makes the optimizer; TP x PP at which is saved, and loaded; and how the optimizer declares its shards."""


def values(tree: Any) -> dict[tuple[Any, ...], Any]:
    """Tensors and numbers of a state, copied, by their places."""
    return {
        path: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in walk(tree)
        if isinstance(leaf, torch.Tensor | float | int)
    }


def same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one.keys() == other.keys() and all(
        bool((torch.as_tensor(value) == torch.as_tensor(other[key])).all())
        for key, value in one.items()
    )


def declared(model: Any, optimizer: Any, form: str, loading: bool) -> dict[str, Any]:
    """As a trainer has it; ``form``: how the optimizer's shards are declared."""
    from megatron.core import parallel_state

    metadata = {
        "distrib_optim_sharding_type": form,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(
            with_context_parallel=True
        ),
    }
    state = model.sharded_state_dict(metadata=metadata)
    optimizers = optimizer.sharded_state_dict(
        state, is_loading=loading, metadata=metadata
    )
    return {"model": state, "optimizer": optimizers}


def save_as_training_does(
    state: dict[str, Any], folder: str, context: dict[str, Any], later: bool
) -> None:
    """As megatron.training.checkpointing has it, in lines that name Megatron alone."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import (
        get_default_save_sharded_strategy,
    )
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if "save_strategy" not in context:
        strategy = get_default_save_sharded_strategy("torch_dist")
        strategy.use_cached_ckpt_structure = True
        cached = getattr(context.get("load_strategy"), "cached_global_metadata", None)
        if cached is not None:
            strategy.cached_global_metadata = cached
        context["save_strategy"] = FullyParallelSaveStrategyWrapper(
            strategy, group, True
        )
    request = dist_checkpointing.save(
        {**state, "iteration": 7},
        folder,
        context["save_strategy"],
        async_sharded_save=later,
        content_metadata={"singleton_local_shards": False, "dp_cp_group": group},
    )
    if later:
        queue = AsyncCallsQueue()
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()


def load_as_training_does(
    state: dict[str, Any], folder: str, context: dict[str, Any]
) -> dict[str, Any]:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import (
        get_default_load_sharded_strategy,
    )
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
    )
    from megatron.core.dist_checkpointing.validation import StrictHandling

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    assert dist_checkpointing.check_is_distributed_checkpoint(folder)
    strategy = get_default_load_sharded_strategy(folder)
    strategy = FullyParallelLoadStrategyWrapper(
        strategy, group, exchange_algo="broadcast"
    )
    context["load_strategy"] = strategy
    loaded, missing, unexpected = dist_checkpointing.load(
        state, folder, strategy, strict=StrictHandling.RETURN_ALL
    )
    assert (missing, unexpected) == (set(), set())
    assert loaded["iteration"] == 7
    assert loaded["content_metadata"] == {"singleton_local_shards": False}
    return dict(loaded)


def trains(folder: str) -> None:
    """On two ranks, installed before Megatron is imported: models and their optimizers, at TP 2 and at DP 2."""
    with megackpt.megatron.install():
        from interop import megatron_models

        parallel = megatron_models.parallel
        import_module(
            "torch._dynamo"
        )  # before prepare() changes torch, which it would notice
        assert megatron_models.prepare() is megackpt.megatron
        context: dict[str, Any] = {}
        for number, (maker, saved, loading, form) in enumerate(STEPS):
            made = getattr(megatron_models, maker)
            with parallel(*saved):
                state = declared(*made("gpt", 1), form, loading=False)
                bases = [
                    leaf for _, leaf in walk(state) if "Sharded" in type(leaf).__name__
                ]
                assert len(bases) > 20
                assert all(
                    isinstance(leaf, megackpt.state.ShardedBase) for leaf in bases
                )
                save_as_training_does(
                    state, f"{folder}/{number}", context, later=number == 1
                )
                context.clear()
            with parallel(*loading):
                model, optimizer = made("gpt", 2)
                asked = declared(model, optimizer, form, loading=True)
                found = load_as_training_does(asked, f"{folder}/{number}", context)
                model.load_state_dict(found["model"])
                optimizer.load_state_dict(found["optimizer"])
                state = declared(model, optimizer, "fully_reshardable", loading=False)
                save_as_training_does(
                    state, f"{folder}/{number} again", context, later=False
                )
                context.clear()


def is_exchanged(folder: str) -> None:
    """In one process: Megatron first, then installed, and taken out; its own functions beside ours."""
    from interop.megatron_models import built, parallel, prepare

    dist_checkpointing = prepare()
    for module in walk_packages(dist_checkpointing.__path__, f"{THEIRS}."):
        import_module(module.name)
    own = {
        name: module for name, module in sys.modules.items() if name.startswith(THEIRS)
    }
    kinds = {"ShardedTensor", "ShardedTensorFactory", "ShardedObject"}
    with parallel(), megackpt.megatron.install():
        model = built("gpt")
        assert (
            sys.modules[THEIRS]
            is sys.modules["megatron.core"].dist_checkpointing
            is megackpt.megatron
        )
        assert all(sys.modules[name] is not module for name, module in own.items())
        for name, module in own.items():
            compare(module, name)
        declared = model.sharded_state_dict()
        assert {type(one).__module__ for one in declared.values()} == {
            "megackpt.state.values"
        }
        assert {type(one).__name__ for one in declared.values()} == kinds
        sys.modules[THEIRS].save({"model": declared}, folder)
    assert sys.modules[THEIRS] is dist_checkpointing
    assert own.items() <= sys.modules.items()
    mlp = sys.modules["megatron.core.transformer.mlp"]
    assert (
        mlp.ShardedTensor
        is dist_checkpointing.ShardedTensor
        is not megackpt.ShardedTensor
    )
    left = [
        f"{name}.{key}"
        for name, module in sys.modules.items()
        if name.startswith("megatron.")
        for key, value in vars(module).items()
        if str(getattr(value, "__module__", "")).startswith("megackpt")
    ]
    assert not left
    with parallel():
        declared = model.sharded_state_dict()
    assert {type(one).__name__ for one in declared.values()} == kinds
    assert not any(isinstance(one, megackpt.ShardedTensor) for one in declared.values())
    finds_what_megatron_finds(declared)


def finds_what_megatron_finds(state: dict[str, Any]) -> None:
    """Helpers of ours, among Megatron's own declarations."""
    (ours, theirs), (our, their) = (
        [import_module(f"{root}.{name}") for root in ("megackpt.megatron", THEIRS)]
        for name in ("utils", "mapping")
    )
    for name in (name for name in vars(theirs) if name.startswith("extract_sharded")):
        assert getattr(ours, name)(state) == getattr(theirs, name)(state), name
    ours.add_prefix_for_sharding(state, "student.")
    assert all(one.key.startswith("student.") for one in state.values())
    ours.replace_prefix_for_sharding(state, "student.", "")
    built = {name: dict(state) for name in ("ours", "theirs")}
    our.apply_factories(built["ours"])
    their.apply_factories(built["theirs"])
    keys = [{path: one.key for path, one in walk(tree)} for tree in built.values()]
    assert keys[0] == keys[1]
    assert len(keys[0]) > len(state)


def compare(theirs: Any, name: str) -> None:
    """Arguments of 0.16.1, by its own functions: ours has all of them, in the same order."""
    assert name.removeprefix(THEIRS) in MODULES
    ours = sys.modules[name]
    for key, value in vars(theirs).items():
        own = inspect.isfunction(value) or inspect.isclass(value)
        public = not key.startswith("_") and getattr(value, "__module__", None) == name
        if not (own and public) or isinstance(getattr(ours, key), Refused):
            continue
        for told, (their, our) in called(
            value, getattr(ours, key), f"{name}: {key}"
        ).items():
            if told.rpartition(": ")[2] in UNLIKE:
                continue
            expected, found = (
                list(inspect.signature(one).parameters) for one in (their, our)
            )
            assert found[: len(expected)] == expected, told


def called(theirs: Any, ours: Any, told: str) -> dict[str, tuple[Any, Any]]:
    """A function, or how a class is made and its public methods; each with ours."""
    if inspect.isfunction(theirs):
        return {told: (theirs, ours)}
    made = {told: (theirs, ours)} if "__init__" in vars(theirs) else {}
    own = [
        m
        for m, f in vars(theirs).items()
        if inspect.isfunction(getattr(f, "__func__", f)) and not m.startswith("_")
    ]
    return made | {
        f"{told}.{m}": (getattr(theirs, m), getattr(ours, m, None)) for m in own
    }


UNLIKE = {
    "FullyParallelLoadStrategyWrapper.apply_loading_parallelization",
    "FullyParallelLoadStrategyWrapper.fill_in_deferred_sharded_objects",
    "FullyParallelLoadStrategyWrapper.fill_in_deferred_sharded_tensors",
    "FullyParallelSaveStrategyWrapper.apply_saving_parallelization",
    # "loaded_version" there, in some classes; passed by place
    "FullyParallelLoadStrategyWrapper.check_backend_compatibility",
    "TorchCommonLoadStrategy.check_backend_compatibility",
    "TorchDistLoadShardedStrategy.check_backend_compatibility",
    # refused, whatever the arguments: docs/design/0046
    "FileSystemWriterAsync.preload_tensors",
    "FileSystemWriterAsync.write_preloaded_data",
    "FileSystemWriterAsync.write_preloaded_data_multiproc",
    "FileSystemWriterAsync.write_preloaded_data_multithread",
    "FileSystemWriterAsync.prepare_decentralized_global_plan",
    # properties in their bases there, and here throughout
    "TorchCommonLoadStrategy.can_handle_sharded_objects",
    "TorchCommonSaveStrategy.can_handle_sharded_objects",
    "TorchDistLoadShardedStrategy.can_handle_sharded_objects",
    "TorchDistSaveShardedStrategy.can_handle_sharded_objects",
}
"""What is not there, or not called as Megatron does: by nobody but Megatron itself."""


# ---- tests


def test_an_unchanged_trainer_at_other_parallelisms(
    tmp_path: Path, ranks: Any, peers: dict[str, str]
) -> None:
    ranks(trains, 2, tmp_path, env=peers, timeout=240)
    plain = {
        path.name: megackpt.load_plain_tensors(path) for path in tmp_path.iterdir()
    }
    assert all(same(plain[number], plain[f"{number} again"]) for number in "013")
    assert any(key.startswith("optimizer.state.exp_avg.") for key in plain["3"])
    assert same(plain["1"], plain["2 again"])  # of buckets, but the same
    assert (
        len(list((tmp_path / "1").glob("__1_*.distcp"))) == 2
    )  # the second copy has shared the writing


def test_megatron_that_is_imported_already(
    tmp_path: Path, ranks: Any, peers: dict[str, str]
) -> None:
    ranks(is_exchanged, 1, tmp_path / "ckpt", env=peers, timeout=240)
    assert megackpt.verify(tmp_path / "ckpt").ok
