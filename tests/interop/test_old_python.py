"""What torch DCP writes under Pythons that name things otherwise.

Debian's Python 3.11.2 pickles a member of an enum as a call of getattr, 3.13 a path by the private module it is in.
"""

from __future__ import annotations

import shutil
from http import HTTPMethod, HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import megackpt
from megackpt.dcp import FileSystemReader, LoadPlanner

FOLDER = Path(__file__).parent.parent / "golden" / "torch-2.13.0-python-3.11.2"
OBJECTS = {
    "asked": {
        "method": HTTPMethod.PATCH,
        "allowed": [HTTPStatus.OK, HTTPStatus.GONE],
        "retries": 3,
    },
    "step": 100,
}
ENUMS = HTTPMethod, HTTPStatus

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return torch.load(f"{FOLDER}.expected.pt", weights_only=True)


def assert_same(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        pair = [t.reshape(-1).view(torch.uint8) for t in (found[key], tensor)]
        assert torch.equal(*pair), key


def test_the_table_of_contents_calls_getattr() -> None:
    for file in (".metadata", "__0_0.distcp"):
        assert b"getattr" in (FOLDER / file).read_bytes()


def test_tensors(expected: dict[str, torch.Tensor]) -> None:
    assert_same(megackpt.load_plain_tensors(FOLDER), expected)
    assert megackpt.verify(FOLDER).ok


def test_objects_of_enums_that_are_trusted(expected: dict[str, torch.Tensor]) -> None:
    tensors = {
        key.removeprefix("model."): torch.zeros_like(tensor)
        for key, tensor in expected.items()
    }
    state = megackpt.sharded({"model": tensors, **OBJECTS}, replicated="all")
    loaded = megackpt.load(state, FOLDER, trusted=ENUMS)
    assert_same(
        {f"model.{name}": tensor for name, tensor in loaded.pop("model").items()},
        expected,
    )
    assert loaded == OBJECTS
    assert loaded["asked"]["method"] is HTTPMethod.PATCH
    with pytest.raises(megackpt.UntrustedClass, match="http"):
        megackpt.load(
            megackpt.sharded({"model": {}, **OBJECTS}, replicated="all"), FOLDER
        )


@pytest.mark.parametrize("reader", [FileSystemReader, dcp.FileSystemReader])
def test_torch_loads_it_through_either_reader(
    reader: Any, expected: dict[str, torch.Tensor]
) -> None:
    tensors = {
        key.removeprefix("model."): torch.zeros_like(tensor)
        for key, tensor in expected.items()
    }
    asked = dict.fromkeys(OBJECTS["asked"], 0)
    state: dict[str, Any] = {"model": tensors, "asked": asked, "step": 0}
    dcp.load(
        state,
        storage_reader=reader(FOLDER),
        planner=LoadPlanner(trusted=ENUMS),
        no_dist=True,
    )
    assert_same(
        {f"model.{name}": tensor for name, tensor in state.pop("model").items()},
        expected,
    )
    assert state == OBJECTS


def test_a_getattr_of_anything_else_is_refused(tmp_path: Path) -> None:
    table = (FOLDER / ".metadata").read_bytes()
    shutil.copytree(FOLDER, tmp_path / "c")
    for old, new in (
        (b"TORCH_CONTIGUOUS_FORMAT", b"__subclasses__.__call__"),
        (b"_MEM_FORMAT_ENCODING", b"_sys_modules_builtin"),
    ):
        assert len(old) == len(new)
        (tmp_path / "c" / ".metadata").write_bytes(table.replace(old, new))
        with pytest.raises((megackpt.UntrustedClass, megackpt.CorruptCheckpoint)):
            megackpt.load_plain_tensors(tmp_path / "c")


def test_paths_as_python_3_13_names_them(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    shutil.copytree(FOLDER, tmp_path / "c")
    table = (FOLDER / ".metadata").read_bytes()
    assert b"\x8c\x07pathlib\x94" in table
    table = table.replace(b"\x8c\x07pathlib\x94", b"\x8c\x0epathlib._local\x94")
    (tmp_path / "c" / ".metadata").write_bytes(table)
    assert_same(megackpt.load_plain_tensors(tmp_path / "c"), expected)
