"""What a stranger's checkpoint holds beyond the harmless: trusted by name or refused, also after a conversion.

How broken and hostile directories fare in general is looked at in tests/hostile.
"""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.testing import ThreadedGroup

GOLDEN = Path(__file__).parent.parent / "golden" / "mcore-0.16.1-tp2pp1dp2"
CELL = "rng_state/shard_0.1_1.2"


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
        "w": ShardedTensor.from_rank_offsets(
            "misc.uint8", torch.zeros(8, dtype=torch.uint8)
        ),
        "rng": ShardedObject.empty_from_unique_key(CELL),
    }
    return megackpt.load(asked, folder, validate_access_integrity=False, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN, tmp_path / "ckpt")


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    return tmp_path / "witness"


def put_object(folder: Path, value: Any) -> None:
    """Make this the stored value of CELL."""
    torch.save([value], folder / "__9_0.distcp")
    place = _StorageInfo("__9_0.distcp", 0, (folder / "__9_0.distcp").stat().st_size)
    table = pickle.loads((folder / ".metadata").read_bytes())
    table.storage_data[MetadataIndex(CELL)] = place
    (folder / ".metadata").write_bytes(pickle.dumps(table))


def test_a_refusal_is_the_error_that_callers_of_torch_know(
    folder: Path, witness: Path
) -> None:
    put_object(folder, Payload(witness))
    with pytest.raises(
        pickle.UnpicklingError, match=r"rng_state.*(posix|os)\.system"
    ) as caught:
        load(folder)
    assert isinstance(caught.value, megackpt.UntrustedClass)
    assert not witness.exists()


def test_a_payload_stays_one_in_a_conversion(folder: Path, witness: Path) -> None:
    """Which hands objects on unopened."""
    put_object(folder, Payload(witness))
    megackpt.convert(folder, folder.parent / "zarr", "zarr")
    with pytest.raises(megackpt.UntrustedClass):
        load(folder.parent / "zarr")
    assert not witness.exists()


@pytest.mark.parametrize("name", [".metadata", "megackpt.index", "common.pt"])
def test_files_that_are_larger_than_the_memory(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(size: int) -> bytearray:
        if size > 1 << 24:
            raise MemoryError
        return bytearray(size)

    monkeypatch.setattr("megackpt.storage.interface.bytearray", allocate, raising=False)
    with (folder / name).open("ab") as file:
        file.truncate(1 << 31)
    with pytest.raises(megackpt.CorruptCheckpoint, match=r"memory|a hole in the file"):
        megackpt.load_common_state_dict(folder)


def test_a_class_that_the_user_trusts(folder: Path) -> None:
    torch.save({"iteration": 1, "recipe": Recipe(3)}, folder / "common.pt")
    put_object(folder, Recipe(4))
    with pytest.raises(
        megackpt.UntrustedClass, match=r"Recipe.*\n.*trusted=\(Recipe,\)"
    ):
        load(folder)
    with pytest.raises(megackpt.UntrustedClass):
        megackpt.load_common_state_dict(folder)
    for found in (
        load(folder, trusted=(Recipe,)),
        *ThreadedGroup.run(
            2, lambda group: load(folder, trusted=(Recipe,), process_group=group)
        ),
    ):
        assert (found["recipe"], found["rng"]) == (Recipe(3), Recipe(4))
    assert megackpt.load_common_state_dict(folder, trusted=(Recipe,))[
        "recipe"
    ] == Recipe(3)
    with torch.serialization.safe_globals([Recipe]):
        assert load(folder)["rng"] == Recipe(4)
        assert megackpt.load_common_state_dict(folder)["recipe"] == Recipe(3)


def test_ours_is_held_to_its_index(tmp_path: Path, witness: Path) -> None:
    """A file that was changed is not even opened as long as the index says what it should be."""
    folder = tmp_path / "ours"
    megackpt.save(
        {
            "w": ShardedTensor.from_rank_offsets("misc.uint8", torch.ones(8).byte()),
            "a": 1,
        },
        folder,
    )
    torch.save({"a": Payload(witness)}, folder / "common.pt")
    with pytest.raises(megackpt.CorruptCheckpoint, match=r"common\.pt"):
        megackpt.load_common_state_dict(folder)
    (folder / "megackpt.index").unlink()
    with pytest.raises(megackpt.UntrustedClass):
        megackpt.load_common_state_dict(folder)
    assert not witness.exists()
