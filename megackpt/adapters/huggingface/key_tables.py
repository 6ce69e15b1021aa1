"""Tables for common models. Extend them as dicts: ``llama(config) | {pattern: rule}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megackpt.adapters.huggingface.rules import Fuse, Padded, Theirs, Tied
from megackpt.errors import MismatchError

Rules = dict[str, Theirs | None]

BESIDE: Rules = {"optimizer.*": None, "chained_#.*": None}
"""What training checkpoints hold beside the model."""


def llama(config: Mapping[str, Any]) -> Rules:
    """Llama and models like it, by their ``config.json``. Our keys are those of GPTModel.

    GPTModel is Megatron-Core's. Query, key and value are one tensor there, group by group, and so
    are gate and up. Norms are modules, or belong to the linear layer that follows them.
    """
    heads = _positive_int(config, "num_attention_heads")
    vocabulary = _positive_int(config, "vocab_size")
    groups = heads
    if config.get("num_key_value_heads") is not None:
        groups = _positive_int(config, "num_key_value_heads")
    if heads % groups:
        raise MismatchError(
            f"num_key_value_heads, {groups}, does not divide num_attention_heads, {heads}"
        )
    ours, theirs = "decoder.layers.#.", "model.layers.#."
    attention = f"{ours}self_attention."
    mlp = f"{ours}mlp."
    before_attention = f"{theirs}input_layernorm.weight"
    before_mlp = f"{theirs}post_attention_layernorm.weight"
    embedding = Padded("model.embed_tokens.weight", vocabulary)
    output: Theirs = Padded("lm_head.weight", vocabulary)
    if config.get("tie_word_embeddings"):
        output = Tied(embedding)

    def qkv(kind: str) -> Fuse:
        parts = tuple(f"{theirs}self_attn.{x}_proj.{kind}" for x in "qkv")
        return Fuse(parts, (heads // groups, 1, 1), groups)

    def gate_up(kind: str) -> Fuse:
        return Fuse((f"{theirs}mlp.gate_proj.{kind}", f"{theirs}mlp.up_proj.{kind}"))

    rules = BESIDE | {
        "embedding.word_embeddings.weight": embedding,
        f"{ours}input_layernorm.weight": before_attention,
        f"{attention}linear_qkv.layer_norm_weight": before_attention,
        f"{attention}linear_qkv.weight": qkv("weight"),
        f"{attention}linear_proj.weight": f"{theirs}self_attn.o_proj.weight",
        f"{ours}pre_mlp_layernorm.weight": before_mlp,
        f"{mlp}linear_fc1.layer_norm_weight": before_mlp,
        f"{mlp}linear_fc1.weight": gate_up("weight"),
        f"{mlp}linear_fc2.weight": f"{theirs}mlp.down_proj.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": output,
    }
    if config.get("attention_bias"):
        rules[f"{attention}linear_qkv.bias"] = qkv("bias")
        rules[f"{attention}linear_proj.bias"] = f"{theirs}self_attn.o_proj.bias"
    if config.get("mlp_bias"):
        rules[f"{mlp}linear_fc1.bias"] = gate_up("bias")
        rules[f"{mlp}linear_fc2.bias"] = f"{theirs}mlp.down_proj.bias"
    return rules


def bert(config: Mapping[str, Any], prefix: str = "") -> Rules:
    """BERT's encoder (and MiniLM's), by its ``config.json``.

    ``prefix``: what their names begin with, such as "bert.". Our keys have Megatron-Core's names;
    a layer has two norms, each after the part that it normalizes.
    """
    heads = _positive_int(config, "num_attention_heads")
    vocabulary = _positive_int(config, "vocab_size")
    ours, theirs = "encoder.layers.#.", f"{prefix}encoder.layer.#."
    embeddings = f"{prefix}embeddings."
    parts = ("query", "key", "value")
    qkv = tuple(f"{theirs}attention.self.{part}.*" for part in parts)
    words = Padded(f"{embeddings}word_embeddings.weight", vocabulary)
    positions = f"{embeddings}position_embeddings.weight"
    token_types = f"{embeddings}token_type_embeddings.weight"
    return BESIDE | {
        "embedding.word_embeddings.weight": words,
        "embedding.position_embeddings.weight": positions,
        "embedding.tokentype_embeddings.weight": token_types,
        "embedding.layernorm.*": f"{embeddings}LayerNorm.*",
        f"{ours}self_attention.linear_qkv.*": Fuse(qkv, groups=heads),
        f"{ours}self_attention.linear_proj.*": f"{theirs}attention.output.dense.*",
        f"{ours}self_attention.layernorm.*": f"{theirs}attention.output.LayerNorm.*",
        f"{ours}mlp.linear_fc1.*": f"{theirs}intermediate.dense.*",
        f"{ours}mlp.linear_fc2.*": f"{theirs}output.dense.*",
        f"{ours}mlp.layernorm.*": f"{theirs}output.LayerNorm.*",
    }


def _positive_int(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is int and value >= 1:
        return value
    hint = ""
    for key, inner in config.items():
        if isinstance(inner, Mapping) and name in inner:
            hint = f" (its {key} has one: give that one)"
            break
    raise MismatchError(
        f"the configuration's {name} must be a whole number from 1 on, not {value!r}{hint}"
    )
