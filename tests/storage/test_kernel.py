"""What Linux offers beyond the os module: locks of directories."""

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
