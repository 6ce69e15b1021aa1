"""The page as a file: self-contained, the same each time, and safe whatever keys are called."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.checkpoint import open_checkpoint
from megackpt.cli.report import SCRIPTS, shard_map, shard_map_of_declarations
from megackpt.planning.box import Box
from megackpt.planning.manifest import Declaration, Declarations, ShardId, TensorMeta

PARTS = sorted(Path(str(files("megackpt.cli.report"))).joinpath("page").iterdir())
HOSTILE = "</script><img src=x onerror=\"document.title='run'\">"


class Page(HTMLParser):
    """Its elements, and the text inside each <script> and <style>."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, str] = {}
        self._name = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._name = dict(attrs).get("id") or tag

    def handle_endtag(self, tag: str) -> None:
        self._name = ""

    def handle_data(self, data: str) -> None:
        self.inside[self._name] = self.inside.get(self._name, "") + data

    @property
    def data(self) -> dict:
        return json.loads(gzip.decompress(base64.b64decode(self.inside["data"])))

    @property
    def policy(self) -> dict[str, str]:
        (content,) = [
            a["content"]
            for _, a in self.elements
            if a.get("http-equiv") == "Content-Security-Policy"
        ]
        return dict(rule.strip().split(" ", 1) for rule in content.split(";"))


def declared(*keys: str) -> Declarations:
    box = Box((0,), (4,))
    return Declarations.of(
        [
            Declaration(ShardId(key, box), TensorMeta((4,), "float32"), 0, False, 16, 0)
            for key in keys
        ]
    )


def test_the_page_holds_all_it_needs() -> None:
    page = Page(shard_map_of_declarations([declared("a.b", "a.c")], "a title"))
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 2
    assert not {"link", "img", "iframe", "object", "base"} & set(tags)
    assert not [
        a for _, a in page.elements if {"src", "href", "style", "onload"} & set(a)
    ]
    assert page.data["tensors"]["key"] == ["a.b", "a.c"]
    assert page.data["title"] == "a title"
    assert page.inside["title"] == "a title · shard map"


def test_the_policy_allows_this_script_and_this_style_and_nothing_else() -> None:
    page = Page(shard_map_of_declarations(declared("a")))
    assert page.policy["default-src"] == "'none'"
    assert page.policy["trusted-types"] == "'none'"
    for rule, name in (("script-src", "script"), ("style-src", "style")):
        digest = base64.b64encode(
            hashlib.sha256(page.inside[name].encode()).digest()
        ).decode()
        assert page.policy[rule] == f"'sha256-{digest}'"


@pytest.mark.parametrize(
    "text", [HOSTILE, "{{script}}", "\\1 \\g<0>", "&lt;b&gt;", "\ud800", "\0\r\n\u2028"]
)
def test_hostile_text_stays_text(text: str) -> None:
    html = shard_map_of_declarations(declared(text, f"a.{text}"), text)
    page = Page(html.encode().decode())
    assert page.data["tensors"]["key"] == [text, f"a.{text}"]
    plain = Page(shard_map_of_declarations(declared("a"), "a"))
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
    assert page.inside["script"] == plain.inside["script"]


def test_the_page_names_the_place_and_the_small_files_of_a_checkpoint(
    tmp_path: Path,
) -> None:
    place = tmp_path / "iter_0000001"
    megackpt.save(
        {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, place, "torch_dist"
    )
    opened = open_checkpoint(place)
    told = Page(shard_map(opened)).data
    assert told["title"] == "iter_0000001"
    assert dict(told["facts"])["in"] == str(place)
    assert dict(told["facts"])["save"] == opened.manifest.save_id
    assert {name for name, _ in told["small"]} == set(opened.small)
    assert Page(shard_map(opened.manifest, "mine")).data["title"] == "mine"


def test_the_same_contents_make_the_same_page() -> None:
    assert shard_map_of_declarations(declared("a")) == shard_map_of_declarations(
        [declared("a")]
    )


def test_the_parts_of_the_page_are_all_used_and_all_shipped() -> None:
    assert {part.name for part in PARTS} == {
        "page.html",
        "page.css",
        *(f"{name}.js" for name in SCRIPTS),
    }
    shipped = (Path(__file__).parents[3] / "setup.cfg").read_text(encoding="utf-8")
    assert re.search(r"^megackpt\.cli\.report = page/\*$", shipped, re.MULTILINE)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_parts_are_small_and_make_no_markup_of_text(part: Path) -> None:
    text = part.read_text(encoding="utf-8")
    assert text.count("\n") <= 400
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function",
        text,
    )
    assert not re.findall(r"https?://|//cdn|</script>.*</script>|@import|url\(", text)
    assert part.suffix != ".js" or text.startswith("// "), "what belongs there?"
