"""Checkpoints of Megatron-FSDP: uneven shards, and the names of torch_dist in both directions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.__main__ import main
from megackpt.errors import MismatchError
from megackpt.huggingface import (
    Fuse,
    Transpose,
    from_fsdp_dtensor,
    link,
    llama,
    reversed_table,
    to_fsdp_dtensor,
)
from tests.bits import assert_same
from tests.foreign.bars import (
    MEMORY_RUNS,
    TARGETS,
    check_conversions,
    check_layouts,
    check_memory,
    check_resuming,
)
from tests.ports import unused_port

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests/golden/fsdp-dtensor-mcore-0.16.1"
EXPECTED = torch.load(f"{GOLDEN}.expected.pt", weights_only=True)
STORED = megackpt.load_plain_tensors(GOLDEN)


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert_same(found[key], tensor, key)


def saved(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    shards = {k: ShardedTensor.from_rank_offsets(k, t) for k, t in state.items()}
    megackpt.save(shards, folder)
    return folder


def test_any_layout_loads() -> None:
    """The stored names; each rank's part of a tensor is as large as Megatron-FSDP's buffer made it."""
    check_layouts(GOLDEN, STORED)
    whole = STORED["model.module.decoder.layers.0.mlp.linear_fc1.weight_v"]
    _, second = EXPECTED["decoder.layers.0.mlp.linear_fc1.weight"].chunk(2)
    assert torch.equal(whole, second)


def test_every_format_gets_the_same_bits(tmp_path: Path) -> None:
    check_conversions(GOLDEN, STORED, tmp_path)


def test_names_of_torch_dist_and_back(tmp_path: Path) -> None:
    table = from_fsdp_dtensor(
        megackpt.load_tensors_metadata(GOLDEN), stack_layers=False
    )
    for target in TARGETS:
        megackpt.convert(GOLDEN, tmp_path / target, target, table=table)
        check(megackpt.load_plain_tensors(tmp_path / target), EXPECTED)
    back = to_fsdp_dtensor(EXPECTED, swiglu=True)
    megackpt.convert(
        tmp_path / "torch_dist", tmp_path / "back", "torch_dist", table=back
    )
    check(megackpt.load_plain_tensors(tmp_path / "back"), STORED)


def test_stacked_layers_and_experts(tmp_path: Path) -> None:
    """As Megatron-Core stores layers that are alike, with and without experts."""
    layers, experts = 3, 2
    random = torch.Generator().manual_seed(1)
    expected = {
        "decoder.layers.self_attention.linear_proj.weight": torch.randn(
            layers, 4, 4, generator=random
        ),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": torch.randn(
            layers, experts, 8, 4, generator=random
        ),
        "decoder.layers.mlp.shared_experts.linear_fc1.weight": torch.randn(
            layers, 8, 4, generator=random
        ),
        "optimizer.state.exp_avg.decoder.layers.mlp.shared_experts.linear_fc1.weight": torch.randn(
            layers, 8, 4, generator=random
        ),
    }
    source = saved(tmp_path / "core", expected)
    table = to_fsdp_dtensor(expected, swiglu=True)
    megackpt.convert(source, tmp_path / "fsdp", "torch_dist", table=table)
    found = megackpt.load_plain_tensors(tmp_path / "fsdp")
    experts_of = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    for layer in range(layers):
        for expert in range(experts):
            for half, part in zip(
                "wv", expected[experts_of][layer, expert].chunk(2), strict=True
            ):
                key = f"model.module.decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}_{half}"
                assert torch.equal(found[key], part), key
    back = from_fsdp_dtensor(found, stack_layers=True)
    megackpt.convert(tmp_path / "fsdp", tmp_path / "back", "torch_dist", table=back)
    check(megackpt.load_plain_tensors(tmp_path / "back"), expected)


def test_without_gated_layers_and_with_sequential_experts(tmp_path: Path) -> None:
    expert = "decoder.layers.0.mlp.experts.local_experts"
    state = {
        f"model.module.{expert}.{i}.linear_fc1.weight": torch.full((4, 2), float(i))
        for i in range(3)
    }
    table = from_fsdp_dtensor(state, stack_layers=False)
    megackpt.convert(saved(tmp_path / "c", state), tmp_path / "o", "zarr", table=table)
    key = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight"
    expected = {key: torch.stack([*state.values()])}
    check(megackpt.load_plain_tensors(tmp_path / "o"), expected)
    assert list(to_fsdp_dtensor(expected, swiglu=False).values()) == [
        "model.module.decoder.layers.#.mlp.experts.linear_fc1.weight#"
    ]


def test_hugging_face_by_way_of_torch_dist(tmp_path: Path) -> None:
    heads, hidden, vocabulary, layers = 2, 8, 11, 2
    layer = "model.module.decoder.layers"
    random = torch.Generator().manual_seed(2)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    state = {
        "model.module.embedding.word_embeddings.weight": new(vocabulary, hidden),
        "model.module.decoder.final_layernorm.weight": new(hidden),
        "model.module.output_layer.weight": new(vocabulary, hidden),
    }
    for i in range(layers):
        state |= {
            f"{layer}.{i}.self_attention.linear_qkv.weight": new(3 * hidden, hidden),
            f"{layer}.{i}.self_attention.linear_qkv.layer_norm_weight": new(hidden),
            f"{layer}.{i}.self_attention.linear_proj.weight": new(hidden, hidden),
            f"{layer}.{i}.mlp.linear_fc1.layer_norm_weight": new(hidden),
            f"{layer}.{i}.mlp.linear_fc1.weight_w": new(12, hidden),
            f"{layer}.{i}.mlp.linear_fc1.weight_v": new(12, hidden),
            f"{layer}.{i}.mlp.linear_fc2.weight": new(hidden, 12),
        }
    table = from_fsdp_dtensor(state, stack_layers=True)
    megackpt.convert(saved(tmp_path / "f", state), tmp_path / "t", "torch_dist", table=table)  # fmt: skip
    config = {"num_attention_heads": heads, "vocab_size": vocabulary}
    megackpt.convert(tmp_path / "t", tmp_path / "hf", "safetensors", table=llama(config), state=False)  # fmt: skip
    found = megackpt.load_plain_tensors(tmp_path / "hf")
    for i in range(layers):
        gate = found[f"model.layers.{i}.mlp.gate_proj.weight"]
        assert torch.equal(gate, state[f"{layer}.{i}.mlp.linear_fc1.weight_w"])
        up = found[f"model.layers.{i}.mlp.up_proj.weight"]
        assert torch.equal(up, state[f"{layer}.{i}.mlp.linear_fc1.weight_v"])
        fused = state[f"{layer}.{i}.self_attention.linear_qkv.weight"]
        query = fused.reshape(heads, 3, hidden // heads, hidden)[:, 0]
        q = found[f"model.layers.{i}.self_attn.q_proj.weight"]
        assert torch.equal(q, query.reshape(hidden, hidden))
    way_back = reversed_table(llama(config), fused_norms=True)
    megackpt.convert(tmp_path / "hf", tmp_path / "t2", "torch_dist", table=way_back)
    table = to_fsdp_dtensor(megackpt.load_tensors_metadata(tmp_path / "t2"), swiglu=True)  # fmt: skip
    megackpt.convert(tmp_path / "t2", tmp_path / "f2", "torch_dist", table=table)
    check(megackpt.load_plain_tensors(tmp_path / "f2"), state)
    alone = reversed_table(llama(config), fused_norms=False)
    before = "model.layers.#.input_layernorm.weight"
    assert alone[before] == "decoder.layers.#.input_layernorm.weight"
    assert way_back[before].endswith("self_attention.linear_qkv.layer_norm_weight")
    with pytest.raises(MismatchError, match="cannot be reversed"):
        reversed_table({"w": Fuse((Transpose("a"), "b"))}, fused_norms=False)


def test_what_is_missing_or_unknown_is_named() -> None:
    with pytest.raises(MismatchError, match=r"not of a checkpoint in fsdp_dtensor: 'decoder\.w'"):  # fmt: skip
        from_fsdp_dtensor(["model.module.w", "decoder.w"], stack_layers=False)
    with pytest.raises(MismatchError, match=r"no state of a parameter.*'optimizer\.x'"):
        to_fsdp_dtensor(["w", "optimizer.x"], swiglu=False)
    shapes = {key: tuple(tensor.shape) for key, tensor in STORED.items()}
    for key in shapes:
        left = {k: shape for k, shape in shapes.items() if k != key}
        if not key.endswith(("_w", "_v", "weight0", "weight1")):
            continue
        with pytest.raises(MismatchError, match=r"holds|there is no"):
            link(
                from_fsdp_dtensor(left, stack_layers=False), left.items(), complete=True
            )
    with pytest.raises(MismatchError, match="nothing that the checkpoint holds"):
        link(from_fsdp_dtensor(shapes, stack_layers=True), shapes.items(), complete=True)  # fmt: skip


def test_show_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(GOLDEN)]) == 0
    assert "names: fsdp_dtensor (Megatron-FSDP)\n" in capsys.readouterr().out
    assert megackpt.verify(GOLDEN).ok


def test_show_does_not_guess_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DistributedDataParallel begins the names of weights in the same way."""
    weight = ShardedTensor.from_rank_offsets("model.module.weight", torch.zeros(4))
    megackpt.save({"w": weight}, tmp_path / "c")
    assert main(["show", str(tmp_path / "c")]) == 0
    assert "names:" not in capsys.readouterr().out


