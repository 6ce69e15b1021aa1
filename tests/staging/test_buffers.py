"""Buffers for copies of a save: shared with other processes, reused, capped, and not shared after a fork."""

from __future__ import annotations

import errno
import io
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import megackpt
from megackpt import CheckpointManager, ShardedTensor
from megackpt.async_save import AsyncCallsQueue, queue
from megackpt.errors import StorageError
from megackpt.loader import load_operation
from megackpt.planning.box import Box
from megackpt.planning.manifest import Declaration, Declarations, ShardId, TensorMeta
from megackpt.planning.save_plan import plan_save
from megackpt.staging import buffers, copy
from megackpt.staging.buffers import Buffer, BufferPool, HostCopy
from megackpt.testing import ThreadedGroup

MIB = 1 << 20


def held(pool: BufferPool) -> int:
    """Bytes of all buffers, leased or free."""
    pool._collect_returned()
    return sum(buffer.size for buffer in [*pool._free, *pool._leased])


def leased(pool: BufferPool, size: int, cap: int = 64 * MIB) -> Buffer:
    buffer = pool.lease(size, cap)
    assert buffer is not None
    return buffer


def child(
    code: str, *args: object, fds: tuple[int, ...] = (), data: bytes = b""
) -> str:
    """The output of this code in another Python."""
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(
        command, input=data, capture_output=True, pass_fds=fds, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_another_process_sees_the_same_memory() -> None:
    buffer = Buffer.allocate(2 * MIB)
    buffer.memory[:3] = 1, 2, 3
    assert buffer.fd is not None
    code = """if True:
        import sys
        from megackpt.staging.buffers import Buffer
        buffer = Buffer(int(sys.argv[2]), int(sys.argv[1]))
        print(buffer.memory[:3].tolist())
        buffer.memory[-1] = 9
        """
    assert child(code, buffer.fd, buffer.size, fds=(buffer.fd,)) == "[1, 2, 3]\n"
    assert buffer.memory[-1] == 9
    with pytest.raises(TypeError, match="descriptor"):
        pickle.dumps(buffer)


class Sender(pickle.Pickler):
    """Replaces buffers by their descriptors."""

    def persistent_id(self, value: Any) -> Any:
        return (value.fd, value.size) if isinstance(value, Buffer) else None


def test_a_copy_is_read_by_another_process_without_torch() -> None:
    boxes = {"a": Box.whole((2, 3)), "b": Box.whole(()), "c": Box.whole((0, 4))}
    dtypes = {"a": "int32", "b": "complex128", "c": "bool"}
    rows = [
        Declaration(
            ShardId(k, boxes[k]), TensorMeta(boxes[k].shape, dtypes[k]), 0, False, 1, 0
        )
        for k in boxes
    ]
    (plan,), _ = plan_save([Declarations.of(rows)])
    length = np.array([item.nbytes for item in plan.rows()])
    buffer = Buffer.allocate(4096)
    assert buffer.fd is not None
    buffer.memory[:200] = np.arange(200)
    out = io.BytesIO()
    Sender(out).dump(HostCopy(plan, buffer, np.array([0, 64, 128]), length))
    code = """if True:
        import pickle, sys
        from megackpt.staging.buffers import Buffer
        class Receiver(pickle.Unpickler):
            def persistent_load(self, sent): return Buffer(sent[1], sent[0])
        copy = Receiver(sys.stdin.buffer).load()
        for row, item in enumerate(copy.plan.rows()):
            (block,) = copy.blocks(row)
            print(item.shard.key, len(block), bytes(block)[:2])
        assert "torch" not in sys.modules
        """
    said = child(code, fds=(buffer.fd,), data=out.getvalue())
    lines = [
        f"{item.shard.key} {item.nbytes} {bytes(range(64 * n, 64 * n + min(2, item.nbytes)))}"
        for n, item in enumerate(plan.rows())
    ]
    assert said.splitlines() == lines


class Busy:
    """The copy of a device, complete when it has been waited for."""

    def __init__(self, buffer: Buffer, value: int) -> None:
        self.buffer, self.value = buffer, value

    def synchronize(self) -> None:
        self.buffer.memory[:] = self.value


def test_readers_wait_for_devices() -> None:
    row = Declaration(
        ShardId("a", Box.whole((5,))), TensorMeta((5,), "uint8"), 0, False, 5, 0
    )
    (plan,), _ = plan_save([Declarations.of([row])])
    buffer = Buffer.allocate(4096)
    copy = HostCopy(plan, buffer, np.array([0]), np.array([5]))
    buffer.pending.append(Busy(buffer, 7))
    assert next(copy.blocks(0)) == bytes([7] * 5)
    assert buffer.pending == []
    buffer.pending.append(Busy(buffer, 8))
    assert next(copy.blocks(0)) == bytes([8] * 5)
    buffer.pending.append(Busy(buffer, 9))
    Sender(io.BytesIO()).dump(copy)
    assert buffer.memory[0] == 9


def test_the_same_buffer_is_used_again() -> None:
    pool = BufferPool()
    first = leased(pool, 10 * MIB)
    pool.give_back(first)
    pool.give_back(first)
    assert leased(pool, 9 * MIB) is first
    assert held(pool) == 10 * MIB


def test_it_still_fits_a_state_that_grew_a_little() -> None:
    pool = BufferPool()
    first = leased(pool, 10 * MIB + 100)
    pool.give_back(first)
    assert leased(pool, 10 * MIB + 5000) is first


def test_a_small_save_does_not_take_a_large_buffer() -> None:
    pool = BufferPool()
    large = leased(pool, 10 * MIB)
    pool.give_back(large)
    assert leased(pool, MIB).size == MIB


def test_without_memfd_the_memory_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, "not here")

    monkeypatch.setattr("os.memfd_create", refuse)
    buffer = leased(BufferPool(), MIB)
    assert buffer.fd is None
    buffer.memory[:] = 1


