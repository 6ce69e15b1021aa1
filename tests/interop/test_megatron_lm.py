"""Megatron-LM's own ``save_checkpoint`` and ``load_checkpoint``, with megackpt installed by one line.

``megatron.training`` is in no package registry. Give a checkout of Megatron-LM, core_v0.16.1 to 0.19.0:
``MEGATRON_LM=/path/to/Megatron-LM pytest -m megatron tests/interop/test_megatron_lm.py``.
"""

from __future__ import annotations

import os
import sys
import typing
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import typing_extensions

import megackpt.megatron
from megackpt.tree import walk
from tests.conftest import PEERS

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

MEGATRON_LM = os.environ.get("MEGATRON_LM", "")
STEPS = (
    ((2, 1), (1, 1), False, False),
    ((1, 1), (1, 2), True, False),
    ((1, 2), (2, 1), True, True),
)
"""TP x PP of the save, and of the load; asynchronous; in the fully-parallel wrappers."""


class Triton(MetaPathFinder, Loader):
    """Modules in the place of Triton's: they are imported, and not used here."""

    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "triton":
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = attribute_of_triton  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__version__"] = "3.5.0"


def attribute_of_triton(name: str) -> MagicMock:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()


def training(folder: str) -> None:
    """On two ranks. What is loaded at another parallelism is saved again, and is the same."""
    with megackpt.megatron.install():
        from interop import megatron_models

        checkpointing = prepared()
        for number, (saved, loaded, later, parallel) in enumerate(STEPS):
            at = f"{folder}/{number}"
            context: dict[str, Any] = {}
            with megatron_models.parallel(*saved):
                start(at, later, parallel)
                save(checkpointing, at, 100, 1, context)
                save(
                    checkpointing, at, 200, 2, context
                )  # with the strategy of the first
                finish(later)
            context = {}
            with megatron_models.parallel(*loaded):
                start(at, later, parallel)
                model, optimizer, scheduler = made(3)
                result = checkpointing.load_checkpoint(
                    [model], optimizer, scheduler, checkpointing_context=context
                )
                assert result == (200, 2e15)
                assert scheduler.num_steps == 2
                again = f"{at} again"
                start(again, False, parallel)
                call_save(
                    checkpointing, 200, (model, optimizer, scheduler), 2e15, context
                )


def prepared() -> Any:
    """Megatron-LM's module, on a CPU."""
    from interop import megatron_models

    import_module("torch._inductor.compile_fx")  # looks for Triton
    sys.meta_path.append(Triton())
    if sys.version_info < (3, 12):  # which Megatron-LM 0.18 needs
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    assert megatron_models.prepare() is megackpt.megatron
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda *_: None
    checkpointing = import_module("megatron.training.checkpointing")
    assert checkpointing.dist_checkpointing is megackpt.megatron
    return checkpointing


def training_locally(folder: str) -> None:
    """Local checkpoints at TP 2, and at DP 2, where the ranks divide the parameters."""
    managers = import_module(
        "nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager"
    )
    with megackpt.megatron.install():
        from interop import megatron_models

        checkpointing = prepared()
        for number, (tp, algo, later) in enumerate(
            ((2, "atomic", False), (1, "fully_parallel", True), (1, "atomic", True))
        ):
            at = f"{folder}/{number}"
            options = ("--non-persistent-ckpt-type", "local")
            options += ("--non-persistent-local-ckpt-algo", algo)
            options += ("--ckpt-assume-constant-structure",)
            manager = managers.LocalCheckpointManager(at)
            context: dict[str, Any] = {"local_checkpoint_manager": manager}
            with megatron_models.parallel(tp, 1):
                start(at, later, False, *options)
                for iteration in (100, 200):  # the second one with cached metadata
                    saved = made(iteration)
                    saved[2].step(iteration)
                    call_save(
                        checkpointing,
                        iteration,
                        saved,
                        2e15,
                        context,
                        non_persistent_ckpt=True,
                    )
                    finish(later)
                    assert context["local_checkpoint_cache"] is not None
                again = managers.LocalCheckpointManager(at)
                context = {"local_checkpoint_manager": again}
                model, optimizer, scheduler = made(3)
                result = checkpointing.load_checkpoint(
                    [model], optimizer, scheduler, checkpointing_context=context
                )
                assert result == (200, 2e15)
                assert scheduler.num_steps == 200
                for mine, theirs in ((model, saved[0]), (optimizer, saved[1])):
                    found = dict(walk(mine.state_dict()))
                    for name, value in walk(theirs.state_dict()):
                        if isinstance(value, torch.Tensor):
                            assert torch.equal(found[name], value), name


