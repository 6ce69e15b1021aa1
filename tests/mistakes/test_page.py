"""docs/mistakes.md: each message that stands on the page is what its code gets, to the letter."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mistakes.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)\n```$", re.MULTILINE | re.DOTALL)


def test_the_page_tells_what_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    told = {}
    for language, text in FENCE.findall(PAGE.read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(text, PAGE, "exec"), names)  # noqa: S102 - the code of our own page
        else:
            told[text] = names.pop("message")
    assert len(told) >= 12
    assert list(told) == list(told.values())