@pytest.mark.parametrize("name", ["memfd_create", "ftruncate"])
def test_an_error_of_the_system_is_a_storage_error_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    pool = BufferPool()
    with monkeypatch.context() as patched:
        patched.setattr(f"os.{name}", refuse)
        with pytest.raises(StorageError, match="Too many open files"):
            pool.lease(MIB, MIB)
    assert leased(pool, MIB, MIB).fd is not None  # not the fallback without memfd


def test_what_recent_leases_did_not_use_is_freed() -> None:
    pool = BufferPool()
    for _ in range(3):
        for buffer in [leased(pool, 10 * MIB), leased(pool, 10 * MIB)]:
            pool.give_back(buffer)
    assert held(pool) == 20 * MIB
    for _ in range(20):
        pool.give_back(leased(pool, MIB))
    assert held(pool) == MIB


def test_large_and_small_saves_by_turns_keep_a_buffer_each() -> None:
    pool = BufferPool()
    seen = set()
    for _ in range(20):
        large, small = leased(pool, 10 * MIB), leased(pool, 2 * MIB)
        seen |= {large, small}
        pool.give_back(small)
        pool.give_back(large)
    assert len(seen) == 2
    assert held(pool) == 12 * MIB


def test_free_buffers_count_under_the_cap() -> None:
    pool = BufferPool()
    three = [leased(pool, size * MIB, 12 * MIB) for size in (3, 4, 5)]
    for buffer in three:
        pool.give_back(buffer)
    leased(pool, 7 * MIB, 12 * MIB)
    assert held(pool) <= 12 * MIB


def test_what_exceeds_the_cap_is_refused_until_others_give_back() -> None:
    pool = BufferPool()
    first = leased(pool, 6 * MIB, 10 * MIB)
    assert pool.lease(5 * MIB, 10 * MIB) is None
    pool.give_back(first)
    assert leased(pool, 10 * MIB, 10 * MIB).size == 10 * MIB


