"""Host memory for copies of a save: shared with other processes, reused, capped, given back, and a fork's own."""

from __future__ import annotations

import errno
import gc
import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from megackpt.errors import StorageError
from megackpt.planning.box import Box
from megackpt.planning.manifest import Declaration, Declarations, ShardId, TensorMeta
from megackpt.planning.save_plan import plan_save
from megackpt.staging import memory
from megackpt.staging.memory import Arena, Copy, Pool, available_memory, default_cap

MIB = 1 << 20


def exactly(size: int) -> Callable[[], int]:
    return lambda: size


def child(
    code: str, *args: object, fds: tuple[int, ...] = (), data: bytes = b""
) -> str:
    """What another Python says to this code."""
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(
        command, input=data, capture_output=True, pass_fds=fds, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_another_process_sees_the_same_memory() -> None:
    arena = Arena.new(2 * MIB)
    arena.memory[:3] = 1, 2, 3
    assert arena.fd is not None
    code = """if True:
        import sys
        from megackpt.staging.memory import Arena
        arena = Arena.attached(int(sys.argv[1]), int(sys.argv[2]))
        print(arena.memory[:3].tolist())
        arena.memory[-1] = 9
        """
    assert child(code, arena.fd, arena.size, fds=(arena.fd,)) == "[1, 2, 3]\n"
    assert arena.memory[-1] == 9
    with pytest.raises(TypeError, match="descriptor"):
        pickle.dumps(arena)


class Travelling(pickle.Pickler):
    """Sends arenas as what a process gets by other means."""

    def persistent_id(self, value: Any) -> Any:
        return (value.fd, value.size) if isinstance(value, Arena) else None


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
    arena = Arena.new(4096)
    assert arena.fd is not None
    arena.memory[:200] = np.arange(200)
    out = io.BytesIO()
    Travelling(out).dump(Copy(plan, arena, np.array([0, 64, 128]), length, lease=None))
    code = """if True:
        import pickle, sys
        from megackpt.staging.memory import Arena
        class Arriving(pickle.Unpickler):
            def persistent_load(self, sent): return Arena.attached(*sent)
        copy = Arriving(sys.stdin.buffer).load()
        for row, item in enumerate(copy.plan.rows()):
            (block,) = copy.blocks(row)
            print(item.shard.key, len(block), bytes(block)[:2])
        assert "torch" not in sys.modules
        """
    said = child(code, fds=(arena.fd,), data=out.getvalue())
    lines = [
        f"{item.shard.key} {item.nbytes} {bytes(range(64 * n, 64 * n + min(2, item.nbytes)))}"
        for n, item in enumerate(plan.rows())
    ]
    assert said.splitlines() == lines


class Busy:
    """What a device will have written when somebody waits for it."""

    def __init__(self, arena: Arena, value: int) -> None:
        self.arena, self.value = arena, value

    def synchronize(self) -> None:
        self.arena.memory[:] = self.value


def test_who_reads_waits_for_devices() -> None:
    row = Declaration(
        ShardId("a", Box.whole((5,))), TensorMeta((5,), "uint8"), 0, False, 5, 0
    )
    (plan,), _ = plan_save([Declarations.of([row])])
    arena = Arena.new(4096)
    copy = Copy(plan, arena, np.array([0]), np.array([5]))
    arena.pending.append(Busy(arena, 7))
    assert next(copy.blocks(0)) == bytes([7] * 5)
    assert arena.pending == []
    arena.pending.append(Busy(arena, 8))
    assert next(copy.blocks(0)) == bytes([8] * 5)
    arena.pending.append(Busy(arena, 9))
    Travelling(io.BytesIO()).dump(copy)
    assert arena.memory[0] == 9
    arena.pending.append(Busy(arena, 10))
    assert arena.grown(8192).memory[0] == 10


def test_the_same_arena_again() -> None:
    pool = Pool()
    first = pool.lease(exactly(10 * MIB), 20 * MIB)
    arena = first.arena
    first.release()
    first.release()
    again = pool.lease(exactly(9 * MIB), 20 * MIB)
    assert again.arena is arena
    assert pool._held() == 10 * MIB


def test_an_arena_grows_and_keeps_its_pages() -> None:
    pool = Pool()
    small = pool.lease(exactly(MIB), 20 * MIB)
    small.arena.memory[:] = 5
    small.release()
    del small
    large = pool.lease(exactly(3 * MIB), 20 * MIB)
    assert large.arena.size == pool._held() == 3 * MIB
    assert (large.arena.memory[:MIB] == 5).all()
    assert not large.arena.memory[MIB:].any()


def test_without_memfd_memory_is_this_processs_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(errno.EPERM, "not here")

    monkeypatch.setattr("os.memfd_create", refused)
    pool = Pool()
    lease = pool.lease(exactly(MIB), 20 * MIB)
    assert lease.arena.fd is None
    lease.arena.memory[:] = 1
    lease.release()
    assert pool.lease(exactly(2 * MIB), 20 * MIB).arena.memory.nbytes == 2 * MIB


def test_a_refusal_of_this_moment_is_told_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    pool = Pool()
    with monkeypatch.context() as patched:
        patched.setattr("os.memfd_create", full)
        with pytest.raises(StorageError, match="Too many open files"):
            pool.lease(exactly(MIB), 20 * MIB)
    assert (
        pool.lease(exactly(MIB), 20 * MIB).arena.fd is not None
    )  # other processes can map it


def test_what_is_not_needed_any_more_is_let_go() -> None:
    pool = Pool()
    for _ in range(3):
        two = [pool.lease(exactly(10 * MIB), 40 * MIB) for _ in range(2)]
        for lease in two:
            lease.release()
    assert pool._held() == 20 * MIB
    for _ in range(20):
        pool.lease(exactly(MIB), 40 * MIB).release()
    assert pool._held() == MIB


def test_a_large_and_a_small_save_in_turns_keep_an_arena_each() -> None:
    pool = Pool()
    seen = set()
    for _ in range(20):
        large = pool.lease(exactly(10 * MIB), 40 * MIB)
        small = pool.lease(exactly(2 * MIB), 40 * MIB)
        seen |= {id(large.arena), id(small.arena)}
        small.release()
        large.release()
    assert len(seen) == 2
    assert pool._held() == 12 * MIB


def test_free_arenas_count_under_the_cap() -> None:
    pool = Pool()
    three = [pool.lease(exactly(size * MIB), 12 * MIB) for size in (3, 4, 5)]
    for lease in three:
        lease.release()
    large = pool.lease(exactly(7 * MIB), 12 * MIB)
    assert pool._held() <= 12 * MIB
    large.release()


def test_a_lease_waits_for_room() -> None:
    pool = Pool()
    first = pool.lease(exactly(6 * MIB), 10 * MIB)
    arena = first.arena
    threading.Timer(0.05, first.release).start()
    second = pool.lease(exactly(5 * MIB), 10 * MIB)
    assert second.arena is arena


def test_a_lease_waits_until_less_is_needed() -> None:
    pool = Pool()
    held = pool.lease(exactly(6 * MIB), 10 * MIB)
    needs = iter([5 * MIB, 5 * MIB, 4 * MIB])
    assert pool.lease(lambda: next(needs), 10 * MIB).arena.size == 4 * MIB
    held.release()


def test_who_waits_in_vain_hears_why() -> None:
    pool = Pool()
    held = pool.lease(exactly(6 * MIB), 10 * MIB)
    with pytest.raises(
        StorageError,
        match=r"needs 5,242,880 bytes.* hold 6,291,456 of the 10,485,760 allowed",
    ):
        pool.lease(exactly(5 * MIB), 10 * MIB, patience=0)
    held.release()
    assert pool.lease(exactly(10 * MIB), 10 * MIB).arena.size == 10 * MIB


def test_a_refusing_system_is_told_and_blocks_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> Arena:
        raise OSError(12, "Cannot allocate memory")

    pool = Pool()
    with monkeypatch.context() as patched:
        patched.setattr(Arena, "new", refused)
        with pytest.raises(StorageError, match="Cannot allocate memory"):
            pool.lease(exactly(MIB), MIB)
    assert pool.lease(exactly(MIB), MIB).arena.size == MIB


def test_a_lease_that_nobody_has_any_more_is_given_back() -> None:
    pool = Pool()
    lease = pool.lease(exactly(MIB), MIB)
    arena = lease.arena
    loop: list[Any] = [lease]
    loop.append(loop)
    del lease, loop
    gc.collect()
    assert pool.lease(exactly(MIB), MIB, patience=0).arena is arena


def test_a_collection_while_the_pool_is_busy_gives_back_without_waiting() -> None:
    pool = Pool()
    lease = pool.lease(exactly(MIB), MIB)
    with pool._changed:  # a garbage collection may come at any point
        lease.release()
    assert pool.lease(exactly(MIB), MIB, patience=0).arena.size == MIB


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3 << 20)), max_size=30),
    st.integers(4, 12),
)
def test_leases_never_overlap_nor_exceed_the_cap(
    steps: list[tuple[int, int]], mib: int
) -> None:
    pool, cap = Pool(), mib * MIB
    leases: dict[int, tuple[memory.Lease, int]] = {}
    for slot, size in steps:
        if slot in leases:
            leases.pop(slot)[0].release()
        elif sum(lease.arena.size for lease, _ in leases.values()) + size <= cap:
            leases[slot] = pool.lease(exactly(size), cap, patience=0), size
        arenas = [lease.arena for lease, _ in leases.values()]
        assert len({id(arena) for arena in arenas}) == len(arenas)
        assert all(lease.arena.memory.nbytes >= size for lease, size in leases.values())
        assert pool._held() <= cap + len(leases) * memory._GRAIN
    with ExitStack() as stack:
        for lease, _ in leases.values():
            stack.callback(lease.release)
    assert pool._held() <= cap + 6 * memory._GRAIN


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    code = """if True:
        import os
        from megackpt.staging.memory import POOL
        def need(): return 1 << 20
        free = POOL.lease(need, 1 << 22)
        held = POOL.lease(need, 1 << 22)
        free.arena.memory[:] = held.arena.memory[:] = 1
        shared = free.arena.memory
        free.release()
        with POOL._changed:  # as if another thread had it
            pid = os.fork()
            if not pid:
                held.release()
                assert POOL._held() == 0
                mine = POOL.lease(need, 1 << 20, patience=0)
                mine.arena.memory[:] = 2
                os._exit(0 if POOL._held() == 1 << 20 else 1)
            assert os.waitpid(pid, 0)[1] == 0
        assert (shared == 1).all() and (held.arena.memory == 1).all()
        assert POOL._held() == 2 << 20
        print("as before")
        """
    assert child(code) == "as before\n"


