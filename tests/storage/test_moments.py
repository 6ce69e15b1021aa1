"""File systems that refuse a call for a moment, and files whose sizes appear late."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor, limits
from megackpt.checkpoint import transaction
from megackpt.errors import CorruptCheckpoint, StorageError
from megackpt.storage import LocalStorage, files, kernel

MOMENTARY = [errno.ESTALE, errno.EINTR, errno.EAGAIN, errno.EIO]


@pytest.fixture(autouse=True)
def allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test uses up that of another."""
    monkeypatch.setattr(files, "allowance", files._Allowance())


class Refusing:
    """Stands for a function of os, and refuses the first ``count`` calls that ``chosen`` picks."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        number: int,
        count: int,
        chosen: Callable[..., bool] = lambda *_, **__: True,
    ) -> None:
        self.real, self.number, self.left = getattr(os, name), number, count
        self.chosen, self.calls = chosen, 0
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not self.chosen(*args, **named):
            return self.real(*args, **named)
        self.calls += 1
        if self.left > 0:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))
        return self.real(*args, **named)


def below(*args: Any, **_: Any) -> bool:
    return isinstance(args[0], int) or args[0] in ("file", "folder")


USES: dict[str, Callable[[LocalStorage], object]] = {
    "open": lambda root: root.get("folder/file"),
    "fstat": lambda root: root._opened_size("folder/file"),
    "stat": lambda root: root.size("folder/file"),
    "listdir": lambda root: root.list("folder"),
    "preadv": lambda root: root.get("folder/file"),
}


@pytest.mark.parametrize("number", MOMENTARY, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", USES)
def test_a_burst_is_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    root = LocalStorage(tmp_path)
    root.put("folder/file", b"data")
    expected = USES[name](root)
    refusing = Refusing(monkeypatch, name, number, 3, below)
    assert USES[name](root) == expected
    assert refusing.left == 0


@pytest.mark.parametrize("name", USES)
def test_what_lasts_is_an_error_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    root = LocalStorage(tmp_path)
    root.put("folder/file", b"data")
    began = time.monotonic()
    with monkeypatch.context() as refused:
        Refusing(refused, name, errno.EIO, 1000, below)
        with pytest.raises(StorageError, match="Input/output error"):
            USES[name](root)
    assert time.monotonic() - began < 3 * limits.RETRY_SECONDS


def test_a_dead_disk_does_not_make_every_call_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RETRY_MINUTE_SECONDS", 0.1)
    root = LocalStorage(tmp_path)
    root.put("file", b"data")
    refusing = Refusing(monkeypatch, "stat", errno.EIO, 1000, below)
    for _ in range(20):
        with pytest.raises(StorageError):
            root.size("file")
    assert refusing.calls < 30


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC, errno.ENAMETOOLONG])
def test_other_errors_are_raised_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    root = LocalStorage(tmp_path)
    root.put("file", b"data")
    refusing = Refusing(monkeypatch, "stat", number, 1, below)
    with pytest.raises(StorageError):
        root.size("file")
    assert refusing.calls == 1


CHANGES: dict[str, Callable[[LocalStorage], object]] = {
    "fsync": lambda root: root.put("new", b"data"),
    "writev": lambda root: root.put("new", b"data"),
    "rename": lambda root: root.put("new", b"data"),
    "link": lambda root: root.rename("file", "new", replace=False),
    "mkdir": lambda root: root.make_folder("new"),
}


@pytest.mark.parametrize("number", MOMENTARY, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_never_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    root = LocalStorage(tmp_path)
    root.put("file", b"data")
    refusing = Refusing(monkeypatch, name, number, 1)
    with pytest.raises(StorageError):
        CHANGES[name](root)
    assert refusing.calls == 1


def declared(value: float) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((4096,), value))}


def value_of(where: Path) -> float:
    return float(megackpt.load_plain_tensors(where)["w"].unique())


def test_an_operation_counts_its_repetitions_and_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    megackpt.save(declared(1), tmp_path / "c")

    def is_here(fd: int, *_: object) -> bool:
        # A thread that an earlier test gave up may still read.
        return Path(os.readlink(f"/proc/self/fd/{fd}")).is_relative_to(tmp_path)

    refusing = Refusing(monkeypatch, "preadv", errno.ESTALE, 2, is_here)
    heard: list[megackpt.Event] = []
    with megackpt.watching(heard.append), caplog.at_level(logging.WARNING):
        state = megackpt.load(declared(0), tmp_path / "c")
        megackpt.load(declared(0), tmp_path / "c")
    assert state["w"].eq(1).all()
    assert refusing.left == 0
    first, second = [event.retries for event in heard if event.stage == "total"]
    assert (first, second) == (2, 0)
    assert Counter(event.retries for event in heard)[2] >= 1
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert "2 repetitions on rank 0" in warning.getMessage()


class Late:
    """Shows the data files of a save as empty, or not at all, until they were looked at so often."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, looks: int, size: int | None
    ) -> None:
        monkeypatch.setattr(kernel, "is_networked", lambda _: True)
        self.looks, self.size, self.real = looks, size, LocalStorage._opened_size

        def look(root: LocalStorage, name: str) -> int | None:
            return self.look(root, name)

        monkeypatch.setattr(LocalStorage, "_opened_size", look)

    def look(self, root: LocalStorage, name: str) -> int | None:
        if ".megackpt-" in root.location and name.endswith(".distcp"):
            self.looks -= 1
            if self.looks >= 0:
                return self.size
        return self.real(root, name)


