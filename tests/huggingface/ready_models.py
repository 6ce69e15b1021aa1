"""Small models of the families that have a ready table: Hugging Face's tensors, and Megatron-Core's of TP2 and EP2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.huggingface import (
    Table,
    as_huggingface,
    bert,
    gemma,
    llama,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from megackpt.testing import ThreadedGroup

HIDDEN, INNER, ROUTED, EXPERTS, HEADS, GROUPS, HEAD = 32, 56, 24, 4, 8, 2, 4
VOCABULARY, PADDED, POSITIONS = 50, 52, 64
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 3,
    "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD,
    "max_position_embeddings": POSITIONS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


class Family(NamedTuple):
    """``experts``: the extent within each of them, 0 without; ``dense``: layers without them."""

    table: Callable[[dict[str, Any]], Table]
    config: dict[str, Any]
    experts: int = 0
    dense: tuple[int, ...] = (0, 1, 2)


_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": ROUTED}
FAMILIES = {
    "llama": Family(llama, {}),
    "qwen2": Family(qwen2, {}),
    "qwen3": Family(qwen3, {"tie_word_embeddings": True}),
    "qwen3_moe": Family(qwen3_moe, {"num_experts": EXPERTS, **_ROUTED}, ROUTED, ()),
    "qwen3_moe-mixed": Family(
        qwen3_moe,
        {"num_experts": EXPERTS, "mlp_only_layers": [1], **_ROUTED},
        ROUTED,
        (1,),
    ),
    "mixtral": Family(mixtral, {"num_local_experts": EXPERTS}, INNER, ()),
    "gemma": Family(gemma, {}),
    "bert": Family(lambda config: bert(config, "bert.", masked_lm=True), {}),
}


def config_of(name: str) -> dict[str, Any]:
    return {
        **CONFIG,
        "model_type": name.partition("-")[0],
        **FAMILIES[name].config,
    }


class Rank:
    """What one of 4 ranks declares, of zeros: TP2, and EP2 (of models without experts: DP2)."""

    def __init__(self, rank: int) -> None:
        self.tp, self.ep = rank % 2, rank // 2
        self.state: dict[str, Any] = {}

    def add(self, key: str, *shape: int, axis: int | None = None) -> None:
        local = [n // 2 if a == axis else n for a, n in enumerate(shape)]
        cuts = [] if axis is None else [(axis, self.tp, 2)]
        replica = (0, 0 if cuts else self.tp, self.ep)
        self.state[key] = ShardedTensor.from_rank_offsets(
            key, torch.zeros(local), *cuts, replica_id=replica
        )

    def gated(self, key: str, inner: int, *cuts: tuple[int, int, int]) -> None:
        """Rows of the gate and rows of the other half, as Megatron-Core declares them."""
        replica = (0, 0, 0 if cuts else self.ep)
        axes = len(cuts)
        self.state[f"{key}{cuts}"] = [
            ShardedTensor.from_rank_offsets(
                key,
                torch.zeros(inner // 2, HIDDEN),
                *cuts,
                (axes, self.tp + half * 2, 4),
                replica_id=replica,
                prepend_axis_num=axes,
            )
            for half in range(2)
        ]

    def decoder(self, name: str) -> dict[str, Any]:
        family = FAMILIES[name]
        self.add("embedding.word_embeddings.weight", PADDED, HIDDEN, axis=0)
        self.add("output_layer.weight", PADDED, HIDDEN, axis=0)
        self.add("decoder.final_layernorm.weight", HIDDEN)
        for n in range(3):
            layer = f"decoder.layers.{n}."
            attention = f"{layer}self_attention."
            self.add(f"{attention}linear_qkv.layer_norm_weight", HIDDEN)
            rows = (HEADS + 2 * GROUPS) * HEAD
            self.add(f"{attention}linear_qkv.weight", rows, HIDDEN, axis=0)
            self.add(f"{attention}linear_proj.weight", HIDDEN, HEADS * HEAD, axis=1)
            self.add(f"{layer}pre_mlp_layernorm.weight", HIDDEN)
            if name == "qwen2":
                self.add(f"{attention}linear_qkv.bias", rows, axis=0)
            if "qwen3" in name:
                for x in "qk":
                    self.add(f"{attention}{x}_layernorm.weight", HEAD)
            if n in family.dense:
                self.gated(f"{layer}mlp.linear_fc1.weight", INNER)
                self.add(f"{layer}mlp.linear_fc2.weight", HIDDEN, INNER, axis=1)
            else:
                self.routed(f"{layer}mlp.", family.experts)
        return self.state

    def routed(self, mlp: str, inner: int) -> None:
        self.add(f"{mlp}router.weight", EXPERTS, HIDDEN)
        key = f"{mlp}experts.experts."
        for expert in range(self.ep * EXPERTS // 2, (self.ep + 1) * EXPERTS // 2):
            cut = (0, expert, EXPERTS)
            self.gated(f"{key}linear_fc1.weight", inner, cut)
            self.state[f"{key}{expert}"] = ShardedTensor.from_rank_offsets(
                f"{key}linear_fc2.weight",
                torch.zeros(HIDDEN, inner // 2),
                cut,
                (2, self.tp, 2),
                prepend_axis_num=1,
            )

    def bert(self) -> dict[str, Any]:
        self.add("embedding.word_embeddings.weight", PADDED, HIDDEN, axis=0)
        self.add("output_layer.weight", PADDED, HIDDEN, axis=0)
        self.add("output_layer.bias", PADDED, axis=0)
        self.add("embedding.position_embeddings.weight", POSITIONS, HIDDEN)
        self.add("embedding.tokentype_embeddings.weight", 2, HIDDEN)
        norms = ["embedding.layernorm", "lm_head.layer_norm"]
        linears = [("lm_head.dense", HIDDEN, HIDDEN, None)]
        for n in range(3):
            layer = f"encoder.layers.{n}."
            norms += [f"{layer}self_attention.layernorm", f"{layer}mlp.layernorm"]
            linears += [
                (f"{layer}self_attention.linear_qkv", 3 * HIDDEN, HIDDEN, 0),
                (f"{layer}self_attention.linear_proj", HIDDEN, HIDDEN, 1),
                (f"{layer}mlp.linear_fc1", INNER, HIDDEN, 0),
                (f"{layer}mlp.linear_fc2", HIDDEN, INNER, 1),
            ]
        for norm in norms:
            self.add(f"{norm}.weight", HIDDEN)
            self.add(f"{norm}.bias", HIDDEN)
        for linear, rows, columns, axis in linears:
            self.add(f"{linear}.weight", rows, columns, axis=axis)
            self.add(f"{linear}.bias", rows, axis=None if axis else axis)
        return self.state


def train(name: str, pretrained: Path, training: Path) -> None:
    """Load Hugging Face's files into 4 ranks, and save these as training does."""
    table = FAMILIES[name].table(config_of(name))

    def rank(group: ThreadedGroup) -> None:
        ours = Rank(group.rank)
        state = ours.bert() if name == "bert" else ours.decoder(name)
        megackpt.load(
            as_huggingface(state, table),
            pretrained,
            strict="raise_all",
            process_group=group,
        )
        megackpt.save({"model": state, "step": 3}, training, process_group=group)

    ThreadedGroup.run(4, rank)


