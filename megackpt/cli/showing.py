"""``megackpt show``: what a checkpoint holds, where each piece of a tensor lies, and its common state."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megackpt.checkpoint import Opened, open_checkpoint
from megackpt.checkpoint.regions import Regions
from megackpt.cli import values
from megackpt.cli.answers import (
    GAP,
    Answer,
    Block,
    Cell,
    Line,
    Table,
    counted,
    number,
    shaped,
    size,
)
from megackpt.cli.trees import Item, folded
from megackpt.errors import MismatchError, StorageError
from megackpt.planning.box import Int64
from megackpt.planning.manifest import OBJECT, Chunk, Manifest, TensorParts

_HEADINGS = ("key", "dtype", "shape", "chunks", "size")
_NUMBERS = (3, 4)


def show(
    checkpoint: str,
    pattern: str | None = None,
    *,
    chunks: bool = False,
    common: bool = False,
    unfolded: bool = False,
    html: str | None = None,
) -> Answer:
    """The entries of a checkpoint, or those that match ``pattern`` (one alone: with its layout), or its common state.

    Raises MismatchError where no key matches, NotACheckpoint, CorruptCheckpoint, StorageError.
    """
    opened = open_checkpoint(checkpoint)
    view = _View(
        checkpoint, opened.manifest, _matching(opened.manifest, checkpoint, pattern)
    )
    layout = chunks or (pattern is not None and len(view.numbers) == 1)
    listed = pattern is not None or not (common or html)
    value = _common(Regions(opened)) if common else None
    if html:
        _write_map(opened, checkpoint, html)

    def facts() -> dict[str, Any]:
        files = {"files": len(opened.manifest.files) + len(opened.small)}
        entries = {"entries": view.entries(layout)} if listed else {}
        state = {"common": values.facts(value)} if common else {}
        return view.facts() | files | entries | state | ({"html": html} if html else {})

    def blocks(pretty: bool) -> Iterator[Block]:
        yield view.header()
        if listed:
            yield from view.layout() if layout else view.table(pretty, unfolded)
        if common:
            yield from values.blocks(value, pretty)
        if html:
            yield Line.of("shard map: ", Cell(html, "bold"))

    return Answer(facts, blocks)


def _matching(manifest: Manifest, checkpoint: str, pattern: str | None) -> list[int]:
    """Numbers of the entries whose key is ``pattern`` or, if there is none, matches it; by key."""
    keys = manifest.numbers()
    if pattern is None:
        return [keys[key] for key in sorted(keys)]
    found = [pattern] if pattern in keys else sorted(fnmatch.filter(keys, pattern))
    if not found:
        near = difflib.get_close_matches(pattern, keys, n=3, cutoff=0.4)
        hint = f"; the nearest are {', '.join(map(repr, near))}" if near else ""
        raise MismatchError(f"{checkpoint} holds no key {pattern!r}{hint}")
    return [keys[key] for key in found]


def _common(regions: Regions) -> Any:
    from megackpt.serialization.inspection import look  # brings torch

    blob = regions.common()
    return (
        None
        if blob is None
        else look(blob, f"{regions.opened.storage.location}: the common state")
    )


def _write_map(opened: Opened, title: str, file: str) -> None:
    from megackpt.cli.report import shard_map

    try:
        Path(file).write_text(shard_map(opened, title=title), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {file}: {error.strerror}") from error


@dataclass(frozen=True, eq=False)
class _View:
    """Some entries of a checkpoint, to be looked at."""

    name: str
    manifest: Manifest
    numbers: Sequence[int]

    def facts(self) -> dict[str, Any]:
        backend, version = self.manifest.backend
        return {
            "location": self.name,
            "format": backend,
            "version": version,
            "save_id": self.manifest.save_id,
            "digests": len(self.manifest.chunks.digests) > 0,
            "chunks": len(self.manifest.chunks),
            "bytes": int(self.manifest.chunks.length.sum()),
        }

    def header(self) -> Line:
        facts = self.facts()
        wrote = f"save {facts['save_id']}" if facts["save_id"] else "written by others"
        digests = "with digests" if facts["digests"] else "without digests"
        what = f"{facts['format']} version {facts['version']}, {wrote}, {digests}"
        return Line.of(Cell(self.name, "bold"), f": {what}")

    def items(self) -> Iterator[Item]:
        chunks, count = self.manifest.chunks, len(self.manifest.tensors)
        pieces = np.bincount(chunks.tensor, minlength=count)
        octets = np.zeros(count, np.int64)
        np.add.at(octets, chunks.tensor, chunks.length)
        for i in self.numbers:
            key, meta = self.manifest.tensors[i]
            yield Item(key, meta.dtype, meta.shape, int(pieces[i]), int(octets[i]))

    def entries(self, layout: bool) -> list[dict[str, Any]]:
        found = [item._asdict() for item in self.items()]
        for i, entry in zip(self.numbers, found, strict=True):
            entry["grid"] = self.manifest.grids[i]
            if layout:
                entry["layout"] = [_chunk_facts(chunk) for chunk in self._chunks(i)]
        return found

    def table(self, pretty: bool, unfolded: bool) -> Iterator[Block]:
        items = list(self.items())
        if pretty and not unfolded:
            rows = list(folded(items))
            cells: list[list[Cell | str]] = [
                [Cell(row.label), *_cells(row.item)]
                if row.item
                else [Cell(row.label, "bold"), "", "", "", Cell(size(row.bytes), "dim")]
                for row in rows
            ]
            yield Table(_HEADINGS, cells, _NUMBERS, [row.depth for row in rows])
        else:
            yield Table(
                _HEADINGS, [[Cell(item.key), *_cells(item)] for item in items], _NUMBERS
            )
        held = sum(item.bytes for item in items)
        files = counted(len(self.manifest.files), "file")
        counts = (
            counted(len(items), "entry"),
            counted(sum(i.chunks for i in items), "chunk"),
            files,
            size(held),
        )
        yield Line.of(Cell(", ".join(counts), "bold"))

    @cached_property
    def _parts(self) -> tuple[TensorParts, Int64]:
        return TensorParts(self.manifest), self.manifest.chunks.block_bounds

    def _chunks(self, number: int) -> Iterator[Chunk]:
        parts, bounds = self._parts
        return (self.manifest.chunk(row, bounds) for row in parts.rows(number).tolist())

    def layout(self) -> Iterator[Block]:
        for i, item in zip(self.numbers, self.items(), strict=True):
            yield GAP
            what = f"{item.dtype}, {shaped(item.shape)}, {counted(item.chunks, 'chunk')}, {size(item.bytes)}"
            yield Line.of(Cell(item.key, "bold"), f": {what}")
            rows = [_chunk_cells(chunk) for chunk in self._chunks(i)]
            yield Table(
                ("box", "file", "start", "length", "rank", "digest"), rows, (2, 3, 4)
            )


def _cells(item: Item) -> list[Cell]:
    shape = Cell("-" if item.dtype == OBJECT and not item.shape else shaped(item.shape))
    return [
        Cell(item.dtype, "cyan"),
        shape,
        Cell(number(item.chunks)),
        Cell(size(item.bytes), "green"),
    ]


def _chunk_cells(chunk: Chunk) -> list[Cell | str]:
    place = chunk.location
    more = f" +{len(chunk.digests) - 1}" if len(chunk.digests) > 1 else ""
    digest = chunk.digests[0].tobytes().hex() + more if len(chunk.digests) else "-"
    rank = "-" if chunk.writer < 0 else str(chunk.writer)
    return [
        str(chunk.box),
        Cell(place.file, "cyan"),
        str(place.start),
        str(place.length),
        rank,
        Cell(digest, "dim"),
    ]


def _chunk_facts(chunk: Chunk) -> dict[str, Any]:
    return {
        "offset": chunk.box.offset,
        "shape": chunk.box.shape,
        "file": chunk.location.file,
        "start": chunk.location.start,
        "length": chunk.location.length,
        "rank": chunk.writer if chunk.writer >= 0 else None,
        "digests": [row.tobytes().hex() for row in chunk.digests],
    }
