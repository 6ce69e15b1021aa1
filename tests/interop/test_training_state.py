"""The common state of a training run, in Megatron's own classes: opened without Megatron, and given back to it."""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import megackpt
from megackpt.serialization import StandIn

GOLDEN = Path(__file__).parent.parent / "golden"
TRAINING = GOLDEN / "mcore-0.16.1-training"
CORE = "megatron.core"


def common(folder: Path = TRAINING) -> dict[str, Any]:
    assert not any(name.partition(".")[0] == "megatron" for name in sys.modules)
    return megackpt.load_common_state_dict(folder)


def test_arguments_are_a_namespace() -> None:
    args = common()["args"]
    assert type(args) is argparse.Namespace
    assert len(vars(args)) > 300
    assert (args.lr, args.betas, args.data_path) == (
        1.5e-4,
        (0.9, 0.95),
        ["0.3", "a", "0.7", "b"],
    )
    assert (args.params_dtype, args.main_grads_dtype) == (torch.bfloat16, torch.float32)
    assert args.exit_signal is signal.SIGTERM
    assert args.save == PosixPath("runs/a")
    assert args.rotary == SimpleNamespace(base=10000, percent=1.0)
    assert type(args.eos) is np.int64


def test_enums_and_configurations_say_what_they_are() -> None:
    found = common()
    args, config = found["args"], found["optimizer_config"]
    assert args.attention_backend == StandIn(
        f"{CORE}.transformer.enums.AttnBackend", (5,)
    )
    assert args.attention_backend.value == 5
    assert (
        repr(args.model_type)
        == "<stand-in for megatron.core.enums.ModelType args=(1,)>"
    )
    assert [scope.value for scope in args.cuda_graph_scope] == [2, 3]
    assert config.qualified_name == f"{CORE}.optimizer.optimizer_config.OptimizerConfig"
    assert (config.optimizer, config.lr, config.params_dtype) == (
        "adam",
        1.5e-4,
        torch.bfloat16,
    )
    assert "'optimizer': 'adam'" in repr(config)
    rerun = found["rerun_state_machine"]
    assert (rerun["mode"].value, rerun["state"].value) == ("validate_results", 3)
    assert rerun["current_iteration"] == 100


def test_plain_data_is_what_it_was() -> None:
    found = common()
    assert (found["iteration"], found["checkpoint_version"]) == (100, 3.0)
    assert [
        group["params"] for group in found["optimizer"]["optimizer"]["param_groups"]
    ] == [[0, 1], [2]]
    assert found["stream"].getvalue() == b"octets"
    arrays = found["numpy"]
    np.testing.assert_array_equal(
        arrays["array"], np.arange(6, dtype=np.float32).reshape(2, 3), strict=True
    )
    np.testing.assert_array_equal(
        arrays["when"], np.array(["2026-01-01"], "M8[s]"), strict=True
    )
    twin = np.random.RandomState()
    twin.set_state(arrays["rng"])
    assert twin.randint(1 << 30) == np.random.RandomState(5).randint(1 << 30)


def test_the_whole_checkpoint() -> None:
    shard = megackpt.ShardedObject("rerun_state_machine_state", None, (1,), (0,))
    weight = megackpt.ShardedTensor.from_rank_offsets("weight", torch.zeros(2, 3))
    found = megackpt.load({"rerun": shard, "weight": weight}, TRAINING)
    assert (
        found["rerun"]["error_injector_checkpoint"]["error_injection_type"].value
        == "transient_error"
    )
    assert torch.equal(found["weight"], torch.arange(6.0).reshape(2, 3))
    assert megackpt.load_content_metadata(TRAINING) == {
        "distrib_optim_sharding_type": "dp_reshardable"
    }
    assert megackpt.verify(TRAINING).ok


@pytest.mark.parametrize("to", ["torch_dist", "zarr"])
def test_conversion_keeps_every_byte_of_it(tmp_path: Path, to: str) -> None:
    megackpt.convert(TRAINING, tmp_path / "new", to)
    (kept,) = (path for path in (tmp_path / "new").rglob("*common*") if path.is_file())
    assert kept.read_bytes() == (TRAINING / "common.pt").read_bytes()


def comparable(value: Any) -> Any:
    match value:
        case dict():
            return {key: comparable(item) for key, item in value.items()}
        case list() | tuple():
            return [comparable(item) for item in value]
        case argparse.Namespace():
            return comparable(vars(value))
        case StandIn():
            return value.qualified_name, comparable(value.args), comparable(value.state)
        case np.ndarray():
            return value.dtype, value.tolist()
        case io.BytesIO():
            return value.getvalue()
    return value


@pytest.mark.megatron
def test_the_script_still_makes_the_golden(
    tmp_path: Path, peers: dict[str, str]
) -> None:
    env = {
        **peers,
        "PYTHONPATH": os.pathsep.join([peers["PYTHONPATH"], str(GOLDEN.parent)]),
    }
    script = [sys.executable, str(GOLDEN / "make_training.py"), str(tmp_path / "ckpt")]
    subprocess.run(script, env=env, check=True, capture_output=True, timeout=120)
    assert comparable(common(tmp_path / "ckpt")) == comparable(common())


def megatron_reads(folder: str) -> None:
    """Through ``weights_only`` and the classes that Megatron itself takes for safe."""
    from interop.megatron_shims import dist_checkpointing

    found = dist_checkpointing().load_common_state_dict(folder)
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.rerun_state_machine import RerunMode, RerunState
    from megatron.core.transformer.enums import AttnBackend, CudaGraphScope

    args = found["args"]
    assert args.attention_backend is AttnBackend.auto
    assert args.model_type is ModelType.encoder_or_decoder
    assert args.cuda_graph_scope == [CudaGraphScope.attn, CudaGraphScope.mlp]
    assert found["rerun_state_machine"]["mode"] is RerunMode.VALIDATE_RESULTS
    assert (
        found["rerun_state_machine"]["state"] is RerunState.WILL_RERUN_FROM_CHECKPOINT
    )
    assert found["optimizer_config"] == OptimizerConfig(
        optimizer="adam", lr=1.5e-4, params_dtype=torch.bfloat16
    )
    assert found["iteration"] == 101


@pytest.mark.megatron
def test_what_was_opened_without_megatron_goes_back_to_it(
    tmp_path: Path, ranks: Any, peers: dict[str, str]
) -> None:
    found = common()
    found["iteration"] += 1
    del (
        found["numpy"],
        found["args"].eos,
    )  # of numpy, Megatron trusts arrays of uint32 alone
    megackpt.save(found, tmp_path / "ckpt")
    ranks(megatron_reads, 1, tmp_path / "ckpt", env=peers, timeout=120)
