"""The overview: its rows, its bars, and what colours, clicks and addresses do in the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megackpt.cli.report import shard_map, shard_map_of_declarations
from megackpt.cli.report.map_data import MAX_ROWS, manifest_data
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    Declaration,
    Declarations,
    Manifest,
    ShardId,
    TensorMeta,
)
from megackpt.planning.save_plan import plan_save

HOSTILE = "</text><script>document.title='run'</script>\0\ud800&\"'"

Look = Callable[[str], Any]
Row = tuple[str, int, int, int]  # key, elements, holders from this rank to that one


def world(*rows: Row, dtypes: dict[str, str] | None = None) -> list[Declarations]:
    """Of each rank: tensors of one axis that some ranks share equally."""
    ranks = max(row[3] for row in rows)
    parts: list[list[Declaration]] = [[] for _ in range(ranks)]
    for key, elements, first, last in rows:
        dtype = (dtypes or {}).get(key, "float32")
        step = elements // (last - first)
        for number, rank in enumerate(range(first, last)):
            shard = ShardId(key, Box((number * step,), (step,)))
            meta = TensorMeta((elements,), dtype)
            parts[rank].append(Declaration(shard, meta, 0, False, 4 * step, rank))
    return [Declarations.of(part) for part in parts]


def stored(*rows: Row, dtypes: dict[str, str] | None = None) -> Manifest:
    return plan_save(world(*rows, dtypes=dtypes))[1]


def model(layers: int, stages: int = 2, each: int = 2) -> list[Row]:
    """A pipeline whose stages are shared by ``each`` ranks, with Adam's state."""
    rows = [("embedding.weight", 4096, 0, each)]
    for layer in range(layers):
        first = layer * stages // layers * each
        for name in ("mlp.weight", "norm.weight"):
            key = f"decoder.layers.{layer}.{name}"
            rows.append((key, 1024, first, first + each))
            rows.append((f"optimizer.state.exp_avg.{key}", 1024, first, first + each))
            rows.append((f"optim.state.{key}.exp_avg_sq", 1024, first, first + each))
    return rows


def labels_and_keys(manifest: Manifest) -> dict[str, list[str]]:
    data = manifest_data(manifest)
    keys = data["tensors"]["key"]
    overview = data["overview"]
    rows = [[keys[tensor] for tensor in own] for own in overview["tensors"]]
    return dict(zip(overview["labels"], rows, strict=True))


def test_a_layer_is_a_row_with_its_optimizer_state() -> None:
    rows = labels_and_keys(stored(*model(12)))
    layers = [f"decoder.layers.{i}" for i in range(12)]
    assert list(rows) == [*layers, "embedding.weight"]
    for label in layers:
        assert len(rows[label]) == 6
        assert all(f"{label}." in key for key in rows[label])


def test_objects_of_a_manager_share_rows_by_the_names_of_weights() -> None:
    keys = ["model.a.w", "optimizer.state.a.w.exp_avg", "optimizer.state.b.w.exp_avg"]
    assert labels_and_keys(stored(*((key, 4, 0, 1) for key in keys))) == {
        "model.a.w": ["model.a.w", "optimizer.state.a.w.exp_avg"],
        "optimizer.state.b.w.exp_avg": ["optimizer.state.b.w.exp_avg"],
    }


def test_every_tensor_is_in_one_row_however_many_there_are() -> None:
    many = labels_and_keys(stored(*model(100)))
    assert len(many) <= MAX_ROWS
    assert sum(map(len, many.values())) == 601
    assert list(many)[:2] == ["decoder.layers.0–2", "decoder.layers.3–5"]
    flat = labels_and_keys(stored(*((f"w{i}", 4, 0, 1) for i in range(1000))))
    assert len(flat) <= MAX_ROWS
    assert sum(map(len, flat.values())) == 1000
    assert next(iter(flat)) == "w0–w20"


def test_branches_without_layers_are_split_the_largest_first() -> None:
    rows = [("a.b.x", 4, 0, 1), ("a.b.y", 4, 0, 1), ("a", 4, 0, 1), ("", 4, 0, 1)]
    assert labels_and_keys(stored(*rows)) == {
        "": [""],
        "a": ["a"],
        "a.b.x": ["a.b.x"],
        "a.b.y": ["a.b.y"],
    }
    assert labels_and_keys(plan_save([Declarations.of([])])[1]) == {}


@pytest.mark.browser
def test_the_overview_is_the_first_thing_on_the_page(look: Look) -> None:
    page = look(shard_map(stored(*model(4)), "run"))
    assert page.text("main section h3")[0] == "Who wrote what"
    texts = page.run(
        "[...document.querySelectorAll('.overview text')].map(t => t.textContent)"
    )
    assert texts[:4] == ["0", "1", "2", "3"]
    assert {"decoder.layers.3", "embedding.weight", "16.0 KiB"} <= set(texts)
    assert page.run("document.querySelectorAll('.overview path').length") == 4
    assert not page.log


