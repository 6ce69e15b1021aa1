"""``megackpt.dcp.install``: our storage in the place of torch's, and back."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    CheckpointException,
    _fsspec_filesystem,
    _storage_utils,
    filesystem,
)
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    _ProcessBasedAsyncCheckpointExecutor as ProcessExecutor,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import megackpt
from megackpt.dcp import (
    FileSystemReader,
    FileSystemWriter,
    install,
    installation,
    uninstall,
)
from tests.torch_names import HAS_STAGERS

STOCK = dcp.FileSystemWriter, dcp.FileSystemReader
OURS = FileSystemWriter, FileSystemReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def bound(module: Any) -> tuple[Any, ...]:
    return module.FileSystemWriter, module.FileSystemReader


def test_names_are_replaced_and_restored() -> None:
    before = dict(vars(_storage_utils)), vars(ProcessExecutor)["execute_save"]
    with install():
        for module in (dcp, filesystem, _storage_utils, _fsspec_filesystem):
            assert bound(module) == OURS
    assert bound(dcp) == bound(filesystem) == STOCK
    assert (dict(vars(_storage_utils)), vars(ProcessExecutor)["execute_save"]) == before


@pytest.mark.slow
def test_no_module_of_torch_keeps_its_own() -> None:
    package = "torch.distributed.checkpoint"
    for found in pkgutil.walk_packages(dcp.__path__, f"{package}."):
        with suppress(ImportError):
            importlib.import_module(found.name)
    with install():
        for name, module in list(sys.modules.items()):
            if name.startswith("torch."):
                for key, value in list(vars(module).items()):
                    assert not any(value is stock for stock in STOCK), f"{name}.{key}"


def test_installing_twice_is_installing_once() -> None:
    with install() as outer:
        replaced = list(installation._replaced)
        with install():
            assert installation._replaced == replaced
        assert bound(dcp) == OURS  # the outer one lasts
        assert outer is not None
    assert bound(dcp) == STOCK
    uninstall()  # where nothing is installed
    install()
    with install():
        pass
    assert bound(dcp) == OURS
    uninstall()
    assert bound(dcp) == STOCK


def test_the_stager_copies_the_local_tensor_of_a_dtensor_alone() -> None:
    def stage(value: torch.Tensor) -> torch.Tensor:
        staged: dict[str, torch.Tensor] = StateDictStager().stage({"w": value})
        return staged["w"]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        memory = torch.arange(6.0)
        # torch fails for a DTensor whose local tensor does not begin where its storage begins.
        value = DTensor.from_local(memory[2:].view(2, 2), mesh, [Shard(0)])
        other: Any = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        other.label = ["mine"]
        with install():
            copied: Any = stage(value)
            with_attributes: Any = stage(other)
        memory.zero_()
        other.zero_()
        assert type(copied) is DTensor
        if HAS_STAGERS:  # torch 2.8 copies what the method returns once more
            assert copied._spec is value._spec
        assert copied.to_local().tolist() == [[2, 3], [4, 5]]
        assert with_attributes.label == ["mine"]
        assert with_attributes.label is not other.label
        assert with_attributes.to_local().tolist() == [1, 1]
        assert stage(other)._spec is not other._spec  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()


def test_an_error_inside_uninstalls() -> None:
    with pytest.raises(KeyError), install():
        raise KeyError
    assert bound(dcp) == STOCK


def test_what_a_caller_has_put_there_stays() -> None:
    class Mine(STOCK[0]):  # type: ignore[misc, valid-type]
        pass

    dcp.FileSystemWriter = Mine
    try:
        with install():
            assert dcp.FileSystemWriter is Mine
            assert dcp.FileSystemReader is FileSystemReader
        assert dcp.FileSystemWriter is Mine
    finally:
        dcp.FileSystemWriter = STOCK[0]


def test_classes_derived_from_stock_keep_their_bases(tmp_path: Path) -> None:
    with install():
        for kind in (_fsspec_filesystem.FsspecWriter, HuggingFaceStorageWriter):
            assert issubclass(kind, STOCK[0])
            assert not issubclass(kind, OURS[0])
        writer = _fsspec_filesystem.FsspecWriter(str(tmp_path))
        assert isinstance(writer, dcp.StorageWriter)


def test_a_checkpoint_id_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with install():
        dcp.save({"w": torch.ones(5), "n": 3}, checkpoint_id=path)
        found = {"w": torch.zeros(5), "n": 0}
        dcp.load(found, checkpoint_id=path)
        dcp_to_torch_save(path, tmp_path / "c.pt")
    report = megackpt.verify(path)
    assert (report.ok, report.checked) == (True, True)
    assert found["n"] == 3
    assert torch.equal(found["w"], torch.ones(5))
    assert torch.load(tmp_path / "c.pt")["n"] == 3
    other = {"w": torch.zeros(5), "n": 0}
    dcp.load(other, checkpoint_id=path)  # stock reads it
    assert other["n"] == 3


def test_a_save_that_has_begun_ends_with_ours(tmp_path: Path) -> None:
    """torch chooses the storage in its thread, when it comes to that."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with install():
            future: Any = dcp.async_save({"n": 1}, checkpoint_id=tmp_path / "c")
        future.result()
    finally:
        torch.distributed.destroy_process_group()
    assert megackpt.verify(tmp_path / "c").checked


