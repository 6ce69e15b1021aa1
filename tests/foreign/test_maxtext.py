"""MaxText's Llama, as MaxText stores it, exported to Hugging Face: the same bits, and the same logits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megackpt
from megackpt import ShardedTensor
from megackpt.errors import MismatchError, ShardingError
from megackpt.huggingface import as_huggingface, export_huggingface, maxtext_llama
from tests.bits import assert_same
from tests.conftest import PEERS, ROOT
from tests.foreign.test_orbax import written_by_orbax

LAYERS, HEADS, GROUPS, SIZE, HIDDEN, INNER, WORDS = 3, 4, 2, 16, 32, 48, 64
CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "vocab_size": WORDS,
    "tie_word_embeddings": False,
}
Tensors = dict[str, torch.Tensor]

# Makes a model, or notes what one computes.
SCRIPT = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = eval(sys.argv[2])
config.pop("model_type")
model, info = LlamaForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(info.values()), info
with torch.no_grad():
    tokens = torch.tensor([[1, 7, 3, 42, 9, 9, 0, 31, 49, 12]])
    torch.save(model.eval()(tokens).logits, sys.argv[3])
"""


def theirs(dtype: torch.dtype = torch.float32) -> Tensors:
    """A Llama of random weights, by Hugging Face's names."""
    random = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (WORDS, HIDDEN),
        "lm_head": (WORDS, HIDDEN),
        "model.norm": (HIDDEN,),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HEADS * SIZE, HIDDEN),
                "self_attn.k_proj": (GROUPS * SIZE, HIDDEN),
                "self_attn.v_proj": (GROUPS * SIZE, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HEADS * SIZE),
                "mlp.gate_proj": (INNER, HIDDEN),
                "mlp.up_proj": (INNER, HIDDEN),
                "mlp.down_proj": (HIDDEN, INNER),
            }.items()
        }
    return {
        f"{name}.weight": (torch.randn(shape, generator=random) / 4).to(dtype)
        for name, shape in shapes.items()
    }


def maxtext(model: Tensors, interleaved: bool, scanned: bool) -> Tensors:
    """The same model as MaxText's converter lays it out: ``llama_or_mistral_ckpt.py``."""

    def heads(count: int, query: bool = False) -> Callable[..., torch.Tensor]:
        def kernel(weight: torch.Tensor) -> torch.Tensor:
            found = weight.T.reshape(HIDDEN, count, SIZE)
            if interleaved:
                found = torch.stack(found.chunk(2, -1), -1).flatten(-2)
            return found / SIZE**0.5 if query else found

        return kernel

    def plain(weight: torch.Tensor) -> torch.Tensor:
        return weight if weight.ndim == 1 else weight.T

    def value(weight: torch.Tensor) -> torch.Tensor:
        return weight.T.reshape(HIDDEN, GROUPS, SIZE)

    def out(weight: torch.Tensor) -> torch.Tensor:
        return weight.T.reshape(HEADS, SIZE, HIDDEN)

    of_layers = {
        "pre_self_attention_layer_norm.scale": ("input_layernorm", plain),
        "post_self_attention_layer_norm.scale": ("post_attention_layernorm", plain),
        "self_attention.query.kernel": ("self_attn.q_proj", heads(HEADS, query=True)),
        "self_attention.key.kernel": ("self_attn.k_proj", heads(GROUPS)),
        "self_attention.value.kernel": ("self_attn.v_proj", value),
        "self_attention.out.kernel": ("self_attn.o_proj", out),
        "mlp.wi_0.kernel": ("mlp.gate_proj", plain),
        "mlp.wi_1.kernel": ("mlp.up_proj", plain),
        "mlp.wo.kernel": ("mlp.down_proj", plain),
    }
    found = {
        "token_embedder.embedding": model["model.embed_tokens.weight"],
        "decoder.decoder_norm.scale": model["model.norm.weight"],
        "decoder.logits_dense.kernel": model["lm_head.weight"].T,
    }
    for name, (other, change) in of_layers.items():
        kernels = [
            change(model[f"model.layers.{layer}.{other}.weight"])
            for layer in range(LAYERS)
        ]
        if scanned:
            found[f"decoder.layers.{name}"] = torch.stack(kernels, 1)
            continue
        for layer, one in enumerate(kernels):
            found[f"decoder.layers_{layer}.{name}"] = one
    return {f"params.params.{key}": t.contiguous() for key, t in found.items()}


