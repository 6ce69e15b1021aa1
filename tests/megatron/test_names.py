"""Every name that programs import from Megatron is where they look for it, or is refused by a sentence."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import megatron
from megackpt.megatron.table import MODULES, REFUSALS, SOURCES

ROOT = Path(__file__).resolve().parent.parent.parent
GUIDE = (ROOT / "docs" / "from-megatron.md").read_text(encoding="utf-8")

NAMES = {
    "": "Installed LocalNonpersistentObject ShardedObject ShardedTensor "
    "check_is_distributed_checkpoint install load load_common_state_dict "
    "load_content_metadata load_plain_tensors load_tensors_metadata "
    "remove_sharded_tensors save uninstall",
    ".core": "CONFIG_FNAME CheckpointingConfig CheckpointingException "
    "check_is_distributed_checkpoint maybe_load_config",
    ".dict_utils": "dict_list_map_inplace dict_list_map_outplace diff extract_matching_values map_reduce "
    "merge nested_values",
    ".mapping": "CheckpointingException CommonStateDict FactoryBuildFn FactoryMergeFn "
    "LocalNonpersistentObject ReplicaId ShardedBase ShardedObject ShardedStateDict "
    "ShardedTensor ShardedTensorFactory StateDict apply_factories apply_factory_merges "
    "is_main_replica",
    ".optimizer": "KEEP_VARS_HINT LocalNonpersistentObject get_optim_param_to_id_map "
    "get_param_id_to_sharded_param_map make_sharded_optimizer_tensor "
    "optim_state_to_sharding_state",
    ".serialization": "AsyncRequest CkptShardedMetadata StateDict StrategyAction StrictHandling "
    "get_default_load_sharded_strategy get_default_save_common_strategy "
    "get_default_save_sharded_strategy get_default_strategy load load_common_state_dict "
    "load_content_metadata load_plain_tensors load_sharded_metadata load_tensors_metadata "
    "remove_sharded_tensors save",
    ".strategies.async_utils": "AsyncCallsQueue AsyncRequest _disable_gc _set_process_qos "
    "warmup_persistent_caller",
    ".strategies.base": "AsyncCallsQueue AsyncRequest AsyncSaveShardedStrategy CheckpointingException "
    "LoadCommonStrategy LoadShardedStrategy LoadStrategyBase SaveCommonStrategy "
    "SaveShardedStrategy SaveStrategyBase StrategyAction async_calls default_strategies "
    "get_default_strategy register_default_strategy",
    ".strategies.cached_metadata_filesystem_reader": "CachedMetadataFileSystemReader",
    ".strategies.checkpointable": "ShardedTensor",
    ".strategies.common": "COMMON_STATE_FNAME LoadCommonStrategy SaveCommonStrategy TorchCommonLoadStrategy "
    "TorchCommonSaveStrategy load_common register_default_common_strategies",
    ".strategies.filesystem_async": "FileSystemWriterAsync get_write_results_queue",
    ".strategies.nvrx": "has_nvrx_async_support make_nvrx_async_request",
    ".strategies.fully_parallel": "AsyncSaveShardedStrategy FullyParallelLoadStrategyWrapper "
    "FullyParallelSaveStrategyWrapper LoadShardedStrategy",
    ".strategies.state_dict_saver": "save_state_dict_async_finalize save_state_dict_async_plan verify_global_md_reuse",
    ".strategies.tensorstore": "TensorStoreLoadShardedStrategy",
    ".strategies.torch": "AsyncSaveShardedStrategy CachedMetadataFileSystemReader FileSystemWriterAsync "
    "LoadShardedStrategy MCoreMetadata MCoreSavePlan TorchDistLoadShardedStrategy TorchDistSaveShardedStrategy "
    "_get_filesystem_reader register_default_torch_strategies",
    ".strategies.two_stage": "TwoStageDataParallelLoadShardedStrategy",
    ".strategies.zarr": "LoadShardedStrategy ZarrLoadShardedStrategy ZarrSaveShardedStrategy",
    ".tensor_aware_state_dict": "MCoreTensorAwareStateDict",
    ".utils": "LocalNonpersistentObject ShardedBase ShardedObject ShardedTensor "
    "ShardedTensorFactory _ShardId _clean_metadata_for_serialization _sharded_object_id "
    "_sharded_tensor_shard_id add_prefix_for_sharding apply_prefix_mapping "
    "extract_matching_values extract_nonpersistent extract_sharded_base "
    "extract_sharded_tensors extract_sharded_tensors_and_factories "
    "extract_sharded_tensors_or_nonpersistent replace_prefix_for_sharding zip_strict",
    ".validation": "StrictHandling parse_strict_flag validate_sharded_objects_handling verify_checkpoint "
    "verify_checkpoint_and_load_strategy verify_integrity_manifest",
}
"""What programs import, by module: among others what Megatron-LM's training of 0.17 to 0.19 does."""

REFUSED = {
    row: REFUSALS[source] for row, source in SOURCES.items() if source in REFUSALS
}

