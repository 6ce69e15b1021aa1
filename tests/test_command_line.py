"""The command line, called as a user calls it: what it prints, and its exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.__main__ import main


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    weight = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    halves = [ShardedTensor.from_rank_offsets("w", h, (0, i, 2)) for i, h in enumerate(weight.chunk(2))]
    state = {
        "halves": halves,
        "step": ShardedTensor.from_rank_offsets("step", torch.tensor(7)),
        "o": ShardedObject("rng", {"seed": 1}, (1,), (0,)),
        "iteration": 5,
    }
    megackpt.save(state, tmp_path / "ckpt")
    return tmp_path / "ckpt"


def test_show(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(checkpoint)]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][1:5] == ["torch_dist", "version", "1,", "save"]
    assert ["w", "float32", "1024x1024", "2", "chunks,", "4.0", "MiB"] in lines
    assert ["step", "int64", "scalar", "1", "chunk,", "8", "B"] in lines
    assert any(line[:3] == ["rng", "object", "1"] for line in lines)
    assert lines[-1][:5] == ["4", "entries,", "5", "chunks,", "3"]


def test_verify_tells_good_from_bad(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(checkpoint)]) == 0
    assert "all good" in capsys.readouterr().out
    file = checkpoint / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert main(["verify", str(checkpoint)]) == 1
    assert "'w'" in capsys.readouterr().out


def test_convert_there_and_back(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, back = str(tmp_path / "z"), str(tmp_path / "t")
    assert main(["convert", str(checkpoint), there, "--to", "zarr"]) == 0
    assert main(["convert", there, back, "--to", "torch_dist"]) == 0
    first, last = megackpt.load_plain_tensors(checkpoint), megackpt.load_plain_tensors(back)
    assert all(torch.equal(first[key], last[key]) for key in ("w", "step"))
    assert main(["convert", str(checkpoint), there, "--to", "zarr"]) == 1
    assert "CheckpointExists" in capsys.readouterr().err
    assert main(["convert", str(checkpoint), there, "--to", "zarr", "--overwrite"]) == 0


def test_what_is_wrong_goes_to_stderr_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(tmp_path / "no")]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert main(["convert", str(tmp_path), str(tmp_path / "x"), "--to", "zrr"]) == 1
    with pytest.raises(SystemExit) as usage:
        main(["frobnicate"])
    assert usage.value.code == 2


def test_the_doors_are_one_thing(checkpoint: Path, tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, root / "tools/convert.py", checkpoint, tmp_path / "z", "--to", "zarr"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "written as zarr" in done.stdout
    assert megackpt.check_is_distributed_checkpoint(tmp_path / "z")
