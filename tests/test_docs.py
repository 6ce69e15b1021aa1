"""What the documentation says is so: its code runs, its links lead somewhere, its commands exist."""

from __future__ import annotations

import configparser
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import megackpt
from megackpt import errors, strategies
from megackpt.__main__ import _parser

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "guide.md"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / ".github").glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: what it is marked as, the line of its first line (from 0), its text."""

    language: str
    line: int
    text: str


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [
        Block(m[1], text.count("\n", 0, m.start(2)), m[2]) for m in FENCE.finditer(text)
    ]
    return [block for block in found if block.language in languages]


def anchors(page: Path) -> set[str]:
    """The names that headings get as targets of links."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


# tests/integrations and huggingface/test_adapters.py run the programs of the other pages, which need other projects.
ALONE = [
    page
    for page in PAGES
    if page.parent.name != "integrations" and page.name != "adapters.md"
]


@pytest.mark.parametrize("page", [p for p in ALONE if blocks(p, "python")], ids=named)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page in order, as one module (a real one: pickle looks classes up by its name)."""
    module = ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    # What a page registers ends with it.
    for action in ("save_sharded", "load_sharded"):
        monkeypatch.setitem(strategies.default_strategies, action, {})
    for block in blocks(page, "python"):
        source = (
            "\n" * block.line + block.text
        )  # so that a traceback tells the page's own lines
        exec(compile(source, page, "exec"), module.__dict__)  # noqa: S102 - the code of our own pages


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_code_is_marked_with_its_language(page: Path) -> None:
    fences = [
        line
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("```")
    ]
    assert set(fences[1::2]) <= {"```"}
    assert set(fences[0::2]) <= {"```python", "```sh", "```text"}, (
        "an unmarked block is a block nobody runs"
    )


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    broken = []
    for link in LINK.findall(prose):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        found = target.exists() and (not anchor or anchor in anchors(target))
        if not found:
            broken.append(link)
    assert not broken


def commands() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of each command line of a shell block."""
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.text.splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    yield named(page), words


def test_commands_exist() -> None:
    targets = set(
        re.findall(
            r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    wrong = []
    for page, words in commands():
        while words and re.fullmatch(r"\w+=.*", words[0]):  # settings for one command
            words = words[1:]
        match words:
            case ["megackpt", *rest]:
                good = parses(rest)
            case ["python", "tools/convert.py", *rest]:
                good = parses(["convert", *rest])
            case ["python", script, *_] if script != "-m":
                good = (ROOT / script).is_file()
            case ["make", *rest]:
                good = targets.issuperset(word for word in rest if "=" not in word)
            case _:
                good = True  # a command of others
        if not good:
            wrong.append(f"{page}: {shlex.join(words)}")
    assert not wrong


def parses(arguments: list[str]) -> bool:
    try:
        _parser(arguments).parse_args(arguments)
    except SystemExit as end:
        return end.code == 0  # --help and --version
    return True


def test_contributing_shows_the_layers_as_they_are() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    layers = settings["importlinter:contract:layers"]["layers"].split("\n")
    block, *_ = blocks(ROOT / "docs" / "contributing.md", "text")
    shown = [line.split("  ")[0] for line in block.text.splitlines()]
    assert shown == [layer for layer in layers if layer]


@pytest.mark.parametrize(
    "name", [name for name in megackpt.__all__ if not name.startswith("_")]
)
def test_the_guide_explains_every_public_name(name: str) -> None:
    assert re.search(rf"\b{name}\b", GUIDE.read_text(encoding="utf-8"))


def test_the_guide_lists_every_error() -> None:
    listed = set(
        re.findall(r"^\| `(\w+)`", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    )
    kinds = {
        name for name, value in vars(errors).items() if isinstance(value, type)
    } & set(megackpt.__all__)
    assert kinds <= listed


def test_the_index_of_design_notes_lists_each_of_them() -> None:
    folder = ROOT / "docs" / "design"
    notes = {note.name for note in folder.glob("[0-9]*.md")}
    listed = LINK.findall((folder / "index.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(notes)


@pytest.mark.parametrize(
    ("page", "package"), [("api", megackpt), ("dcp", megackpt.dcp)]
)
def test_the_reference_lists_every_public_name(page: str, package: ModuleType) -> None:
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text(encoding="utf-8")
    listed = re.findall(
        rf"^::: {re.escape(package.__name__)}\.(\w+)$", text, re.MULTILINE
    )
    assert sorted(listed) == sorted({*package.__all__} - {"__version__"})


def test_the_changelog_sums_up_the_release_in_sixty_lines() -> None:
    text = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    newest = text.split("\n## ")[1]
    title, summary, *areas = newest.split("\n### ")
    assert title.startswith(f"{megackpt.__version__} ")
    assert summary.startswith("The release in short\n")
    assert summary.count("\n") <= 60
    assert areas


@pytest.mark.parametrize("name", sorted(megackpt.__all__))
def test_the_reference_has_an_example_for_every_public_name(name: str) -> None:
    """Errors that no example of a few lines can raise are named by the page on errors."""
    reference = ROOT / "docs" / "reference" / "api.md"
    mistakes = ROOT / "docs" / "mistakes.md"
    text = "".join(block.text for block in blocks(reference, "python"))
    if name in vars(errors):
        text += mistakes.read_text(encoding="utf-8")
        text += GUIDE.read_text(encoding="utf-8")
    assert name == "__version__" or re.search(rf"\b{name}\b", text)


def test_the_search_of_the_site_asks_no_other_host() -> None:
    """The offline plug-in adds a script of another host, unless one of this name is given."""
    (script,) = (ROOT / "docs" / "assets").glob("*iframe-worker*")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert f"    - assets/{script.name}\n" in settings
    assert "https://" not in script.read_text(encoding="utf-8")