MAIN = {
    ".serialization.load": "sharded_state_dict checkpoint_dir sharded_strategy validate_access_integrity strict "
    "verify_integrity process_group",
    ".serialization.save": "sharded_state_dict checkpoint_dir sharded_strategy validate_access_integrity "
    "async_sharded_save preprocess_common_before_consistancy_check content_metadata async_strategy "
    "verify_integrity",
    ".serialization.load_common_state_dict": "checkpoint_dir",
    ".serialization.load_sharded_metadata": "checkpoint_dir sharded_strategy",
    ".serialization.load_tensors_metadata": "checkpoint_dir sharded_strategy",
    ".serialization.load_plain_tensors": "checkpoint_dir",
    ".serialization.load_content_metadata": "checkpoint_dir preloaded_state_dict",
    ".serialization.remove_sharded_tensors": "checkpoint_dir key_prefix",
    ".serialization.get_default_save_sharded_strategy": "backend version",
    ".serialization.get_default_load_sharded_strategy": "checkpoint_dir",
    ".strategies.torch.TorchDistSaveShardedStrategy": "backend version keep_only_main_replica thread_count "
    "cached_metadata separation_hint cpu_shm_mode",
    ".strategies.torch.TorchDistLoadShardedStrategy": "cache_metadata checkpoint_name stream_ckpt_dequant",
    ".strategies.torch.TorchDistSaveShardedStrategy.save": "sharded_state_dict checkpoint_dir async_strategy",
    ".strategies.torch.TorchDistSaveShardedStrategy.async_save": "sharded_state_dict checkpoint_dir "
    "async_strategy",
    ".strategies.torch.TorchDistLoadShardedStrategy.load": "sharded_state_dict checkpoint_dir async_strategy",
    ".strategies.fully_parallel.FullyParallelSaveStrategyWrapper": "strategy parallelization_group "
    "do_cache_distribution validate_access_integrity pg_cache_path pg_cache_create backend version",
    ".strategies.async_utils.AsyncCallsQueue.warmup_persistent_caller": "rank mp_mode cpu_priority io_priority",
    ".strategies.cached_metadata_filesystem_reader.CachedMetadataFileSystemReader": "path cache_metadata",
    ".strategies.filesystem_async.get_write_results_queue": "mp_mode",
    ".strategies.nvrx.make_nvrx_async_request": "async_request_cls async_fn async_fn_args finalize_fns "
    "async_fn_kwargs preload_fn",
    ".strategies.fully_parallel.FullyParallelLoadStrategyWrapper": "strategy parallelization_group "
    "do_cache_distribution exchange_algo validate_access_integrity pg_cache_path pg_cache_create "
    "per_rank_object_load",
    ".strategies.state_dict_saver.save_state_dict_async_plan": "state_dict storage_writer process_group "
    "coordinator_rank planner cached_ckpt_structure loaded_all_plans",
    ".validation.verify_checkpoint": "checkpoint_dir",
    ".strategies.common.load_common": "checkpoint_dir",
}
"""Calls as Megatron-Core's main branch of August 2026 makes them (the arguments that are known)."""


def found(path: str) -> Any:
    module = max((m for m in MODULES if path == m or path.startswith(f"{m}.")), key=len)
    value: Any = import_module(f"megackpt.megatron{module}")
    for name in filter(None, path.removeprefix(module).split(".")):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("module", NAMES)
def test_what_programs_import_is_there(module: str) -> None:
    for name in NAMES[module].split():
        assert found(f"{module}.{name}") is not None


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_attributes_of_their_packages(module: str) -> None:
    assert found(module) is import_module(f"megackpt.megatron{module}")


