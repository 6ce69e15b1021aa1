"""Asynchronous saves whose process ends, whose group is gone, which some ranks abort; and many of them, at random."""

from __future__ import annotations

import math
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
import torch.distributed as dist

import megackpt
from megackpt import AsyncCallsQueue, AsyncRequest, ShardedTensor
from megackpt.errors import RankLost, StorageError
from tests.faults.share import part

SOON = timedelta(seconds=20)

SLOW = '''
import os, time
from pathlib import Path
from megackpt.backends.torch_dist import TorchDist

class Slow(TorchDist):
    """Has written all, and does not come to an end."""
    def write(self, root, plan, data):
        result = super().write(root, plan, data)
        Path("beginning").write_text(str(os.getpid()))
        os.rename("beginning", "begun")  # never seen empty
        time.sleep(1000)
        return result
'''

DRIPPING = '''
import time
from pathlib import Path
from megackpt.backends import Source
from megackpt.backends.torch_dist import TorchDist

class Dripping(Source):
    """Tells which rows are taken, each of which takes a while."""
    def __init__(self, data):
        self.data = data
    def blocks(self, row):
        time.sleep(0.002)
        with Path("begun").open("a") as file:
            print(row, file=file)
        return self.data.blocks(row)

class Slow(TorchDist):
    def write(self, root, plan, data):
        return super().write(root, plan, Dripping(data))
'''

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch, megackpt
from megackpt import AsyncCallsQueue, ShardedTensor
from slow import Slow

megackpt.limits.EXIT_SECONDS = megackpt.limits.WORKER_STOP_SECONDS = 1.0

def state(value):
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((1000,), value)), "value": value}

megackpt.save(state(1.0), "c")
queue = AsyncCallsQueue(persistent=sys.argv[1] == "process")
queue.schedule_async_request(megackpt.save(state(2.0), "c", Slow(), async_sharded_save=True))
while not Path("begun").exists():
    time.sleep(0.01)
