"""Hugging Face transformers: its Trainer, with checkpoints of megackpt that all ranks write."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers

import megackpt
from megackpt.distributed import DEFAULT_TIMEOUT, group_over
from megackpt.integrations.pretrained_files import TEMPLATES, pretrained_files

__all__ = ["Trainer"]

logger = logging.getLogger("megackpt.transformers")


class _Polling(transformers.TrainerCallback):
    """Commits the saves that are written while the training continues."""

    def __init__(self, checkpoints: megackpt.CheckpointManager) -> None:
        self._checkpoints = checkpoints

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._checkpoints.poll()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._checkpoints.close()  # also waits for the removal of older ones


class Trainer(transformers.Trainer):
    """transformers' Trainer. ``train(resume_from_checkpoint=True)`` starts if no checkpoint exists.

    ``save_total_limit`` checkpoints stay, and the best one.

    Args:
        checkpoint_options: of ``megackpt.CheckpointManager``, such as ``strategy``.
        options: like positional arguments, options of transformers' Trainer.
    """

    def __init__(
        self,
        *args: Any,
        checkpoint_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        settings: dict[str, Any] = {
            "naming": "transformers",
            "asynchronous": True,
            "keep_last": self.args.save_total_limit,
            "best_mode": "max" if self.args.greater_is_better else "min",
        }
        settings |= checkpoint_options or {}
        if settings["keep_last"] and self.args.metric_for_best_model is not None:
            settings.setdefault("keep_best", 1)
        self.checkpoints = megackpt.CheckpointManager(self.args.output_dir, **settings)
        self.add_callback(_Polling(self.checkpoints))
        # The folder in which transformers' code finds and leaves its small files.
        self._folder: str | None = None
        self._step: int | None = None
        self._ranks = 0  # that saved this step

    def train(
        self, resume_from_checkpoint: Any = None, *args: Any, **options: Any
    ) -> Any:
        if not resume_from_checkpoint:
            return super().train(None, *args, **options)
        if resume_from_checkpoint is True:
            latest = self.checkpoints.latest()
            self._step = None if latest is None else latest.step
        else:
            folder, name = os.path.split(os.path.abspath(resume_from_checkpoint))
            number = re.fullmatch(r"checkpoint-(\d+)", name)
            if number is None or folder != os.path.abspath(self.args.output_dir):
                raise ValueError(
                    f"{resume_from_checkpoint} is no checkpoint of {self.args.output_dir}"
                )
            self._step = int(number[1])
        if self._step is None:
            return super().train(None, *args, **options)
        with TemporaryDirectory() as folder:
            self._write_files(Path(folder), self._step)
            return super().train(folder, *args, **options)

    def _get_output_dir(self, trial: Any) -> Any:
        return self._folder or super()._get_output_dir(trial)

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        if self._folder is None:
            super().save_model(output_dir, _internal_call)
        elif output_dir is not None:
            # The Trainer puts its small files there.
            os.makedirs(output_dir, exist_ok=True)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        is_best = self.state.best_global_step == step
        if is_best:
            self.state.best_model_checkpoint = self.checkpoints.path(step)
        with TemporaryDirectory() as folder:
            self._folder = folder
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._folder = None
            files = {
                path.name: path.read_bytes()
                for path in Path(folder).glob("*/*")
                if path.is_file()
            }
        if self.is_world_process_zero():
            tokenizer = getattr(self.data_collator, "tokenizer", None)
            processing_class = self.processing_class or tokenizer
            files |= pretrained_files(self.model, processing_class)
        extra: dict[str, Any] = {"ranks": self.args.world_size}
        extra |= self._declared(files, self.args.world_size)
        metric = self.state.best_metric if is_best else None
        self.checkpoints.save(step, **self._objects(), extra=extra, metric=metric)

    def _objects(self) -> dict[str, Any]:
        objects = {"model": self.model_wrapped}
        if not self.args.save_only_model:
            # accelerate's optimizer has torch's in it.
            objects["optimizer"] = getattr(self.optimizer, "optimizer", self.optimizer)
            objects["scheduler"] = self.lr_scheduler
        return objects

    def _declared(self, files: dict[str, bytes], ranks: int) -> dict[str, Any]:
        """transformers' small files: rank 0's files, and each rank's random generators."""
        rank = self.args.process_index
        shared = {name: data for name, data in files.items() if "rng_state" not in name}
        declared = {
            "files": megackpt.ShardedObject(
                "files", shared, (1,), (0,), replica_id=rank
            )
        }
        if self.args.save_only_model:
            return declared
        if ranks == self.args.world_size:
            own = {name: data for name, data in files.items() if "rng_state" in name}
            declared["rng"] = megackpt.ShardedObject("rng", own, (ranks,), (rank,))
        elif rank == 0:  # so that the load does not warn of them
            for cell in range(ranks):
                rng = megackpt.ShardedObject("rng", {}, (ranks,), (cell,))
                declared[f"rng {cell}"] = rng
        return declared

    def _write_files(self, folder: Path, step: int) -> None:
        common = megackpt.load_common_state_dict(self.checkpoints.path(step))
        ranks = self._ranks = common["extra"]["ranks"]
        if ranks != self.args.world_size:
            text = "the random generators of %d ranks are not restored on %d"
            logger.warning(text, ranks, self.args.world_size)
        found = self.checkpoints.restore(
            self._declared({}, ranks), step, strict="raise_unexpected"
        )
        if found is not None:
            files = found.state["files"] | found.state.get("rng", {})
            with group_over(
                None, DEFAULT_TIMEOUT
            ) as group:  # all ranks raise the same error
                group.reduce_broadcast("files", lambda: _write(folder, files), len)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The manager saves them."""

    def _load_from_checkpoint(self, *args: Any, **options: Any) -> None:
        """The model is loaded with the optimizer, when it is distributed."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            rest = self._declared({}, self._ranks)
            self.checkpoints.restore(rest, self._step, **self._objects())

    def _load_best_model(self) -> None:
        self.checkpoints.finalize()
        self.checkpoints.restore(
            step=self.state.best_global_step,
            strict="raise_unexpected",
            model=self.model_wrapped,
        )


def _write(folder: Path, files: dict[str, Any]) -> None:
    for name, data in files.items():
        if type(name) is str and name.startswith(TEMPLATES):
            continue  # of a tokenizer
        is_plain = type(name) is str and os.path.basename(name) == name
        if not is_plain or name in ("", ".", "..") or type(data) is not bytes:
            raise megackpt.CorruptCheckpoint(
                f"the checkpoint's entry {name!r} of {type(data).__name__} is not a small file "
                "of transformers, which has bytes, and a name without a directory"
            )
        (folder / name).write_bytes(data)
