"""What one rank asks to be loaded, and how the stored state may differ from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megackpt.checkpoint import absolute
from megackpt.errors import MismatchError
from megackpt.planning.manifest import Declarations, TensorEntry
from megackpt.planning.strict import StrictHandling, parse_strict_flag
from megackpt.state import ShardedStateDict
from megackpt.strategies import Strategy, StrategyLike, asked_format

KeyMap = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True, eq=False)
class LoadRequest:
    """The arguments of ``load``, checked. ``format`` is None if the directory decides."""

    directory: str
    state: ShardedStateDict
    strategy: StrategyLike = None
    format: Strategy | None = None
    strict: StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED
    validate: bool = True
    dtype_policy: str = "convert"
    key_map: KeyMap | None = None
    verify: bool = True
    trusted: Sequence[type] = ()

    @classmethod
    def of(
        cls,
        state: ShardedStateDict,
        directory: str | Path,
        strategy: StrategyLike = None,
        *,
        strict: StrictHandling | str | bool = StrictHandling.ASSUME_OK_UNEXPECTED,
        validate: bool = True,
        dtype_policy: str = "convert",
        key_map: KeyMap | None = None,
        verify: bool = True,
        trusted: Sequence[type] = (),
    ) -> LoadRequest:
        """Raises ValueError for an argument of a wrong value or type."""
        if dtype_policy not in ("convert", "error"):
            raise ValueError(
                f"dtype_policy is 'convert' or 'error', not {dtype_policy!r}"
            )
        names: object = key_map
        if not (names is None or callable(names) or isinstance(names, Mapping)):
            raise ValueError(
                f"key_map is a mapping or a function, from key to key, not {names!r}"
            )
        return cls(
            absolute(directory),
            state,
            strategy,
            asked_format(strategy),
            parse_strict_flag(strict),
            validate,
            dtype_policy,
            key_map,
            verify,
            trusted_classes(trusted),
        )

    def rename(self, declared: Declarations) -> Declarations:
        """The declarations under the keys of the checkpoint, which ``key_map`` gives."""
        key_map = self.key_map
        if key_map is None:
            return declared
        renamed: list[TensorEntry] = []
        for entry in declared.tensors:
            if callable(key_map):
                name: object = key_map(entry.key)
            else:
                name = key_map.get(entry.key, entry.key)
            if not isinstance(name, str):
                raise MismatchError(
                    f"key_map gives {name!r} for {entry.key!r}: a str is expected"
                )
            renamed.append(TensorEntry(name, entry.meta))
        return replace(declared, tensors=tuple(renamed))


def trusted_classes(given: Any) -> tuple[Any, ...]:
    """``trusted`` as a tuple; ValueError if it holds anything but classes or functions."""
    if isinstance(given, str | type) or not isinstance(given, Iterable):
        raise ValueError(f"trusted takes a tuple of classes, not {given!r}")
    classes = tuple(given)
    for one in classes:
        if not callable(one) and not isinstance(one, tuple):
            raise ValueError(f"trusted takes classes, not {one!r}")
    return classes
