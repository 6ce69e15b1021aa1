"""Marks of saves that no save made, and saves that fail where they are least expected to."""

from __future__ import annotations

import json
import os
import uuid

import pytest

from megackpt.checkpoint import begin, marker as markers
from megackpt.errors import NotACheckpoint, StorageError


@pytest.mark.parametrize(
    "fields",
    [
        {"time": 1e300},
        {"time": float("nan")},
        {"time": -1e18},
        {"save_id": "../x"},
        {"base": ["../x"]},
        {"base": "a\0b" * 5000},
        {"removes": "yes"},
        {
            "pid": 10**300,
            "boot": markers.boot(),
            "namespace": markers.namespace(),
        },
    ],
)
def test_markers_that_lie(tmp_path, saves, fields):
    where, staging = tmp_path / "c", tmp_path / ".c.megackpt-ff"
    staging.mkdir()
    (tmp_path / "x").touch()
    (staging / ".megackpt-saving-ff").write_text(json.dumps(fields))
    with pytest.raises(NotACheckpoint, match="died before it was complete"):
        saves.load(where)
    for value in (1, 2):
        saves.save(where, value)
        assert saves.load(where) == value
    assert not staging.exists()
    assert (tmp_path / "x").exists()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_siblings_that_are_no_folders(tmp_path, saves, kind):
    sibling = tmp_path / ".c.megackpt-ff"
    (tmp_path / "other").mkdir()
    (tmp_path / "other/x").touch()
    sibling.touch() if kind == "file" else sibling.symlink_to("other")
    with pytest.raises(NotACheckpoint, match="does not exist"):
        saves.load(tmp_path / "c")
    for value in (1, 2):
        saves.save(tmp_path / "c", value)
        assert saves.load(tmp_path / "c") == value
    assert sibling.exists()
    assert (tmp_path / "other/x").exists()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("failing", range(1, 8))
@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), KeyboardInterrupt()]
)
def test_a_save_that_fails_at_any_fsync_is_a_dead_save(
    tmp_path, saves, monkeypatch, before, failing, error
):
    """Also for the process that it failed in, which goes on living."""
    where = tmp_path / "c"
    if before:
        saves.save(where, 1)
    real, count = os.fsync, iter(range(1, 1000))

    def fsync(fd):
        if next(count) == failing:
            raise error
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises((StorageError, KeyboardInterrupt)):
        saves.save(where, 2)
    monkeypatch.setattr(os, "fsync", real)
    saves.save(where, 3)
    assert saves.load(where) == 3


def test_a_rank_that_writes_on_after_the_save_has_failed(
    tmp_path, saves, monkeypatch, caplog
):
    where = tmp_path / "c"
    saves.save(where, 1)
    place = begin(where, save_id=uuid.uuid4().hex)
    place.announce(["late.bin"])
    real = os.rmdir

    def rmdir(name, **options):
        (tmp_path / os.path.basename(place.path) / "late.bin").write_text("late")
        real(name, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    caplog.set_level("WARNING", logger="megackpt.checkpoint")
    place.abort()
    monkeypatch.setattr(os, "rmdir", real)
    assert "the next save will" in caplog.text
    saves.save(where, 2)
    assert saves.load(where) == 2
    assert os.listdir(tmp_path) == ["c"]
