"""``ls``, ``verify``, ``diff`` and ``convert``, and the page that documents all commands."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import megackpt
from megackpt import ShardedTensor
from megackpt.__main__ import main

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
NEW = GOLDEN / "mcore-0.16.1-tp2pp1dp2"
COMMAND = [sys.executable, "-m", "megackpt"]


def test_verify_finds_damage(
    checkpoint: Path, plain: Callable[..., str], asked: Callable[..., Any]
) -> None:
    assert "ok: yes" in plain("verify", checkpoint)
    assert asked("verify", checkpoint)["ok"]
    file = checkpoint / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert "'w'" in plain("verify", checkpoint, status=1)
    facts = asked("verify", checkpoint, status=1)
    assert (facts["ok"], facts["checked"], len(facts["problems"])) == (False, True, 1)


def test_ls(
    tmp_path: Path, plain: Callable[..., str], asked: Callable[..., Any]
) -> None:
    for name in ("iter_0000100", "iter_0000200"):
        shutil.copytree(NEW, tmp_path / name)
    (tmp_path / "iter_0000300").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("300")
    lines = plain("ls", tmp_path).splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line}
    row = ["megatron", "200", "yes", "torch_dist", "1"]
    assert rows["iter_0000200"][1:6] == row
    assert rows["iter_0000300"][1:4] == ["megatron", "300", "no"]
    (reason,) = [line for line in lines if line.startswith("iter_0000300")]
    assert "it is empty" in reason
    assert "latest: iter_0000200" in lines
    assert lines[-1].endswith("iter_0000300 is not complete")
    facts = asked("ls", tmp_path)
    assert (facts["latest"], facts["checkpoint"], len(facts["steps"])) == (
        "iter_0000200",
        None,
        3,
    )


def test_ls_of_a_checkpoint_and_of_nothing(
    checkpoint: Path, tmp_path: Path, plain: Callable[..., str]
) -> None:
    assert "torch_dist" in plain("ls", checkpoint)
    (tmp_path / "empty").mkdir()
    plain("ls", tmp_path / "empty", status=3)
    plain("ls", tmp_path / "no", status=3)
    (checkpoint / "metadata.json").write_text('{"sharded_backend": 5}')
    plain("ls", checkpoint, status=4)


def test_diff(
    checkpoint: Path,
    tmp_path: Path,
    plain: Callable[..., str],
    asked: Callable[..., Any],
    state: Callable[..., Any],
) -> None:
    other = state()
    other["halves"][1].data[3, 7] += 0.5
    other["iteration"] = 6
    other["extra"] = ShardedTensor.from_rank_offsets("extra", torch.zeros(2, 3))
    megackpt.save(other, tmp_path / "b")
    lines = plain("diff", checkpoint, checkpoint).splitlines()
    assert lines[2:] == [
        "same: yes",
        "compared: 4",
        "by_digest: 4",
        "by_data: 0",
        "bytes_read: 0 B",
    ]
    both = (checkpoint, tmp_path / "b")
    text = plain("diff", *both, status=1)
    assert ["w", "1048576", "-", "-", "-", "-", "-", "-"] in [
        line.split() for line in text.splitlines()
    ]
    text = plain("diff", *both, "--read", status=1)
    lines = [line.split() for line in text.splitlines()]
    assert ["same:", "no"] in lines
    assert ["only_b:", "extra"] in lines
    assert ["w", "1048576", "1", "0.5", "0.5"] in [line[:5] for line in lines]
    assert ["[515,", "7]", "527367", "527367.5"] in lines
    assert ["['iteration']", "5", "6"] in lines
    facts = asked("diff", *both, "--read", status=1)
    assert facts["only_b"] == ["extra"]
    assert facts["tensors"][0]["first"] == [
        {"index": [515, 7], "a": 527367.0, "b": 527367.5}
    ]
    assert asked("diff", checkpoint, tmp_path / "b", "--select", "s*")["same"]
    assert asked("diff", checkpoint, tmp_path / "b", "--select", "w", "--atol", "1")[
        "same"
    ]
    assert plain("diff", checkpoint, tmp_path / "no", status=3) == ""


def test_a_selection_of_nothing_is_an_error(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(checkpoint), str(checkpoint), "--select", "common*"]) == 0
    assert main(["diff", str(checkpoint), str(checkpoint), "--select", "nosuch"]) == 3
    assert "has a key that matches 'nosuch'" in capsys.readouterr().err


def test_convert_there_and_back(
    checkpoint: Path,
    tmp_path: Path,
    plain: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    there, back = tmp_path / "z", tmp_path / "t"
    assert "format: zarr" in plain("convert", checkpoint, there, "--to", "zarr")
    plain("convert", there, back, "--to", "torch_dist")
    first, last = (
        megackpt.load_plain_tensors(checkpoint),
        megackpt.load_plain_tensors(back),
    )
    assert all(torch.equal(first[key], last[key]) for key in ("w", "step"))
    assert main(["convert", str(checkpoint), str(there), "--to", "zarr"]) == 1
    refused = capsys.readouterr().err
    assert "--overwrite" in refused
    assert "overwrite=True" not in refused
    plain("convert", checkpoint, there, "--to", "zarr", "--overwrite")
    assert "same: yes" in plain("diff", checkpoint, there)


def test_the_script_is_the_same_command(checkpoint: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "tools/convert.py",
            checkpoint,
            tmp_path / "z",
            "--to",
            "zarr",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "format: zarr" in done.stdout
    assert megackpt.check_is_distributed_checkpoint(tmp_path / "z")


@pytest.mark.parametrize(
    "golden", sorted(p.name for p in GOLDEN.iterdir() if (p / "metadata.json").exists())
)
def test_goldens(
    golden: str, plain: Callable[..., str], asked: Callable[..., Any]
) -> None:
    assert plain("ls", GOLDEN / golden)
    entries = asked("show", GOLDEN / golden)["entries"]
    assert entries
    assert asked("show", GOLDEN / golden, "--common")["common"]
    assert asked("diff", GOLDEN / golden, GOLDEN / golden)["same"]
    is_unchecked = "zarr" in golden  # Megatron's arrays have no checksums
    plain("verify", GOLDEN / golden, status=7 if is_unchecked else 0)


@pytest.mark.parametrize("to", ["zarr", "safetensors", "torch"])
def test_every_format_is_looked_at(
    checkpoint: Path, tmp_path: Path, to: str, asked: Callable[..., Any]
) -> None:
    there = tmp_path / "there"
    asked("convert", checkpoint, there, "--to", to)
    assert asked("ls", there)["checkpoint"]["format"] == to
    assert {e["key"] for e in asked("show", there)["entries"]} >= {"w", "step", "rng"}
    assert asked("diff", checkpoint, there)["same"]
    assert asked("verify", there)["ok"]


def test_stock_dcp(
    tmp_path: Path, plain: Callable[..., str], asked: Callable[..., Any]
) -> None:
    dcp.save(
        {"w": torch.arange(6.0), "n": 3},
        checkpoint_id=tmp_path / "step-1",
        no_dist=True,
    )
    assert asked("ls", tmp_path)["latest"] == "step-1"
    assert asked("show", tmp_path / "step-1", "w")["entries"][0]["layout"][0][
        "shape"
    ] == [6]
    assert "common: -" in plain("show", tmp_path / "step-1", "--common")


def fields(section: str) -> set[str]:
    """The names in the table of fields of a section of the page."""
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    part = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", part, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"\w+", row)}


def test_the_page_lists_the_fields(
    checkpoint: Path, tmp_path: Path, asked: Callable[..., Any]
) -> None:
    assert set(asked("ls", checkpoint)) == fields("ls")
    page = str(tmp_path / "m.html")
    report = ("--common", "--html", page)
    assert set(asked("show", checkpoint, "w", *report)) == fields("show")
    assert set(asked("verify", checkpoint)) == fields("verify")
    same = ("diff", checkpoint, checkpoint, "--html", page)
    assert set(asked(*same)) == fields("diff")
    assert set(asked("convert", checkpoint, tmp_path / "z", "--to", "zarr")) == fields(
        "convert"
    )


def test_the_examples_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(NEW, tmp_path / "run" / "iter_0000100")
    megackpt.convert(NEW, tmp_path / "run" / "iter_0000200", "torch_dist")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    ran = 0
    for block in re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            arguments = ["convert", *words[2:]] if words[0] == "python" else words[1:]
            if "--help" in arguments:
                with pytest.raises(SystemExit):
                    main(arguments)
            else:
                assert main(arguments) == 0, line
            ran += 1
    assert ran >= 15


def test_export_of_a_managers_step(tmp_path: Path, plain: Callable[..., str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    manager = megackpt.CheckpointManager(tmp_path / "run")
    manager.save(1, model=model.to(torch.bfloat16), optimizer=optimizer)
    step, out = Path(manager.path(1)), tmp_path / "out"
    plain("export-hf", step, out, status=3)  # no config.json
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "own", "dtype": "float32"}')
    plain("export-hf", step, out, "--config", config)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    found = megackpt.load_plain_tensors(out)
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in found.items())
    sharded = tmp_path / "sharded"
    options = ["--config", config, "--cast", "fp32", "--max-shard-size", "80"]
    plain("export-hf", step, sharded, *options)
    assert (sharded / "model.safetensors.index.json").exists()
    assert json.loads((sharded / "config.json").read_text())["dtype"] == "float32"
    plain(
        "export-hf",
        step,
        tmp_path / "x",
        "--config",
        config,
        "--prefix",
        "net.",
        status=3,
    )
    megackpt.save(megackpt.sharded(model.state_dict()), tmp_path / "alone")
    alone = tmp_path / "exported"
    plain("export-hf", tmp_path / "alone", alone, "--config", config, "--prefix", "")
    assert megackpt.load_plain_tensors(alone).keys() == found.keys()
    assert not (tmp_path / "x").exists()
