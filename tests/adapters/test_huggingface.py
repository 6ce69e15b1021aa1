"""Tables of rules: what each rule means, both ways, against plain torch; what is read; what does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megackpt
from megackpt import ShardedObject, ShardedTensor, ShardedTensorFactory, limits
from megackpt.adapters.huggingface import (
    Fuse,
    Name,
    Padded,
    Part,
    Piece,
    Rule,
    Table,
    Tied,
    Transpose,
    as_huggingface,
    bert,
    link,
    llama,
)
from megackpt.checkpoint import committing, replacing
from megackpt.converter import conversion, convert, export_huggingface
from megackpt.errors import (
    BackendError,
    CheckpointingException,
    MismatchError,
    NotACheckpoint,
    SaveInProgress,
    ShardingError,
    StorageError,
)
from megackpt.planning.box import Box
from megackpt.storage.files import LocalReader
from megackpt.testing import ThreadedGroup

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


def cut_in_two(key: str, whole: torch.Tensor) -> Iterator[ShardedTensor]:
    """Halves along each axis that has any, with new memory, and the whole."""
    yield shard(key, torch.full_like(whole, -1))
    for axis, size in enumerate(whole.shape):
        if size % 2 == 0:
            for rank in range(2):
                yield shard(
                    key,
                    torch.full_like(whole.chunk(2, axis)[rank], -1),
                    (axis, rank, 2),
                )


def unequal_halves(key: str, whole: torch.Tensor, axis: int) -> Iterator[ShardedTensor]:
    size = whole.shape[axis]
    offset = [0] * whole.dim()
    for part in whole.split([size // 2, size - size // 2], axis):
        shape, place = tuple(part.shape), tuple(offset)
        yield ShardedTensor(
            key, part, part.dtype, shape, tuple(whole.shape), place, None
        )
        offset[axis] += part.shape[axis]


@pytest.mark.parametrize("name", CASES)
def test_a_rule_reads(name: str, tmp_path: Path) -> None:
    key, ours, table, theirs = case(name)
    save_file(theirs, tmp_path / "model.safetensors", {"format": "pt"})
    for asked in cut_in_two(key, ours):
        expected = ours[asked.global_slice()].clone()
        if name == "padded":
            expected[5:] = 0
        state = as_huggingface({"w": asked}, table)
        loaded = megackpt.load(state, tmp_path, validate_access_integrity=False)
        assert loaded["w"].data_ptr() == asked.data.data_ptr()
        assert torch.equal(loaded["w"], expected)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_writes(name: str, tmp_path: Path) -> None:
    key, ours, table, theirs = case(name)
    megackpt.save(
        as_huggingface({"w": shard(key, ours)}, table),
        tmp_path / "saved",
        "safetensors",
    )
    equal(load_file(tmp_path / "saved/model.safetensors"), theirs)
    for axis in range(ours.dim()):
        halves = list(unequal_halves(key, ours, axis))
        source, target = tmp_path / f"cut{axis}", tmp_path / f"exported{axis}"
        megackpt.save({"halves": halves}, source, "torch_dist")
        done = export_huggingface(source, target, table, {"hidden_size": 3})
        assert (done.tensors, done.objects) == (len(theirs), 0)
        equal(load_file(target / "model.safetensors"), theirs)
        assert json.loads((target / "config.json").read_text()) == {"hidden_size": 3}


def test_a_part_of_what_is_fused_over_there(tmp_path: Path) -> None:
    fused = numbered(24, 3)
    save_file({"h.0.qkv": fused}, tmp_path / "model.safetensors")
    table = {
        f"layers.#.{name}": Part("h.#.qkv", n, (2, 1, 1), 3)
        for n, name in enumerate("qkv")
    }
    sizes = {"q": 12, "k": 6, "v": 6}
    state = {
        name: shard(f"layers.0.{name}", torch.zeros(size, 3))
        for name, size in sizes.items()
    }
    loaded = megackpt.load(as_huggingface(state, table), tmp_path, strict="raise_all")
    for name, part in zip("qkv", (slice(0, 2), slice(2, 3), slice(3, 4)), strict=True):
        assert torch.equal(loaded[name], groups(part)(fused))
    megackpt.save(state, tmp_path / "ours")
    export_huggingface(tmp_path / "ours", tmp_path / "back", table, {})
    equal(load_file(tmp_path / "back/model.safetensors"), {"h.0.qkv": fused})


def test_a_factory_of_the_users_own_is_kept(tmp_path: Path) -> None:
    """SwiGLU as Megatron declares it: each rank has its rows of gate and of up, fused in memory."""
    gate, up = numbered(4, 3), -numbered(4, 3)
    save_file({"h.0.gate": gate, "h.0.up": up}, tmp_path / "model.safetensors")
    table = {"layers.#.fc1": Fuse(("h.#.gate", "h.#.up"))}

    def rank(group: ThreadedGroup) -> torch.Tensor:
        def build(
            key: str, data: torch.Tensor, replica_id: Any, _: Any
        ) -> list[ShardedTensor]:
            return [
                shard(key, half, (0, group.rank + 2 * n, 4))
                for n, half in enumerate(data.chunk(2))
            ]

        state = {
            "fc1": ShardedTensorFactory(
                "layers.0.fc1", torch.zeros(4, 3), build, torch.cat
            )
        }
        return megackpt.load(
            as_huggingface(state, table), tmp_path, strict=True, process_group=group
        )["fc1"]

    for r, loaded in enumerate(ThreadedGroup.run(2, rank)):
        rows = slice(2 * r, 2 * r + 2)
        assert torch.equal(loaded, torch.cat([gate[rows], up[rows]]))


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


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read of tensors."""
    counts: list[int] = []
    read_into = LocalReader.read_into

    def counted(self: LocalReader, start: int, buffers: Sequence[memoryview]) -> None:
        counts.append(sum(buffer.nbytes for buffer in buffers))
        read_into(self, start, buffers)

    monkeypatch.setattr(LocalReader, "read_into", counted)
    return counts


