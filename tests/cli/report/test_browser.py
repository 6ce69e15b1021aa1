"""The page in a real browser: drawn, searched, clicked, typed at, and asked for nothing but itself."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megackpt.cli.report import shard_map, shard_map_of_declarations
from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    DIGEST_SIZE,
    OBJECT,
    Chunks,
    Declaration,
    Declarations,
    Manifest,
    ShardId,
    TensorEntry,
    TensorMeta,
)

pytestmark = pytest.mark.browser

Look = Callable[[str], Any]
HOSTILE = "</script><img src=x onerror=\"document.title='run'\"><b>bold</b>"


def checkpoint(
    *tensors: tuple[str, tuple[int, ...], list[Box]],
    ranks: int = 4,
    digests: bool = True,
) -> Manifest:
    """Tensors of float32; chunk i of each is written by rank i % ranks into that rank's file."""
    rows = [
        (t, i % ranks, box)
        for t, (_, _, boxes) in enumerate(tensors)
        for i, box in enumerate(boxes)
    ]
    width = max((len(shape) for _, shape, _ in tensors), default=0)
    number = np.array([t for t, _, _ in rows], np.int32)
    rank = np.array([r for _, r, _ in rows], np.int32)
    length = np.array([4 * box.volume for _, _, box in rows], np.int64)
    start = np.cumsum(length) - length
    blocks = int((-(-length // DIGEST_BLOCK)).sum()) if digests else 0
    boxes = Boxes.of((box for _, _, box in rows), width)
    chunks = Chunks(
        number,
        boxes,
        rank,
        rank,
        start,
        length,
        np.zeros((blocks, DIGEST_SIZE), np.uint8),
    )
    entries = tuple(
        TensorEntry(key, TensorMeta(shape, "float32")) for key, shape, _ in tensors
    )
    files = tuple(f"__{r}_0.distcp" for r in range(ranks))
    return Manifest(
        entries,
        (None,) * len(entries),
        chunks,
        files,
        "raw",
        ("torch_dist", 1),
        "5ave" * 8,
    )


def slabs(count: int, shape: tuple[int, ...], axis: int = 0) -> list[Box]:
    step = shape[axis] // count
    return [
        Box(
            tuple(i * step if a == axis else 0 for a in range(len(shape))),
            tuple(step if a == axis else n for a, n in enumerate(shape)),
        )
        for i in range(count)
    ]


def layers(count: int) -> Manifest:
    names = (
        "attention.qkv.weight",
        "attention.out.weight",
        "mlp.fc1.weight",
        "mlp.fc1.bias",
    )
    keys = [f"decoder.layers.{i // 4}.{names[i % 4]}" for i in range(count)]
    return checkpoint(*((key, (512, 64), slabs(4, (512, 64))) for key in keys))


def broken() -> Declarations:
    rows = [
        (0, "a.hole", (400, 400), Box((0, 0), (200, 400)), 0),
        (1, "a.hole", (400, 400), Box((300, 0), (100, 400)), 0),
        (0, "a.overlap", (400, 400), Box((0, 0), (300, 400)), 0),
        (1, "a.overlap", (400, 400), Box((200, 0), (200, 400)), 0),
        (0, "a.outside", (400,), Box((0,), (400,)), 0),
        (1, "a.outside", (400,), Box((300,), (200,)), 1),
        (0, "sound", (400,), Box((0,), (400,)), 0),
        (1, "sound", (400,), Box((0,), (400,)), 1),
    ]
    parts: list[list[Declaration]] = [[], []]
    for rank, key, shape, box, replica in rows:
        meta = TensorMeta(shape, "float32")
        parts[rank].append(
            Declaration(ShardId(key, box), meta, replica, False, 4 * box.volume, rank)
        )
    return Declarations.merge([Declarations.of(part) for part in parts])


def keys_shown(page: Any) -> list[str]:
    return page.text("nav .leaf .name")


def pixels(page: Any, box: tuple[float, float, float, float]) -> np.ndarray:
    """The drawing's colours (rows, columns, 3) within fractions of its canvas: left, top, right, bottom."""
    width, height, data = page.run(
        "(canvas => { const copy = document.createElement('canvas');"
        f"const [l, t, r, b] = {list(box)}.map((part, i) => Math.round(part * (i % 2 ? canvas.height : canvas.width)));"
        "const [w, h] = [Math.max(1, r - l), Math.max(1, b - t)]; copy.width = w; copy.height = h;"
        "const pen = copy.getContext('2d', { willReadFrequently: true });"
        "pen.drawImage(canvas, -l, -t); return [w, h, [...pen.getImageData(0, 0, w, h).data]]; })"
        "(document.querySelector('.stage canvas'))"
    )
    return np.array(data, np.int64).reshape(height, width, 4)[:, :, :3]


def colour(page: Any, right: float, below: float) -> tuple[int, ...]:
    return tuple(pixels(page, (right, below, right, below))[0, 0].tolist())


def has_red(page: Any, top: float, bottom: float) -> bool:
    """Is there red in this band of the drawing?"""
    red, green, blue = np.moveaxis(pixels(page, (0, top, 1, bottom)), 2, 0)
    return bool(((red > 150) & (green < 120) & (blue < 120)).any())


def noises(page: Any) -> list[str]:
    """What it said on the console, and what it asked for but for itself."""
    return page.log + [url for url in page.asked[1:] if url != "about:blank"]


def test_the_first_view_shows_figures_and_sections(look: Look) -> None:
    page = look(shard_map(layers(40), "run/iter_0000100"))
    assert page.text("h1") == ["run/iter_0000100"]
    figures = dict(zip(page.text(".figures dt"), page.text(".figures dd"), strict=True))
    assert figures["tensors"] == "40"
    assert figures["chunks"] == "160"
    assert figures["bytes"] == "5.0 MiB"
    assert figures["files"] == "4"
    assert figures["ranks"] == "4"
    assert figures["elements"] == "1.31 M"
    (about,) = page.text(".about")
    assert "torch_dist 1" in about
    assert "5ave" * 8 in about
    assert [text.split("\n")[0] for text in page.text("section h3")][:4] == [
        "Who wrote what",
        "Bytes per branch",
        "Bytes per dtype",
        "Bytes per rank",
    ]
    assert "mean 1.3 MiB" in page.text(".spread")[0]
    assert "imbalance 1.00" in page.text(".spread")[0]
    assert not noises(page)


def test_the_search_finds_words_and_patterns(look: Look) -> None:
    page = look(shard_map(layers(40)))
    page.press("/")
    page.type("layers.3 BIAS")
    assert keys_shown(page) == ["bias"]
    assert page.text(".found") == ["1 of 40 keys"]
    page.press("Escape")
    assert page.text(".found") == [""]
    page.type("layers.?.*fc1.weight")
    assert page.text(".found") == ["10 of 40 keys"]
    page.type("(nothing[")
    assert page.text(".found") == ["No key matches."]
    assert keys_shown(page) == []
    assert not noises(page)


def test_a_click_in_the_drawing_tells_the_chunk(look: Look) -> None:
    page = look(shard_map(checkpoint(("w", (400, 400), slabs(4, (400, 400))))))
    page.click(".leaf", having="w")
    assert page.text("main h2") == ["w"]
    page.click(".stage canvas", at=(0.3, 0.4))
    (picked,) = page.text(".picked")
    assert "[100:200, 0:400]" in picked
    assert "rank 1" in picked
    assert "__1_0.distcp" in picked
    assert "160,000 to 320,000" in picked
    assert "1 digest" in picked
    assert "[100:200, 0:400]" in page.text(".pieces [aria-selected=true]")[0]
    tip = page.run("document.querySelector('.tip').innerText")
    assert "written by rank 1" in tip
    assert "bytes 160,000 to 320,000" in tip
    page.click(".pieces .row", having="[300:400")
    assert "rank 3" in page.text(".picked")[0]
    assert not noises(page)


def test_writers_have_colours_of_their_own(look: Look) -> None:
    page = look(shard_map(checkpoint(("w", (400, 400), slabs(4, (400, 400))))))
    page.click(".leaf")
    seen = {colour(page, 0.2, y) for y in (0.15, 0.4, 0.6, 0.9)}
    assert len(seen) == 4
    assert not has_red(page, 0, 1)


@pytest.mark.parametrize(
    ("key", "red", "sound", "words"),
    [
        ("hole", (0.53, 0.74), (0.1, 0.45), "[200:300, 0:400] has no main replica"),
        ("overlap", (0.53, 0.74), (0.1, 0.45), "[200:300, 0:400] has 2 main replicas"),
    ],
)
def test_holes_and_overlaps_are_red_and_in_words(
    look: Look, key, red, sound, words
) -> None:
    page = look(shard_map_of_declarations(broken(), "broken"))
    assert "3 keys are not covered exactly once" in page.text(".problem h3")[0]
    page.click(".wrong", having=key)
    assert page.text("main h2") == [f"a.{key}"]
    assert has_red(page, *red)
    assert not has_red(page, *sound)
    assert "declared: rank 0" in page.text(".problem p")[0]
    assert page.text(".problem li") == [words]
    assert any(key in item for item in page.text(".legend li"))
    before = page.picture()
    page.click(".problem li button")  # looks at it closely
    assert page.picture() != before
    assert "zoomed" in page.text(".note")[0] + page.text(".under")[0]
    page.click("button", having="whole")
    assert "zoomed" not in page.text(".under")[0]
    assert not noises(page)


def test_a_box_outside_is_drawn_outside(look: Look) -> None:
    page = look(shard_map_of_declarations(broken()))
    page.click(".wrong", having="outside")
    assert page.text(".problem li") == ["[300:500] lies outside of the tensor"]
    assert "outside of the tensor" in page.text(".legend .bad")
    assert not has_red(page, 0.0, 0.1)
    assert has_red(page, 0.3, 1)


def test_replicas_and_their_writer_are_shown(look: Look) -> None:
    page = look(shard_map_of_declarations(broken()))
    rows = [row.split("\t") for row in page.text("table tr")]
    assert rows[0] == ["copies", "boxes", "held", "written"]
    assert ["2", "1", "3.1 KiB", "1.6 KiB"] in rows
    page.click(".leaf", having="sound")
    page.click(".pieces .row")
    assert [row.split("\t") for row in page.text(".picked tr")] == [
        ["holder", "replica id", ""],
        ["rank 0", "0", "main"],
        ["rank 1", "1", "writes"],
    ]


def test_hostile_keys_are_shown_and_not_run(look: Look) -> None:
    tensors = [
        (key, (4,), [Box((0,), (4,))])
        for key in (HOSTILE, f"a.{HOSTILE}.b", "__proto__.x", "a..b", "", "." * 500)
    ]
    page = look(shard_map(checkpoint(*tensors), HOSTILE))
    for row in range(6):
        page.run(
            f"location.hash = '#key=' + encodeURIComponent({json.dumps(tensors[row][0])})"
        )
        page.settle()
        assert page.run("document.querySelector('main h2').textContent") == (
            tensors[row][0] or "(empty)"
        )
    assert page.text("h1") == [HOSTILE]
    assert page.run("document.title") != "run"
    assert page.run("document.querySelectorAll('img, b').length") == 0
    page.press("/")
    page.type("<img")
    assert page.text(".found") == ["2 of 6 keys"]
    assert not noises(page)


def test_the_policy_stops_what_text_could_try(look: Look) -> None:
    page = look(shard_map(layers(4)))
    with pytest.raises(RuntimeError, match="TrustedHTML"):
        page.run("document.body.innerHTML = '<b>x</b>'")
    page.run(
        "document.head.append(Object.assign(document.createElement('script'), {id: 'late'}))"
    )
    with pytest.raises(RuntimeError, match="Failed to fetch"):
        page.run("fetch('http://127.0.0.1:9/')")


def test_keys_move_through_the_tree(look: Look) -> None:
    page = look(shard_map(layers(40)))
    page.press("/", *"fc1.bias")
    assert page.run("document.querySelector('input').value") == "fc1.bias"
    page.press("Escape", "ArrowDown")
    assert page.run("document.activeElement.getAttribute('role')") == "tree"
    page.press(
        "ArrowUp",
        "ArrowUp",
        "ArrowUp",
        "ArrowUp",
        "ArrowUp",
        "ArrowUp",
        "ArrowUp",
        "ArrowUp",
    )
    assert page.text("main h2") == ["Everything"]
    page.press("ArrowDown")
    assert page.text("main h2") == ["decoder.layers"]
    before = len(page.text("nav .row"))
    page.press("ArrowLeft")
    assert len(page.text("nav .row")) < before
    assert (
        page.run(
            "document.querySelector('nav [aria-selected=true]').getAttribute('aria-expanded')"
        )
        == "false"
    )
    page.press("ArrowRight", "ArrowRight")
    assert page.text("main h2") == ["decoder.layers.0"]
    page.press("ArrowLeft", "ArrowLeft")
    assert page.text("main h2") == ["decoder.layers"]
    assert not noises(page)


def test_a_file_leads_to_its_tensors_and_back(look: Look) -> None:
    whole = [Box((0,), (400,))]
    page = look(
        shard_map(
            checkpoint(("all", (400,), slabs(4, (400,))), ("first", (400,), whole))
        )
    )
    page.click(".bars .row", having="__3_0.distcp")
    assert page.text(".chip .key") == ["__3_0.distcp"]
    assert keys_shown(page) == ["all"]
    page.click(".chip button")
    assert keys_shown(page) == ["all", "first"]
    page.click(".bars .row", having="rank 0")
    assert page.text(".chip .key") == ["rank 0"]
    assert keys_shown(page) == ["all", "first"]
    page.click(".leaf", having="all")
    page.click(".pieces .row", having="[200:300]")
    page.click(".picked .link", having="__2_0.distcp")
    assert page.text(".chip .key") == ["__2_0.distcp"]
    page.run("history.back()")
    page.wait("document.querySelector('main h2').innerText == 'Everything'")


def test_bars_are_sorted(look: Look) -> None:
    boxes = [Box((0,), (100,)), Box((100,), (50,)), Box((150,), (250,))]
    page = look(shard_map(checkpoint(("w", (400,), boxes), ranks=3)))
    page.run("document.querySelectorAll('section.block')[3].id = 'ranks'")
    labels = "#ranks .label"
    assert page.text(labels) == ["rank 0", "rank 1", "rank 2"]
    page.click("#ranks button", having="largest")
    assert page.text(labels) == ["rank 2", "rank 0", "rank 1"]
    page.click("#ranks button", having="smallest")
    assert page.text(labels) == ["rank 1", "rank 0", "rank 2"]
    assert page.text("#ranks .spread") == [
        "min 200 B · mean 533 B · max 1000 B · imbalance 1.87"
    ]


def test_more_than_two_axes_are_stepped_through(look: Look) -> None:
    shape = (3, 2, 4, 40)
    boxes = [
        Box((a, b, c, 0), (1, 1, 2, 40))
        for a in range(shape[0])
        for b in range(shape[1])
        for c in (0, 2)
    ]
    page = look(shard_map(checkpoint(("w", shape, boxes), ranks=12)))
    page.click(".leaf")
    choices = page.run(
        "[...document.querySelectorAll('.controls select')].slice(0, 2).map(s => s.value)"
    )
    assert choices == [
        "0",
        "2",
    ]  # axes 1 and 2 are cut equally often: the later one is drawn
    assert page.text(".uncut") == ["axis 3 (40) is not cut"]
    assert page.text(".stepper output") == ["0:1 (1 of 2)"]
    before = page.picture()
    page.run(
        "(slider => { slider.value = 1; slider.dispatchEvent(new Event('input')); })"
        "(document.querySelector('.stepper input'))"
    )
    page.settle()
    assert page.text(".stepper output") == ["1:2 (2 of 2)"]
    assert page.picture() != before
    page.click(
        ".pieces .row", having="[0:1, 0:1, 0:2, 0:40]"
    )  # the slice follows the choice
    assert page.text(".stepper output") == ["0:1 (1 of 2)"]
    assert not noises(page)


def test_what_is_tiny_beside_what_is_huge_is_seen(look: Look) -> None:
    huge = 10**15
    boxes = [Box((0,), (1,)), Box((1,), (huge - 2,)), Box((huge - 1,), (1,))]
    page = look(shard_map(checkpoint(("w", (huge,), boxes), digests=False)))
    page.click(".leaf")
    assert len({colour(page, x, 0.6) for x in (0.003, 0.5, 0.997)}) == 3
    assert "small pieces are drawn larger" in page.text(".under")[0]


def test_scalars_empty_tensors_and_objects(look: Look) -> None:
    rows = [
        Declaration(
            ShardId("scalar", Box((), ())), TensorMeta((), "int64"), 0, False, 8, 0
        ),
        Declaration(
            ShardId("empty", Box((0, 0), (0, 4))),
            TensorMeta((0, 4), "int64"),
            0,
            False,
            0,
            0,
        ),
        Declaration(
            ShardId("object", Box((0,), (1,))),
            TensorMeta((1,), OBJECT),
            0,
            False,
            1024,
            0,
        ),
    ]
    page = look(shard_map_of_declarations(Declarations.of(rows)))
    for key, told in (("scalar", "scalar"), ("empty", "0 × 4"), ("object", "1")):
        page.click(".leaf", having=key)
        assert page.text("main .facts dd")[0] == told
        assert page.text(".pieces .row")
    assert not noises(page)


def test_nothing_to_show_is_shown(look: Look) -> None:
    page = look(shard_map(checkpoint()))
    assert page.text("main h2") == ["Everything"]
    assert page.text(".figures dd")[1] == "0"
    assert not noises(page)


def test_ten_thousand_tensors_take_few_elements(look: Look) -> None:
    html = shard_map(layers(10_000))
    assert len(html) < 3 << 20
    page = look(html)
    assert page.text(".figures dd")[1] == "10,000"
    assert page.run("document.querySelectorAll('*').length") < 1000
    page.press("/")
    page.type("layers.1234.mlp.fc1.bias")
    assert page.text(".found") == ["1 of 10,000 keys"]
    page.press("Enter")
    assert page.text("main h2") == ["decoder.layers.1234.mlp.fc1.bias"]
    page.press("/", "Escape")
    shown = page.run("document.querySelector('nav [aria-selected=true]').innerText")
    assert shown.startswith("bias")  # still in sight, where it stands among the others
    assert not noises(page)


def test_many_chunks_of_one_tensor_are_zoomed(look: Look) -> None:
    boxes = [Box((r * 8, c * 8), (8, 8)) for r in range(100) for c in range(100)]
    page = look(shard_map(checkpoint(("w", (800, 800), boxes), ranks=64)))
    page.click(".leaf")
    assert page.text("section h3")[-1] == "10,000 chunks"
    page.run("document.querySelector('.stage canvas').focus()")
    page.press("+", "+", "+", "+")
    assert "zoomed" in page.text(".under")[0]
    first = page.picture()
    page.press("ArrowRight")
    assert page.picture() != first
    page.press("0")
    assert "zoomed" not in page.text(".under")[0]
    assert not noises(page)


def test_dark_and_light(look: Look) -> None:
    page = look(shard_map(layers(4)))
    page.click(".leaf")
    light = (
        page.run("getComputedStyle(document.body).backgroundColor"),
        colour(page, 0.3, 0.3),
    )
    page.scheme("dark")
    page.settle()
    dark = (
        page.run("getComputedStyle(document.body).backgroundColor"),
        colour(page, 0.3, 0.3),
    )
    assert sum(json.loads(light[0].replace("rgb(", "[").replace(")", "]"))) > 700
    assert sum(json.loads(dark[0].replace("rgb(", "[").replace(")", "]"))) < 100
    assert sum(dark[1]) < sum(light[1]), "the drawing follows"


def test_it_prints_and_fits_narrow_windows(look: Look) -> None:
    page = look(shard_map_of_declarations(broken()))
    page.click(".wrong")
    printed = base64.b64decode(
        page.call("Page.printToPDF", printBackground=True)["data"]
    )
    assert io.BytesIO(printed).read(5) == b"%PDF-"
    assert len(printed) > 5000
    page.size(420, 800)
    page.settle()
    assert page.run("document.documentElement.scrollWidth") <= 420
    assert not noises(page)
