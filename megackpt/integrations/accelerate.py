"""Hugging Face accelerate: its Accelerator, with checkpoints of megackpt that all ranks write."""

from __future__ import annotations

import copy
import logging
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import accelerate
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from accelerate.utils import DistributedType
from torch.utils.data import RandomSampler, SequentialSampler

import megackpt
from megackpt.integrations.data import LoaderState

__all__ = ["Accelerator"]

logger = logging.getLogger("megackpt.accelerate")


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator. A save is written while training continues.

    ``end_training`` commits the last one, so every program calls it.

    Args:
        checkpoint_options: of ``megackpt.CheckpointManager``, such as ``strategy``.
        options: of accelerate's Accelerator, as are positional arguments.
    """

    def __init__(
        self,
        *args: Any,
        checkpoint_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._options: dict[str, Any] = {"naming": "transformers", "asynchronous": True}
        self._options |= checkpoint_options or {}
        self._manager: megackpt.CheckpointManager | None = None
        self._directory = ""

    def save_state(self, output_dir: str | None = None, *_: Any, **__: Any) -> str:
        """Save all that was prepared or registered; returns the path of the checkpoint.

        It is a directory ``checkpoint-N`` in ``output_dir``, where one checkpoint stays, or with
        automatic naming in ``project_dir/checkpoints``, where ``total_limit`` stay.
        """
        manager = self._manager_of(output_dir)
        step = self.save_iteration
        extra = {"ranks": self.num_processes, "step": self.step}
        with TemporaryDirectory() as folder:
            save_accelerator_state(
                folder, [], [], [], [], self.process_index, self.step
            )
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        manager.save(step, self._rng(files), **self._objects(), extra=extra)
        self.project_configuration.iteration = step + 1
        return manager.path(step)

    def load_state(self, input_dir: str | None = None, *_: Any, **__: Any) -> bool:
        """Restore a checkpoint, or the newest good one in a directory.

        Returns False, with automatic naming, if there is none yet.
        """
        name = os.path.basename(os.path.normpath(input_dir or ""))
        number = re.fullmatch(r"checkpoint-(\d+)", name)
        if number is not None:
            manager = self._manager_of(
                os.path.dirname(os.path.normpath(input_dir or ""))
            )
            step = int(number[1])
        else:
            manager = self._manager_of(input_dir)
            latest = manager.latest()
            if latest is None or latest.step is None:
                if input_dir is None:
                    return False
                raise megackpt.NotACheckpoint(f"{input_dir} has no complete checkpoint")
            step = latest.step
        path = manager.path(step)
        ranks = megackpt.load_common_state_dict(path)["extra"]["ranks"]
        rng = {}
        if ranks == self.num_processes:
            rng = self._rng({})
        else:
            text = "the random generators of %d ranks are not restored on %d"
            logger.warning(text, ranks, self.num_processes)
        found = manager.restore(rng, step, **self._objects(), extra={})
        if found is None:
            raise megackpt.NotACheckpoint(f"{path} was removed")
        self.step = found.state["extra"]["step"]
        with TemporaryDirectory() as folder:
            for name, data in found.state.get("rng", {}).items():
                Path(folder, name).write_bytes(data)
            if rng:
                load_accelerator_state(folder, [], [], [], [], self.process_index)
        self.project_configuration.iteration = step + 1
        return True

    def backward(self, loss: Any, **options: Any) -> None:
        super().backward(loss, **options)
        if self._manager is not None:
            self._manager.poll()

    def end_training(self) -> None:
        if self._manager is not None:
            self._manager.close()
        super().end_training()

    def _manager_of(self, directory: str | None) -> megackpt.CheckpointManager:
        """The manager of a directory. That of another one commits its saves first."""
        keep = 1
        if directory is None:
            if not self.project_configuration.automatic_checkpoint_naming:
                raise ValueError(
                    "give a directory, or ProjectConfiguration(automatic_checkpoint_naming=True)"
                )
            directory = os.path.join(self.project_dir, "checkpoints")
            keep = self.project_configuration.total_limit
        directory = os.path.expanduser(directory)
        if self._manager is not None:
            if directory == self._directory:
                return self._manager
            self._manager.close()
        options = {"keep_last": keep} | self._options
        self._manager = megackpt.CheckpointManager(directory, **options)
        self._directory = directory
        latest = self._manager.latest()
        if latest is not None and latest.step is not None:
            # So that the next save is the newest.
            configuration = self.project_configuration
            configuration.iteration = max(configuration.iteration, latest.step + 1)
        return self._manager

    def _rng(self, files: dict[str, bytes]) -> dict[str, Any]:
        rank, ranks = self.process_index, self.num_processes
        return {"rng": megackpt.ShardedObject("rng", files, (ranks,), (rank,))}

    def _objects(self) -> dict[str, Any]:
        kind = self.distributed_type
        if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise ValueError(f"{kind} is not supported: its checkpoints are its own")
        if self._save_model_state_pre_hook or self._load_model_state_pre_hook:
            raise ValueError("hooks of save_state and load_state are not supported")
        objects: dict[str, Any] = {}
        if self.scaler is not None:
            objects["scaler"] = self.scaler
        for number, optimizer in enumerate(self._optimizers):
            objects[_name("optimizer", number)] = optimizer.optimizer
        named = {
            "model": self._models,
            "scheduler": self._schedulers,
            "custom": self._custom_objects,
        }
        for name, values in named.items():
            for number, value in enumerate(values):
                objects[_name(name, number)] = value
        for number, loader in enumerate(self._dataloaders):
            if getattr(loader, "use_stateful_dataloader", False):
                name = _name("data", number)
                objects[name] = _PreparedLoaderState(loader, name=name)
        return objects


class _PreparedLoaderState(LoaderState):
    """The state of a loader of accelerate, which counts batches. All ranks use one order."""

    def _own_state(self) -> dict[str, Any]:
        sampler = self.loader.get_sampler()
        if isinstance(sampler, RandomSampler) and not isinstance(
            sampler, SeedableRandomSampler
        ):
            raise megackpt.ShardingError(
                f"{self._name} is shuffled in an order that cannot be had again: give "
                "DataLoaderConfiguration(use_seedable_sampler=True)"
            )
        return super()._own_state()

    def _order(self) -> dict[str, Any] | None:
        sampler = self.loader.get_sampler()
        is_known = isinstance(sampler, (SeedableRandomSampler, SequentialSampler))
        if not is_known or not isinstance(self.loader, DataLoaderShard):
            return None
        return {
            "samples": len(self.loader.dataset),
            "sampler": type(sampler).__name__,
            "replicas": getattr(self.loader.batch_sampler, "num_processes", 1),
        }

    def _epoch(self) -> Any:
        running = self.loader.gradient_state.dataloader_references
        epoch = self.loader.iteration
        if self.loader.end_of_dataloader and any(
            loader is self.loader for loader in running
        ):
            epoch += 1  # In its last batch; nothing of this epoch is left.
        return epoch, getattr(self.loader.get_sampler(), "initial_seed", None)

    def _set_epoch(self, epoch: Any) -> None:
        self.loader.iteration, seed = epoch
        if seed is not None:
            self.loader.get_sampler().initial_seed = seed

    def _samples(self, main: dict[str, Any], steps: int) -> int:
        batches: int = main["_sampler_iter_yielded"] + steps
        batches *= self.loader.total_batch_size
        return batches // getattr(self.loader.batch_sampler, "num_processes", 1)

    def _fresh(self) -> dict[str, Any]:
        self.loader.load_state_dict({})
        return copy.deepcopy(self.loader.base_dataloader.state_dict())

    def _move(self, main: dict[str, Any], samples: int) -> None:
        whole = samples * getattr(self.loader.batch_sampler, "num_processes", 1)
        batches, rest = divmod(whole, self.loader.total_batch_size)
        if rest:
            raise megackpt.MismatchError(
                f"{self._name}: the {whole} samples that it has behind it are not divisible by "
                f"the batch of {self.loader.total_batch_size}"
            )
        main["_sampler_iter_yielded"] = batches
        if main["_sampler_iter_state"] is not None:
            own = batches * self.loader.batch_sampler.batch_size
            main["_sampler_iter_state"]["samples_yielded"] = own


def _name(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name