def test_each_rank_reads_what_it_needs_and_nothing_else(
    tmp_path: Path, read: list[int]
) -> None:
    """Of fused tensors their rows, of columns and of transposed tensors the parts of rows; to the byte."""
    q, k, v = numbered(16, 4096), numbered(8, 4096) + 0.5, numbered(8, 4096) + 0.25
    o, turned = -numbered(32, 8192), numbered(8192, 32)
    save_file(
        {"q": q, "k": k, "v": v, "o": o, "t": turned}, tmp_path / "model.safetensors"
    )
    table: Table = {
        "qkv": Fuse(("q", "k", "v"), (2, 1, 1), 4),
        "o": "o",
        "t": Transpose("t"),
    }

    def rank(group: ThreadedGroup) -> dict[str, Any]:
        r = group.rank
        state = {
            "qkv": shard("qkv", torch.zeros(8, 4096), (0, r, 4)),
            "o": shard("o", torch.zeros(32, 2048), (1, r, 4)),
            "t": shard("t", torch.zeros(32, 2048), (1, r, 4)),  # rows of theirs
        }
        return megackpt.load(
            as_huggingface(state, table), tmp_path, strict=True, process_group=group
        )

    megackpt.load_tensors_metadata(tmp_path)
    header, read[:] = sum(read), []
    parts = ThreadedGroup.run(4, rank)
    opened = header * (
        4 + 1
    )  # the coordinator looks at all, each rank whether this is a safetensors file
    assert (
        0
        <= sum(read) - sum(t.nbytes for part in parts for t in part.values())
        <= opened
    )
    expected = torch.cat([part.unflatten(0, (4, -1)) for part in (q, k, v)], 1).flatten(
        0, 1
    )
    assert torch.equal(torch.cat([part["qkv"] for part in parts]), expected)
    assert torch.equal(torch.cat([part["o"] for part in parts], 1), o)
    assert torch.equal(torch.cat([part["t"] for part in parts], 1), turned.T)


