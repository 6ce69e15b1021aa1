"""Copies of a save: the bytes of the moment, whatever is done to tensors then, in bounded memory, without deadlock."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from megackpt.backends.torch_dist import TorchDist
from megackpt.errors import BackendError, ShardingError, StorageError
from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import (
    ITEMSIZE,
    OBJECT,
    Declaration,
    Declarations,
    ShardId,
    TensorMeta,
)
from megackpt.planning.save_plan import SavePolicy, plan_save
from megackpt.staging import copying, snapshot as snapshots, source
from megackpt.staging.memory import Arena, Pool, begun
from megackpt.staging.snapshot import Snapshot
from megackpt.staging.source import Staged, host_array
from megackpt.staging.turns import Turns
from megackpt.storage import LocalStorage

MIB = 1 << 20
DTYPES = [getattr(torch, name) for name in ITEMSIZE if name != OBJECT]
Held = torch.Tensor | Callable[[], bytes]

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


def staged_of(values: Sequence[Held], most: int | None = None) -> Staged:
    """The save of these by one rank, in items of at most so many bytes."""
    declared = []
    for number, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            meta = TensorMeta(
                tuple(value.shape), str(value.dtype).removeprefix("torch.")
            )
            shard = ShardId(f"k{number}", Box.whole(value.shape))
            declared.append(Declaration(shard, meta, 0, False, value.nbytes, 0))
        else:
            declared.append(
                Declaration(
                    ShardId(f"k{number}", Box((), ())),
                    TensorMeta((), OBJECT),
                    0,
                    False,
                    1,
                    0,
                )
            )
    (plan,), _ = plan_save([Declarations.of(declared)], SavePolicy(max_item_bytes=most))
    return Staged(plan, list(values), Boxes.of(each.shard.box for each in declared))


def taken(data: Any, row: int) -> bytes:
    return b"".join(map(bytes, data.blocks(row)))


def all_rows(data: Any, staged: Staged) -> list[bytes]:
    return [taken(data, row) for row in range(len(staged.plan))]


def expected(staged: Staged) -> list[bytes]:
    """The bytes of all rows, the plain way."""
    found = []
    for row, item in enumerate(staged.plan.rows()):
        value = staged.held[item.source]
        if isinstance(value, torch.Tensor):
            whole = host_array(
                value.detach().resolve_conj().resolve_neg().clone().contiguous()
            )
            found.append(whole[item.shard.box.slices()].tobytes())
        else:
            found.append(value())
        assert len(found[-1]) == item.nbytes or item.meta.is_object, row
    return found


def scrambled(staged: Staged) -> None:
    """Change every tensor's memory in place."""
    for value in staged.held:
        if isinstance(value, torch.Tensor):
            octets = torch.tensor([], dtype=torch.uint8).set_(value.untyped_storage())
            octets.bitwise_xor_(1 if value.dtype == torch.bool else 0xFF)


