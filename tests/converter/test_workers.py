"""Conversions by several real processes: what they make, and what happens when one of them, or all, are killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.async_save.worker_process import WorkerProcess
from megackpt.checkpoint import open_checkpoint
from megackpt.converter import conversion, conversion_workers as converter_workers
from megackpt.converter.conversion_workers import JOURNAL
from megackpt.errors import CorruptCheckpoint, NotACheckpoint, RankLost, StorageError

MIB = 1 << 20
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """320 MiB: five tasks."""
    seeded = torch.Generator().manual_seed(1)
    state = {
        f"w{i}": ShardedTensor.from_rank_offsets(
            f"w{i}", torch.rand(4096, 4096, generator=seeded)
        )
        for i in range(5)
    }
    folder = tmp_path_factory.mktemp("large") / "source"
    megackpt.save({**state, "iteration": 3}, folder)
    return folder


@pytest.mark.parametrize(
    "to",
    [
        "torch_dist",
        *(
            pytest.param(to, marks=pytest.mark.slow)
            for to in ("zarr", "safetensors", "torch")
        ),
    ],
)
def test_two_workers_make_what_one_makes(tmp_path, large, files, to) -> None:
    megackpt.convert(large, tmp_path / "one", to, workers=1)
    reported: list[int] = []
    megackpt.convert(
        large,
        tmp_path / "two",
        to,
        workers=2,
        progress=lambda done, _: reported.append(done),
    )
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert len(reported) > 5
    assert megackpt.verify(tmp_path / "two").ok


def test_a_script_without_a_guard_can_convert(tmp_path, large) -> None:
    """Workers never run the caller's main module again."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import megackpt\nprint('once')\nmegackpt.convert({str(large)!r}, 'out', 'torch_dist', workers=2)\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "once\n"
    assert megackpt.verify(tmp_path / "out").ok


def test_a_worker_that_is_killed(tmp_path, large, files, monkeypatch, caplog) -> None:
    """An error that names the task; nothing is committed; the same call resumes."""
    monkeypatch.setattr(conversion, "run_tasks", _killing(monkeypatch, after=2))
    with pytest.raises(
        RankLost,
        match=r"worker process \d+ was killed by SIGKILL .* at task \d; nothing is committed",
    ) as lost:
        megackpt.convert(large, tmp_path / "out", "torch_dist", workers=2)
    assert len(lost.value.failures) == 1
    assert "resumes from there" in caplog.text
    with pytest.raises(NotACheckpoint):
        megackpt.load_plain_tensors(tmp_path / "out")
    monkeypatch.undo()
    assert (
        megackpt.convert(large, tmp_path / "out", "torch_dist", workers=2).resumed
        > 100 * MIB
    )
    megackpt.convert(large, tmp_path / "whole", "torch_dist", workers=1)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def _killing(monkeypatch: pytest.MonkeyPatch, after: int):
    """``run_tasks``, which kills a worker at its work when so many tasks are finished."""
    at_work: list[WorkerProcess] = []
    send = WorkerProcess.send

    def noted(self: WorkerProcess, work: Any) -> None:
        if work.func is not converter_workers.open_runner:
            at_work.append(self)
        send(self, work)

    monkeypatch.setattr(WorkerProcess, "send", noted)

    def run_tasks(runner, workers, tasks, finished, *others):
        count, killed = [0], []

        def counted(result):
            finished(result)
            count[0] += 1
            if count[0] >= after and not killed:
                killed.append(at_work[-1].process.pid)
                os.kill(killed[0], signal.SIGKILL)

        converter_workers.run_tasks(runner, workers, tasks, counted, *others)

    return run_tasks


def test_a_worker_s_error_is_raised(tmp_path, large) -> None:
    place = open_checkpoint(large).manifest.chunks_of("w3")[0].location
    copy = tmp_path / "source"
    copy.mkdir()
    for file in large.iterdir():
        os.link(file, copy / file.name)
    data = bytearray((large / place.file).read_bytes())
    data[place.start + 5] ^= 1
    (copy / place.file).unlink()
    (copy / place.file).write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=r"'w3' .* is damaged"):
        megackpt.convert(copy, tmp_path / "out", "zarr", workers=2)
    assert not (tmp_path / "out").exists()


def command(source: Path, target: Path, to: str, *options: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "tools.convert",
        str(source),
        str(target),
        "--to",
        to,
        "--workers",
        "2",
        *options,
    ]


def until(condition, process: subprocess.Popen) -> bool:
    """Wait for it; False if the process ended before."""
    while not condition():
        if process.poll() is not None:
            return False
        time.sleep(0.001)
    return True


def finished_tasks(target: Path) -> int:
    """Entries in the journal of an unfinished conversion; -1 before it has begun."""
    for staging in target.parent.glob(f".{target.name}.megackpt-*"):
        try:
            entries = os.listdir(staging / JOURNAL)
        except FileNotFoundError:
            return 0
        return sum(entry.isdigit() for entry in entries)
    return -1


