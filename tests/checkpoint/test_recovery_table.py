"""The table of the recovery of a directory: which cases there are, and what the page prints."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from megackpt.checkpoint.recovery import ACTIONS, Action, Fit, Holds, Owner, Suffix

PAGE = Path(__file__).parents[2] / "docs/design/0031-transaction.md"


def can_happen(holds: Holds, suffix: Suffix, owner: Owner, fit: Fit) -> bool:
    if suffix is Suffix.OLD and owner is Owner.ALIVE:
        return False  # no save has this suffix
    if holds is Holds.MARKER or suffix is Suffix.TAKEN:
        return fit is Fit.SPARE
    return suffix is Suffix.NONE or fit is not Fit.CHANGED


def test_the_table_has_each_case_that_can_happen() -> None:
    cases = product(Holds, Suffix, Owner, Fit)
    assert {case for case in cases if can_happen(*case)} == ACTIONS.keys()


def test_what_is_needed_is_kept_and_what_a_living_save_uses_is_not_removed() -> None:
    for (holds, suffix, owner, fit), action in ACTIONS.items():
        if fit is Fit.NEEDED:
            assert action is Action.RENAME
        if owner is Owner.ALIVE and (
            holds is Holds.CHECKPOINT or suffix is Suffix.NONE
        ):
            assert action is not Action.REMOVE


def test_the_page_prints_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith(MARKED)]
    assert rows == [
        "| " + " | ".join(each.value for each in (*case, action)) + " |"
        for case, action in ACTIONS.items()
    ]


MARKED = tuple(f"| {holds.value} | " for holds in Holds)
