"""Hugging Face's ``*.index.json``: the file of each tensor of a checkpoint in several files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megackpt import limits
from megackpt.errors import CorruptCheckpoint, join_truncated
from megackpt.storage import FileReader, Storage, unsafe_names

ENDING = ".index.json"


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dict of a JSON object (``object_pairs_hook``). Raises ValueError for a repeated name."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} is repeated")
        found[name] = value
    return found


def emit(metadata: Mapping[str, object], files: Mapping[str, str]) -> bytes:
    """The content of the file. ``files``: key -> file."""
    document = {"metadata": metadata, "weight_map": files}
    return (
        json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    ).encode()


def recognises(
    root: Storage, index: str, files: list[str], is_one: Callable[[FileReader], bool]
) -> bool:
    """Could this be a checkpoint, by the first byte of the index, or of one file by ``is_one``?"""
    if index:
        with root.open(index) as reader:
            first = bytearray(min(1, reader.size))
            reader.read_into(0, [memoryview(first)])
            return first == b"{"
    try:
        with root.open(files[0]) as reader:
            return is_one(reader)
    except (IndexError, CorruptCheckpoint, FileNotFoundError):
        return False


def read(root: Storage, name: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Key -> file, and the metadata, which are empty unless they are a dict.

    Raises CorruptCheckpoint for files that are missing, or not below this directory.
    """
    where = f"{root.location}/{name}"
    try:
        document = json.loads(
            root.get(name, limits.WEIGHT_MAP_BYTES), object_pairs_hook=unique_pairs
        )
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{where} cannot be parsed: {error}") from error
    found = metadata = None
    if isinstance(document, dict):
        found = document.get("weight_map")
        metadata = document.get("metadata")
    if not isinstance(found, dict) or not all(
        isinstance(file, str) for file in found.values()
    ):
        raise CorruptCheckpoint(f"{where} has no weight_map of tensors to files")
    files = list(dict.fromkeys(found.values()))
    if unsafe := unsafe_names(files):
        raise CorruptCheckpoint(
            f"{where} names the file {unsafe[0]!r}, which leads out of the directory"
        )
    if missing := [file for file in files if root.size(file) is None]:
        raise CorruptCheckpoint(
            f"{where} names files that are not there: {join_truncated(missing, separator=', ')}"
        )
    return found, metadata if isinstance(metadata, dict) else {}


def check(
    where: str, weight_map: Mapping[str, str], found: Iterable[tuple[str, str]]
) -> None:
    """Raise CorruptCheckpoint if the files hold other tensors than the weight map.

    ``found``: (key, file).
    """
    problems = []
    held = dict[str, str]()
    for key, file in found:
        if held.setdefault(key, file) != file:
            problems.append(f"{key!r} is in {held[key]} and in {file}")
        elif weight_map.get(key) != file:
            problems.append(
                f"{key!r} is in {file}, and the weight_map says {weight_map.get(key, 'nothing')}"
            )
    problems += [
        f"{key!r} is not in {file}"
        for key, file in weight_map.items()
        if key not in held
    ]
    if problems:
        raise CorruptCheckpoint(
            f"{where} disagrees with its files: {join_truncated(problems)}"
        )
