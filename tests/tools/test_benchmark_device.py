"""The benchmark of a device runs to its end where there is none; what it prints is read as a person would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_program_runs_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "tools" / "benchmark_device.py", "--device=cpu"]
    command += ["--gib=0.01", "--tensors=4", "--rounds=1", f"--to={tmp_path}"]
    found = subprocess.run(
        command,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    rates = re.findall(r"^(.+?) +[\d.]+ s +[\d.]+ GB/s", found.stdout, re.MULTILINE)
    assert rates == [
        "pinned copy to the host",
        "pinned copy to the device",
        "plain write, fsync",
        "plain read, warm",
        "save",
        "load, unverified",
        "load, verified",
    ]
    shares = re.findall(r"wait_staged=(\w+) +([\d.]+)%", found.stdout)
    assert [name for name, _ in shares] == ["True", "False"]
    assert all(0 <= float(share) <= 100 for _, share in shares)
    assert not list(tmp_path.iterdir())