@pytest.mark.slow
@pytest.mark.slow
def test_workers_that_stand_still_are_given_up(tmp_path, large, monkeypatch) -> None:
    """Stopped by a signal, as on a disk that does not answer. No process is left."""
    stopped: list[int] = []
    send = WorkerProcess.send

    def stop(self, work):
        send(self, work)
        if self.process.pid not in stopped:
            stopped.append(self.process.pid)
            os.kill(self.process.pid, signal.SIGSTOP)

    monkeypatch.setattr(WorkerProcess, "send", stop)
    with pytest.raises(StorageError, match="have not reported progress for 3 s"):
        megackpt.convert(
            large, tmp_path / "out", "zarr", workers=2, timeout=timedelta(seconds=3)
        )
    assert len(stopped) == 2
    assert not any(os.path.exists(f"/proc/{pid}") and _alive(pid) for pid in stopped)
    assert not megackpt.check_is_distributed_checkpoint(tmp_path / "out")


@pytest.mark.parametrize(
    ("to", "stop"),
    [
        ("safetensors", signal.SIGTERM),
        pytest.param("torch_dist", signal.SIGKILL, marks=pytest.mark.campaign),
        pytest.param("torch_dist", signal.SIGINT, marks=pytest.mark.campaign),
        pytest.param("zarr", signal.SIGKILL, marks=pytest.mark.campaign),
    ],
)
def test_the_command_is_stopped_after_every_task(
    tmp_path, large, files, to, stop
) -> None:
    """Killed when 0, 1, 2, ... tasks are done, in one target; workers die with it, and nothing is lost."""
    megackpt.convert(large, tmp_path / "whole", to, workers=1)
    target = tmp_path / "out"
    killed = 0
    for count in range(6):
        process = subprocess.Popen(
            command(large, target, to),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if not until(lambda: finished_tasks(target) >= count, process):  # noqa: B023
            break
        children = _children(process.pid)
        process.send_signal(stop)
        _, reported = process.communicate()
        if process.returncode == 0:
            break  # it was done before the signal came
        killed += 1
        assert process.returncode in (-stop, 130), reported
        assert not megackpt.check_is_distributed_checkpoint(target)
        deadline = time.monotonic() + 20
        while any(os.path.exists(f"/proc/{pid}") and _alive(pid) for pid in children):
            assert time.monotonic() < deadline, "workers outlive their parent"
            time.sleep(0.01)
    assert killed >= 3
    done = subprocess.run(
        command(large, target, to, "--overwrite"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert files(target) == files(tmp_path / "whole")


@pytest.mark.campaign
@pytest.mark.parametrize("to", ["torch_dist", "zarr", "safetensors", "torch"])
def test_the_command_is_killed_at_any_time(tmp_path, large, files, to) -> None:
    """In the middle of whatever it does, again and again, replacing a checkpoint, until it gets through."""
    megackpt.convert(large, tmp_path / "whole", to, workers=1)
    target = tmp_path / "out"
    megackpt.save({"old": 1}, target)
    times = iter(random.Random(to).choices(range(1, 80), k=12))
    for pause in times:
        process = subprocess.Popen(
            command(large, target, to, "--overwrite"),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if until(lambda: any(tmp_path.glob(".out.megackpt-*")), process):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(pause / 100)
        process.kill()
        process.wait()
        if not any(tmp_path.glob(".out.megackpt-*")):
            break
        assert megackpt.load_common_state_dict(target) == {"old": 1}
    megackpt.convert(large, target, to, overwrite=True)
    assert files(target) == files(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child)
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except FileNotFoundError:
        return []


def _alive(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            not in "ZX"
        )
    except FileNotFoundError:
        return False


@pytest.mark.root
@pytest.mark.parametrize(
    ("to", "workers"),
    [("torch_dist", 2), ("zarr", 1), ("safetensors", 2), ("torch", 1)],
)
def test_a_full_disk(tmp_path, large, files, to, workers) -> None:
    """A file system of 200 MiB; then space is freed, and the same call resumes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", disk], check=True
    )
    try:
        with pytest.raises(megackpt.StorageError, match="space"):
            megackpt.convert(large, disk / "out", to, workers=workers)
        assert not megackpt.check_is_distributed_checkpoint(disk / "out")
        subprocess.run(["mount", "-o", "remount,size=800m", disk], check=True)
        resumed = megackpt.convert(large, disk / "out", to, workers=workers).resumed
        assert (resumed > 0) is (to != "torch")  # a torch file starts from zero
        megackpt.convert(large, tmp_path / "whole", to, workers=1)
        assert files(disk / "out") == files(tmp_path / "whole")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
