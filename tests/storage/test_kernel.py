"""Operations on directories that only a local storage has: locks, and moves of entries."""

from __future__ import annotations

import errno

from megackpt.storage import (
    LocalStorage,
)


def test_a_lock_on_a_directory(tmp_path, monkeypatch):
    first, second = LocalStorage(tmp_path), LocalStorage(tmp_path)
    assert first.lock()
    assert first.lock()  # its own
    assert not second.lock()
    first.close()
    assert second.lock()

    def refuse(*args):
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert LocalStorage(tmp_path).lock()  # then nobody is kept out


def test_a_folder_is_merged_into_the_root(tmp_path):
    root = LocalStorage(tmp_path)
    root.put("a", b"old")
    root.put_new({"c/a": b"new", "c/below/b": b"b", "c/left": b"left"})
    root.merge_folder("c", ("left",))
    assert root.list() == ["a", "below"]
    assert (root.get("a"), root.get("below/b")) == (b"new", b"b")
    root.merge_folder("absent", ())
