"""Checkpoints with bad intentions, through our face: refused on every rank, by name, and nothing of them is run."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.testing import ThreadedGroup

GOLDEN = Path(__file__).parent.parent / "golden" / "mcore-0.16.1-tp2pp1dp2"
CELL = "rng_state/shard_0.1_1.2"

Read = Callable[[Path], Any]


class Payload:
    """Unpickled, it would run a command."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.witness}",)


class Recipe:
    """A class of somebody's own, and harmless."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.steps == other.steps

    __hash__ = None  # type: ignore[assignment]


def load(folder: Path, **options: Any) -> Any:
    asked = {
        "w": ShardedTensor.from_rank_offsets("misc.uint8", torch.zeros(8, dtype=torch.uint8)),
        "rng": ShardedObject.empty_from_unique_key(CELL),
    }
    return megackpt.load(asked, folder, validate_access_integrity=False, **options)


def load_on_two_ranks(folder: Path) -> None:
    """All ranks fail alike, and the error of one of them is raised."""
    outcomes = ThreadedGroup.outcomes(2, lambda group: load(folder, process_group=group))
    assert len({(type(outcome), str(outcome)) for outcome in outcomes}) == 1
    assert isinstance(outcomes[0], BaseException)
    raise outcomes[0]


def convert(folder: Path) -> None:
    try:
        megackpt.convert(folder, folder.parent / "converted", "zarr")
    finally:
        assert not (folder.parent / "converted").exists()


READERS: list[Read] = [
    load,
    load_on_two_ranks,
    convert,
    megackpt.load_plain_tensors,
    megackpt.load_common_state_dict,
    megackpt.load_sharded_metadata,
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN, tmp_path / "ckpt")


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    return tmp_path / "witness"


def change_table(folder: Path, change: Callable[[Any], None]) -> None:
    """Change what .metadata says."""
    table = pickle.loads((folder / ".metadata").read_bytes())
    change(table)
    (folder / ".metadata").write_bytes(pickle.dumps(table))


def put_object(folder: Path, value: Any) -> None:
    """Make this the stored value of CELL."""
    torch.save([value], folder / "__9_0.distcp")
    place = _StorageInfo("__9_0.distcp", 0, (folder / "__9_0.distcp").stat().st_size)
    change_table(folder, lambda table: table.storage_data.update({MetadataIndex(CELL): place}))


@pytest.mark.parametrize("read", READERS)
def test_a_payload_in_the_table(folder: Path, witness: Path, read: Read) -> None:
    change_table(folder, lambda table: setattr(table, "planner_data", Payload(witness)))
    with pytest.raises(megackpt.UntrustedClass, match=r"(posix|os)\.system") as caught:
        read(folder)
    assert isinstance(caught.value, megackpt.CheckpointingException)
    assert isinstance(caught.value, pickle.UnpicklingError)
    assert ".metadata" in str(caught.value)
    (problem,) = megackpt.verify(folder).problems
    assert "system" in problem
    assert not witness.exists()


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("path", ["../secret", "/etc/hostname", "a/../../secret"])
def test_paths_that_lead_elsewhere(folder: Path, read: Read, path: str) -> None:
    shutil.copy(folder / "__0_0.distcp", folder.parent / "secret")

    def lead(table: Any) -> None:
        for info in table.storage_data.values():
            info.relative_path = path

    change_table(folder, lead)
    with pytest.raises(megackpt.CorruptCheckpoint, match="no file inside the checkpoint"):
        read(folder)
    assert not megackpt.verify(folder).ok


@pytest.mark.parametrize("read", [load, load_on_two_ranks, megackpt.load_common_state_dict])
def test_a_payload_in_the_common_state(folder: Path, witness: Path, read: Read) -> None:
    torch.save({"iteration": 1, "x": Payload(witness)}, folder / "common.pt")
    with pytest.raises(megackpt.UntrustedClass, match=r"(posix|os)\.system") as caught:
        read(folder)
    assert isinstance(caught.value, pickle.UnpicklingError)
    assert not witness.exists()
    assert megackpt.load_plain_tensors(folder)


@pytest.mark.parametrize("read", [load, load_on_two_ranks])
def test_a_payload_in_an_object(folder: Path, witness: Path, read: Read) -> None:
    put_object(folder, Payload(witness))
    with pytest.raises(megackpt.UntrustedClass, match=r"rng_state.*(posix|os)\.system"):
        read(folder)
    assert not witness.exists()
    assert megackpt.load_plain_tensors(folder)
    assert megackpt.load_common_state_dict(folder)["iteration"] == 100
    megackpt.convert(folder, folder.parent / "zarr", "zarr")  # which hands objects on unopened
    with pytest.raises(megackpt.UntrustedClass):
        read(folder.parent / "zarr")
    assert not witness.exists()


@pytest.mark.parametrize("read", [load, load_on_two_ranks, megackpt.load_common_state_dict])
@pytest.mark.parametrize("value", [None, 5, [1, 2], torch.ones(3), "text"])
def test_a_common_state_that_is_none(folder: Path, read: Read, value: Any) -> None:
    torch.save(value, folder / "common.pt")
    with pytest.raises(megackpt.CorruptCheckpoint, match="not a dict"):
        read(folder)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_common_state_that_is_no_file(folder: Path, make: Callable[[Path], None]) -> None:
    (folder / "common.pt").unlink()
    make(folder / "common.pt")
    assert not megackpt.verify(folder).ok
    with pytest.raises(megackpt.CorruptCheckpoint, match=r"common\.pt"):
        megackpt.load_common_state_dict(folder)


@pytest.mark.parametrize("name", [".metadata", "megackpt.index", "common.pt"])
def test_files_that_are_nothing_but_a_hole(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have more bytes than there is memory."""

    def allocate(size: int) -> bytearray:
        if size > 1 << 24:
            raise MemoryError
        return bytearray(size)

    monkeypatch.setattr("megackpt.runtime.storage.interface.bytearray", allocate, raising=False)
    with (folder / name).open("ab") as file:
        file.truncate(1 << 31)
    with pytest.raises(megackpt.CorruptCheckpoint, match="memory"):
        megackpt.load_common_state_dict(folder)