def declared(tensors: Tensors) -> dict[str, ShardedTensor]:
    return {
        key: ShardedTensor.from_rank_offsets(key, tensor)
        for key, tensor in tensors.items()
    }


@pytest.mark.parametrize("to", ["torch_dist", "zarr"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("scanned", [True, False])
def test_the_export_has_the_bits_of_the_model(
    tmp_path: Path, to: str, interleaved: bool, scanned: bool
) -> None:
    """A head has 16 elements, so the factor of the query is exact."""
    model = theirs(torch.bfloat16 if scanned else torch.float32)
    state = maxtext(model, interleaved, scanned)
    state |= {"opt_state.mu.x": torch.ones(3), "step": torch.tensor(4)}
    megackpt.save(declared(state), tmp_path / "run", to)
    table = maxtext_llama(CONFIG, interleaved=interleaved, scan_layers=scanned)
    export_huggingface(tmp_path / "run", tmp_path / "out", table, CONFIG)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == model.keys()
    for key, tensor in model.items():
        assert_same(found[key], tensor, key)


def test_chunks_that_cut_a_head_are_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = declared(maxtext(theirs(), True, True))
    key = "params.params.decoder.layers.self_attention.key.kernel"
    halves = state[key].data.chunk(2, 3)
    state[key] = [
        ShardedTensor.from_rank_offsets(key, half.contiguous(), (3, i, 2))
        for i, half in enumerate(halves)
    ]
    megackpt.save(state, tmp_path / "run")
    with pytest.raises(MismatchError, match=rf"{key}.*cut its axis 3"):
        export_huggingface(
            tmp_path / "run",
            tmp_path / "out",
            maxtext_llama(CONFIG, interleaved=True),
            CONFIG,
        )


def test_a_table_that_changes_values_is_refused_for_a_load_into_a_model(
    tmp_path: Path,
) -> None:
    megackpt.save({"step": 1}, tmp_path / "run")
    state = declared(maxtext(theirs(), True, True))
    table = maxtext_llama(CONFIG, interleaved=True)
    with pytest.raises(ShardingError, match=r"query.kernel.*changes its values"):
        megackpt.load(as_huggingface(state, table), tmp_path / "run")


@pytest.mark.orbax
@pytest.mark.transformers
@pytest.mark.parametrize("interleaved", [True, False])
def test_transformers_computes_what_the_model_of_maxtext_computes(
    tmp_path: Path, interleaved: bool
) -> None:
    model = theirs()
    torch.save(maxtext(model, interleaved, True), tmp_path / "state.pt")
    source = tmp_path / "maxtext"
    assert not written_by_orbax(
        str(source), "--state", str(tmp_path / "state.pt")
    ).wait()
    export_huggingface(
        source,
        tmp_path / "out",
        maxtext_llama(CONFIG, interleaved=interleaved),
        CONFIG,
    )
    (tmp_path / "hf").mkdir()
    save_file(model, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    config = (tmp_path / "out" / "config.json").read_text()
    (tmp_path / "hf" / "config.json").write_text(config)

    def logits(name: str) -> torch.Tensor:
        file = tmp_path / f"{name}.logits"
        environment = {**os.environ, "PYTHONPATH": str(PEERS / "huggingface")}
        command = [sys.executable, "-c", SCRIPT, tmp_path / name, repr(CONFIG), file]
        subprocess.run(command, env=environment, cwd=ROOT, check=True)
        found: torch.Tensor = torch.load(file)
        return found

    assert torch.equal(logits("out"), logits("hf"))
