"""The names of ``megatron.core.dist_checkpointing``, module by module, and their counterparts here.

A section has the name of Megatron's module. A row has the module of megackpt that defines names,
and the names; or the reason why they are refused: such a name can be imported, and using it raises.
"""

from __future__ import annotations

from configparser import ConfigParser

from megackpt.strategies import COMMON_IS_KEPT

REFUSALS = {
    "refused-stage": (
        "it is a stage of save or load, which take a state apart and check it by themselves: "
        "call these"
    ),
    "refused-dcp": (
        "tensors do not pass through torch DCP here: call save or load, or use the planners, "
        "readers and writers of megackpt.dcp"
    ),
    "refused-writer": (
        "it is a part of Megatron's own writer, which saves here do not use: call save, or "
        "save_state_dict_async_plan and the writer's get_save_function_and_args"
    ),
    "refused-nvrx": (
        "saves do not use nvidia-resiliency-ext: get_async_strategy returns megackpt's own classes"
    ),
    "refused-worker": (
        "an AsyncCallsQueue starts its own worker: give AsyncCallsQueue(persistent=...) "
        "instead"
    ),
    "refused-flat": (
        "flattened tensors of old checkpoints are loaded as tensors of the model's shapes: "
        "call load"
    ),
    "refused-common": COMMON_IS_KEPT,
    "refused-config": "save writes metadata.json with the rest of a checkpoint: call save",
    "refused-line": "Megatron-Core 0.19 no longer has it: write the line of Python that it is",
    "refused-debug": "watch a save by megackpt.watching, or by the logger 'megackpt'",
    "refused-fp8": "float8 tensors of TransformerEngine are not supported: dequantise them",
    "refused-digests": "save always keeps digests of all that it writes: there is nothing to add",
}
"""Row -> the error message for its names."""

