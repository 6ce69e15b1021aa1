"""Files of a local file system: gathered writes, made durable alone or together; reads."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from mmap import mmap
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from megackpt import events, limits
from megackpt.errors import CheckpointingException, CorruptCheckpoint, StorageError
from megackpt.storage import kernel
from megackpt.storage.interface import (
    Batch,
    FileReader,
    FileUpdater,
    FileWriter,
    Storage,
)

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("megackpt.storage")

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
BELOW = FOLDER | os.O_NOFOLLOW
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

TEMPORARY = ".megackpt-put-"
"""Prefix of the names of temporary files. A leftover one belongs to a process that died."""

_BATCH = 16 << 20  # bytes handed to one preadv or writev, and to early write-back
_SYNCED_AT_ONCE = 4 << 20  # bytes: a file is made durable in such parts
_VECTORS = 16  # buffers of one call, if the system does not say how many
if "SC_IOV_MAX" in os.sysconf_names:
    _VECTORS = min(1024, os.sysconf("SC_IOV_MAX"))
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_MOMENTARY = frozenset((errno.ESTALE, errno.EINTR, errno.EAGAIN, errno.EIO))
_FIRST_PAUSE = 0.01  # seconds; each further one is twice as long
_MAX_WAITING = 120
"""Files of a batch held open until they are synced. The first fsync on ext4 commits for all."""
_SMALL = 64 << 10
"""Bytes at the end of a file that are left to the fsync."""
_THREADS = 4
"""Threads that sync. A disk flushes its cache once for all waiting threads."""
_PIECE = 2 << 20
"""Bytes of one direct write. Larger pieces leave the processor's cache before they are written."""
_BLOCK = 4096
"""Bytes. Places and lengths of direct writes are multiples of this. Disks with larger blocks refuse
the last direct write of a file, which is buffered then."""
_UNSUPPORTED = frozenset(
    (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV)
)
_refusing: set[int] = set()  # devices that refused a first direct write
_TRIALS = 3
"""Synchronous saves of each kind that are timed before a device is decided."""
_speeds: dict[tuple[int, str], tuple[list[float], list[float]]] = {}
"""Bytes a second of the timed saves, buffered and direct, by device and format."""


class _Allowance:
    """Limits the pauses of all threads, so that a dead disk is reported soon. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = self._used = 0.0

    def take(self, seconds: float) -> bool:
        with self._lock:
            now = time.monotonic()
            if now - self._began > 60:
                self._began, self._used = now, 0.0
            self._used += seconds
            return self._used <= limits.RETRY_MINUTE_SECONDS


allowance = _Allowance()


def patiently(call: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Return ``call(*args, **named)``, and repeat it where a file system refuses for a moment.

    Only for calls without an effect on the disk: open for reading, read, stat, list. After a failed
    fsync, write or rename the content of the disk is unknown, and a second call would hide that.
    Raises the last OSError after ``limits.RETRY_SECONDS``, and any other one at once.
    """
    pause, deadline = _FIRST_PAUSE, 0.0
    while True:
        try:
            return call(*args, **named)
        except OSError as error:
            deadline = deadline or time.monotonic() + limits.RETRY_SECONDS
            late = time.monotonic() + pause > deadline
            if error.errno not in _MOMENTARY or late or not allowance.take(pause):
                raise
        events.count_retry()
        time.sleep(pause)
        pause *= 2


def failure(doing: str, path: str, error: OSError) -> StorageError:
    """Return the error to raise when the file system refuses."""
    text = f"cannot {doing} {path}: {error.strerror or error}"
    if error.errno in _FULL:
        text += "; free some space (or raise the quota) and save again"
    return StorageError(text)


def not_made(path: str, error: OSError) -> StorageError:
    """Return the error to raise where no directory can be made. It has no cause: no save did it."""
    why = "a file is in the way"
    if isinstance(
        error, FileNotFoundError
    ):  # of mkdir, although the directory above is open
        why = (
            "the file system takes no directory there. Was the directory above removed, or is "
            "its file system not mounted?"
        )
    return StorageError(f"cannot make the directory {path}: {why}")


