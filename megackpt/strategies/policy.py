"""Strategies: a format, its options and the policy of one save or load; the defaults of names."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Literal, get_args

from megackpt.backends.base import CONFIG, Backend, read_config
from megackpt.errors import (
    BackendError,
    CorruptCheckpoint,
    NotACheckpoint,
    StorageError,
)
from megackpt.storage import Storage
from megackpt.strategies.formats import backend_named, formats, kinds, made

Exchange = Literal["auto", "always", "never"]
Audit = Literal["off", "sample", "full"]
OnMismatch = Literal["raise", "warn"]
CheckValues = Literal["off", "note", "raise"]
_CHOICES = {
    "exchange": get_args(Exchange),
    "audit": get_args(Audit),
    "on_mismatch": get_args(OnMismatch),
    "check_values": get_args(CheckValues),
}
ALGORITHMS = ("broadcast", "gather_rounds", "gather_object")
"""Megatron's names of exchange algorithms."""
COMMON_IS_KEPT = (
    "the format stores the common state itself: pass it to save with the sharded state"
)


@dataclass(frozen=True)
class Strategy:
    """How to save: the format, its options, and which ranks write.

    ``options`` go to the backend's constructor (torch_dist: ``files_per_rank``,
    ``separation_hint``, ``torch_metadata``; zarr: ``compression``, ``checksum``,
    ``missing_chunks``; safetensors: ``shards``, ``max_shard_bytes``). ``balance`` distributes the
    writing of tensors over all ranks that hold a shard; their copies must be equal. False: the main
    replica writes it. The main replica always writes objects. ``dedup_group`` is the torch process
    group within which replicas write for each other (None: all ranks). ``staging_memory`` is how
    many bytes of host memory an asynchronous save may use for its copy on each rank (None: see
    ``staging.buffers``). Data that does not fit is written before ``save`` returns. Objects and
    the common state of such a save need more memory, because they are pickled whole.

    ``audit`` compares the values of each shard that several ranks hold, before the save is
    complete: "full": all of them; "sample": one in 16 blocks of 1 MiB, with another offset in the
    next save, and all small shards; "off": none. With ``audit_every`` n, the first save of a state
    in each process and every n-th one after it do so. All other saves compare only small shards
    (the shards of a rank that are together at most 1 MiB). ``audit_exclude`` has patterns of keys
    that are not compared. If values differ, ``on_mismatch`` "raise" raises ReplicaMismatch, and
    "warn" logs its text and saves. Rank 0's settings count. Hashing takes place before ``save``
    returns.

    ``check_values`` "note" counts the NaN and infinite elements of each tensor before ``save``
    returns, notes them in the index with the largest magnitude of the finite elements, and warns;
    "raise" raises NonfiniteValues, without a commit. All ranks must have the same.

    ``reuse_unchanged`` does not write tensors again that have not changed since the step before:
    their files become hard links to the files of that step, in a bucket copies. The step before is
    the checkpoint that this process has saved last with the same declarations, else ``reuse_from``,
    the directory of a checkpoint of the same layout. Shards of ``frozen`` keys get files of their
    own from the first save on (a manager adds the parameters that need no gradient), other shards
    when their digests are equal in two saves. Formats: "torch_dist", "zarr". All ranks must have
    the same.

    A load uses the format, its options, and ``exchange``. "never": each rank reads the bytes that
    it needs. "always": the ranks of ``load_group`` (None: all ranks) read each byte once, and send
    it to the ranks that need it. "auto": like "always" if bytes come over a network (network file
    systems, object stores), like "never" if ranks share a page cache.
    """

    backend: str = "torch_dist"
    version: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    balance: bool = True
    dedup_group: Any = None
    staging_memory: int | None = None
    load_group: Any = None
    exchange: Exchange = "never"
    audit: Audit = "off"
    audit_every: int = 1
    audit_exclude: Sequence[str] = ()
    on_mismatch: OnMismatch = "raise"
    check_values: CheckValues = "off"
    reuse_unchanged: bool = False
    reuse_from: str | os.PathLike[str] | None = None
    frozen: Collection[str] = ()

    def __post_init__(self) -> None:
        given: object = self.options  # callers without a type checker give anything
        if not isinstance(given, Mapping):
            raise BackendError(f"options of a Strategy must be a dict, not {given!r}")
        memory: object = self.staging_memory
        if memory is not None and (type(memory) is not int or memory < 1 << 20):
            raise BackendError(
                f"staging_memory must be None or at least 1 MiB in bytes, not {memory!r}"
            )
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise BackendError(
                    f"{name} must be one of {', '.join(map(repr, known))}, not "
                    f"{getattr(self, name)!r}"
                )
        every: object = self.audit_every
        if type(every) is not int or every < 1:
            raise BackendError(f"audit_every must be a positive int, not {every!r}")
        patterns: Any = self.audit_exclude
        is_list = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        if not is_list or not all(isinstance(p, str) for p in patterns):
            raise BackendError(
                f"audit_exclude must be a list of patterns, not {patterns!r}"
            )
        keys = self.frozen
        if isinstance(keys, str):
            raise BackendError(f"frozen must be a collection of keys, not {keys!r}")
        if not self.reuse_unchanged and (keys or self.reuse_from is not None):
            raise BackendError(
                "frozen and reuse_from have no effect without reuse_unchanged=True"
            )

    def make_writer(self) -> Backend:
        """As ``make_backend``, for a save. Raises BackendError for an export format."""
        backend = self.make_backend()
        name = backend.properties.name
        if backend.properties.export_only:
            raise BackendError(
                f"{name!r} is an export format: one process has to write all of it, so no "
                "save does. Save as 'torch_dist' or 'safetensors', and export that checkpoint: "
                f"megackpt.convert(checkpoint_dir, target, {name!r})"
            )
        if self.reuse_unchanged and not backend.properties.reuses:
            raise BackendError(
                f"{name!r} cannot reuse unchanged tensors: save as 'torch_dist' or 'zarr', or "
                "without reuse_unchanged"
            )
        return backend

    def make_backend(self) -> Backend:
        """The backend to write with.

        Raises BackendError if it is unknown, if its package is missing, or if the format or the
        version is read but not written.
        """
        for kind in kinds(self.backend):
            if kind.properties.read_only:
                raise BackendError(
                    f"checkpoints of {self.backend!r} are read, not written: choose "
                    "'torch_dist', 'zarr', 'safetensors' or 'torch'"
                )
            if self.version in (None, kind.properties.version):
                return made(kind, self.backend, self.options)
        raise BackendError(
            f"version {self.version} of the format {self.backend!r} is not written by this "
            f"release: it writes {sorted(kind.properties.version for kind in kinds(self.backend))}"
        )

    def make_reader(self, version: int | None = None) -> Backend:
        """The backend to read a checkpoint of this version with (None: the newest)."""
        return backend_named(self.backend, version, **self.options)

    def own(self, method: str) -> Callable[..., Any] | None:  # noqa: ARG002
        """The function that performs ``save`` or ``load`` with a custom strategy."""
        return None


