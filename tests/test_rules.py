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
    "torch.distributed.tensor": (
        "adapters/dtensor",
        "dcp/installation",  # a method of torch's stager, which copies DTensors
        "torch_versions",
    ),
    "torch.distributed.new_group": ("manager/local/saves",),
    "torch.distributed.group": (
        "manager/local/saves",
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
    "loader/comparison.py",
    "state/tensor_subclasses.py",
}
"""The hooks of ``convert(table=...)`` and ``load(transform=...)``, of torchao's classes, and former places of public
names."""
OF_OS = re.compile(
    r"listdir|scandir|f?walk|open|mk(dir|fifo|nod)|makedirs|rmdir|removedirs|remove|unlink|(sym)?link"
    r"|renames?|replace|[fl]?ch(mod|own)|f?truncate|f(data)?sync|utime|(set|remove)xattr|p?writev?|sendfile"
)
OF_PATHS = re.compile(
    r"chmod|(hardlink|symlink)_to|mkdir|rmdir|touch|unlink|write_(bytes|text)"
)
FILE_OPERATIONS = {
    # Standard output goes to the null device when its reader has gone.
    "__main__.py": {"os.open"},
    # Files that a user names on the command line.
    "cli/commands.py": {"write_text"},
    # What the kernel says of a process.
    "checkpoint/marker.py": {"open"},
    # What the kernel says of the memory of the process, which the process limits.
    "backends/zarr/decoding_process.py": {"open"},
    # Looks behind a link that leads out of the root, which no storage opens.
    "backends/zarr/discovery.py": {"os.walk"},
    # Counts the bytes of a host's local checkpoints.
    "manager/local/pieces.py": {"os.walk"},
    # Trainers and tokenizers write their small files themselves, into a directory that they are given.
    "integrations/accelerate.py": {"tempfile.TemporaryDirectory", "write_bytes"},
    "integrations/pretrained_files.py": {"tempfile.TemporaryDirectory"},
    "integrations/transformers.py": {
        "os.makedirs",
        "tempfile.TemporaryDirectory",
        "write_bytes",
    },
    # The suite for backends damages files in the temporary directory of a test.
    "testing/conformance/harness.py": {"unlink", "write_bytes"},
    "testing/conformance/load_tests.py": {"write_bytes"},
    "testing/conformance/save_tests.py": {"mkdir", "write_bytes"},
}
"""Module -> its file operations, each with the reason for an exception to rule 4."""
# What others may ask: who is there. What they may not: talk.
QUESTIONS = (
    "Backend",  # the devices that it sends from
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
    edge = re.compile(rf"^megackpt\.({'|'.join(edges)})\b[\w.:]*( \w+)*$", re.MULTILINE)
    named = {
        name(path)
        for path in FILES
        if name(path).partition("/")[0].removesuffix(".py") in core
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and edge.search(str(node.value))
    }
    assert named == NAMES_AN_EDGE


def file_operations(module: ast.Module) -> set[str]:
    """Calls that open, change or list files: of os, shutil and tempfile, ``open``, and of a Path.

    A storage has methods ``open``, ``rename`` and ``replace``, as a Path has: of these only
    a call on ``Path(...)`` itself counts.
    """
    found = set()
    for _, what in mentioned(module):
        head, _, operation = what.rpartition(".")
        if head in ("shutil", "tempfile") or (
            head == "os" and OF_OS.fullmatch(operation)
        ):
            found.add(what)
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "open":
            found.add("open")
        if isinstance(node.func, ast.Attribute):
            on = node.func.value
            is_path = isinstance(on, ast.Call) and dotted(on.func).endswith("Path")
            if OF_PATHS.fullmatch(node.func.attr) or (
                is_path and node.func.attr in ("open", "rename", "replace")
            ):
                found.add(node.func.attr)
    return found


@pytest.mark.parametrize("path", FILES, ids=name)
def test_four_packages_have_side_effects_on_files(path: Path) -> None:
    """Rule 4. A new operation elsewhere is a method of ``megackpt.storage``, or has a reason."""
    if not name(path).startswith(
        ("storage/", "distributed/", "staging/", "async_save/")
    ):
        assert file_operations(tree(path)) == FILE_OPERATIONS.get(name(path), set())


def test_the_reasons_for_file_operations_name_modules() -> None:
    assert FILE_OPERATIONS.keys() <= {name(path) for path in FILES}


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.rename('a', 'b')",
        "from os import makedirs",
        "import os as system\nsystem.walk('a')",
        "import shutil\nshutil.rmtree('a')",
        "from tempfile import TemporaryDirectory",
        "with open('a') as file: pass",
        "folder.mkdir()",
        "(folder / 'a').write_bytes(b'')",
        "Path('a').rename('b')",
        "pathlib.Path('a').open('w')",
    ],
)
def test_the_rule_on_files_sees_every_way_to_write_one(code: str) -> None:
    assert file_operations(ast.parse(code))


def test_the_rule_on_files_lets_storages_and_paths_pass() -> None:
    code = "import os\nos.path.join('a')\nroot.rename('a', 'b')\n'a'.replace('a', 'b')\nroot.open('a')"
    assert not file_operations(ast.parse(code))


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


ADVISES_AN_INDEX = re.compile(r"pip\s+install\s+(?:-\S+\s+)*['\"]?megackpt(?!-)")
"""``megackpt-*.whl`` is a file that the reader has built."""


def test_no_message_and_no_page_asks_an_index_for_megackpt() -> None:
    """No index has a release: advise the package that is missing, by its own name."""
    texts = [
        *(
            path
            for folder in (PACKAGE, ROOT / "tools")
            for path in folder.rglob("*.py")
        ),
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
    ]
    # What a release changes.
    texts.remove(ROOT / "docs" / "releasing.md")
    wrong = {
        path.relative_to(ROOT).as_posix()
        for path in texts
        if ADVISES_AN_INDEX.search(path.read_text(encoding="utf-8"))
    }
    assert not wrong


@pytest.mark.parametrize(
    "text",
    [
        "pip install 'megackpt[objectstore]'",
        "pip install\n'megackpt[docs]'",
        "pip install --upgrade megackpt",
        "`pip install megackpt`",
    ],
)
def test_the_rule_on_advice_sees_every_way_to_ask_an_index(text: str) -> None:
    assert ADVISES_AN_INDEX.search(text)


def test_the_rule_on_advice_lets_files_and_other_packages_pass() -> None:
    text = "pip install obstore; pip install megackpt-*.whl; pip install ."
    assert not ADVISES_AN_INDEX.search(text)
