"""Files that bypass the page cache hold the same bytes, and fail as others do."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import megackpt
from megackpt import AsyncCallsQueue, ShardedTensor, limits
from megackpt.errors import StorageError
from megackpt.storage import LocalStorage, files, kernel

PIECE = 4 * files._BLOCK


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files, too, on any file system; and nothing that other tests have found out."""
    monkeypatch.setattr(kernel, "_file_system", lambda _: 0xEF53)
    monkeypatch.setattr(limits, "DIRECT_BYTES", 1)
    monkeypatch.setattr(files, "_PIECE", PIECE)
    monkeypatch.setattr(files, "_refusing", set())
    monkeypatch.setattr(files, "_speeds", {})


@pytest.fixture
def root(tmp_path: Path) -> LocalStorage:
    with open(tmp_path / "probe", "wb") as file:
        if not kernel.bypass_cache(file.fileno()):
            pytest.skip("the file system of tmp_path has no O_DIRECT")
    os.unlink(tmp_path / "probe")
    return LocalStorage(tmp_path, direct=True)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Of each write whether it was direct, and its bytes."""
    seen: list[tuple[bool, int]] = []
    real = os.writev

    def traced(fd: int, buffers: Any) -> int:
        done = real(fd, buffers)
        seen.append((is_direct(fd), done))
        return done

    monkeypatch.setattr(os, "writev", traced)
    return seen


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def write(root: LocalStorage, *parts: Any, size: int | None = None) -> bytes:
    """The content of a file of these parts; ``size`` bytes are announced."""
    views = [memoryview(part) for part in parts]
    if size is None:
        size = sum(view.nbytes for view in views)
    with root.create("f") as writer:
        writer.expect(size)
        for number in range(0, len(views), 2):
            writer.write(views[number : number + 2])
            assert writer.position == sum(v.nbytes for v in views[: number + 2])
    return root.get("f")


def refusing_at(number: int, code: int) -> Callable[..., int]:
    """``os.writev`` that refuses one direct write."""
    real, calls = os.writev, iter(range(1, 1000))

    def call(fd: int, buffers: Any) -> int:
        if is_direct(fd) and next(calls) == number:
            raise OSError(code, os.strerror(code))
        return real(fd, buffers)

    return call


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 3 * PIECE), max_size=8),
    st.integers(1, 64),
    st.sampled_from([1, 64, 4096]),
    st.integers(0, 5),
)
def test_the_bytes_are_those_of_a_buffered_file(sizes, offset, step, refused):
    """Also with a write that is refused, and continued without O_DIRECT."""
    whole = np.random.default_rng(len(sizes)).bytes(sum(sizes) * step // 64 + offset)
    parts, start = [whole[:offset]], offset
    for size in sizes:
        parts.append(whole[start : start + size * step // 64])
        start += size * step // 64
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        files._refusing.clear()
        if refused:
            patch.setattr(os, "writev", refusing_at(refused, errno.EINVAL))
        storage = LocalStorage(folder, direct=True)
        assert write(storage, *parts) == b"".join(parts)


def test_all_but_the_end_is_direct(root, writes):
    data = os.urandom(2 * PIECE + files._BLOCK + 5)
    assert write(root, data[:7], data[7:]) == data
    assert writes == [
        (True, PIECE),
        (True, PIECE),
        (True, files._BLOCK),
        (False, 5),
    ]


def test_typed_and_empty_buffers(root, writes):
    array = np.arange(3 * PIECE, dtype=np.int32).reshape(3, -1)
    assert write(root, array, array[:0], b"", array[1]) == bytes(array) + bytes(
        array[1]
    )
    assert writes[0] == (True, PIECE)


@pytest.mark.parametrize(("limit", "size"), [(0, None), (100, 99), (1, 0)])
def test_smaller_files_are_buffered(root, writes, monkeypatch, limit, size):
    monkeypatch.setattr(limits, "DIRECT_BYTES", limit)
    data = os.urandom(2 * PIECE)
    assert write(root, data, size=size) == data
    assert writes == [(False, len(data))]


def test_only_where_asked(root, writes):
    root.direct = False
    write(root, bytes(2 * PIECE))
    assert writes == [(False, 2 * PIECE)]


def test_unknown_file_systems_are_buffered(root, writes, monkeypatch):
    monkeypatch.setattr(kernel, "_file_system", lambda _: 0x01021994)  # tmpfs
    write(root, bytes(2 * PIECE))
    assert writes == [(False, 2 * PIECE)]


def test_a_refused_first_write_is_remembered(root, writes, monkeypatch, caplog):
    monkeypatch.setattr(os, "writev", refusing_at(1, errno.EINVAL))
    data = os.urandom(3 * PIECE)
    with caplog.at_level(logging.DEBUG, "megackpt.storage"):
        assert write(root, data) == data
        root.delete("f")
        assert write(root, data) == data
    assert not any(was_direct for was_direct, _ in writes)
    assert len(caplog.records) == 1
    assert f"{root.location}/f: writes are buffered from now on" in caplog.text


def test_a_refused_later_write_concerns_its_file_only(root, writes, monkeypatch):
    monkeypatch.setattr(os, "writev", refusing_at(2, errno.EINVAL))
    data = os.urandom(4 * PIECE + 9)
    assert write(root, data) == data
    assert [was_direct for was_direct, _ in writes[:2]] == [True, False]
    root.delete("f")
    assert write(root, data) == data
    assert [was_direct for was_direct, _ in writes[-5:]] == [True] * 4 + [False]


def test_without_memory_for_a_piece(root, writes, monkeypatch):
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(files, "mmap", refuse)
    data = os.urandom(2 * PIECE + 1)
    assert write(root, data) == data
    assert writes == [(False, len(data))]


@pytest.mark.parametrize("short", [1, files._BLOCK, files._BLOCK + 512, PIECE - 1])
def test_a_write_that_is_cut_short_goes_on(root, monkeypatch, short):
    real, whole = os.writev, []

    def cut(fd: int, buffers: Any) -> int:
        if whole:
            return real(fd, buffers)
        whole.append(True)
        # Of a length that a direct write itself would not have.
        kernel.bypass_cache(fd, False)
        done = real(fd, [buffers[0][:short]])
        kernel.bypass_cache(fd)
        return done

    monkeypatch.setattr(os, "writev", cut)
    data = os.urandom(3 * PIECE + 77)
    assert write(root, data) == data


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_refuses(root, monkeypatch, number, code):
    gc.collect()  # what other tests have left behind
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "writev", refusing_at(number, code))
    with pytest.raises(StorageError) as caught:
        write(root, bytes(2 * PIECE + files._BLOCK))  # the third one is in close
    text = f"cannot write {root.location}/f: {os.strerror(code)}"
    if code != errno.EIO:
        text += "; free some space (or raise the quota) and save again"
    assert str(caught.value) == text
    assert len(os.listdir("/proc/self/fd")) <= before


def test_progress_is_reported_after_each_piece(root):
    moves: list[int] = []
    root.moved = lambda: moves.append(1)
    with root.create("f") as writer:
        writer.expect(8 * PIECE)
        writer.write([memoryview(bytes(8 * PIECE))])
        assert len(moves) == 8


def test_what_is_given_up_is_removed(root):
    writer = root.create("f")
    writer.expect(2 * PIECE)
    writer.write([memoryview(bytes(PIECE + 1))])
    writer.abort()
    writer.close()
    assert root.list() == []


# ---- Saves


@pytest.fixture(params=[False, True], ids=["thread", "process"])
def queue(request, monkeypatch) -> Iterator[AsyncCallsQueue]:
    monkeypatch.setenv("MEGACKPT_DIRECT_BYTES", "1")
    queue = AsyncCallsQueue(persistent=request.param)
    yield queue
    queue.close()


def state() -> dict[str, Any]:
    tensors = {f"w{i}": torch.randn(50_000 + 313 * i) for i in range(5)}
    tensors |= {f"small{i}": torch.randn(i) for i in range(40)}
    return {
        key: ShardedTensor.from_rank_offsets(key, value)
        for key, value in tensors.items()
    }


def test_the_files_are_those_of_a_synchronous_save(
    tmp_path, queue, monkeypatch, request
):
    import torch.distributed.checkpoint as dcp

    asked, real = [], kernel.bypass_cache

    def bypass(fd: int, bypass: bool = True) -> bool:
        asked.append(bypass)
        return real(fd, bypass)

    monkeypatch.setattr(kernel, "bypass_cache", bypass)
    shards = state()
    megackpt.save(shards, tmp_path / "sync", "torch_dist")
    assert not asked
    written = megackpt.save(
        shards, tmp_path / "async", "torch_dist", async_sharded_save=True
    )
    queue.schedule_async_request(written)
    queue.maybe_finalize_async_calls(blocking=True)
    assert (True in asked) == ("thread" in request.node.name)
    for path in (tmp_path / "sync").glob("*.distcp"):
        assert path.read_bytes() == (tmp_path / "async" / path.name).read_bytes()
    loaded = {key: torch.zeros_like(shard.data) for key, shard in shards.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "async")
    for key, shard in shards.items():
        assert torch.equal(loaded[key], shard.data), key
    megackpt.verify(tmp_path / "async")


@pytest.mark.parametrize("direct_is_faster", [True, False])
def test_synchronous_saves_are_direct_where_that_was_faster(
    tmp_path, monkeypatch, caplog, direct_is_faster
):
    """The first six are of both kinds in turn. The clock is the number of bytes, by kind."""
    clock, ways = [0.0], []
    monkeypatch.setattr(files.time, "monotonic", lambda: clock[0])
    with caplog.at_level(logging.DEBUG, "megackpt.storage"):
        for _ in range(8):
            place = str(tmp_path / "new")
            with files.direct_where_faster(place, "torch_dist", 10**9) as direct:
                clock[0] += 1 if direct == direct_is_faster else 2
                files.DirectWriter.direct_files += direct
                ways.append(direct)
    assert ways == [False, True] * 3 + [direct_is_faster] * 2
    (record,) = caplog.records
    way = "direct" if direct_is_faster else "buffered"
    assert f"are {way} from now on" in record.message


def test_one_slow_direct_save_decides_for_the_page_cache(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(files.time, "monotonic", lambda: clock[0])
    for seconds in (5, 1, 5, 6, 5, 1):
        with files.direct_where_faster(str(tmp_path), "torch_dist", 1) as direct:
            clock[0] += seconds
            files.DirectWriter.direct_files += direct
    with files.direct_where_faster(str(tmp_path), "torch_dist", 1) as direct:
        assert not direct


def test_a_failed_save_is_not_counted(tmp_path):
    def fail() -> None:
        with files.direct_where_faster(str(tmp_path), "torch_dist", 1) as direct:
            assert not direct
            raise StorageError("full")

    for _ in range(5):
        with pytest.raises(StorageError):
            fail()
    assert list(files._speeds.values()) == [([], [])]


def test_unknown_file_systems_are_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel, "_file_system", lambda _: 0x6969)  # NFS
    with files.direct_where_faster(str(tmp_path), "torch_dist", 1) as direct:
        assert not direct
    absent = str(tmp_path / "absent" / "absent")
    with files.direct_where_faster(absent, "torch_dist", 1) as direct:
        assert not direct
    assert not files._speeds


def test_the_second_large_synchronous_save_is_direct(tmp_path, monkeypatch, writes):
    shards = state()
    for name in ("first", "second"):
        writes.clear()
        megackpt.save(shards, tmp_path / name, "torch_dist")
        assert any(was_direct for was_direct, _ in writes) == (name == "second")
        megackpt.verify(tmp_path / name)
    for path in (tmp_path / "first").glob("*.distcp"):
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()


def test_a_format_without_direct_files_is_not_decided(tmp_path, caplog):
    """Files of zarr announce no size, so they are buffered."""
    shards = state()
    with caplog.at_level(logging.DEBUG, "megackpt.storage"):
        for number in range(8):
            megackpt.save(shards, tmp_path / str(number), "zarr")
    ((buffered, direct),) = files._speeds.values()
    assert len(buffered) == 1
    assert not direct
    assert "from now on" not in caplog.text


def test_a_small_synchronous_save_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "DIRECT_BYTES", 16 << 20)
    megackpt.save(state(), tmp_path / "a", "torch_dist")
    assert not files._speeds


def test_no_page_of_a_direct_file_is_cached(tmp_path, monkeypatch):
    monkeypatch.undo()
    storage = LocalStorage(tmp_path, direct=True)
    with storage.create("f") as writer:
        if not kernel.bypass_cache(writer._fd):  # type: ignore[attr-defined]
            pytest.skip("needs ext4 or XFS: other file systems get buffered writes")
        writer.expect(limits.DIRECT_BYTES)
        writer.write([memoryview(bytes(limits.DIRECT_BYTES))])
    assert cached_pages(tmp_path / "f") == 0


def cached_pages(path: Path) -> int:
    import ctypes
    from mmap import PROT_READ, mmap

    pages = path.stat().st_size // 4096
    found = (ctypes.c_ubyte * pages)()
    with open(path, "rb") as file:
        memory = np.frombuffer(mmap(file.fileno(), 0, prot=PROT_READ), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(memory.ctypes.data)
    assert libc.mincore(address, ctypes.c_size_t(len(memory)), found) == 0
    return sum(page & 1 for page in found)
