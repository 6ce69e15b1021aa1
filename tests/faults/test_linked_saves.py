"""Saves that link files of the step before: killed at every change, and cut off by a power cut."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import Strategy
from megackpt.checkpoint import clear
from megackpt.errors import NotACheckpoint
from megackpt.planning import cache
from tests.checkpoint.test_kill_points import die_at
from tests.children import died
from tests.faults import crash_states
from tests.faults.share import part

KEYS = [f"frozen.{i}" for i in range(4)]
REUSING = Strategy(reuse_unchanged=True, frozen=KEYS)
ZARR = Strategy("zarr", reuse_unchanged=True, frozen=KEYS)


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes die, the machine does not: what is written is there."""
    cache.forget()
    monkeypatch.setattr(os, "fsync", lambda _: None)


def state(value: int) -> dict[str, Any]:
    named = {
        key: torch.full((300, 7), 3.0 + number, device="cpu")
        for number, key in enumerate(KEYS)
    }
    named["head"] = torch.full((5,), float(value), device="cpu")
    return {**megackpt.sharded(named), "value": value}


def seen(where: Path) -> int | None:
    """The value that a reader finds, with all of its tensors and digests."""
    try:
        loaded = megackpt.load(state(-1), where, verify=True)
    except NotACheckpoint:
        return None
    value = loaded["value"]
    for key, tensor in state(value).items():
        if key != "value":
            assert torch.equal(loaded[key], tensor.data), key
    return int(value)


def linked(where: Path) -> int:
    return sum(path.stat().st_nlink > 1 for path in where.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2", "1"])
@pytest.mark.parametrize("strategy", [REUSING, ZARR], ids=["torch_dist", "zarr"])
def test_a_kill_at_any_change_leaves_old_or_new(
    tmp_path: Path, name: str, strategy: Strategy
) -> None:
    """``name``: of a new step, or of the step whose files are linked."""
    found = []
    for change in range(1, 200):
        run = tmp_path / str(change)
        run.mkdir()
        for value in (0, 1):
            megackpt.save(state(value), run / str(value), strategy)
        content = {
            path: path.read_bytes() for path in (run / "0").rglob("*") if path.is_file()
        }
        where = run / name

        def work(change: int = change, where: Path = where, run: Path = run) -> None:
            megackpt.save(state(1), run / "1", strategy)  # a child knows no step before
            die_at(change)
            megackpt.save(state(2), where, strategy)

        has_died = died(work)
        found.append(seen(where))
        if found[-1] == 2 and name == "2":
            assert linked(where)
        assert found[-1] in (2, 1 if name == "1" else None), change
        assert seen(run / "0") == 0
        clear(where)
        megackpt.save(state(3), where, strategy)
        assert seen(where) == 3
        assert all(path.read_bytes() == data for path, data in content.items())
        assert sorted(os.listdir(run)) == sorted({"0", "1", name})
        if not has_died:
            break
    else:
        pytest.fail("the save has more changes than the test expects")
    assert found[-1] == 2
    assert len(found) > 15


def after_a_cut(recording: crash_states.Recording, where: Path, seed: int) -> str:
    """What is seen in a state that a power cut may leave; the next save works."""
    dice = random.Random(seed)
    last = len(recording.changes)
    cut = last if seed % 10 == 0 else dice.randint(0, last)
    crash_states.CrashState(recording, cut, dice).make(where)
    cache.forget()  # as a new process
    assert [seen(where / "0"), seen(where / "1")] == [0, 1], cut
    found = seen(where / "2")
    assert found in ((2,) if cut == last else (2, None)), cut
    named = replace(REUSING, reuse_from=where / "1")
    megackpt.save(state(3), where / "2", named)
    assert seen(where / "2") == 3
    assert linked(where / "2") == 1
    assert sorted(os.listdir(where)) == ["0", "1", "2"]
    return "new" if found else "before"


@pytest.mark.parametrize(
    "count", [8, pytest.param(part(200), marks=pytest.mark.campaign)]
)
def test_a_power_cut_leaves_old_or_new(
    tmp_path: Path, note: Callable[..., None], count: int
) -> None:
    live = tmp_path / "live"
    for value in (0, 1):
        megackpt.save(state(value), live / str(value), REUSING)

    def save() -> None:
        named = replace(REUSING, reuse_from=live / "1")  # a child knows no step before
        megackpt.save(state(2), live / "2", named)

    recording = crash_states.recorded(save, live, tmp_path, with_fsync=True)
    assert linked(live / "2") == 1
    found = [
        after_a_cut(recording, tmp_path / str(seed), seed) for seed in range(count)
    ]
    note(
        ("power cut, reordered", "states", "before", "new", "bad"),
        "torch_dist, linked files",
        count,
        found.count("before"),
        found.count("new"),
        0,
    )
    assert {*found} == {"before", "new"}
