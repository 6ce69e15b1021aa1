"""How the golden checkpoint in fsdp_dtensor was made: torch DCP under Megatron-FSDP's function for uneven shards.

    torchrun --nproc_per_node 2 tests/golden/make_fsdp_dtensor.py FOLDER [ROWS]

with megatron-core 0.16.1 on PYTHONPATH. ``preprocess_state_dict_for_uneven_dtensor`` is Megatron's, and so are the
chunks and write items that it makes. The names are SYNTHETIC: those that ``preprocess_fsdp_dtensor_state_dict``,
``handle_swiglu_in_state_dict`` and ``handle_experts_in_state_dict`` produce, without a model on GPUs. Two layers: a
dense one, and one with two experts. ROWS: of one more tensor of 4 KiB a row.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

SHAPES = {
    "embedding.word_embeddings.weight": (11, 4),
    "decoder.layers.0.self_attention.linear_proj.weight": (4, 4),
    "decoder.layers.0.mlp.linear_fc1.weight": (12, 4),
    "decoder.layers.0.mlp.linear_fc1.bias": (12,),
    "decoder.layers.0.mlp.linear_fc2.weight": (4, 6),
    "decoder.layers.1.self_attention.linear_proj.weight": (4, 4),
    "decoder.layers.1.mlp.experts.experts.linear_fc1.weight": (2, 12, 4),
    "decoder.layers.1.mlp.experts.experts.linear_fc2.weight": (2, 4, 6),
    "decoder.final_layernorm.weight": (4,),
}
"""Under the names that torch_dist has for them."""
STATES = ("exp_avg",)


def expected() -> dict[str, torch.Tensor]:
    """The tensors with the names and shapes of torch_dist."""
    random = torch.Generator().manual_seed(3)
    found = {key: torch.randn(shape, generator=random) for key, shape in SHAPES.items()}
    for key, shape in SHAPES.items():
        for state in STATES:
            found[f"optimizer.state.{state}.{key}"] = torch.randn(
                shape, generator=random
            )
    return found


def stored() -> dict[str, torch.Tensor]:
    """The same tensors with the names and shapes of fsdp_dtensor."""
    found = {}
    for key, tensor in expected().items():
        place, end = "model.module.", ""
        if key.startswith("optimizer."):
            _, _, state, key = key.split(".", 3)
            place, end = "optimizer.state.module.module.module.", f".{state}"
        parts = {key: tensor}
        before, experts, after = key.partition(".experts.experts.")
        if experts:
            parts = {f"{before}.experts.{after}{i}": t for i, t in enumerate(tensor)}
        for name, part in parts.items():
            if "linear_fc1" in name:
                for half, values in zip("wv", part.chunk(2), strict=True):
                    found[f"{place}{name}_{half}{end}"] = values
            else:
                found[f"{place}{name}{end}"] = part
    return found


def uneven(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """The first rank has a third of the rows, rounded down, and perhaps none."""
    rows = len(tensor) // 3
    local = tensor[:rows] if dist.get_rank() == 0 else tensor[rows:]
    return DTensor.from_local(
        local.contiguous(),
        mesh,
        (Shard(0),),
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def main(folder: str, rows: int = 0) -> None:
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        preprocess_state_dict_for_uneven_dtensor,
    )

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_cp",))
    tensors = stored()
    if rows:
        random = torch.Generator().manual_seed(5)
        large = torch.randn(rows, 1024, generator=random)
        tensors["model.module.output_layer.weight"] = large
    state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(".")
        if kind == "model":
            state["model"][name] = uneven(tensor, mesh)
        else:
            name, _, part = name.removeprefix("state.").rpartition(".")
            states = state["optimizer"]["state"].setdefault(name, {})
            states[part] = uneven(tensor, mesh)
    names = state["optimizer"]["state"]
    state["optimizer"]["param_to_group_meta"] = {n: {"lr": 0.1} for n in names}
    state |= {"iteration": 7, "checkpoint_version": 3.0}
    preprocess_state_dict_for_uneven_dtensor(state)
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank() == 0 and not rows:
        torch.save(expected(), f"{Path(folder)}.expected.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1], *map(int, sys.argv[2:]))
