"""Matches a model's keys with the rules of a table, and reports mismatches. Knows no tensors."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, product

from megackpt.errors import MismatchError, ShardingError, join_truncated
from megackpt.huggingface.rules import Piece, Rule, Shape, Theirs, as_rule
from megackpt.planning.box import Box, Boxes
from megackpt.planning.coverage import miscounted

Table = Mapping[str, Theirs | None]
TensorId = tuple[str, Shape]
"""Key and global shape."""
Links = dict[TensorId, list[Piece]]

logger = logging.getLogger("megackpt.adapters")

_MAX_PIECES = 10**6
"""Limit of the pieces of one tensor: far more than any model has layers and experts."""
_MAX_GAPS = 8
_WILDCARD = re.compile(r"[*#]")
_TOKEN = re.compile(r"(\*|\.#(?=\.|$)|^#\.|#)")
_LAYERS = re.compile(r"(?:^|[._])(?:layers?|h|blocks?|experts?)\.$")
"""A prefix after which numbers are expected to have no gaps."""


def link(
    table: Table,
    tensors: Iterable[TensorId],
    complete: bool = False,
    rest: bool = False,
) -> Links:
    """The pieces of Hugging Face's tensors that each of our tensors consists of.

    A tensor that the table maps to None has no pieces. ``complete``: ``tensors`` are all tensors of
    the model. Then each rule must fit one of them (of several rules for the same names, one), every
    Hugging Face element must come from exactly one place, and no layer, block or expert may be
    missing between two existing ones. ``rest``: leave out tensors that fit no rule. Raises
    MismatchError with everything that does not fit.
    """
    given: object = table
    if not isinstance(given, Mapping) or not all(isinstance(k, str) for k in given):
        raise ShardingError(
            f"a table is a dict of patterns, which are strings, not {given!r:.200}"
        )
    problems: list[str] = []
    entries = [_Entry.of(key, theirs, problems) for key, theirs in table.items()]
    matched: list[_Match] = []
    used: list[_Entry] = []
    unmapped: list[str] = []
    for key, shape in dict.fromkeys(tensors):
        fitting = [entry for entry in entries if entry.expression.fullmatch(key)]
        if not fitting:
            unmapped.append(repr(key))
        elif len(fitting) > 1:
            patterns = ", ".join(repr(entry.pattern) for entry in fitting)
            problems.append(f"{key!r} fits several rules: {patterns}")
        else:
            (entry,) = fitting
            used.append(entry)
            try:
                matched.append(entry.match(key, shape))
            except Exception as error:  # noqa: BLE001 - the caller's rule may raise anything
                if isinstance(error, ShardingError):
                    text = str(error)
                else:
                    text = repr(error)
                problems.append(f"{key!r}, by the rule {entry.pattern!r}: {text}")
    if unmapped and not rest:
        keys = join_truncated(unmapped, separator=", ")
        problems.insert(
            0, f"no rule fits {keys} (None as a rule: they have no such tensor)"
        )
    if complete:
        # Rules that fit no tensor, unless other rules give the same names.
        given = set[str]().union(*(entry.names for entry in used))
        fitted = {entry.pattern for entry in used}
        for entry in entries:
            if entry.pattern not in fitted and not entry.names <= given:
                of = ", ".join(map(repr, sorted(entry.names)))
                problems.append(f"no tensor fits the rule {entry.pattern!r} (for {of})")
        # A later check would repeat the problems that an earlier one has found.
        problems = problems or _gaps(matched)
        problems = problems or list(_miscounted_tensors(matched))
    if problems:
        text = join_truncated(problems, separator="\n")
        raise MismatchError(f"the table does not fit: {text}")
    return {match.tensor: match.pieces for match in matched}


@dataclass(frozen=True)
class _Place:
    """The values of a pattern's wildcards, and the index along stacked axes of our tensor."""

    texts: tuple[str, ...]
    numbers: tuple[str, ...]
    index: tuple[int, ...]

    def name(self, pattern: str) -> str:
        """A Hugging Face name, or another one with these wildcards."""
        values = {"*": iter(self.texts), "#": iter(self.numbers)}
        return _WILDCARD.sub(lambda wildcard: next(values[wildcard[0]]), pattern)


@dataclass(frozen=True)
class _Match:
    """One of our tensors, and the rule that it fits."""

    entry: _Entry
    tensor: TensorId
    places: list[_Place]
    pieces: list[Piece]


@dataclass(frozen=True)
class _Entry:
    """One line of a table. ``names``: the names in the rule, with wildcards."""

    pattern: str
    expression: re.Pattern[str]
    rule: Rule | None
    names: frozenset[str]

    @classmethod
    def of(
        cls,
        pattern: str,
        theirs: Theirs | None,
        problems: list[str],
    ) -> _Entry:
        wildcards = sorted(_WILDCARD.findall(pattern))
        rule = None
        names = frozenset[str]()
        try:
            if theirs is not None:
                rule = as_rule(theirs)
                names = frozenset(rule.names())
        except Exception as error:  # the caller's rule may raise anything
            raise ShardingError(f"the rule {pattern!r}: {error}") from error
        for name in names:
            if sorted(_WILDCARD.findall(name)) != wildcards:
                rule = None
                problems.append(
                    f"the rule {pattern!r}: {name!r} must have as many '*' and '#'"
                )
        expression = "".join(map(_expression, _TOKEN.split(pattern)))
        return cls(pattern, re.compile(expression, re.DOTALL), rule, names)

    def match(self, key: str, shape: Shape) -> _Match:
        """The tensor's places in the model, several if it has layers along its leading axes."""
        match = _Match(self, (key, shape), [], [])
        found = self.expression.fullmatch(key)
        if self.rule is None or found is None:
            return match
        texts: list[str] = []
        numbers: list[str | None] = []
        for wildcard, text in zip(
            _WILDCARD.findall(self.pattern), found.groups(), strict=True
        ):
            if wildcard == "*":
                texts.append(text or "")
            else:
                numbers.append(text)
        stacked = numbers.count(None)
        if stacked > len(shape):
            raise ShardingError(
                f"shape {shape} has no axis for each '#' that its key has no number for"
            )
        if stacked and (0 in shape or math.prod(shape[:stacked]) > _MAX_PIECES):
            raise ShardingError(
                f"shape {shape} has no elements, or too many places for '#' "
                f"(at most {_MAX_PIECES})"
            )
        for index in product(*map(range, shape[:stacked])):
            missing = iter(index)
            filled = [str(next(missing)) if n is None else n for n in numbers]
            place = _Place(tuple(texts), tuple(filled), index)
            match.places.append(place)
            for piece in self.rule.pieces(shape[stacked:], place.name):
                box = Box((*index, *piece.box.offset), (1,) * stacked + piece.box.shape)
                axes = tuple(None if a is None else a + stacked for a in piece.axes)
                match.pieces.append(replace(piece, box=box, axes=axes, stacked=stacked))
        _check_pieces(match.pieces, shape)
        return match


