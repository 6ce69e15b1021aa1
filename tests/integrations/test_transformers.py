"""transformers' Trainer with our manager: killed, and resumed on other ranks; the best model."""

from __future__ import annotations

from pathlib import Path

import pytest

from megackpt import CheckpointManager, load_plain_tensors
from tests.conftest import Ranks
from tests.integrations.programs import FSDP_ON_CPU, Program

pytestmark = [pytest.mark.transformers, pytest.mark.accelerate]
PEERS = ("huggingface", "accelerate", "")
PLAIN = "        use_cpu=True,\n"
FSDP = """        use_cpu=True,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
"""


def test_a_run_is_killed_and_resumes(ranks: Ranks, tmp_path: Path) -> None:
    program = Program("transformers.md", tmp_path, ranks, *PEERS)
    program.survives(2, 1, killed_at=9, saved=2)
    steps = CheckpointManager(tmp_path / "killed/run/transformers").steps()
    assert [step.step for step in steps] == [10, 12]
    assert all(step.complete for step in steps)


@pytest.mark.campaign
def test_a_run_with_fsdp_is_killed_and_resumes_without(
    ranks: Ranks, tmp_path: Path
) -> None:
    sharded = Program("transformers.md", tmp_path, ranks, *PEERS)
    assert PLAIN in sharded.source
    sharded.source = FSDP_ON_CPU + sharded.source.replace(PLAIN, FSDP)
    plain = Program("transformers.md", tmp_path, ranks, *PEERS)
    sharded.survives(2, 1, killed_at=9, saved=2, by=plain)


def test_the_best_model_is_kept_and_loaded(ranks: Ranks, tmp_path: Path) -> None:
    program = Program("transformers.md", tmp_path, ranks, *PEERS)
    old = "        save_steps=2,\n        save_total_limit=2,\n"
    assert old in program.source
    best = (
        "        eval_strategy='steps',\n        eval_steps=2,\n"
        "        load_best_model_at_end=True,\n        metric_for_best_model='loss',\n"
        "        greater_is_better=True,\n"  # so that the worst is the best, and not the last
    )
    program.source = program.source.replace(old, old + best) + (
        "found = trainer.evaluate()['eval_loss']\n"
        "assert abs(found - trainer.state.best_metric) < 1e-6, trainer.state\n"
    )
    assert max(program.run(1, "best")) == 12
    steps = CheckpointManager(tmp_path / "best/run/transformers").steps()
    assert [step.step for step in steps] == [2, 10, 12]


def test_a_clean_resume_logs_no_warning(ranks: Ranks, tmp_path: Path) -> None:
    program = Program("transformers.md", tmp_path, ranks, *PEERS)
    program.resumes_without_a_warning("num_train_epochs=3", "num_train_epochs=2")


def test_the_model_alone_is_saved(ranks: Ranks, tmp_path: Path) -> None:
    program = Program("transformers.md", tmp_path, ranks, *PEERS)
    old = "        save_steps=2,\n"
    assert old in program.source
    program.source = program.source.replace(
        old, f"{old}        save_only_model=True,\n"
    )
    assert max(program.run(2, "alone")) == 12
    tensors = load_plain_tensors(tmp_path / "alone/run/transformers/checkpoint-12")
    assert tensors
    assert all(key.startswith("model.") for key in tensors)


TOKENIZER = """
import tokenizers
from transformers import PreTrainedTokenizerFast

words = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
tokenizer = tokenizers.Tokenizer(words)
tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="?", pad_token="?",
    chat_template={"default": "x", "tool_use": "y"},
)
"""
EXPORT = """
import os

import torch
from megackpt.__main__ import main
from transformers import AutoModelForCausalLM, AutoTokenizer

step = "run/transformers/checkpoint-12"
assert main(["export-hf", step, "whole"]) == 0
assert main(["export-hf", step, "cut", "--cast", "bf16", "--max-shard-size", "6KB"]) == 0
tokens, logits = torch.load("logits.pt")
model = AutoModelForCausalLM.from_pretrained("whole")
assert torch.equal(model(tokens).logits, logits)
tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
assert tied == model.config.tie_word_embeddings
assert model.config.architectures == ["LlamaForCausalLM"]
assert "model.safetensors.index.json" in os.listdir("cut")
model = AutoModelForCausalLM.from_pretrained("cut")
assert model.dtype == torch.bfloat16
assert (model(tokens).logits - logits).abs().max() < 0.1
found = AutoTokenizer.from_pretrained("whole")
assert found("a b z").input_ids == [0, 1, 2]
assert found.chat_template == {"default": "x", "tool_use": "y"}
assert not any(name.endswith((".pt", "state.json")) for name in os.listdir("whole"))
print("step 1: 0", flush=True)
"""


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_is_exported_for_from_pretrained(
    ranks: Ranks, tmp_path: Path, tied: bool
) -> None:
    program = Program("transformers.md", tmp_path, ranks, *PEERS)
    source = program.source
    for old, new in (
        ("\ntorch.manual_seed(1)\n", f"{TOKENIZER}\ntorch.manual_seed(1)\n"),
        ("    train_dataset=data,\n", "    train_dataset=data, processing_class=tokenizer,\n"),
        ("vocab_size=64,", f"vocab_size=64, tie_word_embeddings={tied},"),
    ):  # fmt: skip
        assert old in source
        source = source.replace(old, new)
    program.source = source + (
        "if trainer.is_world_process_zero():\n"
        "    torch.save((tokens[:2], model(tokens[:2]).logits.detach()), 'logits.pt')\n"
    )
    program.run(2, "exported")
    program.source = EXPORT
    program.run(1, "exported")
