"""Weights of Hugging Face's own in tensor-parallel models, and ours in its models: what both compute is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import megackpt
from megackpt import ShardedTensor
from megackpt.converter import export_huggingface
from megackpt.huggingface import as_huggingface, bert, llama
from megackpt.storage.files import LocalReader
from tests.conftest import PEERS, ROOT, Ranks

pytestmark = [pytest.mark.transformers, pytest.mark.slow]

SENTENCES = [
    "A man is playing the guitar.",
    "Checkpoints load at any parallelism, into any world size.",
    "Ein Satz, den das Modell kaum versteht!",
]
TOKENS = [[1, 7, 3, 42, 9, 9, 0, 31, 49, 12], [49, 0, 2, 2, 17]]
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 50, "hidden_size": 32,
    "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "attention_bias": False, "mlp_bias": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TIED = [False, True]
LEFT = {
    "embeddings.position_ids",
    "pooler.dense.weight",
    "pooler.dense.bias",
}  # what embeddings do not need

# What transformers makes of the weights of MiniLM and of what was exported; and how it stores the latter itself.
SCRIPT = """
import sys
from pathlib import Path
import torch
from transformers import AutoModel, AutoTokenizer, LlamaForCausalLM

minilm, folder, sentences, tokens = Path(sys.argv[1]), Path(sys.argv[2]), *map(eval, sys.argv[3:5])
told = {"ids": [], "embeddings": [], "logits": []}
tokenizer, model = AutoTokenizer.from_pretrained(minilm), AutoModel.from_pretrained(minilm).eval()
with torch.no_grad():
    for sentence in sentences:
        ids = tokenizer(sentence, return_tensors="pt")["input_ids"]
        told["ids"].append(ids[0].tolist())
        told["embeddings"].append(torch.nn.functional.normalize(model(ids).last_hidden_state[0].mean(0), dim=0))
    for exported in sorted(folder.glob("exported-*")):
        model, info = LlamaForCausalLM.from_pretrained(exported, output_loading_info=True)
        assert not any(info.values()), info
        told["logits"].append([model.eval()(torch.tensor([ids])).logits[0] for ids in tokens])
        model.save_pretrained(folder / exported.name.replace("exported", "theirs"), max_shard_size="30KB")
