"""In a bucket, unchanged files are copied by the store, and each step stands for itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
import torch.distributed.checkpoint as dcp
import zarr

import megackpt
from megackpt import ShardedTensor, Strategy, limits
from megackpt.async_save import AsyncCallsQueue
from megackpt.checkpoint import open_checkpoint, remove
from megackpt.errors import NotACheckpoint
from megackpt.manager import CheckpointManager
from megackpt.planning import cache
from megackpt.saver import save_operation
from megackpt.storage import BucketStorage, client
from megackpt.testing import ThreadedGroup
from tests.azurite import Container
from tests.buckets import Bucket, Line, Request
from tests.saver import test_reuse_unchanged
from tests.saver.test_reuse_unchanged import FIGURES, TOWER, tensors
from tests.storage import test_azure, test_bucket_faults as faults

REUSING = Strategy(reuse_unchanged=True, frozen=TOWER)
ZARR = Strategy("zarr", reuse_unchanged=True, frozen=TOWER)
ROWS = 1024
"""The tower has 8 MiB, and is sent in parts."""

server = test_azure.server
container = test_azure.container
written = test_reuse_unchanged.written


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    cache.forget()
    monkeypatch.setattr(save_operation, "_named_refusals", set())
    monkeypatch.setattr(client, "PAUSE", 0.001)
    monkeypatch.setattr(client, "LONGEST_PAUSE", 0.01)


def is_copy(request: Request) -> bool:
    return b"\nx-amz-copy-source:" in request.head.lower()


class Uploads:
    """Counts the bytes that go up, and the copies."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.bytes = 0
        self.copies = 0

    def _count(self, request: Request) -> None:
        self.bytes += len(request.body)
        self.copies += is_copy(request)

    def of(self, work: Callable[[], object]) -> int:
        self.bytes = self.copies = 0
        self._line.fault = self._count
        work()
        return self.bytes


def saved(
    url: str, step: int, strategy: Strategy = REUSING, rows: int = 64, **options: Any
) -> Any:
    state = {**megackpt.sharded(tensors(step, rows)), "step": step}
    return megackpt.save(state, url, strategy, **options)


def check(url: str, step: int, rows: int = 64) -> None:
    assert not megackpt.verify(url).problems
    expected = tensors(step, rows)
    asked = {k: torch.zeros_like(v) for k, v in expected.items()}
    state = {**megackpt.sharded(asked), "step": None}
    loaded = megackpt.load(state, url, verify=True)
    assert loaded["step"] == step
    for key, value in expected.items():
        assert torch.equal(loaded[key], value), key


def assert_tidy(bucket: Bucket, url: str) -> None:
    """The record, and the folder that it names, are all that is below the URL."""
    above = url.removeprefix(f"{bucket.url}/") + "/"
    keys = [*bucket.keys()]
    below = [key.removeprefix(above) for key in keys if key.startswith(above)]
    names = {key.split("/")[0] for key in below}
    save_id = open_checkpoint(url).manifest.save_id
    assert names == {"megackpt.commit", f"megackpt-{save_id}"}


def fetched(url: str, folder: Path) -> Path:
    """The folder that the record names, copied to a disk as another tool would."""
    storage: Any = open_checkpoint(url).storage
    for name in storage.objects():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(storage.get(name))
    return folder


def check_stock(folder: Path, step: int, rows: int = 64) -> None:
    """By stock torch, zarr and tensorstore."""
    expected = tensors(step, rows)
    if (folder / ".metadata").exists():
        asked = {k: torch.zeros_like(v) for k, v in expected.items()}
        dcp.load(asked, checkpoint_id=folder, no_dist=True)
        assert all(torch.equal(asked[k], v) for k, v in expected.items())
        return
    group = zarr.open_group(folder, mode="r")
    for key, value in expected.items():
        assert np.array_equal(np.asarray(group[key]), value.numpy()), key
        kvstore = {"driver": "file", "path": str(folder / key)}
        spec = {"driver": "zarr3", "kvstore": kvstore}
        read = ts.open(spec, open=True).result().read().result()
        assert np.array_equal(read, value.numpy()), key


@pytest.mark.parametrize("way", ["at once", "thread", "process", "zarr", "zarr, zstd"])
def test_frozen_tensors_are_sent_once(
    tmp_path: Path, bucket: Bucket, line: Line, note: Callable[..., None], way: str
) -> None:
    strategy = REUSING
    if way.startswith("zarr"):
        compression = "zstd" if "zstd" in way else None
        options = {"compression": compression}
        strategy = Strategy("zarr", None, options, reuse_unchanged=True, frozen=TOWER)
    uploads = Uploads(line)
    with closing(AsyncCallsQueue(way == "process")) as queue:

        def save(step: int) -> None:
            asynchronous = way in ("thread", "process")
            url = f"{bucket.url}/{step}"
            request = saved(url, step, strategy, ROWS, async_sharded_save=asynchronous)
            if request is not None:
                queue.schedule_async_request(request)
                queue.maybe_finalize_async_calls(blocking=True)

        sent = [uploads.of(lambda step=step: save(step)) for step in range(4)]
    assert uploads.copies == (8 if way.startswith("zarr") else 1)
    note(FIGURES, f"bucket, {way}", f"{max(sent[1:]) / sent[0]:.4f}")
    assert max(sent[1:]) <= 0.21 * sent[0]
    for step in range(4):
        check(f"{bucket.url}/{step}", step, ROWS)
        check_stock(fetched(f"{bucket.url}/{step}", tmp_path / str(step)), step, ROWS)
        remove(f"{bucket.url}/{step}")


