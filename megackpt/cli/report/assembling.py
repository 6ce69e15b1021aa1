"""One HTML page out of contents: text, style, scripts and data in a single file that asks for nothing else.

Keys and file names are hostile text. They travel as compressed JSON in base64, which no parser of HTML can take for
markup, and the page's own policy forbids every script but ours, every request, and markup made from text.
"""

from __future__ import annotations

import gzip
import html
import json
import re
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

SCRIPTS = (
    "words",
    "contents",
    "rows",
    "tree",
    "bars",
    "pen",
    "drawing",
    "pieces",
    "tensor",
    "branch",
    "page",
)
"""The scripts in the order in which they stand in the page; they share one scope."""


def page(title: str, contents: Mapping[str, Any]) -> str:
    """The whole page, as text."""
    told = json.dumps({"title": title, **contents}, separators=(",", ":")).encode()
    script, style = _script(), _source("page.css")
    parts = {
        "title": html.escape(title)
        .encode("ascii", "xmlcharrefreplace")
        .decode(),  # a path may be no Unicode
        "policy": _policy(script, style),
        "style": style,
        "data": b64encode(gzip.compress(told, mtime=0)).decode(),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _source("page.html"))


@cache
def _source(name: str) -> str:
    return (
        files("megackpt.cli.report").joinpath("page", name).read_text(encoding="utf-8")
    )


@cache
def _script() -> str:
    return "\n" + "\n".join(_source(f"{name}.js") for name in SCRIPTS)


def _policy(script: str, style: str) -> str:
    allowed = [
        b64encode(sha256(text.encode()).digest()).decode() for text in (script, style)
    ]
    return (
        f"default-src 'none'; script-src 'sha256-{allowed[0]}'; style-src 'sha256-{allowed[1]}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
