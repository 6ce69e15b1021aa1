"""The classes and functions of docs/patterns.md, as a module: what is tested is what people copy."""

from __future__ import annotations

import ast
from types import ModuleType

from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "patterns.md"


def _definitions() -> ModuleType:
    """The page without what it runs and asserts, which tests/test_docs.py does."""
    module = ModuleType("patterns")
    for block in blocks(PAGE, "python"):
        tree = ast.parse("\n" * block.line + block.text, PAGE)
        kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
        tree.body = [
            node for node in tree.body if isinstance(node, kinds) or _is_constants(node)
        ]
        exec(compile(tree, PAGE, "exec"), module.__dict__)  # noqa: S102 - the code of our own page
    return module


def _is_constants(node: ast.stmt) -> bool:
    """Is it a line such as ``WIDTH, FFN = 8, 16``?"""
    names = [name.id for name in ast.walk(node) if isinstance(name, ast.Name)]
    return isinstance(node, ast.Assign) and all(name.isupper() for name in names)


page = _definitions()