StrategyLike = str | tuple[str, int] | Strategy | Backend | None


@dataclass(frozen=True)
class _Given(Strategy):
    """A strategy of a backend object that the caller made."""

    instance: Backend = field(kw_only=True)

    def make_backend(self) -> Backend:
        return self.instance

    def make_reader(self, version: int | None = None) -> Backend:
        reads = self.instance.properties.reads
        if version not in (None, *reads):
            raise BackendError(
                f"{self.instance!r} reads {sorted(reads)}, and this is version {version}"
            )
        return self.instance


@dataclass(frozen=True, init=False)
class _Wrapper(Strategy):
    """A strategy around another one, which chooses the format, with a copy of all of its values."""

    base_strategy: StrategyLike = None
    parallelization_group: Any = None
    do_cache_distribution: bool = False
    """Has no effect: every save caches its plan, and reuses it while it fits."""

    def _hold(self, base: StrategyLike, wrapped: Strategy, **own: Any) -> None:
        held = {each.name: getattr(wrapped, each.name) for each in fields(Strategy)}
        for name, value in {**held, "base_strategy": base, **own}.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    def make_backend(self) -> Backend:
        return resolve(self.base_strategy).make_backend()

    def make_reader(self, version: int | None = None) -> Backend:
        return as_strategy(self.base_strategy).make_reader(version)


@dataclass(frozen=True, init=False)
class FullyParallelSaveStrategyWrapper(_Wrapper):
    """Megatron's name: the ranks of a group (None: all ranks) with a shard divide the writing."""

    def __init__(
        self,
        strategy: StrategyLike,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
    ) -> None:
        self._hold(
            strategy,
            resolve(strategy),
            parallelization_group=parallelization_group,
            do_cache_distribution=do_cache_distribution,
            balance=True,
            dedup_group=parallelization_group,
        )


