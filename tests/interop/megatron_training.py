"""A training run of Megatron-Core that is resumed: its state, its optimizer and its random numbers."""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import megackpt

RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}
ITERATION = 100


def declared(kind: str, seed: int, **metadata: Any) -> dict[str, Any]:
    from interop.megatron_models import built

    return dict(built(kind, seed).sharded_state_dict(metadata=metadata or None))


def trained_state(
    model: Any, optimizer: Any, loading: bool, **metadata: Any
) -> dict[str, Any]:
    metadata = {
        "chained_optim_avoid_prefix": True,
        "distrib_optim_fully_reshardable_mem_efficient": False,
    } | metadata
    state = model.sharded_state_dict(metadata=metadata)
    declared = optimizer.sharded_state_dict(
        state, is_loading=loading, metadata=metadata
    )
    return {"model": state, "optimizer": declared}


def training(folder: Path) -> None:
    """A checkpoint of a run, laid out as Megatron's training script does, by us; read by us and by Megatron."""
    from interop.megatron_models import parallel, trained
    from megatron.core import dist_checkpointing as peer

    with parallel(2, 2):
        model, optimizer = trained("gpt", 1)
        state = run_state(model, optimizer, loading=False)
        at = folder / f"iter_{ITERATION:07d}"
        megackpt.save(state, at, content_metadata=RESHARDABLE)
        if dist.get_rank() == 0:
            (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
        dist.barrier()
        number = int((folder / "latest_checkpointed_iteration.txt").read_text())
        at = folder / f"iter_{number:07d}"
        common = megackpt.load_common_state_dict(at)
        assert vars(common["args"]) == vars(state["args"])
        assert megackpt.load_content_metadata(at) == RESHARDABLE
        for load in (megackpt.load, peer.load):
            model, optimizer = trained("gpt", 2)
            found = load(run_state(model, optimizer, loading=True), str(at))
            model.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])
            assert found["iteration"] == ITERATION
            assert vars(found["args"]) == vars(state["args"])
            check_random(found["rng_state"][0])
            machine(0).load_state_dict(found["rerun_state_machine"])
            again = folder / f"again by {load.__module__.partition('.')[0]}"
            megackpt.save(trained_state(model, optimizer, False, **RESHARDABLE), again)
        megackpt.save(
            trained_state(*trained("gpt", 1), False, **RESHARDABLE), folder / "saved"
        )


def run_state(model: Any, optimizer: Any, loading: bool) -> dict[str, Any]:
    """What ``save_checkpoint`` and ``load_checkpoint`` of Megatron's training script declare."""
    from megatron.core import parallel_state as p
    from megatron.core.dist_checkpointing import ShardedObject
    from megatron.core.transformer.enums import AttnBackend

    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    grid = (
        p.get_pipeline_model_parallel_world_size(),
        p.get_tensor_model_parallel_world_size(),
    )
    cell = (p.get_pipeline_model_parallel_rank(), p.get_tensor_model_parallel_rank())
    values = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
    }
    state = {
        **trained_state(model, optimizer, loading, **RESHARDABLE),
        "rng_state": ShardedObject(
            "rng_state", [values], grid, cell, replica_id=p.get_data_parallel_rank()
        ),
        "rerun_state_machine": machine(ITERATION).state_dict(
            None, "torch_dist", force=True
        ),
    }
    if not loading:
        args = {
            "lr": 1.5e-4,
            "params_dtype": torch.bfloat16,
            "attention_backend": AttnBackend.local,
        }
        args |= {
            "save": Path("runs/a"),
            "betas": (0.9, 0.95),
            "world_size": dist.get_world_size(),
        }
        state |= {
            "args": Namespace(**args),
            "checkpoint_version": 3.0,
            "iteration": ITERATION,
        }
        state |= {
            "num_floating_point_operations_so_far": 1.5e18,
            "opt_param_scheduler": {"num_steps": 12800},
        }
    return state


def machine(iteration: int) -> Any:
    from megatron.core.rerun_state_machine import (
        RerunMode,
        RerunState,
        RerunStateMachine,
    )

    found = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    found.state = RerunState.WILL_RERUN_FROM_CHECKPOINT
    found.current_iteration = iteration
    return found


def check_random(found: dict[str, Any]) -> None:
    """This rank's generators go on from where they were."""
    random.setstate(found["random_rng_state"])
    np.random.set_state(found["np_rng_state"])
    torch.set_rng_state(found["torch_rng_state"])
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    rank = dist.get_rank()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1).item())
