"""The doors of P16 that are other projects' trainers. Each takes part where its packages are in .peers.

The trainers hold a module of DTensors and have no optimizer. They save while the caller waits.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megackpt
from benchmarks.contestants import Place
from benchmarks.doors import Engine, EngineOfModule
from benchmarks.peers import PEERS, TRAINERS
from benchmarks.states import Piece


class EngineOfStateDict(EngineOfModule):
    """megackpt.save and load of a module's state_dict(), and load_state_dict()."""

    name = "megackpt, state_dict()"

    def save(self, declared: dict[str, Any], folder: Path) -> None:
        Engine.save(self, {"model": declared["model"].state_dict()}, folder)

    def load(self, declared: dict[str, Any], folder: Path, verify: bool) -> None:
        state = {"model": declared["model"].state_dict()}
        Engine.load(self, state, folder, verify)
        declared["model"].load_state_dict(state["model"])


class TrainerDoor(EngineOfModule):
    """A trainer of another project, in processes that no other trainer shares.

    Loads check digests: a trainer has no option for it.
    """

    alike = EngineOfModule.name

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        sys.path += [str(PEERS / package) for package in (*TRAINERS[self.name], "")]
        # What torchrun sets.
        os.environ.update(
            RANK=str(place.rank),
            LOCAL_RANK=str(place.rank),
            GROUP_RANK="0",
            WORLD_SIZE=str(place.ranks),
            LOCAL_WORLD_SIZE=str(place.ranks),
            MASTER_ADDR="localhost",
            MASTER_PORT="29500",
            TORCHELASTIC_RUN_ID="benchmark",
        )


class Lightning(TrainerDoor):
    """Trainer.save_checkpoint; what its strategy does when a run is resumed."""

    name = "Lightning"

    def declare(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        strategies = importlib.import_module("megackpt.integrations.lightning")
        lightning = importlib.import_module("lightning.pytorch")
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        module = lightning.LightningModule()
        module.layers = super().declare(pieces)["model"].layers
        strategy = strategies.ModelParallelStrategy(asynchronous=False)
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=self.place.ranks,
            strategy=strategy,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module.trainer = trainer
        strategy.connect(module)
        return {"trainer": trainer}

    def save(self, declared: dict[str, Any], folder: Path) -> None:
        declared["trainer"].save_checkpoint(folder, weights_only=False)

    def load(self, declared: dict[str, Any], folder: Path, verify: bool) -> None:  # noqa: ARG002
        strategy = declared["trainer"].strategy
        strategy.load_model_state_dict(strategy.load_checkpoint(folder))


class Transformers(TrainerDoor):
    """Its Trainer's own methods for a checkpoint in a training, and for resuming from it."""

    name = "transformers"

    def declare(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        package = importlib.import_module("transformers")
        trainers = importlib.import_module("megackpt.integrations.transformers")
        arguments = package.TrainingArguments(
            output_dir="unused",
            use_cpu=True,
            save_only_model=True,
            report_to=[],
            disable_tqdm=True,
        )
        module = super().declare(pieces)["model"]
        trainer = trainers.Trainer(model=module, args=arguments)
        # The Trainer has moved the module to its device, which copies DTensors.
        trainer.model_wrapped = super().declare(pieces)["model"]
        return {"trainer": trainer}

    def save(self, declared: dict[str, Any], folder: Path) -> None:
        trainer = declared["trainer"]
        trainer.checkpoints = self._manager(folder)
        trainer._save_checkpoint(trainer.model_wrapped, None)

    def load(self, declared: dict[str, Any], folder: Path, verify: bool) -> None:  # noqa: ARG002
        trainer = declared["trainer"]
        trainer.checkpoints = self._manager(folder)
        trainer._ranks, trainer._step = self.place.ranks, trainer.state.global_step
        trainer._load_optimizer_and_scheduler(str(folder))

    def _manager(self, folder: Path) -> megackpt.CheckpointManager:
        return megackpt.CheckpointManager(folder, naming="transformers")


class Accelerate(TrainerDoor):
    """Accelerator.save_state and load_state. The states of the random generators are in it, too."""

    name = "accelerate"

    def declare(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        accelerators = importlib.import_module("megackpt.integrations.accelerate")
        accelerator = accelerators.Accelerator(
            cpu=True, checkpoint_options={"asynchronous": False}
        )
        # Not for training: accelerate would wrap it in DDP, which takes no DTensors.
        accelerator.prepare_model(
            super().declare(pieces)["model"], evaluation_mode=True
        )
        return {"accelerator": accelerator}

    def save(self, declared: dict[str, Any], folder: Path) -> None:
        declared["accelerator"].save_state(str(folder))

    def load(self, declared: dict[str, Any], folder: Path, verify: bool) -> None:  # noqa: ARG002
        declared["accelerator"].load_state(str(folder))


class Torchtitan(TrainerDoor):
    """Its CheckpointManager, as a trainer calls it before the first step: the model alone."""

    name = "torchtitan"
    alike = EngineOfStateDict.name

    def declare(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        managers = importlib.import_module("megackpt.integrations.torchtitan")
        config = managers.CheckpointManager.Config(
            enable=True, keep_latest_k=0, initial_load_model_only=False
        )
        manager = config.build(
            dataloader=None,
            model_parts=[super().declare(pieces)["model"]],
            optimizers=None,
            lr_schedulers=None,
            states={},
            sd_adapter=None,
        )
        return {"manager": manager}

    def save(self, declared: dict[str, Any], folder: Path) -> None:
        declared["manager"].folder = str(folder)
        declared["manager"].save(0)

    def load(self, declared: dict[str, Any], folder: Path, verify: bool) -> None:  # noqa: ARG002
        declared["manager"].folder = str(folder)
        declared["manager"].load(0)


TRAINER_DOORS: dict[str, type[TrainerDoor]] = {
    kind.name: kind for kind in (Lightning, Transformers, Accelerate, Torchtitan)
}
TRAINER_ENGINES: dict[str, type[Engine]] = {EngineOfStateDict.name: EngineOfStateDict}
