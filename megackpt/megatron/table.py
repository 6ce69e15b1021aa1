"""The names of ``megatron.core.dist_checkpointing``, module by module: what each one is here.

A row is (Megatron's module, where its names come from, the names). They come from a module of
megackpt that defines them, or are refused: such a name can be imported, and using it raises.
"""

from __future__ import annotations

from typing import NamedTuple

from megackpt.strategies import COMMON_IS_KEPT


class Refusal(NamedTuple):
    """Why a name is not offered. The text is the error message."""

    why: str


_CLASSES = "megackpt.megatron.strategy_classes"
_FUNCTIONS = "megackpt.megatron.save_load"
_PARTS = "megackpt.megatron.state_parts"
_TORCH_DCP = "megackpt.megatron.torch_dcp"

_STEP = Refusal(
    "it is a step of save or load, which take a state apart and check it by themselves: call these"
)
_EXCHANGE = Refusal(
    "who writes, who reads, and how ranks exchange data is planned within save and load: call these"
)
_DCP = Refusal(
    "tensors do not pass through torch DCP here: call save or load, or use the planners, readers "
    "and writers of megackpt.dcp"
)
_WORKER = Refusal(
    "an AsyncCallsQueue starts its own worker: give AsyncCallsQueue(persistent=...) instead"
)
_FLAT = Refusal(
    "flattened tensors of old checkpoints are loaded as tensors of the model's shapes: call load"
)
_COMMON = Refusal(COMMON_IS_KEPT)
_CONFIG = Refusal(
    "metadata.json is written last of all, when the rest is complete: call save"
)
_LINE = Refusal(
    "Megatron-Core 0.19 no longer has it: write the line of Python that it is"
)
_MEMORY = Refusal(
    "checkpoints in memory are not supported: save asynchronously, or uninstall() and use Megatron's own"
)
_DEBUG = Refusal("watch a save by megackpt.watching, or by the logger 'megackpt'")
_FP8 = Refusal("float8 tensors of TransformerEngine are not supported: dequantise them")
_DIGESTS = Refusal(
    "save always keeps digests of all that it writes: there is nothing to add"
)

