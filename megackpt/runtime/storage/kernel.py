"""What Linux offers beyond Python's os module, each behind a function that says whether it was there."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from typing import Any

_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2
_ABSENT = frozenset((errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBUSY, errno.EPERM))


@functools.cache
def _function(name: str, *arguments: Any) -> Callable[..., int] | None:
    try:
        found = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):  # no such symbol, or no libc to ask
        return None
    found.argtypes = arguments
    found.restype = ctypes.c_int
    return found  # type: ignore[no-any-return]


def start_writeback(fd: int, start: int, length: int) -> None:
    """Ask for these dirty pages to be written soon. Only advice: errors show up again in fsync."""
    int64 = ctypes.c_int64
    call = _function("sync_file_range", ctypes.c_int, int64, int64, ctypes.c_uint)
    if call is not None:
        call(fd, start, length, _SYNC_FILE_RANGE_WRITE)


def exchange(folder: int, one: str, other: str) -> bool:
    """Swap two entries of an open directory in one atomic step; False, and nothing done, where that fails.

    Not every file system can, and a mount point cannot be swapped at all. Other failures raise OSError.
    """
    path = ctypes.c_char_p
    call = _function("renameat2", ctypes.c_int, path, ctypes.c_int, path, ctypes.c_uint)
    if call is None:
        return False
    if call(folder, os.fsencode(one), folder, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _ABSENT:
        return False
    raise OSError(number, os.strerror(number), one, None, other)
