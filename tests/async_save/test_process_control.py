"""What Linux offers for processes: the end with a parent."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


def test_a_process_that_dies_with_its_parent(tmp_path):
    child = (
        "from megackpt.async_save.worker_process import die_with_parent\n"
        "print(die_with_parent(), flush=True)\n"
        "input()\n"
    )
    parent = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "print(child.stdout.readline().decode().strip(), child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdout
        done, pid = process.stdout.readline().split()
        assert done == "True"
        process.kill()
    while _runs(pid):  # if it does not die, the timeout of all tests tells
        time.sleep(0.01)


def _runs(pid: str) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except (FileNotFoundError, ProcessLookupError):
        return False
