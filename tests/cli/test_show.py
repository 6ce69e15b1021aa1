"""``megackpt show``: entries, layouts, the common state, keys that are alike."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import CorruptCheckpoint, ShardedTensor
from megackpt.__main__ import main

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
NEW = GOLDEN / "mcore-0.16.1-tp2pp1dp2"
COMMAND = [sys.executable, "-m", "megackpt"]


def test_show(checkpoint: Path, plain: Callable[..., str]) -> None:
    lines = [line.split() for line in plain("show", checkpoint).splitlines()]
    for line in (["format:", "torch_dist"], ["chunks:", "5"], ["files:", "5"]):
        assert line in lines
    assert ["KEY", "DTYPE", "SHAPE", "CHUNKS", "BYTES", "GRID"] in lines
    assert ["w", "float32", "[1024,", "1024]", "2", "4.0", "MiB", "-"] in lines
    assert ["step", "int64", "[]", "1", "8", "B", "-"] in lines
    assert any(line[:3] == ["rng", "object", "[1]"] for line in lines)


def test_show_as_json(checkpoint: Path, asked: Callable[..., Any]) -> None:
    facts = asked("show", checkpoint)
    assert (facts["format"], facts["version"], facts["digests"]) == (
        "torch_dist",
        1,
        True,
    )
    assert {e["key"]: (e["dtype"], e["shape"], e["chunks"], e["bytes"]) for e in facts["entries"]}["w"] == (
        "float32", [1024, 1024], 2, 4 << 20
    )  # fmt: skip
    assert "layout" not in facts["entries"][0]


def test_the_layout_of_one_tensor(
    checkpoint: Path, plain: Callable[..., str], asked: Callable[..., Any]
) -> None:
    (entry,) = asked("show", checkpoint, "w")["entries"]
    for i, chunk in enumerate(entry["layout"]):
        assert (chunk["offset"], chunk["shape"]) == ([512 * i, 0], [512, 1024])
        data = (checkpoint / chunk["file"]).read_bytes()[chunk["start"] :][
            : chunk["length"]
        ]
        assert (
            data
            == torch.arange(i << 19, (i + 1) << 19, dtype=torch.float32)
            .numpy()
            .tobytes()
        )
        assert len(chunk["digests"]) == 2
        assert chunk["rank"] == 0
    text = plain("show", checkpoint, "w")
    assert "[512, 0]" in text
    assert f"{entry['layout'][0]['digests'][0]} +1" in text


def test_patterns(
    checkpoint: Path, plain: Callable[..., str], asked: Callable[..., Any]
) -> None:
    assert [e["key"] for e in asked("show", checkpoint, "*s*")["entries"]] == [
        "common_state",
        "step",
    ]
    assert all(
        "layout" in e for e in asked("show", checkpoint, "*s*", "--chunks")["entries"]
    )
    assert plain("show", checkpoint, "stepp", status=3) == ""
    assert (
        "no key 'stepp'"
        in asked("show", checkpoint, "stepp", status=3)["error"]["message"]
    )


def test_the_nearest_keys_are_named(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(checkpoint), "stepp"]) == 3
    assert "the nearest are 'step'" in capsys.readouterr().err


def test_common_state(plain: Callable[..., str], asked: Callable[..., Any]) -> None:
    lines = plain("show", NEW, "--common").splitlines()
    assert "common.optimizer.param_groups[0].lr: 0.125" in lines
    assert "common.opt_param_scheduler.dtype: torch.bfloat16" in lines
    facts = asked("show", NEW, "--common")
    assert facts["common"]["args"] == {"tp": 2, "pp": 1, "none": None, "flag": True}
    assert "entries" not in facts


class Secret:
    """A class that must not be imported."""

    touched = False

    def __init__(self) -> None:
        self.inner = {"a b": [1, 2.5], "t": torch.arange(3)}

    def __setstate__(self, given: dict[str, Any]) -> None:
        Secret.touched = True
        self.__dict__ = given


def test_no_class_of_a_checkpoint_is_imported(
    tmp_path: Path, plain: Callable[..., str], asked: Callable[..., Any]
) -> None:
    megackpt.save({"s": Secret(), "nan": float("nan")}, tmp_path / "c")
    lines = plain("show", tmp_path / "c", "--common").splitlines()
    assert f"common.s['<class>']: {Secret.__module__}.Secret" in lines
    assert "common.s.inner['a b'][1]: 2.5" in lines
    assert "common.s.inner.t: tensor of int64, 3: [0, 1, 2]" in lines
    common = asked("show", tmp_path / "c", "--common")["common"]
    assert common["s"]["inner"] == {
        "a b": [1, 2.5],
        "t": {"dtype": "int64", "shape": [3]},
    }
    assert common["nan"] == "nan"
    assert not Secret.touched


def test_the_shard_map(
    checkpoint: Path,
    tmp_path: Path,
    plain: Callable[..., str],
    asked: Callable[..., Any],
) -> None:
    page = tmp_path / "map.html"
    assert str(page) in plain("show", checkpoint, "--html", page)
    assert "entries" not in asked("show", checkpoint, "--html", page)
    assert "<html" in page.read_text(encoding="utf-8")
    plain("show", checkpoint, "--html", tmp_path / "no" / "map.html", status=6)


def test_long_numbers_in_keys_are_no_layers(
    tmp_path: Path, on_terminal: Callable[..., Any]
) -> None:
    """int() refuses more than 4,300 digits."""
    keys = [f"layers.{'9' * 5000}.w", "layers.0.w"]
    parts = [ShardedTensor.from_rank_offsets(key, torch.zeros(4)) for key in keys]
    megackpt.save({"parts": parts}, tmp_path / "ckpt")
    shown = on_terminal("show", tmp_path / "ckpt", width=200)
    assert shown.status == 0
    assert "layers.0.w" in shown.text
    assert "alike" not in shown.text


def test_layers_that_are_alike_are_folded(
    tmp_path: Path, on_terminal: Callable[..., Any], plain: Callable[..., str]
) -> None:
    layers = {
        f"{i}{name}": ShardedTensor.from_rank_offsets(
            f"h.{i}.{name}", torch.zeros(2 + (i == 5 and name == "b"))
        )
        for i in range(12)
        for name in "ab"
    }
    megackpt.save(layers, tmp_path / "c")
    shown = on_terminal("show", tmp_path / "c")
    assert shown.status == 0
    labels = [line.split("  ")[0] for line in shown.text.rstrip().splitlines()]
    assert labels[-4:] == [
        "common_state",
        "h.0-11.a (12 alike)",
        "h.0-11.b (11 alike)",
        "h.5.b",
    ]
    assert on_terminal("show", tmp_path / "c", "--all").text.count("h.") == 24
    assert plain("show", tmp_path / "c").count("h.") == 24


def test_the_description_of_each_array_is_left_to_verify(
    tmp_path: Path, asked: Callable[..., Any]
) -> None:
    """``ls`` and ``show`` do not open one file for each of very many arrays."""
    state = {
        key: ShardedTensor.from_rank_offsets(key, torch.arange(8.0)) for key in "vw"
    }
    step = tmp_path / "iter_0000001"
    megackpt.save(state, step, "zarr")
    files = [file for file in step.rglob("*") if file.is_file()]
    (step / "w" / "zarr.json").unlink()
    (listed,) = asked("ls", tmp_path)["steps"]
    assert listed["files"] == len(files)
    assert {entry["key"] for entry in asked("show", step)["entries"]} >= {"v", "w"}
    with pytest.raises(CorruptCheckpoint, match=r"w/zarr\.json is missing"):
        megackpt.load(state, step)
    (problem,) = megackpt.verify(step).problems
    assert "w/zarr.json is missing" in problem