def theirs(name: str) -> dict[str, torch.Tensor]:
    """Random weights under the names that transformers 5.23 writes."""
    family = FAMILIES[name]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCABULARY, HIDDEN),
        "model.norm": (HIDDEN,),
    }
    tied = family.config.get("tie_word_embeddings", name == "gemma")
    if not tied:
        shapes["lm_head"] = VOCABULARY, HIDDEN
    for n in range(3):
        layer = f"model.layers.{n}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[layer + norm] = (HIDDEN,)
        for part, heads in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
            shapes[f"{layer}self_attn.{part}_proj"] = heads * HEAD, HIDDEN
        shapes[f"{layer}self_attn.o_proj"] = HIDDEN, HEADS * HEAD
        if "qwen3" in name:
            shapes[f"{layer}self_attn.q_norm"] = (HEAD,)
            shapes[f"{layer}self_attn.k_norm"] = (HEAD,)
        gate, up, down = "gate_proj", "up_proj", "down_proj"
        module, parts, inner = f"{layer}mlp", [""], INNER
        if name == "mixtral":
            gate, up, down = "w1", "w3", "w2"
            module = f"{layer}block_sparse_moe"
        if n not in family.dense:
            shapes[f"{module}.gate"] = EXPERTS, HIDDEN
            parts = [f".experts.{expert}" for expert in range(EXPERTS)]
            inner = family.experts
        for part in parts:
            shapes[f"{module}{part}.{gate}"] = inner, HIDDEN
            shapes[f"{module}{part}.{up}"] = inner, HIDDEN
            shapes[f"{module}{part}.{down}"] = HIDDEN, inner
    torch.manual_seed(1)
    found = {f"{key}.weight": torch.randn(shape) for key, shape in shapes.items()}
    if name == "qwen2":
        for key, shape in shapes.items():
            if key.endswith(("q_proj", "k_proj", "v_proj")):
                found[f"{key}.bias"] = torch.randn(shape[0])
    return found
