"""torchtitan's own checkpoint manager, with our writer and reader in it; run on 2 ranks by torchrun, on CPUs.

Its ``dcp_save`` makes the storage writer itself, and takes none (torchtitan 0.3.0, components/checkpointer/dcp.py,
lines 259 to 316): so a subclass hands ours over, in two short methods. All else is torchtitan's.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import MODEL, AsyncMode, CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from megackpt.dcp import FileSystemReader, FileSystemWriter, LoadPlanner, SavePlanner


class OurCheckpoints(CheckpointManager):
    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The same."""

    def dcp_save(
        self,
        state_dict: Any,
        checkpoint_id: str,
        async_mode: AsyncMode,
        *_: Any,
        **options: Any,
    ) -> Any:
        ours = {
            "storage_writer": FileSystemWriter(checkpoint_id),
            "planner": SavePlanner(),
        }
        if async_mode == AsyncMode.ASYNC:
            return dcp.async_save(state_dict, process_group=self.pg, **ours)
        dcp.save(state_dict, **ours)
        return None

    def dcp_load(
        self, state_dict: Any, checkpoint_id: str, *_: Any, **options: Any
    ) -> None:
        dcp.load(
            state_dict,
            storage_reader=FileSystemReader(checkpoint_id),
            planner=LoadPlanner(),
        )
        self.states[MODEL].load_state_dict(state_dict)


class Progress:
    """What torchtitan's trainer keeps of itself in a checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Training:
    def __init__(
        self, manager: type[CheckpointManager], folder: str, mode: str, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        group = ParamGroupConfig(
            pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1}
        )
        config = OptimizersContainer.Config(
            param_groups=[group], implementation="for-loop"
        )
        self.optimizers = config.build(model_parts=[self.model])
        self.progress = Progress(seed)
        self.manager = manager.Config(
            enable=True, interval=1, async_mode=mode, folder=folder
        ).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=LRSchedulersContainer(
                self.optimizers, lambda step: 1 / (step + 1)
            ),
            states={"train_state": self.progress},
            sd_adapter=None,
        )

    def step(self) -> None:
        self.model(torch.ones(2, 6)).square().mean().backward()
        self.optimizers.step()
        self.optimizers.zero_grad()

    def whole(self) -> dict[str, torch.Tensor]:
        states = {**self.model.state_dict(), **self.optimizers.state_dict()}
        return {
            key: (value.full_tensor() if hasattr(value, "full_tensor") else value)
            .detach()
            .clone()
            for key, value in states.items()
            if isinstance(value, torch.Tensor)
        }


def main(base: str) -> None:
    dist.init_process_group("gloo")
    kinds = {"ours": OurCheckpoints, "stock": CheckpointManager}
    for mode in ("disabled", "async"):
        for saver, saving in kinds.items():
            folder = f"{base}/{mode}-{saver}"
            training = Training(saving, folder, mode, seed=3)
            training.step()
            expected = training.whole()
            assert training.manager.save(1)
            training.step()  # while an async save may be at it
            training.manager.maybe_wait_for_saving()
            dist.barrier()
            for loader, loading in kinds.items():
                other = Training(loading, folder, mode, seed=8)
                assert other.manager.load()
                found = other.whole()
                assert found.keys() == expected.keys()
                for key, value in expected.items():
                    assert torch.equal(found[key], value), (mode, saver, loader, key)
                assert other.progress.step == 3
                if dist.get_rank() == 0:
                    print(
                        f"torchtitan, {mode}: saved by {saver}, loaded by {loader}: {len(found)} tensors equal"
                    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