@pytest.mark.parametrize("size", [0, None])
def test_a_file_that_appears_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    Late(monkeypatch, 4, size)
    heard: list[megackpt.Event] = []
    with megackpt.watching(heard.append):
        megackpt.save(declared(1), tmp_path / "c")
    assert value_of(tmp_path / "c") == 1
    assert heard[-1].retries >= 1


@pytest.mark.parametrize("size", [0, None])
def test_a_file_that_never_appears_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    monkeypatch.setattr(limits, "LATE_FILE_SECONDS", 0.5)
    megackpt.save(declared(1), tmp_path / "c")
    late = Late(monkeypatch, 1 << 20, size)
    state = "truncated" if size == 0 else "missing"
    with pytest.raises(StorageError, match=rf"written by rank 0, is {state}"):
        megackpt.save(declared(2), tmp_path / "c")
    assert (1 << 20) - late.looks > 3
    assert value_of(tmp_path / "c") == 1
    assert os.listdir(tmp_path) == ["c"]


def test_a_save_that_another_one_replaced_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Late(monkeypatch, 1 << 20, None)
    monkeypatch.setattr(transaction.DirectoryTarget, "holds", lambda *_: False)
    began = time.monotonic()
    with pytest.raises(megackpt.errors.SaveInProgress):
        megackpt.save(declared(1), tmp_path / "c")
    assert time.monotonic() - began < limits.LATE_FILE_SECONDS


def test_a_load_of_a_broken_checkpoint_does_not_wait(tmp_path: Path) -> None:
    megackpt.save(declared(1), tmp_path / "c")
    (data,) = (tmp_path / "c").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:1000])
    began = time.monotonic()
    with pytest.raises(CorruptCheckpoint):
        megackpt.load(declared(0), tmp_path / "c")
    assert not megackpt.verify(tmp_path / "c").ok
    assert time.monotonic() - began < 2


def test_sizes_on_a_network_are_those_of_opened_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache shows an old size for the name."""
    monkeypatch.setattr(kernel, "is_networked", lambda _: True)
    root = LocalStorage(tmp_path)
    root.put("file", b"data")
    real = os.stat

    def cached(*args: Any, **named: Any) -> os.stat_result:
        fields = list(real(*args, **named))
        fields[6] = 0
        return os.stat_result(fields)

    monkeypatch.setattr(os, "stat", cached)
    assert root.size("file") == 0
    assert root.sizes(["file", "absent"]) == [4, None]
