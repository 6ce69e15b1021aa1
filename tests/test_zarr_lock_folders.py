"""Folders of empty lock files that Megatron-Core's zarr leaves beside arrays of flattened tensors (KEY.sync)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import CheckpointManager
from megackpt.__main__ import main
from megackpt.errors import CorruptCheckpoint

GOLDEN = Path(__file__).parent / "golden" / "mcore-0.12.3-zarr-tp2pp1dp2"


def lock(array: Path, *names: str) -> None:
    """What fasteners leaves: an empty file for each thing that was locked."""
    for name in names or (".zarray", *(path.name for path in array.iterdir())):
        path = array.with_name(f"{array.name}.sync") / name
        path.parent.mkdir(exist_ok=True)
        path.touch()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A step as Megatron-Core leaves it where its optimizer state is flattened."""
    step: Path = shutil.copytree(GOLDEN, tmp_path / "run/iter_0000007")
    for array in [path for path in step.iterdir() if (path / ".zarray").exists()]:
        lock(array)
    return step


def test_all_readers_pass_them_over(folder: Path, tmp_path: Path, capsys: Any) -> None:
    expected = megackpt.load_plain_tensors(GOLDEN)
    found = megackpt.load_plain_tensors(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    metadata = megackpt.load_tensors_metadata(folder)
    assert metadata.keys() == expected.keys()
    common = megackpt.load_common_state_dict(GOLDEN)
    state = megackpt.load(metadata, folder, validate_access_integrity=False)
    assert state.keys() == expected.keys() | common.keys()
    assert megackpt.verify(folder).ok
    assert main(["show", str(folder)]) == 0
    assert ".sync" not in capsys.readouterr().out
    assert main(["diff", str(folder), str(GOLDEN)]) == 0
    assert main(["ls", str(folder.parent)]) == 0
    assert (
        main(
            [
                "convert",
                str(folder),
                str(tmp_path / "new"),
                "--to",
                "torch_dist",
                "--verify",
            ]
        )
        == 0
    )
    assert megackpt.load_plain_tensors(tmp_path / "new").keys() == expected.keys()
    manager = CheckpointManager(folder.parent)
    assert manager.latest(verify=True).step == 7
    restored = manager.restore(
        megackpt.load_tensors_metadata(folder), validate_access_integrity=False
    )
    assert restored.step == 7


def test_without_metadata_json(folder: Path) -> None:
    (folder / "metadata.json").unlink()
    assert (
        megackpt.load_plain_tensors(folder).keys()
        == megackpt.load_plain_tensors(GOLDEN).keys()
    )


def test_keys_with_slashes(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    (folder / "a").mkdir(parents=True)
    shutil.copytree(GOLDEN / "misc.fp64", folder / "a/b")
    lock(folder / "a/b")
    (folder / "metadata.json").write_text((GOLDEN / "metadata.json").read_text())
    assert [*megackpt.load_plain_tensors(folder)] == ["a/b"]


def test_an_array_of_such_a_name_is_read(folder: Path) -> None:
    shutil.rmtree(folder / "misc.fp64.sync")
    shutil.copytree(GOLDEN / "misc.int32", folder / "misc.fp64.sync")
    found = megackpt.load_plain_tensors(folder)
    assert torch.equal(found["misc.fp64.sync"], found["misc.int32"])


@pytest.mark.parametrize("emptied", [".zarray", "0.0"])
def test_damage_to_an_array_of_such_a_name_is_found(folder: Path, emptied: str) -> None:
    shutil.rmtree(folder / "misc.fp64.sync")
    shutil.copytree(GOLDEN / "misc.int32", folder / "misc.fp64.sync")
    (folder / "misc.fp64.sync" / emptied).write_bytes(b"")
    with pytest.raises(CorruptCheckpoint, match=r"misc\.fp64\.sync"):
        megackpt.load_plain_tensors(folder)


def test_locks_beside_no_array_are_an_error(folder: Path) -> None:
    """Their array is lost."""
    shutil.rmtree(folder / "misc.fp64")
    with pytest.raises(CorruptCheckpoint, match=r"misc\.fp64\.sync"):
        megackpt.load_plain_tensors(folder)
