"""Saving over everything that can stand in a directory, and the words when it cannot be done."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import time
import uuid
from pathlib import Path

import pytest

from megackpt import limits
from megackpt.checkpoint import (
    begin,
    clear,
    directory_target,
    marker as markers,
    open_checkpoint,
    open_same,
    staging_storage,
)
from megackpt.errors import (
    CheckpointExists,
    CheckpointReplaced,
    NotACheckpoint,
    SaveInProgress,
    StorageError,
)
from megackpt.storage import kernel

OWN = {"rank0.bin", "rank1.bin", "toc", "metadata.json", "megackpt.index"}


@pytest.fixture(params=["exchange", "two renames"])
def either_way(request, monkeypatch):
    if request.param == "two renames":
        monkeypatch.setattr(kernel, "libc_function", lambda *_: None)


def entries(path: Path) -> set[str]:
    return set(os.listdir(path))


def test_new_directory_with_parents(tmp_path, saves):
    saves.save(tmp_path / "a/b/c", 1)
    assert saves.load(tmp_path / "a/b/c") == 1
    assert entries(tmp_path / "a/b/c") == OWN
    assert entries(tmp_path / "a/b") == {"c"}


def test_replacing_keeps_what_is_foreign(tmp_path, saves, either_way, caplog):
    where = tmp_path / "ckpt"
    saves.save(where, 1)
    (where / "notes.txt").write_text("mine")
    (where / "logs").mkdir()
    (where / "logs/run").write_text("mine too")
    os.chmod(where, 0o2750)
    os.chown(where, 12, 34)
    caplog.set_level("DEBUG", logger="megackpt.checkpoint")
    saves.save(where, 2)
    assert saves.load(where) == 2
    assert entries(where) == OWN | {"notes.txt", "logs"}
    assert (where / "logs/run").read_text() == "mine too"
    status = where.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (
        0o2750,
        12,
        34,
    )
    assert entries(tmp_path) == {"ckpt"}
    assert "replacing the checkpoint" in caplog.text


def test_files_that_could_not_be_determined_once_are_not_those_of_others(
    tmp_path, saves, monkeypatch
):
    where = tmp_path / "ckpt"
    saves.save(where, 1)
    target = directory_target.DirectoryTarget(str(where), create=False)

    def refuse(_folder):
        raise StorageError("an input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(directory_target, "own_files", refuse)
        for _ in range(2):
            with pytest.raises(StorageError, match="input/output"):
                target.refuse_collisions(["toc"], ())
    target.refuse_collisions(["toc"], ())


def test_foreign_files_that_appear_during_the_exchange(tmp_path, saves, monkeypatch):
    where = tmp_path / "ckpt"
    saves.save(where, 1)
    (where / "both").write_text("old")
    os.utime(where / "both", (1, 1))
    (where / "older_there").write_text("new")
    real = kernel.exchange

    def then_others_write(*paths):
        done = real(*paths)
        (where / "both").write_text("newer")
        (where / "older_there").write_text("old")
        os.utime(where / "older_there", (1, 1))
        return done

    monkeypatch.setattr(kernel, "exchange", then_others_write)
    saves.save(where, 2)
    assert (where / "both").read_text() == "newer"
    assert (where / "both.old").read_text() == "old"
    assert (where / "older_there").read_text() == "new"
    assert (where / "older_there.old").read_text() == "old"


def test_a_foreign_file_with_a_name_of_the_new_checkpoint(tmp_path, saves):
    where = tmp_path / "ckpt"
    where.mkdir()
    (where / "rank0.bin").write_text("precious")
    with pytest.raises(StorageError, match=r"rank0\.bin would collide with this save"):
        saves.save(where, 1)
    assert entries(where) == {"rank0.bin"}
    assert (where / "rank0.bin").read_text() == "precious"


def test_a_small_file_that_others_put_there_meanwhile(tmp_path, saves):
    """Just before the commit: the save fails, and the file stays."""

    class Slow(type(open_backend())):
        def finish(self, root, manifest):
            (tmp_path / "c").mkdir()
            (tmp_path / "c/metadata.json").write_text("mine")
            return super().finish(root, manifest)

    with pytest.raises(SaveInProgress, match="nothing of this save is committed"):
        saves.save(tmp_path / "c", 1, backend=Slow())
    assert entries(tmp_path) == {"c"}
    assert entries(tmp_path / "c") == {"metadata.json"}
    assert (tmp_path / "c/metadata.json").read_text() == "mine"


def test_a_checkpoint_without_index_is_replaced_too(tmp_path, saves):
    where = tmp_path / "ckpt"
    saves.save(where, 1)
    (where / "megackpt.index").unlink()
    (where / "other").touch()
    assert saves.load(where) == 1
    saves.save(where, 2)
    assert saves.load(where) == 2
    assert entries(where) == OWN | {"other"}


def test_a_damaged_checkpoint_is_replaced_and_nothing_else_lost(tmp_path, saves):
    where = tmp_path / "ckpt"
    saves.save(where, 1)
    (where / "megackpt.index").write_bytes(b"rubbish")
    (where / "other").touch()
    saves.save(where, 2)
    assert saves.load(where) == 2
    assert "other" in entries(where)


def test_overwrite_refused(tmp_path, saves):
    saves.save(tmp_path / "c", 1)
    way_out = (
        r"c holds a complete checkpoint: save elsewhere, or pass overwrite=True to"
    )
    with pytest.raises(CheckpointExists, match=way_out) as refused:
        saves.save(tmp_path / "c", 2, overwrite=False)
    assert "index" not in str(refused.value)
    assert saves.load(tmp_path / "c") == 1
    assert entries(tmp_path) == {"c"}


def test_symbolic_link_to_a_directory(tmp_path, saves, either_way):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk/real")
    for value in (1, 2):
        saves.save(tmp_path / "link", value)
        assert saves.load(tmp_path / "link") == value
    assert (tmp_path / "link").is_symlink()
    assert entries(tmp_path / "disk") == {"real"}
    assert entries(tmp_path) == {"disk", "link"}


@pytest.mark.parametrize("where", ["file", "file/below", "file/far/below"])
def test_a_file_in_the_way(tmp_path, saves, where):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file is in the way"):
        saves.save(tmp_path / where, 1)
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("where", ["/proc/x", "/proc/x/y"])
def test_a_file_system_that_takes_no_directories(saves, where):
    """mkdir says ENOENT there, as on an automatic mount without its server."""
    text = r"cannot make the directory /proc/\.?x.*: the file system takes no directory"
    with pytest.raises(StorageError, match=text):
        saves.save(Path(where), 1)


def test_the_directory_above_is_removed_meanwhile(tmp_path, saves):
    place = begin(tmp_path / "above/c", save_id="ab" * 16)
    shutil.rmtree(tmp_path / "above")
    with pytest.raises(StorageError, match="above was removed or moved"):
        place.target.settle(place.marker)
    place.abandon()


@pytest.mark.parametrize("before", [False, True])
def test_abort_removes_what_the_save_made_and_no_more(tmp_path, saves, before):
    where = tmp_path / "c"
    if before:
        saves.save(where, 1)
        (where / "other").touch()
    was = entries(where) if before else None
    place = begin(where, save_id="aa")
    place.announce(["rank0.bin", "metadata.json"])
    with place.storage.create("rank0.bin") as writer:
        writer.write([memoryview(b"x")])
    assert (stat.S_IMODE(os.stat(place.path).st_mode) == 0o700) == before
    place.abort()
    place.abort()
    assert (entries(where) if before else None) == was
    assert entries(tmp_path) == ({"c"} if before else set())


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(limits, "LATE_FILE_SECONDS", 0.5)


def test_files_that_the_coordinator_cannot_see(tmp_path, saves, impatient):
    class OnAnotherDisk(type(open_backend())):
        def write(self, root, plan, data):
            result = super().write(root, plan, data)
            if plan == 1:
                root.delete("rank1.bin")
            return result

    with pytest.raises(
        StorageError,
        match=r"rank1\.bin, written by rank 1, is missing.*shared between all",
    ):
        saves.save(tmp_path / "c", 1, backend=OnAnotherDisk())
    assert entries(tmp_path) == set()


def open_backend():
    from megackpt import strategies

    return strategies.backend_named("tiny")


def test_a_truncated_file_is_not_committed(tmp_path, saves, impatient):
    class Short(type(open_backend())):
        def write(self, root, plan, data):
            result = super().write(root, plan, data)
            os.truncate(Path(root.location) / f"rank{plan}.bin", 10)
            return result

    saves.save(tmp_path / "c", 1)
    with pytest.raises(StorageError, match=r"truncated \(10 of 1000 bytes\)"):
        saves.save(tmp_path / "c", 2, backend=Short())
    assert saves.load(tmp_path / "c") == 1
    assert entries(tmp_path) == {"c"}


@pytest.mark.parametrize("before", [False, True])
def test_other_ranks_find_the_place(tmp_path, saves, monkeypatch, before):
    where = tmp_path / "c"
    if before:
        saves.save(where, 1)
    place = begin(where, save_id="aa")
    with staging_storage(where, "aa") as storage:
        assert storage.location == place.path
    monkeypatch.setattr(directory_target, "_PAUSES", (0.0,))
    for other in (where, tmp_path / "elsewhere"):
        with pytest.raises(StorageError, match="shared between all hosts"):
            staging_storage(other, "bb").__enter__()
    place.abort()


def test_a_host_without_the_shared_directory_is_named(tmp_path):
    with pytest.raises(StorageError, match=f"{socket.gethostname()}.*is it shared"):
        staging_storage(tmp_path / "not mounted/c", "aa").__enter__()


def child_that_begins(where: Path) -> int:
    """A process that has begun to save and hangs."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        place = begin(where, save_id=uuid.uuid4().hex)
        place.announce(["rank0.bin"])
        (Path(place.path) / "rank0.bin").write_text("part")
        os.write(tell, b"x")
        while True:
            time.sleep(100)
    os.read(ready, 1)
    os.close(ready)
    os.close(tell)
    return pid


