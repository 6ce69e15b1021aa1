"""A base and an adapter are merged as PEFT merges them, in the memory of a few tensors.

The functions of this file run in processes that have PEFT.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from tests.conftest import Ranks
from tests.huggingface.test_adapters import KINDS, alone, fails, pytestmark, ranks

__all__ = ["pytestmark", "ranks"]


def base_directory(model: Any, folder: str) -> str:
    """The tensors under the names that they have in the model, and the configuration."""
    from safetensors.torch import save_model

    model.save_pretrained(f"{folder}/base")
    if (model.config.model_type) == "mixtral":  # stored in other tensors
        save_model(model, f"{folder}/base/model.safetensors")
    return f"{folder}/base"


def merges_as_peft(kind: str, dtype: str, folder: str) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from megackpt.huggingface.peft import save_adapter
    from megackpt.huggingface.peft_merge import merge_adapter
    from tests.huggingface.adapted_models import adapted, base, opened

    changes = {"lora_bias": False} if kind == "patterns" else {}
    precision: torch.dtype = getattr(torch, dtype)
    source = base_directory(base(kind, precision), folder)
    save_adapter(adapted(kind, dtype=precision, **changes), f"{folder}/adapter")
    stock = opened(f"{folder}/adapter", kind, dtype=precision).merge_and_unload()
    expected = stock.state_dict()
    before = load_file(f"{source}/model.safetensors")
    target = f"{folder}/merged"
    merge_adapter(source, f"{folder}/adapter", target)
    found = load_file(f"{target}/model.safetensors")
    assert found.keys() == before.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), key
    assert any(not torch.equal(before[key], found[key]) for key in found)
    if dtype == "float32" and kind not in ("parameters", "transposed"):
        model = AutoModelForCausalLM.from_pretrained(target)
        tokens = torch.arange(64).reshape(4, 16)
        assert torch.equal(model(tokens).logits, stock(tokens).logits)


HALF = ("dora", "embedding", "modules_to_save")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, "float32") for kind in (*KINDS, "transposed")]
    + [(kind, "bfloat16") for kind in HALF],
)
def test_merged_values_are_equal_to_pefts(
    kind: str, dtype: str, ranks: Ranks, tmp_path: Path
) -> None:
    alone(ranks, merges_as_peft, kind, dtype, tmp_path)


def refuses(folder: str) -> None:
    from safetensors.torch import load_file, save_file

    from megackpt.huggingface.peft import save_adapter
    from megackpt.huggingface.peft_merge import merge_adapter
    from tests.huggingface.adapted_models import adapted, base

    source = base_directory(base(), folder)
    model = adapted()
    save_adapter(model, f"{folder}/adapter")
    target = f"{folder}/merged"
    weights = f"{source}/model.safetensors"
    whole = load_file(weights)

    # Another base.
    changed = {**whole, "model.norm.weight": whole["model.norm.weight"] + 1}
    save_file(changed, weights)
    with fails(megackpt.MismatchError, "1 of 21 tensors differ", "model.norm.weight"):
        merge_adapter(source, f"{folder}/adapter", target)
    merge_adapter(
        source, f"{folder}/adapter", f"{folder}/all the same", check_base=False
    )

    # A base that lacks a tensor.
    del changed["model.layers.1.self_attn.q_proj.weight"]
    save_file(changed, weights)
    with fails(megackpt.MismatchError, "the base lacks", "layers.1.self_attn.q_proj"):
        merge_adapter(source, f"{folder}/adapter", target, check_base=False)
    # One of another shape.
    save_file(
        {**whole, "model.layers.0.mlp.down_proj.weight": torch.ones(48, 4)}, weights
    )
    with fails(megackpt.MismatchError, "cannot merge 'model.layers.0.mlp.down_proj'"):
        merge_adapter(source, f"{folder}/adapter", target, check_base=False)
    save_file(whole, weights)

    # Tensors of the adapter that would be left out, or are missing.
    stock = f"{folder}/stock"
    model.save_pretrained(stock)
    own = load_file(f"{stock}/adapter_model.safetensors")
    first, *others = sorted(own)
    key = first.replace("layers.0", "layers.7")
    save_file({**own, key: own[first].clone()}, f"{stock}/adapter_model.safetensors")
    with fails(megackpt.MismatchError, "the model lacks", "layers.7"):
        merge_adapter(source, stock, target)
    save_file({n: own[n] for n in others}, f"{stock}/adapter_model.safetensors")
    with fails(megackpt.MismatchError, "the adapter lacks", first):
        merge_adapter(source, stock, target)

    # What PEFT does not merge, and what changes the base.
    save_adapter(adapted("patterns"), f"{folder}/bias")
    with fails(megackpt.MismatchError, "PEFT cannot merge 'model.layers", "lora_bias"):
        merge_adapter(source, f"{folder}/bias", target)
    config = json.loads(Path(stock, "adapter_config.json").read_bytes())
    config["init_lora_weights"] = "pissa"
    Path(stock, "adapter_config.json").write_text(json.dumps(config))
    with fails(megackpt.MismatchError, "init_lora_weights='pissa'"):
        merge_adapter(source, stock, target)
    assert not Path(target).exists()


def test_what_cannot_be_merged_is_named_and_nothing_is_written(
    ranks: Ranks, tmp_path: Path
) -> None:
    alone(ranks, refuses, tmp_path)


def merges_in_bounded_memory(folder: str) -> None:
    """16 layers of 16 MiB need less than half of their bytes, with all that malloc keeps."""
    import resource

    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from megackpt.huggingface.peft import save_adapter
    from megackpt.huggingface.peft_merge import merge_adapter

    def grown(layers: int) -> int:
        config = LlamaConfig(
            vocab_size=64, hidden_size=512, intermediate_size=2048, num_hidden_layers=layers,
            num_attention_heads=4,
        )  # fmt: skip
        here = f"{folder}/{layers}"
        if not (child := os.fork()):
            model = LlamaForCausalLM(config)
            model.save_pretrained(f"{here}/base")
            settings = LoraConfig(
                r=2, target_modules="all-linear", init_lora_weights=False
            )
            save_adapter(get_peft_model(model, settings), f"{here}/adapter")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        merge_adapter(f"{here}/base", f"{here}/adapter", f"{here}/merged")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    grown(1)
    assert Path(f"{folder}/1/merged/model.safetensors").exists()
    assert grown(16) < 128 << 10  # KiB


@pytest.mark.slow
def test_memory_is_less_than_half_of_the_weights(ranks: Ranks, tmp_path: Path) -> None:
    alone(ranks, merges_in_bounded_memory, tmp_path)
