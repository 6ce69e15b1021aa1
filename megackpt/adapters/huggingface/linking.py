"""A table over a model's keys: which rule is meant for each, under which names, and what does not fit. No tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from megackpt.adapters.huggingface.rules import Piece, Rule, Shape, Theirs, as_rule
from megackpt.errors import MismatchError, ShardingError
from megackpt.planning.box import Box, Boxes
from megackpt.planning.coverage import miscounted

Table = Mapping[str, Theirs | None]
Links = dict[tuple[str, Shape], list[Piece]]

_TOLD = 20
_MOST = 10**6  # pieces of one tensor: far more than any model has layers and experts
_WILD = re.compile(r"[*#]")
_TOKENS = re.compile(r"(\*|\.#(?=\.|$)|^#\.|#)")


def link(table: Table, tensors: Iterable[tuple[str, Shape]], complete: bool = False) -> Links:
    """For each of our tensors (key, global shape) its pieces over there; none where they have no such tensor.

    ``complete``: these are all tensors of the model, so each rule must fit one (of several rules with the same
    value, one of them), and all of them together must give each of theirs exactly once.
    Raises MismatchError with all that does not fit.
    """
    given: object = table
    if not isinstance(given, Mapping) or not all(isinstance(pattern, str) for pattern in given):
        raise ShardingError(f"a table is a dict of patterns, which are texts, not {given!r:.200}")
    problems: list[str] = []
    entries = [_Entry.of(pattern, theirs, problems) for pattern, theirs in table.items()]
    links: Links = {}
    used: set[str] = set()
    unmapped: list[str] = []
    for key, shape in dict.fromkeys(tensors):  # many pieces of one tensor may be declared
        fitting = [(entry, match) for entry in entries if (match := entry.expression.fullmatch(key))]
        used.update(entry.pattern for entry, _ in fitting)
        if not fitting:
            unmapped.append(repr(key))
        elif len(fitting) > 1:
            problems.append(f"{key!r} fits several rules: {', '.join(repr(e.pattern) for e, _ in fitting)}")
        else:
            try:
                links[key, shape] = [_checked(p, shape) for p in fitting[0][0].pieces(fitting[0][1], shape)]
            except Exception as error:  # noqa: BLE001 - of a rule of the caller's own, it may be any
                told = error if isinstance(error, ShardingError) else repr(error)
                problems.append(f"{key!r}, by the rule {fitting[0][0].pattern!r}: {told}")
    if unmapped:
        problems.insert(0, f"no rule fits {_listed(unmapped)} (None as a rule: they have no such tensor)")
    if complete:
        problems += _unused(entries, used)
        problems += [] if problems else _miscounted(links)
    if problems:
        more = f"\nand {len(problems) - _TOLD} more" if len(problems) > _TOLD else ""
        raise MismatchError("the table does not fit: " + "\n".join(problems[:_TOLD]) + more)
    return links


@dataclass(frozen=True)
class _Entry:
    """One line of a table."""

    pattern: str
    expression: re.Pattern[str]
    rule: Rule | None

    @classmethod
    def of(cls, pattern: str, theirs: Theirs | None, problems: list[str]) -> _Entry:
        rule = None if theirs is None else as_rule(theirs)
        signs = sorted(_WILD.findall(pattern))
        wrong = [name for name in (rule.names() if rule else ()) if sorted(_WILD.findall(name)) != signs]
        problems += [f"the rule {pattern!r}: {name!r} must have as many '*' and '#'" for name in wrong]
        expression = re.compile("".join(map(_expressed, _TOKENS.split(pattern))), re.DOTALL)
        return cls(pattern, expression, None if wrong else rule)

    def pieces(self, match: re.Match[str], shape: Shape) -> Iterator[Piece]:
        if self.rule is None:
            return
        wild = _WILD.findall(self.pattern)
        found = list(zip(wild, match.groups(), strict=True))
        texts = [text or "" for sign, text in found if sign == "*"]
        numbers = [text for sign, text in found if sign == "#"]
        stacked = numbers.count(None)
        if stacked > len(shape):
            raise ShardingError(f"shape {shape} has no axis for each '#' that its key has no number for")
        if stacked and (0 in shape or math.prod(shape[:stacked]) > _MOST):
            raise ShardingError(
                f"shape {shape} has no elements, or too many places for '#' (at most {_MOST})"
            )
        for index in product(*map(range, shape[:stacked])):
            places = iter(map(str, index))
            named = [next(places) if number is None else number for number in numbers]
            for piece in self.rule.pieces(shape[stacked:], _Filling(texts, named)):
                box = Box((*index, *piece.box.offset), ((1,) * stacked + piece.box.shape))
                axes = tuple(None if a is None else a + stacked for a in piece.axes)
                yield replace(piece, box=box, axes=axes)


@dataclass(frozen=True)
class _Filling:
    """Puts what was found into a name over there."""

    texts: list[str]
    numbers: list[str]

    def __call__(self, name: str) -> str:
        texts, numbers = iter(self.texts), iter(self.numbers)
        return _WILD.sub(lambda sign: next(texts if sign[0] == "*" else numbers), name)


def _checked(piece: Piece, shape: Shape) -> Piece:
    """The piece. ShardingError (or a ValueError of other dimensions) where it is no box of both tensors."""
    named = [a for a in piece.axes if a is not None]
    others = [n for a, n in enumerate(piece.box.shape) if a not in named]
    if (
        not Box.whole(shape).contains(piece.box)
        or not Box.whole(piece.shape).contains(piece.there)
        or len(named) + len(others) != len(shape)  # one axis of ours twice, or one that there is not
        or set(others) - {1}
        or piece.maps(piece.box) != piece.there
    ):
        raise ShardingError(f"{piece} is not the same region of a tensor of shape {shape} and of theirs")
    return piece


def _expressed(token: str) -> str:
    if token == "*":
        return "(.*?)"
    if token in ("#", ".#", "#."):
        number = re.escape(token).replace(re.escape("#"), r"(\d+)")
        return number if token == "#" else f"(?:{number})?"
    return re.escape(token)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_TOLD]) + (f" and {len(names) - _TOLD} more" if len(names) > _TOLD else "")


def _unused(entries: Iterable[_Entry], used: set[str]) -> Iterator[str]:
    """Rules that nothing fits, and whose names nothing else gives."""
    given = {name for entry in entries if entry.rule and entry.pattern in used for name in entry.rule.names()}
    for entry in entries:
        if entry.pattern not in used and entry.rule is not None and not given.issuperset(entry.rule.names()):
            yield f"no tensor fits the rule {entry.pattern!r} (for {', '.join(map(repr, entry.rule.names()))})"


def _miscounted(links: Links) -> Iterator[str]:
    """Tensors over there of which something comes from nowhere, or from several places."""
    givers: dict[str, list[tuple[str, Piece]]] = {}
    for (key, _), pieces in links.items():
        for piece in pieces:
            given = givers.setdefault(piece.key, [])
            given += [] if piece.tied else [(key, piece)]
    for name, given in givers.items():
        if not given:
            yield f"{name!r} is in no tensor but tied ones"
            continue
        keys = ", ".join(repr(key) for key in dict.fromkeys(key for key, _ in given))
        shapes = {piece.shape for _, piece in given}
        if len(shapes) > 1:
            yield f"{name!r} would have the shapes {sorted(shapes)}, by {keys}"
            continue
        for region, count in miscounted(Boxes.of(piece.there for _, piece in given), shapes.pop()):
            where = "in nothing that the checkpoint holds" if not count else f"in {count} tensors"
            yield f"{name!r}: {region} is {where} (it is made of {keys})"
            break
