"""The storages of the caller's tensors: every door leaves them resizable, and none writes garbage."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import megackpt
import megackpt.megatron
from megackpt import CheckpointManager, ShardedTensor, ShardingError, Strategy
from megackpt.converter import export_huggingface
from megackpt.dcp import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageWriter,
    install,
)
from megackpt.megatron.import_hook import TESTED, THEIRS
from megackpt.megatron.tensor_aware_state_dict import MCoreTensorAwareStateDict
from megackpt.storage.local import LocalWriter
from megackpt.testing import ThreadedGroup
from tests.manager.local_job import Job

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

MIB = 1 << 20


def tensors() -> dict[str, torch.Tensor]:
    """Small, large, strided, of several dtypes, and a part of a storage."""
    whole = torch.arange(100.0)
    return {
        "small": torch.arange(6.0).reshape(2, 3),
        "large": torch.arange(MIB, dtype=torch.int32),
        "strided": torch.arange(20.0).reshape(4, 5).t(),
        "bfloat16": torch.ones(7, dtype=torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "part": whole[10:20],
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }


def declared(made: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    return {
        key: ShardedTensor.from_rank_offsets(key, value.detach())
        for key, value in made.items()
    }


def resize(made: dict[str, torch.Tensor]) -> None:
    """Free each storage and allocate it again, as FSDP and offloading do."""
    for key, value in made.items():
        storage = value.untyped_storage()
        assert storage.resizable(), key
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)


def save_and_load(strategy: Any) -> Callable[[dict[str, torch.Tensor], Path], None]:
    def run(made: dict[str, torch.Tensor], path: Path) -> None:
        megackpt.save(declared(made), path, strategy)
        resize(made)
        megackpt.load(declared(made), path)

    return run


def asynchronous(process: bool) -> Callable[[dict[str, torch.Tensor], Path], None]:
    def run(made: dict[str, torch.Tensor], path: Path) -> None:
        queue = megackpt.AsyncCallsQueue(persistent=process)
        request = megackpt.save(declared(made), path, async_sharded_save=True)
        queue.schedule_async_request(request)
        resize(made)  # the copy is written
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()

    return run


def audited(made: dict[str, torch.Tensor], path: Path) -> None:
    def rank(group: ThreadedGroup) -> None:
        shards = declared(made)
        for shard in shards.values():
            shard.replica_id = group.rank
        strategy = Strategy(audit="full", check_values="note")
        megackpt.save(shards, path, strategy, process_group=group)

    ThreadedGroup.run(2, rank)


def through_dcp(made: dict[str, torch.Tensor], path: Path) -> None:
    dcp.save(made, storage_writer=FileSystemWriter(path))
    resize(made)
    dcp.load(made, storage_reader=FileSystemReader(path))


def installed(made: dict[str, torch.Tensor], path: Path) -> None:
    with install():
        dcp.save(made, checkpoint_id=path)
        resize(made)
        dcp.load(made, checkpoint_id=path)
        resize(made)
        dcp.async_save(made, checkpoint_id=path.with_name("later")).result()


def hugging_face(made: dict[str, torch.Tensor], path: Path) -> None:
    dcp.save(made, storage_writer=HuggingFaceStorageWriter(path))


def managed(made: dict[str, torch.Tensor], path: Path) -> None:
    with CheckpointManager(path, save_interval=1) as manager:
        manager.save(1, declared(made))
        resize(made)
        manager.restore(declared(made))


def local(made: dict[str, torch.Tensor], path: Path) -> None:
    job = Job(path, {}, ranks=2, per_host=1)

    def rank(group: ThreadedGroup) -> None:
        shards = declared(made)
        for shard in shards.values():
            shard.replica_id = group.rank
        with job.manager(group) as manager:
            for step in (10, 11):
                manager.save(step, shards)

    ThreadedGroup.run(2, rank)


def megatron_installed(made: dict[str, torch.Tensor], path: Path) -> None:
    """By Megatron's names, which need no more of Megatron than its packages."""
    contents: dict[str, dict[str, Any]] = {
        "megatron": {"__path__": []},
        "megatron.core": {"__path__": []},
        "megatron.core.package_info": {"__version__": TESTED[0]},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, values in contents.items():
            module = ModuleType(name)
            vars(module).update(values)
            patch.setitem(sys.modules, name, module)
        with megackpt.megatron.install():
            theirs = importlib.import_module(THEIRS)
            theirs.save(declared(made), path)
            resize(made)
            theirs.load(declared(made), path)


def exported(made: dict[str, torch.Tensor], path: Path) -> None:
    megackpt.save(declared(made), path)
    resize(made)
    export_huggingface(path, path.with_name("model"), {key: key for key in made}, {})


def megatron_local(made: dict[str, torch.Tensor], path: Path) -> None:
    aware, _ = MCoreTensorAwareStateDict.from_state_dict(declared(made), "atomic")
    aware.copy_tensors_to_cpu()
    torch.save(aware, path)


DOORS = {
    "torch_dist": save_and_load(Strategy("torch_dist")),
    "zarr": save_and_load(Strategy("zarr")),
    "safetensors": save_and_load(Strategy("safetensors")),
    "thread": asynchronous(False),
    "process": asynchronous(True),
    "audit": audited,
    "dcp": through_dcp,
    "install": installed,
    "hugging_face": hugging_face,
    "manager": managed,
    "local_tier": local,
    "megatron_local": megatron_local,
    "megatron_installed": megatron_installed,
    "export_huggingface": exported,
}


@pytest.mark.parametrize("door", DOORS)
def test_storages_stay_resizable(tmp_path: Path, door: str) -> None:
    made = tensors()
    DOORS[door](made, tmp_path / "c")
    resize(made)


# ---- a storage that is resized while it is written


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """These tensors' storages are freed after the first write of bytes."""
    tensors: list[torch.Tensor] = []
    write = LocalWriter.write

    def writing(self: LocalWriter, parts: Any) -> None:
        write(self, parts)
        while tensors:
            tensors.pop().untyped_storage().resize_(0)

    monkeypatch.setattr(LocalWriter, "write", writing)
    yield tensors
    assert not tensors


def many() -> dict[str, torch.Tensor]:
    return {f"w{i:04}": torch.full((64,), float(i)) for i in range(2000)}


@pytest.mark.parametrize("key", ["w0000", "w1999"])
def test_a_small_tensor(tmp_path: Path, freed: list[torch.Tensor], key: str) -> None:
    made = many()
    freed.append(made[key])
    with pytest.raises(ShardingError, match=f"{key}.*freed or resized"):
        megackpt.save(declared(made), tmp_path / "c")


def test_a_large_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A large storage that is freed cannot be read: so only its address is changed here.
    made = {"w": torch.ones(10 * MIB)}
    read: list[int] = []

    def moving(storage: torch.UntypedStorage) -> int:
        read.append(storage.nbytes())
        return storage.data_ptr() + 8 * (len(read) > 2)

    monkeypatch.setattr("megackpt.staging.source._begin", moving)
    with pytest.raises(ShardingError, match=r"'w' .*freed or resized"):
        megackpt.save(declared(made), tmp_path / "c")
    assert len(read) == 3  # after 16 of 40 MiB


def test_a_write_without_a_copy_of_an_asynchronous_save(
    tmp_path: Path, freed: list[torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    made = many()
    made["large"] = torch.ones(2 * MIB)
    freed.append(made["w0000"])
    strategy = Strategy(staging_memory=MIB)
    with caplog.at_level(logging.WARNING, "megackpt"):
        request = megackpt.save(
            declared(made), tmp_path / "c", strategy, async_sharded_save=True
        )
    assert request is not None
    assert "written before save() returns" in caplog.text
    with pytest.raises(ShardingError, match=r"w0000.*freed or resized"):
        request.execute_sync()


def test_an_item_of_dcp(tmp_path: Path, freed: list[torch.Tensor]) -> None:
    made = many()
    freed.append(made["w0000"])
    writer = FileSystemWriter(tmp_path / "c", thread_count=1)
    with pytest.raises(
        CheckpointException, match=r"w0000: the tensor's storage was freed"
    ):
        dcp.save(made, storage_writer=writer)