def filled(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    octets = torch.randint(
        0,
        256,
        (int(np.prod(shape)) * dtype.itemsize,),
        dtype=torch.uint8,
        generator=generator,
    )
    if dtype == torch.bool:
        octets %= 2
    return octets.view(dtype).reshape(tuple(shape))


def kinds(dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of a dtype, in all states of disorder."""
    base = filled((6, 10), dtype, 1)
    made = [
        base.clone(),
        base.clone().t(),
        filled((9, 9), dtype, 2)[2:7, 1::3],
        filled((7,), dtype, 3).expand(4, 7),
        filled((1,), dtype, 4).reshape(()),
        filled((3, 0, 2), dtype, 5),
        filled((0, 2), dtype, 6).t(),
        filled((5, 3), dtype, 7)[1:4],
    ]
    if dtype.is_complex:
        made += [base.clone().conj(), base.clone().t().conj()]
    if dtype in (torch.complex64, torch.complex128):
        made.append(base.clone().conj().imag)
    return made


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """A pool of this test's own."""
    fresh = Pool()
    monkeypatch.setattr(snapshots, "POOL", fresh)
    return fresh


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_all_kinds_may_change_as_soon_as_they_are_copied(
    dtype: torch.dtype,
) -> None:
    blobs = [b"", b"blob" * 1000]
    values: list[Held] = [
        *kinds(dtype),
        *kinds(torch.uint8),
        lambda: blobs[0],
        lambda: blobs[1],
    ]
    for most in (None, 64):  # rows that are all of a tensor, and parts of one
        staged = staged_of(values, most)
        before = expected(staged)
        snapshot = Snapshot.of(staged, MIB)
        assert snapshot.complete
        scrambled(staged)
        blobs = [blob + b"changed" for blob in blobs]
        assert all_rows(snapshot.source, staged) == before
        snapshot.release()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_all_kinds_in_turns(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "PIECE", 64)
    staged = staged_of([*kinds(dtype), lambda: b"blob"])
    before = expected(staged)
    for half_handed in (False, True):
        turns = Turns(
            staged,
            {row: b for row, b in enumerate(before) if b == b"blob"},
            lambda: None,
        )
        rows = [turns.blocks(row) for row in range(len(staged.plan))]
        first = [bytes(next(row)) if half_handed else b"" for row in rows]
        turns.settle(Pool().lease(turns.need, MIB))
        scrambled(staged)
        assert [
            head + b"".join(map(bytes, row))
            for head, row in zip(first, rows, strict=True)
        ] == before
        if not half_handed:
            assert (
                all_rows(turns, staged) == before
            )  # of what was copied, as often as you like
        scrambled(staged)  # as before


def test_parameters_and_other_subclasses() -> None:
    class Own(torch.Tensor):
        pass

    weight = torch.nn.Parameter(filled((4, 4)))
    staged = staged_of(
        [
            weight,
            filled((3, 3), seed=1).as_subclass(Own),
            torch.nn.Parameter(filled((4, 2))).t(),
        ]
    )
    before = expected(staged)
    snapshot = Snapshot.of(staged, MIB)
    with torch.no_grad():
        weight.fill_(7)
    assert all_rows(snapshot.source, staged) == before


def test_a_tensor_that_has_changed_its_size_is_refused() -> None:
    tensor = filled((8, 8))
    staged = staged_of([tensor])
    tensor.data = filled((2, 2))
    with pytest.raises(
        ShardingError,
        match=r"'k0'.* had 256 bytes when it was declared, and has 16 now",
    ):
        Snapshot.of(staged, MIB)
    assert Snapshot.of(staged_of([tensor]), 64).complete  # its room is free again


def test_twenty_saves_take_the_memory_of_one(pool: Pool) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )

    staged = staged_of([filled((2, MIB), seed=seed) for seed in range(4)])
    arenas, sizes = set(), []
    for _ in range(20):
        snapshot = Snapshot.of(staged, 64 * MIB)
        arenas.add(snapshot.source.arena)  # type: ignore[union-attr]
        sizes.append(resident())
        snapshot.release()
        snapshot.release()
    assert len(arenas) == 1
    assert pool._held() == 32 * MIB
    assert max(sizes) - sizes[0] < 16 * MIB


def test_a_snapshot_that_nobody_has_any_more_gives_its_memory_back() -> None:
    staged = staged_of([filled((MIB,))])
    kept = Snapshot.of(
        staged, 4 * MIB
    ).source  # whoever reads it needs no more than this
    with pytest.raises(StorageError):
        Snapshot.of(staged, 4 * MIB, patience=0)
    assert taken(kept, 0) == expected(staged)[0]
    del kept
    assert Snapshot.of(staged, 4 * MIB, patience=0).complete


def test_who_waits_for_saves_that_nobody_writes_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "IDLE_PATIENCE", 0.0)
    cap = 10 * MIB
    first, second = (Snapshot.of(staged_of([filled((MIB,))]), cap) for _ in range(2))
    third = staged_of([filled((MIB,))])
    with pytest.raises(
        StorageError,
        match=r"hold 8,388,608 of .*, and nobody writes those: schedule each request",
    ):
        Snapshot.of(third, cap)
    begun(SimpleNamespace(source=first.source))  # what workers do first
    with pytest.raises(StorageError, match="is a writer stuck"):
        Snapshot.of(third, cap, patience=0.3)
    first.release()
    assert Snapshot.of(third, cap).complete
    second.release()


@pytest.mark.parametrize("ending", ["settle", "release"])
def test_tensors_are_let_go_of_while_they_are_written(ending: str) -> None:
    staged = staged_of([filled((MIB,)), filled((MIB,), seed=1)])
    snapshot = Snapshot.of(staged, 8 * MIB - 64)
    tensors = [weakref.ref(value) for value in staged.held]
    rows = snapshot.source.blocks(0)
    next(rows)
    getattr(snapshot, ending)()
    del staged
    assert [tensor() for tensor in tensors] == [None, None]


def test_a_second_save_waits_until_the_first_is_written() -> None:
    first, second = staged_of([filled((MIB,))]), staged_of([filled((MIB,), seed=1)])
    snapshot = Snapshot.of(first, 6 * MIB)
    waiting = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        later = thread.submit(lambda: (waiting.set(), Snapshot.of(second, 6 * MIB))[1])
        waiting.wait(10)
        assert taken(snapshot.source, 0) == expected(first)[0]
        assert not later.done()
        snapshot.release()
        assert taken(later.result(30).source, 0) == expected(second)[0]