TABLE: tuple[tuple[str, str | Refusal, str], ...] = (
    ("core", "megackpt", "CheckpointingException check_is_distributed_checkpoint"),
    ("core", "megackpt.strategies", "CheckpointingConfig"),
    ("core", _FUNCTIONS, "CONFIG_FNAME maybe_load_config"),
    ("core", _CONFIG, "save_config"),
    (
        "dict_utils",
        "megackpt.tree",
        "dict_list_map_inplace dict_list_map_outplace diff",
    ),
    (
        "dict_utils",
        "megackpt.tree",
        "extract_matching_values map_reduce merge nested_values",
    ),
    ("dict_utils", _LINE, "dict_map dict_map_with_key inspect_types nested_items_iter"),
    (
        "exchange_utils",
        _EXCHANGE,
        "ShardDistribution determine_main_replica_uniform_distribution",
    ),
    (
        "exchange_utils",
        _EXCHANGE,
        "distribute_shards_to_ranks exchange_by_distribution",
    ),
    ("exchange_utils", _EXCHANGE, "exchange_loaded_objects_gather_object"),
    ("exchange_utils", _EXCHANGE, "exchange_loaded_tensors_broadcast"),
    ("exchange_utils", _EXCHANGE, "exchange_loaded_tensors_gather_object"),
    (
        "exchange_utils",
        _EXCHANGE,
        "exchange_loaded_tensors_gather_rounds is_float8tensor",
    ),
    ("mapping", "megackpt", "CheckpointingException LocalNonpersistentObject"),
    ("mapping", "megackpt", "ShardedObject ShardedTensor ShardedTensorFactory"),
    (
        "mapping",
        "megackpt.state",
        "CommonStateDict FactoryBuildFn FactoryMergeFn ReplicaId",
    ),
    (
        "mapping",
        "megackpt.state",
        "ShardedBase ShardedStateDict StateDict apply_factories",
    ),
    ("mapping", "megackpt.state", "apply_factory_merges is_main_replica"),
    ("optimizer", "megackpt", "LocalNonpersistentObject"),
    (
        "optimizer",
        "megackpt.adapters.optimizer",
        "KEEP_VARS_HINT get_optim_param_to_id_map",
    ),
    ("optimizer", "megackpt.adapters.optimizer", "get_param_id_to_sharded_param_map"),
    ("optimizer", "megackpt.adapters.optimizer", "make_sharded_optimizer_tensor"),
    ("optimizer", _PARTS, "optim_state_to_sharding_state"),
    ("serialization", "megackpt", "AsyncRequest StrictHandling load_common_state_dict"),
    (
        "serialization",
        "megackpt",
        "load_content_metadata load_plain_tensors load_sharded_metadata",
    ),
    ("serialization", "megackpt", "load_tensors_metadata remove_sharded_tensors"),
    ("serialization", "megackpt.loader.metadata", "CkptShardedMetadata"),
    ("serialization", "megackpt.strategies", "StrategyAction"),
    ("serialization", _FUNCTIONS, "get_default_load_sharded_strategy"),
    ("serialization", _FUNCTIONS, "get_default_save_common_strategy"),
    ("serialization", _FUNCTIONS, "get_default_save_sharded_strategy load save"),
    ("serialization", _CLASSES, "get_default_strategy"),
    (
        "state_dict_utils",
        _STEP,
        "filter_out_empty_flatten_tensor load_preprocess save_preprocess",
    ),
    ("strategies.async_utils", "megackpt", "AsyncCallsQueue AsyncRequest"),
    ("strategies.async_utils", _CLASSES, "warmup_persistent_caller"),
    (
        "strategies.async_utils",
        _WORKER,
        "AsyncCaller PersistentAsyncCaller TemporalAsyncCaller",
    ),
    (
        "strategies.base",
        "megackpt",
        "AsyncCallsQueue AsyncRequest CheckpointingException",
    ),
    ("strategies.base", "megackpt.strategies", "StrategyAction default_strategies"),
    ("strategies.base", "megackpt.strategies", "register_default_strategy"),
    ("strategies.base", _CLASSES, "AsyncSaveShardedStrategy LoadCommonStrategy"),
    (
        "strategies.base",
        _CLASSES,
        "LoadShardedStrategy LoadStrategyBase SaveCommonStrategy",
    ),
    ("strategies.base", _CLASSES, "SaveShardedStrategy SaveStrategyBase async_calls"),
    ("strategies.base", _CLASSES, "get_default_strategy"),
    (
        "strategies.cached_metadata_filesystem_reader",
        _TORCH_DCP,
        "CachedMetadataFileSystemReader",
    ),
    (
        "strategies.checkpointable",
        _TORCH_DCP,
        "CheckpointableShardedTensor LocalShardsContainer",
    ),
    ("strategies.checkpointable", "megackpt", "ShardedTensor"),
    ("strategies.common", _FUNCTIONS, "COMMON_STATE_FNAME load_common"),
    ("strategies.common", _CLASSES, "LoadCommonStrategy SaveCommonStrategy"),
    ("strategies.common", _CLASSES, "TorchCommonLoadStrategy TorchCommonSaveStrategy"),
    ("strategies.common", _CLASSES, "register_default_common_strategies"),
    ("strategies.common", _COMMON, "save_common"),
    ("strategies.filesystem_async", _TORCH_DCP, "FileSystemWriterAsync"),
    ("strategies.filesystem_async", _DCP, "get_write_results_queue"),
    ("strategies.fully_parallel", _CLASSES, "AsyncSaveShardedStrategy"),
    ("strategies.fully_parallel", _CLASSES, "FullyParallelLoadStrategyWrapper"),
    (
        "strategies.fully_parallel",
        _CLASSES,
        "FullyParallelSaveStrategyWrapper LoadShardedStrategy",
    ),
    (
        "strategies.fully_parallel",
        _EXCHANGE,
        "distribute_main_replicas_with_precomputed_distribution",
    ),
    ("strategies.resharding", _FLAT, "TensorReformulationMetadata"),
    ("strategies.resharding", _FLAT, "apply_nd_flattened_tensors_reformulation"),
    ("strategies.resharding", _FLAT, "is_nd_flattened_tensor"),
    ("strategies.resharding", _FLAT, "nd_flattened_tensor_reformulated_global_shape"),
    ("strategies.resharding", _FLAT, "restore_nd_flattened_tensors_formulation"),
    ("strategies.state_dict_saver", "megackpt.dcp", "save_state_dict_async_finalize"),
    ("strategies.state_dict_saver", "megackpt.dcp", "save_state_dict_async_plan"),
    ("strategies.state_dict_saver", "megackpt.dcp", "verify_global_md_reuse"),
    ("strategies.tensorstore", _CLASSES, "TensorStoreLoadShardedStrategy"),
    (
        "strategies.torch",
        _CLASSES,
        "AsyncSaveShardedStrategy LoadShardedStrategy MCoreMetadata",
    ),
    ("strategies.torch", _CLASSES, "MCoreSavePlan TorchDistLoadShardedStrategy"),
    ("strategies.torch", _CLASSES, "TorchDistSaveShardedStrategy"),
    ("strategies.torch", _CLASSES, "register_default_torch_strategies"),
    (
        "strategies.torch",
        _TORCH_DCP,
        "CachedMetadataFileSystemReader CheckpointableShardedTensor",
    ),
    ("strategies.torch", _TORCH_DCP, "FileSystemWriterAsync LocalShardsContainer"),
    ("strategies.torch", _DCP, "MCoreLoadPlanner MCoreSavePlanner flatten_state_dict"),
    ("strategies.torch", _DCP, "get_async_strategy mcore_to_pyt_state_dict"),
    ("strategies.torch", _DCP, "sharded_tensor_to_torch_sharded_tensor"),
    ("strategies.two_stage", _CLASSES, "TwoStageDataParallelLoadShardedStrategy"),
    ("strategies.zarr", _CLASSES, "LoadShardedStrategy ZarrLoadShardedStrategy"),
    ("strategies.zarr", _CLASSES, "ZarrSaveShardedStrategy"),
    ("tensor_aware_state_dict", _MEMORY, "MCoreTensorAwareStateDict"),
    ("utils", "megackpt", "LocalNonpersistentObject"),
    ("utils", "megackpt", "ShardedObject ShardedTensor ShardedTensorFactory"),
    ("utils", "megackpt.state", "ShardedBase"),
    ("utils", "megackpt.tree", "extract_matching_values"),
    (
        "utils",
        "megackpt.adapters.modules",
        "add_prefix_for_sharding apply_prefix_mapping",
    ),
    ("utils", "megackpt.adapters.modules", "replace_prefix_for_sharding"),
    ("utils", _PARTS, "_ShardId _clean_metadata_for_serialization _sharded_object_id"),
    (
        "utils",
        _PARTS,
        "_sharded_tensor_shard_id extract_nonpersistent extract_sharded_base",
    ),
    ("utils", _PARTS, "extract_sharded_tensors extract_sharded_tensors_and_factories"),
    ("utils", _PARTS, "extract_sharded_tensors_or_nonpersistent zip_strict"),
    ("utils", _DEBUG, "debug_msg debug_time logger_stack"),
    ("utils", _FP8, "force_all_tensors_to_non_fp8"),
    ("validation", "megackpt", "StrictHandling"),
    ("validation", "megackpt.planning.strict", "parse_strict_flag"),
    ("validation", _FUNCTIONS, "validate_sharded_objects_handling verify_checkpoint"),
    (
        "validation",
        _FUNCTIONS,
        "verify_checkpoint_and_load_strategy verify_integrity_manifest",
    ),
    ("validation", _STEP, "adjust_non_strict_load determine_global_metadata"),
    ("validation", _STEP, "maybe_report_missing_and_unexpected_keys"),
    (
        "validation",
        _STEP,
        "validate_integrity_and_strict_load validate_sharding_integrity",
    ),
    ("validation", _DIGESTS, "save_integrity_manifest"),
)
