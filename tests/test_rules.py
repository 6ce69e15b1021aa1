"""Project rules that no linter checks. The limits are guides: read a rule before you change it."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "megackpt"
FILES = sorted(PACKAGE.rglob("*.py"))

# Who may name which packages below torch.distributed; distributed may name everything.
PLACES = {
    "torch.distributed.checkpoint": (
        "dcp/",
        "backends/torch_dist",
        "adapters/checkpointable",
        "manager/stateful",
        "huggingface/dcp_storage",
        "integrations/",
    ),
    "torch.distributed.tensor": ("adapters/dtensor", "torch_versions"),
    "torch.distributed.new_group": ("manager/local/copies_group",),
    "torch.distributed.group": (
        "manager/local/copies_group",
        "megatron/torch_messages",
    ),
    # Megatron's strategies send over the group that the caller gives them.
    "torch.distributed.all_gather_object": ("megatron/torch_messages",),
    "torch.distributed.broadcast": ("megatron/torch_messages",),
    "torch.distributed.get_backend": ("megatron/torch_messages",),
    "torch.distributed.get_global_rank": ("megatron/torch_messages",),
    "torch.distributed.device_mesh": ("adapters/dtensor",),
}
NAMES_AN_EDGE = {
    "adapters/huggingface.py",
    "adapters/position.py",
    "converter/__init__.py",
    "converter/conversion_request.py",
}
"""The hook of ``convert(table=...)``, and former places of public names."""
# What others may ask: who is there. What they may not: talk.
QUESTIONS = (
    "ProcessGroup",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "is_initialized",
    "is_available",
)


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def dotted(node: ast.expr) -> str:
    """``torch.distributed.all_reduce`` of that expression, or "" for anything but names and dots."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return head and f"{head}.{node.attr}"
    return ""


def mentioned(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Full names of what a module imports, and of what it reaches by dots from an import."""
    known: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            inside = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                full = inside + alias.name
                known[
                    alias.asname or (alias.name if inside else alias.name.split(".")[0])
                ] = full if inside or alias.asname else alias.name.split(".")[0]
                yield node.lineno, full
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            yield node.lineno, f"{known.get(first, first)}.{rest}"


def may_name(file: str, what: str) -> bool:
    """Whether this file may name this part of torch."""
    head, _, _ = what.removeprefix("torch.distributed").lstrip(".").partition(".")
    if not what.startswith("torch.distributed.") or head in QUESTIONS:
        return True
    return file.startswith(PLACES.get(f"torch.distributed.{head}", ()))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_only_collectives_names_torch_distributed(path: Path) -> None:
    if name(path).startswith("distributed"):
        return
    wrong = [
        f"{name(path)}:{line}: {what}"
        for line, what in mentioned(tree(path))
        if not may_name(name(path), what)
    ]
    assert not wrong


def layers() -> tuple[set[str], set[str]]:
    """The top-level modules of the core, and those of the edges, by the contract."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    contract = settings["importlinter:contract:core-and-edges"]
    core, edges = (
        {line.removeprefix("megackpt.") for line in contract[option].split()}
        for option in ("source_modules", "forbidden_modules")
    )
    return core, edges


def test_each_module_is_core_or_edge() -> None:
    core, edges = layers()
    modules = {name(path).partition("/")[0].removesuffix(".py") for path in FILES}
    assert core | edges == modules - {"__init__"}
    assert not core & edges


def test_the_core_names_an_edge_at_hooks_and_former_places_only() -> None:
    """A name in a string reaches a module as an import does, and no linter sees it."""
    core, edges = layers()
    edge = re.compile(rf"megackpt\.({'|'.join(edges)})\b[\w.:]*")
    named = {
        name(path)
        for path in FILES
        if name(path).partition("/")[0].removesuffix(".py") in core
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and edge.fullmatch(str(node.value))
    }
    assert named == NAMES_AN_EDGE


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_module_says_what_belongs_in_it(path: Path) -> None:
    doc = ast.get_docstring(tree(path))
    assert doc, f"{name(path)} has no docstring: what belongs there?"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_sizes(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= 800, f"{name(path)} has {lines} lines: make it a package"
    long = [
        f"{name(path)}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 - docstring_lines(node) > 90
    ]
    assert not long


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    doc = ast.get_docstring(node, clean=False)
    return doc.count("\n") + 1 if doc else 0


@pytest.mark.parametrize("path", FILES, ids=name)
def test_names_say_what_belongs_there(path: Path) -> None:
    banned = {"utils", "util", "helpers", "helper", "common", "core", "misc"}
    assert not banned & {part.removesuffix(".py") for part in Path(name(path)).parts}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_assert_and_no_swallowed_exception(path: Path) -> None:
    wrong = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Assert):
            wrong.append(f"{name(path)}:{node.lineno}: assert")
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                wrong.append(f"{name(path)}:{node.lineno}: except without a class")
            if all(
                isinstance(step, ast.Pass) or is_ellipsis(step) for step in node.body
            ):
                wrong.append(f"{name(path)}:{node.lineno}: an exception is swallowed")
    assert not wrong


def is_ellipsis(step: ast.stmt) -> bool:
    return (
        isinstance(step, ast.Expr)
        and isinstance(step.value, ast.Constant)
        and step.value.value is ...
    )


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.barrier()",
        "from torch import distributed\ndistributed.new_group()",
        "from torch import distributed as d\nd.broadcast(x)",
        "from torch.distributed import all_reduce",
        "import torch.distributed.checkpoint",
        "from torch.distributed.checkpoint import load",
    ],
)
def test_the_rule_on_torch_distributed_sees_every_way_to_name_it(code: str) -> None:
    assert not all(may_name("saver.py", what) for _, what in mentioned(ast.parse(code)))


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("dcp/planner.py", "from torch.distributed.checkpoint import load"),
        ("adapters/dtensor.py", "import torch.distributed.tensor as dt\ndt.DTensor"),
        (
            "adapters/modules.py",
            "import torch.distributed as dist\ndist.get_rank(dist.ProcessGroup())",
        ),
        ("saver.py", "from torch import Tensor"),
    ],
)
def test_the_rule_on_torch_distributed_lets_pass_what_is_allowed(
    file: str, code: str
) -> None:
    assert all(may_name(file, what) for _, what in mentioned(ast.parse(code)))