def test_an_object_whose_name_has_no_end(folder: Path) -> None:
    name = f"w/shard_{'9' * 5000}_{'9' * 5000}"
    change_table(folder, lambda table: table.state_dict_metadata.update({name: BytesStorageMetadata()}))
    with pytest.raises(megackpt.CorruptCheckpoint, match="where"):
        megackpt.load_sharded_metadata(folder)


def test_a_class_that_the_user_trusts(folder: Path) -> None:
    torch.save({"iteration": 1, "recipe": Recipe(3)}, folder / "common.pt")
    put_object(folder, Recipe(4))
    with pytest.raises(megackpt.UntrustedClass, match=r"Recipe.*\n.*trusted=\(Recipe,\)"):
        load(folder)
    with pytest.raises(megackpt.UntrustedClass):
        megackpt.load_common_state_dict(folder)
    for found in (
        load(folder, trusted=(Recipe,)),
        *ThreadedGroup.run(2, lambda group: load(folder, trusted=(Recipe,), process_group=group)),
    ):
        assert (found["recipe"], found["rng"]) == (Recipe(3), Recipe(4))
    assert megackpt.load_common_state_dict(folder, trusted=(Recipe,))["recipe"] == Recipe(3)
    with torch.serialization.safe_globals([Recipe]):
        assert load(folder)["rng"] == Recipe(4)
        assert megackpt.load_common_state_dict(folder)["recipe"] == Recipe(3)


def test_ours_is_held_to_its_index(tmp_path: Path, witness: Path) -> None:
    """A file that was changed is not even opened as long as the index says what it should be."""
    folder = tmp_path / "ours"
    megackpt.save({"w": ShardedTensor.from_rank_offsets("misc.uint8", torch.ones(8).byte()), "a": 1}, folder)
    torch.save({"a": Payload(witness)}, folder / "common.pt")
    with pytest.raises(megackpt.CorruptCheckpoint, match=r"common\.pt"):
        megackpt.load_common_state_dict(folder)
    (folder / "megackpt.index").unlink()
    with pytest.raises(megackpt.UntrustedClass):
        megackpt.load_common_state_dict(folder)
    assert not witness.exists()