@pytest.mark.parametrize("before", [False, True])
def test_a_save_does_not_wait_for_another_one(tmp_path, saves, before):
    where = tmp_path / "c"
    if before:
        saves.save(where, 1)
    pid = child_that_begins(where)
    try:
        if before:
            assert saves.load(where) == 1
        else:
            with pytest.raises(
                NotACheckpoint, match=f"save by process {pid} .* is running"
            ):
                saves.load(where)
        saves.save(where, 2)
        assert saves.load(where) == 2
        assert entries(tmp_path) == {"c"}
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_what_a_killed_save_left_is_removed_at_begin(tmp_path, saves):
    where = tmp_path / "c"
    pid = child_that_begins(where)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    with pytest.raises(NotACheckpoint, match="died before it was complete"):
        saves.load(where)
    place = begin(where, save_id="bb")
    assert entries(tmp_path) == {".c.megackpt-bb"}
    place.abort()
    assert entries(tmp_path) == set()


def test_of_two_saves_of_one_process_the_first_to_commit_wins(tmp_path, saves):
    places = [begin(tmp_path / "c", save_id=save_id) for save_id in ("aa", "bb")]
    results = [[saves.write(place, rank, 1) for rank in range(2)] for place in places]
    saves.commit(places[1], results[1])
    with pytest.raises(SaveInProgress, match="another save"):
        saves.commit(places[0], results[0])
    places[0].abort()
    assert saves.load(tmp_path / "c") == 1
    assert open_checkpoint(tmp_path / "c").manifest.save_id == "bb"
    assert entries(tmp_path) == {"c"}


