"""A directory of a local or mounted file system as a Storage, by one open descriptor."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from megackpt.errors import CorruptCheckpoint
from megackpt.storage import kernel
from megackpt.storage.files import (
    BELOW,
    FOLDER,
    DirectWriter,
    LocalBatch,
    LocalReader,
    LocalUpdater,
    LocalWriter,
    copy_file,
    enter_folder,
    failure,
    make_folders,
    not_made,
    patiently,
    remove_tree,
    unlink_file,
    write_temporary,
)
from megackpt.storage.interface import (
    Batch,
    FileUpdater,
    FileWriter,
    Storage,
    is_safe_name,
)

# NONBLOCK: the open of a FIFO must not wait for its other end.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_NOT_REGULAR = (errno.ELOOP, errno.ENXIO, errno.ENOTDIR)
_REFUSED = (*_NOT_REGULAR, errno.EACCES, errno.EPERM)
_LONGEST = 255  # most bytes of a name on any known file system


def _checked(name: str, new: bool = False) -> list[str]:
    """Return a name's parts. CorruptCheckpoint if it could lead out of the root, or is too long.

    ``new``: a save chose the name, and the file system checks its length.
    """
    parts = name.split("/")
    is_safe = is_safe_name(name)
    # A character has at most four bytes.
    if is_safe and not new and 4 * len(name) > _LONGEST:
        is_safe = max(len(os.fsencode(part)) for part in parts) <= _LONGEST
    if not is_safe:
        raise CorruptCheckpoint(
            f"{name!r:.300} is not a name of a file inside a checkpoint"
        )
    return parts


def _parts(folder: str) -> list[str]:
    """Return the parts of a folder's name, none for the root."""
    return _checked(folder) if folder else []


