"""The parent of ranks that use PEFT: it imports PEFT and transformers once, and forks."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
for peer in ("accelerate", "huggingface", "peft-0.21.2"):
    sys.path.insert(0, str(ROOT / ".peers" / peer))
sys.path.insert(0, str(ROOT))

import peft  # noqa: E402, F401
import transformers  # noqa: E402, F401

from tests import launch  # noqa: E402

if __name__ == "__main__":
    launch.main()
