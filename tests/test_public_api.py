"""The faces of the package and of its rooms: lists agree, they are light to import, and what they name is there."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import megackpt
from megackpt import dcp

ROOT = Path(__file__).resolve().parent.parent
FACES = (megackpt, dcp)

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


def is_for_type_checkers(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def imported(module: ast.Module, package: str) -> dict[str, tuple[str, ...]]:
    """Home -> names, as the imports under TYPE_CHECKING have it."""
    homes: dict[str, list[str]] = {}
    for branch in filter(is_for_type_checkers, module.body):
        for node in ast.walk(branch):
            if isinstance(node, ast.ImportFrom):
                home = str(node.module).removeprefix(f"{package}.")
                for alias in node.names:
                    assert alias.asname == alias.name, (
                        f"{alias.name} is not exported again for type checkers"
                    )
                    homes.setdefault(home, []).append(alias.name)
    return {home: tuple(names) for home, names in homes.items()}


@pytest.mark.parametrize("face", FACES)
def test_type_checkers_and_the_interpreter_see_the_same_names(face: ModuleType) -> None:
    module = ast.parse(Path(str(face.__file__)).read_text(encoding="utf-8"))
    assert imported(module, face.__name__) == face._HOMES


@pytest.mark.parametrize(
    ("face", "name"), [(face, name) for face in FACES for name in face.__all__]
)
def test_every_public_name_resolves_to_what_its_home_has(
    face: ModuleType, name: str
) -> None:
    value = getattr(face, name)
    home = face._HOME_OF.get(name)
    assert value is not None
    assert home is None or value is getattr(
        import_module(f"{face.__name__}.{home}"), name
    )
    assert name in dir(face)


@pytest.mark.parametrize("face", FACES)
def test_names_stand_once(face: ModuleType) -> None:
    assert len(set(face.__all__)) == len(face.__all__)


@pytest.mark.parametrize("face", FACES)
def test_an_unknown_name_is_an_attribute_error(face: ModuleType) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'sav'"):
        face.sav  # noqa: B018


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


@pytest.mark.parametrize(
    "statement",
    [
        "import megackpt; dir(megackpt)",
        "import megackpt.dcp; dir(megackpt.dcp)",
        "import megackpt.planning",
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
