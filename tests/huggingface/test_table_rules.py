"""Rules and tables: what they read and write, and what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megackpt
from megackpt import ShardedTensor
from megackpt.converter import export_huggingface
from megackpt.errors import (
    MismatchError,
    ShardingError,
)
from megackpt.huggingface import (
    Fuse,
    LayerKernel,
    Padded,
    Part,
    Piece,
    Table,
    Transpose,
    as_huggingface,
    bert,
    link,
    llama,
)
from megackpt.planning.box import Box
from tests.huggingface.models import (
    CASES,
    CONFIG,
    Own,
    case,
    equal,
    groups,
    numbered,
    shard,
)


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


def test_all_mismatches_are_in_one_error(tmp_path: Path) -> None:
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


def test_kernels_without_an_axis_of_layers_are_refused() -> None:
    rule = LayerKernel("layers.#.norm", ((0,),), layers=3)
    for shape in ((4,), (), (4, 2)):
        with pytest.raises(MismatchError, match="is not of 3 layers of 1 axes"):
            link({"norm": rule}, [("norm", shape)])
