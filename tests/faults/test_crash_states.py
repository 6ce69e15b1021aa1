"""Power cuts on a disk that reorders: any state that crash_states.py allows is read right, and saved to again."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import megackpt
from megackpt import limits
from megackpt.storage import files, kernel
from tests.faults import crash_states
from tests.faults.share import part

FORMATS = ("torch_dist", "zarr", "safetensors")
NOTES = {"notes.txt": b"mine", "logs": None, "logs/run": b"mine, too"}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here survives a power cut of this machine, so nothing needs to wait for its disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def recorded(
    states: ModuleType,
    folder: Path,
    name: str,
    before: int | None,
    *,
    with_fsync: bool,
    later: bool = False,
) -> crash_states.Recording:
    live = folder / "live"
    live.mkdir()
    if before:
        megackpt.save(states.declared(before), live / "ckpt", name)
        for path, content in NOTES.items():
            if content is None:
                (live / "ckpt" / path).mkdir()
            else:
                (live / "ckpt" / path).write_bytes(content)

    def save() -> None:
        state = states.declared(2)
        request = megackpt.save(state, live / "ckpt", name, async_sharded_save=later)
        if request is not None:
            queue = megackpt.AsyncCallsQueue()
            queue.schedule_async_request(request)
            queue.close()

    found = crash_states.recorded(save, live, folder, with_fsync=with_fsync)
    complete = crash_states.CrashState(found, len(found.changes), Whole())
    complete.make(folder / "whole")
    assert crash_states.tree(folder / "whole") == crash_states.tree(live)
    return found


class Whole(random.Random):
    """Dice by which everything reaches the disk: the recording must then give the tree that is there."""

    def choice(self, seq):  # type: ignore[no-untyped-def]
        return ["whole"] if isinstance(seq[0], list) else seq[0]

    def random(self) -> float:
        return -1.0


def outcome(
    states: ModuleType,
    recording: crash_states.Recording,
    where: Path,
    seed: int,
    before: int | None,
) -> str:
    """Returns "before", "new", or why the state is bad."""
    dice = random.Random(seed)
    last = len(recording.changes)
    cut = last if seed % 10 == 0 else dice.randint(0, last)
    crash_states.CrashState(recording, cut, dice).make(where)
    try:
        found = states.seen(where / "ckpt")
        if found not in (before, 2) or (cut == last and found != 2):
            return f"{found} is seen after change {cut} of {last}"
        megackpt.save(states.declared(3), where / "ckpt")
        assert states.seen(where / "ckpt") == 3
        left = sorted(path.name for path in where.iterdir())
        if left != ["ckpt"]:
            return f"{left} are left after change {cut} of {last}"
        files = crash_states.tree(where / "ckpt")
        if before and NOTES.items() - files.items():
            return f"files of others are lost after change {cut} of {last}"
    except (AssertionError, megackpt.CheckpointingException, OSError) as error:
        return f"after change {cut} of {last}: {type(error).__name__}: {error}"
    return "before" if found == before else "new"


def outcomes(
    states: ModuleType,
    folder: Path,
    name: str,
    before: int | None,
    count: int,
    later: bool = False,
) -> Counter[str]:
    recording = recorded(states, folder, name, before, with_fsync=True, later=later)
    return Counter(
        outcome(states, recording, folder / str(seed), seed, before)
        for seed in range(count)
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("before", [None, 1])
@pytest.mark.parametrize(
    "count",
    [6, pytest.param(part(200), marks=pytest.mark.campaign)],
    ids=["few", "all"],
)
def test_every_state_is_one_of_two(
    states: ModuleType,
    note: Callable[..., None],
    tmp_path: Path,
    name: str,
    before: int | None,
    count: int,
) -> None:
    found = outcomes(states, tmp_path, name, before, count)
    kind = "overwriting" if before else "new save"
    note(
        ("power cut, reordered", "states", "before", "new", "bad"),
        f"{name}, {kind}",
        count,
        found["before"],
        found["new"],
        count - found["before"] - found["new"],
    )
    assert set(found) <= {"before", "new"}, found


@pytest.mark.parametrize("before", [None, 1])
@pytest.mark.parametrize(
    "count",
    [6, pytest.param(part(200), marks=pytest.mark.campaign)],
    ids=["few", "all"],
)
def test_every_state_of_direct_writes_is_one_of_two(
    states: ModuleType,
    note: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: int | None,
    count: int,
) -> None:
    """An asynchronous save whose files bypass the page cache, in pieces of a block."""
    monkeypatch.setattr(kernel, "bypass_cache", lambda *_: True)
    monkeypatch.setattr(limits, "DIRECT_BYTES", 1)
    monkeypatch.setattr(files, "_PIECE", files._BLOCK)
    (tmp_path / "one").mkdir()
    recording = recorded(
        states, tmp_path / "one", "torch_dist", before, with_fsync=True, later=True
    )
    pieces = [change for change in recording.changes if len(change.data) == 4096]
    assert len(pieces) > 2
    found = outcomes(states, tmp_path, "torch_dist", before, count, later=True)
    note(
        ("power cut, reordered", "states", "before", "new", "bad"),
        f"torch_dist, direct writes, {'overwriting' if before else 'new save'}",
        count,
        found["before"],
        found["new"],
        count - found["before"] - found["new"],
    )
    assert set(found) <= {"before", "new"}, found


@pytest.mark.parametrize(
    "name",
    ["torch_dist", *(pytest.param(n, marks=pytest.mark.slow) for n in FORMATS[1:])],
)
def test_without_fsync_there_are_bad_states(
    states: ModuleType, tmp_path: Path, name: str
) -> None:
    """The model finds what it looks for."""
    recording = recorded(states, tmp_path, name, 1, with_fsync=False)
    seeds = range(60)
    found = (outcome(states, recording, tmp_path / str(n), n, 1) for n in seeds)
    assert any(text not in ("before", "new") for text in found)
