"""How an exception of one rank is sent, and raised on all ranks.

An exception may hold anything (open files, tensors, locks), so it is never sent itself: a
``Failure`` carries its class if megackpt defines it, its text and its formatted traceback. An
exception of a user's class is sent as its name and text: no other rank imports the class.
"""

from __future__ import annotations

import re
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any, Generic, TypeVar, cast

from megackpt import errors
from megackpt.errors import (
    CheckpointingException,
    RankFailure,
    RankLost,
    join_truncated,
    name_ranks,
)
from megackpt.events import format_error

T = TypeVar("T")

DEPARTURES = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""These end the process. They are not failures of a collective step, and pass through unchanged."""

TRACEBACKS_SHOWN = 8
"""Tracebacks that one error text holds at most; all are in ``RankFailure.failures``."""

LEFT = "left:"
"""The prefix of the exit reason of a rank that leaves its call."""
_LONGEST = 300  # characters of it


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """A value, or the exception in its place, kept for the next collective step."""

    value: T | None
    error: BaseException | None = None

    def get(self) -> T:
        if self.error is not None:
            raise self.error
        return cast(T, self.value)


def attempt(work: Callable[[], T]) -> Attempt[T]:
    try:
        return Attempt(work())
    except Exception as error:  # noqa: BLE001 - the next collective raises it on all ranks
        return Attempt(None, error)


def name_here(rank: int) -> str:
    """``rank 3, host 'a'``: this process."""
    return f"rank {rank}, host {socket.gethostname()!r}"


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's failed collective step, reduced to what can be sent."""

    rank: int
    kind: type[CheckpointingException] | None
    text: str
    details: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """``kind`` is the nearest class of ``megackpt.errors``, or None if that is the root."""
        details = "".join(traceback.format_exception(error))
        text = format_error(error)
        kind: Any = None
        for base in type(error).__mro__:
            if vars(errors).get(base.__name__) is base:
                kind = base
                break
        is_exact = kind is type(error)
        if not is_exact:
            text = f"{type(error).__name__}: {text}"
            if kind is CheckpointingException:
                kind = None
        return cls(rank, kind, text, details)


def for_all_ranks(
    stage: str, failures: Sequence[Failure], size: int
) -> CheckpointingException:
    """The one exception that all ``size`` ranks raise after these failed in ``stage``.

    If all failures have one class of megackpt, the exception has that class; otherwise a
    RankFailure with all tracebacks.
    """
    kind, *others = {failure.kind for failure in failures}
    if not others and kind not in (None, RankFailure):
        texts = _by_likeness(failures, size)
        more = "more such texts of other ranks"
        return kind(join_truncated(texts, TRACEBACKS_SHOWN, "\n", more))
    by_text = _by_text(failures, size)
    lines = [f"{_what_failed(stage)}: {len(failures)} of {size} ranks failed"]
    for text, first in by_text[:TRACEBACKS_SHOWN]:
        lines += [indent(text, "  "), indent(first.details.rstrip(), "    ")]
    left = len(by_text) - TRACEBACKS_SHOWN
    if left > 0:
        lines.append(f"  and {left} more tracebacks, in .failures of this exception")
    tracebacks = {failure.rank: failure.details for failure in failures}
    return RankFailure("\n".join(lines), tracebacks)


def of_coordinator(stage: str, error: BaseException) -> CheckpointingException:
    """The error of all ranks after the coordinator failed, with its text if it is megackpt's."""
    failure = Failure.of(0, error)
    if isinstance(error, CheckpointingException):
        is_plain = list(map(type, error.args)) == [str] and failure.text == str(error)
        if failure.kind is not None and is_plain:
            return error
        return (failure.kind or CheckpointingException)(failure.text)
    text = f"{_what_failed(stage)}: the coordinator failed: {failure.text}\n"
    text += indent(failure.details.rstrip(), "  ")
    return RankFailure(text, {0: failure.details})


def of_single_process(stage: str, error: BaseException) -> RankFailure:
    """The error of a single process for a foreign error; raise it ``from`` the foreign error."""
    failure = Failure.of(0, error)
    return RankFailure(f"{_what_failed(stage)}: {failure.text}", {0: failure.details})


def parted(stage: str, rank: int, error: BaseException) -> RankLost:
    """The error of a rank that leaves its call; raise it ``from`` the cause."""
    failure = Failure.of(rank, error)
    return RankLost(
        f"{_what_failed(stage)}: rank {rank} {departure(error)}",
        {rank: failure.details},
    )


def departure(reason: BaseException) -> str:
    """The exit reason of a rank, in one line that any store takes."""
    line = ": ".join([type(reason).__name__, *format_error(reason).splitlines()[:1]])
    return f"{LEFT} {line[:_LONGEST]}".encode(errors="backslashreplace").decode()


def _by_text(failures: Sequence[Failure], size: int) -> list[tuple[str, Failure]]:
    """Each different text once, with its ranks, and the first failure with this text."""
    same: dict[str, list[Failure]] = {}
    for failure in sorted(failures, key=lambda failure: failure.rank):
        same.setdefault(failure.text, []).append(failure)
    found = []
    for text, those in same.items():
        if size > 1:
            text = f"{name_ranks(failure.rank for failure in those)}: {text}"
        found.append((text, those[0]))
    return found


def _by_likeness(failures: Sequence[Failure], size: int) -> list[str]:
    """Each different text once; of three and more that differ only in numbers, the first."""
    alike: dict[str, list[tuple[str, Failure]]] = {}
    for text, first in _by_text(failures, size):
        alike.setdefault(re.sub("[0-9]+", "", first.text), []).append((text, first))
    texts_shown = []
    for texts in alike.values():
        if len(texts) < 3:
            texts_shown += [text for text, _ in texts]
            continue
        left_out = {first.text for _, first in texts[1:]}
        others = [f.rank for f in failures if f.text in left_out]
        shown, _ = texts[0]
        others_named = f"{name_ranks(others)}: the same, but for the numbers"
        texts_shown += [shown, others_named]
    return texts_shown


def _what_failed(stage: str) -> str:
    # Callers of Megatron look for 'Worker failure' where writing failed.
    if stage == "write":
        return f"Worker failure in the stage {stage!r}"
    return f"failure in the stage {stage!r}"
