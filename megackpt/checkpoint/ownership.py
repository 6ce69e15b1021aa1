"""The files that a save may replace in a directory: the files of the checkpoint in it.

The rules are strict, because a save removes the files of the old checkpoint. All other files are
foreign: they stay, and a save that would write a file of the same name is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from megackpt import strategies
from megackpt.backends.base import CONFIG, Backend
from megackpt.backends.object_files import key_files
from megackpt.checkpoint.index import INDEX, MAGIC, SmallFiles, decode_index, read_head
from megackpt.checkpoint.marker import PREFIX
from megackpt.checkpoint.tables import (
    METADATA,
    by_its_own_account,
    native_format,
    table_of_another,
)
from megackpt.errors import (
    BackendError,
    CheckpointingException,
    CorruptCheckpoint,
    NotACheckpoint,
    StorageError,
    join_truncated,
)
from megackpt.planning.manifest import Manifest
from megackpt.storage import TEMPORARY, Storage

OURS = (PREFIX, TEMPORARY)
"""Prefixes of the names of files that exist only during a save."""


def is_replaceable(storage: Storage) -> bool:
    """Is there a checkpoint here, perhaps a damaged one, that a save replaces?

    True for an index of megackpt, a ``metadata.json`` that names a known format, and a
    ``.metadata`` that can be parsed (stock DCP). Other formats are recognised for reading only,
    because files of other programs can look like them.
    """
    return _has_index(storage) or native_format(storage) is not None


def _has_index(storage: Storage) -> bool:
    try:
        with storage.open(INDEX) as reader:
            start = bytearray(min(len(MAGIC), reader.size))
            reader.read_into(0, [memoryview(start)])
            return bytes(start) == MAGIC
    except (FileNotFoundError, CorruptCheckpoint):
        return False


def own_files(storage: Storage) -> tuple[str, ...]:
    """The files of the checkpoint that ``is_replaceable`` found, by full name.

    The files need not exist. The index names them, else the format's table of contents. Both are
    read if the index is damaged, or if another library has saved over this checkpoint and replaced
    the table. Raises CorruptCheckpoint if neither can be read.
    """
    named: set[str] = set()
    problem: CheckpointingException | None = None
    other: tuple[str, Backend] | None = None
    if _has_index(storage):
        data = storage.get(INDEX)
        try:
            manifest, small = decode_index(data, f"{storage.location}/{INDEX}")
        except CorruptCheckpoint as error:
            problem = error
            # Only a digest may be damaged. A damaged name matches no file.
            with suppress(CorruptCheckpoint, BackendError):
                manifest, small = decode_index(data, INDEX, intact=False)
                named.update(files_of(manifest, small))
        else:
            named.update(files_of(manifest, small))
            other = table_of_another(storage, small)
            if other is None:
                return tuple(sorted(named))
    if other is None:
        backend = native_format(storage)
    else:
        _, backend = other
    if backend is not None:
        try:
            manifest = by_its_own_account(backend, storage)
            listed = {*files_of(manifest, {}), INDEX}
            if strategies.read_config(storage) is not None:
                listed.add(CONFIG)
            else:
                listed.discard("common.pt")  # stock DCP has none
            named |= listed
        except StorageError:
            raise
        except (CheckpointingException, FileNotFoundError) as error:
            problem = problem or CorruptCheckpoint(str(error))
    if not named:
        raise CorruptCheckpoint(
            f"{storage.location} holds a damaged checkpoint, and it is unknown which files "
            f"belong to it: {problem}. Move the directory away, or save elsewhere"
        ) from problem
    return tuple(sorted(named))


def find_format(storage: Storage) -> Backend:
    """Like ``strategies.find_backend``, but the index decides where files match several formats.

    Also where ``metadata.json`` is missing. Raises NotACheckpoint, BackendError, and
    CorruptCheckpoint.
    """
    try:
        backend = strategies.find_backend(storage)
    except (BackendError, NotACheckpoint):
        head = read_head(storage)
        if head is None:
            raise
        return strategies.reader_of(*head.backend)
    is_dcp = backend.properties.name == "torch_dist"
    if is_dcp and storage.sizes([INDEX, METADATA]) == [None, None]:
        raise CorruptCheckpoint(
            f"{storage.called} has neither {INDEX} nor {METADATA}: nothing says where its data is"
        )
    return backend


def files_of(manifest: Manifest, small: SmallFiles) -> Collection[str]:
    """The files of an opened checkpoint. ``small``: the small files that its index names."""
    named = {*manifest.files, *manifest.tables, *small}
    # An older release did not name these in its index.
    named.update(key_files(manifest.tensors))
    if manifest.save_id or small:
        named.add(INDEX)
    return named


def foreign_entries(
    storage: Storage, own: Collection[str], names: Collection[str] | None = None
) -> Iterator[str]:
    """The topmost entries that are neither one of these files nor a folder above one.

    Temporary files of saves are left out. ``names``: the entries of the directory itself to
    examine; by default all.
    """
    own, folders = frozenset(own), set[str]()
    for name in own:
        above = name.rpartition("/")[0]
        while above and above not in folders:
            folders.add(above)
            above = above.rpartition("/")[0]
    waiting = [entry for entry in storage.list() if not entry.startswith(OURS)]
    if names is not None:
        waiting = [entry for entry in waiting if entry in names]
    for name in waiting:
        if name in folders:
            # The storage refuses to list a file, or a link, which leads out of the root.
            with suppress(CorruptCheckpoint):
                entries = storage.list(name)
                if entries or storage.size(name) is None:
                    waiting += [f"{name}/{entry}" for entry in entries]
                    continue
        if name not in own:
            yield name


def refuse_collisions(
    location: str, foreign: Iterable[str], names: Collection[str]
) -> None:
    """StorageError if a save that writes these top-level names would meet foreign entries."""
    met = sorted(name for name in foreign if name.partition("/")[0] in names)
    if met:
        raise StorageError(
            f"cannot save to {location}: {join_truncated(met, 10, ', ')} would collide with "
            f"this save, and {'does' if len(met) == 1 else 'do'} not belong to a checkpoint that "
            "a save replaces (Hugging Face's files without our index never do): rename or move "
            "away your files, "
            "remove those that a failed save of another program left, or save elsewhere. "
            "Nothing was changed"
        )
