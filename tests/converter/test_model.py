"""A real model through every format: its weights bit by bit, and what it says of a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

import megackpt

Weights = dict[str, torch.Tensor]

# "A man is playing the guitar." by the model's vocabulary, and the beginning of the embedding that
# transformers 4 computes of it from the original file.
SENTENCE = [101, 1037, 2158, 2003, 2652, 1996, 2858, 1012, 102]
EMBEDDING = [0.02355, 0.0007, -0.006236, -0.056407, -0.155202, 0.000312]
HEADS, LAYERS = 12, 6


def embedding(weights: Weights, tokens: list[int]) -> torch.Tensor:
    """BERT's encoder, the mean over all tokens, of length 1."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(
            x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12
        )

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(0, 1)

    x = weights["embeddings.word_embeddings.weight"][tokens]
    x = x + weights["embeddings.position_embeddings.weight"][: len(tokens)]
    x = norm(
        x + weights["embeddings.token_type_embeddings.weight"][0],
        "embeddings.LayerNorm",
    )
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}"
        query, key, value = (
            heads(linear(x, f"{name}.attention.self.{part}"))
            for part in ("query", "key", "value")
        )
        seen = (
            functional.scaled_dot_product_attention(query, key, value)
            .transpose(0, 1)
            .flatten(-2)
        )
        x = norm(
            x + linear(seen, f"{name}.attention.output.dense"),
            f"{name}.attention.output.LayerNorm",
        )
        inner = functional.gelu(linear(x, f"{name}.intermediate.dense"))
        x = norm(x + linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")
    mean = x.mean(0)
    return mean / mean.norm()


@pytest.mark.slow
def test_real_weights_go_through_every_format(tmp_path: Path, minilm: Path) -> None:
    """safetensors -> torch_dist -> zarr -> torch -> safetensors."""
    first = megackpt.load_plain_tensors(minilm)
    assert len(first) == 104
    before = embedding(first, SENTENCE)
    assert before[:6].tolist() == pytest.approx(EMBEDDING, abs=2e-6)
    steps = [
        minilm,
        tmp_path / "a",
        tmp_path / "b",
        tmp_path / "c.pt",
        tmp_path / "d.safetensors",
    ]
    formats = ("torch_dist", "zarr", "torch", "safetensors")
    for source, target, to in zip(steps, steps[1:], formats, strict=False):
        done = megackpt.convert(source, target, to, workers=2, max_memory="64MiB")
        assert (done.tensors, done.objects) == (104, 0)
    last = megackpt.load_plain_tensors(steps[-1])
    assert last.keys() == first.keys()
    for key, tensor in first.items():
        assert tensor.dtype == last[key].dtype
        assert torch.equal(tensor, last[key]), key
    assert torch.equal(embedding(last, SENTENCE), before)
    by_torch = torch.load(tmp_path / "c.pt", weights_only=True)
    assert torch.equal(embedding(by_torch, SENTENCE), before)
