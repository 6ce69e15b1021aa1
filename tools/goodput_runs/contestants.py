"""The contestants: how each library is driven. docs/goodput.md shows this code.

``after_step`` is called on all ranks after each step of the training, ``close`` after the last one.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save, save as dcp_save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from megackpt import CheckpointManager, LocalTier

EVERY, LOCAL_EVERY = 10, 5
"""Steps from one save in the storage to the next, and from one save on the hosts to the next."""


@dataclass(frozen=True)
class Run:
    """What a contestant saves, and where: the storage of all hosts, the memory of this host."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    storage: Path
    memory: Path
    ranks_per_host: int


class Contestant(ABC):
    """One library in one rank. It saves every ``EVERY`` steps in the storage."""

    imports: tuple[str, ...] = ()

    def __init__(self, run: Run) -> None:
        self.run = run

    @classmethod
    def prepare(cls) -> None:
        """Import what a rank will need. Called once a host, before the ranks are forked."""
        for module in cls.imports:
            import_module(module)

    @abstractmethod
    def restore(self) -> int:
        """Load the newest checkpoint. Returns its step, or 0."""

    @abstractmethod
    def after_step(self, step: int) -> None:
        """Save this step, if it is due."""

    def close(self) -> None:  # noqa: B027 - nothing, in a synchronous one
        """Wait for what is being saved."""


class Megackpt(Contestant):
    """Ours: docs/tiers.md, with on_error="warn"."""

    imports = "megackpt.saver", "megackpt.loader"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.manager = CheckpointManager(
            run.storage / "run",
            save_interval=EVERY,
            asynchronous=True,
            local=LocalTier(run.memory / "checkpoints", every=LOCAL_EVERY),
            on_error="warn",
            max_failures=1000,  # the hosts have newer steps
            timeout=timedelta(seconds=60),
        )
        self.state: dict[str, Any] = {"model": run.model, "optimizer": run.optimizer}

    def restore(self) -> int:
        found = self.manager.restore(**self.state)
        return found.step if found is not None and found.step is not None else 0

    def after_step(self, step: int) -> None:
        self.manager.save_if_due(step, **self.state)

    def close(self) -> None:
        self.manager.close()


class AppState(Stateful):
    """Model and optimizer, as in torch's tutorial of DCP."""

    def __init__(self, run: Run) -> None:
        self.model, self.optimizer = run.model, run.optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def newest(folders: Iterable[Path]) -> tuple[int, Path] | None:
    """The one of these directories whose name has the highest step."""
    steps = []
    for folder in folders:
        number = re.fullmatch(r"step-(\d+)", folder.name)
        if number:
            steps.append((int(number[1]), folder))
    return max(steps, default=None)


class Dcp(Contestant):
    """torch.distributed.checkpoint, synchronous: torch's tutorial, and torchtitan's rule for the newest."""

    def restore(self) -> int:
        complete = self.run.storage.glob("step-*/.metadata")
        found = newest(path.parent for path in complete)
        if found is None:
            return 0
        step, folder = found
        dcp_load({"app": AppState(self.run)}, checkpoint_id=folder)
        return step

    def after_step(self, step: int) -> None:
        if step % EVERY == 0:
            folder = self.run.storage / f"step-{step}"
            dcp_save({"app": AppState(self.run)}, checkpoint_id=folder)


