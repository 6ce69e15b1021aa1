"""One file as the target of a conversion.

The file grows in a directory next to it, ``.NAME.megackpt``, by the ordinary protocol, and is
moved to its place in one step when that directory is complete. An object of a bucket needs no such
directory: it appears when it is complete.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace

from megackpt.checkpoint import open_same
from megackpt.checkpoint.marker import markers
from megackpt.converter.conversion import Conversion, Converted
from megackpt.errors import (
    BackendError,
    CheckpointExists,
    CheckpointReplaced,
    CorruptCheckpoint,
    NotACheckpoint,
    StorageError,
    join_truncated,
)
from megackpt.storage import LocalStorage, SingleObject, is_url

_FORMATS = {
    ".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch",
    ".ckpt": "torch",
}  # fmt: skip


def is_single_file(target: str, name: str) -> bool:
    """Return whether a target of this path and format is one file.

    Raises BackendError if the path names a file of another format.
    """
    expected = _FORMATS.get(os.path.splitext(target)[1])
    if not expected or name not in _FORMATS.values() or os.path.isdir(target):
        return False
    if expected != name:
        raise BackendError(
            f"{target} is the name of a file of the format {expected!r}, not of {name!r}"
        )
    return True


def check_free(path: str, overwrite: bool) -> None:
    """Raise CheckpointExists if the file exists and may not be replaced."""
    found = os.path.lexists(path)
    if is_url(path):
        found = SingleObject(path, overwrite).size("") is not None
    if found and not overwrite:
        raise CheckpointExists(
            f"{path} exists: pass overwrite=True to replace it, or choose another name"
        )


def run_to_file(conversion: Conversion, path: str, overwrite: bool) -> Converted:
    """Convert to a directory next to the file, and move the file to its place."""
    backend = conversion.backend
    files = backend.layout(1, conversion.manifest).files
    if len(files) != 1:
        raise BackendError(
            f"the format {backend.properties.name!r} writes this conversion as {len(files)} files: "
            f"{join_truncated(files, 5, ', ')}. Name a directory; or, for safetensors, choose "
            "shards=1, and leave out everything but tensors (state=False, or --no-state)"
        )
    if is_url(path):
        return conversion.run_to_object(SingleObject(path, overwrite))
    source = files[0]
    parent, name = os.path.split(path)
    outer = LocalStorage(parent, create=True)
    folder = f".{name}.megackpt"
    directory = os.path.join(parent, folder)
    try:
        # An earlier run may have died between the commit and the move.
        open_same(directory, conversion.save_id())
        done = conversion.outcome(path, {}, conversion.total)
    except (NotACheckpoint, CheckpointReplaced, CorruptCheckpoint):
        # Only conversions write here: without a save at work, everything in it is a leftover.
        with suppress(FileNotFoundError):
            if not markers(outer.folder(folder)):
                outer.delete(folder)
        done = conversion.run(directory, overwrite=True, called=path)
    try:
        outer.rename(f"{folder}/{source}", name, replace=overwrite)
    except StorageError as error:
        if isinstance(error.__cause__, FileExistsError):
            outer.delete(folder)
            check_free(path, overwrite)
        raise
    outer.delete(folder)
    return replace(done, target=path)