@dataclass(frozen=True, init=False)
class FullyParallelLoadStrategyWrapper(_Wrapper):
    """Megatron's name: the ranks of a group (None: all ranks) divide the reading if that is faster.

    ``exchange_algo``: "always" and "never" have the meaning of ``Strategy.exchange``; "auto" and
    Megatron's names of algorithms ("broadcast", "gather_rounds", "gather_object") decide by the
    file system. All use the same exchange. ``strategy`` None: the directory decides the format.
    """

    def __init__(
        self,
        strategy: StrategyLike,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
    ) -> None:
        if exchange_algo in ALGORITHMS:
            exchange_algo = "auto"
        self._hold(
            strategy,
            as_strategy(strategy),
            parallelization_group=parallelization_group,
            do_cache_distribution=do_cache_distribution,
            load_group=parallelization_group,
            exchange=exchange_algo,
        )


def as_strategy(given: StrategyLike) -> Strategy:
    """The Strategy of a name, a pair (name, version), a Strategy, a Backend, or None."""
    match given:
        case None:
            return Strategy()
        case Strategy():
            return given
        case str():
            return Strategy(given)
        case (str() as name, int() as version):
            return Strategy(name, version)
        case Backend():
            properties = given.properties
            return _Given(properties.name, properties.version, instance=given)
    raise BackendError(
        "a strategy is a name ('zarr'), a pair (('zarr', 2)), a Strategy or a Backend, not "
        f"{given!r}; in place of one of Megatron-Core's, pass the class of its name in "
        "megackpt.megatron.strategies, or None"
    )


def resolve(given: StrategyLike) -> Strategy:
    """The strategy to save with: the one registered for the name, else ``as_strategy``."""
    strategy = as_strategy(given)
    if isinstance(given, Strategy | Backend):
        return strategy
    name, version = strategy.backend, strategy.version
    default = _registered(StrategyAction.SAVE_SHARDED, name, version)
    if default is None:
        return strategy
    return as_strategy(default)


def loading(given: StrategyLike, name: str, version: int) -> Strategy:
    """The policy of a load of this format: the caller's, else the one registered for the format."""
    if isinstance(given, Strategy | Backend):
        return as_strategy(given)
    default = _registered(StrategyAction.LOAD_SHARDED, name, version)
    if default is None:
        return as_strategy(given)
    return as_strategy(default)


def _wrapped(given: StrategyLike) -> StrategyLike:
    """The innermost strategy, which chooses the format."""
    while isinstance(given, _Wrapper):
        given = given.base_strategy
    return given


def asked_format(given: StrategyLike) -> Strategy | None:
    """The format that the caller of a load asks for; None: any.

    Raises BackendError for an unknown one.
    """
    given = _wrapped(given)
    if given is None:
        return None
    asked = as_strategy(given)
    reader_of(asked.backend, asked.version, asked)
    return asked


class StrategyAction(Enum):
    """The actions that a strategy can be the default for. Names and values are Megatron-Core's."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


default_strategies: defaultdict[str, dict[tuple[str, int], StrategyLike]] = defaultdict(
    dict
)
"""The registered defaults: value of a StrategyAction -> (name, version) -> strategy."""


def register_default_strategy(
    action: StrategyAction, backend: str, version: int, strategy: StrategyLike
) -> None:
    """Make ``strategy`` the default for this format and version in this process. Megatron's name.

    SAVE_SHARDED: ``save`` uses it for ``backend``, None and (backend, version). LOAD_SHARDED:
    every load of a checkpoint of (backend, version) uses it. Register the same on all ranks. A
    Strategy or a Backend that a caller passes has priority. Raises NotImplementedError for further
    actions: the format stores the common state itself.
    """
    if action not in (StrategyAction.SAVE_SHARDED, StrategyAction.LOAD_SHARDED):
        raise NotImplementedError(f"{action}: {COMMON_IS_KEPT}")
    if strategy is None:
        raise BackendError(
            f"None is not a strategy: nothing to register for {(action.value, backend, version)}"
        )
    as_strategy(strategy)
    default_strategies[action.value][backend, version] = strategy


def get_default_strategy(
    action: StrategyAction, backend: str, version: int | None = None
) -> StrategyLike:
    """The registered default, else a Strategy of the format (None: its newest version).

    Raises BackendError "Cannot import a default strategy for ..." if a package is missing or
    broken, "Cannot find a default strategy for ..." if the format is unknown.
    """
    default = _registered(action, backend, version)
    if default is not None:
        return default
    what = action.value, backend, version
    if action in (StrategyAction.LOAD_COMMON, StrategyAction.SAVE_COMMON):
        raise BackendError(
            f"Cannot find a default strategy for: {what}: {COMMON_IS_KEPT}"
        )
    strategy = Strategy(backend, version)
    try:
        if action is StrategyAction.SAVE_SHARDED:
            strategy.make_writer()
        else:
            strategy.make_reader(version)
    except BackendError as error:
        verb = "find"
        if error.__cause__ is not None:
            verb = "import"
        raise BackendError(
            f"Cannot {verb} a default strategy for: {what}. Error: {error}"
        ) from error
    return strategy


def _registered(action: StrategyAction, name: str, version: int | None) -> StrategyLike:
    table = default_strategies[action.value]
    if version is None:
        version = 1
        known = [(entry.name, entry.version) for entry in formats()]
        for known_name, known_version in (*table, *known):
            if known_name == name:
                version = max(version, known_version)
    return table.get((name, version))


def get_default_save_sharded_strategy(
    backend: str = "torch_dist", version: int | None = None
) -> Strategy:
    """The default strategy to save with. Megatron's name."""
    return as_strategy(
        get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)
    )


