"""The shard map: one HTML page about a checkpoint, or about the declarations of a save.

The page needs no server and no network. ``map_data`` makes its data. Data, text, style and scripts
(of the folder ``page``) are a single file.

Keys and file names are untrusted text. They are compressed JSON in base64, which an HTML parser
cannot take for markup. The policy of the page allows only its script and its style.
"""

from __future__ import annotations

import fnmatch
import gzip
import html
import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

from megackpt.checkpoint import Opened
from megackpt.cli.output import to_json
from megackpt.cli.report.map_data import declarations_data, manifest_data
from megackpt.planning.manifest import Declarations, Manifest

__all__ = ["Page", "comparison_map", "shard_map", "shard_map_of_declarations"]

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
    "overview",
    "branch",
    "compare",
    "page",
)
"""The scripts in their order in the page; they share one scope."""


class Page(str):
    """A page of HTML, which notebooks show in a frame."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        # The sandbox keeps the page's script away from the notebook.
        page = html.escape(self)
        style = "width: 100%; height: 640px; border: 0"
        return (
            f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'
        )


def shard_map(stored: Manifest | Opened, title: str = "") -> Page:
    """The page about a checkpoint: which rank wrote each box, and which bytes of a file hold it.

    Holes and overlaps are shown, not raised.

    Args:
        stored: an open checkpoint, or a manifest, also the manifest of a plan without files.
        title: of the page; by default the name of the checkpoint.
    """
    if not isinstance(stored, Opened):
        return _make_page(title or "a checkpoint", manifest_data(stored))
    location = stored.storage.location
    data = manifest_data(stored.manifest)
    data["facts"].append(["in", location])
    data["small"] = [[name, size] for name, (size, _) in sorted(stored.small.items())]
    return _make_page(title or location.rstrip("/").rpartition("/")[2], data)


def shard_map_of_declarations(
    declared: Declarations | Sequence[Declarations],
    title: str = "",
    balance: bool = True,
) -> Page:
    """The page about a save to come: which ranks hold each box, and which of them will write it.

    Holes, overlaps, boxes out of bounds and contradictions are shown, not raised.

    Args:
        declared: the declarations of all ranks: merged, or one for each rank in rank order.
        title: of the page.
        balance: see SavePolicy.
    """
    if not isinstance(declared, Declarations):
        declared = Declarations.merge(declared)
    data = declarations_data(declared.numbered(), balance)
    return _make_page(title or "a declaration", data)


def comparison_map(a: Opened, b: Opened, select: str, found: Mapping[str, Any]) -> Page:
    """The page about two checkpoints: which keys differ, and how each of them is cut.

    Args:
        a: an open checkpoint.
        b: another one.
        select: the pattern of the keys that were compared.
        found: the fields of their comparison.
    """
    keys = {*a.manifest.numbers(), *b.manifest.numbers()}
    titles = [side.storage.location for side in (a, b)]
    data = {
        "kind": "comparison",
        "a": {"title": titles[0], **manifest_data(a.manifest)},
        "b": {"title": titles[1], **manifest_data(b.manifest)},
        "keys": fnmatch.filter(sorted(keys), select),
        # The page's numbers are floats: they cannot hold all integers.
        "found": json.loads(json.dumps(to_json(found)), parse_int=str),
    }
    return _make_page(" and ".join(titles), data)


def _make_page(title: str, data: Mapping[str, Any]) -> Page:
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
    page = _source("page.html")
    return Page(re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page))


@cache
def _source(name: str) -> str:
    folder = files("megackpt.cli.report").joinpath("page")
    return folder.joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
