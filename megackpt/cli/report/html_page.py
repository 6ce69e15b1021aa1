"""Builds the HTML page: text, style, scripts and data in a single file without requests.

Keys and file names are untrusted text. They are compressed JSON in base64, which an HTML parser
cannot take for markup. The page's own policy allows its script and its style, and nothing else.
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
"""The scripts in their order in the page; they share one scope."""


def make_page(title: str, data: Mapping[str, Any]) -> str:
    """The page as text."""
    encoded = json.dumps({"title": title, **data}, separators=(",", ":")).encode()
    script = "\n" + "\n".join(_source(f"{name}.js") for name in SCRIPTS)
    style = _source("page.css")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    )
    parts = {
        # A path may contain bytes that are not Unicode.
        "title": html.escape(title).encode("ascii", "xmlcharrefreplace").decode(),
        "policy": policy,
        "style": style,
        "data": b64encode(gzip.compress(encoded, mtime=0)).decode(),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _source("page.html"))


@cache
def _source(name: str) -> str:
    folder = files("megackpt.cli.report").joinpath("page")
    return folder.joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