@pytest.mark.browser
def test_a_checkpoint_without_ranks_is_shown_by_file(look: Look) -> None:
    manifest = stored(("a", 400, 0, 4))
    chunks = manifest.chunks
    rankless = replace(chunks, writer=chunks.writer * 0 - 1, file=chunks.tensor)
    manifest = replace(manifest, chunks=rankless, files=("model.safetensors",))
    page = look(shard_map(manifest))
    assert page.text("main section h3")[0] == "Bytes of each branch"
    assert page.run("document.querySelectorAll('.overview .bar').length") == 1
    assert not page.log


@pytest.mark.browser
def test_two_files_without_ranks_are_columns(look: Look) -> None:
    manifest = stored(("a", 400, 0, 1), ("b", 400, 0, 1))
    chunks = manifest.chunks
    rankless = replace(chunks, writer=chunks.writer * 0 - 1, file=chunks.tensor)
    files = ("1.safetensors", "2.safetensors")
    page = look(shard_map(replace(manifest, chunks=rankless, files=files)))
    assert page.text("main section h3")[0] == "Which file holds what"
    assert page.run("document.querySelectorAll('.overview path').length") == 2


@pytest.mark.browser
def test_one_rank_is_shown_by_branches_and_what_divides_them(look: Look) -> None:
    """A column of one rank would be a wall."""
    rows = [("model.layers.0.w", 4096, 0, 1), ("model.layers.1.w", 2048, 0, 1)]
    rows += [(f"optimizer.state.layers.{i}.w.exp_avg", 1024, 0, 1) for i in (0, 1)]
    page = look(shard_map(stored(*rows, dtypes={"model.layers.1.w": "bfloat16"})))
    assert page.text("main section h3")[0] == "Bytes of each branch"
    assert "A bar is its bytes." in page.text("main .note")[0]
    # What divides the bytes more evenly: 71 % are weights, and 86 % are float32.
    assert page.text(".colours [aria-pressed=true]") == ["weights, optimizer"]
    assert page.text(".colours button") == ["dtype", "weights, optimizer"]
    assert page.text(".legend li") == ["weights 71.4 %", "optimizer 28.6 %"]
    bars = page.run(
        "[...document.querySelectorAll('.overview .bar')]"
        ".map(bar => [bar.getAttribute('fill'), bar.getBBox().width])"
    )
    whole = bars[0][1] + bars[1][1]
    fills, widths = zip(*bars, strict=True)
    assert fills == ("#4477aa", "#d9b04f") * 2
    shares = [round(width / whole, 3) for width in widths]
    assert shares == [0.8, 0.2, 0.2, 0.2]
    page.click(".colours button", having="dtype")
    assert page.text(".legend li") == ["float32 85.7 %", "bfloat16 14.3 %"]
    assert not page.log


@pytest.mark.browser
def test_a_rank_has_one_colour_everywhere(look: Look) -> None:
    page = look(shard_map(stored(*[(f"layers.{i}.w", 4096, 0, 16) for i in (0, 1)])))
    columns = page.run(
        "[...document.querySelectorAll('.overview path')]"
        ".map(path => getComputedStyle(path).fill)"
    )
    assert len(set(columns)) == 16
    page.run("location.hash = 'key=layers.0.w'")
    page.settle()
    squares = page.run(
        "[...document.querySelectorAll('.pieces .swatch')]"
        ".map(square => getComputedStyle(square).backgroundColor)"
    )
    assert squares
    assert squares == columns[: len(squares)]


@pytest.mark.browser
def test_on_a_narrow_screen_the_picture_comes_first(look: Look) -> None:
    page = look(shard_map(stored(*model(4))))
    page.size(390, 844)
    page.settle()
    top = "document.querySelector('{}').getBoundingClientRect().top"
    assert page.run(top.format(".overview")) < 600
    assert page.run(f"{top.format('nav')} > {top.format('.sections')}")
    assert page.run("document.documentElement.scrollWidth") == 390
    # What is chosen in the tree is shown above it.
    page.click("nav .row", having="embedding")
    assert page.text("main h2") == ["embedding.weight"]
    assert 0 <= page.run(top.format("main h2")) < 844


