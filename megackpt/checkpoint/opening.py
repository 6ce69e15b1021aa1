"""Open a checkpoint: find its directory, and read its manifest."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TypeVar

import numpy as np

from megackpt import strategies
from megackpt.backends.base import CONFIG, Backend
from megackpt.checkpoint.index import INDEX, decode_index, read_head
from megackpt.checkpoint.marker import (
    ASIDE,
    PREFIX,
    Marker,
    markers,
    read_marker,
    siblings,
    started,
)
from megackpt.checkpoint.records import Committed, read_record, save_folders
from megackpt.checkpoint.tables import (
    by_its_own_account,
    small_file_problems,
)
from megackpt.errors import (
    BackendError,
    CheckpointingException,
    CheckpointReplaced,
    CorruptCheckpoint,
    NotACheckpoint,
    StorageError,
)
from megackpt.planning.manifest import Manifest
from megackpt.storage import (
    BucketStorage,
    LocalStorage,
    SingleFile,
    Storage,
    is_url,
)
from megackpt.strategies import Strategy

Directory = str | os.PathLike[str]
T = TypeVar("T")

_ATTEMPTS = 3  # to open a directory while saves replace it


@dataclass(frozen=True, eq=False)
class Opened:
    """An open checkpoint. ``small``: the small files in its index (empty without an index)."""

    storage: Storage
    backend: Backend
    manifest: Manifest
    small: Mapping[str, tuple[int, bytes]]


def absolute(directory: Directory) -> str:
    """The absolute path of a directory, or a URL. Raises StorageError if it is neither."""
    path: object = directory
    if isinstance(directory, os.PathLike):
        path = os.fspath(directory)
    if not isinstance(path, str):
        # The type alone: the value may be a whole state.
        given = f"a {type(path).__name__}"
        if path is None:
            given = "None"
        raise StorageError(
            f"a checkpoint's directory must be a str or a Path, not {given}"
        )
    if not path or "\0" in path:
        raise StorageError(f"{path!r} names no directory (the current one is '.')")
    if is_url(path):
        return BucketStorage(path).location
    is_home = path == "~" or path.startswith("~/")
    if is_home or os.path.expanduser(path) != path:
        raise StorageError(
            f"{path!r}: shells expand the ~, Python does not: give os.path.expanduser({path!r})"
        )
    return os.path.abspath(path)


def open_checkpoint(
    directory: Directory,
    asked: Strategy | None = None,
    every_table: bool = True,
    moved: Callable[[], object] = int,
) -> Opened:
    """Open a complete checkpoint and read its manifest.

    The manifest is in the index, else in the format's table of contents. The directory is
    opened once. Later reads through ``storage`` return this checkpoint even if a save replaces it
    at its path. The small files are checked against the index; without ``every_table``, which suits
    a caller that reads no data, only the files in the directory itself, not one for each zarr
    array. ``asked`` is the format that the caller names; it decides if several formats recognise
    the directory.

    Raises:
        NotACheckpoint: the directory does not exist, or holds no complete checkpoint. The message
            says why.
        CorruptCheckpoint: the index or a small file is damaged, or they do not match.
        CheckpointReplaced: other saves replace the checkpoint at every attempt.
        BackendError: the format is unknown or needs a missing package, several formats recognise
            the directory, or it is not of the format ``asked`` for.
    """
    # Without an index no digest ties the files together: check that no save has started to remove
    # them.
    opened: Opened = unreplaced(
        directory,
        partial(_read, asked=asked, every_table=every_table),
        attrgetter("manifest.save_id"),
        asked,
        moved,
    )
    return opened


def in_run(
    directory: Directory,
    read: Callable[[Directory], T],
    moved: Callable[[], object] = int,
) -> tuple[Directory, T]:
    """Call ``read`` with a directory, or else with the latest complete step of the run in it.

    Returns the directory that was read, and the result. A WARNING names the step.

    Raises:
        NotACheckpoint: the error of ``read``, with the steps of a run without a complete step.
    """
    try:
        return directory, read(directory)
    except NotACheckpoint as error:
        # Imports this module, and a load of a checkpoint does without it.
        from megackpt.checkpoint.run_directory import latest_step

        step = latest_step(directory, error, moved)
    return step, read(step)


def unreplaced(
    directory: Directory,
    look: Callable[[Storage], T],
    sure: Callable[[T], bool],
    asked: Strategy | None = None,
    moved: Callable[[], object] = int,
) -> T:
    """The result of ``look`` at a checkpoint.

    If the checkpoint was replaced meanwhile, and ``look`` failed or its result is not ``sure``, it
    is called again. Raises CheckpointReplaced after ``_ATTEMPTS`` attempts.
    """
    failed: Exception | None = None
    for _ in range(_ATTEMPTS):
        storage = find_storage(directory, asked, moved=moved)
        try:
            found = look(storage)
        except (CheckpointingException, FileNotFoundError) as error:
            if storage.is_current():
                raise
            failed = error
            continue
        if sure(found) or storage.is_current():
            return found
    raise CheckpointReplaced(
        f"{os.fspath(directory)} is being replaced again and again"
    ) from failed


def open_same(
    directory: Directory,
    save_id: str,
    asked: Strategy | None = None,
    moved: Callable[[], object] = int,
) -> Storage:
    """The storage of a checkpoint that another rank has opened, on this rank.

    ``save_id`` is the id in its manifest. Raises CheckpointReplaced if the directory now holds
    another checkpoint, NotACheckpoint if this host sees none.
    """
    try:
        storage = find_storage(directory, asked, moved=moved)
    except NotACheckpoint as error:
        raise NotACheckpoint(
            f"{error}; but rank 0 has opened a checkpoint there, which cannot be seen on host "
            f"{socket.gethostname()!r}: is the directory shared between all hosts?"
        ) from error
    found = ""
    if isinstance(storage, Committed):
        found = storage.record.save_id
    elif (head := read_head(storage)) is not None:
        found = head.save_id
    if found != save_id:
        raise CheckpointReplaced(
            f"{storage.called} was replaced while it was being read: opened as save "
            f"{save_id or '(foreign)'}, now it is {found or '(foreign)'} on host "
            f"{socket.gethostname()!r}; load again, and where that does not help: is the "
            "directory shared between all hosts?"
        )
    return storage


def find_storage(
    directory: Directory,
    asked: Strategy | None = None,
    moved: Callable[[], object] = int,
) -> Storage:
    """The storage of the checkpoint in this directory or file; NotACheckpoint without one.

    ``moved``: see Storage. The storage may be of the old checkpoint, which an interrupted
    replacement has renamed away. In an object store: the save that the record names, else a
    checkpoint that was uploaded without a record.
    """
    where = absolute(directory)
    if is_url(where):
        return _in_bucket(where, asked, moved)
    target = os.path.realpath(where)
    for _ in range(_ATTEMPTS):
        storage: LocalStorage | None = None
        try:
            if os.path.isfile(target):
                storage = SingleFile(target, moved)
            else:
                storage = LocalStorage(target, moved=moved)
            reason = incomplete(storage, asked=asked)
            name = os.path.basename(target)
            if isinstance(storage, SingleFile) and name in (CONFIG, ".metadata"):
                reason = (
                    f"{os.fspath(directory)} is not a distributed checkpoint, but one of its "
                    "files"
                )
        except FileNotFoundError:
            reason = f"directory {os.fspath(directory)} does not exist"
        except NotADirectoryError:
            reason = (
                f"{os.fspath(directory)} is not a distributed checkpoint: it is neither "
                "directory nor file"
            )
        if storage is not None and reason is None:
            return storage
        if storage is not None and not storage.is_current():
            continue  # a save has just replaced it and removes the old files
        if aside := set_aside(target, moved):
            return aside
        if storage is not None and storage.size(INDEX) is not None:
            return storage  # opening it reports the file that is missing
        if storage is not None or not os.path.isdir(target):
            raise NotACheckpoint(f"{reason}{_unfinished(target)}")
    raise CheckpointReplaced(
        f"{os.fspath(directory)} is being replaced again and again"
    )


def _in_bucket(
    url: str, asked: Strategy | None, moved: Callable[[], object]
) -> Storage:
    outer = BucketStorage(url, moved)
    record, _ = read_record(outer)
    if record is not None:
        return Committed(url, record, moved)
    names = outer.list()
    if not names:
        above, _, name = url.rpartition("/")
        if is_url(above) and BucketStorage(above).size(name) is not None:
            raise NotACheckpoint(
                f"{url} is one object: to read a single file, copy it to a file system"
            )
        raise NotACheckpoint(f"{url} does not exist: no object is there")
    try:
        strategies.find_backend(outer, asked)
    except NotACheckpoint as error:
        for folder in save_folders(names):
            inner = outer.folder(folder)
            for marker in markers(inner):
                raise NotACheckpoint(
                    f"{url} is not a distributed checkpoint: {_progress(marker)}"
                ) from error
        if INDEX not in names:  # else opening it reports the file that is missing
            raise
    except CheckpointingException:
        return outer  # a checkpoint is there; opening it reports its problem
    return outer


def incomplete(storage: LocalStorage, asked: Strategy | None = None) -> str | None:
    """Why this directory is not a checkpoint; None if it is one (perhaps a damaged one)."""
    if not storage.list():
        return f"{storage.called} is not a distributed checkpoint: it is empty"
    try:
        strategies.find_backend(storage, asked)
    except NotACheckpoint as error:
        return str(error)
    except CheckpointingException:
        return None  # a checkpoint is there; opening it reports its problem
    return None


def _unfinished(target: str) -> str:
    """A hint at a save to this directory that is not committed."""
    above, name = os.path.split(target)
    try:
        outer = LocalStorage(above)
        for entry, save_id, _ in siblings(outer, name):
            marker = read_marker(outer.folder(entry), PREFIX + save_id, save_id)
            if marker is not None:
                return f"; {_progress(marker)}"
    except (CheckpointingException, OSError):
        return ""
    return ""


def _progress(marker: Marker) -> str:
    runs = marker.runs()
    if runs is None:
        return f"{marker} is running, or died before it was complete"
    if runs:
        return f"{marker} is running"
    if marker.pid == os.getpid() and marker.started == started(marker.pid):
        return f"{marker}, which is this process, was given up"
    return f"{marker} died before it was complete"


def set_aside(target: str, moved: Callable[[], object] = int) -> LocalStorage | None:
    """The checkpoint that a save on a file system without exchange has renamed away.

    It exists for a moment, or until the next save if the renaming save died.
    """
    above, name = os.path.split(target)
    try:
        outer = LocalStorage(above)
        for entry, save_id, suffix in siblings(outer, name):
            if suffix != ASIDE or outer.stat(f"{name}/{PREFIX}{save_id}") is not None:
                continue
            storage = outer.folder(entry, moved)
            if incomplete(storage) is None:
                return storage
    except (FileNotFoundError, NotADirectoryError):
        return None  # it was renamed back meanwhile
    return None


def stored_manifest(
    storage: Storage, asked: Strategy | None = None
) -> tuple[Backend, Manifest, dict[str, tuple[int, bytes]]]:
    """The backend of the checkpoint, its manifest, and the small files in its index (unchecked)."""
    if not isinstance(storage, Committed) and INDEX not in storage.list():
        backend = strategies.find_backend(storage, asked)
        return backend, by_its_own_account(backend, storage), {}
    try:
        manifest, small = decode_index(
            storage.get(INDEX), f"{storage.location}/{INDEX}"
        )
    except CorruptCheckpoint as error:
        if isinstance(storage, Committed):
            raise
        try:
            by_its_own_account(strategies.find_backend(storage, asked), storage)
        except (CheckpointingException, FileNotFoundError):
            raise error from None
        raise CorruptCheckpoint(
            f"{error}. The format's own files say where the data is: move {INDEX} away, and "
            "loads trust them, without digests"
        ) from error
    return backend_of(storage, manifest, asked), manifest, small


def backend_of(
    storage: Storage, manifest: Manifest, asked: Strategy | None = None
) -> Backend:
    """The backend that reads the chunks of this manifest.

    Raises BackendError if it is not available, or if another format was ``asked`` for.
    """
    try:
        return strategies.reader_of(*manifest.backend, asked)
    except BackendError as error:
        raise BackendError(f"{storage.called}: {error}") from error


@dataclass(frozen=True)
class Shortfall:
    """A file that is missing (``size`` is None) or truncated."""

    name: str
    writer: int  # a rank that wrote it
    size: int | None
    needed: int

    def __str__(self) -> str:
        state = f"truncated ({self.size} of {self.needed} bytes)"
        if self.size is None:
            state = "missing"
        return f"{self.name}, written by rank {self.writer}, is {state}"


def shortfalls(storage: Storage, manifest: Manifest) -> list[Shortfall]:
    """The files of a manifest that are missing, or shorter than their chunks need."""
    chunks = manifest.chunks
    placed = chunks.file >= 0
    ends = np.zeros(len(manifest.files), np.int64)
    writers = np.full(len(manifest.files), -1, np.int64)
    writers[chunks.file[placed]] = chunks.writer[placed]
    if manifest.encoding == "raw":
        np.maximum.at(ends, chunks.file[placed], (chunks.start + chunks.length)[placed])
    rows = zip(manifest.files, writers.tolist(), ends.tolist(), strict=True)
    return still_short(storage, [Shortfall(n, w, None, end) for n, w, end in rows])


def shared_bytes(storage: Storage, manifest: Manifest) -> int:
    """The bytes of the files that have other names, too, as hard links."""
    total = 0
    if isinstance(storage, LocalStorage):
        for name in manifest.files:
            status = storage.stat(name)
            if status is not None and status.st_nlink > 1:
                total += status.st_size
    return total


def still_short(storage: Storage, files: Sequence[Shortfall]) -> list[Shortfall]:
    """The files among these that are missing or too short now, with their present sizes."""
    found = []
    sizes = storage.sizes([file.name for file in files])
    for file, size in zip(files, sizes, strict=True):
        if size is None or size < file.needed:
            found.append(replace(file, size=size))
    return found


def _read(
    storage: Storage, asked: Strategy | None = None, every_table: bool = True
) -> Opened:
    backend, manifest, small = stored_manifest(storage, asked)
    tables = small
    if not every_table:
        tables = {name: small[name] for name in small if "/" not in name}
    problems = small_file_problems(storage, tables, backend)
    if problems:
        raise CorruptCheckpoint("\n".join(problems))
    return Opened(as_read_by(backend, storage), backend, manifest, small)


def as_read_by(backend: Backend, storage: Storage) -> Storage:
    """The storage. It follows links if the format allows them."""
    if backend.properties.follows_links:
        return storage.following()
    return storage