class Slow:
    """A Source whose writers stop after some pieces until they may go on."""

    def __init__(self, data: Any, pieces: int) -> None:
        self.data = data
        self.left = threading.Semaphore(pieces)
        self.stopped = threading.Event()

    def blocks(self, row: int) -> Iterator[memoryview]:
        for piece in self.data.blocks(row):
            if not self.left.acquire(blocking=False):
                self.stopped.set()
                self.left.acquire(timeout=30)
            yield piece

    def go_on(self) -> None:
        self.left.release(1 << 20)


@contextmanager
def written(
    data: Any, staged: Staged, folder: Path
) -> Iterator[Callable[[], list[bytes]]]:
    """A real format writes this in a thread, into two files; what it has written, row by row."""
    root = LocalStorage(folder, create=True)
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(
            TorchDist(files_per_rank=2).write, root, staged.plan, data
        )

        def result() -> list[bytes]:
            found = writing.result(60)
            files = [(folder / name).read_bytes() for name in found.files]
            return [
                files[file][start : start + length]
                for file, start, length in zip(
                    found.file.tolist(),
                    found.start.tolist(),
                    found.length.tolist(),
                    strict=True,
                )
            ]

        yield result


def large() -> Staged:
    strided = filled((2 * MIB, 4), torch.bfloat16, 9).t()
    small = [filled((n,), seed=n) for n in range(0, 3000, 7)]
    return staged_of(
        [
            filled((10 * MIB,), seed=1),
            filled((9 * MIB,), seed=2),
            strided,
            *small,
            lambda: b"blob",
        ]
    )


def test_over_the_cap_it_is_written_in_turns(tmp_path: Path, pool: Pool) -> None:
    staged, cap = large(), 50 * MIB
    before = expected(staged)
    snapshot = Snapshot.of(staged, cap)
    assert not snapshot.complete
    slow = Slow(snapshot.source, 4)
    with written(slow, staged, tmp_path) as result:
        snapshot.settle()  # four pieces are enough, and no more will be taken before this returns
        assert slow.stopped.wait(30)
        scrambled(staged)
        assert 0 < pool._held() <= cap
        snapshot.settle()
        slow.go_on()
        assert result() == before
        snapshot.release()
    assert pool.lease(lambda: cap, cap, patience=0).arena.size == cap


def test_over_the_cap_with_a_writer_that_is_faster(tmp_path: Path) -> None:
    staged = large()
    before = expected(staged)
    snapshot = Snapshot.of(staged, MIB)
    with written(snapshot.source, staged, tmp_path) as result:
        snapshot.settle()
        scrambled(staged)
        assert result() == before


def test_several_saves_over_the_cap_at_once(tmp_path: Path) -> None:
    """Ranks that are threads share one pool, and each of their saves asks for all of it."""

    def save(number: int) -> None:
        for step in range(2):
            staged = staged_of([filled((MIB + n,), seed=n + number) for n in range(4)])
            before = expected(staged)
            snapshot = Snapshot.of(staged, 3 * MIB)
            with written(
                snapshot.source, staged, tmp_path / f"{number}-{step}"
            ) as result:
                snapshot.settle()
                scrambled(staged)
                assert result() == before
                snapshot.release()

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(save, number) for number in range(3)]:
            done.result(120)


def test_memory_stays_under_the_cap_and_a_few_pieces(tmp_path: Path) -> None:
    code = """if True:
        import sys, threading
        from pathlib import Path
        import torch
        sys.path.insert(0, sys.argv[2])
        import test_staging as t
        def peak(): return next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith("VmHWM"))
        staged = t.staged_of([torch.ones(16 << 20) for n in range(3)])
        t.Snapshot.of(t.staged_of([torch.ones(1)]), 1 << 20)
        before = peak()
        snapshot = t.Snapshot.of(staged, 16 << 20)
        with t.written(snapshot.source, staged, Path(sys.argv[1])) as result:
            snapshot.settle()
            t.scrambled(staged)
            print(peak() - before)
        """
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path, Path(__file__).parent],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < (16 + 5 * 16) * MIB < 3 * 64 * MIB


def test_a_writer_that_ends_early_lets_settle_return() -> None:
    staged = staged_of([filled((MIB,)), filled((MIB,), seed=1)])
    snapshot = Snapshot.of(staged, MIB)
    assert not snapshot.complete
    rows = snapshot.source.blocks(0)
    with ThreadPoolExecutor(1) as thread:
        settled = thread.submit(snapshot.settle)
        assert not settled.done()
        snapshot.release()
        settled.result(30)
    with pytest.raises(BackendError, match="this save was given up"):
        next(rows)
    with pytest.raises(BackendError, match="this save was given up"):
        taken(snapshot.source, 1)


