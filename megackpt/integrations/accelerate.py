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
from accelerate.utils.constants import RNG_STATE_NAME
from torch.utils.data import RandomSampler, SequentialSampler

import megackpt
from megackpt.checkpoint import absolute
from megackpt.distributed import DEFAULT_TIMEOUT, group_over
from megackpt.integrations.data import LoaderState
from megackpt.integrations.pretrained_files import pretrained_files

__all__ = ["Accelerator"]

logger = logging.getLogger("megackpt.accelerate")


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator. A save is written while training continues.

    ``end_training`` commits the last one, so every program calls it.

    Args:
        checkpoint_options: of ``megackpt.CheckpointManager``, such as ``strategy``.
        processing_class: a tokenizer or processor of transformers. Its files are stored with the
            first model, if that is a model of transformers.
        options: like positional arguments, options of accelerate's Accelerator.
    """

    def __init__(
        self,
        *args: Any,
        checkpoint_options: dict[str, Any] | None = None,
        processing_class: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._processing_class = processing_class
        self._options: dict[str, Any] = {"naming": "transformers", "asynchronous": True}
        self._options |= checkpoint_options or {}
        self._manager: megackpt.CheckpointManager | None = None
        self._directory = ""

    def save_state(self, output_dir: str | None = None, *_: Any, **__: Any) -> str:
        """Save all that was prepared or registered; returns the path of the checkpoint.

        It is a directory ``checkpoint-N`` in ``output_dir``, where one checkpoint stays, or with
        automatic naming in ``project_dir/checkpoints``, where ``total_limit`` stay.
        """
        manager = self._manager_of(self._directory_of(output_dir))
        step = self.save_iteration
        with group_over(None, DEFAULT_TIMEOUT) as group:
            rng = group.reduce_broadcast("rng", self._own_rng, list)
        extra = {"step": self.step}
        manager.save(step, self._declared(rng), **self._objects(), extra=extra)
        self.project_configuration.iteration = step + 1
        return manager.path(step)

    def load_state(self, input_dir: str | None = None, *_: Any, **__: Any) -> bool:
        """Restore a checkpoint, or the newest good one in a directory. Saves are committed first.

        Returns False, with automatic naming, if there is none yet.
        """
        if self._manager is not None:
            self._manager.finalize()
        directory = self._directory_of(input_dir)
        step: int | None = None
        parent, name = os.path.split(directory)
        number = re.fullmatch(r"checkpoint-(\d+)", name)
        probe = megackpt.CheckpointManager(directory)
        if number is not None and probe.latest() is None:
            directory, step = parent, int(number[1])
        manager = self._manager_of(directory)
        found = manager.restore(self._declared([]), step, **self._objects(), extra={})
        if found is None:
            if input_dir is None:
                return False
            raise megackpt.NotACheckpoint(f"{directory} has no complete checkpoint")
        self._restore_rng(found.state["rng"], manager.path(found.step))
        self.step = found.state["extra"]["step"]
        # The next save is the newest, also if this step is not.
        configuration = self.project_configuration
        configuration.iteration = max(configuration.iteration, found.step + 1)
        return True

    def backward(self, loss: Any, **options: Any) -> None:
        super().backward(loss, **options)
        if self._manager is not None:
            self._manager.poll()

    def end_training(self) -> None:
        if self._manager is not None:
            self._manager.close()
        super().end_training()

    def _directory_of(self, given: str | None) -> str:
        if given is None:
            if not self.project_configuration.automatic_checkpoint_naming:
                raise ValueError(
                    "give a directory, or ProjectConfiguration(automatic_checkpoint_naming=True)"
                )
            given = os.path.join(self.project_dir, "checkpoints")
        return absolute(os.path.expanduser(given)).rstrip("/")

    def _manager_of(self, directory: str) -> megackpt.CheckpointManager:
        """The manager of a directory. A manager of another directory commits its saves first."""
        if self._manager is not None:
            if directory == self._directory:
                return self._manager
            self._manager.close()
        configuration = self.project_configuration
        is_automatic = configuration.automatic_checkpoint_naming
        keep: int | None = 1
        if is_automatic and directory == self._directory_of(None):
            keep = configuration.total_limit
        options = {"keep_last": keep} | self._options
        self._manager = megackpt.CheckpointManager(directory, **options)
        self._directory = directory
        latest = self._manager.latest()
        if latest is not None and latest.step is not None:
            # So that the next save is the newest.
            configuration.iteration = max(configuration.iteration, latest.step + 1)
        return self._manager

    def _declared(self, rng: list[bytes]) -> dict[str, Any]:
        """What rank 0 writes: the states of the random generators, small files of a model."""
        rank = self.process_index
        declared = {"rng": megackpt.ShardedObject("rng", rng, (1,), (0,), rank)}
        for model in self._models[:1]:
            processing_class = None if rank else self._processing_class
            if files := pretrained_files(self.unwrap_model(model), processing_class):
                files_object = megackpt.ShardedObject("files", files, (1,), (0,), rank)
                declared["files"] = files_object
        return declared

    def _own_rng(self) -> bytes:
        rank = self.process_index
        with TemporaryDirectory() as folder:
            save_accelerator_state(folder, [], [], [], [], rank, self.step)
            return Path(folder, f"{RNG_STATE_NAME}_{rank}.pkl").read_bytes()

    def _restore_rng(self, states: Any, path: str) -> None:
        if type(states) is not list or not all(type(s) is bytes for s in states):
            text = (
                f"{path}: 'rng' is not the generators of ranks, as files of accelerate"
            )
            raise megackpt.CorruptCheckpoint(text)
        rank, ranks = self.process_index, self.num_processes
        if len(states) != ranks:
            text = "the random generators of %d ranks are not restored on %d"
            logger.warning(text, len(states), ranks)
            return
        with TemporaryDirectory() as folder:
            Path(folder, f"{RNG_STATE_NAME}_{rank}.pkl").write_bytes(states[rank])
            load_accelerator_state(folder, [], [], [], [], rank)

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
            epoch += 1  # In the last batch; the epoch has no samples left.
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
