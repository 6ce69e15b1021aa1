"""Checkpoints that torch_checkpointing has written: tensors with their global shapes, all else as objects."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedObject
from megackpt.__main__ import main
from megackpt.errors import BackendError, CorruptCheckpoint
from tests.bits import assert_same
from tests.foreign.bars import (
    MEMORY_RUNS,
    check_conversions,
    check_layouts,
    check_memory,
    check_resuming,
)
from tests.ports import unused_port

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests/golden/torch-checkpointing-0.1.1"
EXPECTED = torch.load(f"{GOLDEN}.expected.pt", weights_only=True)
RANKS = 4


def write(folder: Path, rows: int = 0) -> None:
    """By the library, on four ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=4"]
    script = ROOT / "tests/golden/make_torch_checkpointing.py"
    path = ROOT / ".peers/torch_checkpointing"
    subprocess.run(
        [*command, f"--master_port={unused_port()}", script, folder, str(rows)],
        env=os.environ | {"PYTHONPATH": str(path)},
        check=True,
        capture_output=True,
    )


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the golden checkpoint with other metadata."""
    shutil.copytree(GOLDEN, folder)
    path = folder / "metadata.pkl"
    described = pickle.loads(path.read_bytes())
    change(described)
    path.write_bytes(pickle.dumps(described))
    return folder


def test_any_layout_loads() -> None:
    check_layouts(GOLDEN, EXPECTED)


def test_every_format_gets_the_same_bits(tmp_path: Path) -> None:
    check_conversions(GOLDEN, EXPECTED, tmp_path)


def test_what_is_no_tensor_is_an_object_for_each_rank() -> None:
    state = {
        f"{key} {rank}": ShardedObject(f"{key}_{rank}", None, (), ())
        for key in ("optimizer", "step", "rng")
        for rank in range(RANKS)
    }
    found = megackpt.load(state, GOLDEN)
    groups = [{"lr": 0.1, "params": ["layers.0.weight"]}]
    for rank in range(RANKS):
        assert found[f"step {rank}"] == 7
        assert found[f"optimizer {rank}"] == {"param_groups": groups}
        assert found[f"rng {rank}"]["seed"] == rank
        assert torch.equal(found[f"rng {rank}"]["state"], torch.full((3,), rank))


def test_show_names_format_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(GOLDEN)]) == 0
    told = capsys.readouterr().out
    assert "format: torch_checkpointing\nversion: 2\n" in told
    assert megackpt.verify(GOLDEN).ok


def test_it_is_read_and_not_written(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="are read, not written"):
        megackpt.convert(GOLDEN, tmp_path / "c", "torch_checkpointing")


def test_a_conversion_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_resuming(GOLDEN, EXPECTED, tmp_path / "c", monkeypatch)


def test_tensors_that_say_where_they_are(tmp_path: Path) -> None:
    """The other kind of sharding of the library, for a class of the caller's own."""

    def change(described: dict[str, Any]) -> None:
        paths = described["metadata"]["model"]["nested_path_to_metadata"]
        for number, group in enumerate([*paths['["layers.0.bias"]']]):
            data = {
                "global_shape": [5],
                "global_offsets": [[0]],
                "local_offsets": [[0]],
                "local_sizes": [[3]],
                "dtype": "torch.float32",
            }
            own = {"sharding_metadata": {"type": "default_tensor_v1", "data": data}}
            other = data | {"global_offsets": [[3]], "local_sizes": [[2]]}
            second = {"sharding_metadata": {"type": "default_tensor_v1", "data": other}}
            paths['["layers.0.bias"]'] = [
                own | {"ranks": [0]},
                second | {"ranks": [1]},
            ]
            assert not number, group

    found = megackpt.load_plain_tensors(changed(tmp_path / "c", change))
    assert torch.equal(found["model.layers.0.bias"], EXPECTED["model.layers.0.bias"])


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    def raw(described: dict[str, Any]) -> None:
        form = {"type": "SafetensorsSerialization"}
        told = {"file_path": "model_0.safetensors", "serialization_format": form}
        described["metadata"]["model"]["rank_to_layout_info"][0] = told

    def forgotten(described: dict[str, Any]) -> None:
        del described["metadata"]["model"]["nested_path_to_metadata"]['["same"]']

    for change, kind, told in (
        (raw, BackendError, "model_0.safetensors has the form SafetensorsSerialization"),
        (forgotten, BackendError, "does not describe tensors.*'model'.*same"),
        (lambda d: d.update(version="1.0"), BackendError, "has version '1.0', not 2.0"),
    ):  # fmt: skip
        where = changed(tmp_path / told[:7], change)
        with pytest.raises(kind, match=told):
            megackpt.load_plain_tensors(where)
    missing = changed(tmp_path / "missing", lambda _: None)
    (missing / "model_2.pt").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"the file of rank 2 should have"):
        megackpt.load_plain_tensors(missing)


def test_files_that_nobody_describes_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = changed(tmp_path / "c", lambda _: None)
    (where / "config.json").write_text("{}")
    megackpt.load_plain_tensors(where)
    assert "metadata.pkl does not describe these files, which are not read: config.json" in caplog.text  # fmt: skip


@pytest.mark.torch_checkpointing
def test_what_the_library_writes_today(tmp_path: Path) -> None:
    write(tmp_path / "c")
    found = megackpt.load_plain_tensors(tmp_path / "c")
    assert found.keys() == EXPECTED.keys()
    for key, tensor in EXPECTED.items():
        assert_same(found[key], tensor, key)


@pytest.mark.torch_checkpointing
@pytest.mark.parametrize(("gibibytes", "to"), MEMORY_RUNS)
def test_memory_is_bounded(tmp_path: Path, gibibytes: float, to: str) -> None:
    write(tmp_path / "c", int(gibibytes * (1 << 18)))
    check_memory(tmp_path / "c", tmp_path / "target", to)
    shutil.rmtree(tmp_path)
