"""Checkpoints written by DeepSpeed's engine on the CPU: ``write_deepspeed.py FOLDER RANKS [VARIANT ...]``.

Run under ``PYTHONPATH=.peers/deepspeed``. Beside the run ``zero2`` is ``zero2.expected.pt``: the tensors that
DeepSpeed's zero_to_fp32 makes of it; of ``zero1-accumulated``, which zero_to_fp32 refuses, the engine's master weights.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "DS_SKIP_CUDA_CHECK": "1"}

import deepspeed
import torch
import torch.multiprocessing
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

BF16 = {"bf16": {"enabled": True}}
SMALL = {"stage3_param_persistence_threshold": 0, "sub_group_size": 60}
VARIANTS: dict[str, dict[str, Any]] = {
    "zero0": {"zero_optimization": {"stage": 0}},
    "zero1": {"zero_optimization": {"stage": 1}, **BF16},
    "zero1-accumulated": {
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
        **BF16,
    },
    "zero1-elastic": {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}},
    "zero2": {"zero_optimization": {"stage": 2}, **BF16},
    "zero2-fp32": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "zero3": {"zero_optimization": {"stage": 3, **SMALL}, **BF16},
    "zero3-fp32": {"zero_optimization": {"stage": 3}},
}
FACTORS = {"exp_avg": 2, "exp_avg_sq": 4, "momentum_buffer": 8}


class Net(torch.nn.Module):
    """Uneven sizes, tied weights, frozen parameters, a buffer, one element alone."""

    def __init__(self, columns: int = 7, rows: int = 13) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(rows, columns)
        self.inner = torch.nn.Linear(columns, 5)
        self.frozen = torch.nn.Linear(5, 3)
        self.outer = torch.nn.Linear(5, columns, bias=False)
        self.register_buffer("shift", torch.arange(columns) / 8)
        self.head = torch.nn.Linear(columns, rows, bias=False)
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.embedding(tokens))
        hidden = self.outer(hidden) + self.frozen(hidden).mean()
        hidden = hidden + self.shift.to(hidden.dtype)
        return (self.head(hidden) * self.scale).float().square().mean()


def train(name: str, folder: str, rank: int, columns: int = 7, rows: int = 13) -> None:
    """Three steps, a save, and what the ranks hold then."""
    torch.manual_seed(0)
    net = Net(columns, rows)
    learning = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learning if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in learning if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=1e-2)
    if name == "zero3-fp32":
        optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        **VARIANTS[name],
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    for step in range(3):
        tokens = torch.arange(4) + 3 * step + rank
        engine.backward(engine(tokens % rows))
        engine.step()
    # The moments become multiples of the master weights, which tells what they should be.
    for flat, held in optimizer.state.items():
        for state, factor in FACTORS.items():
            if state in held:
                held[state].copy_(flat.detach() * factor)
    engine.save_checkpoint(
        f"{folder}/{name}", client_state={"epoch": 2, "note": "told"}
    )
    expected = {}
    for key, parameter in engine.module.named_parameters():
        if parameter.requires_grad and name != "zero0":
            expected[key] = safe_get_full_fp32_param(parameter).clone()
    if rank == 0:
        torch.save(expected, f"{folder}/{name}.expected.pt")
    torch.distributed.barrier()


def gather(run: str) -> None:
    """Save what zero_to_fp32 makes of a run, with memory of its own for each tensor."""
    found = get_fp32_state_dict_from_zero_checkpoint(run)
    held = {key: tensor.clone() for key, tensor in found.items()}
    torch.save(held, f"{run}.expected.pt")


def universal(step: str) -> None:
    """Convert a step by ds_to_universal, to a folder beside it."""
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=step,
            output_folder=f"{step}_universal",
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def work(rank: int, folder: str, ranks: int, names: list[str]) -> None:
    # DeepSpeed asks for all of these, and torch uses none of them with a file.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    torch.set_num_threads(1)
    deepspeed.init_distributed(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    for name in names:
        train(name, folder, rank)
    torch.distributed.destroy_process_group()


def main(folder: str, ranks: int, names: list[str]) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.multiprocessing.spawn(work, (folder, ranks, names), nprocs=ranks)
    for name in names:
        if name in ("zero0", "zero1-accumulated"):
            continue  # zero_to_fp32 does not read them
        gather(f"{folder}/{name}")
        if name in ("zero1", "zero2", "zero3"):
            universal(f"{folder}/{name}/global_step3")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:] or list(VARIANTS))
