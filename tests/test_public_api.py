"""The public API: its lists agree with each other and with the reference, and it is light to import."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import megackpt
import megackpt.backends
import megackpt.megatron
import megackpt.testing
from megackpt import dcp

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    megackpt,
    megackpt.backends,
    megackpt.dcp,
    megackpt.megatron,
    megackpt.testing,
)
"""The packages whose ``__all__`` is the public API, all of it with a stable meaning."""

LAZY = (megackpt, dcp)
"""Packages that import their names on first use."""

MEGATRON = {
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedTensor",
    "check_is_distributed_checkpoint",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
}
"""What megatron-core 0.16.1 exports in ``dist_checkpointing/__init__.py``."""


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_listed_once_and_documented(package: ModuleType) -> None:
    names = set(package.__all__) - {"__version__"}
    assert len(set(package.__all__)) == len(package.__all__)
    members = {name: getattr(package, name) for name in names}
    code = {
        n: m for n, m in members.items() if inspect.isroutine(m) or inspect.isclass(m)
    }
    assert len(code) > len(names) // 2
    assert [name for name, member in code.items() if not inspect.getdoc(member)] == []


def test_the_documentation_imports_documented_modules_only() -> None:
    """The names of Megatron's modules are documented as a table."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    imported = set()
    listed = {package.__name__ for package in PACKAGES}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        imported |= set(re.findall(r"from (megackpt[\w.]*) import", text))
        imported |= set(re.findall(r"^import (megackpt[\w.]*)", text, re.MULTILINE))
        listed |= set(re.findall(r"^::: (megackpt[\w.]*)$", text, re.MULTILINE))
    others = {name for name in imported if not name.startswith("megackpt.megatron.")}
    assert others <= {*listed, "megackpt_npz"}
    assert "megackpt.adapters.modules" in others


def is_for_type_checkers(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def imported_for_type_checkers(package: ModuleType) -> dict[str, str]:
    """Name -> module, of the imports under TYPE_CHECKING."""
    module = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
    found = {}
    for branch in filter(is_for_type_checkers, module.body):
        for node in ast.walk(branch):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    assert alias.asname == alias.name, f"{alias.name} is not exported"
                    found[alias.name] = str(node.module)
    return found


@pytest.mark.parametrize("package", LAZY)
def test_type_checkers_and_the_interpreter_see_the_same_names(
    package: ModuleType,
) -> None:
    expected = imported_for_type_checkers(package)
    assert set(package.__all__) - {"__version__"} == set(expected)
    for name, home in expected.items():
        assert getattr(package, name) is getattr(import_module(home), name)
        assert name in dir(package)


@pytest.mark.parametrize(
    ("former", "place", "public"),
    [
        ("adapters.huggingface", "huggingface", "as_huggingface"),
        ("adapters.huggingface", "huggingface", "llama"),
        ("adapters.position", "integrations.data_position", "DataPosition"),
        ("converter", "huggingface", "export_huggingface"),
        ("dcp", "huggingface.dcp_storage", "HuggingFaceStorageWriter"),
    ],
)
def test_former_places_of_public_names_lead_to_them(
    former: str, place: str, public: str
) -> None:
    module = import_module(f"megackpt.{former}")
    expected = getattr(import_module(f"megackpt.{place}"), public)
    assert getattr(module, public) is expected
    with pytest.raises(AttributeError, match="has no attribute 'sav'"):
        module.sav  # noqa: B018


@pytest.mark.parametrize("package", LAZY)
def test_an_unknown_name_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'sav'"):
        package.sav  # noqa: B018


def test_all_that_megatron_exports_is_there() -> None:
    assert set(megackpt.__all__) >= MEGATRON


@pytest.mark.megatron
def test_megatron_exports_what_we_think() -> None:
    init = ROOT / ".peers" / "megatron" / "core" / "dist_checkpointing" / "__init__.py"
    imports = [
        n
        for n in ast.parse(init.read_text(encoding="utf-8")).body
        if isinstance(n, ast.ImportFrom)
    ]
    assert {alias.name for node in imports for alias in node.names} == MEGATRON


SAVES_AND_LOADS = """
import sys
import megackpt
import torch
import torch.distributed.checkpoint as dcp

model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
checkpoints = megackpt.CheckpointManager("run")
checkpoints.save(1, model=model)
assert checkpoints.restore(model=model).step == 1
weight = megackpt.ShardedTensor.from_rank_offsets("weight", model.weight.detach())
megackpt.save({"weight": weight}, "declared", "torch_dist")
megackpt.load({"weight": weight}, "declared")
megackpt.verify("declared")
with megackpt.dcp.install():
    dcp.save({"bias": model.bias}, checkpoint_id="dcp")
    dcp.load({"bias": model.bias}, checkpoint_id="dcp")
"""


def test_torch_dist_imports_nothing_that_only_other_formats_need(
    tmp_path: Path,
) -> None:
    """tensorstore and numcodecs are half of an install; zarr alone imports hundreds of modules."""
    others = """
from importlib.util import find_spec
for name in ("zarr", "tensorstore", "numcodecs", "google_crc32c", "ml_dtypes"):
    assert find_spec(name), f"{name} is not installed: this test proves nothing"
    assert name not in sys.modules, name
"""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SAVES_AND_LOADS + others],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "statement",
    [
        "import megackpt; dir(megackpt)",
        "import megackpt.dcp; dir(megackpt.dcp)",
        "import megackpt.planning",
        "import megackpt.huggingface, megackpt.converter, megackpt.cli.commands",
        "import megackpt.planning.save_plan, megackpt.planning.load_plan, megackpt.planning.cache",
        "from megackpt import CheckpointingException, StrictHandling",
    ],
)
def test_importing_needs_no_torch(statement: str) -> None:
    code = f"{statement}; import sys; sys.exit('torch is imported' if 'torch' in sys.modules else 0)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
