"""Tables for models that many people have. Extended as dicts are: ``llama(config) | {pattern: rule}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megackpt.adapters.huggingface.rules import Fuse, Padded, Theirs, Tied
from megackpt.errors import MismatchError

Rules = dict[str, Theirs | None]

BESIDE: Rules = {"optimizer.*": None, "chained_#.*": None}
"""What training checkpoints hold beside the model."""


def llama(config: Mapping[str, Any]) -> Rules:
    """Llama and its kin by their ``config.json``; our keys are those of Megatron-Core's GPTModel.

    Query, key and value are one tensor, group by group; so are gate and up. Norms stand alone, or in the linear layer
    after them.
    """
    heads, vocabulary = (
        _number(config, "num_attention_heads"),
        _number(config, "vocab_size"),
    )
    groups = (
        heads
        if config.get("num_key_value_heads") is None
        else _number(config, "num_key_value_heads")
    )
    if heads % groups:
        raise MismatchError(
            f"num_key_value_heads, {groups}, does not divide num_attention_heads, {heads}"
        )
    ours, theirs = "decoder.layers.#.", "model.layers.#."
    embedding, output = (
        Padded(f"{name}.weight", vocabulary)
        for name in ("model.embed_tokens", "lm_head")
    )

    def qkv(kind: str) -> Fuse:
        return Fuse(
            tuple(f"{theirs}self_attn.{x}_proj.{kind}" for x in "qkv"),
            (heads // groups, 1, 1),
            groups,
        )

    def gate_up(kind: str) -> Fuse:
        return Fuse((f"{theirs}mlp.gate_proj.{kind}", f"{theirs}mlp.up_proj.{kind}"))

    rules = BESIDE | {
        "embedding.word_embeddings.weight": embedding,
        f"{ours}input_layernorm.weight": f"{theirs}input_layernorm.weight",
        f"{ours}self_attention.linear_qkv.layer_norm_weight": f"{theirs}input_layernorm.weight",
        f"{ours}self_attention.linear_qkv.weight": qkv("weight"),
        f"{ours}self_attention.linear_proj.weight": f"{theirs}self_attn.o_proj.weight",
        f"{ours}pre_mlp_layernorm.weight": f"{theirs}post_attention_layernorm.weight",
        f"{ours}mlp.linear_fc1.layer_norm_weight": f"{theirs}post_attention_layernorm.weight",
        f"{ours}mlp.linear_fc1.weight": gate_up("weight"),
        f"{ours}mlp.linear_fc2.weight": f"{theirs}mlp.down_proj.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": Tied(embedding)
        if config.get("tie_word_embeddings")
        else output,
    }
    if config.get("attention_bias"):
        rules[f"{ours}self_attention.linear_qkv.bias"] = qkv("bias")
        rules[f"{ours}self_attention.linear_proj.bias"] = (
            f"{theirs}self_attn.o_proj.bias"
        )
    if config.get("mlp_bias"):
        rules[f"{ours}mlp.linear_fc1.bias"] = gate_up("bias")
        rules[f"{ours}mlp.linear_fc2.bias"] = f"{theirs}mlp.down_proj.bias"
    return rules


def bert(config: Mapping[str, Any], prefix: str = "") -> Rules:
    """BERT's encoder (and MiniLM's) by its ``config.json``; ``prefix``: what their names begin with, as "bert.".

    Our keys are named as Megatron-Core names such parts, with the two norms of a layer behind what they follow.
    """
    heads, vocabulary = (
        _number(config, "num_attention_heads"),
        _number(config, "vocab_size"),
    )
    ours, theirs = "encoder.layers.#.", f"{prefix}encoder.layer.#."
    qkv = tuple(
        f"{theirs}attention.self.{part}.*" for part in ("query", "key", "value")
    )
    return BESIDE | {
        "embedding.word_embeddings.weight": Padded(
            f"{prefix}embeddings.word_embeddings.weight", vocabulary
        ),
        "embedding.position_embeddings.weight": f"{prefix}embeddings.position_embeddings.weight",
        "embedding.tokentype_embeddings.weight": f"{prefix}embeddings.token_type_embeddings.weight",
        "embedding.layernorm.*": f"{prefix}embeddings.LayerNorm.*",
        f"{ours}self_attention.linear_qkv.*": Fuse(qkv, groups=heads),
        f"{ours}self_attention.linear_proj.*": f"{theirs}attention.output.dense.*",
        f"{ours}self_attention.layernorm.*": f"{theirs}attention.output.LayerNorm.*",
        f"{ours}mlp.linear_fc1.*": f"{theirs}intermediate.dense.*",
        f"{ours}mlp.linear_fc2.*": f"{theirs}output.dense.*",
        f"{ours}mlp.layernorm.*": f"{theirs}output.LayerNorm.*",
    }


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        nested = [
            key
            for key, inner in config.items()
            if isinstance(inner, Mapping) and name in inner
        ]
        hint = f" (it is told by its {nested[0]}: give that one)" if nested else ""
        raise MismatchError(
            f"the configuration's {name} must be a whole number from 1 on, not {value!r}{hint}"
        )
    return value
