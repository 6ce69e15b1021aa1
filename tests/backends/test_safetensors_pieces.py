"""safetensors files with one rank's pieces each, as torch DCP writes them: one checkpoint, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import megackpt
from megackpt import ShardedTensor, load, load_plain_tensors, load_tensors_metadata
from megackpt.converter import convert
from megackpt.errors import CheckpointingException, CorruptCheckpoint, NotACheckpoint
from tests.backends.safetensors_pieces import ROWS, STATE, piece, write_pieces
from tests.backends.torch_files import same
from tests.torch_names import RELEASE


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    return write_pieces(tmp_path / "c")


def test_all_files_are_one_checkpoint(pieces: Path, tmp_path: Path) -> None:
    same(load_plain_tensors(pieces), STATE)
    assert load_tensors_metadata(pieces)["rows"].global_shape == (5, 4)
    assert megackpt.verify(pieces).ok
    assert megackpt.load_common_state_dict(pieces) == {}
    row = torch.zeros(1, 4)
    asked = {"c": ShardedTensor.from_rank_offsets("columns", row, (0, 1, 5))}
    load(asked, pieces, strict="ignore_all", validate_access_integrity=False)
    assert torch.equal(row, STATE["columns"][1:2])
    for made in ("torch_dist", "safetensors"):
        convert(pieces, tmp_path / made, made)
        same(load_plain_tensors(tmp_path / made), STATE)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_writes_and_reads(tmp_path: Path, pieces: Path) -> None:
    if RELEASE < (2, 9):
        pytest.skip("torch 2.8 has other names")
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "own"), save_distributed=True)
    dcp.save(dict(STATE), storage_writer=writer)
    assert [p.name for p in (tmp_path / "own").glob("shard-00001-*")]
    same(load_plain_tensors(tmp_path / "own"), STATE)
    found = {key: torch.zeros_like(value) for key, value in STATE.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(pieces)))
    same(found, STATE)


def test_a_lone_piece_is_refused(pieces: Path) -> None:
    for path in sorted(pieces.iterdir()):
        with pytest.raises(
            NotACheckpoint, match=f"{path.name} holds one rank's pieces"
        ):
            load_plain_tensors(path)
        with pytest.raises(NotACheckpoint, match="files of all ranks"):
            megackpt.verify(path)
    renamed = pieces.parent / "model.safetensors"
    sorted(pieces.iterdir())[1].rename(renamed)
    for place in (renamed, renamed.parent):
        with pytest.raises(NotACheckpoint, match="holds one rank's pieces"):
            load_plain_tensors(place)


def test_a_whole_model_is_taken_first(pieces: Path) -> None:
    save_file({"w": torch.ones(2)}, pieces / "model.safetensors")
    same(load_plain_tensors(pieces), {"w": torch.ones(2)})


def test_a_missing_file_is_a_hole(pieces: Path) -> None:
    min(pieces.iterdir()).unlink()
    report = megackpt.verify(pieces)
    assert not report.ok
    with pytest.raises(CheckpointingException, match=r"rows|columns"):
        load_plain_tensors(pieces)


def test_names_show_missing_files(
    pieces: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = sorted(pieces.iterdir())
    load_plain_tensors(pieces)
    assert not caplog.messages
    second.rename(pieces / "shard-00004-model-00001-of-00001.safetensors")
    same(load_plain_tensors(pieces), STATE)
    assert "has no file shard-00002, shard-00003: if a rank" in caplog.text
    caplog.clear()
    for path in sorted(pieces.iterdir()):
        path.rename(pieces / path.name.replace("of-00001", "of-00002"))
    same(load_plain_tensors(pieces), STATE)
    assert "shard-00003, model-00002: if a rank" in caplog.text
    (pieces / first.name.replace("of-00001", "of-00002")).rename(first)
    with pytest.raises(CorruptCheckpoint, match=r"several saves: .*\[1, 2\]"):
        load_plain_tensors(pieces)


@pytest.mark.parametrize(
    "name", ["shard-x-model-y-of-z", "shard-999999999-model-1-of-999999998"]
)
def test_odd_names_are_read(pieces: Path, name: str) -> None:
    for path in sorted(pieces.iterdir())[1:]:
        path.rename(pieces / f"{name}.safetensors")
    if "999" in name:
        with pytest.raises(CorruptCheckpoint, match="several saves"):
            load_plain_tensors(pieces)
        min(pieces.iterdir()).unlink()
        assert not megackpt.verify(pieces).ok
    else:
        same(load_plain_tensors(pieces), STATE)


def test_overlaps_and_several_dtypes_are_refused(pieces: Path) -> None:
    extra = piece(pieces, 3, {"rows": ROWS[2:4]}, rows=[2, 0])
    assert not megackpt.verify(pieces).ok
    for wrong in (ROWS[:1].double(), ROWS[0]):
        extra.unlink()
        piece(pieces, 3, {"rows": wrong}, rows=[5] + [0] * (wrong.ndim - 1))
        with pytest.raises(CorruptCheckpoint, match="twice or with impossible values"):
            load_plain_tensors(pieces)


@pytest.mark.parametrize(
    "offset",
    [[0], [0, 0, 0], [0, -1], [0.0, 0], [True, 0], ["0", 0], None, [0, 1 << 62]],
)
def test_offsets_that_lie_are_errors(tmp_path: Path, offset: Any) -> None:
    piece(tmp_path / "c", 1, {"rows": ROWS}, rows=offset)
    with pytest.raises(CorruptCheckpoint):
        load_plain_tensors(tmp_path / "c")


@pytest.mark.parametrize(
    "noted", [{}, {"DCP_SHARDING_INFO": "[]"}, {"DCP_SHARDING_INFO": "{"}]
)
def test_a_piece_that_says_nothing_is_an_error(
    tmp_path: Path, noted: dict[str, str]
) -> None:
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    save_file({"w": torch.ones(2)}, path, metadata=noted)
    with pytest.raises(CorruptCheckpoint, match="shard-00001"):
        load_plain_tensors(tmp_path)
