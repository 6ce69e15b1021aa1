"""Tensors and state dicts that the tests of Hugging Face's formats share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.huggingface import (
    Fuse,
    Name,
    Padded,
    Rule,
    Table,
    Transpose,
)

Tensors = dict[str, torch.Tensor]


QKV = tuple(f"h.#.{part}.weight" for part in "qkv")


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def groups(part: slice) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows of each of 3 groups of 2 + 1 + 1 shares of 2 rows."""
    return lambda x: x.unflatten(0, (3, 4, 2))[:, part].flatten(0, 2)


class Shifted(Rule):
    """A rule of a user's own: theirs are numbered from 1."""

    def names(self) -> Iterator[str]:
        yield "h.#.back"

    def pieces(self, shape: tuple[int, ...], naming: Callable[[str], str]) -> Any:
        return Name(f"h.{1 + int(naming('#'))}.back").pieces(shape, str)


# Our key, its shape, the rule, and what theirs are of ours.
CASES: dict[
    str,
    tuple[str, tuple[int, ...], Any, dict[str, Callable[[torch.Tensor], torch.Tensor]]],
] = {
    "a name": ("layers.0.w", (4, 3), "h.#.w", {"h.0.w": lambda x: x}),
    "no dimensions": ("layers.0.w", (), "h.#.w", {"h.0.w": lambda x: x}),
    "transposed": ("layers.0.w", (4, 3), Transpose("h.#.w"), {"h.0.w": lambda x: x.T}),
    "transposed, of three axes": (
        "layers.0.w",
        (2, 4, 3),
        Transpose("h.#.w"),
        {"h.0.w": lambda x: x.mT},
    ),
    "fused": (
        "layers.0.w",
        (6, 3),
        Fuse(("h.#.gate", "h.#.up")),
        {"h.0.gate": lambda x: x[:3], "h.0.up": lambda x: x[3:]},
    ),
    "fused by groups": (
        "layers.0.w",
        (24, 3),
        Fuse(QKV, (2, 1, 1), 3),
        {
            "h.0.q.weight": groups(slice(0, 2)),
            "h.0.k.weight": groups(slice(2, 3)),
            "h.0.v.weight": groups(slice(3, 4)),
        },
    ),
    "fused along the second axis": (
        "layers.0.w",
        (2, 6),
        Fuse(("h.#.a", "h.#.b"), (1, 2), axis=1),
        {"h.0.a": lambda x: x[:, :2], "h.0.b": lambda x: x[:, 2:]},
    ),
    "fused of transposed ones": (
        "layers.0.w",
        (6, 3),
        Fuse((Transpose("h.#.a"), Transpose("h.#.b"))),
        {"h.0.a": lambda x: x[:3].T, "h.0.b": lambda x: x[3:].T},
    ),
    "transposed, fused ones": (
        "layers.0.w",
        (6, 4),
        Transpose(Fuse(("h.#.a", "h.#.b"))),
        {"h.0.a": lambda x: x[:, :2].T, "h.0.b": lambda x: x[:, 2:].T},
    ),
    "padded": ("layers.0.w", (7, 3), Padded("h.#.w", 5), {"h.0.w": lambda x: x[:5]}),
    "one layer after the other": (
        "layers.w",
        (3, 4, 2),
        Transpose("h.#.w"),
        {f"h.{n}.w": lambda x, n=n: x[n].T for n in range(3)},
    ),
    "a rule of one's own": (
        "layers.w",
        (2, 4, 3),
        Shifted(),
        {"h.1.back": lambda x: x[0], "h.2.back": lambda x: x[1]},
    ),
    "a rule of one's own, of a single layer": (
        "layers.0.w",
        (4, 3),
        Shifted(),
        {"h.1.back": lambda x: x},
    ),
}


def case(name: str) -> tuple[str, torch.Tensor, Table, Tensors]:
    """Our key, what it holds, the table, and theirs."""
    key, shape, rule, parts = CASES[name]
    ours = numbered(*shape)
    return (
        key,
        ours,
        {"layers.#.w": rule},
        {name: part(ours).contiguous() for name, part in parts.items()},
    )