def test_a_new_process_imports_a_module_by_its_full_name_and_what_it_needs_only() -> (
    None
):
    program = (
        "from megackpt.megatron.strategies.base import *\n"
        "import megackpt.megatron.strategies.torch as module, pickle, sys\n"
        "assert AsyncSaveShardedStrategy.__name__ and '_ShardId' not in dir()\n"
        "assert 'torch.distributed.checkpoint' not in sys.modules\n"
        "assert 'FileSystemWriterAsync' in dir(module)\n"
        "assert 'torch.distributed.checkpoint' not in sys.modules\n"
        "assert module.FileSystemWriterAsync.__module__ == 'megackpt.megatron.torch_dcp'\n"
        "name = b'cmegackpt.megatron.strategies.zarr\\nZarrLoadShardedStrategy\\n.'\n"
        "assert pickle.loads(name).__name__ == 'ZarrLoadShardedStrategy'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_module_that_is_nowhere() -> None:
    for name in ("nothing", "strategies.nothing", "mapping.nothing"):
        with pytest.raises(ModuleNotFoundError, match=f"megackpt.megatron.{name}"):
            import_module(f"megackpt.megatron.{name}")


def test_names_that_are_nowhere() -> None:
    for module in ("", ".strategies", ".utils"):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            found(f"{module}.nothing")


def test_aliases_are_the_same_objects() -> None:
    assert megatron.ShardedTensor is megackpt.ShardedTensor
    assert found(".mapping.ShardedTensorFactory") is megackpt.ShardedTensorFactory
    assert found(".core.CheckpointingException") is megackpt.CheckpointingException
    assert found(".strategies.async_utils.AsyncCallsQueue") is megackpt.AsyncCallsQueue
    assert found(".validation.StrictHandling") is megackpt.StrictHandling


@pytest.mark.parametrize("path", MAIN)
def test_signatures_of_the_main_branch_are_taken(path: str) -> None:
    inspect.signature(found(path)).bind_partial(**dict.fromkeys(MAIN[path].split()))


def defined(package: str) -> set[str]:
    """The public functions and classes of a release's modules, by their names in full."""
    folder = ROOT / ".peers" / package / "core" / "dist_checkpointing"
    return {
        ".".join(
            [
                *(part for part in file.relative_to(folder).with_suffix("").parts),
                node.name,
            ]
        )
        for file in folder.rglob("*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
    }


@pytest.mark.megatron
def test_all_functions_and_classes_of_0_16_are_in_the_table() -> None:
    assert len(defined("megatron")) > 100
    assert defined("megatron") <= {".".join(row) for row in SOURCES}


@pytest.mark.megatron
def test_of_0_12_the_table_lacks_steps_of_its_formats() -> None:
    lacking = defined("mcore-0.12.3/megatron") - {".".join(row) for row in SOURCES}
    assert "strategies.zarr.pad_to_expected_shape" in lacking
    assert all(
        name.startswith("strategies.") and name.split(".")[-1].islower()
        for name in lacking
    )


@pytest.mark.parametrize(("module", "name"), REFUSED)
def test_what_is_refused_imports_and_says_why(module: str, name: str) -> None:
    refused = found(f".{module}.{name}")
    assert refused is found(f".{module}.{name}")
    assert not isinstance(7, refused)
    told = rf"^{re.escape(module)}\.{name} is not offered by megackpt: {re.escape(REFUSED[module, name])}$"
    with pytest.raises(megackpt.CheckpointingException, match=told):
        refused(1, a=2)
    with pytest.raises(megackpt.CheckpointingException, match=told):
        refused.from_state_dict({})


def test_the_documentation_lists_what_is_refused() -> None:
    section = GUIDE.partition("### Refused")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \|", section, re.MULTILINE)
    assert {
        (module, name)
        for module, names in rows
        for name in re.findall(r"`(\w+)`", names)
    } == set(REFUSED)


def test_parts_of_a_state() -> None:
    tensor = megackpt.ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 1, 2))
    factory = megackpt.ShardedTensorFactory(
        "f", torch.ones(2), lambda *_: [], lambda x: x
    )
    thing, local = (
        megackpt.ShardedObject("o", 1, (1,), (0,)),
        megackpt.LocalNonpersistentObject(3),
    )
    state = {"a": {"w": tensor, "f": factory}, "o": thing, "l": local, "n": 1}
    utils = found(".utils")
    assert utils.extract_sharded_tensors(state) == (
        {"a": {"w": tensor}},
        {"a": {"f": factory}, "o": thing, "l": local, "n": 1},
    )
    assert utils.extract_sharded_tensors_and_factories(state)[0] == {
        "a": {"w": tensor, "f": factory}
    }
    assert utils.extract_sharded_base(state)[1] == {"l": local, "n": 1}
    assert utils.extract_nonpersistent(state)[0] == {"l": local}
    assert utils.extract_sharded_tensors_or_nonpersistent(state)[1] == {
        "o": thing,
        "n": 1,
    }
    assert utils._sharded_tensor_shard_id(tensor) == ("w", (2,), None)
    assert utils._sharded_object_id(thing) == ("o", (0,), (1,))
    assert utils._clean_metadata_for_serialization(
        {"dp_cp_group": object(), "a": 1}
    ) == {"a": 1}
    assert utils._clean_metadata_for_serialization(None) is None
    with pytest.raises(ValueError, match="shorter"):
        list(utils.zip_strict([1, 2], [3]))


def test_an_optimizers_groups_stay_lists_of_dicts() -> None:
    """Megatron's layer-wise optimizer walks through them; others exclude state by one word."""
    weight = torch.nn.Parameter(torch.ones(2))
    param = megackpt.ShardedTensor.from_rank_offsets("w", weight)
    values = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2)}
    groups = [
        {"params": [0], "lr": 0.1},
        {"params": [], "lr": 0.2},
    ]  # lr tells nobody apart
    given = {"state": {0: values}, "param_groups": groups}
    assert (
        found(".optimizer.optim_state_to_sharding_state")(
            given, {0: param}, exclude_keys="step"
        )
        is None
    )
    assert given.keys() == {"state", "param_groups"}
    assert [(name, s.key) for name, s in given["state"][0].items()] == [
        ("exp_avg", "optimizer.state.exp_avg.w")
    ]
    assert [
        {**g, "params": g["params"].unwrap()} for g in given["param_groups"]
    ] == groups
    assert all(type(g["params"]) is list for g in groups)
