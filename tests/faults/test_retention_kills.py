"""Jobs killed while they save, write the tracker and remove older steps: the latest step is a good one, always."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megackpt.manager import CheckpointManager
from tests.faults.share import sampled

pytestmark = pytest.mark.slow

TRACKER = "latest_checkpointed_iteration.txt"
SYNCS = ("fsync", "fdatasync", "syncfs", "sync_file_range")
HEAD = ("killed by SIGKILL", "points", "latest: the old", "the new")


def removed_at(
    jobs: Any,
    nursery: Any,
    states: Any,
    folder: Path,
    order: dict[str, Any],
    point: int,
) -> str:
    """The manager of a run with steps 1 and 2 saves step 3 and keeps that alone, but is killed; and another goes on."""
    run = folder / str(point) / "run"
    shutil.copytree(folder / "old", run)
    outcome = jobs(
        nursery.Order(
            str(run), value=3, watch=str(run.parent), keep_last=1, at=point, **order
        )
    )
    manager = CheckpointManager(run, order["format"], keep_last=1)
    latest = manager.latest(verify=True)
    told = (point, outcome.counted[-3:], outcome.story, latest, manager.steps())
    assert latest is not None, told
    assert latest.step in (2, 3), told
    assert latest.step == 3 or set(outcome.codes) != {0}, told
    for step in manager.steps():
        found = states.seen(run / step.name)
        assert found == (step.step if step.complete else None), (told, step)
        if not (run / step.name).exists():
            continue  # it is not published
        entries = {path.name for path in (run / step.name).iterdir()}
        signs = entries & {".metadata", "metadata.json"}  # what other readers go by
        assert (
            step.step == 3 or not signs or entries >= data(folder / "old" / step.name)
        ), (told, entries)
    assert f"{int((run / TRACKER).read_text()):07d}" in {
        s.name[5:] for s in manager.steps() if s.complete
    }, told
    manager.save(4, states.declared(4))
    assert states.seen(run / "iter_0000004") == 4, told
    empty = {
        path.name for path in run.iterdir() if path.is_dir() and not any(path.iterdir())
    }
    assert empty <= {"iter_0000003"}, (
        told
    )  # which a save of others might just have made
    left = {
        path.name
        for path in run.iterdir()
        if not path.name.startswith(".megackpt-put-")
    } - empty
    assert left == {"iter_0000004", TRACKER}, (told, left)
    shutil.rmtree(run.parent)
    return "alive" if not outcome.died else "new" if latest.step == 3 else "old"


def data(checkpoint: Path) -> set[str]:
    """What belongs to it but for its tables of contents."""
    names = {path.name for path in checkpoint.iterdir()}
    return names - {
        ".metadata",
        "metadata.json",
        "megackpt.index",
        "zarr.json",
        "common.pt",
        "integrity.json",
    }


@pytest.mark.parametrize(
    ("order", "stride"),
    [
        ({"format": "torch_dist"}, 5), ({"format": "zarr"}, 17), ({"format": "torch_dist", "later": "thread"}, 13),
        *(pytest.param(order, 1, marks=pytest.mark.campaign) for order in (
            {"format": "torch_dist"}, {"format": "zarr"}, {"format": "safetensors"},
            {"format": "torch_dist", "later": "thread"},
            {"format": "torch_dist", "ranks": 2, "victims": (0, 1), "timeout": 2},
            {"format": "torch_dist", "ranks": 2, "victims": (0,), "timeout": 2},
        )),
    ],
)  # fmt: skip
def test_killed_while_removing(
    jobs, nursery, states, note, tmp_path, order, stride
) -> None:
    first = CheckpointManager(tmp_path / "old", order["format"])
    for step in (1, 2):
        first.save(step, states.declared(step))
    shutil.copytree(tmp_path / "old", tmp_path / "0" / "run")
    whole = jobs(
        nursery.Order(
            str(tmp_path / "0" / "run"),
            value=3,
            watch=str(tmp_path / "0"),
            keep_last=1,
            **order,
        )
    )
    assert set(whole.codes) == {0}, whole.story
    calls = [
        n
        for n, (name, _) in enumerate(whole.counted, 1)
        if stride == 1 or name not in SYNCS
    ]
    points = sampled(calls, least=12) if stride == 1 else calls[::stride]
    outcomes = jobs.each(
        lambda point: removed_at(jobs, nursery, states, tmp_path, order, point),
        points,
        2,
    )
    kind = ", ".join(
        f"{value}" if key == "format" else f"{key} {value}"
        for key, value in order.items()
    )
    note(
        HEAD,
        kind,
        len(outcomes) - outcomes.count("alive"),
        outcomes.count("old"),
        outcomes.count("new"),
    )
    assert min(outcomes.count("old"), outcomes.count("new")) > 1