@pytest.mark.parametrize("stacked", [False, True], ids=["layers", "stacked"])
def test_a_llama_over_tensor_parallel_ranks_and_back(
    stacked: bool, tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, table = theirs(), llama(CONFIG)
    names = sorted(expected)
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for n, file in enumerate(files):
        save_file(
            {k: expected[k] for k in names[n::2]}, tmp_path / file, {"format": "pt"}
        )
    index = {
        "metadata": {},
        "weight_map": {name: files[i % 2] for i, name in enumerate(names)},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    megackpt.load_tensors_metadata(tmp_path)
    headers = sum(read) * 2  # each of two ranks looks at them, too

    def rank(group: ThreadedGroup) -> dict[str, Any]:
        state = ours(group.rank, group.size, stacked)
        loaded = megackpt.load(
            as_huggingface(state, table), tmp_path, strict=True, process_group=group
        )
        assert loaded["rng"] == {"seed": group.rank}
        training = state | {
            "adam": shard(
                "optimizer.state.exp_avg.w", torch.ones(4), (0, group.rank, 2)
            )
        }
        megackpt.save(training, tmp_path / "training", process_group=group)
        return state

    del read[:]
    states = ThreadedGroup.run(2, rank)
    wanted = sum(shard.data.nbytes for state in states for shard in tensors_in(state))
    assert sum(read) <= wanted + headers + 2 * 4096
    q, k, v = (expected[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    second = torch.cat([q[2 * D :], k[D:], v[D:]])
    assert torch.equal(states[1]["layers"][1]["qkv"].data, second)
    assert torch.equal(states[1]["embedding"].data[-2:], torch.zeros(2, H))

    # each tensor in several cells, over several tasks
    monkeypatch.setattr(limits, "CONVERT_CELL_BYTES", 512)
    monkeypatch.setattr(limits, "CONVERT_TASK_BYTES_MIN", 4096)
    done = export_huggingface(
        tmp_path / "training",
        tmp_path / "out",
        table,
        CONFIG,
        max_shard_size=8000,
        workers=1,
    )
    assert (done.tensors, done.objects, done.bytes) == (
        len(expected),
        0,
        sum(t.nbytes for t in expected.values()),
    )
    parts = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(parts) > 1
    assert all(sum(t.nbytes for t in load_file(p).values()) <= 8000 for p in parts)
    equal({k: t for p in parts for k, t in load_file(p).items()}, expected)


@pytest.mark.parametrize(
    "strategy",
    [
        "zarr",
        megackpt.Strategy("zarr", options={"compression": "zstd"}),
        "torch",
        "safetensors",
    ],
    ids=["zarr", "zarr-zstd", "torch", "safetensors"],
)
def test_every_format_is_exported(
    strategy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cast on the way; and, of one of them, by worker processes."""
    if strategy == "zarr":
        monkeypatch.setattr(limits, "CONVERT_TASK_BYTES_MIN", 16384)
    hf, table = tmp_path / "hf", llama(CONFIG)
    hf.mkdir()
    save_file(theirs(), hf / "model.safetensors")
    state = ours(0, 1, stacked=True)
    megackpt.load(as_huggingface(state, table), hf)
    megackpt.save(state, tmp_path / "saved")
    megackpt.convert(tmp_path / "saved", tmp_path / "training", strategy)
    export_huggingface(
        tmp_path / "training", tmp_path / "out", table, CONFIG, cast="fp32", workers=2
    )
    equal(
        load_file(tmp_path / "out/model.safetensors"),
        {key: value.float() for key, value in theirs().items()},
    )
    assert megackpt.verify(tmp_path / "out").ok


def test_tied_embeddings(tmp_path: Path) -> None:
    """Both of ours are read from the one over there, which is written from the first."""
    config = CONFIG | {"tie_word_embeddings": True}
    weights = theirs()
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    state = ours(0, 1)
    megackpt.load(as_huggingface(state, llama(config)), tmp_path, strict=True)
    assert torch.equal(state["output"].data, state["embedding"].data)
    state["output"].data.zero_()
    megackpt.save(state, tmp_path / "training")
    export_huggingface(tmp_path / "training", tmp_path / "out", llama(config), config)
    equal(load_file(tmp_path / "out/model.safetensors"), weights)


def test_what_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    save_file({"a": numbered(4)}, tmp_path / "model.safetensors")
    state = {
        "unknown": shard("decoder.layers.0.adapter.weight", torch.zeros(2)),
        "another": shard("rotary.inv_freq", torch.zeros(2)),
        "qkv": shard(
            "decoder.layers.0.self_attention.linear_qkv.weight", torch.zeros(7, 2)
        ),
        "norm": shard("decoder.final_layernorm.weight", torch.zeros(2)),
        "small": shard("embedding.word_embeddings.weight", torch.zeros(40, 2)),
        "wrong": [shard(f"wrong.{n}", torch.zeros(2)) for n in range(5)],
        "stacked": shard("s", torch.tensor(1.0)),
        "more": shard("more.w", torch.zeros(2)),
    }
    table = llama(CONFIG) | {
        "decoder.*_layernorm.weight": "model.norms.*", "a.#.b": "c", "wrong.0": Fuse(("x", "y"), (1,)),
        "wrong.1": Part("x", 2, (1, 1)), "wrong.2": Transpose("x"), "wrong.3": Padded("x", 2, -1),
        "wrong.4": Padded("x", -1), "s.#": "s.#", "more.*": "more.*.*",
    }  # fmt: skip
    with pytest.raises(MismatchError) as caught:
        megackpt.load(as_huggingface(state, table), tmp_path)
    text = str(caught.value)
    for told in (
        "no rule fits 'decoder.layers.0.adapter.weight', 'rotary.inv_freq'",
        "'decoder.final_layernorm.weight' fits several rules: 'decoder.final_layernorm.weight', 'decoder.*_lay",
        "linear_qkv.weight', by the rule 'decoder.layers.#.self_attention.linear_qkv.weight': axis 0 of shape (7, 2)",
        "cannot be cut into 2 groups of parts as (2, 1, 1)",
        "shape (40, 2) is smaller than the 50 of axis 0",
        "shape (2,) cannot be 2, and padding, along axis -1",
        "shape (2,) cannot be -1, and padding, along axis 0",
        "a ratio of 1, (1,), does not fit 2 parts",
        "a ratio of 2, (1, 1), has no part 2",
        "shape (2,) has no two axes to exchange",
        "shape () has no axis for each '#' that its key has no number for",
        "the rule 'a.#.b': 'c' must have as many '*' and '#'",
        "the rule 'more.*': 'more.*.*' must have as many '*' and '#'",
    ):
        assert told in text
    for wrong, table in (
        (
            {"w": ShardedTensor("w", None, torch.int8, (3,), (4,), (1,), (1,))},
            {"w": "w"},
        ),
        ({"w": shard("w", torch.zeros(3))}, {"w": ["a", "b"]}),
        ({"w": shard("w", torch.zeros(3))}, {"w": 3}),
        ({"w": shard("w", torch.zeros(3))}, {3: "w"}),
        ({"w": shard("w", torch.zeros(3))}, ["w"]),
    ):
        with pytest.raises(
            ShardingError,
            match=r"local shape|the rule 'w': .* is neither a name nor a rule|a table is a dict",
        ):
            megackpt.save(as_huggingface(wrong, table), tmp_path / "out")


def test_what_does_not_fit_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    """Stages of a pipeline hold different keys."""
    save_file({"a": numbered(4), "b": numbered(4)}, tmp_path / "model.safetensors")
    held = torch.full((4,), -1.0)

    def rank(group: ThreadedGroup) -> None:
        state = {"w": shard("ax"[group.rank], held)}
        megackpt.load(
            as_huggingface(state, {"a": "a", "b": "b"}), tmp_path, process_group=group
        )

    for error in ThreadedGroup.outcomes(2, rank):
        assert "no rule fits 'x'" in str(error)
    assert (held == -1).all()


def test_numbers_in_names_and_along_axes(tmp_path: Path) -> None:
    """Layers and experts: both in the name, one of them, or none."""
    whole = numbered(2, 3, 4, 2)
    theirs = {
        f"h.{n}.e.{e}.w": whole[n, e].T.contiguous() for n in range(2) for e in range(3)
    }
    save_file(
        theirs | {"h.0.e.empty": torch.zeros(0, 3)}, tmp_path / "model.safetensors"
    )
    table: Table = {
        "layers.#.experts.#.w": Transpose("h.#.e.#.w"),
        "#.empty": "h.#.e.empty",
    }
    for keys in (
        {"layers.experts.w": whole},
        {f"layers.{n}.experts.w": whole[n] for n in range(2)},
        {f"layers.{n}.experts.{e}.w": whole[n, e] for n in range(2) for e in range(3)},
    ):
        state = {key: shard(key, torch.zeros_like(part)) for key, part in keys.items()}
        state["0.empty"] = shard("0.empty", torch.zeros(0, 3))
        loaded = megackpt.load(as_huggingface(state, table), tmp_path)
        assert all(torch.equal(loaded[key], part) for key, part in keys.items())
        megackpt.save(state, tmp_path / f"{len(keys)}")
        export_huggingface(
            tmp_path / f"{len(keys)}", tmp_path / f"{len(keys)}-out", table, {}
        )
        found = load_file(tmp_path / f"{len(keys)}-out/model.safetensors")
        equal(found, theirs | {"h.0.e.empty": torch.zeros(0, 3)})


def test_an_export_that_does_not_fit_writes_nothing(tmp_path: Path) -> None:
    state = {
        "a": shard("a", torch.zeros(4)), "b": shard("b", torch.zeros(4)), "half": shard("half", torch.zeros(2))
    }  # fmt: skip
    megackpt.save(state, tmp_path / "training")

    def told(table: Table, **options: Any) -> str:
        with pytest.raises(MismatchError) as caught:
            export_huggingface(
                tmp_path / "training", tmp_path / "out", table, {}, **options
            )
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    same: dict[str, Any] = {"a": "a", "b": "b", "half": "c"}
    unfit = told({"a": "a", "layers.#.w": Fuse(("x.#", "y.#")), "other": "a"})
    assert "no rule fits 'b', 'half'" in unfit
    assert "no tensor fits the rule 'layers.#.w' (for 'x.#', 'y.#')" in unfit
    assert "'other'" not in unfit  # what it is for, 'a' gives
    assert (
        "'a': [0:4] is in 2 tensors: Tied for all but one (it is made of 'a', 'b')"
        in told(same | {"b": "a"})
    )
    lost = told(
        same | {"b": Part(Fuse(("b", "c", "d"), (1, 1, 2)), 0, (1, 1)), "half": None}
    )
    assert "'d' is made of nothing that the checkpoint holds" in lost
    assert "'d': [2:4] is in nothing that the checkpoint holds" in told(
        same | {"half": Part("d", 0, (1, 1))}
    )
    assert "'a' would have the shapes [(2,), (4,)], by 'a', 'half'" in told(
        same | {"half": "a"}
    )
    state["half"] = shard("half", torch.zeros(2, dtype=torch.int8))
    state["rest"] = shard("rest", torch.zeros(2))
    megackpt.save(state, tmp_path / "training")
    split = same | {"half": Part("d", 0, (1, 1)), "rest": Part("d", 1, (1, 1))}
    assert "'d' would be of float32 and int8" in told(split)
    assert "\n" not in told(same | {"rest": None, "half": Transpose("d")}), (
        "one problem, one line"
    )


def test_the_files_beside(tmp_path: Path) -> None:
    megackpt.save({"a": shard("a", torch.zeros(4))}, tmp_path / "training")
    beside = tmp_path / "pretrained"
    beside.mkdir()
    with pytest.raises(StorageError, match=r"a directory that has a config\.json"):
        export_huggingface(tmp_path / "training", tmp_path / "out", {"a": "a"}, beside)
    for name in (
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "pytorch_model.bin",
    ):
        (beside / name).write_text(f'"{name}"')
    with pytest.raises(StorageError, match="cannot be read"):
        export_huggingface(
            tmp_path / "training", tmp_path / "out", {"a": "a"}, tmp_path / "nowhere"
        )
    assert not (tmp_path / "out").exists()
    copied = {
        "tokenizer.model.v3",
        "source.spm",
        "bpe.codes",
        "dict.txt",
        "LICENSE",
        "train.py",
    }
    left = {
        "optimizer.pt",
        "training_args.bin",
        "trainer_state.json",
        ".gitattributes",
        "model.onnx_data",
    }
    left |= {"vocab.txt.old", "vocab.txt.old2", "megackpt.journal"}
    for name in copied | left:
        (beside / name).write_text(name)
    folders = {
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "additional_chat_templates/tool.jinja",
    }
    for name in {*folders, "runs/config.json", "odd.json/config.json"}:
        (beside / name).parent.mkdir()
        (beside / name).write_text("{}")
    modules = [{"path": path} for path in ("", "1_Pooling", "2_Dense", "../training")]
    (beside / "modules.json").write_text(json.dumps(modules))
    export_huggingface(tmp_path / "training", tmp_path / "out", {"a": "a"}, beside)
    copied |= {"config.json", "tokenizer.json", "modules.json"} | folders
    assert files_in(tmp_path / "out") == copied | {
        "model.safetensors",
        "megackpt.index",
    }

    told = {"dtype": "bfloat16", "hidden_size": 3}
    (beside / "config.json").write_text(json.dumps(told))
    arguments = (tmp_path / "training", tmp_path / "out", {"a": "a"}, beside)
    for cast, dtype in ((None, "float32"), ("fp16", "float16")):
        before = (tmp_path / "out/config.json").read_bytes()
        with pytest.raises(
            StorageError, match=r"config\.json would collide with this save"
        ):
            export_huggingface(*arguments, cast=cast, overwrite=True)
        assert (tmp_path / "out/config.json").read_bytes() == before
        (tmp_path / "out/config.json").unlink()
        export_huggingface(*arguments, cast=cast, overwrite=True)
        assert json.loads((tmp_path / "out/config.json").read_text()) == told | {
            "dtype": dtype
        }
    assert files_in(tmp_path / "out") == copied | {
        "model.safetensors",
        "megackpt.index",
    }
    (beside / "modules.json").write_text('[{"path": "0_Transformer"}]')
    with pytest.raises(StorageError, match="the model is in one of the folders"):
        export_huggingface(*arguments, overwrite=True)


def files_in(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    }


def test_an_export_that_fails_touches_no_file_of_others(tmp_path: Path) -> None:
    """Nor does one that meets another."""
    training, out = tmp_path / "training", tmp_path / "out"
    megackpt.save({"a": shard("a", torch.zeros(4))}, training)
    out.mkdir()
    (out / "config.json").write_text("mine")
    before = files_in(tmp_path)

    def export(
        config: dict[str, Any],
        target: Path = out,
        table: Table | None = None,
        **options: Any,
    ) -> None:
        export_huggingface(training, target, table or {"a": "a"}, config, **options)

    for options in (
        {"workers": -3}, {"select": "nothing*"}, {"max_memory": "zz"}, {"max_memory": 10}, {"nope": 1},
        {"table": {"a": "__metadata__"}}, {"target": training / "hf"},
    ):  # fmt: skip
        with pytest.raises((CheckpointingException, ValueError, TypeError)):
            export({}, **options)  # type: ignore[arg-type]
    assert files_in(tmp_path) == before
    assert (out / "config.json").read_text() == "mine"

    def another(done: int, total: int) -> None:
        with pytest.raises(SaveInProgress):
            export({"who": "the second"})

    with pytest.raises(
        StorageError, match=r"config\.json would collide with this save"
    ):
        export({"who": "the first"})
    assert files_in(tmp_path) == before
    assert (out / "config.json").read_text() == "mine"
    (out / "config.json").unlink()
    export({"who": "the first"}, progress=another)
    assert json.loads((out / "config.json").read_text()) == {"who": "the first"}


def test_what_takes_the_place_of_an_export_is_complete_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    megackpt.save({"a": shard("a", torch.zeros(4))}, tmp_path / "training")
    folder, out = tmp_path / "hf/additional_chat_templates", tmp_path / "out"
    folder.mkdir(parents=True)
    for name in ("../config.json", "../tokenizer.json", "tool.jinja"):
        (folder / name).write_text("{}")
    seen: list[set[str]] = []

    def looked(*arguments: Any) -> None:
        seen.append(files_in(out))
        replacing.retire(*arguments)

    monkeypatch.setattr(committing, "retire", looked)

    def export() -> set[str]:
        export_huggingface(
            tmp_path / "training", out, {"a": "a"}, tmp_path / "hf", overwrite=True
        )
        return files_in(out)

    first = export()
    assert export() == first
    assert len(seen) == 1
    assert seen[0] > first, "and the marker"
    (out / folder.name / "mine").write_text("mine")
    with pytest.raises(
        StorageError, match=f"{folder.name} would collide with this save"
    ):
        export()
    shutil.rmtree(out / folder.name)
    (out / folder.name).write_text("a file")
    with pytest.raises(
        StorageError, match=f"{folder.name} would collide with this save"
    ):
        export()
    (out / folder.name).unlink()
    assert export() == first


def test_exports_that_cannot_be_are_refused_before_they_begin(tmp_path: Path) -> None:
    megackpt.save({"a": shard("a", torch.zeros(4))}, tmp_path / "training")
    (tmp_path / "file").write_text("mine")
    for target, error, said in (
        (
            "model.safetensors",
            BackendError,
            "is one file, and other files go beside it",
        ),
        ("file", StorageError, "a file is in the way"),
    ):
        with pytest.raises(error, match=said):
            export_huggingface(tmp_path / "training", tmp_path / target, {"a": "a"}, {})
    for config, said in (
        ({"dtype": torch.bfloat16}, "cannot hold"),
        (object(), "a dict"),
    ):
        with pytest.raises(MismatchError, match=said):
            export_huggingface(
                tmp_path / "training", tmp_path / "out", {"a": "a"}, config
            )  # type: ignore[arg-type]
    for name in ("model.safetensors", "megackpt.index"):
        with pytest.raises(
            BackendError, match=f"'{name}' is a file of the format safetensors"
        ):
            convert(
                tmp_path / "training",
                tmp_path / "out",
                "safetensors",
                beside={name: b"mine"},
            )
    assert {path.name for path in tmp_path.iterdir()} == {"training", "file"}


def test_a_training_checkpoint_that_lacks_a_layer_is_not_exported(
    tmp_path: Path,
) -> None:
    """Neither one in the middle nor the last; what other numbers there are (experts, a second stack) is no matter."""
    weights = {
        f"model.layers.{n}.experts.{e}.w": numbered(2)
        for n in (0, 1, 3)
        for e in (0, 5)
    }
    weights["mtp.layers.0.w"] = numbered(2)
    megackpt.save(
        {key: shard(key, value) for key, value in weights.items()},
        tmp_path / "training",
    )
    for config, name, lacking in (
        ({"num_hidden_layers": 4}, "num_hidden_layers is 4", "model.layers.2"),
        (
            {"num_hidden_layers": 5},
            "num_hidden_layers is 5",
            "model.layers.2, model.layers.4",
        ),
        ({"n_layer": 4}, "n_layer is 4", "model.layers.2"),
        (
            {"text_config": {"num_layers": 3}, "num_hidden_layers": 2},
            "num_layers is 3",
            "model.layers.2",
        ),
    ):
        with pytest.raises(MismatchError, match=rf"{name}, .* nothing for {lacking}$"):
            export_huggingface(
                tmp_path / "training", tmp_path / "out", {"*": "*"}, config
            )
    assert not (tmp_path / "out").exists()
    export_huggingface(
        tmp_path / "training", tmp_path / "out", {"*": "*"}, {"num_hidden_layers": 2}
    )
    equal(load_file(tmp_path / "out/model.safetensors"), weights)


class Own(Rule):
    """A rule of a user's, as wrong as they give it."""

    def __init__(self, made: Callable[[], list[Any]]) -> None:
        self.made = made

    def names(self) -> Iterator[str]:
        yield "x"

    def pieces(self, shape: tuple[int, ...], naming: Callable[[str], str]) -> Any:
        return self.made()


WHOLE = Box((0, 0), (2, 2))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: [Piece(WHOLE, "x", (1, 2), WHOLE, (0, 1))], "is not the same region"),
        (
            lambda: [
                Piece(Box((0, 0), (3, 2)), "x", (3, 2), Box((0, 0), (3, 2)), (0, 1))
            ],
            "is not the same",
        ),
        (
            lambda: [Piece(WHOLE, "x", (4, 2), Box((0, 0), (1, 2)), (0, 1))],
            "is not the same region",
        ),
        (lambda: [Piece(WHOLE, "x", (2, 2), WHOLE, (0, 0))], "is not the same region"),
        (
            lambda: [Piece(WHOLE, "x", (2, 1), Box((0, 0), (2, 1)), (0, None))],
            "is not the same region",
        ),
        (
            lambda: [Piece(WHOLE, "x", (2,), Box((0,), (2,)), (2,))],
            "IndexError|is not the same region",
        ),
        (lambda: [Piece(Box((0,), (2, 2)), "x", (2, 2), WHOLE, (0, 1))], "ValueError"),
        (lambda: [{}["lost"]], "KeyError"),
        (
            lambda: [Piece(WHOLE, k, (2, 2), WHOLE, (0, 1)) for k in "xy"],
            "is in 2 of its pieces",
        ),
    ],
)
def test_rules_of_a_users_own_are_checked(
    made: Callable[[], list[Any]], said: str
) -> None:
    with pytest.raises(MismatchError, match=rf"'a', by the rule 'a': .*({said})"):
        link({"a": Own(made)}, [("a", (2, 2))])
    with pytest.raises(ShardingError, match="is a comma missing"):
        Fuse("xy")  # type: ignore[arg-type]


def test_tensors_of_very_many_places_are_refused() -> None:
    for shape in ((10**9, 0), (10**7, 1)):
        with pytest.raises(MismatchError, match="has no elements, or too many places"):
            link({"l.#": "l.#"}, [("l", shape)])


@pytest.mark.parametrize(
    ("patterns", "keys", "missing", "unsure"),
    [
        ("layers.#.w", "layers.0.w layers.2.w", "no layers.1 (", ""),
        (
            "h.#.w h.#.b",
            "h.w h.4.b",
            "no h.3 (",
            "",
        ),  # the first is of 3 layers, one after the other
        ("h.#.e.*", "h.0.e.x h.1.e.y h.3.e.x", "no h.2 (", ""),
        (
            "layers.#.experts.#.w",
            "layers.0.experts.0.w layers.0.experts.2.w",
            "no layers.0.experts.1 (",
            "",
        ),
        (
            "l.*.experts.#.w",
            "l.1.experts.0.w l.1.experts.2.w",
            "no l.1.experts.1 (",
            "",
        ),
        ("h.#.w", "h.0.w h.999999999.w", "no h.1, h.2, h.3", ""),
        ("layers.#.w layers.#.b", "layers.0.w layers.1.w", "the rule 'layers.#.b'", ""),
        (
            "layers.#.w layers.#.b",
            "layers.0.w layers.1.w layers.0.b",
            "",
            "'layers.#.b' is not of layers.1,",
        ),
        (
            "layers.#.*",
            "layers.0.attn layers.1.mamba",
            "",
            "'layers.#.attn' is not of layers.1,",
        ),
        (
            "mlp.#.*",
            "mlp.0.w mlp.2.w",
            "",
            "no mlp.1",
        ),  # a Sequential, an activation between
        (
            "h.#.n h.*.experts.#.w",
            "h.0.n h.1.n h.1.experts.0.w h.1.experts.1.w",
            "",
            "",
        ),
        ("e.#.w d.#.w", "e.0.w e.1.w d.0.w", "", ""),
        (
            "layer#.#.conv#",
            "layer1.0.conv1 layer1.0.conv2 layer1.1.conv1 layer1.1.conv2 layer2.0.conv1",
            "",
            "",
        ),
        (
            "layers.#.blocks.#.w",
            "layers.0.blocks.0.w layers.1.blocks.0.w layers.1.blocks.1.w",
            "",
            "",
        ),
    ],
)
def test_numbers_of_which_some_are_missing(
    patterns: str,
    keys: str,
    missing: str,
    unsure: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Layers in the middle, parts of layers, experts: whatever rules of the same beginning have."""
    told = ""
    try:
        shapes = [(key, (3, 2)) for key in keys.split()]
        link(
            {pattern: f"t.{pattern}" for pattern in patterns.split()},
            shapes,
            complete=True,
        )
    except MismatchError as error:
        told = str(error)
    assert (missing in told) if missing else not told
    if not missing:
        assert (unsure in caplog.text) if unsure else not caplog.text


@pytest.mark.parametrize("function", ["rule", "build"])
def test_what_fails_on_one_rank_fails_on_all(function: str, tmp_path: Path) -> None:
    save_file({"e": numbered(4)}, tmp_path / "model.safetensors")

    def rank(group: ThreadedGroup) -> None:
        def build(key: str, data: torch.Tensor, *_: Any) -> ShardedTensor:
            if group.rank == 1 and function == "build":
                raise ValueError("boom")
            return shard(key, data)

        def pieces() -> list[Any]:
            raise ValueError("boom")

        state = {"e": ShardedTensorFactory("e", torch.zeros(4), build, lambda x: x)}
        table: Table = {
            "e": Own(pieces) if group.rank == 1 and function == "rule" else "e"
        }
        megackpt.load(as_huggingface(state, table), tmp_path, process_group=group)

    for error in ThreadedGroup.outcomes(2, rank):
        assert isinstance(error, CheckpointingException)
        assert "boom" in str(error)


@pytest.mark.parametrize(
    "rule", [Padded("e", 6), Padded("e", 12), Fuse(("e", "f"))], ids=str
)
def test_theirs_in_another_shape_than_the_rule_says_is_refused(
    rule: Rule, tmp_path: Path
) -> None:
    """Also where ours may differ, as Megatron's embeddings; where there is no rule they still may."""
    save_file(
        {"e": numbered(10, 2), "f": numbered(10, 2)}, tmp_path / "model.safetensors"
    )
    held = torch.full((16, 2), 7.0)
    asked = {"e": shard("e", held, allow_shape_mismatch=True)}
    with pytest.raises(MismatchError, match=r"\(10, 2\)"):
        megackpt.load(as_huggingface(asked, {"e": rule}), tmp_path)
    assert (held == 7).all()
    megackpt.load(as_huggingface(asked, {"e": "e"}), tmp_path)
    assert torch.equal(held[:10], numbered(10, 2))


@pytest.mark.parametrize("strict", ["ignore_all", "log_all", "return_unexpected"])
def test_what_is_there_in_part_is_left_alone(strict: str, tmp_path: Path) -> None:
    save_file({"q": numbered(2, 2), "v": numbered(3)}, tmp_path / "model.safetensors")
    held, other = torch.full((4, 2), 7.0), torch.zeros(3)
    state = as_huggingface(
        {"w": shard("w", held), "v": shard("v", other)},
        {"w": Fuse(("q", "k")), "v": "v"},
    )
    found: Any = megackpt.load(state, tmp_path, strict=strict)
    assert (found[0] if strict.startswith("return") else found).keys() == {"v"}
    assert (held == 7).all()
    assert torch.equal(other, numbered(3))


def test_configurations_that_no_table_can_be_of() -> None:
    heads = {"num_attention_heads": 8, "vocab_size": 4}
    for config, said in (
        (
            {"vocab_size": 4},
            "num_attention_heads must be a whole number from 1 on, not None",
        ),
        (heads | {"num_attention_heads": 0}, "num_attention_heads must be .* not 0"),
        (heads | {"num_key_value_heads": 0}, "num_key_value_heads must be .* not 0"),
        (
            heads | {"num_key_value_heads": 3},
            "num_key_value_heads, 3, does not divide num_attention_heads, 8",
        ),
        (
            {"text_config": heads},
            r"num_attention_heads .* \(its text_config has one: give that one\)",
        ),
    ):
        with pytest.raises(MismatchError, match=said):
            llama(config)
    with pytest.raises(MismatchError, match="vocab_size must be"):
        bert({"num_attention_heads": 8})


def test_biases_that_a_configuration_tells_of() -> None:
    key, shapes = "decoder.layers.0.", {"q": (16,), "k": (8,), "v": (8,)}
    table = llama(CONFIG | {"attention_bias": True, "mlp_bias": True})
    biases = {"self_attention.linear_qkv": 32, "self_attention.linear_proj": 16, "mlp.linear_fc1": 48,
              "mlp.linear_fc2": 16}  # fmt: skip
    links = link(table, [(f"{key}{name}.bias", (n,)) for name, n in biases.items()])
    found = {
        piece.key.removeprefix("model.layers.0."): piece.shape
        for p in links.values()
        for piece in p
    }
    assert found == {f"self_attn.{x}_proj.bias": shape for x, shape in shapes.items()} | {
        "self_attn.o_proj.bias": (16,), "mlp.gate_proj.bias": (24,), "mlp.up_proj.bias": (24,),
        "mlp.down_proj.bias": (16,),
    }  # fmt: skip
    with pytest.raises(MismatchError, match="no rule fits"):
        link(llama(CONFIG), [(f"{key}mlp.linear_fc2.bias", (16,))])


def test_tensors_without_elements_are_asked_for(tmp_path: Path) -> None:
    save_file(
        {"z": torch.zeros(0, 2), "e": numbered(2)}, tmp_path / "model.safetensors"
    )
    state = as_huggingface(
        {"z": shard("z", torch.zeros(0, 2)), "e": shard("e", torch.zeros(2))},
        {"*": "*"},
    )
    assert megackpt.load(state, tmp_path, strict="raise_all")["z"].shape == (0, 2)
    megackpt.save(state, tmp_path / "saved", "safetensors")
    assert load_file(tmp_path / "saved/model.safetensors").keys() == {"z", "e"}


def test_padding_of_eight_bit_floats(tmp_path: Path) -> None:
    weights = numbered(4, 2).to(torch.float8_e4m3fn)
    save_file({"e": weights}, tmp_path / "model.safetensors")
    asked = shard("e", torch.full((6, 2), 3.0).to(torch.float8_e4m3fn))
    megackpt.load(as_huggingface({"e": asked}, {"e": Padded("e", 4)}), tmp_path)
    assert torch.equal(
        asked.data.float(), torch.cat([numbered(4, 2), torch.zeros(2, 2)])
    )


def test_another_table_is_another_export(tmp_path: Path) -> None:
    """What an earlier export left is not taken for this one's, though all names and shapes are the same."""
    square = numbered(4, 4)
    megackpt.save({"a": shard("a", square)}, tmp_path / "training")
    for rule, expected in (("a", square), (Transpose("a"), square.T)):
        export_huggingface(
            tmp_path / "training", tmp_path / "out", {"a": rule}, {}, overwrite=True
        )
        assert torch.equal(load_file(tmp_path / "out/model.safetensors")["a"], expected)


@pytest.mark.parametrize("in_place", [False, True])
def test_an_export_goes_on_where_it_was_cut_off(
    in_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the directory that the configuration is taken from."""
    monkeypatch.setattr(limits, "CONVERT_CELL_BYTES", 4096)
    monkeypatch.setattr(limits, "CONVERT_TASK_BYTES_MIN", 16384)
    whole = numbered(64, 512)
    megackpt.save({"a": shard("a", whole)}, tmp_path / "training")
    config: Any = tmp_path / "out" if in_place else {}
    if in_place:
        config.mkdir()
        (config / "config.json").write_text("{}")
    table = {"a": Fuse((Transpose("b"), Transpose("c")))}
    arguments = (tmp_path / "training", tmp_path / "out", table, config)

    def cut_off(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_huggingface(*arguments, progress=cut_off)
    assert (tmp_path / "out/config.json").exists() == in_place
    with monkeypatch.context() as patched:
        patched.setattr(
            conversion, "commit", lambda *_: cut_off(1, 1)
        )  # when all but the last file is there
        with pytest.raises(KeyboardInterrupt):
            export_huggingface(*arguments)
    assert (tmp_path / "out/config.json").exists()
    with pytest.raises(NotACheckpoint, match="died before it was complete"):
        megackpt.load_plain_tensors(tmp_path / "out")
    done = export_huggingface(*arguments)
    assert done.resumed == done.bytes
    equal(
        load_file(tmp_path / "out/model.safetensors"),
        {"b": whole[:32].T.contiguous(), "c": whole[32:].T.contiguous()},
    )
    assert files_in(tmp_path / "out") == {
        "config.json",
        "model.safetensors",
        "megackpt.index",
    }


def test_shares_that_are_padding_only(tmp_path: Path) -> None:
    """A rank whose rows all are beyond the vocabulary reads nothing, and has zeros."""
    save_file({"e": numbered(4, 2)}, tmp_path / "model.safetensors")
    held = [torch.full((3, 2), -1.0) for _ in range(3)]

    def rank(group: ThreadedGroup) -> Any:
        state = {"e": shard("e", held[group.rank], (0, group.rank, 3))}
        table = {"e": Padded("e", 4)}
        return megackpt.load(
            as_huggingface(state, table), tmp_path, strict=True, process_group=group
        )["e"]

    expected = torch.cat([numbered(4, 2), torch.zeros(5, 2)])
    assert torch.equal(torch.cat(ThreadedGroup.run(3, rank)), expected)
    assert torch.equal(torch.cat(held), expected)


def test_ranks_agree_on_what_is_not_there(tmp_path: Path) -> None:
    """Where the halves of a fused tensor are on different ranks, and where a rank has padding only."""
    save_file(
        {"q": numbered(2, 2), "e": numbered(4, 2)}, tmp_path / "model.safetensors"
    )

    def rank(group: ThreadedGroup) -> tuple[set[str], set[str], float]:
        state = {
            key: shard(key, torch.full((2, 2), 7.0), (0, group.rank, 2))
            for key in ("qk", "padded")
        }
        stacked = ShardedTensor.from_rank_offsets(
            "l.w", torch.full((2,), 7.0), (0, group.rank, 2), prepend_axis_num=1
        )
        table = {"qk": Fuse(("q", "k")), "padded": Padded("none", 2), "l.#.w": "l.#"}
        asked = as_huggingface({**state, "stacked": stacked}, table)
        found, _, absent = megackpt.load(
            asked, tmp_path, strict="return_all", process_group=group
        )
        return (
            {*found},
            absent,
            min(float(one.data.min()) for one in (*state.values(), stacked)),
        )

    first, second = ThreadedGroup.run(2, rank)
    assert first[0] == second[0] == set()
    assert first[2] == second[2] == 7.0, "all is left alone"
    assert {"k", "none"} <= first[1] & second[1]


def test_ranks_without_a_share_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of padding, or of rows that are fewer than the ranks."""

    def rank(group: ThreadedGroup) -> None:
        rows, offset = ((2, 2, 1, 0)[group.rank], (0, 2, 4, 5)[group.rank])
        uneven = ShardedTensor(
            "u",
            torch.ones(rows, 2),
            torch.float32,
            (rows, 2),
            (5, 2),
            (offset, 0),
            None,
        )
        state = {"u": uneven, "e": shard("e", torch.ones(2, 2), (0, 3 - group.rank, 4))}
        table = {"u": Transpose("u"), "e": Padded("e", 3)}
        megackpt.save(
            as_huggingface(state, table),
            tmp_path / "out",
            "safetensors",
            process_group=group,
        )
        megackpt.load(
            as_huggingface(state, table),
            tmp_path / "out",
            strict=True,
            process_group=group,
        )

    ThreadedGroup.run(4, rank)
    equal(
        load_file(tmp_path / "out/model.safetensors"),
        {"u": torch.ones(2, 5), "e": torch.ones(3, 2)},
    )
    assert not [record for record in caplog.records if "common" in record.getMessage()]


@pytest.mark.parametrize(
    ("table", "axis", "size"),
    [
        (
            {
                "w": Fuse(
                    (Transpose("q"), Transpose("k"), Transpose("v")),
                    (2, 1, 1),
                    groups=2,
                )
            },
            0,
            16,
        ),
        ({"w": Fuse(("a", "b"), groups=2, axis=1)}, 1, 8),
        (
            {
                key: Part(Transpose("c_attn"), number, (1, 1, 1))
                for number, key in enumerate("qkv")
            },
            0,
            3,
        ),
    ],
    ids=[
        "transposed, by groups",
        "by groups of columns",
        "rows of which some ranks have none",
    ],
)
def test_ranks_that_do_not_meet_all_of_theirs(
    table: dict[str, Any], axis: int, size: int, tmp_path: Path
) -> None:
    whole = numbered(*((size, 4) if axis == 0 else (2, size)))

    def rank(group: ThreadedGroup) -> None:
        parts = [
            *whole.split(-(-size // group.size), axis),
            whole.narrow(axis, size, 0),
        ]
        part = parts[min(group.rank, len(parts) - 1)]
        place = [0, 0]
        place[axis] = sum(one.shape[axis] for one in parts[: group.rank])

        def state(data: torch.Tensor) -> dict[str, ShardedTensor]:
            shape = tuple(data.shape)
            return {
                key: ShardedTensor(
                    key,
                    data.clone(),
                    data.dtype,
                    shape,
                    tuple(whole.shape),
                    tuple(place),
                    None,
                )
                for key in table
            }

        megackpt.save(
            as_huggingface(state(part), table),
            tmp_path / "out",
            "safetensors",
            process_group=group,
        )
        asked = as_huggingface(state(part - 1), table)
        found = megackpt.load(
            asked, tmp_path / "out", strict="raise_all", process_group=group
        )
        equal(found, dict.fromkeys(table, part))

    ThreadedGroup.run(4, rank)


def test_tensors_without_data_or_place(tmp_path: Path) -> None:
    """data=None and meta tensors get new ones; what they do not have stays; dtypes are converted."""
    save_file(
        {"w": numbered(4, 2)}, tmp_path / "model.safetensors", {"author": "somebody"}
    )
    meta = shard("w", torch.empty(2, 4, dtype=torch.bfloat16, device="meta"))
    none = meta.without_data()
    mine = shard("mine", torch.ones(3))
    for asked in (meta, none):
        table: Table = {"w": Transpose("w"), "mine": None}
        state = as_huggingface(
            {"w": asked, "mine": mine, "step": 3, "empty": {}}, table
        )
        loaded = megackpt.load(state, tmp_path)
        assert loaded.keys() == {"w", "mine", "step", "empty"}
        assert torch.equal(loaded["w"], numbered(4, 2).T.to(torch.bfloat16))
        assert loaded["mine"] is mine.data
        assert loaded["step"] == 3


def test_tied_alone_cannot_be_exported(tmp_path: Path) -> None:
    megackpt.save({"a": shard("a", torch.zeros(4))}, tmp_path / "training")
    with pytest.raises(MismatchError, match=r"'a' is made of nothing .* \(tied"):
        export_huggingface(
            tmp_path / "training", tmp_path / "out", {"a": Tied("a")}, {}
        )
