"""Files in the structure of DeepSpeed's, made without it: any parameters, any number of ranks, values that are known.

Source: deepspeed 0.19.8. Tests of ``test_deepspeed.py`` that its engine has written compare with the engine's files.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Groups = Sequence[Mapping[str, torch.Tensor]]
FACTORS = {"exp_avg": 2, "exp_avg_sq": 4}


def shapes(groups: Groups) -> list[OrderedDict[str, torch.Size]]:
    return [OrderedDict((name, t.shape) for name, t in g.items()) for g in groups]


def model_states(
    groups: Groups, module: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    return {
        "module": OrderedDict(module),
        "buffer_names": [],
        "param_shapes": shapes(groups),
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "global_steps": 3,
        "dp_world_size": 2,
        "ds_version": "0.19.8",
        **more,
    }


def expected(groups: Groups) -> dict[str, torch.Tensor]:
    """All tensors but those of the module."""
    found = {}
    for group in groups:
        for name, tensor in group.items():
            found[f"fp32.{name}"] = tensor
            found[f"step.{name}"] = torch.tensor(3.0)
            for state, factor in FACTORS.items():
                found[f"{state}.{name}"] = tensor * factor
    return found


def states(flats: Sequence[torch.Tensor]) -> dict[str, Any]:
    return {
        "state": {
            i: {
                "step": torch.tensor(3.0),
                **{state: flat * factor for state, factor in FACTORS.items()},
            }
            for i, flat in enumerate(flats)
        },
        "param_groups": [{"lr": 0.1, "params": [i]} for i in range(len(flats))],
    }


def optimizer_file(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def write_zero2(
    folder: Path, groups: Groups, ranks: int, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Groups joined, padded to a multiple of two elements a rank, and cut."""
    folder.mkdir(parents=True)
    module = {name: t.to(dtype) for g in groups for name, t in g.items()}
    torch.save(model_states(groups, module), folder / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        lean, padded, paddings = [], [], []
        for group in groups:
            flat = torch.cat([t.reshape(-1) for t in group.values()])
            size = -(-len(flat) // (2 * ranks)) * 2
            part = flat[rank * size : (rank + 1) * size]
            paddings.append(size - len(part))
            padded.append(torch.cat([part, torch.zeros(paddings[-1])]))
            lean.append(padded[-1][: len(part)])
        state = {
            "loss_scaler": None,
            "base_optimizer_state": states(padded),
            "single_partition_of_fp32_groups": lean,
            "zero_stage": 2,
            "group_paddings": paddings,
            "partition_count": [ranks] * len(groups),
            "param_slice_mappings": None,
        }
        torch.save({"optimizer_state_dict": state}, folder / optimizer_file(rank))


def write_zero3(folder: Path, groups: Groups, ranks: int) -> None:
    """Each parameter padded and cut, and a rank's parts joined."""
    folder.mkdir(parents=True)
    module = {name: torch.empty(0) for g in groups for name in g}
    for rank in range(ranks):
        torch.save(
            model_states(groups, module),
            folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        )
        flats = []
        for group in groups:
            parts = []
            for tensor in group.values():
                size = math.ceil(tensor.numel() / ranks)
                part = tensor.reshape(-1)[rank * size : (rank + 1) * size]
                parts += [part, torch.zeros(size - len(part))]
            flats.append(torch.cat(parts))
        state = {
            "zero_stage": 3,
            "partition_count": ranks,
            "optimizer_state_dict": states(flats),
            "fp32_flat_groups": flats,
        }
        torch.save({"optimizer_state_dict": state}, folder / optimizer_file(rank))


def write_universal(folder: Path, groups: Groups) -> None:
    folder.mkdir(parents=True)
    module = {name: t.to(torch.bfloat16) for g in groups for name, t in g.items()}
    torch.save(model_states(groups, module), folder / "mp_rank_00_model_states.pt")
    for key, tensor in expected(groups).items():
        state, _, name = key.partition(".")
        place = folder / "zero" / name / f"{state}.pt"
        place.parent.mkdir(parents=True, exist_ok=True)
        value = tensor if state == "step" else {"param": tensor, "cat_dim": 0}
        torch.save(value, place)
    torch.save({"param_groups": [{"lr": 0.1}]}, folder / "zero/optimizer_state.pt")
