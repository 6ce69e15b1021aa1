"""The registry: which format a name means, and the policy of a save. Values only; saver and loader do the work."""

from __future__ import annotations

import difflib
import functools
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, cast

from megackpt.backends.base import Backend
from megackpt.errors import BackendError, CorruptCheckpoint, NotACheckpoint
from megackpt.runtime.storage import Storage

CONFIG_FNAME = "metadata.json"
ENTRY_POINTS = "megackpt.backends"


@dataclass(frozen=True)
class CheckpointingConfig:
    """The content of ``metadata.json``: which format, in Megatron's words.

    Source: megatron-core 0.16, ``dist_checkpointing/core.py``; 0.19 writes the first two fields only.
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


@dataclass(frozen=True)
class Strategy:
    """How to save: the format, its options, and who may write what.

    ``options`` go to the backend's constructor (torch_dist: ``files_per_rank``, ``separation_hint``).
    ``balance`` spreads the writing over all ranks that hold a shard; False = its main replica writes it.
    ``dedup_group`` is the torch process group within which replicas stand in for one another (None: all ranks).
    """

    backend: str = "torch_dist"
    version: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    balance: bool = True
    dedup_group: Any = None

    def make_backend(self) -> Backend:
        """The format that this names. Raises BackendError where it is unknown or its package is missing."""
        if not isinstance(self.options, Mapping):
            raise BackendError(f"options of a Strategy must be a dict, not {self.options!r}")
        return backend_named(self.backend, self.version, **self.options)


StrategyLike = str | tuple[str, int] | Strategy | Backend | None


@dataclass(frozen=True)
class _Format:
    """One line of the registry: where a backend's class is, and what to say when it cannot be imported."""

    name: str
    version: int
    load: Callable[[], type[Backend]]
    install: str


def _built_in(module: str, attribute: str) -> Callable[[], type[Backend]]:
    return lambda: cast(type[Backend], getattr(importlib.import_module(module), attribute))


BUILT_IN = (
    _Format("torch_dist", 1, _built_in("megackpt.backends.torch_dist", "TorchDist"), "pip install torch"),
    _Format("zarr", 2, _built_in("megackpt.backends.zarr", "Zarr"), "pip install tensorstore ml_dtypes"),
)


@functools.cache  # looking through all installed packages takes milliseconds
def _formats() -> tuple[_Format, ...]:
    """Every known format, the built-in ones first: the order in which a directory is tried."""
    plugged = []
    for point in entry_points(group=ENTRY_POINTS):
        name, _, version = point.name.partition("@")
        package = point.dist.name if point.dist else point.value
        plugged.append(_Format(name, int(version or 1), point.load, f"pip install {package}"))
    return (*BUILT_IN, *plugged)


def _imported(entry: _Format) -> type[Backend]:
    try:
        return entry.load()
    except ImportError as error:
        raise BackendError(
            f"the format {entry.name!r} needs a package that is not installed ({error}): {entry.install}"
        ) from error


def backend_named(name: str, version: int | None = None, **options: Any) -> Backend:
    """The backend of this name that reads or writes this version (None: its newest)."""
    named = [f for f in _formats() if f.name == name]
    if not named:
        known = sorted({f.name for f in _formats()})
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BackendError(f"unknown format {name!r}: known are {', '.join(known)}{hint}")
    kinds = [_imported(f) for f in sorted(named, key=lambda f: -f.version)]
    for kind in kinds:
        if version is None or version in kind.reads:
            return _made(kind, name, options)
    reads = sorted({v for kind in kinds for v in kind.reads})
    raise BackendError(
        f"version {version} of the format {name!r} is not known to this release: it has {reads}"
    )


def _made(kind: type[Backend], name: str, options: Mapping[str, Any]) -> Backend:
    try:
        return kind(**options)
    except TypeError as error:
        raise BackendError(
            f"the format {name!r} does not take the options {dict(options)!r}: {error}"
        ) from error


def resolve(strategy: StrategyLike) -> Strategy:
    """What a caller may give as a strategy (name, (name, version), Strategy, Backend, None) as a Strategy."""
    match strategy:
        case None:
            return Strategy()
        case Strategy():
            return strategy
        case str():
            return Strategy(strategy)
        case (str() as name, int() as version):
            return Strategy(name, version)
        case Backend():
            return _Given(strategy.name, strategy.version, instance=strategy)
    raise BackendError(
        f"a strategy is a name ('zarr'), a pair (('zarr', 2)), a Strategy or a Backend, not {strategy!r}"
    )


@dataclass(frozen=True)
class _Given(Strategy):
    """A strategy around a backend object that the caller made."""

    instance: Backend | None = None

    def make_backend(self) -> Backend:
        return self.instance or super().make_backend()


def read_config(storage: Storage) -> CheckpointingConfig | None:
    """What ``metadata.json`` says, or None where there is none. Unknown fields are ignored, as by Megatron >= 0.19."""
    if storage.size(CONFIG_FNAME) is None:
        return None
    try:
        fields = json.loads(storage.get(CONFIG_FNAME, limit=1 << 20))
        name, version = fields["sharded_backend"], fields.get("sharded_backend_version", 1)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{storage.location}/{CONFIG_FNAME} is damaged: it does not say which format wrote the checkpoint"
        ) from error
    if not isinstance(name, str) or not isinstance(version, int):
        raise CorruptCheckpoint(
            f"{storage.location}/{CONFIG_FNAME} is damaged: {name!r}, {version!r} are no name and version"
        )
    common = fields.get("common_backend", "torch"), fields.get("common_backend_version", 1)
    return CheckpointingConfig(name, version, *common)


def find_backend(storage: Storage) -> Backend:
    """The format of the complete checkpoint in this directory. Raises NotACheckpoint where there is none."""
    config = read_config(storage)
    if config is not None:
        try:
            return backend_named(config.sharded_backend, config.sharded_backend_version)
        except BackendError as error:
            raise BackendError(f"{storage.location}: {error}") from error
    absent = []
    for entry in _formats():
        try:
            backend = _imported(entry)()
        except BackendError as error:
            absent.append(str(error))
            continue
        if backend.recognises(storage):
            return backend
    unasked = f" (not asked: {'; '.join(absent)})" if absent else ""
    raise NotACheckpoint(
        f"{storage.location} is not a distributed checkpoint: no known format is recognised in it{unasked}"
    )


def get_default_save_sharded_strategy(backend: str = "torch_dist", version: int | None = None) -> Strategy:
    """Megatron's name for choosing a format to save in."""
    strategy = Strategy(backend, version)
    strategy.make_backend()
    return strategy
