"""``HuggingFaceStorageReader`` under stock torch DCP: whole files, files with an index, pieces."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import megackpt
from megackpt.backends.safetensors import Safetensors
from megackpt.dcp import FileSystemWriter, HuggingFaceStorageReader
from tests.backends.safetensors_pieces import STATE, write_pieces
from tests.backends.torch_files import same, whole
from tests.dcp.states import refused
from tests.torch_names import RELEASE

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    return write_pieces(tmp_path / "c")


def loaded(place: Path) -> dict[str, Any]:
    found = {key: torch.zeros_like(value) for key, value in STATE.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(place))
    return found


def test_pieces_of_ranks(pieces: Path) -> None:
    same(loaded(pieces), STATE)
    metadata = HuggingFaceStorageReader(pieces).read_metadata()
    chunks = metadata.state_dict_metadata["columns"].chunks  # type: ignore[union-attr]
    assert [tuple(chunk.offsets) for chunk in chunks] == [(0, 0), (0, 2)]


def test_whole_tensors(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    same(loaded(tmp_path), STATE)
    same(loaded(tmp_path / "model.safetensors"), STATE)
    found = _load_state_dict_from_keys(
        storage_reader=HuggingFaceStorageReader(tmp_path)
    )
    same(found, STATE)


def test_what_megackpt_saves(tmp_path: Path) -> None:
    megackpt.save(whole(STATE) | {"step": 7}, tmp_path / "c", Safetensors(shards=2))
    same(loaded(tmp_path / "c"), STATE)


def test_missing_pieces_are_refused(
    pieces: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lone = min(pieces.iterdir())
    with refused(caplog, "holds one rank's pieces of tensors"):
        loaded(lone)
    lone.unlink()
    with refused(caplog, r"/c: .*'columns' .* no stored chunk holds it"):
        loaded(pieces)


def test_other_formats_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path / "c"))
    with refused(caplog, "is a checkpoint of format torch_dist"):
        loaded(tmp_path / "c")
    with pytest.raises(CheckpointException):
        loaded(tmp_path / "none")


def test_arguments_are_those_of_stock() -> None:
    if RELEASE < (2, 9):
        pytest.skip("torch 2.8 has other names")
    stock = inspect.signature(dcp.HuggingFaceStorageReader).parameters
    own = inspect.signature(HuggingFaceStorageReader).parameters
    assert list(own)[: len(stock)] == list(stock)
