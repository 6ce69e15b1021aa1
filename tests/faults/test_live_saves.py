"""A save whose process lives keeps its files when other processes begin saves beside it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import AsyncCallsQueue, SaveInProgress, ShardedTensor
from megackpt.checkpoint import clear

PROGRAM = """
import builtins, os, sys
import torch
import megackpt
from megackpt import AsyncCallsQueue, ShardedTensor

def begin(path):
    queue = AsyncCallsQueue()
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(10))}
    queue.schedule_async_request(megackpt.save(state, path, async_sharded_save=True))
    return queue

path, do = sys.argv[1:3]
begin(path + "-other").close()  # all modules are imported now
real = builtins.open
def full(name, *args, **options):
    if str(name).startswith("/proc/") and str(name).endswith("/stat"):
        raise OSError(24, "Too many open files", name)
    return real(name, *args, **options)
if do == "full":
    builtins.open = full
if do == "user":
    os.setgroups([])
    os.setgid(1002)
    os.setuid(1002)
queue = begin(path)
print(*sorted(os.listdir(os.path.dirname(path))), flush=True)
if do == "wait":
    sys.stdin.readline()
if do == "thread":
    import ctypes, threading
    def finish():
        sys.stdin.readline()
        try:
            queue.close()
        finally:
            os._exit(0)
    threading.Thread(target=finish).start()
    ctypes.CDLL(None).pthread_exit(None)
queue.close(abort=True)
"""

HIDDEN = ["unshare", "--mount", "sh", "-c"]
HIDDEN += ['mount -t proc -o hidepid=2 proc /proc; exec "$@"', "sh"]
OTHERS = {
    "of another user, who does not see it in /proc": (HIDDEN, "user"),
    "in another time namespace": (
        ["unshare", "--time", "--boottime", "100000", "--fork"],
        "",
    ),
    "in another namespace of process ids": (
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"],
        "",
    ),
}


@pytest.fixture
def target() -> Iterator[Path]:
    """A directory to save to. All users may change what is beside it."""
    parent = Path(tempfile.mkdtemp())
    parent.chmod(0o777)
    mask = os.umask(0)
    yield parent / "c"
    os.umask(mask)
    shutil.rmtree(parent)


def other(
    target: Path, do: str = "", before: list[str] | None = None
) -> subprocess.Popen[str]:
    """A process that begins a save to the directory."""
    return subprocess.Popen(
        [*(before or []), sys.executable, "-c", PROGRAM, target, do],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HOME": str(target.parent)},
    )


def staging(target: Path) -> set[str]:
    return {name for name in os.listdir(target.parent) if name.startswith(".c.")}


def check_kept(target: Path, do: str, before: list[str] | None = None) -> None:
    """A save of this process commits after the save of another process has begun."""
    queue = AsyncCallsQueue()
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(10))}
    queue.schedule_async_request(megackpt.save(state, target, async_sharded_save=True))
    with other(target, do, before) as process:
        process.communicate(timeout=300)
    assert process.returncode == 0
    queue.close()
    assert megackpt.load_plain_tensors(target)["w"].tolist() == [1.0] * 10


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, bytes(2 << 20)])
def test_a_save_whose_marker_is_damaged(target: Path, content: bytes) -> None:
    """Nothing says since when it runs, so the time of the file does."""
    with other(target, "wait") as process:
        assert process.stdout is not None
        process.stdout.readline()
        (marker,) = target.parent.glob(".c.*/.megackpt-saving-*")
        marker.write_bytes(content)
        with pytest.raises(SaveInProgress):
            clear(target)
        assert marker.exists()
        os.utime(marker, (1e9, 1e9))
        clear(target)
        assert not marker.exists()
        process.communicate("\n", timeout=300)


@pytest.mark.root
@pytest.mark.parametrize("case", OTHERS)
def test_a_process_that_sees_less(target: Path, case: str) -> None:
    before, do = OTHERS[case]
    check_kept(target, do, before)


def test_a_process_that_can_open_no_more_files(target: Path) -> None:
    check_kept(target, "full")


@pytest.mark.root
def test_processes_that_see_the_process_table_of_another_namespace(
    target: Path,
) -> None:
    """The number of the process that saves is that of a process outside, which ends."""
    outside = subprocess.Popen(["sleep", "600"])
    # The first process has an input of its own, which never ends: it must not take bash's line.
    inside = f"""
mkfifo {target}.never && exec 3<>{target}.never
echo {outside.pid - 1} > /proc/sys/kernel/ns_last_pid
"$@" wait <&3 & first=$!
[ $first = {outside.pid} ] || exit 9
read line
"$@" "" </dev/null >/dev/null || exit 8
kill -0 $first || exit 7
ls -A {target.parent}
"""
    alone = ["unshare", "--pid", "--fork", "--kill-child"]
    with subprocess.Popen(
        [*alone, "bash", "-c", inside, "bash", sys.executable, "-c", PROGRAM, target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        first = set(process.stdout.readline().split()) - {"c-other", "c.never"}
        outside.kill()
        outside.wait()
        process.stdin.write("\n")
        process.stdin.flush()
        left = set(process.stdout.read().split())
    assert process.returncode == 0
    assert len(first) == 1
    assert first <= left


@pytest.mark.parametrize("do", ["wait", "thread"])
def test_a_process_whose_first_thread_has_ended(target: Path, do: str) -> None:
    """Such a process lives. A process that was killed does not, even if nobody asks for it."""
    with other(target, do) as process:
        assert process.stdout is not None
        process.stdout.readline()
        before = staging(target)
        if do == "wait":
            process.send_signal(signal.SIGKILL)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        queue = AsyncCallsQueue()
        state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(10))}
        queue.schedule_async_request(
            megackpt.save(state, target, async_sharded_save=True)
        )
        assert before.isdisjoint(staging(target)) == (do == "wait")
        queue.close(abort=True)
        process.communicate("\n")
    if do == "thread":
        assert megackpt.load_plain_tensors(target)["w"].tolist() == [0.0] * 10
