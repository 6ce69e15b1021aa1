"""Removing entries of an open folder, by its descriptor. Links are never followed."""

from __future__ import annotations

import errno
import os
import stat

BELOW = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
"""How a folder is opened that must not be a link."""


def unlink(folder: int, name: str) -> None:
    """Remove a file or a link; a folder of this name stays."""
    try:
        os.unlink(name, dir_fd=folder)
    except (FileNotFoundError, IsADirectoryError):
        return
    except PermissionError:  # what some systems say of a folder
        if not stat.S_ISDIR(
            os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        ):
            raise


def remove_tree(folder: int, name: str) -> None:
    """Remove a file, a link, or a folder with all that is in it; no error if it is absent."""
    try:
        fd = os.open(name, BELOW, dir_fd=folder)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        os.unlink(
            name, dir_fd=folder
        )  # a file or a link: the link goes, not what it leads to
        return
    try:
        for entry in os.listdir(fd):
            remove_tree(fd, entry)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=folder)