def shard(
    key: str, value: torch.Tensor, *cuts: tuple[int, int, int], **more: Any
) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, value, *cuts, **more)


def equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key


CONFIG = {
    "vocab_size": 50,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


H, F, L, D = 16, 24, 3, 4


def theirs() -> Tensors:
    random = torch.Generator().manual_seed(3)

    def of(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(torch.bfloat16)

    found = {
        "model.embed_tokens.weight": of(50, H),
        "lm_head.weight": of(50, H),
        "model.norm.weight": of(H),
    }
    for n in range(L):
        shapes: dict[str, Sequence[int]] = {
            "input_layernorm": [H], "post_attention_layernorm": [H], "self_attn.q_proj": [H, H],
            "self_attn.k_proj": [2 * D, H], "self_attn.v_proj": [2 * D, H], "self_attn.o_proj": [H, H],
            "mlp.gate_proj": [F, H], "mlp.up_proj": [F, H], "mlp.down_proj": [H, F],
        }  # fmt: skip
        found |= {
            f"model.layers.{n}.{name}.weight": of(*shape)
            for name, shape in shapes.items()
        }
    return found


def ours(
    rank: int, tp: int, stacked: bool = False, vocabulary: int = 52
) -> dict[str, Any]:
    """A Llama of TP ranks as Megatron-Core names it, of zeros; with all that a training has beside."""

    def declared(key: str, *shape: int, axis: int | None = None) -> ShardedTensor:
        cut = [] if axis is None else [(axis, rank, tp)]
        local = [n // tp if a == axis else n for a, n in enumerate(shape)]
        replica = (0, 0 if cut else rank, 0)
        return shard(
            key, torch.zeros(local, dtype=torch.bfloat16), *cut, replica_id=replica
        )

    def layer(n: int) -> dict[str, ShardedTensor]:
        name = f"decoder.layers.{n}."
        return {
            "norm1": declared(name + "self_attention.linear_qkv.layer_norm_weight", H),
            "qkv": declared(
                name + "self_attention.linear_qkv.weight", H + 4 * D, H, axis=0
            ),
            "proj": declared(name + "self_attention.linear_proj.weight", H, H, axis=1),
            "norm2": declared(name + "mlp.linear_fc1.layer_norm_weight", H),
            "fc1": declared(name + "mlp.linear_fc1.weight", 2 * F, H, axis=0),
            "fc2": declared(name + "mlp.linear_fc2.weight", H, F, axis=1),
        }

    layers = [layer(n) for n in range(L)]
    if (
        stacked
    ):  # one tensor for all layers, each of which has its place along a first axis
        for n, found in enumerate(layers):
            for one in found.values():
                one.key = one.key.replace(f".{n}.", ".")
                one.global_shape, one.global_offset = (
                    (L, *one.global_shape),
                    (n, *one.global_offset),
                )
                one.axis_fragmentations, one.prepend_axis_num = (
                    (L, *one.axis_fragmentations),
                    1,
                )
    return {
        "embedding": declared(
            "embedding.word_embeddings.weight", vocabulary, H, axis=0
        ),
        "output": declared("output_layer.weight", vocabulary, H, axis=0),
        "norm": declared("decoder.final_layernorm.weight", H),
        "layers": layers,
        "rng": ShardedObject("rng_state", {"seed": rank}, (tp,), (rank,)),
    }


def tensors_in(state: dict[str, Any]) -> list[ShardedTensor]:
    return [
        x for x in megackpt.tree.nested_values(state) if isinstance(x, ShardedTensor)
    ]


def files_in(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    }


class Own(Rule):
    """A rule of a user's, as wrong as they give it."""

    def __init__(self, made: Callable[[], list[Any]]) -> None:
        self.made = made

    def names(self) -> Iterator[str]:
        yield "x"

    def pieces(self, shape: tuple[int, ...], naming: Callable[[str], str]) -> Any:
        return self.made()
