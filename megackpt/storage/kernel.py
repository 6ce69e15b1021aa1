"""Functions of Linux that Python's os module lacks. Each reports whether it was available."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

# f_type of NFS, SMB (three generations), Lustre, GPFS, Ceph, BeeGFS, PanFS, OrangeFS, AFS, 9P, and
# of FUSE, by which buckets, GlusterFS and JuiceFS are mounted.
_NETWORKED = frozenset((
    0x6969, 0x517B, 0xFF534D42, 0xFE534D42, 0x0BD00BD0, 0x47504653, 0x00C36400, 0x19830326,
    0xAAD7AAEA, 0x20030528, 0x5346414F, 0x01021997, 0x65735546,
))  # fmt: skip
# f_type of ext4 and XFS. Other file systems, such as tmpfs, may accept O_DIRECT and use the page
# cache.
_DIRECT = frozenset((0xEF53, 0x58465342))
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_SYNC_FILE_RANGE_WAIT_BEFORE, _SYNC_FILE_RANGE_WRITE = 1, 2
_ABSENT = frozenset(
    (
        errno.ENOSYS,
        errno.EINVAL,
        errno.ENOTSUP,
        errno.EOPNOTSUPP,
        errno.EBUSY,
        errno.EPERM,
    )
)


@functools.cache
def libc_function(name: str, *arguments: Any) -> Callable[..., int] | None:
    try:
        found = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):  # no such symbol, or no libc to ask
        return None
    found.argtypes = arguments
    found.restype = ctypes.c_int
    return found  # type: ignore[no-any-return]


def write_back(fd: int, start: int, length: int, wait: bool = False) -> None:
    """Ask for these dirty pages to be written soon; or wait until the requested pages are written.

    Only fsync makes them durable. Waiting raises OSError if the system could not write them,
    because a later fsync may not report it again.
    """
    int64 = ctypes.c_int64
    call = libc_function("sync_file_range", ctypes.c_int, int64, int64, ctypes.c_uint)
    flag = _SYNC_FILE_RANGE_WRITE
    if wait:
        flag = _SYNC_FILE_RANGE_WAIT_BEFORE
    if call is None or call(fd, start, length, flag) == 0 or not wait:
        return
    number = ctypes.get_errno()
    if number not in _ABSENT:
        raise OSError(number, os.strerror(number))


def rename_new(name: str, to: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
    """Like os.rename for files, but raise FileExistsError if the new name is taken."""
    try:
        os.link(
            name,
            to,
            src_dir_fd=src_dir_fd,
            dst_dir_fd=dst_dir_fd,
            follow_symlinks=False,
        )
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        # This file system has no links: check before renaming.
        if os.path.lexists(f"/proc/self/fd/{dst_dir_fd}/{to}"):
            raise FileExistsError(
                errno.EEXIST, os.strerror(errno.EEXIST), to
            ) from error
        os.rename(name, to, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
    else:
        os.unlink(name, dir_fd=src_dir_fd)


def is_networked(fd: int) -> bool:
    """Return whether an open file is on a file system that may fetch from other machines."""
    return _file_system(fd) in _NETWORKED


def has_direct_writes(fd: int) -> bool:
    """Return whether an open file is on a file system that is known to support O_DIRECT."""
    return _file_system(fd) in _DIRECT


def bypass_cache(fd: int, bypass: bool = True) -> bool:
    """Have writes to an open file bypass the page cache (O_DIRECT), or not any more.

    False where the file system is not known to support that.
    """
    if bypass and not has_direct_writes(fd):
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
    if bypass:
        flags |= os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    except OSError:
        return False
    return True


def _file_system(fd: int) -> int:
    """Return the f_type of an open file's file system; 0 if that is unknown."""
    call = libc_function("fstatfs", ctypes.c_int, ctypes.c_char_p)
    found = ctypes.create_string_buffer(512)
    if call is None or call(fd, found):
        return 0
    return int.from_bytes(found.raw[:4], sys.byteorder)


def exchange(folder: int, one: str, other: str) -> bool:
    """Swap two entries of an open directory atomically. False where that is unsupported.

    Some file systems cannot, and a mount point cannot be swapped. Other failures raise OSError.
    """
    return _rename(folder, one, other, _RENAME_EXCHANGE)


def rename_folder(folder: int, name: str, to: str) -> bool:
    """Rename a directory within an open directory. If ``to`` exists, return False.

    Where the system cannot check that, an empty directory is replaced; no other entry is.
    """
    try:
        if _rename(folder, name, to, _RENAME_NOREPLACE):
            return True
        os.rename(name, to, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            return False
        raise
    return True


def _rename(folder: int, name: str, to: str, flag: int) -> bool:
    path = ctypes.c_char_p
    call = libc_function(
        "renameat2", ctypes.c_int, path, ctypes.c_int, path, ctypes.c_uint
    )
    if call is None:
        return False
    if call(folder, os.fsencode(name), folder, os.fsencode(to), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in _ABSENT:
        return False
    raise OSError(number, os.strerror(number), name, None, to)