"""

ENDS = {
    "end of main": ("", 0),
    "exit": ("sys.exit(3)", 3),
    "exception": ("raise ValueError('training failed')", 1),
    "at once": ("os._exit(4)", 4),
    "terminated": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "terminated, and ends in order": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\nos.kill(os.getpid(), signal.SIGTERM)", 5,
    ),
}  # fmt: skip
TELLING = {"end of main", "exit", "exception", "terminated, and ends in order"}


def gone(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        )
    except FileNotFoundError:
        return True


def started(folder: Path, later: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
    )
    return subprocess.Popen(
        [sys.executable, "script.py", later], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("later", "ways"),
    [
        pytest.param("thread", ["exception", "terminated"], marks=pytest.mark.slow),
        ("process", ["end of main", "at once"]),
        pytest.param("thread", list(ENDS), marks=pytest.mark.campaign),
        pytest.param("process", list(ENDS), marks=pytest.mark.campaign),
    ],
)
def test_the_process_ends_with_a_save_in_flight(
    tmp_path: Path, later: str, ways: list[str]
) -> None:
    """The disk hangs: the loss is one line, the old checkpoint stands, and the next save clears up."""
    processes = {}
    for how in ways:
        folder = tmp_path / how
        folder.mkdir()
        (folder / "slow.py").write_text(SLOW)
        (folder / "script.py").write_text(SCRIPT + ENDS[how][0])
        processes[how] = started(folder, later)
    for how, process in processes.items():
        out, err = process.communicate(timeout=120)
        folder, told = tmp_path / how, (how, out, err)
        assert process.returncode == ENDS[how][1], told
        assert out == "", told
        assert err.count("Traceback") == (how == "exception"), told
        assert err.count("before these saves are committed") == (how in TELLING), told
        assert "Fatal" not in err, told
        assert megackpt.load({"value": 0.0}, folder / "c")["value"] == 1.0, told
        if later == "process":
            writer = int((folder / "begun").read_text())
            while not gone(writer):
                time.sleep(0.01)
        megackpt.save(
            {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3)), "value": 3.0},
            folder / "c",
        )
        assert megackpt.load({"value": 0.0}, folder / "c")["value"] == 3.0, told
        assert {p.name for p in folder.iterdir()} - {"__pycache__"} == {
            "c", "begun", "script.py", "slow.py",
        }, told  # fmt: skip


@pytest.mark.parametrize(
    "how", ["end of main", pytest.param("exception", marks=pytest.mark.slow)]
)
def test_one_process_writes_to_the_end_first(tmp_path: Path, how: str) -> None:
    (tmp_path / "slow.py").write_text(DRIPPING)
    many = '{f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", torch.ones(9)) for i in range(400)}'
    (tmp_path / "script.py").write_text(
        SCRIPT.replace("state(2.0)", many) + ENDS[how][0]
    )
    process = started(tmp_path, "thread")
    told = process.communicate(timeout=120)
    assert process.returncode == ENDS[how][1], told
    assert "before these saves are committed" not in told[1], told
    assert len((tmp_path / "begun").read_text().splitlines()) >= 400, told
    assert len(megackpt.load_tensors_metadata(tmp_path / "c")) == 400, told
    assert {p.name for p in tmp_path.iterdir()} - {"__pycache__"} == {
        "c",
        "begun",
        "script.py",
        "slow.py",
    }


def state(value: float) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    w = ShardedTensor.from_rank_offsets("w", torch.full((500,), value), (0, rank, size))
    return {"w": w, "value": value}


def saved(value: float, directory: str) -> AsyncRequest:
    request = megackpt.save(
        state(value), directory, async_sharded_save=True, timeout=SOON
    )
    assert request is not None
    return request


def begin(queue: AsyncCallsQueue, value: float, directory: str) -> None:
    queue.schedule_async_request(saved(value, directory))


def begun(value: float, directory: str) -> AsyncCallsQueue:
    queue = AsyncCallsQueue()
    begin(queue, value, directory)
    return queue


def value_in(directory: str) -> float:
    return float(megackpt.load_common_state_dict(directory)["value"])


def after_the_group(folder: str) -> None:
    """Destroyed before the save is finalized: by all, by one, with another one made since; or before it is aborted."""
    rank, where = dist.get_rank(), f"{folder}/c"

    def destroy() -> None:
        dist.destroy_process_group()

    def again(number: int) -> None:
        store = dist.FileStore(f"{folder}/again{number}", 2)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=2, timeout=SOON
        )

    queue = begun(1.0, where)
    destroy()
    queue.close()
    assert value_in(where) == 1.0
    again(1)
    queue = begun(2.0, where)
    destroy()
    again(2)
    queue.close()
    assert value_in(where) == 2.0
    dist.barrier()
    queue = begun(3.0, where)
    dist.barrier()
    if rank == 1:
        destroy()
    queue.close()
    assert value_in(where) == 3.0
    if rank == 0:
        destroy()
    again(3)
    queue = begun(4.0, where)
    finalized: list[int] = []
    queue.schedule_async_request(
        AsyncRequest(None, (), [lambda: finalized.append(rank)])
    )
    destroy()
    queue.close()
    assert (value_in(where), finalized) == (4.0, [rank])
    again(4)
    queue = begun(5.0, where)
    dist.barrier()
    destroy()
    queue.close(abort=True)
    again(5)
    assert value_in(where) == 4.0
    dist.barrier()
    begun(6.0, where).close()
    assert value_in(where) == 6.0
    dist.barrier()


def test_the_process_group_is_gone_before_the_save_is_finalized(
    ranks: Any, tmp_path: Path
) -> None:
    ranks(after_the_group, 2, tmp_path, timeout=120)
    assert sorted(
        p.name for p in tmp_path.iterdir() if not p.name.startswith("again")
    ) == ["c"]


def one_aborts(folder: str) -> None:
    """The others are told who, at once; all that was in flight is over, and the next save works."""
    rank, where = dist.get_rank(), f"{folder}/c"
    begun(1.0, where).close()
    dist.barrier()
    for number, who in enumerate([0, 1]):
        queue = begun(2.0, where)
        request = saved(2.0, f"{folder}/d")
        if rank != who and number == 1:  # it is scheduled after the loss is known
            while math.isinf(request.async_fn.group.lost_at):
                time.sleep(0.01)
        queue.schedule_async_request(request)
        if rank == who:
            queue.close(abort=True)
        else:
            with pytest.raises(RankLost, match=f"rank {who} gave it up") as caught:
                queue.maybe_finalize_async_calls(blocking=True)
            assert len(getattr(caught.value, "__notes__", ())) == 1  # the second save
            assert queue.get_num_unfinalized_calls() == 0
            queue.close()
        assert value_in(where) == 1.0 + 2 * number
        begun(3.0, where).close()
        assert value_in(where) == 3.0
        dist.barrier()
    begun(4.0, f"{folder}/d").close()
    assert value_in(f"{folder}/d") == 4.0
    dist.barrier()


def test_one_rank_aborts(ranks: Any, tmp_path: Path) -> None:
    ranks(one_aborts, 2, tmp_path, timeout=120)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "d"]


def contents(number: int, rank: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(100 * number + rank)
    return torch.randint(0, 256, (300_000,), dtype=torch.uint8, generator=dice)


def stressed(folder: str, saves: int) -> None:
    """Tensors change all the time; what is done is drawn alike on all ranks."""
    rank, size, dice = dist.get_rank(), dist.get_world_size(), random.Random(saves)
    queues = {
        later: AsyncCallsQueue(persistent=later == "process")
        for later in ("thread", "process")
    }
    held = torch.empty(300_000, dtype=torch.uint8)
    flying: dict[str, list[int]] = {later: [] for later in queues}
    stands: dict[str, int] = {}

    def place(number: int) -> str:
        return f"{folder}/{number % 5}"

    def check(directory: str, number: int) -> None:
        asked = {
            "w": ShardedTensor.from_rank_offsets(
                "w", torch.empty_like(held), (0, rank, size)
            ),
            "number": -1,
        }
        found = megackpt.load(asked, directory, timeout=SOON)
        assert found["number"] == number
        assert torch.equal(found["w"], contents(number, rank))

    def finalized(later: str, blocking: bool) -> None:
        failed = ""
        try:
            queues[later].maybe_finalize_async_calls(blocking)
        except StorageError as error:
            failed = str(error)
        over = [
            flying[later].pop(0)
            for _ in flying[later][queues[later].get_num_unfinalized_calls() :]
        ]
        for number in over[:-1] if failed else over:
            stands[place(number)] = number
        assert not failed or "was killed by SIGKILL" in failed, failed

    for number in range(saves):
        later = ("thread", "process")[number % 2]
        while any(
            place(number) == place(other)
            for others in flying.values()
            for other in others
        ):
            for each in queues:
                finalized(each, blocking=True)
        held.copy_(contents(number, rank))
        asked = {
            "w": ShardedTensor.from_rank_offsets("w", held, (0, rank, size)),
            "number": number,
        }
        request = megackpt.save(
            asked,
            place(number),
            dice.choice(["torch_dist", "zarr"]),
            async_sharded_save=True,
            timeout=SOON,
        )
        assert request is not None
        held.zero_()
        queues[later].schedule_async_request(request)
        flying[later].append(number)
        what = dice.random()
        if what < 0.15:
            for each, queue in queues.items():
                queue.close(abort=True)
                flying[each].clear()
            dist.barrier()
        elif what < 0.3:
            keeper = getattr(queues["process"]._worker, "_keeper", None)
            if (
                rank == number // 2 % size
                and keeper is not None
                and keeper.child is not None
            ):
                keeper.child.process.kill()
        elif what < 0.7:
            finalized(dice.choice(["thread", "process"]), blocking=False)
        if stands and dice.random() < 0.4:
            directory = dice.choice(sorted(stands))
            check(directory, stands[directory])
    for later, queue in queues.items():
        while flying[later]:
            finalized(later, blocking=True)
        queue.close()
    for directory, number in stands.items():
        check(directory, number)
    assert len(stands) >= 3
    dist.barrier()
    for number in range(5):  # removes what aborted saves have left
        megackpt.save({"number": -2}, place(number), timeout=SOON)


@pytest.mark.parametrize(
    ("size", "saves"),
    [(2, 8), pytest.param(3, part(60, least=20), marks=pytest.mark.campaign)],
)
def test_many_at_random(ranks: Any, tmp_path: Path, size: int, saves: int) -> None:
    """By threads and by processes, some of which are killed; with loads between, and aborts by all ranks."""
    ranks(stressed, size, tmp_path, saves, timeout=300)
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= set("01234"), left
