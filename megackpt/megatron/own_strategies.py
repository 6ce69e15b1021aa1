"""Saves and loads by a custom strategy: a class of the caller's with ``save`` or ``load``.

The strategy writes and reads the files. The engine does the rest: it checks declarations on all
ranks, gives the strategy a staging directory, and commits the directory in one step. The index of a
format that megackpt does not know lists the files, with their digests.

A strategy may also call the method of megackpt that it overrides. The save or load of the engine
then runs inside that call, with the state that the strategy passes, and with the arguments of the
caller.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from megackpt import checkpoint, tree
from megackpt.backends.base import (
    Backend,
    Finished,
    Layout,
    Properties,
    Source,
    Target,
    config_file,
)
from megackpt.backends.object_files import COMMON_FILE
from megackpt.backends.ranges import read_raw
from megackpt.errors import BackendError
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    COMMON,
    LoadPlan,
    Manifest,
    SavePlan,
    WriteResult,
)
from megackpt.state import ShardedBase, ShardedTensor
from megackpt.storage import Storage, is_url


@dataclass
class Outer:
    """The save or load whose strategy is running on this rank.

    ``inner`` is what the engine has returned to the strategy: ``(request,)`` of a save.
    """

    path: str
    run: Callable[..., Any]
    inner: tuple[Any, ...] = ()


_outer: ContextVar[Outer | None] = ContextVar("outer", default=None)
_inner: ContextVar[bool] = ContextVar("inner", default=False)


def is_inner() -> bool:
    """Whether to skip a custom strategy's code, because it has called the overridden method."""
    return _inner.get()


@contextmanager
def running(outer: Outer | None) -> Iterator[None]:
    token = _outer.set(outer)
    try:
        yield
    finally:
        _outer.reset(token)


def outer_run(directory: Any, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The function that an overridden method runs for this directory.

    It is the engine's save or load if the running strategy saves to, or loads from, this
    directory. Else it is ``otherwise``. Either function skips the strategy's code.
    """
    outer = _outer.get()

    def run(*args: Any, **options: Any) -> Any:
        token = _inner.set(True)
        try:
            if outer is None or os.path.realpath(directory) != outer.path:
                return otherwise(*args, **options)
            result = outer.run(*args, **options)
            outer.inner = (result,)
            return result
        finally:
            _inner.reset(token)

    return run


class OwnFormat(Backend):
    """The files of a custom strategy, each as an object."""

    def __init__(self, name: str, version: int, encoding: str = "raw") -> None:
        reads = frozenset({version})
        self.properties = Properties(name, version, reads, encoding=encoding)  # type: ignore[misc]

    def layout(self, ranks: int, manifest: Manifest) -> Layout:
        return Layout([])

    def write(self, root: Storage, plan: SavePlan, data: Source) -> WriteResult:
        raise BackendError("the strategy writes the files")

    def finish(self, root: Storage, manifest: Manifest) -> Finished:
        files = {name: root.get(name) for name in manifest.tables}
        files.update(config_file(self.properties))
        return Finished(manifest, files, written=files)

    def read_manifest(self, root: Storage) -> Manifest:
        size = root.size(COMMON_FILE)
        if size is None:
            return Manifest.of([], [])
        return Manifest.of([COMMON], [(0, Box((), ()), COMMON_FILE, 0, size)])

    def read(self, root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
        read_raw(root, plan, into, verify)


def local_path(directory: Any) -> str:
    """The path of a directory. BackendError for a URL: the caller's code opens files."""
    path = checkpoint.absolute(directory)
    if is_url(path):
        raise BackendError(f"a strategy of your own needs a directory, not {path}")
    return path


def handled(strategy: Any, state: Any) -> Any:
    """The sharded leaves that a strategy handles."""
    kind: type = ShardedTensor
    if strategy.can_handle_sharded_objects:
        kind = ShardedBase
    return tree.extract_matching_values(state, lambda leaf: isinstance(leaf, kind))[0]


def files_below(root: Storage, folder: str = "") -> list[str]:
    """All files below a staging directory or its ``folder``, except the files of the library."""
    waiting = [f"{folder}/{entry}".lstrip("/") for entry in root.list(folder)]
    found = []
    while waiting:
        name = waiting.pop()
        if name.startswith(".megackpt"):
            continue
        if root.size(name) is None:
            waiting += [f"{name}/{entry}" for entry in root.list(name)]
        else:
            found.append(name)
    return sorted(found)