def proc(root: Path, available_kib: int, cgroup: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 99 kB\nMemAvailable:  {available_kib} kB\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def group(
    folder: Path, limit: str, usage: int, inactive: int, v1: bool = False
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if v1
        else ("memory.max", "memory.current")
    )
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    total = f"total_inactive_file {inactive}\n" if v1 else ""
    (folder / "memory.stat").write_text(
        f"anon 5\ninactive_file {0 if v1 else inactive}\n{total}"
    )


def test_available_memory_is_what_the_host_and_all_limits_leave(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "nowhere") > 0
    assert available_memory(proc(tmp_path / "bare", 1000, "")) == 1000 << 10
    v2 = proc(tmp_path / "v2", 1 << 20, "0::/job/rank\n")
    group(v2 / "sys/fs/cgroup/job/rank", "max", 700, 0)
    assert available_memory(v2) == 1 << 30
    group(v2 / "sys/fs/cgroup/job", "10000", 7000, 500)  # of the parent
    assert available_memory(v2) == 3500
    group(v2 / "sys/fs/cgroup/job/rank", "900", 1000, 0)
    assert available_memory(v2) == 0
    v1 = proc(tmp_path / "v1", 1 << 20, "4:cpu,memory:/not/to/be/seen\n0::/\n")
    group(v1 / "sys/fs/cgroup/memory", "10000", 7000, 1000, v1=True)
    assert available_memory(v1) == 4000


def test_the_default_cap_is_half_of_it_shared_by_the_ranks_of_a_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 64 << 30)
    for name in memory._RANKS_HERE:
        monkeypatch.delenv(name, raising=False)
    assert default_cap.__wrapped__() == 32 << 30
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "16(x2),3")
    assert default_cap.__wrapped__() == 2 << 30
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    assert default_cap.__wrapped__() == 16 << 30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "none")
    assert default_cap.__wrapped__() == 16 << 30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_cap.__wrapped__() == 8 << 30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert default_cap.__wrapped__() == 256 << 20
