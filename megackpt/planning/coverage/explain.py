"""Problems of coverage in words: which region, who declared what, and what probably went wrong.

Called for tensors that are known to be wrong; slower than judging, but bounded: few keys, regions and ranks are
told, the others counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megackpt.errors import join_truncated
from megackpt.planning.coverage.cases import REGIONS, Case, Way, case_of, named, ways
from megackpt.planning.coverage.hints import conflict_hint, hint_of, shape_text
from megackpt.planning.manifest import Declarations

BOXES = 6  # declared boxes told for a tensor


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one key; ``text`` is the paragraph, with a ``hint`` where it has been looked into."""

    key: str
    text: str
    hint: str = ""

    def __str__(self) -> str:
        return self.text


def likeness(key: str) -> str:
    """``decoder.layers.*.mlp.fc1.weight``: what a key has in common with those of other layers."""
    return re.sub(r"\b[0-9]+\b", "*", key)


def telling(keys: Sequence[str], room: int) -> set[int]:
    """Which of many keys to look into: all kinds before more of one kind, three of a kind at most."""
    seen: Counter[str] = Counter()
    rounds: list[list[int]] = [[], [], []]
    for i, key in enumerate(keys):
        kind = likeness(key)
        if seen[kind] < len(rounds):
            rounds[seen[kind]].append(i)
        seen[kind] += 1
    return set([i for found in rounds for i in found][:room])


def together(problems: Sequence[Problem], told: int) -> str:
    """The text about many keys: ``told`` paragraphs, each hint once for keys that are alike; the others counted."""
    lines: list[str] = []
    heard: set[tuple[str, str]] = set()
    rest: dict[str, list[str]] = {}
    for problem in problems:
        kind = likeness(problem.key)
        if problem.hint and (kind, problem.hint) not in heard and len(heard) < told:
            heard.add((kind, problem.hint))
            lines.append(problem.text)
        else:
            rest.setdefault(kind, []).append(problem.key)
    for kind, keys in list(rest.items())[:told]:
        which = (
            f"like {kind!r}: {', '.join(map(repr, keys[:3]))}"
            if len(keys) > 1
            else repr(keys[0])
        )
        lines.append(
            f"and {len(keys)} more key{'s' * (len(keys) > 1)} {which}{', ...' * (len(keys) > 3)}"
        )
    left = sum(map(len, list(rest.values())[told:]))
    return "\n".join(
        [*lines, f"and {left} more keys of other kinds"] if left else lines
    )


def explain_tensor(declared: Declarations, number: int) -> Problem:
    """The paragraph about a tensor whose main replicas do not tile it."""
    case = case_of(declared, number)
    shape = shape_text(case.entry.meta)
    findings = [
        *(f"{case.boxes[i]} lies outside of {shape}" for i in case.outside[:REGIONS]),
        *(f"{hole} of {shape} has no main replica" for hole in case.holes[:REGIONS]),
        *(
            f"{box} of {shape} has {count} main replicas"
            for box, count in case.overlaps[:REGIONS]
        ),
    ]
    if not findings:
        findings = [f"no rank holds any part of {shape} as main replica"]
    kinds = (len(case.outside), len(case.holes), len(case.overlaps))
    if any(k > REGIONS for k in kinds):
        findings.append("and there are more such regions")
    lines = [f"{case.entry.key!r} is not covered: " + "; ".join(findings) + "."]
    lines.append("  declared: " + _told(case))
    hint = hint_of(case)
    return Problem(case.entry.key, "\n".join([*lines, "  hint: " + hint]), hint)


def summary(declared: Declarations, number: int) -> Problem:
    """One line about a tensor whose main replicas do not tile it."""
    key, meta = declared.tensors[number]
    return Problem(
        key,
        f"{key!r} is not covered: the main replicas do not tile {shape_text(meta)}.",
    )


def explain_conflict(declared: Declarations, numbers: Sequence[int]) -> Problem:
    """The paragraph about a key that ranks declare with different global shapes, dtypes or kinds."""
    found = ways(declared, numbers)
    key = declared.tensors[numbers[0]].key
    told = [
        f"{named(way.ranks)} {shape_text(way.meta)} {way.meta.dtype}" for way in found
    ]
    most, fewest = max(found, key=Way.size), min(found[::-1], key=Way.size)
    hint = conflict_hint(most, fewest if fewest is not most else found[-1])
    lines = [
        f"{key!r} is declared in {len(found)} ways, where all ranks must agree on global shape and dtype.",
        "  declared: " + join_truncated(told, BOXES),
        "  hint: " + hint,
    ]
    return Problem(key, "\n".join(lines), hint)


def _told(case: Case) -> str:
    """Who declared which box: first those that touch what is wrong."""
    told = [_holders(case, i) for i in range(min(BOXES, len(case.boxes)))]
    others = len(case.shards) - len(told)
    return "; ".join([*told, f"and {others} more boxes"] if others else told)


def _holders(case: Case, i: int) -> str:
    if case.mains[i]:
        return f"{named(case.ranks(i))} {case.boxes[i]}"
    replicas = sorted(
        {str(case.declared.replica_ids[n]) for n in case.declared.replica[case.rows(i)]}
    )
    return f"{named(case.ranks(i))} {case.boxes[i]} (replica_id {join_truncated(replicas, 3, ', ')})"