def test_equal_digests_of_two_saves_are_enough(bucket: Bucket, line: Line) -> None:
    uploads = Uploads(line)
    sent = []
    for step in range(5):
        url, strategy = f"{bucket.url}/{step}", Strategy(reuse_unchanged=True)
        sent.append(uploads.of(lambda s=step, u=url, t=strategy: saved(u, s, t, ROWS)))
    assert min(sent[:3]) > 0.99 * sent[0]
    assert max(sent[3:]) <= 0.21 * sent[0]


def test_a_save_replaces_the_step_whose_files_it_copies(
    bucket: Bucket, line: Line
) -> None:
    uploads = Uploads(line)
    url = f"{bucket.url}/latest"
    sent = [
        uploads.of(lambda step=step: saved(url, step, REUSING, ROWS))
        for step in range(3)
    ]
    assert max(sent[1:]) <= 0.21 * sent[0]
    check(url, 2, ROWS)
    assert_tidy(bucket, url)


def test_a_manager_copies_the_step_that_it_has_restored(
    bucket: Bucket, line: Line
) -> None:
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 64, device="cpu"), torch.nn.Linear(64, 8, device="cpu")
    )
    net[0].requires_grad_(False)
    uploads = Uploads(line)

    def run(steps: range) -> None:
        strategy, root = Strategy(reuse_unchanged=True), f"{bucket.url}/run"
        with CheckpointManager(root, strategy, keep_last=2) as manager:
            if steps.start:
                manager.restore(model=net)
            for step in steps:
                with torch.no_grad():
                    for parameter in net[1].parameters():
                        parameter.add_(1)
                manager.save(step, model=net)

    uploads.of(lambda: run(range(3)))
    assert uploads.copies == 2
    cache.forget()  # as a new process
    uploads.of(lambda: run(range(3, 5)))
    assert uploads.copies == 2
    other = torch.nn.Sequential(
        torch.nn.Linear(64, 64, device="cpu"), torch.nn.Linear(64, 8, device="cpu")
    )
    with CheckpointManager(f"{bucket.url}/run") as manager:
        assert [step.step for step in manager.steps()] == [3, 4]
        manager.restore(model=other)
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_ranks_copy_their_files(bucket: Bucket, line: Line) -> None:
    uploads = Uploads(line)
    named = tensors(0)

    def work(group: ThreadedGroup, url: str, strategy: Strategy) -> None:
        state = {
            key: ShardedTensor.from_rank_offsets(
                key,
                value[32 * group.rank : 32 * group.rank + 32].contiguous(),
                (0, group.rank, 2),
            )
            for key, value in named.items()
        }
        megackpt.save({**state, "step": 0}, url, strategy, process_group=group)

    urls = [f"{bucket.url}/{number}" for number in range(2)]
    ThreadedGroup.run(2, lambda group: work(group, urls[0], REUSING))
    again = Strategy(reuse_unchanged=True, frozen=TOWER, reuse_from=urls[0])
    uploads.of(lambda: ThreadedGroup.run(2, lambda group: work(group, urls[1], again)))
    assert uploads.copies == 2
    remove(urls[0])
    check(urls[1], 0)


@pytest.mark.parametrize("fault", ["no source", 403, 409, 501, "reset", "truncate"])
def test_a_refused_copy_is_written_and_said_once(
    bucket: Bucket,
    line: Line,
    caplog: pytest.LogCaptureFixture,
    fault: int | str,
) -> None:
    def refuse(request: Request) -> int | str | None:
        if not is_copy(request):
            return None
        if fault == "no source":  # the store makes an empty object
            request.without("x-amz-copy-source")
            return None
        return fault

    line.fault = refuse
    for strategy in (REUSING, ZARR):
        for step in range(3):
            url = f"{bucket.url}/{strategy.backend}/{step}"
            saved(url, step, strategy)
            check(url, step)
            assert_tidy(bucket, url)
    said = [r for r in caplog.records if "written again" in r.getMessage()]
    text = said[0].getMessage()
    assert f"a copy within {bucket.url} failed: " in text
    assert len(said) == 1
    if fault not in ("reset", "truncate"):
        assert str(fault) in text or "another size" in text
    assert not bucket.uploads()


