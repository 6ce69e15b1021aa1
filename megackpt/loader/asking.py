"""What ranks ask for, against what is stored: compared before anything is read, and put in place after."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megackpt import events, tree
from megackpt.adapters.megatron import native
from megackpt.errors import CoverageError, MismatchError, ShardingError, join_truncated
from megackpt.loader.reading import common_row, destination
from megackpt.planning import coverage, strict
from megackpt.planning.box import Int64
from megackpt.planning.manifest import (
    COMMON_KEY,
    Bool,
    Declarations,
    Manifest,
    TensorEntry,
)
from megackpt.planning.strict import GROUPS, StrictHandling, Unasked
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

KeyMap = Mapping[str, str] | Callable[[str], str]

logger = logging.getLogger("megackpt.loader")

_RAISING = (
    StrictHandling.ASSUME_OK_UNEXPECTED,
    StrictHandling.RAISE_UNEXPECTED,
    StrictHandling.RAISE_ALL,
)


@dataclass(frozen=True)
class Terms:
    """How what is asked for may differ from what is stored."""

    strict: StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED
    validate: bool = True
    dtype_policy: str = "convert"
    key_map: KeyMap | None = None

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

    def renamed(self, declared: Declarations) -> Declarations:
        """The declarations under the keys that the checkpoint knows."""
        if self.key_map is None:
            return declared
        names = self.key_map
        rename = names if callable(names) else lambda key: names.get(key, key)
        renamed: dict[str, object] = {e.key: rename(e.key) for e in declared.tensors}
        wrong = [
            f"{name!r} for {key!r}"
            for key, name in renamed.items()
            if not isinstance(name, str)
        ]
        if wrong:
            raise MismatchError(
                f"key_map gives {wrong[0]}, which is no key: a str is expected"
            )
        return replace(
            declared,
            tensors=tuple(
                TensorEntry(str(renamed[e.key]), e.meta) for e in declared.tensors
            ),
        )


@dataclass(frozen=True, eq=False)
class Told:
    """What the coordinator hears of one rank: its declarations and its names, where these are compared."""

    declared: Declarations | None
    names: frozenset[str]


@dataclass(frozen=True, eq=False)
class Asked:
    """One rank's wishes, compared: ``kept`` numbers the shards that are read, ``wanted`` has a row for each of
    them and a last one for the common state where there is one."""

    extracted: Extracted
    declared: Declarations
    unexpected: set[str]
    kept: Int64
    wanted: Declarations

    @classmethod
    def of(
        cls, state: ShardedStateDict, terms: Terms, manifest: Manifest, rank: int
    ) -> Asked:
        """Raises MismatchError for keys, shapes and dtypes that do not fit and may not differ."""
        extracted = extract(state, native)
        declared = terms.renamed(declare(extracted.shards, rank=rank))
        _refuse_shared_memory(extracted.shards)
        _warn_of_undeclared(extracted, manifest)
        unexpected = strict.unexpected(declared, manifest)
        if unexpected and terms.strict in _RAISING:
            raise MismatchError(
                strict.describe(unexpected, (), manifest, strict.requested(declared))
            )
        if unexpected and StrictHandling.requires_logging(terms.strict):
            logger.warning(
                "%s",
                strict.describe(unexpected, (), manifest, strict.requested(declared)),
            )
        strict.check_shapes(declared, manifest, terms.dtype_policy)
        kept = np.flatnonzero(~_left_out(extracted, _bearing(declared, unexpected)))
        # What authors of files noted is no state: it would stand beside the caller's own.
        common = [] if manifest.encoding == "noted" else [common_row(manifest, rank)]
        wanted = Declarations.merge([declared.take(kept), *common])
        return cls(
            extracted, declared, strict.keys(unexpected, declared.tensors), kept, wanted
        )

    def told(self, terms: Terms) -> Told:
        everything = StrictHandling.requires_global_app_metadata(terms.strict)
        names = strict.requested(self.declared) if everything else ()
        return Told(self.declared if terms.validate else None, frozenset(names))

    def tensors(self) -> list[torch.Tensor | None]:
        """For each wanted row the tensor to fill (None: an object)."""
        shards = [self.extracted.shards[i] for i in self.kept.tolist()]
        places = [
            destination(s) if isinstance(s, ShardedTensor) else None for s in shards
        ]
        return places + [None] * (len(self.wanted) - len(shards))

    def overlapping(self) -> Int64:
        """The wanted rows whose memory is, or may be, that of others as well: what lands there may be lost again."""
        shards = [self.extracted.shards[i] for i in self.kept.tolist()]
        return overlapping(
            [s.data if isinstance(s, ShardedTensor) else None for s in shards]
        )

    def restored(self, values: Sequence[Any]) -> dict[Any, Any]:
        """The state dict with the values of all wanted rows in their places."""
        shards = self.extracted.shards
        groups = object_groups(shards)
        result: list[Any] = [ABSENT] * len(shards)
        for i, value in zip(self.kept.tolist(), values, strict=False):
            shard = shards[i]
            is_object = isinstance(shard, ShardedObject)
            result[i] = (
                unbundled(shard, value, groups[i].index(i)) if is_object else value
            )
        common = values[-1] if len(values) > len(self.kept) else {}
        return restore(self.extracted, result, common)


def judge(
    parts: Sequence[Told], terms: Terms, manifest: Manifest, directory: str
) -> set[str]:
    """On the coordinator: is everything asked for exactly once? Returns the keys that nobody asks for.

    Only what ranks send anyway is looked at: where nothing is validated and the strictness does not ask for all
    names, nobody knows what other ranks ask for.
    """
    if terms.validate:
        declared = Declarations.merge(
            [p.declared for p in parts if p.declared is not None]
        ).numbered()
        try:
            coverage.check(declared)
        except CoverageError as error:
            raise CoverageError(
                f"{error}\n(To load a part, or one twice: validate_access_integrity=False.)"
            ) from None
        if terms.strict is StrictHandling.ASSUME_OK_UNEXPECTED:
            _warn_of_unasked(
                strict.unasked({entry.key for entry in declared.tensors}, manifest),
                directory,
            )
    if not StrictHandling.requires_global_app_metadata(terms.strict):
        return set()
    missing = strict.missing([p.names for p in parts], manifest)
    if missing and StrictHandling.requires_raising(terms.strict):
        text = strict.describe((), missing, manifest)
        if not any(p.names for p in parts):
            text += "\n  hint: no rank asks for anything: the state holds no ShardedTensor and no ShardedObject. "
            text += "Is it a state_dict(), or a list of names, where a sharded_state_dict() belongs?"
        raise MismatchError(text)
    if missing and StrictHandling.requires_logging(terms.strict):
        logger.warning("%s", strict.describe((), missing, manifest))
    return strict.keys(missing, manifest.tensors)


def _warn_of_unasked(groups: Sequence[Unasked], directory: str) -> None:
    """Name what is stored and no rank asks for, such as the moments of an optimizer that has not made a step."""
    if not groups:
        return
    texts = []
    for group in groups:
        counts = [
            f"{count} {kind}{'' if count == 1 else 's'}"
            for count, kind in ((group.tensors, "tensor"), (group.objects, "object"))
            if count
        ]
        texts.append(
            f"{group.name!r} ({', '.join([*counts, events.format_size(group.nbytes)])})"
        )
    logger.warning(
        "%s: stored, but asked for by no rank, so not loaded: %s. (An optimizer without state asks for none: give it "
        "its state before the load. To load a part on purpose: strict='raise_unexpected'.)",
        directory,
        join_truncated(texts, GROUPS, ", "),
    )


def _warn_of_undeclared(extracted: Extracted, manifest: Manifest) -> None:
    """Say that plain tensors, or texts, under the names of stored tensors are no way of asking for them."""
    known = manifest.numbers()
    found = [
        next(
            (
                n
                for n in (".".join(map(str, path)), leaf)
                if isinstance(n, str) and n in known
            ),
            None,
        )
        for path, leaf in tree.walk(extracted.common)
        if isinstance(leaf, (str, torch.Tensor))
    ]
    names = [repr(name) for name in found if name is not None and name != COMMON_KEY]
    if names:
        logger.warning(
            "%s and %d more are not loaded: the state asks for them by a plain tensor or text, and only a "
            "ShardedTensor is filled (megackpt.load(megackpt.sharded(state), directory), or sharded_state_dict() and "
            "not state_dict())",
            ", ".join(names[:3]),
            max(0, len(names) - 3),
        )


def _refuse_shared_memory(shards: Sequence[ShardedTensor | ShardedObject]) -> None:
    """ShardingError for data in which different elements are the same memory: the last one read would win."""
    for shard in shards:
        data = shard.data if isinstance(shard, ShardedTensor) else None
        if data is not None and overlaps_itself(data):
            what = (
                "an expanded tensor"
                if 0 in data.stride()
                else "a tensor that overlaps itself"
            )
            raise ShardingError(
                f"{shard.key!r}: cannot load into {what} (shape {tuple(data.shape)}, strides {data.stride()}), whose "
                "elements share memory; give data.contiguous(), or data=None"
            )


def overlapping(tensors: Sequence[torch.Tensor | None]) -> Int64:
    """Which of them are, or may be, the memory of others as well."""
    spans = [
        (*_span(data), row)
        for row, data in enumerate(tensors)
        if data is not None and data.numel()
    ]
    start, stop, rows = np.array(sorted(spans), np.int64).reshape(-1, 3).T
    before = np.maximum.accumulate(stop)
    meets = np.zeros(len(rows), np.bool_)
    meets[1:] = start[1:] < before[:-1]
    meets[:-1] |= start[1:] < stop[:-1]
    return rows[meets]


def _span(data: torch.Tensor) -> tuple[int, int]:
    """Where its memory begins and ends; nowhere if it has none, as on ``meta``."""
    last = sum(
        (size - 1) * step for size, step in zip(data.shape, data.stride(), strict=True)
    )
    start = data.data_ptr()
    return start, start + (last + 1) * data.itemsize * bool(start)


def _left_out(extracted: Extracted, absent: Bool) -> Bool:
    """Which shards are not loaded: those that are not there, and what the same factories built. What a factory has
    no use for may be a view of a live parameter."""
    if not absent.any():
        return absent
    around = [{path[:n] for n in range(len(path) + 1)} for path in extracted.paths]
    beside = {path for i in np.flatnonzero(absent).tolist() for path in around[i]}
    incomplete = beside.intersection(path for path, _ in extracted.factories)
    return (
        np.array([not incomplete.isdisjoint(paths) for paths in around], np.bool_)
        | absent
    )


def _bearing(declared: Declarations, names: Collection[str]) -> Bool:
    """Which rows bear one of these names (keys of tensors, unique keys of objects)?"""
    if not names:
        return np.zeros(len(declared), np.bool_)
    return np.array(
        [strict.name_of(row.shard, row.meta) in names for row in declared.rows()],
        np.bool_,
    )
