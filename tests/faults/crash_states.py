"""What a power cut may leave on a disk, from a recording of all changes that a save makes.

The model is weaker than any file system in use. Of the changes of names in a directory since its last fsync, any
subset may have reached the disk, or any prefix. Of the writes to a file since its last fsync, each may have reached the
disk, may be missing, or may have left zeros. An fsync makes durable what it names, and nothing else.
"""

from __future__ import annotations

import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megackpt.storage import kernel


class Change(NamedTuple):
    """One recorded call.

    ``kind``: "names" (``updates`` of directories that happen together), "write" (``data`` at ``start`` of ``inode``),
    "truncate" (``inode`` to ``start`` bytes), "sync" (``inode``).
    """

    kind: str
    updates: tuple[tuple[int, str, int | None], ...] = ()  # directory, name, inode
    inode: int = 0
    start: int = 0
    data: bytes = b""


@dataclass
class Recording:
    """The tree before, by numbers of inodes, and the changes after it. ``root`` is the recorded directory."""

    root: int = 0
    folders: dict[int, dict[str, int]] = field(default_factory=dict)
    files: dict[int, bytes] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)


class Recorder:
    """Records the calls of this process that change the tree below ``root``."""

    def __init__(self, root: Path, *, with_fsync: bool) -> None:
        self.recording = Recording()
        self._with_fsync = with_fsync
        self._numbers: dict[tuple[int, int], int] = {}  # of inodes that exist now
        self._lock = threading.RLock()
        self.recording.root = self._scan(str(root))

    def _new(self, status: os.stat_result) -> int:
        number = len(self.recording.folders) + len(self.recording.files) + 1
        self._numbers[status.st_dev, status.st_ino] = number
        return number

    def _scan(self, path: str) -> int:
        """Number a tree that is there, and keep its content."""
        number = self._new(os.lstat(path))
        if os.path.isdir(path):
            entries = self.recording.folders.setdefault(number, {})
            for name in os.listdir(path):
                entries[name] = self._scan(os.path.join(path, name))
        else:
            self.recording.files[number] = Path(path).read_bytes()
        return number

    def _number(self, fd: int) -> int | None:
        status = os.fstat(fd)
        return self._numbers.get((status.st_dev, status.st_ino))

    def _entry(self, path: Any, dir_fd: int | None) -> tuple[int | None, str]:
        """The number of the directory, and the name in it."""
        folder, name = os.path.split(os.fsdecode(path))
        status = os.stat(folder or ".", dir_fd=dir_fd)
        return self._numbers.get((status.st_dev, status.st_ino)), name

    def _inode(self, path: Any, dir_fd: int | None) -> int | None:
        status = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        return self._numbers.get((status.st_dev, status.st_ino))

    def _add(self, change: Change) -> None:
        self.recording.changes.append(change)

    def _names(self, *updates: tuple[tuple[int | None, str], int | None]) -> None:
        """Record changes of names that happen together; directories outside of the tree are left out."""
        inside = [(entry[0], entry[1], n) for entry, n in updates if entry[0]]
        if inside:
            self._add(Change("names", updates=tuple(inside)))  # type: ignore[arg-type]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Record the calls of the functions of ``os`` that megackpt uses."""
        wrappers = {
            "open": self._open,
            "mkdir": self._mkdir,
            "rmdir": self._unlink,
            "unlink": self._unlink,
            "rename": self._rename,
            "link": self._link,
            "write": self._write,
            "writev": self._writev,
            "pwrite": self._pwrite,
            "pwritev": self._pwritev,
            "ftruncate": self._truncate,
            "fsync": self._sync,
        }
        real: dict[str, Callable[..., Any]] = {n: getattr(os, n) for n in wrappers}
        self._real = real
        renamed = kernel._rename

        def kernel_rename(folder: int, name: str, to: str, flag: int) -> bool:
            with self._lock:
                one, other = self._entry(name, folder), self._entry(to, folder)
                moved = self._inode(name, folder)
                swapped = None
                if flag == kernel._RENAME_EXCHANGE:
                    swapped = self._inode(to, folder)
                done = renamed(folder, name, to, flag)
                if done:
                    self._names((one, swapped), (other, moved))
                return done

        def locked(wrapper: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with self._lock:
                    return wrapper(*args, **kwargs)

            return call

        try:
            for name, wrapper in wrappers.items():
                setattr(os, name, locked(wrapper))
            kernel._rename = kernel_rename
            yield
        finally:
            for name, function in real.items():
                setattr(os, name, function)
            kernel._rename = renamed

    def _open(
        self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        new = flags & os.O_CREAT and not self._exists(path, dir_fd)
        fd: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        if new:
            entry = self._entry(path, dir_fd)
            number = self._new(os.fstat(fd))
            self.recording.files[number] = b""
            self._names((entry, number))
        return fd

    @staticmethod
    def _exists(path: Any, dir_fd: int | None) -> bool:
        try:
            os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _mkdir(
        self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> None:
        self._real["mkdir"](path, mode, dir_fd=dir_fd)
        number = self._new(os.stat(path, dir_fd=dir_fd))
        self.recording.folders[number] = {}
        self._names((self._entry(path, dir_fd), number))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        entry = self._entry(path, dir_fd)
        function = "rmdir" if self._is_folder(path, dir_fd) else "unlink"
        self._real[function](path, dir_fd=dir_fd)
        self._names((entry, None))

    def _is_folder(self, path: Any, dir_fd: int | None) -> bool:
        return self._inode(path, dir_fd) in self.recording.folders

    def _rename(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
    ) -> None:
        one, other = self._entry(src, src_dir_fd), self._entry(dst, dst_dir_fd)
        moved = self._inode(src, src_dir_fd)
        self._real["rename"](src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        self._names((one, None), (other, moved))

    def _link(self, src: Any, dst: Any, **options: Any) -> None:
        status = os.stat(src, dir_fd=options.get("src_dir_fd"))  # also /proc/self/fd/3
        inode = self._numbers.get((status.st_dev, status.st_ino))
        self._real["link"](src, dst, **options)
        self._names((self._entry(dst, options.get("dst_dir_fd")), inode))

    def _written(self, fd: int, start: int, buffers: Any, done: int) -> None:
        number = self._number(fd)
        if number in self.recording.files:
            data = b"".join(bytes(buffer) for buffer in buffers)[:done]
            self._add(Change("write", inode=number, start=start, data=data))

    def _write(self, fd: int, data: Any) -> int:
        return self._writev(fd, [data])

    def _writev(self, fd: int, buffers: Any) -> int:
        start = os.lseek(fd, 0, os.SEEK_CUR) if self._number(fd) else 0
        done: int = self._real["writev"](fd, buffers)
        self._written(fd, start, buffers, done)
        return done

    def _pwrite(self, fd: int, data: Any, start: int) -> int:
        return self._pwritev(fd, [data], start)

    def _pwritev(self, fd: int, buffers: Any, start: int, flags: int = 0) -> int:
        done: int = self._real["pwritev"](fd, buffers, start, flags)
        self._written(fd, start, buffers, done)
        return done

    def _truncate(self, fd: int, length: int) -> None:
        self._real["ftruncate"](fd, length)
        if number := self._number(fd):
            self._add(Change("truncate", inode=number, start=length))

    def _sync(self, fd: int) -> None:
        if not self._with_fsync:
            return
        number = self._number(fd)
        self._real["fsync"](fd)
        if number:
            self._add(Change("sync", inode=number))


def recorded(
    save: Callable[[], object], root: Path, folder: Path, *, with_fsync: bool = True
) -> Recording:
    """The changes that ``save`` makes below ``root``, in a process that is dead afterwards."""
    kept = folder / "recording"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            recorder = Recorder(root, with_fsync=with_fsync)
            with recorder.installed():
                save()
            kept.write_bytes(pickle.dumps(recorder.recording))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    found: Recording = pickle.loads(kept.read_bytes())
    return found


class CrashState:
    """A tree that a power cut after the first ``cut`` changes may leave."""

    def __init__(self, recording: Recording, cut: int, dice: random.Random) -> None:
        self._root = recording.root
        changes = recording.changes[:cut]
        synced = {c.inode: i for i, c in enumerate(changes) if c.kind == "sync"}
        self._folders = {n: dict(entries) for n, entries in recording.folders.items()}
        self._files = {n: bytearray(data) for n, data in recording.files.items()}
        prefix = dice.choice([None, dice.randint(0, cut)])
        chance = dice.choice(
            [0.1, 0.5, 0.9]
        )  # of what is not durable, reaches the disk
        fates = dice.choice([["lost"], ["zeros"], ["lost", "zeros", "whole"]])
        for i, change in enumerate(changes):
            if change.kind == "names":
                durable = any(
                    i < synced.get(folder, -1) for folder, *_ in change.updates
                )
                kept = i < prefix if prefix is not None else dice.random() < chance
                if durable or kept:
                    self._rename(change)
            elif change.kind in ("write", "truncate"):
                durable = i < synced.get(change.inode, -1)
                self._write(change, "whole" if durable else dice.choice(fates))

    def _rename(self, change: Change) -> None:
        for folder, name, inode in change.updates:
            if inode is None:
                self._folders[folder].pop(name, None)
            else:
                self._folders[folder][name] = inode

    def _write(self, change: Change, fate: str) -> None:
        file, start = self._files[change.inode], change.start
        if fate == "lost":
            return
        if change.kind == "truncate":
            del file[start:]
            file.extend(bytes(start - len(file)))
            return
        stop = start + len(change.data)
        file.extend(bytes(max(0, stop - len(file))))
        file[start:stop] = change.data if fate == "whole" else bytes(stop - start)

    def make(self, where: Path) -> None:
        """Make this tree at a path that does not exist yet."""
        self._make(self._root, where, set())

    def _make(self, number: int, where: Path, above: set[int]) -> None:
        if number in self._files:
            where.write_bytes(self._files[number])
            return
        where.mkdir()
        for name, entry in self._folders[number].items():
            # A directory that moved into another one, and is still seen at its old place.
            if entry not in above:
                self._make(entry, where / name, {*above, number})


def tree(path: Path) -> dict[str, bytes | None]:
    """All names below a directory, with the content of files."""
    return {
        str(found.relative_to(path)): found.read_bytes() if found.is_file() else None
        for found in sorted(path.rglob("*"))
    }
