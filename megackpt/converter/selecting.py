"""What a conversion carries: which tensors and objects, under which names, in which dtype. Text and tables only."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megackpt.errors import MismatchError, join_truncated
from megackpt.planning.manifest import COMMON_KEY, Manifest, TensorEntry, TensorMeta

logger = logging.getLogger("megackpt.converter")

Renames = Mapping[str, str] | Iterable[str | tuple[str, str]]

_FLOATING = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
    "fp64": "float64", "double": "float64", "fp8": "float8_e4m3fn", "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}  # fmt: skip
CASTS = tuple(sorted({*_FLOATING, *_FLOATING.values()}))
"""What floating tensors can be cast to."""
_SOURCES = frozenset(
    ("float8_e4m3fnuz", "float8_e5m2fnuz", *_FLOATING.values())
)  # not e8m0: these are scales


@dataclass(frozen=True, slots=True)
class Choice:
    """A caller's wishes.

    ``select`` and ``exclude`` are patterns of keys as the shell has them (``*``, ``?``, ``[...]``); empty
    ``select``: everything. ``rename`` are pairs (old, new): in ``old`` each ``*`` stands for any text, as short as
    possible; ``new`` has as many, and the n-th stands for what the n-th matched. The first pair that fits a whole
    key renames it. ``cast``: a floating dtype for all floating tensors. ``state``: carry what is no tensor.
    """

    select: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    cast: str | None = None
    state: bool = True

    @classmethod
    def of(
        cls,
        select: str | Iterable[str] = (),
        exclude: str | Iterable[str] = (),
        rename: Renames = (),
        cast: object = None,
        state: bool = True,
    ) -> Choice:
        """The wishes as callers give them; ValueError for what cannot be understood."""
        rename = [rename] if isinstance(rename, str) else rename
        pairs = rename.items() if isinstance(rename, Mapping) else map(_pair, rename)
        renames = tuple(pairs)
        for old, new in renames:
            if old.count("*") != new.count("*"):
                raise ValueError(
                    f"rename {old!r}={new!r}: both sides must have the same number of '*'"
                )
        return cls(
            tuple(_listed(select)),
            tuple(_listed(exclude)),
            renames,
            _dtype(cast),
            state,
        )

    def carried(self, manifest: Manifest) -> dict[int, TensorEntry]:
        """Number of a stored tensor or object -> what it is called, and is, in the target.

        The common state is left out by ``state`` and ``exclude`` only, and keeps its name. Raises MismatchError
        where nothing is selected, or two get the same name. A pattern that fits nothing is a warning.
        """
        chosen = {n: e for n, e in enumerate(manifest.tensors) if self._takes(e)}
        keys = [entry.key for entry in manifest.tensors]
        if self.select and all(entry.is_common for entry in chosen.values()):
            told = join_truncated([repr(key) for key in keys], separator=", ")
            raise MismatchError(
                f"nothing is selected by {', '.join(self.select)} (of {told})"
            )
        for pattern in (*self.select, *self.exclude):
            if not any(fnmatchcase(key, pattern) for key in keys):
                logger.warning("the pattern %r fits no key of the checkpoint", pattern)
        renames = [(_expression(old), old, new) for old, new in self.rename]
        used: set[str] = set()
        found = {n: self._named(entry, renames, used) for n, entry in chosen.items()}
        for _, old, new in renames:
            if old not in used:
                logger.warning("there is nothing to rename by %s=%s", old, new)
        _check_distinct(manifest, found)
        return found

    def _takes(self, entry: TensorEntry) -> bool:
        if entry.meta.is_object and not self.state:
            return False
        if any(fnmatchcase(entry.key, pattern) for pattern in self.exclude):
            return False
        return (
            not self.select
            or entry.is_common
            or any(fnmatchcase(entry.key, pattern) for pattern in self.select)
        )

    def _named(
        self,
        entry: TensorEntry,
        renames: Sequence[tuple[re.Pattern[str], str, str]],
        used: set[str],
    ) -> TensorEntry:
        key, (shape, dtype) = entry
        if self.cast is not None and dtype in _SOURCES:
            dtype = self.cast
        if not entry.is_common:
            for expression, old, new in renames:
                if match := expression.fullmatch(key):
                    used.add(old)
                    first, *others = new.split("*")
                    key = first + "".join(
                        part + rest
                        for part, rest in zip(match.groups(), others, strict=True)
                    )
                    break
        return TensorEntry(key, TensorMeta(shape, dtype))


def _listed(given: str | Iterable[str]) -> Iterable[str]:
    return [given] if isinstance(given, str) else given


def _pair(given: str | tuple[str, str]) -> tuple[str, str]:
    old, separator, new = (
        given.partition("=") if isinstance(given, str) else (given[0], "=", given[1])
    )
    if not separator or not old or not new:
        raise ValueError(f"a rename is OLD=NEW, not {given!r}")
    return old, new


def _dtype(given: object) -> str | None:
    if given is None:
        return None
    name = str(given).removeprefix("torch.")
    if name not in CASTS:
        raise ValueError(
            f"floating tensors can be cast to {', '.join(CASTS)}, not to {given!r}"
        )
    return _FLOATING.get(name, name)


def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile("(.*?)".join(map(re.escape, pattern.split("*"))), re.DOTALL)


def _check_distinct(manifest: Manifest, found: Mapping[int, TensorEntry]) -> None:
    holders: dict[str, list[str]] = {}
    for number, entry in found.items():
        holders.setdefault(entry.key, []).append(manifest.tensors[number].key)
    problems = [
        f"{' and '.join(map(repr, keys))} would all be called {key!r}"
        for key, keys in holders.items()
        if len(keys) > 1
    ]
    taken = [
        keys[0]
        for key, keys in holders.items()
        if key == COMMON_KEY and keys != [COMMON_KEY]
    ]
    problems += [
        f"{key!r} cannot be called {COMMON_KEY!r}, which is the common state's name"
        for key in taken
    ]
    problems += [
        f"{keys[0]!r} would have no name"
        for key, keys in holders.items()
        if not key and keys != [""]
    ]
    if problems:
        raise MismatchError(join_truncated(problems))
