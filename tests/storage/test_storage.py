"""Files of a directory: durable, atomic, ranged, and never outside."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings, strategies as st

from megackpt.errors import CorruptCheckpoint, StorageError
from megackpt.storage import (
    LocalStorage,
    SingleFile,
    digest_blocks,
    files,
    kernel,
    unsafe_names,
)

MIB = 1 << 20


@pytest.fixture
def root(tmp_path) -> LocalStorage:
    return LocalStorage(tmp_path)


@pytest.fixture(params=["all there", "nothing there"])
def system(request, monkeypatch):
    """With what Linux offers, and without."""
    if request.param == "nothing there":
        monkeypatch.setattr(kernel, "libc_function", lambda *_: None)


def views(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def test_importing_storage_imports_no_torch():
    code = "import sys, megackpt.storage, megackpt.checkpoint.index; sys.exit('torch' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2]
    )


def test_write_and_read(root, system):
    big = os.urandom(40 * MIB + 3)
    with root.create("a/b/c.bin") as writer:
        writer.write(views(b"head", b"", big))
        assert writer.position == len(big) + 4
        writer.write(views(*[b"xy"] * 3000))
    assert root.size("a/b/c.bin") == writer.position == len(big) + 6004
    with root.open("a/b/c.bin") as reader:
        assert reader.size == writer.position
        first, second = bytearray(len(big)), bytearray(6000)
        reader.read_into(4, [memoryview(first), memoryview(b""), memoryview(second)])
        assert first == big
        assert second == b"xy" * 3000
        scattered = [bytearray(1) for _ in range(2500)]
        reader.read_into(len(big) + 4, [memoryview(s) for s in scattered])
        assert b"".join(scattered) == b"xy" * 1250
        with pytest.raises(CorruptCheckpoint, match=r"c\.bin ends at byte .* 2 bytes"):
            reader.read_into(reader.size - 3, [memoryview(bytearray(5))])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.binary(max_size=50), max_size=20), st.integers(1, 7), st.integers(1, 30)
)
def test_short_writes_and_small_batches(parts, vectors, batch):
    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        real = os.writev
        patch.setattr(files, "_VECTORS", vectors)
        patch.setattr(files, "_BATCH", batch)
        patch.setattr(
            os,
            "writev",
            lambda fd, batch: real(fd, [batch[0][: len(batch[0]) // 2 + 1]]),
        )
        root = LocalStorage(folder)
        with root.create("f") as writer:
            writer.write(views(*parts))
        whole = b"".join(parts)
        assert root.get("f") == whole
        pieces = [bytearray(len(p)) for p in parts]
        with root.open("f") as reader:
            reader.read_into(0, [memoryview(p) for p in pieces])
        assert b"".join(pieces) == whole


def test_typed_and_shaped_buffers(root):
    import numpy as np

    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    with root.create("f") as writer:
        writer.write([memoryview(array), memoryview(array[:0])])
    back = np.zeros_like(array)
    with root.open("f") as reader:
        reader.read_into(0, [memoryview(back)])
    assert (back == array).all()


def test_create_is_exclusive_and_abort_removes(root):
    writer = root.create("x")
    with pytest.raises(StorageError, match=r"cannot create .*/x: File exists"):
        root.create("x")
    writer.abort()
    writer.abort()
    assert root.list() == []
    with pytest.raises(ZeroDivisionError), root.create("x") as writer:
        writer.write(views(bytes(1 // 0)))
    assert root.list() == []


def test_what_another_save_has_made_meanwhile_is_not_removed(root):
    """By a writer whose process was stopped for so long that its save was taken for dead."""
    for replace in (
        lambda: root.put("x", b"2"),
        lambda: os.symlink("y", f"{root.location}/x"),
    ):
        writer = root.create("x")
        root.delete("x")
        replace()
        writer.abort()
        assert root.list() == ["x"]
        root.delete("x")


def test_everything_is_durable(root, monkeypatch):
    synced = []
    real = os.fsync

    def fsync(fd):
        synced.append(
            os.readlink(f"/proc/self/fd/{fd}").removeprefix(root.location) or "/"
        )
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with root.create("a/f") as writer:
        writer.write(views(b"1"))
    assert synced == ["/", "/a/f", "/a"]
    synced.clear()
    root.put("g", b"1")
    assert synced[0].startswith("/.megackpt-put-")
    assert synced[1:] == ["/"]
    synced.clear()
    root.delete("g")
    assert synced == ["/"]


@pytest.mark.parametrize("number", [errno.ENOTEMPTY, errno.EACCES, errno.EBUSY])
def test_a_folder_that_stays_keeps_the_removal_of_its_files(root, monkeypatch, number):
    synced = []

    def refuse(*_, **__):
        raise OSError(number, "refused")

    root.put_new({"a/f": b"", "a/g": b""})
    monkeypatch.setattr(os, "rmdir", refuse)
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    root.remove_files(["a/f"])
    assert synced == [f"{root.location}/a", root.location]
    assert root.list("a") == ["g"]


def test_the_error_of_a_removal_names_the_file(root, monkeypatch):
    unlink = os.unlink

    def refuse(name, **folder):
        if name == "g":
            raise PermissionError(errno.EPERM, "refused")
        unlink(name, **folder)

    root.put_new({"a/f": b"", "a/g": b"", "g": b""})
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(StorageError, match=r"cannot remove .*/a/g: refused"):
        root.remove_files(["a/f", "a/g"])
    with pytest.raises(
        StorageError, match=rf"cannot remove {root.location}/g: refused"
    ):
        root.remove_files(["g"])
    assert root.list("a") == ["g"]


def test_a_batch_is_durable_when_it_is_closed_and_folders_are_synced_once(
    root, system, monkeypatch
):
    synced = []
    real = os.fsync

    def fsync(fd):
        synced.append(
            os.readlink(f"/proc/self/fd/{fd}").removeprefix(root.location) or "/"
        )
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    names = [f"a/{i % 3}/{i}" for i in range(300)]
    before = len(os.listdir("/proc/self/fd"))
    most = 0
    with root.batch() as batch:
        for name in names:
            with batch.create(name) as writer:
                writer.write(views(name.encode()))
                most = max(most, len(os.listdir("/proc/self/fd")) - before)
        assert 1 < most <= 128
        assert not {"/", "/a", "/a/0"}.intersection(synced)
        with root.create("a/1/alone"):
            pass
        assert synced[-1] == "/a/1"
        synced.remove("/a/1")
        synced.remove("/a/1/alone")
    assert sorted(synced) == sorted(
        ["/", "/a", "/a/0", "/a/1", "/a/2", *(f"/{name}" for name in names)]
    )
    assert [root.get(name) for name in names] == [name.encode() for name in names]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_batch_opens_the_folder_of_neighbours_once(root, monkeypatch):
    opened = []
    real = os.open

    def recording(path, flags, *args, **named):
        opened.append(path)
        return real(path, flags, *args, **named)

    monkeypatch.setattr(os, "open", recording)
    with root.batch() as batch:
        for name in ("a/x", "a/y", "b/x", "b/y", "c", "a/z"):
            with batch.create(name) as writer:
                writer.write(views(name.encode()))
        assert opened == ["a", "x", "y", "b", "x", "y", ".", "c", "a", "z"]
    assert root.get("a/y") == b"a/y"


def test_a_batch_that_is_given_up_or_cannot_be_made_durable(root, monkeypatch):
    before = len(os.listdir("/proc/self/fd"))
    root.put_new({"f": b"1"})
    with pytest.raises(StorageError, match=r"cannot create .*/f: File exists"):
        root.put_new({"f": b"1"})
    with pytest.raises(ZeroDivisionError), root.batch() as batch, batch.create("g"):
        raise ZeroDivisionError
    assert root.list() == ["f"]

    def refuse(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    for count in (2, 200):  # by one thread, by several
        with pytest.raises(
            StorageError, match=r"cannot make durable .*/\d+/f\d+: Input/output error"
        ):
            root.put_new({f"{count}/f{i}": b"1" for i in range(count)})
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["writev", "fsync"])
def test_a_disk_that_refuses(root, monkeypatch, number, call):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with (
        pytest.raises(StorageError, match=os.strerror(number)) as caught,
        root.create("f") as writer,
    ):
        writer.write(views(b"1"))
    assert f"{root.location}/f" in str(caught.value)
    assert ("free some space" in str(caught.value)) == (number != errno.EIO)
    with pytest.raises(StorageError):
        root.put("g", b"1")
    monkeypatch.undo()
    assert "g" not in root.list()


def test_no_descriptor_is_lost(root, monkeypatch):
    def descriptors() -> int:
        gc.collect()  # what other tests left behind goes before we count, not between
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    root.put("a/b/f", b"1")
    root.get("a/b/f")
    root.list("a/b")
    root.delete("a")
    for name in ("x/y", "..", "q"):
        with pytest.raises((FileNotFoundError, CorruptCheckpoint)):
            root.open(name)
    monkeypatch.setattr(os, "fsync", lambda _: os.stat("/does/not/exist"))
    with pytest.raises(StorageError):
        root.create("f").close()
    assert descriptors() <= before  # threads of other tests may let go of theirs


def test_put_replaces_and_leaves_nothing_else(root):
    root.put("d/f", b"1" * 100)
    root.put("d/f", b"2")
    assert root.get("d/f") == b"2"
    assert root.list("d") == ["f"]


UNSAFE = [
    "",
    "/etc/passwd",
    "..",
    "../x",
    "a/../b",
    "a/./b",
    ".",
    "a//b",
    "a/",
    "a\0b",
    "\ud812",
]


@pytest.mark.parametrize("name", UNSAFE)
def test_names_that_lead_outside(root, name):
    for work in (
        root.open,
        root.get,
        root.size,
        root.create,
        root.delete,
        lambda n: root.put(n, b""),
    ):
        with pytest.raises(CorruptCheckpoint, match="not a name of a file"):
            work(name)
    assert unsafe_names([name, "fine", "a/b", "..a", "é"]) == [name]


def test_links_are_not_followed(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/f").write_text("secret")
    (tmp_path / "root").mkdir()
    (tmp_path / "root/link").symlink_to(tmp_path / "outside/f")
    (tmp_path / "root/folder").symlink_to(tmp_path / "outside")
    root = LocalStorage(tmp_path / "root")
    for name in ("link", "folder/f"):
        with pytest.raises(CorruptCheckpoint, match="link"):
            root.open(name)
    with pytest.raises(CorruptCheckpoint):
        root.create("folder/new")
    assert root.size("link") is None
    root.delete("link")
    root.delete("folder")
    assert root.list() == []
    assert (tmp_path / "outside/f").read_text() == "secret"


def test_things_that_are_no_files(root, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dir").mkdir()
    for name in ("fifo", "dir"):
        with pytest.raises(CorruptCheckpoint, match="not a regular file"):
            root.open(name)
        assert root.size(name) is None


def test_absent(root):
    for name in ("x", "x/y/z"):
        with pytest.raises(FileNotFoundError):
            root.open(name)
        assert root.size(name) is None
        assert root.list(name) == []
        root.delete(name)
    with pytest.raises(StorageError, match="too long"):
        root.create("x" * 300)


def test_get_has_a_limit(root):
    root.put("f", b"12345")
    assert root.get("f", limit=5) == b"12345"
    with pytest.raises(CorruptCheckpoint, match="at most 4"):
        root.get("f", limit=4)


def test_delete_goes_deep(root, tmp_path):
    (tmp_path / "a/b/c").mkdir(parents=True)
    (tmp_path / "a/b/f").touch()
    (tmp_path / "a/b/c/g").touch()
    root.delete("a")
    assert root.list() == []


def test_what_another_process_removes_meanwhile_does_not_end_a_removal(
    root, monkeypatch
):
    real = os.unlink

    def removed_before(name, **options):
        real(name, **options)
        raise FileNotFoundError(errno.ENOENT, "gone")

    root.put_new({f"a/{i}/f": b"" for i in range(3)})
    monkeypatch.setattr(os, "unlink", removed_before)
    root.delete("a")
    assert root.list() == []


def test_a_folder_that_disappears_refuses_a_write(root, monkeypatch):
    def gone(*_, **__):
        raise FileNotFoundError(errno.ENOENT, "gone")

    monkeypatch.setattr(os, "rename", gone)
    with pytest.raises(StorageError, match=r"cannot write .*/a/f: gone"):
        root.put("a/f", b"")


def test_roots(tmp_path):
    with pytest.raises(FileNotFoundError):
        LocalStorage(tmp_path / "x")
    (tmp_path / "f").touch()
    with pytest.raises(NotADirectoryError):
        LocalStorage(tmp_path / "f")
    for path in ("f", "f/x"):
        with pytest.raises(StorageError, match="file is in the way"):
            LocalStorage(tmp_path / path, create=True)
    LocalStorage(tmp_path / "a/b", create=True).put("f", b"1")
    assert LocalStorage(tmp_path / "a/b").get("f") == b"1"
    with pytest.raises(FileNotFoundError):
        LocalStorage(tmp_path).folder("q")


def test_a_storage_stays_with_its_directory(tmp_path):
    root = LocalStorage(tmp_path / "one", create=True)
    root.put("f", b"1")
    assert root.is_current()
    os.rename(tmp_path / "one", tmp_path / "two")
    LocalStorage(tmp_path / "one", create=True).put("f", b"2")
    assert not root.is_current()
    assert root.get("f") == b"1"
    assert pickle.loads(pickle.dumps(root)).get("f") == b"2"


def test_exchange(root, tmp_path, monkeypatch):
    root.put("a/f", b"1")
    root.put("b/f", b"2")
    if not root.exchange("a", "b"):
        pytest.skip("this file system cannot exchange directories")
    assert (root.get("a/f"), root.get("b/f")) == (b"2", b"1")
    with pytest.raises(StorageError, match="No such file"):
        root.exchange("a", "absent")
    monkeypatch.setattr(kernel, "libc_function", lambda *_: None)
    assert not root.exchange("a", "b")
    assert root.get("a/f") == b"2"


def test_folders(root, tmp_path):
    assert root.make_folder("d", 0o700)
    assert not root.make_folder("d")
    below = root.folder("d")
    below.put("f", b"1")
    assert below.location == f"{root.location}/d"
    assert not root.remove_folder("d")
    root.rename("d/f", "g")
    assert root.remove_folder("d")
    assert root.list() == ["g"]
    with pytest.raises(StorageError, match="rename"):
        root.rename("absent", "x")
    root.put("h", b"")
    os.utime(tmp_path / "h", (1, 1))
    assert abs(root.now() - time.time()) < 60
    assert root.list() == ["g", "h"]
    for name in ("one", "two"):
        root.make_folder(name)
    root.put("two/f", b"")
    assert not root.rename_new("one", "two")
    assert root.rename_new("one", "three")
    with pytest.raises(StorageError, match="rename"):
        root.rename_new("one", "four")
    assert root.list() == ["g", "h", "three", "two"]


@given(st.integers(0, 3 * MIB))
@settings(max_examples=20, deadline=None)
def test_digest_blocks(size):
    data = bytes(size)
    expected = [
        xxhash.xxh3_128(data[i : i + MIB]).digest() for i in range(0, size, MIB)
    ]
    assert digest_blocks(memoryview(data)) == b"".join(expected)


def test_several_writers_fill_one_file(tmp_path):
    root = LocalStorage(tmp_path)
    with root.update("sub/x") as first, root.update("sub/x") as second:
        second.write_at(6, [memoryview(b"wor"), memoryview(b"ld")])
        first.write_at(0, [memoryview(b"hello")])
    assert root.get("sub/x") == b"hello\0world"
    with root.update("sub/x") as again:  # as it is, not emptied
        again.write_at(5, [memoryview(b" ")])
    assert root.get("sub/x") == b"hello world"
    failing = root.update("sub/x")
    failing.write_at(0, [memoryview(b"J")])
    failing.abort()
    assert (
        root.get("sub/x") == b"Jello world"
    )  # what others wrote there is not thrown away
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"cannot write .*link"):
        root.update("link")
    assert not (tmp_path / "elsewhere").exists()


def test_an_updated_file_that_the_disk_refuses(tmp_path):
    """One in /dev/full: everything but the room is there."""
    with pytest.raises(StorageError, match=r"cannot write /dev/full.*free some space"):
        LocalStorage("/dev").update("full").write_at(0, [memoryview(b"x")])


def test_links_are_followed_where_asked(tmp_path):
    (tmp_path / "outside").write_bytes(b"there")
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "link").symlink_to("../outside")
    (tmp_path / "in" / "loop").symlink_to("loop")
    (tmp_path / "in" / "gone").symlink_to("nowhere")
    (tmp_path / "in" / "folder").symlink_to(tmp_path)
    root = LocalStorage(tmp_path / "in")
    assert root.size("link") is None
    with pytest.raises(CorruptCheckpoint, match="link"):
        root.open("link")
    following = root.following()
    assert (following.size("link"), following.get("link")) == (5, b"there")
    assert following.size("gone") is None
    assert following.size("folder") is None
    with pytest.raises(CorruptCheckpoint):  # folders are entered as ever
        following.open("folder/outside")
    with pytest.raises(CorruptCheckpoint, match="loop"):
        following.open("loop")
    assert following.size("loop") is None  # as a link to nothing
    assert root.size("link") is None


def test_a_single_file_sees_itself_only(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    (tmp_path / "y").write_bytes(b"?")
    (tmp_path / "link").symlink_to("x")
    root = SingleFile(tmp_path / "link")
    assert (root.list(), root.list("sub"), root.size("x"), root.size("y")) == (
        ["x"],
        [],
        3,
        None,
    )
    assert root.get("x") == b"old"
    with pytest.raises(FileNotFoundError):
        root.open("y")
    assert root.is_current()
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "new").rename(tmp_path / "x")
    assert root.get("x") == b"old"  # the file that was opened, whatever bears its name
    assert not root.is_current()
    assert pickle.loads(pickle.dumps(root)).get("x") == b"new"
    (tmp_path / "x").unlink()
    assert not root.is_current()
    with pytest.raises(FileNotFoundError):
        SingleFile(tmp_path / "x")
    with pytest.raises(CorruptCheckpoint, match="not a regular file"):
        SingleFile(tmp_path)


@pytest.mark.parametrize("links", [True, False])
def test_renaming_where_nothing_may_be_replaced(root, tmp_path, monkeypatch, links):
    def refuse(*args, **options):
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    root.put("folder/a", b"new")
    root.put("b", b"old")
    with pytest.raises(StorageError, match=r"rename folder/a to .*/b: File exists"):
        root.rename("folder/a", "b", replace=False)
    assert (root.get("folder/a"), root.get("b")) == (b"new", b"old")
    root.rename("folder/a", "c", replace=False)
    assert root.get("c") == b"new"
    assert os.listdir(tmp_path / "folder") == []
    root.rename("c", "b")
    assert root.get("b") == b"new"


def test_files_of_another_folder_get_names_here(tmp_path):
    there = LocalStorage(tmp_path / "there", create=True)
    here = LocalStorage(tmp_path / "here", create=True)
    there.put("data", b"bytes")
    here.link_files(there, ["data"])
    there.delete("data")
    assert here.get("data") == b"bytes"
    with pytest.raises(CorruptCheckpoint, match="is not a name"):
        here.link_files(there, ["../here/data"])
    with pytest.raises(StorageError, match="make a hard link of"):
        here.link_files(there, ["data"])