def test_a_conversion_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = from_fsdp_dtensor(STORED, stack_layers=False)
    check_resuming(GOLDEN, EXPECTED, tmp_path / "c", monkeypatch, table=table)


def test_stock_dcp_reads_what_is_converted_to_these_names(tmp_path: Path) -> None:
    """Megatron-FSDP loads by torch DCP."""
    import torch.distributed.checkpoint as dcp

    source = saved(tmp_path / "core", EXPECTED)
    table = to_fsdp_dtensor(EXPECTED, swiglu=True)
    megackpt.convert(source, tmp_path / "fsdp", "torch_dist", table=table)
    found = {key: torch.zeros_like(tensor) for key, tensor in STORED.items()}
    dcp.load(found, checkpoint_id=tmp_path / "fsdp", no_dist=True)
    check(found, STORED)


def write(folder: Path, rows: int = 0) -> None:
    """By Megatron's function for uneven shards and torch DCP, on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    script = ROOT / "tests/golden/make_fsdp_dtensor.py"
    subprocess.run(
        [*command, f"--master_port={unused_port()}", script, folder, str(rows)],
        env=os.environ | {"PYTHONPATH": str(ROOT / ".peers")},
        check=True,
        capture_output=True,
    )


@pytest.mark.megatron
def test_what_megatron_writes_today(tmp_path: Path) -> None:
    write(tmp_path / "c")
    check(megackpt.load_plain_tensors(tmp_path / "c"), STORED)


@pytest.mark.megatron
@pytest.mark.parametrize(("gibibytes", "to"), MEMORY_RUNS)
def test_memory_is_bounded(tmp_path: Path, gibibytes: float, to: str) -> None:
    write(tmp_path / "c", int(gibibytes * (1 << 18)))
    check_memory(tmp_path / "c", tmp_path / "target", to)
    shutil.rmtree(tmp_path)
