"""The request of one rank, compared with the stored state before anything is read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from typing import Any, cast

import numpy as np
import torch

from megackpt import events, tree
from megackpt.adapters.megatron import from_megatron
from megackpt.errors import (
    CoverageError,
    MismatchError,
    ShardingError,
    join_truncated,
)
from megackpt.loader.dequantised import Dequantised, dequantised
from megackpt.loader.load_session import common_row, destination
from megackpt.planning import coverage, strict
from megackpt.planning.box import Int64
from megackpt.planning.manifest import (
    COMMON_KEY,
    Bool,
    Declarations,
    Manifest,
    TensorEntry,
    inner_keys,
)
from megackpt.planning.strict import StrictHandling
from megackpt.staging.source import overlaps_itself
from megackpt.state import (
    ABSENT,
    Extracted,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    declare,
    extract,
    object_groups,
    restore,
    unbundled,
)
from megackpt.strategies import StrategyLike

logger = logging.getLogger("megackpt.loader")

GROUPS = 6
"""Groups of stored keys that the warning about keys that no rank asks for names at most."""


KeyMap = Mapping[str, str] | Callable[[str], str]
Transform = Mapping[str, Any]
"""Pattern of keys asked for -> rule: see ``megackpt.huggingface``."""

_TRANSFORMED = EntryPoint(
    "transform", "megackpt.huggingface.states:as_huggingface", "megackpt.tables"
)
"""The function for ``transform``: declares a state by the rules of a table."""


@dataclass(frozen=True, eq=False)
class StateOfStored:
    """A state that each rank declares when the stored contents are known.

    ``declare`` is called with the manifest and, by key, the values of the common state and of
    objects whose keys begin with one of ``prefixes``. It returns the state, and stored keys that
    are not asked for. The load does not warn of these keys. Errors of ``declare`` are raised on all
    ranks, before a tensor is read.
    """

    prefixes: tuple[str, ...]
    declare: Callable[
        [Manifest, Mapping[str, Any]], tuple[ShardedStateDict, Collection[str]]
    ]


@dataclass(frozen=True, eq=False)
class LoadRequest:
    """The arguments of ``load``. Raises ValueError for an argument of a wrong value or type."""

    directory: str
    state: ShardedStateDict | StateOfStored
    strategy: StrategyLike = None
    strict: StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED
    validate: bool = True
    dtype_policy: str = "convert"
    key_map: KeyMap | None = None
    verify: bool = True
    trusted: Sequence[type] = ()
    advise: bool = True
    """Name similar stored keys in the text about unexpected ones."""
    settled: Collection[str] = ()
    transform: Transform | None = None

    def __post_init__(self) -> None:
        if self.dtype_policy not in ("convert", "error"):
            raise ValueError(
                f"dtype_policy is 'convert' or 'error', not {self.dtype_policy!r}"
            )
        names: object = self.key_map
        if not (names is None or callable(names) or isinstance(names, Mapping)):
            raise ValueError(
                f"key_map is a mapping or a function, from key to key, not {names!r}"
            )
        if not isinstance(self.transform, Mapping | None):
            raise ValueError(
                f"transform is a mapping, from pattern to rule, not {self.transform!r}"
            )

    def declared(self, manifest: Manifest, values: Mapping[str, Any]) -> LoadRequest:
        """The request for one checkpoint. ``values``: see ``StateOfStored``."""
        state, settled = self.state, self.settled
        if isinstance(state, StateOfStored):
            state, settled = state.declare(manifest, values)
        if self.transform is not None:
            state = _TRANSFORMED.load()(state, self.transform, rest=True)
        return replace(self, state=state, settled=settled)

    def rename(self, declared: Declarations) -> Declarations:
        """The declarations under the keys of the checkpoint, which ``key_map`` gives."""
        inner = inner_keys(fact for fact in declared.facts if fact[1].startswith("{"))
        renamed = []
        for key, meta in declared.tensors:
            owner, _, name = key.rpartition(".")
            if key in inner:
                key = f"{stored_key(self.key_map, owner)}.{name}"
            else:
                key = stored_key(self.key_map, key)
            renamed.append(TensorEntry(key, meta))
        return replace(declared, tensors=tuple(renamed))


def stored_key(key_map: KeyMap | None, key: str) -> str:
    """The key that ``key_map`` gives for a key that is asked for."""
    name: object = key
    if callable(key_map):
        name = key_map(key)
    elif key_map is not None:
        name = key_map.get(key, key)
    if not isinstance(name, str):
        raise MismatchError(f"key_map gives {name!r} for {key!r}: a str is expected")
    return name


def trusted_classes(given: Any) -> tuple[Any, ...]:
    """``trusted`` as a tuple; ValueError if it holds anything but classes or functions."""
    if isinstance(given, str | type) or not isinstance(given, Iterable):
        raise ValueError(f"trusted takes a tuple of classes, not {given!r}")
    classes = tuple(given)
    for one in classes:
        if not callable(one) and not isinstance(one, tuple):
            raise ValueError(f"trusted takes classes, not {one!r}")
    return classes


@dataclass(frozen=True, eq=False)
class Comparison:
    """One rank's request, compared with the manifest.

    ``unexpected`` are keys that are not stored. ``kept`` numbers the shards that are read.
    ``wanted`` has a row for each of these, and a last one for a stored common state.
    ``dequantised`` are shards, by number, that are computed from stored quantised tensors.
    """

    extracted: Extracted
    declared: Declarations
    unexpected: set[str]
    kept: Int64
    wanted: Declarations
    dequantised: Mapping[int, Dequantised] = field(default_factory=dict)

    @classmethod
    def of(cls, request: LoadRequest, manifest: Manifest, rank: int) -> Comparison:
        """Raises MismatchError for keys, shapes and dtypes that differ and may not."""
        records = dict(manifest.subclasses)
        extracted = extract(
            cast("ShardedStateDict", request.state),
            from_megatron,
            lambda key: records.get(stored_key(request.key_map, key)),
        )
        declared = declare(extracted.shards, rank=rank)
        if request.key_map is not None:
            declared = request.rename(declared)
        _refuse_shared_memory(extracted.shards)
        _warn_of_undeclared(extracted, manifest)
        asked = strict.requested(declared)
        unexpected = asked - strict.stored(manifest)
        computed = {}
        if records:
            computed = dequantised(extracted.shards, declared, manifest)
            unexpected -= records.keys()
        # With RAISE_ALL ``find_missing`` raises, for both kinds of keys and all ranks.
        raising = request.strict in (
            StrictHandling.ASSUME_OK_UNEXPECTED,
            StrictHandling.RAISE_UNEXPECTED,
        )
        if unexpected and (raising or StrictHandling.requires_logging(request.strict)):
            text = strict.describe_unexpected(unexpected, manifest, request.advise)
            if raising:
                raise MismatchError(text)
            logger.warning("%s", text)
        strict.check_shapes(declared, manifest, request.dtype_policy)
        left_out = _left_out(extracted, declared, unexpected)
        left_out[[*computed]] = True
        kept = np.flatnonzero(~left_out)
        rows = [declared.take(kept)]
        # Notes of a file's author are not state: they would mix with the caller's state.
        if manifest.encoding != "noted":
            rows.append(common_row(manifest, rank))
        wanted = Declarations.merge(rows)
        keys = strict.keys(unexpected, declared.tensors)
        return cls(extracted, declared, keys, kept, wanted, computed)

    def tensors(self) -> list[torch.Tensor | None]:
        """For each wanted row the tensor to fill (None: an object)."""
        tensors: list[torch.Tensor | None] = [None] * len(self.wanted)
        for row, number in enumerate(self.kept.tolist()):
            shard = self.extracted.shards[number]
            if isinstance(shard, ShardedTensor):
                tensors[row] = destination(shard)
        return tensors

    def overlapping(self) -> Int64:
        """The wanted rows that may share memory: a read of another row may overwrite them."""
        shards = [self.extracted.shards[number] for number in self.kept.tolist()]
        return overlapping(
            [s.data if isinstance(s, ShardedTensor) else None for s in shards]
        )

    def restore(self, values: Sequence[Any]) -> dict[Any, Any]:
        """The state dict, with the values of all wanted rows in their places."""
        shards = self.extracted.shards
        groups = object_groups(shards)
        result: list[Any] = [ABSENT] * len(shards)
        for i, stored in self.dequantised.items():
            result[i] = stored.target
        for i, value in zip(self.kept.tolist(), values, strict=False):
            shard = shards[i]
            result[i] = value
            if not isinstance(shard, ShardedTensor):
                result[i] = unbundled(shard, value, groups[i].index(i))
        common = {}
        if len(values) > len(self.kept):
            common = values[-1]
        return restore(self.extracted, result, common)


@dataclass(frozen=True, eq=False)
class CompareRequest:
    """What a rank sends to rank 0, which compares the requests of all ranks.

    ``declared`` is None where nothing is validated. ``names`` are empty unless the strictness needs
    the names that all ranks ask for. ``unexpected``: the names that the rank itself has missed.
    """

    declared: Declarations | None
    names: Collection[str]
    unexpected: Collection[str] = ()

    @classmethod
    def of(cls, request: LoadRequest, compared: Comparison) -> CompareRequest:
        """The request of a rank that has compared itself with the stored state."""
        declared = compared.declared
        names: Collection[str] = ()
        if StrictHandling.requires_global_app_metadata(request.strict):
            names = strict.requested(declared)
            for stored in compared.dequantised.values():
                names.discard(stored.key)
                names.update(entry.key for entry in stored.manifest.tensors)
        return cls(declared if request.validate else None, names)


def judge(
    request: LoadRequest, parts: Sequence[CompareRequest], manifest: Manifest
) -> set[str]:
    """On rank 0: check the coverage, and find the stored keys that no rank asks for.

    Missing keys are found only where the strictness makes ranks send their names.
    """
    if request.validate:
        declared = [part.declared for part in parts if part.declared is not None]
        check_coverage(declared, manifest, request)
    if not StrictHandling.requires_global_app_metadata(request.strict):
        return set()
    absent = set[str]().union(*(part.unexpected for part in parts))
    return find_missing(
        [part.names for part in parts], manifest, request.strict, absent
    )


def check_coverage(
    parts: Sequence[Declarations], manifest: Manifest, request: LoadRequest
) -> None:
    """On rank 0: CoverageError unless all ranks together ask for every element exactly once.

    With the default strictness, warns of stored keys that no rank asks for.
    """
    declared = Declarations.merge(parts).numbered()
    try:
        coverage.check(declared)
    except CoverageError as error:
        raise CoverageError(
            f"{error}\n(To load a part, or one twice: validate_access_integrity=False.)"
        ) from None
    if request.strict is not StrictHandling.ASSUME_OK_UNEXPECTED:
        return
    texts = []
    asked = {entry.key for entry in declared.tensors}.union(request.settled)
    if manifest.subclasses:
        asked |= inner_keys(pair for pair in manifest.subclasses if pair[0] in asked)
    for name, count, nbytes in strict.unasked(asked, manifest):
        keys = "keys"
        if count == 1:
            keys = "key"
        texts.append(f"{name!r} ({count} {keys}, {events.format_size(nbytes)})")
    if texts:
        about = ""
        if any("optim" in text for text in texts):
            about = (
                "The state_dict() of an optimizer without state asks for none: give it its state "
                "before the load, or the optimizer itself to a CheckpointManager. "
            )
        logger.warning(
            "%s: stored, but asked for by no rank, so not loaded: %s. (%sTo load a part on "
            "purpose: strict='raise_unexpected', or only= of restore.)",
            request.directory,
            join_truncated(texts, GROUPS, ", "),
            about,
        )


def find_missing(
    names: Sequence[Collection[str]],
    manifest: Manifest,
    flag: StrictHandling,
    absent: Iterable[str] = (),
) -> set[str]:
    """On rank 0: the stored keys that no rank asks for; rank i asks for the keys ``names[i]``.

    Logs them if the strictness says so. With RAISE_ALL raises MismatchError for them, for the
    keys that any rank asks for and that are not stored, and for ``absent``.
    """
    known = strict.stored(manifest)
    asked = set[str]().union(*names)
    missing = known - asked
    unexpected = (asked - known).union(absent)
    if StrictHandling.requires_raising(flag) and (missing or unexpected):
        texts = []
        if unexpected:
            texts.append(strict.describe_unexpected(unexpected, manifest))
        if missing:
            texts.append(strict.describe_missing(missing))
        raise MismatchError("\n".join(texts))
    if missing and StrictHandling.requires_logging(flag):
        logger.warning("%s", strict.describe_missing(missing))
    return strict.keys(missing, manifest.tensors)


def _warn_of_undeclared(extracted: Extracted, manifest: Manifest) -> None:
    """Warn of plain tensors and texts that have the names of stored tensors."""
    known = manifest.numbers()
    names = []
    for path, leaf in tree.walk(extracted.common):
        if isinstance(leaf, (str, torch.Tensor)):
            for name in (".".join(map(str, path)), leaf):
                if isinstance(name, str) and name in known:
                    names.append(name)
                    break
    names = [repr(name) for name in names if name != COMMON_KEY]
    if names:
        logger.warning(
            "%s and %d more are not loaded: the state asks for them by a plain tensor or text, "
            "and only a ShardedTensor is filled (megackpt.load(megackpt.sharded(state), "
            "directory), or sharded_state_dict() and not state_dict())",
            ", ".join(names[:3]),
            max(0, len(names) - 3),
        )


def _refuse_shared_memory(shards: Sequence[ShardedTensor | ShardedObject]) -> None:
    """ShardingError for a tensor whose elements share memory: the last one read would win."""
    for shard in shards:
        data = shard.data
        if isinstance(data, torch.Tensor) and overlaps_itself(data):
            what = "a tensor that overlaps itself"
            if 0 in data.stride():
                what = "an expanded tensor"
            raise ShardingError(
                f"{shard.key!r}: cannot load into {what} (shape {tuple(data.shape)}, strides "
                f"{data.stride()}), whose elements share memory; give data.contiguous(), or "
                "data=None"
            )


def overlapping(tensors: Sequence[torch.Tensor | None]) -> Int64:
    """The indices of tensors that may share memory with another tensor."""
    spans = []
    for row, data in enumerate(tensors):
        if data is not None and data.numel():
            last = 0
            for size, step in zip(data.shape, data.stride(), strict=True):
                last += (size - 1) * step
            begin = data.data_ptr()  # 0: it has no memory, as on the meta device
            end = 0
            if begin:
                end = begin + (last + 1) * data.itemsize
            spans.append((begin, end, row))
    start, stop, rows = np.array(sorted(spans), np.int64).reshape(-1, 3).T
    before = np.maximum.accumulate(stop)
    meets = np.zeros(len(rows), np.bool_)
    meets[1:] = start[1:] < before[:-1]
    meets[:-1] |= start[1:] < stop[:-1]
    return rows[meets]


def _left_out(
    extracted: Extracted, declared: Declarations, unexpected: Collection[str]
) -> Bool:
    """The shards that are not loaded: unexpected ones, and all shards of the same factories.

    A factory cannot merge a part of its shards, and their data may be views of live
    parameters.
    """
    left_out = np.zeros(len(declared), np.bool_)
    if not unexpected:
        return left_out
    around = [{path[:n] for n in range(len(path) + 1)} for path in extracted.paths]
    above_absent: set[tree.Path] = set()
    for i, row in enumerate(declared.rows()):
        if strict.name_of(row.shard, row.meta) in unexpected:
            left_out[i] = True
            above_absent |= around[i]
    incomplete = {path for path, _ in extracted.factories} & above_absent
    for i, paths in enumerate(around):
        left_out[i] |= not incomplete.isdisjoint(paths)
    return left_out
