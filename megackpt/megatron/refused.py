"""Megatron's names behind which there is nothing here: they import, and to use one raises a sentence that says why."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from megackpt.errors import CheckpointingException
from megackpt.strategies import COMMON_IS_KEPT

_STEP = "it is a step of save or load, which take a state apart and check it by themselves: call these"
_EXCHANGE = "who writes, who reads, and how ranks hand it on, is planned within save and load: call these"
_DCP = "tensors do not travel through torch DCP here: call save or load, or use the doors of megackpt.dcp"
_WORKER = "the worker of an AsyncCallsQueue is its own: give AsyncCallsQueue(persistent=...) instead"
_DIGESTS = "digests of all that a save writes are kept by itself: there is nothing to add"
_MEMORY = (
    "checkpoints in memory are not kept here: save asynchronously, or uninstall() and use Megatron's own"
)
_FLAT = "flattened tensors of old checkpoints come back as tensors of the model's shapes: just load them"
_FP8 = "tensors of TransformerEngine's float8 are not taken: dequantise them"
_DEBUG = "watch a save by megackpt.watching, or by the logger 'megackpt'"
_LINE = "Megatron-Core 0.19 has it no more: write the line of Python that it is"

_TABLE = (
    ("core", "save_config", "metadata.json is written last of all, when the rest is complete: call save"),
    ("dict_utils", "dict_map dict_map_with_key inspect_types nested_items_iter", _LINE),
    ("exchange_utils", "ShardDistribution distribute_shards_to_ranks exchange_by_distribution", _EXCHANGE),
    ("exchange_utils", "determine_main_replica_uniform_distribution is_float8tensor", _EXCHANGE),
    ("exchange_utils", "exchange_loaded_objects_gather_object exchange_loaded_tensors_broadcast", _EXCHANGE),
    ("exchange_utils", "exchange_loaded_tensors_gather_object", _EXCHANGE),
    ("exchange_utils", "exchange_loaded_tensors_gather_rounds", _EXCHANGE),
    ("state_dict_utils", "filter_out_empty_flatten_tensor load_preprocess save_preprocess", _STEP),
    ("strategies.async_utils", "AsyncCaller PersistentAsyncCaller TemporalAsyncCaller", _WORKER),
    ("strategies.common", "save_common", COMMON_IS_KEPT),
    ("strategies.filesystem_async", "get_write_results_queue", _DCP),
    ("strategies.fully_parallel", "distribute_main_replicas_with_precomputed_distribution", _EXCHANGE),
    ("strategies.resharding", "TensorReformulationMetadata is_nd_flattened_tensor", _FLAT),
    ("strategies.resharding", "apply_nd_flattened_tensors_reformulation", _FLAT),
    ("strategies.resharding", "nd_flattened_tensor_reformulated_global_shape", _FLAT),
    ("strategies.resharding", "restore_nd_flattened_tensors_formulation", _FLAT),
    ("strategies.torch", "MCoreLoadPlanner MCoreSavePlanner flatten_state_dict get_async_strategy", _DCP),
    ("strategies.torch", "mcore_to_pyt_state_dict sharded_tensor_to_torch_sharded_tensor", _DCP),
    ("tensor_aware_state_dict", "MCoreTensorAwareStateDict", _MEMORY),
    ("utils", "debug_msg debug_time logger_stack", _DEBUG),
    ("utils", "force_all_tensors_to_non_fp8", _FP8),
    ("validation", "adjust_non_strict_load determine_global_metadata validate_sharding_integrity", _STEP),
    ("validation", "maybe_report_missing_and_unexpected_keys validate_integrity_and_strict_load", _STEP),
    ("validation", "save_integrity_manifest", _DIGESTS),
)

REFUSED = {(module, name): why for module, names, why in _TABLE for name in names.split()}
"""(module, name) -> why. The documentation lists the same."""


class Refused(type):
    """The class of the stand-ins: what is asked of one raises, but for what Python asks of any class."""

    why: str

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise CheckpointingException(cls.why)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{cls.__name__} has no {name}")
        raise CheckpointingException(cls.why)


def refusing(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module (by its full name): a stand-in for each of its names in the table."""
    short = module.removeprefix("megackpt.megatron.")

    def attribute(name: str) -> Any:
        if (short, name) not in REFUSED:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        told = f"{short}.{name} is not offered by megackpt: {REFUSED[short, name]}"
        made = vars(sys.modules[module])[name] = Refused(name, (), {"__module__": module, "why": told})
        return made

    return attribute
