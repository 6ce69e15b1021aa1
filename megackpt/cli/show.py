"""``megackpt show``: the entries of a checkpoint, the layout of their chunks, its common state."""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megackpt.checkpoint import Opened, open_checkpoint
from megackpt.checkpoint.regions import Regions
from megackpt.cli.output import (
    Answer,
    Block,
    Cell,
    Line,
    Table,
    counted,
    format_shape,
    one_line,
)
from megackpt.errors import MismatchError, StorageError
from megackpt.events import format_size
from megackpt.planning.box import Box
from megackpt.planning.manifest import OBJECT, Manifest, TensorParts
from megackpt.progress_line import is_terminal

_HEADINGS = ("key", "dtype", "shape", "chunks", "size")
_LAYOUT_HEADINGS = ("box", "file", "start", "length", "rank", "digest")
# int() refuses the longest numbers, and 10 digits do not number layers.
_NUMBER = re.compile(r"(?<![^.])\d{1,9}(?![^.])", re.ASCII)
"""A part of a key, between two dots."""

Entry = dict[str, Any]


def show(options: argparse.Namespace) -> Answer:
    """Raises MismatchError if no key matches, NotACheckpoint, CorruptCheckpoint, StorageError."""
    opened = open_checkpoint(options.checkpoint)
    manifest = opened.manifest
    numbers = _select(manifest, options.checkpoint, options.key)
    has_layout = options.chunks or (options.key is not None and len(numbers) == 1)
    name, version = manifest.backend
    data: dict[str, Any] = {
        "location": options.checkpoint,
        "format": name,
        "version": version,
        "save_id": manifest.save_id,
        "digests": len(manifest.chunks.digests) > 0,
        "files": len(manifest.files) + len(opened.small),
        "chunks": len(manifest.chunks),
        "bytes": int(manifest.chunks.length.sum()),
    }
    if options.key is not None or not (options.common or options.html):
        data["entries"] = _entries(manifest, numbers, has_layout)
    if options.common:
        data["common"] = _common_state(opened)
    if options.html:
        _write_shard_map(opened, options.checkpoint, options.html)
        data["html"] = options.html
    folds = is_terminal(sys.stdout) and not options.all
    return Answer(data, _blocks(data, has_layout, folds))


def _select(manifest: Manifest, checkpoint: str, pattern: str | None) -> list[int]:
    """The numbers of the entry with the key ``pattern``, or else of those that match it."""
    numbers = manifest.numbers()
    if pattern is None:
        keys = sorted(numbers)
    elif pattern in numbers:
        keys = [pattern]
    else:
        keys = sorted(fnmatch.filter(numbers, pattern))
        if not keys:
            near = difflib.get_close_matches(pattern, numbers, n=3, cutoff=0.4)
            hint = f"; the nearest are {', '.join(map(repr, near))}" if near else ""
            raise MismatchError(f"{checkpoint} holds no key {pattern!r}{hint}")
    return [numbers[key] for key in keys]


def _entries(
    manifest: Manifest, numbers: Sequence[int], has_layout: bool
) -> list[Entry]:
    parts = TensorParts(manifest)
    entries = []
    for number in numbers:
        key, meta = manifest.tensors[number]
        rows = parts.rows(number)
        entry: Entry = {
            "key": key,
            "dtype": meta.dtype,
            "shape": meta.shape,
            "chunks": len(rows),
            "bytes": int(manifest.chunks.length[rows].sum()),
            "grid": manifest.grids[number],
        }
        entries.append(entry)
        if not has_layout:
            continue
        entry["layout"] = []
        for row in rows.tolist():
            chunk = manifest.chunk(row)
            layout = {
                "offset": chunk.box.offset,
                "shape": chunk.box.shape,
                "file": chunk.location.file,
                "start": chunk.location.start,
                "length": chunk.location.length,
                "rank": chunk.writer if chunk.writer >= 0 else None,
                "digests": [digest.tobytes().hex() for digest in chunk.digests],
            }
            entry["layout"].append(layout)
    return entries


def _common_state(opened: Opened) -> Any:
    # Imports torch.
    from megackpt.serialization.inspection import look

    blob = Regions(opened).common()
    if blob is None:
        return None
    return look(blob, f"{opened.storage.location}: the common state")


