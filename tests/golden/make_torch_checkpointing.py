"""How the golden checkpoint of torch_checkpointing was made: four ranks, with its own classes.

    torchrun --nproc_per_node 4 tests/golden/make_torch_checkpointing.py FOLDER [SIZE]

with torch_checkpointing 0.1.1 on PYTHONPATH. Its metadata travel over CUDA tensors; here, over gloo. SIZE: rows of one
more tensor, of 4 KiB each, for tests of memory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

PLACEMENTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "layers.0.weight": ((7, 6), (Shard(0), Shard(1))),
    "layers.0.bias": ((5,), (Replicate(), Shard(0))),
    "same": ((3, 2), (Replicate(), Replicate())),
    "both": ((9, 2), (Shard(0), Shard(0))),
    "few": ((2, 3), (Shard(0), Shard(0))),
    "none": ((0, 4), (Shard(0), Replicate())),
}
STRIDED = (8, 3)


def whole() -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of both items."""
    random = torch.Generator().manual_seed(7)
    model = {
        key: torch.randn(shape, generator=random)
        for key, (shape, _) in PLACEMENTS.items()
    }
    model["both"] = model["both"].bfloat16()
    model["strided"] = torch.randn(STRIDED, generator=random)
    model["plain"] = torch.arange(4)
    moment = torch.randn(7, 6, generator=random)
    step = torch.tensor(3.0)
    return {"model": model, "optimizer": {"exp_avg": moment, "step": step}}


def expected() -> dict[str, torch.Tensor]:
    model, optimizer = whole().values()
    found = {f"model.{key}": tensor for key, tensor in model.items()}
    for key, tensor in optimizer.items():
        found[f"optimizer.state.layers.0.weight.{key}"] = tensor
    return found


def cut(mesh: DeviceMesh) -> dict[str, Any]:
    """What a rank saves."""
    model, optimizer = whole().values()
    state: dict[str, Any] = dict(model)
    for key, (_, placements) in PLACEMENTS.items():
        state[key] = distribute_tensor(model[key], mesh, placements)
    # As FSDP2 over tensor parallelism: a rank's rows of the rows of its column.
    data, tensor = mesh.get_coordinate() or (0, 0)
    local = model["strided"].chunk(2)[tensor].chunk(2)[data].clone()
    strided = (_StridedShard(0, split_factor=2), Shard(0))
    state["strided"] = DTensor.from_local(
        local, mesh, strided, run_check=False, shape=torch.Size(STRIDED), stride=(3, 1)
    )
    weight = distribute_tensor(optimizer["exp_avg"], mesh, (Shard(0), Shard(1)))
    return {
        "model": state,
        "optimizer": {
            "state": {
                "layers.0.weight": {"exp_avg": weight, "step": optimizer["step"]}
            },
            "param_groups": [{"lr": 0.1, "params": ["layers.0.weight"]}],
        },
        "step": 7,
        "rng": {"seed": dist.get_rank(), "state": torch.full((3,), dist.get_rank())},
    }


def main(folder: str, rows: int = 0) -> None:
    from torch_checkpointing import metadata_manager
    from torch_checkpointing.checkpoint_manager import (
        CheckpointManager,
        SyncCheckpointSaverConfig,
    )
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gather(_: Any, data: Any, group: Any = None) -> dict[int, Any]:
        gathered = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, data, group=group)
        return dict(enumerate(gathered))

    metadata_manager.DefaultMetadataManager._all_gather_pickled_data = gather
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = cut(mesh)
    if rows:
        part = rows // 4
        local = torch.randn(part, 1024, generator=torch.Generator().manual_seed(dist.get_rank()))  # fmt: skip
        state["model"]["large"] = DTensor.from_local(
            local, mesh, (Shard(0), Shard(0)), run_check=False
        )
    spec = ItemSpec(resharder=DefaultResharder())
    manager = CheckpointManager.Config(
        items={"model": spec, "optimizer": spec},
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    ).build()
    manager.save(folder, state)
    dist.barrier()
    if dist.get_rank() == 0 and not rows:
        torch.save(expected(), f"{Path(folder)}.expected.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1], *map(int, sys.argv[2:]))