def save_in_a_process(folder: str) -> None:
    """By a writer of torch's own class, which was made before, and by none."""
    stock = dcp.FileSystemWriter(f"{folder}/stock")
    with install():
        for writer, path in ((stock, None), (None, f"{folder}/ours")):
            future: Any = dcp.async_save(
                {"w": torch.ones(5)},
                checkpoint_id=path,
                storage_writer=writer,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
            future.result()


def test_a_process_takes_a_writer_of_torchs_own_class(
    tmp_path: Path, ranks: Any
) -> None:
    ranks(save_in_a_process, 1, tmp_path, timeout=240)
    for name in ("stock", "ours"):
        found = {"w": torch.zeros(5)}
        dcp.load(found, checkpoint_id=tmp_path / name)
        assert found["w"].tolist() == [1] * 5
    assert not (tmp_path / "stock" / "megackpt.index").exists()
    assert megackpt.verify(tmp_path / "ours").checked


def test_objects_of_torchs_own_classes_are_pickled(tmp_path: Path) -> None:
    made = dcp.FileSystemWriter(tmp_path / "a"), dcp.FileSystemReader(tmp_path / "a")
    with install():
        copies = pickle.loads(pickle.dumps(made))
        assert (type(copies[0]), type(copies[1])) == STOCK
        assert type(pickle.loads(pickle.dumps(FileSystemWriter("b")))) is OURS[0]
        dcp.save({"w": torch.ones(5)}, storage_writer=copies[0], no_dist=True)
        assert not (tmp_path / "a" / "megackpt.index").exists()
    assert type(pickle.loads(pickle.dumps(made[0]))) is STOCK[0]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["megackpt.dcp", "torch.distributed.checkpoint"])
def test_the_order_of_imports_does_not_matter(first: str) -> None:
    code = f"""if True:
        import {first}
        import megackpt.dcp
        megackpt.dcp.install()
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import format_utils, _fsspec_filesystem
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        ours = megackpt.dcp.FileSystemWriter
        assert dcp.FileSystemWriter is FileSystemWriter is format_utils.FileSystemWriter is ours
        assert not issubclass(_fsspec_filesystem.FsspecWriter, ours)
        megackpt.dcp.uninstall()
        assert dcp.FileSystemWriter is format_utils.FileSystemWriter is not ours
    """
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


LAYOUTS = ["sparse", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"]


def in_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    block = [(2, 2)] if layout in ("sparse_bsr", "sparse_bsc") else []
    result: torch.Tensor = getattr(tensor, f"to_{layout}")(*block)
    return result


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_tensors_are_refused(tmp_path: Path, layout: str) -> None:
    """Nothing is written, and a load into a sparse tensor changes nothing."""
    sparse = in_layout(torch.eye(4), layout)
    with install():
        for state in ({"s": sparse}, {"m": {"s": torch.nn.Parameter(sparse)}}):
            with pytest.raises(CheckpointException, match=r"s': sparse.*to_dense"):
                dcp.save(state, checkpoint_id=tmp_path / "c")
            with pytest.raises((CheckpointException, RuntimeError)):  # torch's staging
                dcp.async_save(state, checkpoint_id=tmp_path / "c").result()
        assert not list(tmp_path.iterdir())
        dcp.save({"a": torch.ones(2), "s": torch.eye(4)}, checkpoint_id=tmp_path / "c")
        into = {"a": torch.zeros(2), "s": 2 * sparse}
        with pytest.raises(CheckpointException, match=r"'s'.* into a sparse one"):
            dcp.load(into, checkpoint_id=tmp_path / "c")
    assert into["a"].tolist() == [0, 0]
    assert into["s"].to_dense()[0, 0] == 2