def test_a_place_that_is_dropped_is_a_dead_save(tmp_path, saves):
    begin(tmp_path / "c", save_id="aa").announce(["rank0.bin"])
    saves.save(tmp_path / "c", 1)
    assert entries(tmp_path / "c") == OWN


def left_by(path: Path, content: bytes) -> Path:
    """What an unfinished save beside ``path`` left."""
    staging = path.parent / f".{path.name}.megackpt-ff"
    staging.mkdir(parents=True, exist_ok=True)
    (staging / "rank0.bin").write_text("half")
    (staging / ".megackpt-saving-ff").write_bytes(content)
    return staging


def test_what_a_save_on_another_host_left_is_removed_after_the_next_commit(
    tmp_path, saves
):
    where = tmp_path / "c"
    fields = {"host": "other", "pid": os.getpid(), "boot": "elsewhere"}
    fields["time"] = time.time()
    staging = left_by(where, json.dumps(fields).encode())
    with pytest.raises(NotACheckpoint, match=r"on host 'other'.* is running, or died"):
        saves.load(where)
    place = begin(where, save_id="aa")
    assert staging.exists()
    place.abort()
    with pytest.raises(SaveInProgress, match="on host 'other'"):
        clear(where)
    assert staging.exists()
    saves.save(where, 1)
    assert entries(tmp_path) == {"c"}


