"""torchtitan's own ``train.py`` with its Llama 3 debug model and our manager, on CPUs with gloo.

Stubs stand for the description of a CUDA device and for kernels of Triton. Our manager is chosen by
configuration, as are the size of the model, the data and the printed losses.
"""

# ruff: noqa: E402  the stubs come before the imports

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

for missing in (
    "datasets",  # of Hugging Face, with TensorBoard: installed with torchtitan, not used here
    "datasets.distributed",
    "torch.utils.tensorboard",
    "torchtitan.distributed.minimal_async_ep.kernels",  # written in Triton
):
    sys.modules[missing] = MagicMock()

from torchtitan.tools import utils

# Before others import these names from there.
utils.device_type = "cpu"
utils.device_module = MagicMock()
utils.device_module.current_device.return_value = 0
utils.device_module.get_device_name.return_value = "CPU"
utils.device_module.get_device_properties.return_value.total_memory = 1 << 30
utils.device_module.memory_stats.return_value = {}
utils.get_local_device = lambda: torch.device("cpu")

from torchtitan import train
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from megackpt.integrations.torchtitan import CheckpointManager

# torchtitan 0.3.0 calls it by a name that torch 2.13 does not have.
dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]


class Tokens(torch.utils.data.IterableDataset[Any]):
    def __init__(self, rank: int, length: int) -> None:
        self.rank = rank
        self.length = length
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        positions = torch.arange(self.length)
        while True:
            seed = 100 * self.position + self.rank
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(2048, (self.length + 1,), generator=generator)
            self.position += 1
            yield {"input": tokens[:-1], "positions": positions}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """The same."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int,
    ) -> None:
        super().__init__(
            Tokens(dp_rank, seq_len),
            dp_rank,
            dp_world_size,
            batch_size=local_batch_size,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """The same."""

    def __init__(self, config: Config, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any) -> Any: ...

    decode = get_vocab_size = encode


class Metrics(MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """The same."""

    def log(self, step: int, loss: float, *args: Any, **options: Any) -> None:
        super().log(step, loss, *args, **options)
        if dist.get_rank() == 0:
            print(f"step {step}: {loss:.6f}", flush=True)


def parallelize(model: Any, **options: Any) -> Any:
    model = parallelize_llama(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return model


config = llama3_debugmodel()
config.model_spec = replace(config.model_spec, parallelize_fn=parallelize)
del config.model_spec.model.layers[2:]
for layer in config.model_spec.model.layers:
    # FlexAttention has no backward pass on CPUs.
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
config.parallelism.spmd_backend = (
    "partial_dtensor"  # the others fail in fully_shard of torch 2.13
)
config.training = TrainingConfig(
    local_batch_size=2,
    seq_len=16,
    steps=12,
    mixed_precision_param="float32",
    disable_cuda_graphs=True,
)
config.debug.seed = 1
config.dump_folder = "run"
config.dataloader = Loader.Config()
config.tokenizer = Tokenizer.Config()
config.metrics = Metrics.Config(log_freq=1)
config.validator.enable = False
config.checkpoint = CheckpointManager.Config(
    enable=True,
    interval=2,
    async_mode="async",
    keep_latest_k=2,
    last_save_model_only=False,
)
train.ConfigManager = MagicMock()
train.ConfigManager.return_value.parse_args.return_value = config
train.main()
