"""Removing entries of an open folder, by its descriptor. Links are never followed."""

from __future__ import annotations

import errno
import os
import stat

BELOW = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
"""Flags that open a folder, but not a link."""


def unlink(folder: int, name: str) -> None:
    """Remove a file or a link; keep a folder of this name."""
    try:
        os.unlink(name, dir_fd=folder)
    except (FileNotFoundError, IsADirectoryError):
        return
    except PermissionError:  # some systems raise it for a folder
        if not stat.S_ISDIR(
            os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        ):
            raise


def remove_tree(folder: int, name: str) -> None:
    """Remove a file, a link, or a folder and its content. An absent one is not an error."""
    try:
        fd = os.open(name, BELOW, dir_fd=folder)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        os.unlink(name, dir_fd=folder)  # a file, or a link but not its target
        return
    try:
        for entry in os.listdir(fd):
            remove_tree(fd, entry)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=folder)
