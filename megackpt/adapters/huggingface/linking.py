"""A table over a model's keys: which rule is meant for each, under which names, and what does not fit. No tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, product

from megackpt.adapters.huggingface.rules import Piece, Rule, Shape, Theirs, as_rule
from megackpt.errors import MismatchError, ShardingError, some
from megackpt.planning.box import Box, Boxes
from megackpt.planning.coverage import miscounted

Table = Mapping[str, Theirs | None]
Links = dict[tuple[str, Shape], list[Piece]]

_MOST = 10**6  # pieces of one tensor: far more than any model has layers and experts
_WILD = re.compile(r"[*#]")
_TOKENS = re.compile(r"(\*|\.#(?=\.|$)|^#\.|#)")


def link(table: Table, tensors: Iterable[tuple[str, Shape]], complete: bool = False) -> Links:
    """For each of our tensors (key, global shape) its pieces over there; none where they have no such tensor.

    ``complete``: these are all tensors of the model, so each rule must fit one (of several rules with the same
    value, one of them) for every number that its ``#`` may be, and all of them together must give each of theirs
    exactly once.
    Raises MismatchError with all that does not fit.
    """
    given: object = table
    if not isinstance(given, Mapping) or not all(isinstance(pattern, str) for pattern in given):
        raise ShardingError(f"a table is a dict of patterns, which are texts, not {given!r:.200}")
    problems: list[str] = []
    entries = [_Entry.of(pattern, theirs, problems) for pattern, theirs in table.items()]
    links: Links = {}
    fits: list[tuple[_Entry, _Place]] = []
    used: set[str] = set()
    unmapped: list[str] = []
    for key, shape in dict.fromkeys(tensors):  # many pieces of one tensor may be declared
        fitting = [(entry, match) for entry in entries if (match := entry.expression.fullmatch(key))]
        if not fitting:
            unmapped.append(repr(key))
        elif len(fitting) > 1:
            problems.append(f"{key!r} fits several rules: {', '.join(repr(e.pattern) for e, _ in fitting)}")
        else:
            entry, match = fitting[0]
            used.add(entry.pattern)
            try:
                places = entry.places(match, shape)
                links[key, shape] = _checked(list(entry.pieces(places, shape)), shape)
                fits += [(entry, place) for place in places]
            except Exception as error:  # noqa: BLE001 - of a rule of the caller's own, it may be any
                told = error if isinstance(error, ShardingError) else repr(error)
                problems.append(f"{key!r}, by the rule {entry.pattern!r}: {told}")
    if unmapped:
        problems.insert(
            0, f"no rule fits {some(unmapped, between=', ')} (None as a rule: they have no such tensor)"
        )
    if complete:
        problems += _unused(entries, used)
        problems += [] if problems else _uncounted(fits)
        problems += [] if problems else _miscounted(links, fits)
    if problems:
        raise MismatchError("the table does not fit: " + some(problems, between="\n"))
    return links


@dataclass(frozen=True)
class _Entry:
    """One line of a table."""

    pattern: str
    expression: re.Pattern[str]
    rule: Rule | None

    @classmethod
    def of(cls, pattern: str, theirs: Theirs | None, problems: list[str]) -> _Entry:
        signs = sorted(_WILD.findall(pattern))
        try:
            rule = None if theirs is None else as_rule(theirs)
            wrong = [name for name in (rule.names() if rule else ()) if sorted(_WILD.findall(name)) != signs]
        except Exception as error:  # of a rule of the caller's own, it may be any
            raise ShardingError(f"the rule {pattern!r}: {error}") from error
        problems += [f"the rule {pattern!r}: {name!r} must have as many '*' and '#'" for name in wrong]
        expression = re.compile("".join(map(_expressed, _TOKENS.split(pattern))), re.DOTALL)
        return cls(pattern, expression, None if wrong else rule)

    def places(self, match: re.Match[str], shape: Shape) -> list[_Place]:
        """Where in the model this tensor is: one place, or all along its leading axes."""
        if self.rule is None:
            return []
        found = list(zip(_WILD.findall(self.pattern), match.groups(), strict=True))
        texts = tuple(text or "" for sign, text in found if sign == "*")
        numbers = [text for sign, text in found if sign == "#"]
        stacked = numbers.count(None)
        if stacked > len(shape):
            raise ShardingError(f"shape {shape} has no axis for each '#' that its key has no number for")
        if stacked and (0 in shape or math.prod(shape[:stacked]) > _MOST):
            raise ShardingError(
                f"shape {shape} has no elements, or too many places for '#' (at most {_MOST})"
            )
        along = product(*map(range, shape[:stacked]))
        return [_Place(texts, tuple(_filled(numbers, map(str, index))), index) for index in along]

    def pieces(self, places: Iterable[_Place], shape: Shape) -> Iterator[Piece]:
        if self.rule is None:
            return
        for place in places:
            stacked = len(place.index)
            for piece in self.rule.pieces(shape[stacked:], place):
                box = Box((*place.index, *piece.box.offset), ((1,) * stacked + piece.box.shape))
                axes = tuple(None if a is None else a + stacked for a in piece.axes)
                yield replace(piece, box=box, axes=axes, stacked=stacked)


@dataclass(frozen=True)
class _Place:
    """What the signs of a pattern are, to be put into a name over there; ``index``: along leading axes of ours."""

    texts: tuple[str, ...]
    numbers: tuple[str, ...]
    index: tuple[int, ...]

    def __call__(self, name: str) -> str:
        return _put(name, self.texts, self.numbers)


def _put(name: str, texts: Iterable[str], numbers: Iterable[object]) -> str:
    signs = {"*": iter(texts), "#": map(str, numbers)}
    return _WILD.sub(lambda sign: next(signs[sign[0]]), name)


def _filled(numbers: Iterable[str | None], others: Iterator[str]) -> Iterator[str]:
    """The numbers, with the others in place of those that are not told."""
    for number in numbers:
        yield next(others) if number is None else number


def _checked(pieces: list[Piece], shape: Shape) -> list[Piece]:
    """The pieces. ShardingError (or a ValueError of other dimensions) where one is no box of both tensors, or two of
    them meet."""
    for piece in pieces:
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
    for region, count in miscounted(Boxes.of(p.box for p in pieces), shape) if len(pieces) > 1 else ():
        if count:
            raise ShardingError(f"{region} of it is in {count} of its pieces")
    return pieces


def _expressed(token: str) -> str:
    if token == "*":
        return "(.*?)"
    if token in ("#", ".#", "#."):
        number = re.escape(token).replace(re.escape("#"), r"(\d{1,9})")
        return number if token == "#" else f"(?:{number})?"
    return re.escape(token)


def _unused(entries: Iterable[_Entry], used: set[str]) -> Iterator[str]:
    """Rules that nothing fits, and whose names nothing else gives."""
    given = {name for entry in entries if entry.rule and entry.pattern in used for name in entry.rule.names()}
    for entry in entries:
        if entry.pattern not in used and entry.rule is not None and not given.issuperset(entry.rule.names()):
            yield f"no tensor fits the rule {entry.pattern!r} (for {', '.join(map(repr, entry.rule.names()))})"


def _uncounted(fits: Iterable[tuple[_Entry, _Place]]) -> Iterator[str]:
    """Numbers that a rule found nothing for, though there are larger ones, or rules of the same beginning did."""
    found: dict[tuple[str, tuple[str, ...]], set[tuple[int, ...]]] = {}
    for entry, place in fits:
        found.setdefault((entry.pattern, place.texts), set()).add(tuple(map(int, place.numbers)))
    beginnings = {of: _beginnings(*of) for of in found}
    stop: dict[str, int] = {}
    for of, numbers in found.items():
        for beginning, column in zip(beginnings[of], zip(*numbers, strict=True), strict=True):
            stop[beginning] = max(stop.get(beginning, 0), 1 + max(column))
    for of, numbers in found.items():
        # Of more numbers than there are any at all one is missing soon.
        axes = [range(min(stop[beginning], len(numbers) + 1)) for beginning in beginnings[of]]
        missing = (repr(_put(*of, n)) for n in product(*axes) if n not in numbers)
        if told := list(islice(missing, 8)):
            yield f"there is no {', '.join(told)} (where some have none: '*' in place of '#' in {of[0]!r})"


def _beginnings(pattern: str, texts: tuple[str, ...]) -> list[str]:
    """What stands before each '#'."""
    parts = pattern.split("#")
    return [_put("#".join(parts[:n]), texts, "#" * n) for n in range(1, len(parts))]


def _miscounted(links: Links, fits: Iterable[tuple[_Entry, _Place]]) -> Iterator[str]:
    """Tensors over there of which something comes from nowhere, or from several places."""
    named = (place(name) for entry, place in fits for name in (entry.rule.names() if entry.rule else ()))
    givers: dict[str, list[tuple[str, Piece]]] = {name: [] for name in named}
    for (key, _), pieces in links.items():
        for piece in pieces:
            given = givers.setdefault(piece.key, [])
            given += [] if piece.tied else [(key, piece)]
    for name, given in givers.items():
        if not given:
            yield f"{name!r} is made of nothing that the checkpoint holds (tied tensors do not count)"
            continue
        keys = ", ".join(repr(key) for key in dict.fromkeys(key for key, _ in given))
        shapes = {piece.shape for _, piece in given}
        if len(shapes) > 1:
            yield f"{name!r} would have the shapes {sorted(shapes)}, by {keys}"
            continue
        for region, count in miscounted(Boxes.of(piece.there for _, piece in given), shapes.pop()):
            where = (
                f"in {count} tensors: Tied for all but one"
                if count
                else "in nothing that the checkpoint holds"
            )
            yield f"{name!r}: {region} is {where} (it is made of {keys})"
            break
