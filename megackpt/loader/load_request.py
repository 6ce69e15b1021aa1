"""What one rank asks to be loaded, and how the stored state may differ from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megackpt.errors import MismatchError
from megackpt.planning.manifest import Declarations, TensorEntry
from megackpt.planning.strict import StrictHandling
from megackpt.state import ShardedStateDict
from megackpt.strategies import Strategy, StrategyLike, asked_format

KeyMap = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True, eq=False)
class LoadRequest:
    """The arguments of ``load``. Raises ValueError for an argument of a wrong value or type."""

    directory: str
    state: ShardedStateDict
    strategy: StrategyLike = None
    strict: StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED
    validate: bool = True
    dtype_policy: str = "convert"
    key_map: KeyMap | None = None
    verify: bool = True
    trusted: Sequence[type] = ()

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

    @property
    def format(self) -> Strategy | None:
        """None if the directory decides."""
        return asked_format(self.strategy)

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
