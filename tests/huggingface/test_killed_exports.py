"""Exports without an index, killed at each change of the disk: all is there, or nothing, and the same call ends it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import megackpt
from megackpt.converter import export_huggingface
from megackpt.errors import NotACheckpoint
from megackpt.storage import kernel
from tests.checkpoint.test_kill_points import LIMIT, die_at
from tests.children import died
from tests.huggingface.models import equal, files_in, shard

WEIGHTS = {"model.a": torch.arange(4.0), "model.b": torch.ones(2, 3)}
EXPORTED = {"config.json", "model.safetensors"}
FOREIGN = {"README.md", "logs/run"}


def export(run: Path) -> None:
    export_huggingface(run / "training", run / "out", {"*": "model.*"}, {}, workers=1)


def dies(run: Path, step: int) -> bool:
    def work() -> None:
        die_at(step)
        export(run)

    return died(work)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [True, False])
def test_an_export_dies(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    if not exchange:
        monkeypatch.setattr(kernel, "libc_function", lambda *_: None)
    tensors = {k.removeprefix("model."): shard(k[6:], w) for k, w in WEIGHTS.items()}
    for step in range(1, LIMIT):
        run = tmp_path / f"{step}"
        for name in FOREIGN:
            path = run / "out" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"my {name}")
        megackpt.save(tensors, run / "training")
        died = dies(run, step)
        try:
            equal(megackpt.load_plain_tensors(run / "out"), WEIGHTS)
            assert files_in(run / "out") >= EXPORTED
        except NotACheckpoint:
            assert died
            assert files_in(run / "out") <= FOREIGN
            export(run)
        else:
            left = [*os.listdir(run), *files_in(run / "out")]
            if any(name.startswith(".") for name in left):
                export(run)
        equal(load_file(run / "out/model.safetensors"), WEIGHTS)
        assert files_in(run / "out") == EXPORTED | FOREIGN
        for name in FOREIGN:
            assert (run / "out" / name).read_text() == f"my {name}"
        assert set(os.listdir(run)) == {"training", "out"}
        if not died:
            assert step > 10
            return
    raise AssertionError("it died at every step")