def _write_shard_map(opened: Opened, title: str, file: str) -> None:
    from megackpt.cli.report import shard_map

    try:
        Path(file).write_text(shard_map(opened, title=title), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {file}: {error.strerror}") from error


def _blocks(data: Mapping[str, Any], has_layout: bool, folds: bool) -> Iterator[Block]:
    header = f": {data['format']} version {data['version']}, "
    header += f"save {data['save_id']}, " if data["save_id"] else "written by others, "
    header += "with digests" if data["digests"] else "without digests"
    yield Cell(data["location"], "bold"), header
    if has_layout:
        for entry in data.get("entries", ()):
            yield from _layout_blocks(entry)
    elif "entries" in data:
        entries = data["entries"]
        rows = _folded(entries)
        if not folds:
            rows = [_row(entry["key"], entry) for entry in entries]
        yield Table(_HEADINGS, rows, right=(3, 4))
        counts = [
            counted(len(entries), "entry"),
            counted(sum(entry["chunks"] for entry in entries), "chunk"),
            counted(data["files"], "file"),
            format_size(sum(entry["bytes"] for entry in entries)),
        ]
        yield (Cell(", ".join(counts), "bold"),)
    if "common" in data:
        if data["common"] is None:
            yield ("no common state",)
        else:
            for path, value in _leaves(data["common"], ""):
                yield path, " = ", Cell(one_line(value), "cyan")
    if "html" in data:
        yield "shard map: ", Cell(data["html"], "bold")


def _row(label: str, entry: Entry) -> Line:
    shape = format_shape(entry["shape"])
    if entry["dtype"] == OBJECT and not entry["shape"]:
        shape = "-"
    return [
        label,
        Cell(entry["dtype"], "cyan"),
        shape,
        f"{entry['chunks']:,}",
        Cell(format_size(entry["bytes"]), "green"),
    ]


def _layout_blocks(entry: Entry) -> Iterator[Block]:
    shape = format_shape(entry["shape"])
    size = f"{counted(entry['chunks'], 'chunk')}, {format_size(entry['bytes'])}"
    yield ()
    yield Cell(entry["key"], "bold"), f": {entry['dtype']}, {shape}, {size}"
    rows: list[Line] = []
    for chunk in entry["layout"]:
        digest, *others = chunk["digests"] or ["-"]
        rows.append(
            [
                str(Box(chunk["offset"], chunk["shape"])),
                Cell(chunk["file"], "cyan"),
                str(chunk["start"]),
                str(chunk["length"]),
                "-" if chunk["rank"] is None else str(chunk["rank"]),
                Cell(f"{digest} +{len(others)}" if others else digest, "dim"),
            ]
        )
    yield Table(_LAYOUT_HEADINGS, rows, right=(2, 3, 4))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Path and value of each leaf in nested dicts and lists: ``args.betas[0]``, 0.9."""
    if not isinstance(value, dict | list) or not value:
        yield path or ".", value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if not isinstance(key, str) or not key.isidentifier():
            step = f"[{key!r}]"
        else:
            step = f".{key}" if path else key
        yield from _leaves(item, path + step)


def _folded(entries: Sequence[Entry]) -> list[Line]:
    """Rows. Entries that differ only in numbers of their keys, as layers do, are one."""
    groups: dict[object, list[Entry]] = {}
    for entry in entries:
        pattern = _NUMBER.sub("#", entry["key"])
        alike = [entry[name] for name in ("dtype", "shape", "chunks", "bytes")]
        groups.setdefault((pattern, *alike), []).append(entry)
    rows = []
    for group in groups.values():
        label = group[0]["key"]
        if len(group) > 1:
            numbers = [map(int, _NUMBER.findall(entry["key"])) for entry in group]
            label, *rest = _NUMBER.split(label)
            for column, text in zip(zip(*numbers, strict=True), rest, strict=True):
                low, high = min(column), max(column)
                span = str(low) if low == high else f"{low}-{high}"
                label += span + text
            label += f" ({len(group)} alike)"
        rows.append(_row(label, group[0]))
    return rows