torch.save(told, folder / "told.pt")
"""


class Parallel:
    """A tensor-parallel model: this rank's weights by key, and how each is cut (the axis, or None)."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.weights: dict[str, torch.Tensor] = {}
        self.axes: dict[str, int | None] = {}

    def add(self, key: str, *shape: int, axis: int | None = None) -> None:
        local = [n // self.size if a == axis else n for a, n in enumerate(shape)]
        self.weights[key], self.axes[key] = torch.full(local, torch.nan), axis

    def sharded_state_dict(self, prefix: str = "") -> dict[str, ShardedTensor]:
        found = {}
        for key, weight in self.weights.items():
            axis = self.axes[key]
            cut = [] if axis is None else [(axis, self.rank, self.size)]
            replica = (0, self.rank if axis is None else 0, 0)
            found[key] = ShardedTensor.from_rank_offsets(
                prefix + key, weight, *cut, replica_id=replica
            )
        return found

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Cut along the axis of outputs, or along that of inputs (then the ranks' results are added up)."""
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        if self.axes[f"{name}.weight"] == 0:
            return functional.linear(x, weight, bias)
        return self.summed(functional.linear(x, weight)) + (0 if bias is None else bias)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    def embedded(self, tokens: Sequence[int]) -> torch.Tensor:
        table = self.weights["embedding.word_embeddings.weight"]
        places = torch.tensor(tokens) - self.rank * len(table)
        mine = (places >= 0) & (places < len(table))
        return self.summed(
            torch.where(mine[:, None], table[places.clamp(0, len(table) - 1)], 0)
        )


class Bert(Parallel):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        h, f = config["hidden_size"], config["intermediate_size"]
        self.heads, self.layers = (
            config["num_attention_heads"],
            config["num_hidden_layers"],
        )
        self.add("embedding.word_embeddings.weight", config["vocab_size"], h, axis=0)
        self.add(
            "embedding.position_embeddings.weight", config["max_position_embeddings"], h
        )
        self.add("embedding.tokentype_embeddings.weight", config["type_vocab_size"], h)
        self.add_norm("embedding.layernorm", h)
        for n in range(self.layers):
            layer = f"encoder.layers.{n}."
            for name, outputs, inputs, axis in (
                ("self_attention.linear_qkv", 3 * h, h, 0), ("self_attention.linear_proj", h, h, 1),
                ("mlp.linear_fc1", f, h, 0), ("mlp.linear_fc2", h, f, 1),
            ):  # fmt: skip
                self.add(f"{layer}{name}.weight", outputs, inputs, axis=axis)
                self.add(f"{layer}{name}.bias", outputs, axis=0 if axis == 0 else None)
            self.add_norm(f"{layer}self_attention.layernorm", h)
            self.add_norm(f"{layer}mlp.layernorm", h)

    def add_norm(self, name: str, size: int) -> None:
        self.add(f"{name}.weight", size)
        self.add(f"{name}.bias", size)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-12)

    def embedding(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of a sentence: the mean over its tokens, of length 1."""
        x = (
            self.embedded(tokens)
            + self.weights["embedding.position_embeddings.weight"][: len(tokens)]
        )
        x = self.norm(
            x + self.weights["embedding.tokentype_embeddings.weight"][0],
            "embedding.layernorm",
        )
        for n in range(self.layers):
            layer = f"encoder.layers.{n}."
            qkv = self.linear(x, f"{layer}self_attention.linear_qkv")
            query, key, value = qkv.unflatten(
                -1, (self.heads // self.size, 3, -1)
            ).permute(2, 1, 0, 3)
            seen = (
                functional.scaled_dot_product_attention(query, key, value)
                .transpose(0, 1)
                .flatten(1)
            )
            x = x + self.linear(seen, f"{layer}self_attention.linear_proj")
            x = self.norm(x, f"{layer}self_attention.layernorm")
            inner = functional.gelu(self.linear(x, f"{layer}mlp.linear_fc1"))
            x = self.norm(
                x + self.linear(inner, f"{layer}mlp.linear_fc2"),
                f"{layer}mlp.layernorm",
            )
        return functional.normalize(x.mean(0), dim=0)


class Llama(Parallel):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        h, f, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        self.groups = config["num_key_value_heads"]
        self.queries = config["num_attention_heads"] // self.groups
        padded = 52  # the vocabulary
        self.add("embedding.word_embeddings.weight", padded, h, axis=0)
        for n in range(config["num_hidden_layers"]):
            layer = f"decoder.layers.{n}."
            self.add(f"{layer}input_layernorm.weight", h)
            self.add(
                f"{layer}self_attention.linear_qkv.weight",
                self.groups * (self.queries + 2) * d,
                h,
                axis=0,
            )
            self.add(f"{layer}self_attention.linear_proj.weight", h, h, axis=1)
            self.add(f"{layer}pre_mlp_layernorm.weight", h)
            self.add(f"{layer}mlp.linear_fc1.weight", 2 * f, h, axis=0)
            self.add(f"{layer}mlp.linear_fc2.weight", h, f, axis=1)
        self.add("decoder.final_layernorm.weight", h)
        if not config["tie_word_embeddings"]:
            self.add("output_layer.weight", padded, h, axis=0)

    def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
        """SwiGLU: a rank's rows of the gate stand before its rows of the other half, and are declared as two."""
        found: dict[str, Any] = super().sharded_state_dict(prefix)

        def build(
            key: str, data: torch.Tensor, replica_id: Any, _: Any
        ) -> list[ShardedTensor]:
            return [
                ShardedTensor.from_rank_offsets(
                    key,
                    half,
                    (0, self.rank + n * self.size, 2 * self.size),
                    replica_id=replica_id,
                )
                for n, half in enumerate(data.chunk(2))
            ]

        for key, shard in found.items():
            if key.endswith("linear_fc1.weight"):
                found[key] = megackpt.ShardedTensorFactory(
                    shard.key, shard.data, build, torch.cat
                )
        return found

    def randomize(self) -> None:
        for number, (key, weight) in enumerate(self.weights.items()):
            random = torch.Generator().manual_seed(
                number * 10 + self.rank * (self.axes[key] is not None)
            )
            weight.normal_(0.0 if weight.dim() > 1 else 1.0, 0.3, generator=random)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(
            x, x.shape[-1:], self.weights[f"{name}.weight"], self.config["rms_norm_eps"]
        )

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary embeddings of (heads, tokens, size)."""
        half = x.shape[-1] // 2
        angles = torch.outer(
            torch.arange(x.shape[1]), 10000.0 ** (-torch.arange(half) / half)
        )  # position x frequency
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        x = self.embedded(tokens)
        for n in range(self.config["num_hidden_layers"]):
            layer = f"decoder.layers.{n}."
            qkv = self.linear(
                self.norm(x, f"{layer}input_layernorm"),
                f"{layer}self_attention.linear_qkv",
            )
            # tokens x groups of this rank x (queries, key, value) x size
            qkv = qkv.unflatten(
                -1, (self.groups // self.size, self.queries + 2, -1)
            ).movedim(0, 2)
            query, key, value = qkv[:, :-2].flatten(0, 1), qkv[:, -2], qkv[:, -1]
            key, value = (
                part.repeat_interleave(self.queries, 0)
                for part in (self.turned(key), value)
            )
            seen = functional.scaled_dot_product_attention(
                self.turned(query), key, value, is_causal=True
            )
            x = x + self.linear(
                seen.transpose(0, 1).flatten(1), f"{layer}self_attention.linear_proj"
            )
            gate, up = self.linear(
                self.norm(x, f"{layer}pre_mlp_layernorm"), f"{layer}mlp.linear_fc1"
            ).chunk(2, -1)
            x = x + self.linear(functional.silu(gate) * up, f"{layer}mlp.linear_fc2")
        output = self.weights.get(
            "output_layer.weight", self.weights["embedding.word_embeddings.weight"]
        )
        part = functional.linear(self.norm(x, "decoder.final_layernorm"), output)
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part)
        return torch.cat(parts, -1)[:, : self.config["vocab_size"]]


def train(folder: str) -> None:
    """Save Llamas as training does, with Adam's state; note their logits."""
    found = []
    for tied in TIED:
        model = Llama(LLAMA | {"tie_word_embeddings": tied})
        model.randomize()
        adam = Llama.sharded_state_dict(model, "optimizer.state.exp_avg.")
        state = {"model": model.sharded_state_dict(), "optimizer": adam, "iteration": 7}
        megackpt.save(state, f"{folder}/training-{tied}")
        found.append([model.logits(tokens) for tokens in TOKENS])
    if dist.get_rank() == 0:
        torch.save(found, f"{folder}/logits.pt")


def read_back(folder: str, minilm: str) -> None:
    """What transformers stores, and MiniLM, into tensor-parallel models, which compute what transformers told."""
    told = torch.load(f"{folder}/told.pt", weights_only=True)
    for tied, logits in zip(TIED, told["logits"], strict=True):
        config = LLAMA | {"tie_word_embeddings": tied}
        model = Llama(config)
        state = as_huggingface(model.sharded_state_dict(), llama(config))
        megackpt.load(state, f"{folder}/theirs-{tied}", strict="raise_all")
        for tokens, expected in zip(TOKENS, logits, strict=True):
            torch.testing.assert_close(
                model.logits(tokens), expected, atol=1e-5, rtol=1e-4
            )

    config = json.loads((Path(minilm) / "config.json").read_text())
    encoder = Bert(config)
    state = as_huggingface(encoder.sharded_state_dict(), bert(config))
    read = counted(
        lambda: told.update(left=megackpt.load(state, minilm, strict="return_all")[1])
    )
    assert told["left"] == LEFT
    needed = sum(weight.nbytes for weight in encoder.weights.values())
    assert needed < 0.52 * 90_868_376  # half of the file; what is not cut is small
    # Between a rank's columns of so small a model lie gaps that are read through: see SKIP of the range reader.
    gaps = sum(w.nbytes for key, w in encoder.weights.items() if encoder.axes[key] == 1)
    assert needed <= read < needed + gaps, (read, needed, gaps)
    for ids, expected in zip(told["ids"], told["embeddings"], strict=True):
        torch.testing.assert_close(
            encoder.embedding(ids), expected, atol=1e-6, rtol=1e-4
        )
    print(f"read {read} bytes for {needed}")
    megackpt.save(encoder.sharded_state_dict(), f"{folder}/encoder")


def in_megatron(folder: str) -> None:
    """What transformers stores into Megatron-Core's GPTModel, which computes the same; it is saved for an export."""
    from interop.megatron_models import config, parallel, prepare

    prepare()
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    with parallel(2), torch.no_grad():
        options = config(
            num_layers=LLAMA["num_hidden_layers"], hidden_size=LLAMA["hidden_size"], kv_channels=LLAMA["head_dim"],
            ffn_hidden_size=LLAMA["intermediate_size"], num_attention_heads=LLAMA["num_attention_heads"],
            num_query_groups=LLAMA["num_key_value_heads"], layernorm_epsilon=LLAMA["rms_norm_eps"],
            normalization="RMSNorm", gated_linear_unit=True, activation_func=functional.silu, add_bias_linear=False,
        )  # fmt: skip
        embeddings = {
            "position_embedding_type": "rope",
            "share_embeddings_and_output_weights": False,
        }
        model = GPTModel(
            options,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            52,
            64,
            **embeddings,
        ).eval()
        state = as_huggingface(model.sharded_state_dict(), llama(LLAMA))
        model.load_state_dict(
            megackpt.load(state, f"{folder}/theirs-False", strict="raise_all")
        )
        told = torch.load(f"{folder}/told.pt", weights_only=True)["logits"][0]
        for tokens, expected in zip(TOKENS, told, strict=True):
            length = len(tokens)
            later = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
            parts = model(torch.tensor([tokens]), torch.arange(length)[None], later)
            logits = gather_from_tensor_model_parallel_region(parts)[
                0, :, : LLAMA["vocab_size"]
            ]
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
        megackpt.save(model.sharded_state_dict(), f"{folder}/megatron")


def counted(work: Callable[[], object]) -> int:
    """The bytes that are read meanwhile from files of checkpoints."""
    counts: list[int] = []
    read_into = LocalReader.read_into

    def counting(self: LocalReader, start: int, buffers: Sequence[memoryview]) -> None:
        counts.append(sum(buffer.nbytes for buffer in buffers))
        read_into(self, start, buffers)

    LocalReader.read_into = counting  # type: ignore[method-assign]
    try:
        work()
    finally:
        LocalReader.read_into = read_into  # type: ignore[method-assign]
    return sum(counts)


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, ranks: Ranks, minilm: Path
) -> Path:
    """Llamas trained over two ranks and exported, and what transformers tells of them and of MiniLM."""
    folder = tmp_path_factory.mktemp("huggingface")
    ranks(train, 2, folder)
    for tied in TIED:
        config = LLAMA | {"tie_word_embeddings": tied}
        source, target = folder / f"training-{tied}", folder / f"exported-{tied}"
        done = export_huggingface(
            source, target, llama(config), config, max_shard_size="40KB"
        )
        assert (done.tensors, done.objects) == (30 - tied, 0)
        assert (target / "model.safetensors.index.json").is_file()
    env = {
        **os.environ,
        "PYTHONPATH": str(PEERS / "huggingface"),
        "HF_HUB_OFFLINE": "1",
    }
    arguments = [str(minilm.parent), str(folder), repr(SENTENCES), repr(TOKENS)]
    command = [sys.executable, "-c", SCRIPT, *arguments]
    told = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    return folder


def test_transformers_computes_what_the_trainer_did(folder: Path) -> None:
    """LlamaForCausalLM.from_pretrained of what was exported, with untied and with tied embeddings."""
    trained = torch.load(folder / "logits.pt", weights_only=True)
    theirs = torch.load(folder / "told.pt", weights_only=True)["logits"]
    for ours, expected in zip(trained, theirs, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    assert (trained[0][0] - trained[1][0]).abs().max() > 0.1, "two models, not one"


def test_tensor_parallel_models_compute_what_transformers_does(
    folder: Path, ranks: Ranks, minilm: Path
) -> None:
    """Of save_pretrained's own directories, and of MiniLM, of which each rank reads its half, and which is exported."""
    for process in ranks(read_back, 2, folder, minilm.parent):
        print(process.stdout)
    config = json.loads((minilm.parent / "config.json").read_text())
    export_huggingface(
        folder / "encoder", folder / "minilm", bert(config), minilm.parent
    )
    assert (folder / "minilm/tokenizer.json").read_bytes() == (
        minilm.parent / "tokenizer.json"
    ).read_bytes()
    found, expected = (
        megackpt.load_plain_tensors(at) for at in (folder / "minilm", minilm)
    )
    assert expected.keys() - found.keys() == LEFT
    assert all(torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.megatron
def test_megatrons_own_model(folder: Path, ranks: Ranks, peers: dict[str, str]) -> None:
    """What it declares is read, and exported, by the ready table: layers along an axis, norms in linear layers."""
    path = os.pathsep.join([peers["PYTHONPATH"], str(ROOT / "tests")])
    ranks(in_megatron, 2, folder, env={"PYTHONPATH": path}, timeout=120)
    export_huggingface(
        folder / "megatron", folder / "from-megatron", llama(LLAMA), LLAMA
    )
    found, expected = (
        megackpt.load_plain_tensors(folder / name)
        for name in ("from-megatron", "theirs-False")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
