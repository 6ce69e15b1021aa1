"""The API reference has a page for every module that the documentation sends readers to."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_module_that_the_documentation_imports_has_a_page() -> None:
    (public,) = re.findall(
        r"^PUBLIC = (\(.*?^\))",
        (ROOT / "tools" / "reference.py").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    blocks = [
        b
        for p in pages
        for b in re.findall(
            r"^```python\n(.*?)^```$", p.read_text(), re.MULTILINE | re.DOTALL
        )
    ]
    named = {
        name
        for b in blocks
        for name in re.findall(r"^(?:from|import) (megackpt[.\w]*)", b, re.MULTILINE)
    }
    aliases = {
        name for name in named if name.startswith("megackpt.megatron")
    }  # Megatron's own names
    assert sorted(named - aliases - {*ast.literal_eval(public)}) == []
