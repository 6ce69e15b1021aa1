"""Tables for common models. Extend them as dicts: ``llama(config) | {pattern: rule}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megackpt.errors import MismatchError
from megackpt.huggingface.rules import (
    Fuse,
    LayerKernel,
    Padded,
    Part,
    Theirs,
    Tied,
    Transpose,
)

Rules = dict[str, Theirs | None]

BESIDE: Rules = {"optimizer.*": None, "chained_#.*": None}
"""Keys of training checkpoints that do not belong to the model."""

_OURS, _THEIRS = "decoder.layers.#.", "model.layers.#."
_ATTENTION, _MLP = f"{_OURS}self_attention.", f"{_OURS}mlp."


def llama(config: Mapping[str, Any]) -> Rules:
    """Llama and models like it, by their ``config.json``. Our keys are the keys of GPTModel.

    GPTModel is Megatron-Core's. It has one tensor for query, key and value, group by group, and
    one for gate and up. Norms are modules, or belong to the linear layer that follows them.
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
    before_attention = f"{_THEIRS}input_layernorm.weight"
    before_mlp = f"{_THEIRS}post_attention_layernorm.weight"
    embedding = Padded("model.embed_tokens.weight", vocabulary)
    output: Theirs = Padded("lm_head.weight", vocabulary)
    if config.get("tie_word_embeddings"):
        output = Tied(embedding)

    def qkv(kind: str) -> Fuse:
        parts = tuple(f"{_THEIRS}self_attn.{x}_proj.{kind}" for x in "qkv")
        return Fuse(parts, (heads // groups, 1, 1), groups)

    def gate_up(kind: str) -> Fuse:
        return Fuse((f"{_THEIRS}mlp.gate_proj.{kind}", f"{_THEIRS}mlp.up_proj.{kind}"))

    rules = BESIDE | {
        "embedding.word_embeddings.weight": embedding,
        f"{_OURS}input_layernorm.weight": before_attention,
        f"{_ATTENTION}linear_qkv.layer_norm_weight": before_attention,
        f"{_ATTENTION}linear_qkv.weight": qkv("weight"),
        f"{_ATTENTION}linear_proj.weight": f"{_THEIRS}self_attn.o_proj.weight",
        f"{_OURS}pre_mlp_layernorm.weight": before_mlp,
        f"{_MLP}linear_fc1.layer_norm_weight": before_mlp,
        f"{_MLP}linear_fc1.weight": gate_up("weight"),
        f"{_MLP}linear_fc2.weight": f"{_THEIRS}mlp.down_proj.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": output,
    }
    if config.get("attention_bias"):
        rules[f"{_ATTENTION}linear_qkv.bias"] = qkv("bias")
        rules[f"{_ATTENTION}linear_proj.bias"] = f"{_THEIRS}self_attn.o_proj.bias"
    if config.get("mlp_bias"):
        rules[f"{_MLP}linear_fc1.bias"] = gate_up("bias")
        rules[f"{_MLP}linear_fc2.bias"] = f"{_THEIRS}mlp.down_proj.bias"
    return rules


def qwen2(config: Mapping[str, Any]) -> Rules:
    """Qwen2 and Qwen2.5: as ``llama``, and query, key and value have biases."""
    rules = llama({**config, "attention_bias": True})
    del rules[f"{_ATTENTION}linear_proj.bias"]
    return rules


def qwen3(config: Mapping[str, Any]) -> Rules:
    """Qwen3: as ``llama``, and the query and key of each head have norms."""
    rules = llama(config)
    for x in "qk":
        theirs = f"{_THEIRS}self_attn.{x}_norm.weight"
        rules[f"{_ATTENTION}{x}_layernorm.weight"] = theirs
    return rules


def qwen3_moe(config: Mapping[str, Any]) -> Rules:
    """Qwen3 with experts, in all layers or in the layers that its ``config.json`` names."""
    has_dense = (
        config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) > 1
    )
    return _with_experts(
        qwen3(config), "mlp", ("gate_proj", "up_proj", "down_proj"), bool(has_dense)
    )


def mixtral(config: Mapping[str, Any]) -> Rules:
    """Mixtral: as ``llama``, and experts in place of the MLP."""
    return _with_experts(llama(config), "block_sparse_moe", ("w1", "w3", "w2"))


def gemma(config: Mapping[str, Any]) -> Rules:
    """Gemma, of the first generation: as ``llama``, with one tensor for input and output.

    Its norms are stored without the 1 that they add, as Megatron-Core stores them with
    ``layernorm_zero_centered_gamma``.
    """
    kind = config.get("model_type", "gemma")
    if kind != "gemma":
        raise MismatchError(
            f"the table gemma is for the model_type 'gemma', not {kind!r}"
        )
    return llama({"tie_word_embeddings": True, **config})


def maxtext_llama(
    config: Mapping[str, Any],
    *,
    interleaved: bool,
    scan_layers: bool = True,
    prefix: str = "params.params.",
) -> Rules:
    """Llama as MaxText stores it, by the ``config.json`` of the model of Hugging Face.

    MaxText divides the query by the square root of the size of a head. A table cannot know how
    MaxText has ordered the elements of a head: ``interleaved`` is True for its rope_type
    "llama3.1", and False for "default". ``scan_layers`` is MaxText's option: layers are stacked
    along axis 1. ``prefix``: the keys of the tree above "decoder". Source: AI-Hypercomputer/maxtext
    of August 2026, ``checkpoint_conversion/utils/param_mapping.py``.
    """
    layers = _positive_int(config, "num_hidden_layers") * scan_layers
    heads = _positive_int(config, "num_attention_heads")
    size = _positive_int(config, "hidden_size") // heads
    if config.get("head_dim") is not None:
        size = _positive_int(config, "head_dim")
    ours = f"{prefix}decoder.layers" + ("." if scan_layers else "_#.")
    norm = ((0,),)
    matrix = ((1,), (0,))
    heads_out = ((1, 2), (0,))

    def kernel(name: str, axes: Any, **more: Any) -> LayerKernel:
        return LayerKernel(f"{_THEIRS}{name}.weight", axes, layers, **more)

    attention = f"{ours}self_attention."
    rules: Rules = {
        "opt_state.*": None,
        "step": None,
        f"{prefix}token_embedder.embedding": "model.embed_tokens.weight",
        f"{prefix}decoder.decoder_norm.scale": "model.norm.weight",
        f"{ours}pre_self_attention_layer_norm.scale": kernel("input_layernorm", norm),
        f"{ours}post_self_attention_layer_norm.scale": kernel(
            "post_attention_layernorm", norm
        ),
        f"{attention}query.kernel": kernel(
            "self_attn.q_proj", heads_out, alternating=interleaved, factor=size**0.5
        ),
        f"{attention}key.kernel": kernel(
            "self_attn.k_proj", heads_out, alternating=interleaved
        ),
        f"{attention}value.kernel": kernel("self_attn.v_proj", heads_out),
        f"{attention}out.kernel": kernel("self_attn.o_proj", ((2,), (0, 1))),
        f"{ours}mlp.wi_0.kernel": kernel("mlp.gate_proj", matrix),
        f"{ours}mlp.wi_1.kernel": kernel("mlp.up_proj", matrix),
        f"{ours}mlp.wo.kernel": kernel("mlp.down_proj", matrix),
    }
    if not config.get("tie_word_embeddings"):
        rules[f"{prefix}decoder.logits_dense.kernel"] = Transpose("lm_head.weight")
    return rules


def _with_experts(
    rules: Rules, module: str, names: tuple[str, str, str], has_dense: bool = False
) -> Rules:
    """The rules with experts: ``names`` of gate, up and down in Hugging Face's ``module``."""
    if not has_dense:
        del rules[f"{_MLP}linear_fc1.weight"], rules[f"{_MLP}linear_fc2.weight"]
    expert = f"{_MLP}experts.experts.#."
    theirs = [f"{_THEIRS}{module}.experts.#.{name}.weight" for name in names]
    return rules | {
        f"{_MLP}router.weight": f"{_THEIRS}{module}.gate.weight",
        f"{expert}linear_fc1.weight": Fuse((theirs[0], theirs[1])),
        f"{expert}linear_fc2.weight": theirs[2],
    }


def bert(config: Mapping[str, Any], prefix: str = "", masked_lm: bool = False) -> Rules:
    """BERT's encoder (and MiniLM's), by its ``config.json``.

    ``prefix``: the beginning of the Hugging Face names, such as "bert.". ``masked_lm``: with the
    head of BertForMaskedLM. Our keys have Megatron-Core's names. A layer has two norms, each after
    the part that it normalizes.
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
    head: Rules = {}
    if masked_lm:
        transform = "cls.predictions.transform."
        head = {
            "lm_head.dense.*": f"{transform}dense.*",
            "lm_head.layer_norm.*": f"{transform}LayerNorm.*",
            "output_layer.bias": Padded("cls.predictions.bias", vocabulary),
            "output_layer.weight": Tied(words),
        }
    return (
        BESIDE
        | head
        | {
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
    )


def reversed_table(rules: Rules, *, fused_norms: bool) -> dict[str, Theirs]:
    """The table in the opposite direction: for a conversion from Hugging Face to our keys.

    ``fused_norms``: the norms before attention and MLP belong to the linear layers that follow, as
    in Transformer Engine's layers; else they are modules. Padding is not added. A tied tensor is
    left out. Raises MismatchError for a rule that is neither a name nor a Fuse of names.
    """
    table: dict[str, Theirs] = {}
    for key, theirs in rules.items():
        if isinstance(theirs, Padded):
            theirs = theirs.whole
        other_norm = "layernorm.weight" if fused_norms else "layer_norm_weight"
        is_norm = key.endswith(("input_layernorm.weight", "pre_mlp_layernorm.weight"))
        is_norm |= key.endswith("layer_norm_weight")
        if theirs is None or isinstance(theirs, Tied):
            continue
        if is_norm and key.endswith(other_norm):
            continue
        parts: tuple[Theirs, ...] = (theirs,)
        if isinstance(theirs, Fuse):
            parts = theirs.parts
        for number, part in enumerate(parts):
            if not isinstance(part, str):
                raise MismatchError(f"the rule of {key!r} cannot be reversed: {part!r}")
            table[part] = key
            if isinstance(theirs, Fuse):
                ratio = theirs.ratio or (1,) * len(parts)
                table[part] = Part(key, number, ratio, theirs.groups, theirs.axis)
    return table


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
