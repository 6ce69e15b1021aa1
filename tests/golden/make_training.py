"""Writes ``mcore-0.16.1-training``: the non-tensor state of a training run, in Megatron-Core 0.16.1's own classes.

SYNTHETIC: no training ran. The values are made up (arguments are the defaults of Megatron's own configurations);
Megatron-Core itself writes them. Needs what ``make peers`` installs: run by a test, and once for the golden, as
``PYTHONPATH=tests:.peers python tests/golden/make_training.py FOLDER``.
"""

from __future__ import annotations

import io
import signal
import sys
from argparse import Namespace
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def defaults(*configurations: type) -> dict[str, Any]:
    """What arguments of a training run are named, and their defaults: but functions, which no arguments are."""
    found: dict[str, Any] = {}
    for configuration in configurations:
        for field in fields(configuration):
            value = (
                field.default
                if field.default_factory is MISSING
                else field.default_factory()
            )
            if value is not MISSING and not callable(value):
                found[field.name] = value
    return found


def state() -> dict[str, Any]:
    """As Megatron's training script saves it: arguments, schedules, optimizer without tensors, fault detection."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.rerun_state_machine import (
        RerunMode,
        RerunState,
        RerunStateMachine,
    )
    from megatron.core.transformer.enums import AttnBackend, CudaGraphScope
    from megatron.core.transformer.transformer_config import TransformerConfig

    args = Namespace(
        **defaults(TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
        | {
            "attention_backend": AttnBackend.auto,
            "cuda_graph_scope": [CudaGraphScope.attn, CudaGraphScope.mlp],
            "model_type": ModelType.encoder_or_decoder,
            "params_dtype": torch.bfloat16,
            "main_grads_dtype": torch.float32,
            "exit_signal": signal.SIGTERM,
            "save": Path("runs/a"),
            "data_path": ["0.3", "a", "0.7", "b"],
            "split": "99,1,0",
            "rank": 0,
            "world_size": 1,
            "lr": 1.5e-4,
            "betas": (0.9, 0.95),
            "consumed_train_samples": 12800,
            "rotary": SimpleNamespace(base=10000, percent=1.0),
            "eos": np.int64(2),
        }
    )
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    machine.state = RerunState.WILL_RERUN_FROM_CHECKPOINT
    machine.current_iteration = 100
    group = {
        "lr": 1.5e-4,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "step": 100,
        "wd_mult": 1.0,
        "is_expert": False,
    }
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 100,
        "num_floating_point_operations_so_far": 1.5e18,
        "opt_param_scheduler": {
            "max_lr": 1.5e-4,
            "num_steps": 12800,
            "lr_decay_style": "cosine",
        },
        "optimizer": {
            "optimizer": {
                "param_groups": [{**group, "params": [0, 1]}, {**group, "params": [2]}]
            }
        },
        "optimizer_config": OptimizerConfig(
            optimizer="adam", lr=1.5e-4, params_dtype=torch.bfloat16
        ),
        "rerun_state_machine": machine.state_dict(None, "torch_dist", force=True),
        "numpy": {
            "rng": np.random.RandomState(5).get_state(),
            "array": np.arange(6, dtype=np.float32).reshape(2, 3),
            "scalar": np.float64(0.25),
            "when": np.array(["2026-01-01"], "M8[s]"),
        },
        "stream": io.BytesIO(b"octets"),
    }


def main(folder: str) -> None:
    from interop.megatron_shims import dist_checkpointing

    peer = dist_checkpointing()
    made = state()
    made["model"] = peer.ShardedTensor.from_rank_offsets(
        "weight", torch.arange(6.0).reshape(2, 3), (0, 0, 1)
    )
    Path(folder).mkdir(exist_ok=True)
    peer.save(
        made, folder, content_metadata={"distrib_optim_sharding_type": "dp_reshardable"}
    )


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    main(sys.argv[1])
    dist.destroy_process_group()
