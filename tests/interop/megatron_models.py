"""Models and optimizers of the real Megatron-Core 0.16 (GPT of 0.12, too), built on the CPU, in processes of their own.

Packages of GPU kernels that Megatron imports, or asks to be there, when it builds some of these (Triton, mamba_ssm,
grouped_gemm), and einops, are stood in for by empty ones: nothing is computed here, only declared, saved and loaded.
"""

from __future__ import annotations

import gc
import importlib
import math
import sys
import types
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.distributed import distributed_c10d

CORE = "megatron.core"
USED = (
    *("distributed", "optimizer", "tensor_parallel.random", "transformer.moe.experts"),
    *("ssm.mamba_block", "ssm.mlp_layer"),
    *("models.gpt", "models.gpt.gpt_layer_specs", "models.mamba"),
    *("models.bert.bert_model", "models.bert.bert_layer_specs", "models.T5", "models.T5.t5_spec"),
)  # fmt: skip
VOCABULARY, LENGTH, LAYERS = 32, 8, 4


class _Norm(torch.nn.Module):
    """What Megatron asks of mamba_ssm's norm when it builds: a weight."""

    def __init__(
        self, size: int, eps: float, device: Any, dtype: Any, **_: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))


class _Adam(torch.optim.Optimizer):
    """Apex's, of which the DistributedOptimizer counts on this: the step stands in the groups, not in the states."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)


def prepare(used: Sequence[str] = USED) -> types.ModuleType:
    """Megatron's ``dist_checkpointing``, with all that is used here imported, before torch is changed."""
    warnings.simplefilter("ignore")  # of packages that are not there
    absent = {
        f"{CORE}.inference.contexts.attention_context.triton.tensor_ops": (
            *("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"),
        ),
        "einops": ("rearrange", "repeat"),
        "grouped_gemm": ("ops",),
        "mamba_ssm": (),
        "mamba_ssm.ops": (),
        "mamba_ssm.ops.triton": (),
        "mamba_ssm.ops.triton.layernorm_gated": (),
        "mamba_ssm.ops.triton.ssd_combined": (
            "mamba_chunk_scan_combined",
            "mamba_split_conv1d_scan_combined",
        ),
    }
    for name, attributes in absent.items():
        module = types.ModuleType(name)
        vars(module).update({attribute: MagicMock() for attribute in attributes})
        sys.modules[name] = module
    sys.modules["mamba_ssm.ops.triton.layernorm_gated"].RMSNorm = _Norm  # type: ignore[attr-defined]
    for name in used:
        importlib.import_module(f"{CORE}.{name}")
    optimizer = sys.modules[f"{CORE}.optimizer"]
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = _Adam, False
    distributed = sys.modules[f"{CORE}.optimizer.distrib_optimizer"]
    distributed.Adam = _Adam
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True
    sys.modules[f"{CORE}.tensor_parallel.random"].CudaRNGStatesTracker.fork = (
        lambda *_: nullcontext()
    )
    from interop.megatron_shims import dist_checkpointing

    peer = dist_checkpointing()
    told = (
        torch.Tensor.type
    )  # by whose answer Megatron's optimizer knows tensors of a GPU
    torch.Tensor.type = lambda self, *to: (
        told(self, *to) if to else told(self).replace("torch.", "torch.cuda.")
    )
    gc.freeze()  # Megatron's optimizer collects garbage often, among all that was imported
    return peer


@contextmanager
def parallel(tp: int = 1, pp: int = 1, ep: int = 1) -> Iterator[None]:
    """All ranks as TP x PP x DP, experts over ``ep`` of them."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tp,
        pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp if ep == 1 else 1,
    )
    made = list(
        getattr(parallel_state, "_global_process_group_list", ())
    )  # 0.12 has none
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        for group in made:  # Megatron leaves most of them, and their threads with them
            if group in distributed_c10d._world.pg_map:
                torch.distributed.destroy_process_group(group)


def config(**options: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **{
            "num_layers": LAYERS,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
            "use_cpu_initialization": True,
            "pipeline_dtype": torch.float32,
            **options,
        }
    )


def _stage() -> dict[str, bool]:
    from megatron.core import parallel_state

    return {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }


def gpt(**options: Any) -> torch.nn.Module:
    """SwiGLU and grouped-query attention."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    asked = {
        name: options.get(name) for name in ("num_moe_experts", "moe_grouped_gemm")
    }
    llama = {
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "num_query_groups": 4,
        "add_bias_linear": False,
    }
    return GPTModel(
        config(**llama | options),
        get_gpt_layer_local_spec(
            num_experts=asked["num_moe_experts"],
            moe_grouped_gemm=asked["moe_grouped_gemm"],
        ),
        VOCABULARY,
        LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        **_stage(),
    )