def test_a_buffer_can_be_given_back_while_the_pool_is_locked() -> None:
    """The garbage collector may do so at any point."""
    pool = BufferPool()
    buffer = leased(pool, MIB, MIB)
    with pool._lock:
        pool.give_back(buffer)
    assert leased(pool, MIB, MIB) is buffer


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3 << 20)), max_size=30),
    st.integers(4, 12),
)
def test_leases_do_not_overlap_or_exceed_the_cap(
    steps: list[tuple[int, int]], mib: int
) -> None:
    pool, cap = BufferPool(), mib * MIB
    leases: dict[int, tuple[Buffer, int]] = {}
    for slot, size in steps:
        if slot in leases:
            pool.give_back(leases.pop(slot)[0])
        else:
            buffer = pool.lease(size, cap)
            in_use = sum(each.size for each, _ in leases.values())
            assert (buffer is None) == (in_use + size > cap)
            if buffer is not None:
                leases[slot] = buffer, size
        assert len({each for each, _ in leases.values()}) == len(leases)
        assert all(each.memory.nbytes >= size for each, size in leases.values())
        assert sum(each.size for each, _ in leases.values()) <= cap + len(leases)
    pool.lease(0, cap)
    assert held(pool) <= cap + len(leases) + 1


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    code = """if True:
        import os
        from megackpt.staging.buffers import POOL
        size = 1 << 20
        def held():
            POOL._collect_returned()
            return sum(buffer.size for buffer in [*POOL._free, *POOL._leased])
        free, leased = POOL.lease(size, 4 * size), POOL.lease(size, 4 * size)
        free.memory[:] = leased.memory[:] = 1
        POOL.give_back(free)
        with POOL._lock:  # another thread may hold it
            pid = os.fork()
            if not pid:
                POOL.give_back(leased)
                assert held() == 0
                mine = POOL.lease(size, size)
                mine.memory[:] = 2
                os._exit(0 if held() == size else 1)
            assert os.waitpid(pid, 0)[1] == 0
        assert (free.memory == 1).all() and (leased.memory == 1).all()
        assert held() == 2 * size
        print("as before")
        """
    assert child(code) == "as before\n"


def test_prepared_memory_is_what_the_next_copy_takes() -> None:
    pool = BufferPool()
    pinned: list[Buffer] = []
    assert pool.prepare(2 * MIB, 8 * MIB, pinned.append)
    assert leased(pool, 2 * MIB + 5, 8 * MIB) is pinned[0]
    before = held(pool)
    assert not pool.prepare(7 * MIB, 8 * MIB, pinned.append)
    assert held(pool) == before


def test_a_copy_waits_for_the_thread_that_prepares_its_memory() -> None:
    pool = BufferPool()
    order: list[Buffer | str] = []

    def lease() -> None:
        order.append(leased(pool, 2 * MIB, 8 * MIB))

    def pin(buffer: Buffer) -> None:
        thread.start()
        while not pool._lock.locked():  # it has the pool, and waits for the buffer
            time.sleep(0.001)
        order.extend(("pinned", buffer))

    thread = threading.Thread(target=lease)
    assert pool.prepare(2 * MIB, 8 * MIB, pin)
    thread.join()
    assert order == ["pinned", order[1], order[1]]


def test_a_copy_does_not_wait_for_memory_of_a_wrong_size() -> None:
    pool = BufferPool()
    taken: list[Buffer] = []
    assert pool.prepare(
        5 * MIB, 8 * MIB, lambda _: taken.append(leased(pool, 6 * MIB, 8 * MIB))
    )
    assert held(pool) == taken[0].size


def test_a_queue_prepares_staging_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = BufferPool()
    monkeypatch.setattr(copy, "POOL", pool)
    AsyncCallsQueue(staging_bytes=3 * MIB).close()
    join_preparing()
    assert 3 * MIB <= held(pool) <= 4 * MIB
    AsyncCallsQueue(staging_bytes=1 << 60).close()
    join_preparing()
    assert "1,152,921,504,606,846,976 does not fit" in caplog.text
    for wrong in (-1, False, 1.5):
        with pytest.raises(ValueError, match="staging_bytes is a number of bytes or"):
            AsyncCallsQueue(staging_bytes=wrong)  # type: ignore[arg-type]


def join_preparing() -> None:
    for thread in threading.enumerate():
        if thread.name == "megackpt-staging":
            thread.join()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> BufferPool:
    """The pool of a new process, in which much memory is available."""
    new = BufferPool()
    for module in (buffers, copy, queue, load_operation):
        monkeypatch.setattr(module, "POOL", new)
    monkeypatch.setattr(copy, "_LOOKS_EVERY", 0.001)
    return new


def mebibyte(key: str = "a", replica: int = 0) -> ShardedTensor:
    value = torch.ones(1 << 18)
    return ShardedTensor.from_rank_offsets(key, value, replica_id=replica)


def prepared_by(pool: BufferPool) -> Buffer:
    """The buffer that a thread is preparing or has prepared."""
    while not pool.has_guess:
        assert "megackpt-staging" in [each.name for each in threading.enumerate()]
    return pool._free[0]


