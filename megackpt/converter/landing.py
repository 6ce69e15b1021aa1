"""Where a conversion lands: in a directory, or in one file that is moved into place when it is complete."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megackpt.backends.base import Backend
from megackpt.checkpoint import open_same
from megackpt.checkpoint.marker import markers
from megackpt.converter.order import Conversion, Converted
from megackpt.errors import (
    BackendError,
    CheckpointExists,
    CheckpointReplaced,
    CorruptCheckpoint,
    NotACheckpoint,
    StorageError,
)
from megackpt.planning.manifest import Manifest
from megackpt.storage import LocalStorage, is_url

_ENDINGS = {
    ".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch",
}  # fmt: skip
"""How names of files end, and the format that is meant."""


def is_lone(target: str, name: str) -> bool:
    """Does a target of this path and format mean one file? BackendError where the path means another format's."""
    meant = _ENDINGS.get(os.path.splitext(target)[1])
    if meant is None or name not in _ENDINGS.values() or os.path.isdir(target):
        return False
    if meant != name:
        raise BackendError(
            f"{target} is what a file of the format {meant!r} is called, not one of {name!r}"
        )
    if is_url(target):
        raise BackendError(
            f"{target}: one file alone is written on file systems only: write it there and copy it, or name a folder"
        )
    return True


@dataclass(frozen=True)
class LoneFile:
    """One file as a target. It grows as a directory beside it, ``.NAME.megackpt``, by the ordinary protocol."""

    path: str

    def check(self, overwrite: bool) -> None:
        if os.path.lexists(self.path) and not overwrite:
            raise CheckpointExists(
                f"{self.path} is there: pass overwrite=True to replace it, or choose another name"
            )

    def run(self, conversion: Conversion, overwrite: bool) -> Converted:
        """Convert, and move the file into place in one step."""
        self.check(overwrite)
        lone = _lone_name(conversion.backend, conversion.manifest)
        above, name = os.path.split(self.path)
        outer = LocalStorage(above, create=True)
        folder = f".{name}.megackpt"
        within = os.path.join(above, folder)
        done = conversion.outcome(self.path, {}, conversion.total)
        if not _holds(within, conversion.save_id()):
            _remove_leftover(outer, folder)
            done = conversion.run(within, overwrite=True)
        try:
            outer.rename(f"{folder}/{lone}", name, replace=overwrite)
        except StorageError as error:
            if isinstance(error.__cause__, FileExistsError):
                outer.delete(folder)
                self.check(overwrite)
            raise
        outer.delete(folder)
        return done.at(self.path)


def _lone_name(backend: Backend, manifest: Manifest) -> str:
    try:
        return backend.lone_file(manifest)
    except BackendError as error:
        raise BackendError(
            f"{error} (state=False, or --no-state, leaves out all that is no tensor)"
        ) from error


def _holds(directory: str, save_id: str) -> bool:
    """Is the result here already, written by a run that died before it moved the file?"""
    try:
        open_same(directory, save_id)
    except (NotACheckpoint, CheckpointReplaced, CorruptCheckpoint):
        return False
    return True


def _remove_leftover(outer: LocalStorage, folder: str) -> None:
    """Nobody else puts anything into this directory: without a save at work in it, it is rubbish."""
    try:
        if markers(outer.folder(folder)):
            return
    except FileNotFoundError:
        return
    outer.delete(folder)
