"""Writes ``orbax-0.12.8-*`` by orbax itself. Needs what ``make peers`` installs; run once, as

``PYTHONPATH=.peers/orbax:. python tests/golden/make_orbax.py FOLDER``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.foreign.orbax_writer import KINDS

NAMES = {"v0": "v0", "v0 plain": "v0-plain", "v1": "v1"}


def main() -> None:
    folder = Path(sys.argv[1])
    for kind, name in NAMES.items():
        save, make, expect = KINDS[kind]
        tree = make()
        save(folder / f"orbax-0.12.8-{name}", tree)
        torch.save(expect(tree), folder / "orbax-0.12.8.expected.pt")


if __name__ == "__main__":
    main()
