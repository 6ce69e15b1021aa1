"""The corpus of spoilt checkpoints: what a case is, and how its directory is made."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megackpt.checkpoint.index import START
from megackpt.storage import digest
from tests.hostile import healthy

STEP = "iter_0000001"


@dataclass(frozen=True)
class Place:
    """Where a case stands: its checkpoint, a folder beside that nobody may look into, a file that must not appear."""

    home: Path

    @property
    def folder(self) -> Path:
        return self.home / "run" / STEP

    @property
    def outside(self) -> Path:
        return self.home / "outside"

    @property
    def witness(self) -> Path:
        return self.home / "witness"

    def get(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        (self.folder / name).write_bytes(data)

    def json(self, name: str, change: Callable[[Any], Any]) -> None:
        """Change a document; what ``change`` returns, if anything, takes its place."""
        document = json.loads(self.get(name))
        changed = change(document)
        self.put(name, json.dumps(document if changed is None else changed).encode())

    def table(self, change: Callable[[Any], None]) -> None:
        """Change what .metadata says."""
        table = healthy.table(self.folder)
        change(table)
        self.put(".metadata", pickle.dumps(table, 4))

    def index(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the head of megackpt.index, and have its digest right."""
        data = self.get("megackpt.index")
        magic, version, length = struct.unpack_from("<8sII", data)
        head = json.loads(data[START : START + length])
        change(head)
        told = json.dumps(head).encode()
        body = (
            struct.pack("<8sII", magic, version, len(told))
            + told
            + data[START + length : -16]
        )
        self.put("megackpt.index", body + digest(body))


@dataclass(frozen=True)
class Case:
    """A way to spoil checkpoints of one kind.

    ``tells``: what some reader's error must match; "" where the damage is harmless, so that all that is read is right.
    ``linked``: the format follows links to regular files. ``long``: for the campaign only.
    """

    name: str
    kind: str
    spoil: Callable[[Place], object]
    tells: str = ""
    linked: bool = False
    long: bool = False


CASES: dict[str, Case] = {}


def add(
    name: str, kind: str, spoil: Callable[[Place], object], tells: str = "", **more: Any
) -> None:
    name = f"{kind}: {name}"
    if name in CASES:
        raise KeyError(name)
    CASES[name] = Case(name, kind, spoil, tells, **more)


def build(base: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Make these cases below ``base``; what the readers are to be told of each (see readers.py).

    Under the name of a kind: the healthy checkpoint itself.
    """
    kinds = {CASES[name].kind for name in names}
    found: dict[str, dict[str, Any]] = {}
    about: dict[str, dict[str, Any]] = {}
    for kind in sorted(kinds):
        original = base / "healthy" / kind
        original.parent.mkdir(exist_ok=True, parents=True)
        healthy.MAKERS[kind][1](original)
        about[kind] = healthy.told(kind, original)
    for number, name in enumerate([*sorted(kinds), *names]):
        kind = CASES[name].kind if name in CASES else name
        place = Place(base / f"{number:04}")
        shutil.copytree(base / "healthy" / kind, place.folder)
        place.outside.mkdir()
        (place.outside / "secret").write_bytes(b"secret" * 1000)
        if name in CASES:
            CASES[name].spoil(place)
        found[name] = {
            **about[kind],
            "checkpoint": str(place.folder),
            "outside": str(place.outside),
        }
    return found