def tied(**options: Any) -> torch.nn.Module:
    """Embeddings that the first and the last stage share; GELU, learned positions."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec()
    return GPTModel(
        config(**options),
        spec,
        VOCABULARY,
        LENGTH,
        share_embeddings_and_output_weights=True,
        **_stage(),
    )


def experts(grouped: bool = False, **options: Any) -> torch.nn.Module:
    routing = {
        "num_moe_experts": 4,
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": grouped,
    }
    return gpt(**routing | options)


def mixed(**options: Any) -> torch.nn.Module:
    """Dense and sparse layers in turn: keys of single layers."""
    return experts(moe_layer_freq=[0, 1] * (LAYERS // 2), **options)


def bert(**options: Any) -> torch.nn.Module:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(
        config(**options), 2, bert_layer_local_spec, VOCABULARY, LENGTH, **_stage()
    )


def t5(**options: Any) -> torch.nn.Module:
    from megatron.core.models.T5 import T5Model, t5_spec as specs

    layers = LAYERS // config().pipeline_model_parallel_size
    encoder, decoder = (
        getattr(specs, f"get_t5_{half}_with_local_block_spec")(layers)
        for half in ("encoder", "decoder")
    )
    return T5Model(
        config(**options),
        config(**options),
        encoder,
        decoder,
        VOCABULARY,
        LENGTH,
        **_stage(),
    )


def mamba(**options: Any) -> torch.nn.Module:
    """State-space layers, attention and MLP; Megatron's own specification of it asks for TransformerEngine."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.mamba import MambaModel
    from megatron.core.ssm import mamba_block, mamba_layer, mamba_mixer, mlp_layer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    mamba_block.TENorm = WrappedTorchNorm
    local = get_gpt_layer_local_spec()
    ends = mamba_mixer.MambaMixerSubmodules(
        in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
    )
    mixer = ModuleSpec(module=mamba_mixer.MambaMixer, submodules=ends)
    layer = mamba_layer.MambaLayerSubmodules(
        mixer=mixer, mamba_bda=get_bias_dropout_add
    )
    stack = mamba_block.MambaStackSubmodules(
        mamba_layer=ModuleSpec(module=mamba_layer.MambaLayer, submodules=layer),
        attention_layer=local,
        mlp_layer=ModuleSpec(module=mlp_layer.MLPLayer, submodules=local.submodules),
    )
    sizes = {"mamba_state_dim": 8, "mamba_head_dim": 4, "mamba_num_groups": 4}
    return MambaModel(
        config(**sizes | options),
        ModuleSpec(module=mamba_block.MambaStack, submodules=stack),
        VOCABULARY,
        LENGTH,
        hybrid_override_pattern="M*M-",
        **_stage(),
    )


MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gpt": gpt,
    "tied": tied,
    "experts": experts,
    "grouped": lambda **options: experts(True, **options),
    "mixed": mixed,
    "bert": bert,
    "t5": t5,
    "mamba": mamba,
}


def built(kind: str, seed: int = 0, **options: Any) -> torch.nn.Module:
    """A model whose parameters differ from rank to rank as far as they are cut, and are the same where copied."""
    model = MODELS[kind](**options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(noise(parameter, f"{seed} {place(name, parameter)}"))
    return model


def place(name: str, parameter: torch.Tensor) -> str:
    """Which piece of which parameter this is."""
    from megatron.core import parallel_state as p

    if name.endswith("word_embeddings.weight") or getattr(
        parameter, "shared_embedding", False
    ):
        return f"shared {p.get_tensor_model_parallel_rank()}"
    told = [name, p.get_pipeline_model_parallel_rank()]
    if not getattr(parameter, "allreduce", True):
        told += [
            "ep",
            p.get_expert_model_parallel_rank(),
            p.get_expert_tensor_parallel_rank(),
        ]
    elif getattr(parameter, "tensor_model_parallel", False):
        told += ["tp", p.get_tensor_model_parallel_rank()]
    return " ".join(map(str, told))


def noise(like: torch.Tensor, seed: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return torch.rand(like.shape, generator=generator).to(like.dtype)


def trained(
    kind: str, seed: int = 0, distributed: bool = True, **options: Any
) -> tuple[torch.nn.Module, Any]:
    """A model of bfloat16, and its optimizer with a state as after some steps."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    half = {
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
    }
    model = built(kind, seed, **half | options).bfloat16()
    buckets = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, bucket_size=2000
    )
    wrapped = DistributedDataParallel(model.config, buckets, model)
    adam = OptimizerConfig(
        optimizer="adam",
        lr=0.01 * (1 + seed),
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(adam, [wrapped])
    for number, part in enumerate(
        getattr(optimizer, "chained_optimizers", [optimizer])
    ):
        state = part.optimizer.state
        for group in part.optimizer.param_groups:
            group["step"] = 7 + seed
            for i, parameter in enumerate(group["params"]):
                for name in ("exp_avg", "exp_avg_sq"):
                    label = f"{seed} {name} {number} {i} {torch.distributed.get_rank()}"
                    state[parameter][name] = noise(parameter.data, label)
                parameter.data.add_(
                    0.001 * noise(parameter.data, f"{seed} master {number} {i}")
                )
    assert all(math.prod(p.shape) for p in model.parameters())
    return model, optimizer


def layerwise(kind: str, seed: int = 0) -> tuple[torch.nn.Module, Any]:
    """The same, with the optimizer that gives whole parameters to data-parallel ranks."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.layer_wise_optimizer import (
        LayerWiseDistributedOptimizer,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection

    half = {
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
    }
    model = built(kind, seed, **half).bfloat16()
    told = {
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
    }
    adam = torch.optim.AdamW(
        [{"params": list(model.parameters()), "lr": 0.01 * (1 + seed), **told}]
    )

    def filled(optimizer: Any, _: Any = None) -> None:
        for i, parameter in enumerate(
            p for group in optimizer.param_groups for p in group["params"]
        ):
            state = optimizer.state[parameter]
            state["step"] = torch.tensor(7.0 + seed)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = noise(
                    parameter.data, f"{seed} {name} {i} {torch.distributed.get_rank()}"
                )

    config = OptimizerConfig(
        optimizer="adam", lr=0.01, bf16=True, params_dtype=torch.bfloat16
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    optimizer = LayerWiseDistributedOptimizer([adam], config, groups, [filled])
    filled(optimizer.chained_optimizers[0].optimizer)
    return model, optimizer
