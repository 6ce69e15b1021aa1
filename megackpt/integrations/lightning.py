"""Lightning: its strategies, with checkpoints of megackpt that all ranks write."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import strategies
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import megackpt
from megackpt import StrictHandling
from megackpt.checkpoint import remove

__all__ = ["DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", "latest_checkpoint"]

logger = logging.getLogger("megackpt.lightning")

_DECLARED = ("state_dict", "optimizer_states")
"""Entries of a checkpoint of Lightning that hold tensors of all ranks."""


class _Checkpoints:
    """The methods of a strategy that save, restore and remove checkpoints.

    Args:
        asynchronous: write while training continues. A checkpoint that Lightning removes stays
            until the saves that were started before are complete.
        checkpoint_format: as ``sharded_strategy`` of ``megackpt.save``.
        trusted: see ``megackpt.load``: your classes in the state of the callbacks or in the
            hyperparameters.
        options: like positional arguments, options of Lightning's strategy.
    """

    # Attributes of Lightning's strategy.
    model: Any
    optimizers: Any
    broadcast: Any
    lightning_module: Any
    is_global_zero: bool

    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = True

    def __init__(
        self,
        *args: Any,
        asynchronous: bool = True,
        checkpoint_format: Any = "torch_dist",
        trusted: Any = (),
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._asynchronous = asynchronous
        self._format = checkpoint_format
        self._trusted = trusted
        self._queue = megackpt.AsyncCallsQueue(
            staging_bytes=None if asynchronous else 0
        )
        self._superseded: list[str] = []
        self._is_training = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> Any:
        wrapped = getattr(optimizer, "_optimizer", optimizer)
        return get_optimizer_state_dict(self.model, wrapped)

    def load_model_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True
    ) -> None:
        options = StateDictOptions(strict=strict)
        set_model_state_dict(self.model, checkpoint["state_dict"], options=options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        for optimizer, state in zip(self.optimizers, states, strict=True):
            set_optimizer_state_dict(self.model, optimizer, state)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise TypeError("storage_options are not supported: give a URL as the path")
        path = self.broadcast(os.fspath(filepath))
        if path in self._superseded:
            self._superseded.remove(path)
        # After an exception comes the teardown, which drops saves that are being written.
        is_handling = sys.exc_info()[0] is not None
        # After it Lightning has Slurm end the process, and start the job again.
        is_requeued = os.path.basename(path).startswith("hpc_ckpt_")
        tensors = {name: checkpoint[name] for name in _DECLARED if name in checkpoint}
        request = megackpt.save(
            checkpoint | megackpt.sharded(tensors),
            path,
            self._format,
            async_sharded_save=self._asynchronous
            and self._is_training
            and not is_handling
            and not is_requeued,
        )
        if request is not None:
            self._queue.schedule_async_request(request)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> Any:
        del weights_only  # No load runs code of the checkpoint.
        state: dict[str, Any] = {"state_dict": self.lightning_module_state_dict()}
        # A trainer that tests keeps the optimizers of an earlier training.
        is_training = self.lightning_module.trainer.state.fn == "fit"
        if is_training:
            state["optimizer_states"] = list(map(self.optimizer_state, self.optimizers))
        path = self.broadcast(os.fspath(checkpoint_path))
        strict = StrictHandling.RAISE_UNEXPECTED
        if is_training:
            strict = StrictHandling.ASSUME_OK_UNEXPECTED
        declared = megackpt.sharded(state)
        return megackpt.load(declared, path, strict=strict, trusted=self._trusted)

    def remove_checkpoint(self, filepath: Any) -> None:
        self._superseded.append(os.fspath(filepath))

    def on_train_start(self) -> None:
        super().on_train_start()
        self._is_training = True

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._finalize(blocking=False)

    def on_train_end(self) -> None:
        self._is_training = False
        self._finalize(blocking=True)
        super().on_train_end()

    def teardown(self) -> None:
        self._superseded.clear()  # They belong to saves that are dropped here.
        # After an error other ranks may not come.
        self._queue.close(abort=True)
        super().teardown()

    def _finalize(self, blocking: bool) -> None:
        try:
            self._queue.maybe_finalize_async_calls(blocking)
        except BaseException:
            self._superseded.clear()  # Their replacements may not exist.
            raise
        if self._queue.get_num_unfinalized_calls():
            return
        while self._superseded:
            path = self._superseded.pop(0)
            if self.is_global_zero:
                self._remove(path)

    def _remove(self, path: str) -> None:
        """On rank 0, so it does not raise: all other ranks would wait for rank 0."""
        try:
            try:
                remove(path)
            except megackpt.NotACheckpoint:
                super().remove_checkpoint(path)
        except (megackpt.CheckpointingException, OSError) as error:
            logger.warning("%s stays: %s", path, error)


class DDPStrategy(_Checkpoints, strategies.DDPStrategy):
    """Lightning's DDPStrategy, with checkpoints of megackpt."""


class FSDPStrategy(_Checkpoints, strategies.FSDPStrategy):
    """Lightning's FSDPStrategy, with checkpoints of megackpt. It needs a ``device_mesh``."""


class ModelParallelStrategy(_Checkpoints, strategies.ModelParallelStrategy):
    """Lightning's ModelParallelStrategy (FSDP2, tensor parallelism) with megackpt's checkpoints."""


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """The newest complete and undamaged checkpoint of a run; None if there is none."""
    manager = megackpt.CheckpointManager(directory)
    step = manager.latest()
    if step is None:
        return None
    return f"{manager.root}/{step.name}"