def _expression(token: str) -> str:
    if token == "*":
        return "(.*?)"
    if token in ("#", ".#", "#."):
        number = re.escape(token).replace(re.escape("#"), r"(\d{1,9})")
        return number if token == "#" else f"(?:{number})?"
    return re.escape(token)


def _check_pieces(pieces: list[Piece], shape: Shape) -> None:
    """Raise ShardingError for pieces that are not boxes of both tensors, or that overlap.

    Boxes of other dimensions raise ValueError.
    """
    for piece in pieces:
        mapped = [axis for axis in piece.axes if axis is not None]
        others = [n for axis, n in enumerate(piece.box.shape) if axis not in mapped]
        inside = Box.whole(shape).contains(piece.box)
        inside_theirs = Box.whole(piece.shape).contains(piece.there)
        # Each axis once; axes that are not mapped have extent 1.
        axes_fit = len(mapped) + len(others) == len(shape) and set(others) <= {1}
        if (
            not (inside and inside_theirs and axes_fit)
            or piece.maps(piece.box) != piece.there
        ):
            raise ShardingError(
                f"{piece} is not the same region of a tensor of shape {shape} and of theirs"
            )
    if len(pieces) > 1:
        for region, count in miscounted(Boxes.of(p.box for p in pieces), shape):
            if count:
                raise ShardingError(f"{region} of it is in {count} of its pieces")


def _gaps(matched: list[_Match]) -> list[str]:
    """Layers, blocks and experts that are missing between two existing ones.

    A layer that is missing elsewhere may be intended: the log warns of it.
    """
    # Prefix up to a number -> pattern with its texts -> the numbers that occur at its end.
    found: dict[str, dict[str, set[int]]] = {}
    for match in matched:
        parts = match.entry.pattern.split("#")
        for place, n in product(match.places, range(1, len(parts))):
            numbers = found.setdefault(place.name("#".join(parts[:n])), {})
            unnumbered = replace(place, numbers=("#",) * len(place.numbers))
            kind = unnumbered.name(match.entry.pattern)
            numbers.setdefault(kind, set()).add(int(place.numbers[n - 1]))
    problems: list[str] = []
    unsure: list[str] = []
    for prefix, kinds in found.items():
        every = set[int]().union(*kinds.values())
        missing = (n for n in range(min(every), max(every)) if n not in every)
        gaps = [f"{prefix}{number}" for number in islice(missing, _MAX_GAPS)]
        text = f"there is no {', '.join(gaps)}"
        if gaps and _LAYERS.search(prefix):
            problems.append(
                f"{text} (if none is to be: '*' in the rule in place of that '#')"
            )
        elif gaps:
            unsure.append(text)
        for kind, own in kinds.items():
            if own != every:
                lacking = [f"{prefix}{number}" for number in sorted(every - own)]
                places = join_truncated(lacking, 8, ", ")
                unsure.append(f"{kind!r} is not of {places}, as others are")
    if unsure:
        logger.warning(
            "the table fits, but tensors may be missing: %s",
            join_truncated(unsure, separator="\n"),
        )
    return problems


def _miscounted_tensors(matched: list[_Match]) -> Iterator[str]:
    """Hugging Face tensors with elements that come from no place, or from several."""
    sources: dict[str, list[tuple[str, Piece]]] = {}
    for match in matched:
        names = set()
        for name, place in product(match.entry.names, match.places):
            names.add(place.name(name))
        # A rule of the caller may compute other names than it lists.
        if names.issuperset(piece.key for piece in match.pieces):
            sources |= {name: [] for name in names}
    for match in matched:
        for piece in match.pieces:
            given = sources.setdefault(piece.key, [])
            if not piece.tied:
                given.append((match.tensor[0], piece))
    for name, given in sources.items():
        if not given:
            yield (
                f"{name!r} is made of nothing that the checkpoint holds "
                "(tied tensors do not count)"
            )
            continue
        keys = ", ".join(dict.fromkeys(repr(key) for key, _ in given))
        shapes = {piece.shape for _, piece in given}
        if len(shapes) > 1:
            yield f"{name!r} would have the shapes {sorted(shapes)}, by {keys}"
            continue
        boxes = Boxes.of(piece.there for _, piece in given)
        for region, count in miscounted(boxes, shapes.pop()):
            where = "in nothing that the checkpoint holds"
            if count:
                where = f"in {count} tensors: Tied for all but one"
            yield f"{name!r}: {region} is {where} (it is made of {keys})"
            break