def test_what_another_host_left_is_cleared_after_a_day(tmp_path, monkeypatch):
    now = time.time()
    fields = {"host": "other", "pid": 1, "boot": "elsewhere", "time": now - 90_000}
    left_by(tmp_path / "c", json.dumps(fields).encode())
    clear(tmp_path / "c")
    assert entries(tmp_path) == set()


def test_a_number_that_another_process_has_by_now(tmp_path, saves):
    fields = {"pid": 1, "started": 1, "boot": markers.boot(), "time": time.time()}
    fields["namespace"] = markers.namespace()
    # A marker of an older version does not say in which time namespace it counted.
    left_by(tmp_path / "c", json.dumps(fields).encode())
    with pytest.raises(SaveInProgress):
        clear(tmp_path / "c")
    fields["time_namespace"] = markers.namespace("time")
    left_by(tmp_path / "c", json.dumps(fields).encode())
    clear(tmp_path / "c")
    assert entries(tmp_path) == set()


NONSENSE = [
    b"",
    b"{",
    b"[]",
    b'{"names": ["../../x", "/etc", 5], "pid": "x"}',
    b"[" * 10000,
]


@pytest.mark.parametrize("content", NONSENSE)
def test_a_marker_that_makes_no_sense(tmp_path, saves, content):
    where = tmp_path / "a/c"
    left_by(where, content)
    (tmp_path / "x").touch()
    with pytest.raises(NotACheckpoint):
        saves.load(where)
    saves.save(where, 1)
    assert entries(tmp_path / "a") == {"c"}
    assert (tmp_path / "x").exists()


def test_a_save_whose_marker_was_removed_commits_nothing(tmp_path, saves):
    place = begin(tmp_path / "c", save_id="aa")
    os.unlink(tmp_path / ".c.megackpt-aa/.megackpt-saving-aa")
    with pytest.raises(SaveInProgress, match="has taken over"):
        saves.commit(place, [])
    place.abort()


def test_the_working_directory_cannot_be_replaced(tmp_path, saves, monkeypatch):
    saves.save(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match="is the working directory of this process"):
        begin(tmp_path, save_id=uuid.uuid4().hex)
    assert saves.load(tmp_path) == 1


def test_mount_points_cannot_be_replaced(tmp_path, saves, monkeypatch):
    saves.save(tmp_path / "c", 1)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == str(tmp_path / "c"))
    with pytest.raises(StorageError, match="mount point"):
        saves.save(tmp_path / "c", 2)
    assert saves.load(tmp_path / "c") == 1


def test_the_old_checkpoint_can_be_read_on_while_it_is_replaced(tmp_path, saves):
    saves.save(tmp_path / "c", 1)
    opened = open_checkpoint(tmp_path / "c")
    root = open_same(tmp_path / "c", opened.manifest.save_id)
    reader = root.open("rank1.bin")
    saves.save(tmp_path / "c", 2)
    data = bytearray(1000)
    reader.read_into(0, [memoryview(data)])
    assert set(data) == {1}
    reader.close()
    with pytest.raises(FileNotFoundError):
        root.open("rank0.bin")
    with pytest.raises(CheckpointReplaced, match="load again"):
        open_same(tmp_path / "c", opened.manifest.save_id)


def test_a_failure_while_publishing_loses_nothing(tmp_path, saves, monkeypatch):
    """The exchange took place, then its fsync failed: the old directory is not what abort removes."""
    where = tmp_path / "c"
    saves.save(where, 1)
    (where / "other").write_text("x")
    real_exchange, real_fsync = kernel.exchange, os.fsync
    swapped = []

    def exchange(*paths):
        swapped.append(paths)
        return real_exchange(*paths)

    def fsync(fd):
        if len(swapped) == 1:
            swapped.append(())
            raise OSError(5, "Input/output error")
        real_fsync(fd)

    monkeypatch.setattr(kernel, "exchange", exchange)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError, match="Input/output error"):
        saves.save(where, 2)
    assert (
        saves.load(where) == 2
    )  # on the disk, but nobody promised that it survives a power cut
    saves.save(where, 3)
    assert saves.load(where) == 3
    assert entries(where) == OWN | {"other"}
    assert entries(tmp_path) == {"c"}