def test_a_writer_that_is_stuck_is_told_and_stopped(pool: Pool) -> None:
    staged = staged_of([filled((MIB,))])
    snapshot = Snapshot.of(staged, MIB, patience=0)
    with pytest.raises(StorageError, match="is a writer stuck"):
        snapshot.settle()
    with pytest.raises(BackendError, match="given up"):
        taken(snapshot.source, 0)
    snapshot.settle()
    assert pool._held() == 0


def test_a_row_is_had_once_when_its_memory_is_gone() -> None:
    staged = staged_of([filled((MIB,)), filled((MIB,), seed=1)])
    before = expected(staged)
    snapshot = Snapshot.of(staged, 4 * MIB + 64)
    assert taken(snapshot.source, 0) == before[0] == taken(snapshot.source, 0)
    snapshot.settle()
    assert taken(snapshot.source, 1) == before[1]
    with pytest.raises(BackendError, match=r"'k\d'.* was asked for twice"):
        taken(snapshot.source, 0)


@settings(max_examples=60)
@given(st.data())
def test_any_order_of_pieces_and_any_moment_to_settle(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(source, "PIECE", 32)
        tensors = [filled((size, 2), torch.int32, n) for n, size in enumerate(sizes)]
        staged = staged_of([t.t() if data.draw(st.booleans()) else t for t in tensors])
        before = expected(staged)
        turns = Turns(staged, {}, lambda: None)
        rows = {row: turns.blocks(row) for row in range(len(before))}
        got = [b""] * len(before)
        at = data.draw(st.integers(0, 3 * len(rows)))
        step = 0
        while rows:
            if step == at:
                turns.settle(Pool().lease(turns.need, turns.need()))
                scrambled(staged)
            row = data.draw(st.sampled_from(sorted(rows)))
            piece = next(rows[row], None)
            got[row] += b"" if piece is None else bytes(piece)
            if piece is None:
                del rows[row]
            step += 1
        assert got == before
        assert step <= at or turns.need() == 0


class Streams:
    """Notes what is asked of devices, in order, and does the copies at once."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def stream(self, name: str) -> Any:
        log = self.log

        class Stream:
            def wait_stream(self, other: Any) -> None:
                log.append(f"{name} waits for {other}")

            def wait_event(self, event: Any) -> None:
                log.append(f"{name} waits for {event}")

            def __str__(self) -> str:
                return name

        return Stream()

    def event(self) -> Any:
        log = self.log

        class Event:
            def record(self, stream: Any) -> None:
                log.append(f"event on {stream}")

            def synchronize(self) -> None:
                log.append("host waits for event")

            def __str__(self) -> str:
                return "event"

        return Event()

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.log.append(f"on {stream}")
        yield
        self.log.append(f"off {stream}")

    def tensor(self, data: torch.Tensor) -> torch.Tensor:
        log = self.log

        class Remote(torch.Tensor):
            def record_stream(self, stream: Any) -> None:
                log.append(f"memory kept for {stream}")

        return data.as_subclass(Remote)


def test_devices_copy_beside_the_current_stream_which_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of what is asked; that a GPU does so is not shown here."""
    fake = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: fake.stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", fake.on)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(copying, "_side_stream", lambda _: fake.stream("side"))
    arena, tensor = (
        Arena.new(4096),
        fake.tensor(filled((4, 4), torch.complex64).t().conj()),
    )
    place = torch.from_numpy(arena.memory[:128]).view(torch.complex64).view(4, 4)
    copying._queue(torch.device("cuda"), [(place, tensor)], arena.pending)
    assert fake.log == [
        "side waits for current",
        "on side",
        "memory kept for side",
        "off side",
        "event on side",
        "current waits for event",
    ]
    assert torch.equal(
        place.view(torch.int64), tensor.resolve_conj().contiguous().view(torch.int64)
    )
    arena.ready()
    assert fake.log[-1] == "host waits for event"
    assert arena.pending == []


def test_a_copy_that_a_device_refuses_is_waited_for_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: fake.stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", fake.on)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(copying, "_side_stream", lambda _: fake.stream("side"))
    arena = Arena.new(4096)
    wrong = (
        torch.from_numpy(arena.memory[:8]),
        fake.tensor(torch.ones(9, dtype=torch.uint8)),
    )
    with pytest.raises(RuntimeError):
        copying._queue(torch.device("cuda"), [wrong], arena.pending)
    assert len(arena.pending) == 1


@pytest.mark.parametrize("refused", [0, 2])
def test_memory_is_registered_with_devices_once_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    log: list[str] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
            log.append(f"register {size} at {address}")
            return refused

        def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
            log.append("unregister")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    arena = Arena.new(65536)
    copying._pin(arena)
    copying._pin(arena)
    registered = f"register 65536 at {arena.memory.ctypes.data}"
    del arena
    assert log == ([registered] * 2 if refused else [registered, "unregister"])