@pytest.mark.parametrize("fault", faults.FAULTS)
def test_a_copy_meets_a_fault(bucket: Bucket, line: Line, fault: str) -> None:
    """Once, then always. A late copy changes nothing."""
    for strategy in (REUSING, ZARR):
        for times in (1, 1000):
            url = f"{bucket.url}/{strategy.backend}/{times}"
            saved(f"{url}/0", 0, strategy)
            left = [times]

            def choose(request: Request, left: list[int] = left) -> faults.Fault | None:
                left[0] -= is_copy(request)
                return (
                    faults.FAULTS[fault] if is_copy(request) and left[0] >= 0 else None
                )

            line.fault = choose
            saved(f"{url}/1", 1, strategy)
            assert left[0] < times
            line.fault = lambda _: None
            line.repeat()
            check(f"{url}/1", 1)
            assert_tidy(bucket, f"{url}/1")


@pytest.mark.parametrize("what", ["directory", "other bucket", "removed", "truncated"])
def test_what_cannot_be_copied_is_written(
    tmp_path: Path,
    bucket: Bucket,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    before = f"{bucket.url}/0"
    expected = f"the step before is not in {bucket.url}"
    if what == "directory":
        before = str(tmp_path / "0")
    if what == "other bucket":
        bucket.client.create_bucket(Bucket=f"{bucket.name}-other")
        before = f"{bucket.url}-other/0"
    saved(before, 0)
    if what in ("removed", "truncated"):
        expected = "a file of the step before is missing or truncated"
        (key,) = [key for key in [*bucket.keys()] if "/unchanged/" in key]
        if what == "removed":
            bucket.client.delete_object(Bucket=bucket.name, Key=key)
        else:
            bucket.client.put_object(Bucket=bucket.name, Key=key, Body=b"short")
    saved(f"{bucket.url}/1", 1)
    assert expected in caplog.text
    check(f"{bucket.url}/1", 1)


KILLED = """
import os, sys
from megackpt.storage import client
from tests.saver.test_copies_in_buckets import TOWER, Strategy, saved

url, before, backend, at, when = sys.argv[1:]
strategy = Strategy(backend, reuse_unchanged=True, frozen=TOWER)
saved(before, 1, strategy)  # a new process knows no step before
obstore, left = client.load_obstore(), [int(at)]
copy, put = obstore.copy, obstore.put

def dying(*args, **named):
    left[0] -= 1
    if left[0] == 0 and when == "before":
        os._exit(9)
    copy(*args, **named)
    if left[0] == 0 and when == "after":
        os._exit(9)

def committing(store, key, *args, **named):
    if when == "commit" and key.endswith("megackpt.commit"):
        os._exit(9)
    return put(store, key, *args, **named)

obstore.copy, obstore.put = dying, committing
saved(url, 2, strategy)
"""


@pytest.mark.parametrize(
    ("name", "backend", "at", "when"),
    [
        ("2", "torch_dist", 1, "before"),
        ("1", "torch_dist", 1, "after"),
        ("1", "torch_dist", 0, "commit"),
        ("2", "zarr", 4, "after"),
    ],
)
def test_a_kill_leaves_the_old_steps(
    bucket: Bucket, name: str, backend: str, at: int, when: str
) -> None:
    """``name``: of a new step, or of the step whose files are copied."""
    strategy = Strategy(backend, reuse_unchanged=True, frozen=TOWER)
    saved(f"{bucket.url}/0", 0, strategy)
    url, before = f"{bucket.url}/{name}", f"{bucket.url}/1"
    command = [sys.executable, "-c", KILLED, url, before, backend, str(at), when]
    assert subprocess.run(command, check=False).returncode == 9
    for step in range(2):
        check(f"{bucket.url}/{step}", step)
    if name == "2":
        with pytest.raises(NotACheckpoint):
            open_checkpoint(url)
    saved(url, 3, strategy)
    check(url, 3)
    check(f"{bucket.url}/0", 0)
    assert_tidy(bucket, url)


@pytest.mark.azurite
@pytest.mark.parametrize("late", [0, 3, 1000])
def test_copies_of_azure_are_waited_for(
    container: Container,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    written: list[int],
    late: int,
) -> None:
    """Until a copy is complete, Azure shows an empty object. Azurite copies before it answers."""
    if late == 1000:
        monkeypatch.setattr(limits, "COPY_SECONDS", 0.05)
    copy, size, left = BucketStorage.copy, BucketStorage.size, [0]

    def copying(self: BucketStorage, *args: Any) -> str:
        left[0] = late
        try:
            return copy(self, *args)
        finally:
            left[0] = 0

    def empty(self: BucketStorage, name: str) -> int | None:
        if type(self) is BucketStorage and left[0]:
            left[0] -= 1
            return 0
        return size(self, name)

    monkeypatch.setattr(BucketStorage, "copy", copying)
    monkeypatch.setattr(BucketStorage, "size", empty)
    for step in range(3):
        saved(f"{container.url}/{step}", step)
    is_given_up = "failed: the object has another size" in caplog.text
    assert is_given_up == (late == 1000)
    assert (max(written[1:]) <= 0.21 * written[0]) == (late < 1000)
    for step in range(3):
        check(f"{container.url}/{step}", step)
        remove(f"{container.url}/{step}")
