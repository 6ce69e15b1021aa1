"""How much of the package one save and one load of two tensors run through."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.staging.buffers import POOL

PACKAGE = f"{Path(megackpt.__file__).parent}/"

# What the walks are today, on all threads. To be lowered as they get shorter: the aim is a first
# save of 38 files and 260 functions, and a load of 35 and 210.
SAVE_FILES, SAVE_FUNCTIONS = 43, 383
LOAD_FILES, LOAD_FUNCTIONS = 41, 319

Calls = set[tuple[str, str]]


def calls_of(work: Callable[[], Any]) -> Calls:
    """File and name of each function of the package that runs, on any thread, comprehensions not counted."""
    found: Calls = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if code.co_name not in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"):
            file = code.co_filename.removeprefix(PACKAGE)
            found.add((file, code.co_qualname))

    before, before_of_threads = sys.getprofile(), threading.getprofile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
        threading.setprofile(before_of_threads)
    return found


def state(prefix: str) -> dict[str, Any]:
    return {
        "weight": ShardedTensor.from_rank_offsets(f"{prefix}.w", torch.ones(4, 4)),
        "bias": ShardedTensor.from_rank_offsets(f"{prefix}.b", torch.ones(4)),
        "step": 3,
    }


def walks(folder: Path) -> tuple[Calls, Calls]:
    """The functions of a first save and of a load, after others have filled the caches."""
    megackpt.save(state("warm"), folder / "warm")
    megackpt.load(state("warm"), folder / "warm")
    saved = calls_of(lambda: megackpt.save(state("first"), folder / "first"))
    loaded = calls_of(lambda: megackpt.load(state("first"), folder / "first"))
    return saved, loaded


def test_a_save_and_a_load_run_through_few_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For a queue that waits for it, a load prepares staging memory as well.
    monkeypatch.setattr(POOL, "is_expecting", False)
    saved, loaded = walks(tmp_path)
    counts = [len({file for file, _ in calls}) for calls in (saved, loaded)]
    assert len(saved) > 100  # the profile has seen the save
    assert counts[0] <= SAVE_FILES, sorted({file for file, _ in saved})
    assert counts[1] <= LOAD_FILES, sorted({file for file, _ in loaded})
    assert len(saved) <= SAVE_FUNCTIONS, sorted(saved)
    assert len(loaded) <= LOAD_FUNCTIONS, sorted(loaded)


def test_a_format_runs_no_code_of_another(tmp_path: Path) -> None:
    others = ("backends/zarr", "backends/safetensors", "backends/torch_file")
    for calls in walks(tmp_path):
        assert not {file for file, _ in calls if file.startswith(others)}


def test_small_plain_objects_are_not_read_back_while_saving(tmp_path: Path) -> None:
    saved, _ = walks(tmp_path)
    assert not {file for file, _ in saved if "unpickler" in file}