@pytest.mark.browser
def test_colours_by_dtype_and_by_role(look: Look) -> None:
    dtypes = {f"decoder.layers.{i}.mlp.weight": "bfloat16" for i in range(4)}
    page = look(shard_map(stored(*model(4), dtypes=dtypes)))
    page.click(".colours button", having="dtype")
    assert page.text(".legend li") == ["float32 92.3 %", "bfloat16 7.7 %"]
    page.click(".colours button", having="optimizer")
    assert page.text(".legend li") == ["weights 38.5 %", "optimizer 61.5 %"]
    assert page.run("document.querySelectorAll('.overview path').length") == 2
    assert page.text(".colours [aria-pressed=true]") == ["weights, optimizer"]
    page.scheme("dark")
    page.settle()
    assert page.text("main section h3")[0] == "Who wrote what"
    assert not page.log


@pytest.mark.browser
def test_roles(look: Look) -> None:
    keys = ["w", "optimizer.w", "w.exp_avg", "master.optim_w", "optimal.w"]
    page = look(shard_map(stored(*((key, 1024, 0, 1) for key in keys))))
    assert page.text(".legend li") == ["weights 40.0 %", "optimizer 60.0 %"]


@pytest.mark.browser
def test_a_bar_tells_its_bytes_and_leads_to_its_tensors(look: Look) -> None:
    page = look(shard_map(stored(*model(4))))
    page.click(".stage", at=(0.95, 0.03))  # no row is there
    assert page.text(".chip .key") == []
    box = page.run(
        "(b => [b.width, b.height])(document.querySelector('.stage').getBoundingClientRect())"
    )
    ground = page.run(
        "[...document.querySelectorAll('.overview .ground')].slice(2, 3)"
        ".map(r => ['x', 'y', 'width', 'height'].map(n => Number(r.getAttribute(n))))[0]"
    )
    x, y, width, height = ground
    page.click(".stage", at=((x + 0.6 * width) / box[0], (y + height / 2) / box[1]))
    assert page.text(".overview ~ .tip div") == [
        "decoder.layers.2",
        "rank 2: 12.0 KiB",
    ]
    assert page.text(".chip .key") == ["decoder.layers.2, rank 2"]
    assert page.text(".found") == ["6 of 25 keys"]


@pytest.mark.browser
def test_what_is_held_is_shown_behind_what_is_written(look: Look) -> None:
    box = Box((0,), (4,))
    meta = TensorMeta((4,), "float32")
    parts = []
    for rank in range(3):
        own = Declaration(ShardId("w", box), meta, rank, False, 16, rank)
        parts.append(Declarations.of([own]))
    page = look(shard_map_of_declarations(parts))
    assert page.text("main section h3")[0] == "Who holds what, and who writes it"
    assert page.run("document.querySelectorAll('.overview .kept').length") == 1
    assert page.run("document.querySelectorAll('.overview [fill]').length") == 1


@pytest.mark.browser
def test_four_thousand_ranks_take_few_elements(look: Look) -> None:
    rows = [(f"layers.{i}.w", 4096, 0, 4096) for i in range(4)]
    page = look(shard_map(stored(*rows)))
    assert "Each column is 16 ranks" in page.text("main .note")[0]
    assert page.run("document.querySelectorAll('.overview *').length") < 600
    assert not page.log


@pytest.mark.browser
@pytest.mark.parametrize(
    ("address", "title"),
    [
        ("key=decoder.layers.3.mlp.weight", "decoder.layers.3.mlp.weight"),
        ("key=decoder.layers.3.", "decoder.layers.3"),
        ("key=decoder.layers.3", "decoder.layers.3"),
        ("key=decoder", "decoder.layers"),
        ("key=%3Cb%3E", "<b>"),
        ("key=a%20%26%20%C3%BC", "a & ü"),
        ("key=nothing", "Everything"),
        ("key=%", "Everything"),
        ("", "Everything"),
    ],
)
def test_an_address_opens_a_key(look: Look, address: str, title: str) -> None:
    rows = [*model(4), ("<b>", 4, 0, 1), ("a & ü", 4, 0, 1)]
    page = look(shard_map(stored(*rows)))
    page.run(f"location.hash = {json.dumps(address)}")
    page.settle()
    assert page.text("main h2") == [title]
    assert not page.log


@pytest.mark.browser
def test_what_is_clicked_has_an_address_that_opens_it_again(look: Look) -> None:
    keys = ["a.b", "a.b.c", "a.b.d", "x/y?#%&", HOSTILE]
    page = look(shard_map(stored(*((key, 4, 0, 1) for key in keys))))
    leaves = page.run("document.querySelectorAll('nav .row').length")
    for number in range(1, leaves):
        page.run(f"document.querySelectorAll('nav .row')[{number}].click()")
        page.settle()
        title = page.run("document.querySelector('main h2').textContent")
        address = page.run("location.hash")
        assert address.startswith("#key=")
        page.run("location.hash = ''")
        page.settle()
        assert page.text("main h2") == ["Everything"]
        page.run(f"location.hash = {json.dumps(address)}")
        page.settle()
        assert page.run("document.querySelector('main h2').textContent") == title
    assert not page.log