def _flat(buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    return (b.cast("B") for b in buffers if b.nbytes)


def _batches(
    buffers: Sequence[memoryview],
) -> Iterator[tuple[Sequence[memoryview], int]]:
    """Divide the buffers into lists for one call each, with their bytes.

    A call takes limited vectors and limited bytes.
    """
    sizes = [b.nbytes for b in buffers]
    total = sum(sizes)
    if len(sizes) <= _VECTORS and total <= _BATCH and 0 not in sizes:
        yield buffers, total
        return
    batch: list[memoryview] = []
    room = _BATCH
    for view in _flat(buffers):
        while len(view) > room:
            batch.append(view[:room])
            yield batch, _BATCH
            view, batch, room = view[room:], [], _BATCH
        batch.append(view)
        room -= len(view)
        if len(batch) == _VECTORS or not room:
            yield batch, _BATCH - room
            batch, room = [], _BATCH
    if batch:
        yield batch, _BATCH - room


def _after(batch: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return the rest of the batch after its first ``done`` bytes."""
    rest = list(_flat(batch))
    for i, view in enumerate(rest):
        if done < len(view):
            return [view[done:], *rest[i + 1 :]]
        done -= len(view)
    return []


class _Open:
    """A file being written, and its folder. This object closes both descriptors."""

    _refusal = "create"
    _flags = NEW

    def __init__(
        self, folder: int, name: str, path: str, moved: Callable[[], object]
    ) -> None:
        self._moved = moved
        self._folder = folder  # to be closed here
        self._name = name
        self._path = path
        try:
            self._fd = create(name, folder, self._flags)
        except OSError as error:
            os.close(folder)
            raise failure(self._refusal, path, error) from error
        if not self._flags & os.O_EXCL and os.fstat(self._fd).st_nlink > 1:
            self._release()
            raise StorageError(
                f"cannot write in place in {path}: other checkpoints have the file, too"
            )

    def close(self) -> None:
        if self._fd < 0:
            return
        try:
            _sync_file(self._moved, (self._fd, self._path))
            os.fsync(self._folder)
        except OSError as error:
            raise failure("make durable", self._path, error) from error
        finally:
            self._release()

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            os.close(self._folder)


class LocalWriter(_Open, FileWriter):
    """A new file, held by descriptor; see LocalStorage.create."""

    _written = _started = 0

    def write(self, buffers: Sequence[memoryview]) -> None:
        try:
            for batch, left in _batches(buffers):
                while left:
                    done = os.writev(self._fd, batch)
                    self._written += done
                    left -= done
                    if left:
                        batch = _after(batch, done)
                self._start_writeback(_BATCH)
                self._moved()
        except OSError as error:
            raise failure("write", self._path, error) from error

    def _start_writeback(self, least: int) -> None:
        if self._written - self._started < least:
            return
        # In parts, because the call waits where the disk has too much to do.
        while self._started < self._written:
            size = min(self._written - self._started, _SYNCED_AT_ONCE)
            kernel.write_back(self._fd, self._started, size)
            self._started += size
            self._moved()

    @property
    def position(self) -> int:
        return self._written

    def abort(self) -> None:
        if self._fd < 0:
            return
        try:
            there = os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)
            # A later save may have made another file of this name.
            if os.path.samestat(there, os.fstat(self._fd)):
                os.unlink(self._name, dir_fd=self._folder)
        except FileNotFoundError:
            return  # another process has removed it
        except OSError as error:
            raise failure("remove", self._path, error) from error
        finally:
            self._release()


class LocalUpdater(_Open, FileUpdater):
    """A file, held by descriptor, that other ranks may fill, too; see LocalStorage.update."""

    _refusal = "write"
    _flags = NEW & ~os.O_EXCL

    def write_at(self, start: int, buffers: Sequence[memoryview]) -> None:
        try:
            if len(buffers) == 1:  # perhaps one of very many
                size = buffers[0].nbytes
                if size < _BATCH and os.pwrite(self._fd, buffers[0], start) == size:
                    return
            for batch, left in _batches(buffers):
                while left:
                    done = os.pwritev(self._fd, batch, start)
                    if done >= _BATCH:
                        kernel.write_back(self._fd, start, done)
                    start += done
                    left -= done
                    if left:
                        batch = _after(batch, done)
                self._moved()
        except OSError as error:
            raise failure("write", self._path, error) from error

    def abort(self) -> None:
        self._release()


def _sync_file(moved: Callable[[], object], file: tuple[int, str]) -> None:
    """Make a file durable. Call ``moved`` whenever a part has reached the disk."""
    # The last part, and the table of the file's blocks, are left to fsync.
    write_parts(moved, file, leave=_SYNCED_AT_ONCE)
    sync_written(moved, file)


def sync_written(moved: Callable[[], object], file: tuple[int, str]) -> None:
    """fsync a file that ``write_parts`` has written, then call ``moved``."""
    fd, path = file
    try:
        os.fsync(fd)
    except OSError as error:
        raise failure("make durable", path, error) from error
    moved()


def write_parts(moved: Callable[[], object], file: tuple[int, str], leave: int) -> None:
    """Wait until a file's bytes are on the disk, but for at most ``leave`` at its end."""
    fd, path = file
    try:
        starts = range(0, os.fstat(fd).st_size - leave, _SYNCED_AT_ONCE)
        for wait in (False, True):
            for start in starts:
                kernel.write_back(fd, start, _SYNCED_AT_ONCE, wait)
                moved()
    except OSError as error:
        raise failure("make durable", path, error) from error


class LocalReader(FileReader):
    """An open regular file. Reads are positional, so threads share it freely."""

    def __init__(
        self, fd: int, path: str, size: int, moved: Callable[[], object] = int
    ) -> None:
        """``moved``: see ``Storage.moved``."""
        self.fd = fd
        self._path = path
        self._moved = moved
        self.size = size

    def read_into(self, start: int, buffers: Sequence[memoryview]) -> None:
        for batch, left in _batches(buffers):
            while left:
                self._moved()
                try:
                    done = patiently(os.preadv, self.fd, batch, start)
                except OSError as error:
                    raise failure("read", self._path, error) from error
                if not done:
                    raise CorruptCheckpoint(
                        f"{self._path} ends at byte {self.size}: {left} bytes from byte "
                        f"{start} on are missing"
                    )
                start += done
                left -= done
                if left:
                    batch = _after(batch, done)

    def stored(self, start: int, length: int, enough: int) -> int:
        found, at, end = 0, start, min(start + length, self.size)
        try:
            while at < end and found < enough:
                data = os.lseek(self.fd, at, os.SEEK_DATA)
                at = os.lseek(self.fd, data, os.SEEK_HOLE)
                found += max(0, min(at, end) - data)
        except (OSError, AttributeError) as error:
            # ENXIO: the rest is a hole. Other errors: this system does not report holes.
            if getattr(error, "errno", None) != errno.ENXIO:
                return length
        return found

    def again(self, moved: Callable[[], object]) -> LocalReader:
        """Return a second reader of the open file. Its caller closes it separately."""
        return LocalReader(os.dup(self.fd), self._path, self.size, moved)

    def sync(self) -> None:
        """Make the file durable, which another writer has written."""
        sync_written(self._moved, (self.fd, self._path))

    def status(self) -> os.stat_result:
        return os.fstat(self.fd)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def create(name: str, folder: int, flags: int = NEW) -> int:
    """Open a file for writing, by a descriptor that is not one of the standard streams'.

    A process that was started without standard streams would get one of their descriptors. Then
    code that prints to these streams, such as C libraries, would write into the file.
    """
    fd = os.open(name, flags, 0o666, dir_fd=folder)
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def copy_file(source: str, target: str) -> None:
    """Copy a file, durably. Both share their blocks where the file system can do that."""
    with open(source, "rb") as reader, open(target, "xb") as writer:
        try:
            while os.copy_file_range(reader.fileno(), writer.fileno(), 1 << 30):
                pass
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            shutil.copyfileobj(reader, writer, _BATCH)
        writer.flush()
        os.fsync(writer.fileno())


def write_temporary(folder: int, data: bytes) -> str:
    """Write a durable temporary file in the folder of its target. Return its name."""
    name = f"{TEMPORARY}{uuid.uuid4().hex}"
    fd = create(name, folder)
    try:
        left = memoryview(data)
        while left:
            left = left[os.writev(fd, [left[:_BATCH]]) :]
        os.fsync(fd)
    except BaseException:
        os.unlink(name, dir_fd=folder)
        raise
    finally:
        os.close(fd)
    return name


def unlink_file(folder: int, name: str) -> None:
    """Remove a file or a link; keep a folder of this name."""
    try:
        os.unlink(name, dir_fd=folder)
    except (FileNotFoundError, IsADirectoryError):
        return
    except PermissionError:  # some systems raise it for a folder
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
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
        with suppress(FileNotFoundError):  # another process removes them, too
            os.unlink(name, dir_fd=folder)  # a file, or a link but not its target
        return
    try:
        for entry in os.listdir(fd):
            remove_tree(fd, entry)
    finally:
        os.close(fd)
    with suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=folder)


def make_folders(path: str) -> None:
    """Make a directory and its missing parents durably. An existing one is not an error."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(path)
    make_folders(above)
    fd = os.open(above, FOLDER)
    try:
        make_folder(fd, os.path.basename(path))
    finally:
        os.close(fd)


def make_folder(fd: int, name: str, durably: bool = True) -> None:
    """Make a folder, if it is absent."""
    try:
        os.mkdir(name, dir_fd=fd)
        if durably:
            os.fsync(fd)
    except FileExistsError:
        return  # another rank was faster, or a file is in the way: opening it will fail


def enter_folder(fd: int, part: str, make: bool, durably: bool) -> int:
    """Open a folder; make it first if it is absent and ``make``."""
    if not make or durably:
        try:
            return patiently(os.open, part, BELOW, dir_fd=fd)
        except FileNotFoundError:
            if not make:
                raise
    make_folder(fd, part, durably)
    return patiently(os.open, part, BELOW, dir_fd=fd)


class LocalBatch(Batch):
    """Many new files made durable together: one wait for the disk, not one for each file.

    ``open_folder`` opens the folder of a file, and creates it if absent. It returns a descriptor
    for the file's writer, the last part of the file's name, and the file's path. It keeps the
    folder's descriptor, by path, in place of another folder's descriptor: many files come folder by
    folder. ``sync`` makes the entries of a folder durable. ``moved``: see ``Storage.moved``.
    """

    def __init__(
        self,
        open_folder: Callable[[str, dict[str, int]], tuple[int, str, str]],
        sync: Callable[[str], None],
        moved: Callable[[], object],
    ) -> None:
        self._moved = moved
        self._open_folder = open_folder
        self._sync = sync
        self._waiting: list[tuple[int, str]] = []
        self._last_folder: dict[str, int] = {}  # its descriptor, by path
        self._folders: dict[str, None] = {}

    def create(self, name: str) -> FileWriter:
        writer = _BatchWriter(*self._open_folder(name, self._last_folder), self._moved)
        writer.batch = self
        while name:  # another writer may have made a folder above and not synced it yet
            name = name.rpartition("/")[0]
            self._folders[name] = None
        return writer

    def link(self, source: Storage, name: str, to: str, nbytes: int) -> str:
        try:
            held = source.open(name)
        except (CheckpointingException, FileNotFoundError) as error:
            return str(error)
        folder, last, path = self._open_folder(to, self._last_folder)
        try:
            if not isinstance(held, LocalReader) or held.size < nbytes:
                return "a file of the step before is truncated"
            # The file that was opened, whatever has its name now.
            os.link(f"/proc/self/fd/{held.fd}", last, dst_dir_fd=folder)
            self.take(os.dup(held.fd), path)
        except OSError as error:
            return os.strerror(error.errno or 0)
        finally:
            os.close(folder)
            held.close()
        while to:
            to = to.rpartition("/")[0]
            self._folders[to] = None
        return ""

    def take(self, fd: int, path: str) -> None:
        """Make a written file durable, and close it, together with the batch."""
        self._waiting.append((fd, path))
        if len(self._waiting) == _MAX_WAITING:
            self._sync_files()

    def _sync_files(self) -> None:
        try:
            # First: the fsync of one file may wait for the bytes of all.
            for file in self._waiting:
                write_parts(self._moved, file, leave=_SMALL)
            _each(partial(sync_written, self._moved), self._waiting)
        finally:
            self.abort()

    def close(self) -> None:
        self._sync_files()
        folders, self._folders = self._folders, {}
        _each(self._sync, list(folders))

    def abort(self) -> None:
        waiting, self._waiting = self._waiting, []
        for fd, _ in waiting:
            os.close(fd)
        while self._last_folder:
            os.close(self._last_folder.popitem()[1])


class _BatchWriter(LocalWriter):
    batch: LocalBatch

    def close(self) -> None:
        if self._fd >= 0:
            try:
                self._start_writeback(1)
            except BaseException:  # the save was given up
                self.abort()
                raise
            os.close(self._folder)
            fd, self._fd = self._fd, -1
            self.batch.take(fd, self._path)


def _each(work: Callable[[T], None], items: Sequence[T]) -> None:
    """Call ``work`` on each, in a few threads if there are many. Raise when all have ended."""

    def each(share: Sequence[T]) -> None:
        for item in share:
            work(item)

    if len(items) < 4 * _THREADS:
        each(items)
        return
    shares = [items[number::_THREADS] for number in range(_THREADS)]
    with ThreadPoolExecutor(_THREADS, "megackpt-sync") as pool:
        list(pool.map(each, shares))


class DirectWriter(LocalWriter):
    """A new file that bypasses the page cache from ``limits.DIRECT_BYTES`` expected bytes on.

    The bytes are gathered in a piece of aligned memory. The end of the file, less than a block, is
    buffered. Where the file system refuses direct writes, the rest of the file is buffered.
    """

    direct_files = 0  # of this process
    _piece: NDArray[np.uint8] | None = None  # None: writes are buffered
    _filled = 0

    def expect(self, size: int) -> None:
        if not 0 < limits.DIRECT_BYTES <= size or self._device() in _refusing:
            return
        if not kernel.bypass_cache(self._fd):
            return
        try:
            self._piece = np.frombuffer(mmap(-1, _PIECE), np.uint8)
        except OSError as error:  # no memory
            logger.debug("%s: writes are buffered: %s", self._path, error)
            kernel.bypass_cache(self._fd, False)
            return
        DirectWriter.direct_files += 1

    def write(self, buffers: Sequence[memoryview]) -> None:
        for number, buffer in enumerate(buffers):
            if self._piece is None:
                super().write(buffers[number:])
                return
            if buffer.nbytes:
                self._gather(np.frombuffer(buffer.cast("B"), np.uint8))

    def _gather(self, data: NDArray[np.uint8]) -> None:
        while len(data):
            if self._piece is None:
                super().write([data.data])
                return
            part = data[: _PIECE - self._filled]
            # numpy releases the interpreter's lock.
            self._piece[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == _PIECE:
                self._filled = 0
                self._write_direct(self._piece.data)

    def _write_direct(self, data: memoryview) -> None:
        before = self._written
        try:
            super().write([data])
        except StorageError as error:
            if getattr(error.__cause__, "errno", None) not in _UNSUPPORTED:
                raise
            logger.debug("%s: writes are buffered from now on: %s", self._path, error)
            if not self._written:
                _refusing.add(self._device())
            self._piece = None
            kernel.bypass_cache(self._fd, False)
            super().write([data[self._written - before :]])

    @property
    def position(self) -> int:
        return self._written + self._filled

    def close(self) -> None:
        try:
            self._write_rest()
        except BaseException:
            self._release()
            raise
        super().close()

    def _write_rest(self) -> None:
        if self._piece is None or self._fd < 0:
            return
        rest = self._piece[: self._filled].data
        self._filled = 0
        whole = len(rest) // _BLOCK * _BLOCK
        self._write_direct(rest[:whole])
        kernel.bypass_cache(self._fd, False)
        super().write([rest[whole:]])
        self._piece = None

    def _device(self) -> int:
        return os.fstat(self._fd).st_dev


@contextmanager
def direct_where_faster(directory: str, name: str, nbytes: int) -> Iterator[bool]:
    """Yield whether a synchronous save should bypass the page cache; time the write of its bytes.

    The first such saves of a process to a device are buffered and direct in turn. Later saves are
    direct if the slowest direct one was faster than the fastest buffered one.

    Args:
        directory: of the save.
        name: of the format; each format is decided separately.
        nbytes: of this rank.
    """
    device = _direct_device(directory)
    if device is None:
        yield False
        return
    speeds = _speeds.setdefault((device, name), ([], []))
    buffered, direct = speeds
    if len(direct) >= _TRIALS:
        yield min(direct) > max(buffered)
        return
    is_direct = len(direct) < len(buffered)
    before, began = DirectWriter.direct_files, time.monotonic()
    yield is_direct
    if is_direct and DirectWriter.direct_files == before:
        return  # the format announces no sizes, or its files are small
    speeds[is_direct].append(nbytes / (time.monotonic() - began))
    if len(direct) == _TRIALS:
        way = "buffered"
        if min(direct) > max(buffered):
            way = "direct"
        texts = [", ".join(f"{speed / 1e6:.0f}" for speed in each) for each in speeds]
        logger.debug(
            "synchronous saves of %s to the disk of %s are %s from now on: "
            "buffered ones wrote %s MB/s on this rank, direct ones %s",
            *(name, directory, way, *texts),
        )


def _direct_device(directory: str) -> int | None:
    """Return the device on which a directory is or will be. None: it has no direct writes."""
    path = os.path.realpath(directory)
    if not os.path.isdir(path):
        path = os.path.dirname(path)
    with suppress(OSError):  # the save itself reports it
        fd = os.open(path, FOLDER)
        try:
            if kernel.has_direct_writes(fd):
                return os.fstat(fd).st_dev
        finally:
            os.close(fd)
    return None
