"""What a name in a pickle stands for: a rule, or a name that getattr takes a part of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """What a global stands for. ``value`` is what appears where the pickle uses it as data.

    ``call`` is what happens when the pickle calls it, and ``new`` (if not given, the same) when it makes an
    instance without calling; ``build`` is what happens with the state of an instance so made (given instance and
    state). Without them a pickle that tries is refused. ``empty`` takes an instance apart: for types that Python
    frees by recursion, so that a long chain of them would exhaust the stack. ``keys`` gives what a call hashes, of
    its arguments; ``work`` what else it costs, in units of the budget. ``shares``: arguments are not copied.
    ``trusted``: a user vouches for it, so that instances do what pickle has them do.
    """

    value: Any
    call: Callable[..., Any] | None = None
    build: Callable[[Any, Any], None] | None = None
    new: Callable[..., Any] | None = None
    empty: Callable[[Any], None] | None = None
    keys: Callable[..., Iterable[Any]] | None = None
    work: Callable[..., int] | None = None
    shares: bool = False
    trusted: bool = False
    keywords: bool = False


Find = Callable[[str, str], Rule]
Persistent = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """A global that is only named, for getattr to take a part of. It is looked up where it is anything else."""

    module: str
    name: str


GETATTR = Name("builtins", "getattr")
"""How protocols 2 and 3 name a nested class or a class method, and Python 3.11.0 to 3.11.3 a member of an enum:
``getattr(Outer, "Inner")``. The machine takes that for the dotted name and calls no getattr."""


def each(items: Iterable[Any] = (), *_: Any) -> Iterable[Any]:
    """The keys of a call that hashes each item of its first argument."""
    return items


def first_of_each(items: Iterable[Any] = (), *_: Any) -> Iterable[Any]:
    """The keys of a call that makes a mapping of a mapping or of pairs."""
    return items if isinstance(items, dict) else [item[0] for item in items]
