"""System calls that change files, told to a supervisor before they happen: to be counted, answered, or never to return.

A seccomp filter hands them over, of all threads of a process, those of C++ libraries included (x86-64, Linux 5.9).
Source of numbers and layouts: linux/seccomp.h, linux/filter.h, asm/unistd_64.h.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from dataclasses import dataclass

ON_FILES = {
    "write": 1, "pwrite64": 18, "writev": 20, "sendfile": 40, "fsync": 74, "fdatasync": 75, "ftruncate": 77,
    "fchmod": 91, "fchown": 93, "sync_file_range": 277, "fallocate": 285, "pwritev": 296, "syncfs": 306,
    "copy_file_range": 326, "pwritev2": 328,
}  # fmt: skip
"""Calls on an open file, and their numbers. Where there are two, the last is the one that changes."""
ON_NAMES = {
    "truncate": 76, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87, "symlink": 88,
    "chmod": 90, "chown": 92, "lchown": 94, "open": 2,
}  # fmt: skip
"""Calls on a name; of those with two, the last is the new one."""
ON_NAMES_IN_FOLDERS = {
    "openat": 257, "mkdirat": 258, "fchownat": 260, "unlinkat": 263, "renameat": 264, "linkat": 265,
    "fchmodat": 268, "utimensat": 280, "renameat2": 316, "openat2": 437, "fchmodat2": 452,
}  # fmt: skip
"""The same with the open folder before each name."""
_NAMES = {
    number: name for name, number in (ON_FILES | ON_NAMES | ON_NAMES_IN_FOLDERS).items()
}
_LATER_FILE = {"sendfile": 0, "copy_file_range": 2}  # which argument
_LATER_NAME = {"rename", "link", "symlink", "renameat", "linkat", "renameat2"}

WRITES = ("write", "pwrite64", "writev", "pwritev")

_SECCOMP, _SET_FILTER, _NEW_LISTENER, _NO_NEW_PRIVILEGES, _GET_FILE = 317, 1, 8, 38, 438
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_GO_ON = 1
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _TELL = 0x7FFF0000, 0x7FC00000


def watched() -> int:
    """From here on, this thread and those that it starts tell of their calls; the descriptor to listen on."""
    numbers = sorted(_NAMES)
    rules = [struct.pack("HBBI", _LOAD, 0, 0, 0)]
    rules += [
        struct.pack("HBBI", _EQUAL, len(numbers) - i, 0, n)
        for i, n in enumerate(numbers)
    ]
    rules += [
        struct.pack("HBBI", _RETURN, 0, 0, _ALLOW),
        struct.pack("HBBI", _RETURN, 0, 0, _TELL),
    ]
    program = ctypes.create_string_buffer(b"".join(rules))
    told = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(program))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    listener = libc.syscall(_SECCOMP, _SET_FILTER, _NEW_LISTENER, told)
    if listener < 0:
        raise OSError(ctypes.get_errno(), "no filter of system calls can be had here")
    return int(listener)


@dataclass(frozen=True)
class Call:
    """A call that waits for an answer, and the path that it will change."""

    listener: int
    number: int
    name: str
    path: str
    pid: int
    arguments: tuple[int, ...]

    def go_on(self) -> None:
        self._answer(0, 0, _GO_ON)

    def answer(self, error: int) -> None:
        """Pretend: it succeeded (0), or failed with this errno."""
        self._answer(0, -error, 0)

    def cut_short(self) -> None:
        """A write: carry out the first half of it in the caller's stead, and say that this was all."""
        data = self._data()
        if len(data) < 2:
            self.go_on()
            return
        half = data[: len(data) // 2]
        file = _same_file(self.pid, self.arguments[0])
        try:
            if self.name in ("pwrite64", "pwritev"):
                done = os.pwrite(file, half, self.arguments[3])
            else:
                done = os.write(file, half)
        finally:
            os.close(file)
        self._answer(done, 0, 0)

    @property
    def process(self) -> int:
        """The caller is a thread of it; 0: it is dead."""
        try:
            return _process_of(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return 0

    def _data(self) -> bytes:
        _, address, count, *_ = self.arguments
        if self.name in ("write", "pwrite64"):
            return _memory(self.pid, address, count)
        parts = struct.iter_unpack("QQ", _memory(self.pid, address, 16 * count))
        return b"".join(_memory(self.pid, start, length) for start, length in parts)

    def _answer(self, value: int, error: int, flags: int) -> None:
        try:
            fcntl.ioctl(
                self.listener,
                _SEND,
                struct.pack("=QqiI", self.number, value, error, flags),
            )
        except FileNotFoundError:
            return  # the caller is dead


def _same_file(pid: int, descriptor: int) -> int:
    """Another process's open file, with the position that the two then share; of a thread, too."""
    process = os.pidfd_open(_process_of(pid))
    try:
        found = ctypes.CDLL(None, use_errno=True).syscall(
            _GET_FILE, process, descriptor, 0
        )
    finally:
        os.close(process)
    if found < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return int(found)


def _process_of(thread: int) -> int:
    with open(f"/proc/{thread}/status") as file:
        status = file.read()
    return int(status.partition("Tgid:")[2].split()[0])


def next_call(listener: int) -> Call | None:
    """The call that somebody waits for; None if he is dead by now. Calls that change no file may be among them."""
    told = bytearray(80)
    try:
        fcntl.ioctl(listener, _RECEIVE, told)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        return None
    number, pid, _, call, _, _, *arguments = struct.unpack("=QIIiIQ6Q", told)
    name = _NAMES[call]
    try:
        path = _changed(pid, name, arguments)
    except OSError:  # its memory or its file is gone: let it go, too
        path = ""
    return Call(listener, number, name, path, pid, tuple(arguments))


def _changed(pid: int, name: str, arguments: list[int]) -> str:
    """The path that this call will change; empty if it changes none."""
    if name in ON_FILES:
        return os.readlink(f"/proc/{pid}/fd/{arguments[_LATER_FILE.get(name, 0)]}")
    folder = name in ON_NAMES_IN_FOLDERS
    flags = {"open": 1, "openat": 2}.get(name)
    opened = arguments[flags] if flags else os.O_CREAT
    if name == "openat2":
        opened = int.from_bytes(_memory(pid, arguments[2], 8), "little")
    if not opened & (os.O_CREAT | os.O_TRUNC):
        return ""
    at = ((2 if folder else 1) if name in _LATER_NAME else 0) + folder
    path = os.fsdecode(_memory(pid, arguments[at], 4096).partition(b"\0")[0])
    path = (
        path.replace("/proc/self/", f"/proc/{pid}/", 1)
        if path.startswith("/proc/self/")
        else path
    )
    here = ctypes.c_int(arguments[at - 1] & 0xFFFFFFFF).value if folder else -100
    base = os.readlink(f"/proc/{pid}/cwd" if here == -100 else f"/proc/{pid}/fd/{here}")
    above, last = os.path.split(os.path.join(base, path))
    return os.path.join(os.path.realpath(above), last)


def _memory(pid: int, address: int, length: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        try:
            return memory.read(length)
        except OSError:  # it ends before that
            memory.seek(address)
            return memory.read(4096 - address % 4096)