def start(folder: str, later: bool, parallel: bool, *options: str) -> None:
    """The arguments of a run: those of Megatron's parser, and what its checks would add."""
    from megatron.core import (
        num_microbatches_calculator,
        parallel_state,
        rerun_state_machine,
    )
    from megatron.core.tensor_parallel import random as generators
    from megatron.training import arguments, checkpointing, global_vars

    sys.argv = [
        "pretrain_gpt.py",
        *("--save", folder, "--load", folder, "--ckpt-format", "torch_dist"),
        *("--num-layers", "4", "--hidden-size", "16", "--num-attention-heads", "4"),
        *("--use-distributed-optimizer", "--bf16"),
        *([] if options else ["--dist-ckpt-optim-fully-reshardable"]),
        *(
            "--micro-batch-size",
            "1",
            "--max-position-embeddings",
            "8",
            "--no-one-logger",
        ),
        *(["--async-save"] if later else []),
        *([] if parallel else ["--no-ckpt-fully-parallel-save"]),
        *(["--ckpt-fully-parallel-load"] if parallel else []),
        *options,
    ]
    args = arguments.parse_args()
    args.use_dist_ckpt = True
    args.tensor_model_parallel_size = (
        parallel_state.get_tensor_model_parallel_world_size()
    )
    args.pipeline_model_parallel_size = (
        parallel_state.get_pipeline_model_parallel_world_size()
    )
    args.consumed_train_samples = args.skipped_train_samples = 0
    args.consumed_valid_samples = 0
    args.params_dtype = torch.bfloat16
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    args.data_parallel_size = parallel_state.get_data_parallel_world_size()
    global_vars._GLOBAL_ARGS = args
    checkpointing._CHECKPOINT_VERSION = None
    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, 2, 1, 1)
    rerun_state_machine.destroy_rerun_state_machine()
    rerun_state_machine.initialize_rerun_state_machine()
    generators.initialize_rng_tracker(force_reset=True)
    generators.get_cuda_rng_tracker().states_ = {
        "model-parallel-rng": torch.get_rng_state()
    }


def made(seed: int) -> tuple[Any, Any, Any]:
    from interop.megatron_models import trained
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    model, optimizer = trained("gpt", seed)
    for group in optimizer.param_groups:
        group.update(
            max_lr=0.01, min_lr=0.0
        )  # as get_megatron_optimizer of a trainer has
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=0.01,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=100,
        lr_decay_style="linear",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=100,
        wd_incr_style="constant",
    )
    return model, optimizer, scheduler


def save(
    checkpointing: Any, folder: str, iteration: int, seed: int, context: Any
) -> None:
    model, optimizer, scheduler = made(seed)
    scheduler.step(seed)
    call_save(
        checkpointing, iteration, (model, optimizer, scheduler), seed * 1e15, context
    )


def call_save(
    checkpointing: Any,
    iteration: int,
    parts: Any,
    count: float,
    context: Any,
    **options: Any,
) -> None:
    model, optimizer, scheduler = parts
    checkpointing.save_checkpoint(
        iteration,
        [model],
        optimizer,
        scheduler,
        count,
        checkpointing_context=context,
        **options,
    )


def finish(later: bool) -> None:
    from megatron.training import async_utils

    if later:
        async_utils.maybe_finalize_async_save(blocking=True)
    dist.barrier()


needs_megatron_lm = pytest.mark.skipif(
    not MEGATRON_LM, reason="MEGATRON_LM names no checkout of Megatron-LM"
)


@needs_megatron_lm
@pytest.mark.nvrx
def test_megatron_lm_resumes_from_local_checkpoints(
    tmp_path: Path, ranks: Any, peers: dict[str, str]
) -> None:
    # With Megatron-Core of the checkout, not of the peers.
    path = os.pathsep.join([MEGATRON_LM, peers["PYTHONPATH"], str(PEERS / "nvrx")])
    ranks(training_locally, 2, tmp_path, env={**peers, "PYTHONPATH": path}, timeout=400)


@needs_megatron_lm
def test_megatron_lm_saves_and_resumes(
    tmp_path: Path, ranks: Any, peers: dict[str, str]
) -> None:
    # With Megatron-Core of the checkout, not of the peers.
    path = os.pathsep.join([MEGATRON_LM, peers["PYTHONPATH"]])
    ranks(training, 2, tmp_path, env={**peers, "PYTHONPATH": path}, timeout=400)
    for number in range(len(STEPS)):
        at = tmp_path / str(number)
        assert (at / "latest_checkpointed_iteration.txt").read_text() == "200"
        assert megackpt.verify(at / "iter_0000100").ok
        saved, again = (
            dict(walk(megackpt.load_plain_tensors(where / "iter_0000200")))
            for where in (at, tmp_path / f"{number} again")
        )
        assert saved.keys() == again.keys()
        assert all(torch.equal(saved[name], again[name]) for name in saved)