@pytest.mark.parametrize("order", ["queue, load", "load, queue"])
def test_a_load_tells_the_size_of_the_first_asynchronous_save(
    order: str, tmp_path: Path, pool: BufferPool
) -> None:
    state = {"a": mebibyte()}
    megackpt.save(state, tmp_path / "first")
    AsyncCallsQueue(staging_bytes=0)
    for step in order.split(", "):
        join_preparing()
        assert not pool.has_guess
        if step == "queue":
            AsyncCallsQueue()
        else:
            megackpt.load(state, tmp_path / "first")
    prepared = prepared_by(pool)
    assert MIB <= prepared.size <= 2 * MIB
    request = megackpt.save(state, tmp_path / "next", async_sharded_save=True)
    assert request is not None
    assert pool._leased == {prepared}
    request.execute_sync()
    join_preparing()  # it ends with the first save
    AsyncCallsQueue()
    megackpt.load(state, tmp_path / "next")
    join_preparing()
    assert held(pool) == prepared.size


def test_each_replica_expects_its_share(tmp_path: Path, pool: BufferPool) -> None:
    def work(group: ThreadedGroup) -> None:
        state = {"a": mebibyte(replica=group.rank)}
        megackpt.save(state, tmp_path, process_group=group)
        megackpt.load(state, tmp_path, process_group=group)

    ThreadedGroup.run(4, work)
    assert pool.expected == MIB // 4


def test_a_load_of_a_part_tells_no_size(tmp_path: Path, pool: BufferPool) -> None:
    megackpt.save({"a": mebibyte(), "b": mebibyte("b")}, tmp_path)
    megackpt.load({"a": mebibyte()}, tmp_path)
    assert not pool.expected


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_asynchronous_manager_expects_a_save(
    asynchronous: bool, tmp_path: Path, pool: BufferPool
) -> None:
    local = megackpt.LocalTier(tmp_path / "local", every=1)
    root = tmp_path / "run"
    with CheckpointManager(root, asynchronous=asynchronous, local=local):
        assert pool.is_expecting == asynchronous
    assert not pool.is_expecting


def test_the_guess_of_a_closed_queue_is_freed(pool: BufferPool) -> None:
    pool.expected = MIB
    closed = AsyncCallsQueue()
    prepared_by(pool)
    closed.close()
    join_preparing()
    assert not held(pool)


def test_memory_that_was_asked_for_stays(tmp_path: Path, pool: BufferPool) -> None:
    """A small first save, and a guess that is given up, leave it to later saves."""
    asked = AsyncCallsQueue(staging_bytes=64 * MIB)
    join_preparing()
    pool.expected = MIB
    AsyncCallsQueue().close()
    join_preparing()
    request = megackpt.save({"a": mebibyte()}, tmp_path, async_sharded_save=True)
    asked.schedule_async_request(request)
    asked.close()
    assert max(buffer.size for buffer in pool._free) >= 64 * MIB


def test_a_guess_leaves_memory_to_others(
    pool: BufferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    available = [16 * MIB - 1]
    monkeypatch.setattr(copy, "available_memory", lambda: available[0])
    pool.expected = MIB
    AsyncCallsQueue()
    join_preparing()
    assert not held(pool)
    available[0] += 1
    AsyncCallsQueue()
    assert prepared_by(pool).size >= MIB
    available[0] = MIB - 1
    join_preparing()
    assert not held(pool)


def test_a_guess_survives_a_system_without_threads(
    pool: BufferPool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    AsyncCallsQueue()
    monkeypatch.setattr(copy.threading, "Thread", NoThread)
    pool.expected = MIB
    copy.prepare()
    assert "is not prepared: can't start new thread" in caplog.text


def test_a_save_that_exceeds_its_cap_frees_the_guess(
    tmp_path: Path, pool: BufferPool
) -> None:
    assert pool.prepare(2 * MIB, 8 * MIB, lambda _: None, is_guess=True)
    strategy = megackpt.Strategy("torch_dist", staging_memory=MIB)
    state = {"a": mebibyte(), "b": mebibyte("b")}
    request = megackpt.save(state, tmp_path, strategy, async_sharded_save=True)
    assert request is not None
    assert not held(pool)
    request.execute_sync()
