"""``megackpt show``: the entries of a checkpoint, the layout of their chunks, its common state."""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from megackpt.progress_bar import is_terminal

_HEADINGS = ("key", "dtype", "shape", "chunks", "size")
_LAYOUT_HEADINGS = ("box", "file", "start", "length", "rank", "digest")
_MAX_DEPTH = 40
"""Levels of the tree of keys; the rest of a longer key is one name."""

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
    bounds = manifest.chunks.block_bounds
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
            chunk = manifest.chunk(row, bounds)
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
        rows: list[Line] = []
        if folds:
            for node in _tree(entries):
                rows += _node_rows(node, 0)
        else:
            rows += [_row(entry["key"], entry) for entry in entries]
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


@dataclass
class _Node:
    """A part of the keys, between two dots. Alike siblings with numbers (layers) are one node."""

    label: str
    entry: Entry | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    count: int = 1
    """Number of siblings that this node shows."""

    def total_bytes(self) -> int:
        own = self.entry["bytes"] if self.entry else 0
        below = sum(child.total_bytes() for child in self.children.values())
        return self.count * (own + below)

    def signature(self) -> object:
        """Equal for nodes that differ in their label and keys only."""
        own = None
        if self.entry:
            own = [self.entry[name] for name in ("dtype", "shape", "chunks", "bytes")]
        below = [(name, node.signature()) for name, node in self.children.items()]
        return self.count, own, below


def _tree(entries: Sequence[Entry]) -> list[_Node]:
    root = _Node("")
    for entry in entries:
        node = root
        for name in entry["key"].split(".", _MAX_DEPTH):
            node = node.children.setdefault(name, _Node(name))
        node.entry = entry
    return [_joined(node) for node in root.children.values()]


def _joined(node: _Node) -> _Node:
    """Join a node without an entry with its only child: ``self_attention.linear_proj``."""
    while node.entry is None and len(node.children) == 1:
        (child,) = node.children.values()
        node = _Node(f"{node.label}.{child.label}", child.entry, child.children)
    return node


def _node_rows(node: _Node, depth: int) -> Iterator[Line]:
    label = "  " * depth + node.label
    if node.count > 1:
        label += f" ({node.count} alike)"
    if node.entry:
        yield _row(label, node.entry)
    else:
        size = Cell(format_size(node.total_bytes()), "dim")
        yield Cell(label, "bold"), "", "", "", size
    for child in _folded(list(node.children.values())):
        yield from _node_rows(_joined(child) if child.count == 1 else child, depth + 1)


def _folded(siblings: Sequence[_Node]) -> list[_Node]:
    """Join runs of numbered siblings that are alike: ``0-31 (32 alike)``."""
    # int() refuses the longest numbers, and 10 digits do not number layers.
    numbered = [n for n in siblings if n.label.isdecimal() and len(n.label) < 10]
    result = [node for node in siblings if node not in numbered]
    last = None
    for node in sorted(numbered, key=lambda node: int(node.label)):
        signature = node.signature()
        if signature == last:
            first = result[-1]
            first.label = f"{first.label.partition('-')[0]}-{node.label}"
            first.count += 1
        else:
            result.append(node)
        last = signature
    return result