class LocalStorage(Storage):
    """The files of a directory.

    The constructor opens the directory once. All access goes through that descriptor, so this
    storage stays with the directory even when another one takes its name. Links below it are not
    followed (see ``following`` for final ones).

    Raises FileNotFoundError or NotADirectoryError if the directory is absent. ``create`` makes it,
    with its parents, and raises StorageError if that fails.
    """

    _fd = -1
    _links = False  # whether final links are followed

    def __init__(
        self,
        path: str | os.PathLike[str],
        create: bool = False,
        moved: Callable[[], object] = int,
        direct: bool = False,
    ) -> None:
        self.location = os.path.abspath(path)
        self.moved, self.direct = moved, direct
        try:
            if create:
                make_folders(self.location)
            self._fd = patiently(os.open, self.location, FOLDER)
        except (FileNotFoundError, NotADirectoryError) as error:
            if not create:
                raise
            raise not_made(self.location, error) from None
        except OSError as error:
            raise failure("open", self.location, error) from error

    def _sync(self, folder: str) -> None:
        with self._refusals("make durable", folder):
            descriptor = os.open(folder or ".", BELOW, dir_fd=self._fd)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """Close the directory. Open files stay usable. Deletion of this object closes it, too."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[str]]:
        return type(self), (self.location,)

    def create(self, name: str) -> FileWriter:
        folder, last = self._parent(name, make=True)
        if self.direct:
            return DirectWriter(folder, last, self._path(name), self.moved)
        return LocalWriter(folder, last, self._path(name), self.moved)

    def batch(self) -> Batch:
        def open_folder(name: str, known: dict[str, int]) -> tuple[int, str, str]:
            *parts, last = _checked(name, new=True)
            path = self._path(name)
            folder = os.path.dirname(path)
            if folder not in known:
                while known:
                    os.close(known.popitem()[1])
                known[folder] = self._descend(parts, make=True, durably=False)
            with self._refusals("enter the folder of", name):
                return os.dup(known[folder]), last, path

        return LocalBatch(open_folder, self._sync, self.moved)

    def update(self, name: str) -> FileUpdater:
        folder, last = self._parent(name, make=True)
        return LocalUpdater(folder, last, self._path(name), self.moved)

    def following(self) -> LocalStorage:
        same = self.folder("", self.moved)
        same._links = True
        return same

    def put(self, name: str, data: bytes) -> None:
        with self._within("write", name, make=True) as (folder, last):
            temporary = write_temporary(folder, data)
            try:
                os.rename(temporary, last, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:  # such as a directory of this name
                os.unlink(temporary, dir_fd=folder)
                raise
            os.fsync(folder)

    def open(self, name: str) -> LocalReader:
        path, flags = self._path(name), _READ
        if self._links:
            flags &= ~os.O_NOFOLLOW
        with self._within("open", name) as (folder, last):
            try:
                fd = patiently(os.open, last, flags, dir_fd=folder)
            except OSError as error:
                if error.errno not in _NOT_REGULAR:
                    raise
                raise CorruptCheckpoint(
                    f"{path} is not a regular file (a link, socket or device)"
                ) from error
        try:
            status = patiently(os.fstat, fd)
        except OSError as error:
            os.close(fd)
            raise failure("look at", path, error) from error
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise CorruptCheckpoint(f"{path} is not a regular file")
        return LocalReader(fd, path, status.st_size, self.moved)

    def size(self, name: str) -> int | None:
        status = self.stat(name)
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        return status.st_size

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        # A network file system may remember an old size for a name, not for an opened file.
        look = self._opened_size if self.is_remote() else self.size
        return [look(name) for name in names]

    def _opened_size(self, name: str) -> int | None:
        flags = _READ
        if self._links:
            flags &= ~os.O_NOFOLLOW
        with (
            suppress(FileNotFoundError),
            self._within("look at", name) as (folder, last),
        ):
            try:
                fd = patiently(os.open, last, flags, dir_fd=folder)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                return self.size(name)
            try:
                status = patiently(os.fstat, fd)
            finally:
                os.close(fd)
            if stat.S_ISREG(status.st_mode):
                return status.st_size
        return None

    def is_remote(self) -> bool:
        return kernel.is_networked(self._fd)

    def modified(self, name: str) -> float | None:
        status = self.stat(name)
        if status is None:
            return None
        return status.st_mtime

    def stat(self, name: str) -> os.stat_result | None:
        """Return an entry's status (of a link itself, unless ``following``); None if absent."""
        with (
            suppress(FileNotFoundError),
            self._within("look at", name) as (folder, last),
        ):
            try:
                return patiently(
                    os.stat, last, dir_fd=folder, follow_symlinks=self._links
                )
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):  # a dangling link
                    raise
        return None

    def list(self, name: str = "") -> list[str]:
        try:
            fd = self._descend(_parts(name))
        except FileNotFoundError:
            return []
        try:
            with self._refusals("list", name):
                return sorted(patiently(os.listdir, fd))
        finally:
            os.close(fd)

    def delete(self, name: str) -> None:
        with (
            suppress(FileNotFoundError),
            self._within("remove", name) as (folder, last),
        ):
            remove_tree(folder, last)
            os.fsync(folder)

    def remove_files(self, names: Iterable[str]) -> None:
        """Remove existing files, and folders that become empty, durably. Keep other folders."""
        gone = FileNotFoundError, CorruptCheckpoint  # absent, or behind a link
        in_folder: dict[str, list[str]] = {}
        for name in names:
            with suppress(CorruptCheckpoint):
                *parts, last = _checked(name)
                in_folder.setdefault("/".join(parts), []).append(last)
        folders: set[str] = set()
        for above, files in in_folder.items():
            first = f"{above}/{files[0]}".lstrip("/")
            with suppress(*gone), self._within("remove", first) as (folder, _):
                for file in files:
                    with self._refusals("remove", f"{above}/{file}".lstrip("/")):
                        unlink_file(folder, file)
            while above:
                folders.add(above)
                above = above.rpartition("/")[0]
        # From the deepest up: a folder may be empty once its folders are gone.
        for name in sorted(folders, key=lambda name: (-name.count("/"), name)):
            with suppress(*gone), self._within("remove", name) as (folder, last):
                try:
                    os.rmdir(last, dir_fd=folder)
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                        self._sync(name)
        self._sync("")

    # Operations on folders that object stores lack: for the commit, not for formats.

    def folder(self, name: str, moved: Callable[[], object] = int) -> LocalStorage:
        """Return a folder of this root as a storage. Raises as ``open`` does."""
        below = object.__new__(LocalStorage)
        below.moved = moved
        below._fd = self._descend(_parts(name))
        below.location = os.path.normpath(self._path(name))
        return below

    def lock(self) -> bool:
        """Lock the directory until ``unlock`` or ``close``. False if another holds the lock.

        Where the file system lacks locks, every caller gets True.
        """
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
        return True

    def unlock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        except (OSError, ValueError):
            return  # closed already, or a file system without locks

    def make_folder(self, name: str, mode: int = 0o777) -> bool:
        """Make a folder durably. False if the name is taken."""
        with self._refusals("make the directory", name):
            try:
                os.mkdir(name, mode, dir_fd=self._fd)
            except FileExistsError:
                return False
            except FileNotFoundError as error:
                raise not_made(self._path(name), error) from None
            os.fsync(self._fd)
            return True

    def remove_folder(self, name: str) -> bool:
        """Remove a folder durably, if it exists. False if it is not empty."""
        with self._refusals("remove", name):
            try:
                os.rmdir(name, dir_fd=self._fd)
            except FileNotFoundError:
                return True
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return False
            os.fsync(self._fd)
            return True

    def rename(self, name: str, to: str, replace: bool = True) -> None:
        """Move an entry within this root, durably.

        An existing file ``to`` is replaced, or raises StorageError without ``replace``.
        """
        move: Any = os.rename
        if not replace:
            move = kernel.rename_new
        with (
            self._refusals("rename", name),
            self._within("rename", name) as (source, last),
            self._within(f"rename {name} to", to, make=True) as (target, new),
        ):
            move(last, new, src_dir_fd=source, dst_dir_fd=target)
            os.fsync(target)
            os.fsync(source)

    def merge_folder(self, name: str, left: Collection[str]) -> None:
        """Move the entries of a folder to the root, durably, and remove the folder.

        An existing file of the root is replaced. Entries with the names ``left`` are removed.
        """
        for entry in set(self.list(name)).difference(left):
            with self._within("move up", f"{name}/{entry}") as (folder, last):
                os.rename(last, last, src_dir_fd=folder, dst_dir_fd=self._fd)
        self.delete(name)

    def copy_folder(self, name: str, to: str) -> None:
        """Copy a folder of the root itself with all that is in it, durably."""
        with self._refusals("copy", name):
            shutil.copytree(
                self._path(name), self._path(to), symlinks=True, copy_function=copy_file
            )
        self._sync(to)

    def link_files(self, folder: LocalStorage, names: Iterable[str]) -> None:
        """Give files of another folder the same names here, too, durably, by hard links.

        Raises CorruptCheckpoint for a link or a folder in the place of a file.
        """
        for name in names:
            _checked(name)
            with self._refusals("make a hard link of", name):
                os.link(
                    name,
                    name,
                    src_dir_fd=folder._fd,
                    dst_dir_fd=self._fd,
                    follow_symlinks=False,
                )
                status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise CorruptCheckpoint(f"{folder.location}/{name} is not a file")
        self._sync("")

    def exchange(self, one: str, other: str) -> bool:
        """Swap two entries of the root itself, durably and atomically. False if unsupported."""
        with self._refusals("exchange", one):
            if not kernel.exchange(self._fd, one, other):
                return False
            os.fsync(self._fd)
            return True

    def rename_new(self, name: str, to: str) -> bool:
        """Rename a folder of the root itself, durably. If ``to`` exists, return False.

        Where the file system cannot check that, ``to`` may be replaced if it is an empty folder.
        """
        with self._refusals("rename", name):
            if not kernel.rename_folder(self._fd, name, to):
                return False
            os.fsync(self._fd)
            return True

    def copy_owner_and_mode(self, model: str, name: str) -> bool:
        """Give ``name`` the owner, group and mode of ``model``. False if chown is refused."""
        with self._refusals("set the owner and mode of", name):
            status = os.stat(model, dir_fd=self._fd)
            try:
                os.chown(name, status.st_uid, status.st_gid, dir_fd=self._fd)
                given = True
            except PermissionError:
                given = False
            os.chmod(name, stat.S_IMODE(status.st_mode), dir_fd=self._fd)
            return given

    def now(self) -> float:
        """Return the time (seconds since 1970) of the clock that dates the files of this root."""
        with self._refusals("write in", ""):
            temporary = write_temporary(self._fd, b"")
            status = os.stat(temporary, dir_fd=self._fd)
            os.unlink(temporary, dir_fd=self._fd)
            return status.st_mtime

    def is_current(self) -> bool:
        """Return whether the path still leads to the opened directory."""
        try:
            there = patiently(os.stat, self.location)
            return os.path.samestat(there, patiently(os.fstat, self._fd))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise failure("look at", self.location, error) from error

    @contextmanager
    def _refusals(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise failure(doing, self._path(name), error) from error

    @contextmanager
    def _within(
        self, doing: str, name: str, make: bool = False
    ) -> Iterator[tuple[int, str]]:
        """Yield an entry's folder and the entry's name.

        Raises FileNotFoundError if one is absent, unless ``make``.
        """
        folder, last = self._parent(name, make)
        try:
            yield folder, last
        except OSError as error:
            path = self._path(name)
            if make or not isinstance(error, FileNotFoundError):
                raise failure(doing, path, error) from error
            raise FileNotFoundError(error.errno, error.strerror, path) from None
        finally:
            os.close(folder)

    def _path(self, name: str) -> str:
        return os.path.join(self.location, name)

    def _parent(self, name: str, make: bool = False) -> tuple[int, str]:
        """Return an entry's folder as a descriptor that the caller closes, and the entry's name."""
        *folders, last = _checked(name, new=make)
        return self._descend(folders, make), last

    def _descend(
        self, folders: Sequence[str], make: bool = False, durably: bool = True
    ) -> int:
        if not folders:
            return patiently(os.open, ".", FOLDER, dir_fd=self._fd)
        fd = self._fd
        for i, part in enumerate(folders):
            try:
                below = enter_folder(fd, part, make, durably)
            except FileNotFoundError as error:
                path = self._path("/".join(folders))
                raise FileNotFoundError(error.errno, error.strerror, path) from None
            except OSError as error:
                path = self._path("/".join(folders[: i + 1]))
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise CorruptCheckpoint(
                        f"{path} is not a directory (a file, or a link)"
                    ) from error
                raise failure("enter", path, error) from error
            finally:
                if fd != self._fd:
                    os.close(fd)
            fd = below
        return fd


class SingleFile(LocalStorage):
    """The directory of a file, with only that file visible.

    The file is opened once, so this storage stays with it even when another one takes its name.
    Raises FileNotFoundError if it is absent, and CorruptCheckpoint if it is not a regular file.
    """

    def __init__(
        self, path: str | os.PathLike[str], moved: Callable[[], object] = int
    ) -> None:
        above, self.only = os.path.split(os.path.realpath(path))
        super().__init__(above, moved=moved)
        self._file = super().open(self.only)

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[str]]:
        return SingleFile, (self.called,)

    @property
    def called(self) -> str:
        return os.path.join(self.location, self.only)

    sizes = Storage.sizes  # the size of the file itself

    def following(self) -> LocalStorage:
        return self  # the file itself, where every link to it ends

    def list(self, name: str = "") -> list[str]:
        if name:
            return []
        return [self.only]

    def stat(self, name: str) -> os.stat_result | None:
        if name != self.only:
            return None
        return self._file.status()

    def open(self, name: str) -> LocalReader:
        if name != self.only:
            path = os.path.join(self.location, name)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self._file.again(self.moved)

    def close(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()
        super().close()

    def is_current(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.called), self._file.status())
        except FileNotFoundError:
            return False
