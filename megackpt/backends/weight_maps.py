"""Hugging Face's ``*.index.json``: which file holds which tensor of a checkpoint in several files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from megackpt import limits
from megackpt.errors import CorruptCheckpoint, join_truncated
from megackpt.storage import Storage, unsafe_names

ENDING = ".index.json"


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dict of a JSON object (``object_pairs_hook``). ValueError for a name that stands there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {twice!r} stands twice")
    return found


def emit(total: int, files: Mapping[str, str]) -> bytes:
    """The content for tensors of so many bytes in all; ``files``: key -> file."""
    document = {"metadata": {"total_size": total}, "weight_map": files}
    return (
        json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    ).encode()


def looks_right(root: Storage, name: str) -> bool:
    """Could this be such an index, by its first byte?"""
    with root.open(name) as reader:
        first = bytearray(min(1, reader.size))
        reader.read_into(0, [memoryview(first)])
        return first == b"{"


def read(root: Storage, name: str) -> dict[str, str]:
    """Key -> file. Raises CorruptCheckpoint for files that are missing, or not below this directory."""
    where = f"{root.location}/{name}"
    try:
        document = json.loads(
            root.get(name, limits.WEIGHT_MAP_BYTES), object_pairs_hook=unique_pairs
        )
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{where} is no JSON that could be right: {error}"
        ) from error
    told = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(told, dict) or not all(
        isinstance(file, str) for file in told.values()
    ):
        raise CorruptCheckpoint(f"{where} has no weight_map of tensors to files")
    files = list(dict.fromkeys(told.values()))
    if unsafe := unsafe_names(files):
        raise CorruptCheckpoint(
            f"{where} names the file {unsafe[0]!r}, which leads out of the directory"
        )
    if missing := [file for file in files if root.size(file) is None]:
        raise CorruptCheckpoint(
            f"{where} names files that are not there: {join_truncated(missing, separator=', ')}"
        )
    return told


def check(
    where: str, told: Mapping[str, str], found: Iterable[tuple[str, str]]
) -> None:
    """Raise CorruptCheckpoint where the files hold other tensors than is told. ``found``: (key, file)."""
    problems, held = [], dict[str, str]()
    for key, file in found:
        if held.setdefault(key, file) != file:
            problems.append(f"{key!r} is in {held[key]} and in {file}")
        elif told.get(key) != file:
            problems.append(
                f"{key!r} is in {file}, and the weight_map says {told.get(key, 'nothing of it')}"
            )
    problems += [
        f"{key!r} is not in {file}" for key, file in told.items() if key not in held
    ]
    if problems:
        raise CorruptCheckpoint(
            f"{where} disagrees with its files: {join_truncated(problems)}"
        )
