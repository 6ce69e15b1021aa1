"""torchtitan's own checkpoint manager saves and loads with our reader and writer and with stock DCP's, crosswise."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import megackpt
from tests.conftest import PEERS, ROOT

pytestmark = pytest.mark.campaign

SCRIPT = Path(__file__).with_name("with_torchtitan.py")


def test_torchtitans_manager_saves_and_loads_through_either_door(
    ranks: Any, tmp_path: Path
) -> None:
    path = os.pathsep.join([str(ROOT), str(PEERS / "torchtitan")])
    assert (PEERS / "torchtitan" / "torchtitan").is_dir(), (
        '"make peers" installs torchtitan'
    )
    first, _ = ranks(SCRIPT, 2, tmp_path, timeout=240, env={"PYTHONPATH": path})
    for mode in ("disabled", "async"):
        for saver in ("ours", "stock"):
            for loader in ("ours", "stock"):
                told = f"torchtitan, {mode}: saved by {saver}, loaded by {loader}: 16 tensors equal"
                assert told in first.stdout
        assert megackpt.verify(tmp_path / f"{mode}-ours" / "step-1").checked
