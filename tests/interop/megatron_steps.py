"""Training steps of Megatron-Core 0.16 on the CPU: forward, backward and its distributed optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


class _Adam(torch.optim.AdamW):
    """In place of Apex's, which needs a GPU."""

    def __init__(self, params: Any, **options: Any) -> None:
        names = ("lr", "betas", "eps", "weight_decay")
        known = {name: options[name] for name in names if name in options}
        super().__init__(params, foreach=False, **known)


def prepare() -> None:
    """See ``megatron_models.prepare``."""
    from interop import megatron_models

    optimizer = "megatron.core.optimizer"
    schedules = "pipeline_parallel.schedules"
    megatron_models.prepare((*megatron_models.USED, schedules))
    from megatron.core.transformer.moe import moe_utils

    for name in (optimizer, f"{optimizer}.distrib_optimizer"):
        sys.modules[name].Adam = _Adam  # type: ignore[attr-defined]
    moe_utils.te_general_gemm = None  # which it asks for without TransformerEngine


def trainer(kind: str, seed: int = 1) -> tuple[Any, Any, Callable[[], None]]:
    """A model of bfloat16, its optimizer, and a function that trains both for a step."""
    from interop.megatron_models import LENGTH, VOCABULARY, built
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    half = {"bf16": True, "params_dtype": torch.bfloat16}
    model = built(kind, seed, pipeline_dtype=torch.bfloat16, **half).bfloat16()
    model.config.finalize_model_grads_func = finalize_model_grads
    buckets = DistributedDataParallelConfig(
        use_distributed_optimizer=True, bucket_size=2000
    )
    wrapped = DistributedDataParallel(model.config, buckets, model)
    adam = OptimizerConfig(
        optimizer="adam", lr=0.01, use_distributed_optimizer=True, **half
    )
    optimizer = get_megatron_optimizer(adam, [wrapped])
    # Dropout has to be the same on the ranks of a tensor-parallel group.
    torch.manual_seed(100 * parallel_state.get_pipeline_model_parallel_rank())
    data = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)

    def forward(_: Any, model: Any) -> Any:
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=data)
        places = torch.arange(LENGTH).expand(2, LENGTH)
        output = model(tokens, places, mask, labels=tokens)
        return output, lambda losses: (losses.float().mean(), {})

    def step() -> None:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=wrapped,
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        successful, _, _ = optimizer.step()
        assert successful

    return model, optimizer, step
