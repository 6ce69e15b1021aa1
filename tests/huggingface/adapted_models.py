"""Tiny models of transformers with adapters of PEFT. Only processes that have both import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

CONFIGS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "down_proj"]},
    "dora": {"target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "patterns": {
        "target_modules": "all-linear",
        "use_rslora": True,
        "rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 7},
        "alpha_pattern": {"v_proj": 5},
        "lora_bias": True,
    },
    "modules_to_save": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ["o_proj"], "trainable_token_indices": [3, 60]},
    "embedding": {"target_modules": ["embed_tokens", "k_proj"]},
    "bias": {"target_modules": ["q_proj"], "bias": "all"},
    "transposed": {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    "parameters": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}


def base(kind: str = "lora", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if kind == "parameters":
        sizes |= {"num_local_experts": 4}
        return MixtralForCausalLM(MixtralConfig(**sizes)).to(dtype)
    if kind == "transposed":
        settings = GPT2Config(vocab_size=64, n_embd=48, n_layer=2, n_head=4)
        return GPT2LMHeadModel(settings).to(dtype)
    sizes["attention_bias"] = kind == "bias"
    return LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype)


def adapted(
    kind: str = "lora",
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """A model whose adapter has other values for each seed."""
    settings = {"r": 4, "lora_alpha": 9, **CONFIGS[kind], **changes}
    model = get_peft_model(base(kind, dtype), LoraConfig(**settings))
    torch.manual_seed(seed)
    with torch.no_grad():
        for param in trained(model):
            param.add_(torch.randn_like(param), alpha=0.05)
    return model


def trained(model: Any) -> list[torch.Tensor]:
    return [param for param in model.parameters() if param.requires_grad]


def adam(model: Any, rate: float = 0.01) -> torch.optim.AdamW:
    return torch.optim.AdamW(trained(model), lr=rate)


def step(model: Any, optimizer: Any, number: int = 0) -> None:
    tokens = torch.randint(
        0, 64, (2, 8), generator=torch.Generator().manual_seed(number)
    )
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(64).reshape(4, 16)).logits
    return found


def shard(model: Any, mesh: DeviceMesh) -> Any:
    """The model with all of its parameters sharded by FSDP2."""
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def opened(
    directory: str | Path,
    kind: str = "lora",
    name: str = "default",
    dtype: torch.dtype = torch.float32,
) -> Any:
    model = base(kind, dtype)
    return PeftModel.from_pretrained(model, str(directory), adapter_name=name)


def full(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = getattr(tensor, "full_tensor", lambda: tensor)()
    return whole.detach()