def reader_of(name: str, version: int | None, asked: Strategy | None = None) -> Backend:
    """The backend that reads checkpoints of this format and version (None: the newest).

    It is the one that the caller ``asked`` for if that is an object or has options, else the one
    registered for LOAD_SHARDED, else the default of the registry. Raises BackendError if another
    format was asked for.
    """
    if asked is not None and asked.backend != name:
        raise BackendError(
            f"it holds the format {name!r}, not {asked.backend!r}: "
            "leave sharded_strategy out to load any format"
        )
    if isinstance(asked, _Given) or (asked is not None and asked.options):
        return asked.make_reader(version)
    default = _wrapped(_registered(StrategyAction.LOAD_SHARDED, name, version))
    if default is None:
        return backend_named(name, version)
    return as_strategy(default).make_reader()


def find_backend(storage: Storage, asked: Strategy | None = None) -> Backend:
    """The format of the complete checkpoint in this directory.

    ``metadata.json`` names it. Without one, ``recognises`` of all formats is called, or of the one
    that the caller ``asked`` for.

    Raises:
        NotACheckpoint: no format recognises it.
        BackendError: several formats do, or it is not the one that was asked for.
    """
    config = read_config(storage)
    if config is not None:
        try:
            return reader_of(
                config.sharded_backend, config.sharded_backend_version, asked
            )
        except BackendError as error:
            raise BackendError(f"{storage.called}: {error}") from error
    if asked is not None:
        backend = reader_of(asked.backend, asked.version, asked)
        if backend.recognises(storage):
            return backend
        raise NotACheckpoint(
            f"{storage.called} is not a distributed checkpoint: the format {asked.backend!r} does "
            "not recognise it"
        )
    found, unasked = _recognised(storage)
    if len(found) > 1:
        names = " and as ".join(map(repr, found))
        raise BackendError(
            f"{storage.called} can be read as {names}, and has no {CONFIG} that says which: choose "
            f"by sharded_strategy={next(iter(found))!r}, or move away the files that are not the "
            "checkpoint's"
        )
    if found:
        return next(iter(found.values()))
    if _is_damaged(storage):
        raise CorruptCheckpoint(
            f"{storage.location}/{CONFIG} is damaged: it does not say which format wrote the "
            "checkpoint"
        )
    errors = ""
    if unasked:
        errors = f" (not asked: {'; '.join(unasked)})"
    raise NotACheckpoint(
        f"{storage.called} is not a distributed checkpoint: no known format is recognised in "
        f"it{errors}"
    )


def _is_damaged(storage: Storage) -> bool:
    """Is ``metadata.json`` not JSON? One with other fields belongs to another program."""
    size = storage.size(CONFIG)
    if size is None or size > 1 << 20:
        return False
    try:
        json.loads(storage.get(CONFIG))
    except (ValueError, RecursionError):
        return True
    return False


def _recognised(storage: Storage) -> tuple[dict[str, Backend], list[str]]:
    """The formats that recognise a directory, by name, and the errors of formats that failed."""
    found: dict[str, Backend] = {}
    unasked = []
    for entry in formats():
        try:
            backend = made(entry.kind(), entry.name, {})
            if backend.recognises(storage):
                found.setdefault(entry.name, reader_of(entry.name, entry.version))
        except (StorageError, NotACheckpoint):  # or a save that is not finished
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it must not hide other formats
            unasked.append(f"{entry.name}: {error}")
    for backend in list(found.values()):
        for name in backend.properties.covers:
            found.pop(name, None)
    return found, unasked
