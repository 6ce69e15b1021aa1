"""Tables for models that many people have. Extended as dicts are: ``llama(config) | {pattern: rule}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megackpt.adapters.huggingface.rules import Fuse, Padded, Theirs, Tied

Rules = dict[str, Theirs | None]

BESIDE: Rules = {"optimizer.*": None, "chained_#.*": None}
"""What training checkpoints hold beside the model."""


def llama(config: Mapping[str, Any]) -> Rules:
    """Llama and its kin by their ``config.json``; our keys are those of Megatron-Core's GPTModel.

    Query, key and value are one tensor, group by group; so are gate and up. Norms stand alone, or in the linear layer
    after them.
    """
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    ours, theirs = "decoder.layers.#.", "model.layers.#."
    embedding = Padded("model.embed_tokens.weight", config["vocab_size"])
    output = Padded("lm_head.weight", config["vocab_size"])
    qkv = tuple(f"{theirs}self_attn.{part}_proj.weight" for part in "qkv")
    gate_up = f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight"
    return BESIDE | {
        "embedding.word_embeddings.weight": embedding,
        f"{ours}input_layernorm.weight": f"{theirs}input_layernorm.weight",
        f"{ours}self_attention.linear_qkv.layer_norm_weight": f"{theirs}input_layernorm.weight",
        f"{ours}self_attention.linear_qkv.weight": Fuse(qkv, (heads // groups, 1, 1), groups),
        f"{ours}self_attention.linear_proj.weight": f"{theirs}self_attn.o_proj.weight",
        f"{ours}pre_mlp_layernorm.weight": f"{theirs}post_attention_layernorm.weight",
        f"{ours}mlp.linear_fc1.layer_norm_weight": f"{theirs}post_attention_layernorm.weight",
        f"{ours}mlp.linear_fc1.weight": Fuse(gate_up),
        f"{ours}mlp.linear_fc2.weight": f"{theirs}mlp.down_proj.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": Tied(embedding) if config.get("tie_word_embeddings") else output,
    }


def bert(config: Mapping[str, Any], prefix: str = "") -> Rules:
    """BERT's encoder (and MiniLM's) by its ``config.json``; ``prefix``: what their names begin with, as "bert.".

    Our keys are named as Megatron-Core names such parts, with the two norms of a layer behind what they follow.
    """
    heads = config["num_attention_heads"]
    ours, theirs = "encoder.layers.#.", f"{prefix}encoder.layer.#."
    qkv = tuple(f"{theirs}attention.self.{part}.*" for part in ("query", "key", "value"))
    return BESIDE | {
        "embedding.word_embeddings.weight": Padded(
            f"{prefix}embeddings.word_embeddings.weight", config["vocab_size"]
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