TABLE = """
[core]
megackpt: CheckpointingException check_is_distributed_checkpoint
megackpt.strategies: CheckpointingConfig
megackpt.megatron.save_load: CONFIG_FNAME maybe_load_config
refused-config: save_config

[dict_utils]
megackpt.tree: dict_list_map_inplace dict_list_map_outplace diff extract_matching_values
    map_reduce merge nested_values
refused-line: dict_map dict_map_with_key inspect_types nested_items_iter

[exchange_utils]
megackpt.megatron.shard_distribution: ShardDistribution
    determine_main_replica_uniform_distribution distribute_shards_to_ranks exchange_by_distribution
    exchange_loaded_objects_gather_object exchange_loaded_tensors_broadcast
    exchange_loaded_tensors_gather_object exchange_loaded_tensors_gather_rounds
refused-fp8: is_float8tensor

[mapping]
megackpt: CheckpointingException LocalNonpersistentObject ShardedObject ShardedTensor
    ShardedTensorFactory
megackpt.state: CommonStateDict FactoryBuildFn FactoryMergeFn ReplicaId ShardedBase
    ShardedStateDict StateDict apply_factories apply_factory_merges is_main_replica

[optimizer]
megackpt: LocalNonpersistentObject
megackpt.adapters.optimizer: KEEP_VARS_HINT get_optim_param_to_id_map
    get_param_id_to_sharded_param_map make_sharded_optimizer_tensor
megackpt.megatron.state_parts: optim_state_to_sharding_state

[serialization]
megackpt: AsyncRequest StrictHandling load_common_state_dict load_content_metadata
    load_plain_tensors load_sharded_metadata load_tensors_metadata remove_sharded_tensors
megackpt.loader.metadata: CkptShardedMetadata
megackpt.state: StateDict
megackpt.strategies: StrategyAction
megackpt.megatron.save_load: _legacy_common_state_exists get_default_load_sharded_strategy
    get_default_save_common_strategy get_default_save_sharded_strategy load save
megackpt.megatron.strategy_classes: get_default_strategy

[state_dict_utils]
refused-stage: filter_out_empty_flatten_tensor load_preprocess save_preprocess

[strategies.async_utils]
megackpt: AsyncCallsQueue AsyncRequest
megackpt.megatron.async_names: _disable_gc _set_process_qos warmup_persistent_caller
refused-worker: AsyncCaller PersistentAsyncCaller TemporalAsyncCaller

[strategies.base]
megackpt: AsyncCallsQueue AsyncRequest CheckpointingException
megackpt.strategies: StrategyAction default_strategies register_default_strategy
megackpt.megatron.strategy_classes: AsyncSaveShardedStrategy LoadCommonStrategy
    LoadShardedStrategy LoadStrategyBase SaveCommonStrategy SaveShardedStrategy SaveStrategyBase
    async_calls get_default_strategy

[strategies.cached_metadata_filesystem_reader]
megackpt.megatron.torch_dcp: CachedMetadataFileSystemReader

[strategies.checkpointable]
megackpt: ShardedTensor
refused-dcp: CheckpointableShardedTensor LocalShardsContainer

[strategies.common]
megackpt.megatron.save_load: COMMON_STATE_FNAME load_common
megackpt.megatron.strategy_classes: LoadCommonStrategy SaveCommonStrategy
    TorchCommonLoadStrategy TorchCommonSaveStrategy register_default_common_strategies
refused-common: save_common

[strategies.filesystem_async]
megackpt.megatron.torch_dcp: FileSystemWriterAsync
megackpt.megatron.async_names: _disable_gc _results_queue get_write_results_queue
refused-writer: WriteBucket _process_memory _split_by_separation_hint _split_by_size_and_type

[strategies.fully_parallel]
megackpt.megatron.strategy_classes: AsyncSaveShardedStrategy FullyParallelLoadStrategyWrapper
    FullyParallelSaveStrategyWrapper LoadShardedStrategy
megackpt.megatron.shard_distribution: distribute_main_replicas_with_precomputed_distribution
megackpt.megatron.state_parts: _sharded_object_id _sharded_tensor_shard_id

[strategies.nvrx]
megackpt.megatron.async_names: has_nvrx_async_support make_nvrx_async_request
refused-nvrx: is_nvrx_min_version

[strategies.resharding]
refused-flat: TensorReformulationMetadata apply_nd_flattened_tensors_reformulation
    is_nd_flattened_tensor nd_flattened_tensor_reformulated_global_shape
    restore_nd_flattened_tensors_formulation

[strategies.state_dict_saver]
megackpt.dcp: save_state_dict_async_finalize save_state_dict_async_plan verify_global_md_reuse

[strategies.tensorstore]
megackpt.megatron.strategy_classes: TensorStoreLoadShardedStrategy

[strategies.torch]
megackpt.megatron.strategy_classes: AsyncSaveShardedStrategy LoadShardedStrategy MCoreMetadata
    MCoreSavePlan TorchDistLoadShardedStrategy TorchDistSaveShardedStrategy
    register_default_torch_strategies
megackpt.megatron.torch_dcp: CachedMetadataFileSystemReader FileSystemWriterAsync
    _get_filesystem_reader get_async_strategy
refused-dcp: CheckpointableShardedTensor LocalShardsContainer MCoreLoadPlanner MCoreSavePlanner
    _replace_sharded_keys_with_state_dict_keys _replace_state_dict_keys_with_sharded_keys
    _unwrap_pyt_sharded_tensor flatten_state_dict mcore_to_pyt_state_dict
    sharded_tensor_to_torch_sharded_tensor

[strategies.two_stage]
megackpt.megatron.strategy_classes: TwoStageDataParallelLoadShardedStrategy

[strategies.zarr]
megackpt.megatron.strategy_classes: LoadShardedStrategy ZarrLoadShardedStrategy
    ZarrSaveShardedStrategy

[tensor_aware_state_dict]
megackpt.megatron.local_checkpoint: MCoreTensorAwareStateDict

[utils]
megackpt: LocalNonpersistentObject ShardedObject ShardedTensor ShardedTensorFactory
megackpt.state: ShardedBase
megackpt.tree: extract_matching_values
megackpt.adapters.modules: add_prefix_for_sharding apply_prefix_mapping
    replace_prefix_for_sharding
megackpt.megatron.state_parts: _ShardId _clean_metadata_for_serialization _sharded_object_id
    _sharded_tensor_shard_id extract_nonpersistent extract_sharded_base extract_sharded_tensors
    extract_sharded_tensors_and_factories extract_sharded_tensors_or_nonpersistent zip_strict
refused-debug: debug_msg debug_time logger_stack
refused-fp8: force_all_tensors_to_non_fp8

[validation]
megackpt: StrictHandling
megackpt.planning.strict: parse_strict_flag
megackpt.megatron.save_load: validate_sharded_objects_handling verify_checkpoint
    verify_checkpoint_and_load_strategy verify_integrity_manifest
refused-stage: adjust_non_strict_load determine_global_metadata
    maybe_report_missing_and_unexpected_keys validate_integrity_and_strict_load
    validate_sharding_integrity
refused-digests: save_integrity_manifest
"""

_parsed = ConfigParser()
_parsed.read_string(TABLE)
SOURCES = {
    (module, name): source
    for module in _parsed.sections()
    for source, names in _parsed[module].items()
    for name in names.split()
}
"""(Megatron's module, name) -> the module that defines the name here, or a key of REFUSALS."""

MODULES = ("", ".strategies", *(f".{module}" for module in _parsed.sections()))
"""What follows the package's name in the names of its modules. Packages precede their modules."""
