"""Writer processes of scripts: without a guard, daemonic, with little shared memory, and at their end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megackpt
from tests.async_save.processes import PATIENCE, SCRIPT, gone, until


def script(folder: Path, text: str) -> subprocess.Popen[str]:
    path = folder / "script.py"
    path.write_text(SCRIPT + text)
    pipes: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    return subprocess.Popen([sys.executable, path], cwd=folder, **pipes)


def test_a_script_without_a_guard_and_without_a_close(tmp_path: Path) -> None:
    """The main module runs once; a task in flight at the end is given up quietly."""
    text = """
print("once", flush=True)
worker = ProcessWorker()
first, second = Task(chores.pid, "first"), Task(chores.Wait(Path("."), deaf=True), "second")
worker.start(first)
worker.start(second)
first.wait()
print(first.get(), flush=True)
while not Path("begun").exists():
    second.wait(0.01)
"""
    process = script(tmp_path, text)
    out, err = process.communicate(timeout=PATIENCE)
    once, pid = out.split()
    assert (once, err, process.returncode) == ("once", "", 0)
    until(lambda: gone(int(pid)))


SAVING = """
import sys, torch, megackpt
from megackpt import ShardedTensor

def save(directory):
    queue = AsyncCallsQueue(persistent=True)
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(24 << 20))}
    queue.schedule_async_request(megackpt.save(state, directory, async_sharded_save=True))
    queue.close()
"""


@pytest.mark.slow
def test_it_works_in_a_daemonic_process(tmp_path: Path) -> None:
    """multiprocessing lets these start no processes."""
    text = """
import multiprocessing

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=save, args=("ckpt",), daemon=True)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""
    process = script(tmp_path, SAVING + text)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert megackpt.verify(tmp_path / "ckpt").ok


@pytest.mark.root
def test_it_works_with_a_dev_shm_of_64_mib(tmp_path: Path) -> None:
    """As in containers by default: 96 MiB are saved."""
    text = """
save("ckpt")
"""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + SAVING + text)
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm && exec"
    subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"{mount} {sys.executable} {path}"],
        cwd=tmp_path,
        check=True,
        timeout=PATIENCE,
    )
    assert megackpt.verify(tmp_path / "ckpt").ok


def test_a_queue_at_the_end_of_the_interpreter(tmp_path: Path) -> None:
    text = """
from megackpt import limits
limits.EXIT_SECONDS = limits.WORKER_STOP_SECONDS = 0.5
queue = AsyncCallsQueue(persistent=True)
task = Task(chores.Wait(Path("."), deaf=True), "iter_5")
task.on_end(lambda outcome: print(outcome.error, flush=True))
with group_over() as group:
    queue.schedule_async_request(AsyncRequest(Pending(task, group), (), []))
while not Path("begun").exists():
    task.wait(0.01)
"""
    process = script(tmp_path, text)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "given up" in out
    assert "Traceback" not in err
    assert "the process ends (StorageError('iter_5: its worker has not moved" in err
    assert "before these saves are committed on all ranks: iter_5" in err
    until(lambda: gone(int((tmp_path / "begun").read_text())))


def test_it_dies_with_its_parent_however_that_dies(tmp_path: Path) -> None:
    """Also while it hangs, and while a process that the parent has forked lives on."""
    text = """
import os, time
worker = ProcessWorker()
task = Task(chores.Wait(Path("."), deaf=True))
worker.start(task)
while not Path("begun").exists():
    task.wait(0.01)
forked = os.fork()
if not forked:
    os.close(1), os.close(2)
    while not Path("go").exists():
        time.sleep(0.01)
    os._exit(0)
print(forked, flush=True)
time.sleep(1000)
"""
    process = script(tmp_path, text)
    assert process.stdout is not None
    forked = int(process.stdout.readline())
    process.kill()
    process.communicate()
    until(lambda: gone(int((tmp_path / "begun").read_text())))
    assert not gone(forked)
    (tmp_path / "go").touch()
    until(lambda: gone(forked))


def test_a_request_that_is_never_scheduled_is_an_error_at_the_end(
    tmp_path: Path,
) -> None:
    text = """
import torch, megackpt

state = megackpt.sharded({"w": torch.ones(2)})
kept = megackpt.save(state, "kept", async_sharded_save=True)
ended = megackpt.save(state, "ended", async_sharded_save=True)
ended.execute_sync()
print("end")
"""
    process = script(tmp_path, text)
    out, err = process.communicate(timeout=PATIENCE)
    assert (out, process.returncode) == ("end\n", 0)
    (line,) = err.splitlines()
    assert line.startswith("kept is not saved: its request was dropped")
    assert "AsyncCallsQueue.schedule_async_request" in line
    assert megackpt.verify(tmp_path / "ended").ok
