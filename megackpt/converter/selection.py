"""Which tensors and objects a conversion carries, under which names, in which dtype."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

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
# Dtypes that are cast. Not float8_e8m0fnu, which holds scales.
_SOURCES = {"float8_e4m3fnuz", "float8_e5m2fnuz", *_FLOATING.values()}


class Selection:
    """Selects, renames and casts the tensors of a manifest. See ``convert`` for the arguments.

    Raises ValueError for arguments that cannot be understood.
    """

    def __init__(
        self,
        select: str | Iterable[str] = (),
        exclude: str | Iterable[str] = (),
        rename: Renames = (),
        cast: object = None,
        state: bool = True,
    ) -> None:
        self.select = _listed(select)
        self.exclude = _listed(exclude)
        self.renames: list[tuple[str, str]] = []
        if isinstance(rename, Mapping):
            rename = list(rename.items())
        for rule in _listed(rename):
            if isinstance(rule, str):
                rule = rule.partition("=")[::2]
            old, new = rule
            if not old or not new:
                raise ValueError(f"a rename is OLD=NEW, not {old!r}={new!r}")
            if old.count("*") != new.count("*"):
                raise ValueError(
                    f"rename {old!r}={new!r}: both sides must have the same number of '*'"
                )
            self.renames.append((old, new))
        self.cast: str | None = None
        if cast is not None:
            name = str(cast).removeprefix("torch.")
            if name not in CASTS:
                names = ", ".join(CASTS)
                raise ValueError(
                    f"floating tensors can be cast to {names}, not to {cast!r}"
                )
            self.cast = _FLOATING.get(name, name)
        self.state = state

    def entries(self, manifest: Manifest) -> dict[int, TensorEntry]:
        """Return the number of each carried tensor or object, and its name and dtype in the target.

        The common state is left out by ``state`` and ``exclude`` only, and keeps its name. A
        pattern without a match is a warning. Raises MismatchError if no entry is selected, or if
        several entries get the same name.
        """
        found: dict[int, TensorEntry] = {}
        matched: set[str] = set()
        renamed: set[str] = set()
        for number, (key, (shape, dtype)) in enumerate(manifest.tensors):
            selected = [p for p in self.select if fnmatchcase(key, p)]
            excluded = [p for p in self.exclude if fnmatchcase(key, p)]
            matched.update(selected, excluded)
            entry = manifest.tensors[number]
            if excluded or (entry.meta.is_object and not self.state):
                continue
            if not entry.is_common:
                if self.select and not selected:
                    continue
                key = self._rename(key, renamed)
            if self.cast is not None and dtype in _SOURCES:
                dtype = self.cast
            found[number] = TensorEntry(key, TensorMeta(shape, dtype))
        if self.select and all(entry.is_common for entry in found.values()):
            keys = join_truncated(
                [repr(entry.key) for entry in manifest.tensors], separator=", "
            )
            raise MismatchError(
                f"nothing is selected by {', '.join(self.select)} (of {keys})"
            )
        for pattern in [*self.select, *self.exclude]:
            if pattern not in matched:
                logger.warning("the pattern %r fits no key of the checkpoint", pattern)
        for old, new in self.renames:
            if old not in renamed:
                logger.warning("there is nothing to rename by %s=%s", old, new)
        _check_names(manifest, found)
        return found

    def _rename(self, key: str, renamed: set[str]) -> str:
        """Apply the first rule that matches the whole key, and note it in ``renamed``."""
        for old, new in self.renames:
            expression = "(.*?)".join(re.escape(part) for part in old.split("*"))
            if match := re.fullmatch(expression, key, re.DOTALL):
                renamed.add(old)
                result, *rest = new.split("*")
                for text, literal in zip(match.groups(), rest, strict=True):
                    result += text + literal
                return result
        return key


def _listed(given: str | Iterable[Any]) -> list[Any]:
    """One text as a list of it."""
    if isinstance(given, str):
        return [given]
    return list(given)


def _check_names(manifest: Manifest, entries: Mapping[int, TensorEntry]) -> None:
    owners: dict[str, str] = {}
    problems = []
    for number, entry in entries.items():
        source = manifest.tensors[number].key
        key = entry.key
        if key in owners:
            problems.append(
                f"{owners[key]!r} and {source!r} would both be called {key!r}"
            )
        elif key == COMMON_KEY != source:
            problems.append(
                f"{source!r} cannot be called {key!r}, which is the common state's name"
            )
        elif source and not key:
            problems.append(f"{source!r} would have an empty name")
        owners.setdefault(key, source)
    if problems:
        raise MismatchError(join_truncated(problems))
