"""``megackpt diff --html``: the page tells what differs, where, and how both sides are cut."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor, Strategy
from megackpt.__main__ import main

Look = Callable[[str], Any]
HOSTILE = "</script><img src=x onerror=\"document.title='run'\">"
BIG = 2**62 + 1


def saved(place: Path, layers: dict[str, torch.Tensor], pieces: int, lr: float) -> Path:
    state: dict[str, Any] = {"optimizer": {"lr": lr}}
    state["rng"] = ShardedObject("rng", {"seed": lr}, (1,), (0,))
    for key, value in layers.items():
        state[key] = [
            ShardedTensor.from_rank_offsets(key, part, (0, i, pieces))
            for i, part in enumerate(value.chunk(pieces))
        ]
    megackpt.save(state, place)
    return place


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Equal layers, other values, another dtype, keys of one side, an object, a hostile key."""
    folder = tmp_path_factory.mktemp("sides")
    a = {f"layers.{i}.w": torch.arange(1000.0) for i in range(6)}
    a["steps"] = torch.full((8,), BIG)
    a[HOSTILE] = torch.zeros(8)
    b = {key: value.clone() for key, value in a.items()}
    b["layers.1.w"][100:150] += 0.25
    b["layers.2.w"] = b["layers.2.w"].to(torch.float64)
    b["new"] = b.pop("layers.3.w")
    b["steps"][5] += 2
    b[HOSTILE][0] = 1
    return saved(folder / "a", a, 2, 0.1), saved(folder / "b", b, 4, 0.2)


@pytest.fixture(scope="module")
def page_text(
    sides: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> str:
    page = tmp_path_factory.mktemp("page") / "diff.html"
    a, b = map(str, sides)
    assert main(["diff", a, b, "--html", str(page), "--json"]) == 1
    return page.read_text(encoding="utf-8")


def data(text: str) -> dict[str, Any]:
    (packed,) = re.findall(r'id="data">([^<]*)<', text)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_the_page_holds_both_layouts_and_the_answer(page_text: str) -> None:
    told = data(page_text)
    assert told["kind"] == "comparison"
    assert told["keys"] == sorted({*told["a"]["tensors"]["key"], "new"})
    count = dict(
        zip(told["b"]["tensors"]["key"], told["b"]["pieces"]["count"], strict=True)
    )
    assert count["layers.0.w"] == 4
    assert told["found"]["only_a"] == ["layers.3.w"]
    assert told["found"]["only_b"] == ["new"]
    steps = next(t for t in told["found"]["tensors"] if t["key"] == "steps")
    (element,) = steps["first"]
    assert element == {"index": ["5"], "a": str(BIG), "b": str(BIG + 2)}


def test_the_answer_names_the_page(
    sides: tuple[Path, Path], tmp_path: Path, asked: Callable[..., Any]
) -> None:
    page = tmp_path / "same.html"
    answer = asked("diff", sides[0], sides[0], "--html", page, "--select", "layers.*")
    assert answer["html"] == str(page)
    told = data(page.read_text(encoding="utf-8"))
    assert told["keys"] == [f"layers.{i}.w" for i in range(6)]
    assert told["found"]["tensors"] == []
    asked("diff", *sides, "--html", tmp_path / "no" / "page.html", status=6)


@pytest.mark.browser
def test_the_verdict_and_the_keys_that_differ(look: Look, page_text: str) -> None:
    page = look(page_text)
    assert page.text("h1") == ["8 of 11 keys differ"]
    facts = dict(zip(page.text("main dt"), page.text("main dd"), strict=True))
    assert facts["other values"] == "5"
    assert facts["another shape or dtype"] == "1"
    assert (facts["only in A"], facts["only in B"]) == ("1", "1")
    rows = dict(row.split("\n") for row in page.text(".differing .row"))
    assert rows["layers.1.w"] == (
        "relative norm 0.000097, 50 of 1,000 elements (5.0 %), by up to 0.25"
    )
    assert rows["layers.2.w"] == "float32 1000 in A, float64 1000 in B"
    assert rows["layers.3.w"] == "only in A"
    assert rows["rng"] == "1 part of the object"
    assert page.text("main section h3").count("Bytes of each branch") == 2
    assert page.run("document.title") != "run"
    assert page.run("document.querySelectorAll('img').length") == 0
    assert not page.log


@pytest.mark.browser
def test_a_tensor_is_drawn_as_each_side_cuts_it(look: Look, page_text: str) -> None:
    page = look(page_text)
    page.click(".differing .row", having="layers.1.w")
    assert page.text("main h2") == ["layers.1.w"]
    assert page.text("main td")[:3] == ["[100]", "100", "100.25"]
    heads = page.text("main section h3")
    assert "2 chunks" in heads
    assert "4 chunks" in heads
    page.run("location.hash = '#key=steps'")
    page.settle()
    assert page.text("main td")[:3] == ["[5]", str(BIG), str(BIG + 2)]
    page.run("location.hash = '#key=new'")
    page.settle()
    assert page.text("main .note")[0] == "It does not have this key."
    page.run("location.hash = '#key=common_state'")
    page.settle()
    assert page.text("main td")[:3] == ["optimizer › lr", "0.1", "0.2"]
    assert not page.log


@pytest.mark.browser
def test_tensors_that_were_not_read(look: Look, tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", float("nan"))):
        w = ShardedTensor.from_rank_offsets("w", torch.tensor([value, 2.0]))
        megackpt.save({"w": w}, tmp_path / name, Strategy(check_values="note"))
    html = tmp_path / "diff.html"
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert main(["diff", a, b, "--html", str(html), "--json"]) == 1
    page = look(html.read_text(encoding="utf-8"))
    page.run("location.hash = '#key=w'")
    page.settle()
    assert page.text("main .state") == ["other digests"]
    assert page.text("main td") == [
        *("NaN or infinite", "0", "1"),
        *("largest magnitude", "2", "2"),
    ]
    assert "megackpt diff --read" in page.text("main .note")[0]
    assert not page.log


@pytest.mark.browser
def test_the_strip_leads_to_tensors(look: Look, page_text: str) -> None:
    page = look(page_text)
    assert len(page.text(".states-row")) == 11
    page.run(
        "document.querySelector('.states-bar button[title*=\"only in B\"]').click()"
    )
    page.settle()
    assert page.text(".chip .key") == ["new, only in B"]
    assert page.text("nav .leaf .name") == ["new"]
    page.scheme("dark")
    page.size(420, 800)
    page.settle()
    assert page.run("document.documentElement.scrollWidth") <= 420
    assert not page.log


@pytest.mark.browser
def test_equal_checkpoints(
    look: Look, sides: tuple[Path, Path], tmp_path: Path
) -> None:
    text = tmp_path / "same.html"
    assert (
        main(["diff", str(sides[0]), str(sides[0]), "--html", str(text), "--json"]) == 0
    )
    page = look(text.read_text(encoding="utf-8"))
    assert page.text("h1") == ["Nothing differs"]
    assert "Nothing differs here." in page.text("main .note")
    assert page.text(".broken") == []
