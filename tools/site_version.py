"""A hook of mkdocs: the version of the package, at the bottom of each page of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "megackpt" / "__init__.py"


def on_config(config: Any) -> Any:
    """Called by mkdocs with its settings before it builds the site."""
    version = re.search(r'^__version__ = "(.+)"$', SOURCE.read_text(), re.MULTILINE)
    if version is None:
        raise ValueError(f"{SOURCE} has no __version__")
    config.copyright = f"megackpt {version[1]}"
    return config
