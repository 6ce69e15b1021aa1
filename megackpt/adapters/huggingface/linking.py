"""A table over a model's keys: which rule is meant for each, under which names, and what does not fit. No tensors."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, product

from megackpt.adapters.huggingface.rules import Piece, Rule, Shape, Theirs, as_rule
from megackpt.errors import MismatchError, ShardingError, join_truncated
from megackpt.planning.box import Box, Boxes
from megackpt.planning.tiling import miscounted

Table = Mapping[str, Theirs | None]
Links = dict[tuple[str, Shape], list[Piece]]
Fits = dict[tuple[str, Shape], tuple["_Entry", list["_Place"]]]

logger = logging.getLogger("megackpt.adapters")

_MOST = 10**6  # pieces of one tensor: far more than any model has layers and experts
_WILD = re.compile(r"[*#]")
_LAYERS = re.compile(r"(?:^|[._])(?:layers?|h|blocks?|experts?)\.$")
_TOKENS = re.compile(r"(\*|\.#(?=\.|$)|^#\.|#)")


def link(
    table: Table, tensors: Iterable[tuple[str, Shape]], complete: bool = False
) -> Links:
    """For each of our tensors (key, global shape) its pieces over there; none where they have no such tensor.

    ``complete``: these are all tensors of the model, so each rule must fit one (of several rules with the same
    value, one of them), and all of them together must give each of theirs exactly once; no layer, block or expert may
    be missing between others.
    Raises MismatchError with all that does not fit.
    """
    given: object = table
    if not isinstance(given, Mapping) or not all(
        isinstance(pattern, str) for pattern in given
    ):
        raise ShardingError(
            f"a table is a dict of patterns, which are texts, not {given!r:.200}"
        )
    problems: list[str] = []
    entries = [
        _Entry.of(pattern, theirs, problems) for pattern, theirs in table.items()
    ]
    links: Links = {}
    fits: Fits = {}
    used: set[str] = set()
    unmapped: list[str] = []
    for key, shape in dict.fromkeys(
        tensors
    ):  # many pieces of one tensor may be declared
        fitting = [
            (entry, match)
            for entry in entries
            if (match := entry.expression.fullmatch(key))
        ]
        if not fitting:
            unmapped.append(repr(key))
        elif len(fitting) > 1:
            problems.append(
                f"{key!r} fits several rules: {', '.join(repr(e.pattern) for e, _ in fitting)}"
            )
        else:
            entry, match = fitting[0]
            used.add(entry.pattern)
            try:
                places = entry.places(match, shape)
                links[key, shape] = _checked(list(entry.pieces(places, shape)), shape)
                fits[key, shape] = entry, places
            except Exception as error:  # noqa: BLE001 - of a rule of the caller's own, it may be any
                told = error if isinstance(error, ShardingError) else repr(error)
                problems.append(f"{key!r}, by the rule {entry.pattern!r}: {told}")
    if unmapped:
        problems.insert(
            0,
            f"no rule fits {join_truncated(unmapped, separator=', ')} (None as a rule: they have no such tensor)",
        )
    if complete:
        problems += _unused(entries, used)
        problems += [] if problems else _refuse_gaps(fits)
        problems += [] if problems else _miscounted(links, fits)
    if problems:
        raise MismatchError(
            "the table does not fit: " + join_truncated(problems, separator="\n")
        )
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
            wrong = [
                name
                for name in (rule.names() if rule else ())
                if sorted(_WILD.findall(name)) != signs
            ]
        except Exception as error:  # of a rule of the caller's own, it may be any
            raise ShardingError(f"the rule {pattern!r}: {error}") from error
        problems += [
            f"the rule {pattern!r}: {name!r} must have as many '*' and '#'"
            for name in wrong
        ]
        expression = re.compile(
            "".join(map(_expressed, _TOKENS.split(pattern))), re.DOTALL
        )
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
            raise ShardingError(
                f"shape {shape} has no axis for each '#' that its key has no number for"
            )
        if stacked and (0 in shape or math.prod(shape[:stacked]) > _MOST):
            raise ShardingError(
                f"shape {shape} has no elements, or too many places for '#' (at most {_MOST})"
            )
        along = product(*map(range, shape[:stacked]))
        return [
            _Place(texts, tuple(_filled(numbers, map(str, index))), index)
            for index in along
        ]

    def pieces(self, places: Iterable[_Place], shape: Shape) -> Iterator[Piece]:
        if self.rule is None:
            return
        for place in places:
            stacked = len(place.index)
            for piece in self.rule.pieces(shape[stacked:], place):
                box = Box(
                    (*place.index, *piece.box.offset),
                    ((1,) * stacked + piece.box.shape),
                )
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
            or len(named) + len(others)
            != len(shape)  # one axis of ours twice, or one that there is not
            or set(others) - {1}
            or piece.maps(piece.box) != piece.there
        ):
            raise ShardingError(
                f"{piece} is not the same region of a tensor of shape {shape} and of theirs"
            )
    for region, count in (
        miscounted(Boxes.of(p.box for p in pieces), shape) if len(pieces) > 1 else ()
    ):
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
    given = {
        name
        for entry in entries
        if entry.rule and entry.pattern in used
        for name in entry.rule.names()
    }
    for entry in entries:
        if (
            entry.pattern not in used
            and entry.rule is not None
            and not given.issuperset(entry.rule.names())
        ):
            yield f"no tensor fits the rule {entry.pattern!r} (for {', '.join(map(repr, entry.rule.names()))})"


def _refuse_gaps(fits: Fits) -> Iterator[str]:
    """Layers, blocks and experts that are missing between others. Of what else may be missing, a warning."""
    found: dict[str, dict[tuple[str, tuple[str, ...]], set[int]]] = {}
    for entry, places in fits.values():
        parts = entry.pattern.split("#")
        for place, n in product(places, range(1, len(parts))):
            beginning = _put("#".join(parts[:n]), place.texts, place.numbers)
            kinds = found.setdefault(beginning, {})
            kinds.setdefault((entry.pattern, place.texts), set()).add(
                int(place.numbers[n - 1])
            )
    unsure: list[str] = []
    for beginning, kinds in found.items():
        numbers = set[int]().union(*kinds.values())
        between = (n for n in range(min(numbers), max(numbers)) if n not in numbers)
        if gaps := [f"{beginning}{n}" for n in islice(between, 8)]:
            told = f"there is no {', '.join(gaps)}"
            if _LAYERS.search(beginning):
                yield f"{told} (if none is to be: '*' in the rule in place of that '#')"
            else:
                unsure.append(told)
        for (pattern, texts), own in kinds.items():
            if lacking := [f"{beginning}{n}" for n in sorted(numbers - own)]:
                what = _put(pattern, texts, "#" * pattern.count("#"))
                unsure.append(
                    f"{what!r} is not of {join_truncated(lacking, 8, ', ')}, as others are"
                )
    if unsure:
        logger.warning(
            "the table fits, but is this all there is? %s",
            join_truncated(unsure, separator="\n"),
        )


def _miscounted(links: Links, fits: Fits) -> Iterator[str]:
    """Tensors over there of which something comes from nowhere, or from several places."""
    givers: dict[str, list[tuple[str, Piece]]] = {}
    for of, (entry, places) in fits.items():
        names = entry.rule.names() if entry.rule else ()
        named = {place(name) for name, place in product(names, places)}
        if named.issuperset(
            piece.key for piece in links[of]
        ):  # else a rule of one's own renumbers
            givers |= {name: [] for name in named}
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
        for region, count in miscounted(
            Boxes.of(piece.there for _, piece in given), shapes.pop()
        ):
            where = (
                f"in {count} tensors: Tied for all but one"
                if count
                else "in nothing that the checkpoint holds"
            )
            yield f"{name!r}: {region} is {where} (it is made of {keys})"
            break