class DcpAsync(Dcp):
    """torch.distributed.checkpoint.async_save, as in torch's recipe: one save at a time."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.group = dist.new_group(backend="gloo")
        self.future: Any = None

    def after_step(self, step: int) -> None:
        if step % EVERY == 0:
            self.close()
            folder = self.run.storage / f"step-{step}"
            self.future = async_save(
                {"app": AppState(self.run)},
                checkpoint_id=folder,
                process_group=self.group,
            )

    def close(self) -> None:
        if self.future is not None:
            self.future.result()


class TorchCheckpointing(Contestant):
    """torch_checkpointing, asynchronous: its tutorial, with the settings of its page for CPUs."""

    imports = ("torch_checkpointing",)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        package = import_module("torch_checkpointing")
        staging = import_module("torch_checkpointing.staging")
        storage = import_module("torch_checkpointing.storage.filesystem")
        stager = staging.CheckpointStagerConfig(
            use_pinned_memory=False, use_non_blocking_copy=False
        )
        self.manager = package.CheckpointManager(
            package.CheckpointManager.Config(
                save=package.AsyncCheckpointSaverConfig(staging_config=stager),
                storage_config=storage.LocalFileSystemStorageConfig(
                    use_direct_io=False
                ),
            )
        )

    def restore(self) -> int:
        found = newest(self.run.storage.iterdir())
        if found is None:
            return 0
        step, folder = found
        blank = {"model": self.run.model.state_dict(), "optimizer": None}
        loaded = self.manager.load(str(folder), into=blank)
        self.run.optimizer.load_state_dict(loaded["optimizer"])
        return step

    def after_step(self, step: int) -> None:
        if step % EVERY == 0:
            state = {
                "model": self.run.model.state_dict(),
                "optimizer": self.run.optimizer.state_dict(),
            }
            self.manager.save(str(self.run.storage / f"step-{step}"), state)

    def close(self) -> None:
        self.manager.close()


class Megatron(Contestant):
    """Megatron-Core's dist_checkpointing (torch_dist), synchronous, with Megatron-LM's tracker file.

    Its calls of CUDA are answered by the CPU (tests/interop/megatron_shims.py).
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.library = import_module("megatron.core.dist_checkpointing")
        self.tracker = run.storage / "latest_checkpointed_iteration.txt"

    @classmethod
    def prepare(cls) -> None:
        super().prepare()
        import_module("megatron_shims").dist_checkpointing()

    def declared(self, value: Any, key: str = "") -> Any:
        """Each DTensor as a ShardedTensor of the rows of this rank; all else is common."""
        if isinstance(value, dict):
            return {k: self.declared(v, f"{key}.{k}") for k, v in value.items()}
        if not isinstance(value, DTensor):
            return value
        rows = 0, dist.get_rank(), dist.get_world_size()
        return self.library.ShardedTensor.from_rank_offsets(key, value.to_local(), rows)

    def restore(self) -> int:
        if not self.tracker.exists():
            return 0
        step = int(self.tracker.read_text())
        state = AppState(self.run).state_dict()
        folder = self.run.storage / f"iter_{step:07d}"
        self.put(state, self.library.load(self.declared(state), str(folder)))
        return step

    def put(self, state: dict[str, Any], loaded: dict[str, Any]) -> None:
        """Into the model and the optimizer: rows into the DTensors of ``state``, and what is common."""

        def merged(value: Any, found: Any) -> Any:
            if isinstance(value, dict):
                return {k: merged(v, found[k]) for k, v in value.items()}
            if not isinstance(value, DTensor):
                return found
            value.to_local().copy_(found)
            return value

        AppState(self.run).load_state_dict(merged(state, loaded))

    def after_step(self, step: int) -> None:
        if step % EVERY == 0:
            folder = self.run.storage / f"iter_{step:07d}"
            if dist.get_rank() == 0:
                folder.mkdir(exist_ok=True)
            dist.barrier()
            state = AppState(self.run).state_dict()
            self.library.save(self.declared(state), str(folder))
            if dist.get_rank() == 0:
                self.tracker.write_text(str(step))


class Nvrx(Megatron):
    """nvidia-resiliency-ext's LocalCheckpointManager above Megatron-Core's, as Megatron-LM joins them.

    A copy of each rank's part is on the other host. The CPU answers the calls of CUDA here, too.
    """

    imports = (
        "nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager",
        "nvidia_resiliency_ext.checkpointing.local.replication.strategies",
        "megatron.core.dist_checkpointing.tensor_aware_state_dict",
    )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        local = "nvidia_resiliency_ext.checkpointing.local"
        clique = import_module(f"{local}.replication.strategies")
        kind = import_module(f"{local}.ckpt_managers.local_manager")
        aware = "megatron.core.dist_checkpointing.tensor_aware_state_dict"
        self.kind = import_module(aware).MCoreTensorAwareStateDict
        self.manager = kind.LocalCheckpointManager(
            run.memory / "checkpoints",
            repl_strategy=clique.CliqueReplicationStrategy.from_replication_params(
                replication_jump=run.ranks_per_host, replication_factor=2
            ),
        )

    def restore(self) -> int:
        step = int(self.manager.find_latest())
        stored = int(self.tracker.read_text()) if self.tracker.exists() else 0
        if step <= 0 or stored > step:
            return super().restore()
        found, _ = self.manager.load()
        state = AppState(self.run).state_dict()
        self.put(state, found.to_state_dict(self.declared(state)))
        return step

    def after_step(self, step: int) -> None:
        if step % LOCAL_EVERY == 0:
            state = self.declared(AppState(self.run).state_dict())
            made, _ = self.kind.from_state_dict(state, "atomic")
            self.manager.save(made, step)
        super().after_step(step)


class Undisturbed(Contestant):
    """No checkpoints: the run whose losses are right."""

    def restore(self) -> int:
        return 0

    def after_step(self, step: int) -> None:
        pass


CONTESTANTS: dict[str, type[Contestant]] = {
    "undisturbed": Undisturbed,
    "megackpt": Megackpt,
    "torch DCP": Dcp,
    "torch DCP async": DcpAsync,
    "torch_checkpointing": TorchCheckpointing,
    "Megatron-Core": Megatron,
    "nvidia-resiliency-ext": Nvrx,
}

PEERS = Path(".peers")
FOLDERS = {
    "torch_checkpointing": (PEERS / "torch_checkpointing",),
    "Megatron-Core": (PEERS, Path("tests/interop")),
    "nvidia-resiliency-ext": (PEERS, PEERS / "nvrx", Path("tests/interop")),
}
"""Where "make peers" has installed what a contestant imports, below the root of the project."""
