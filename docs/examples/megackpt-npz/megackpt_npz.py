"""A format for megackpt, as an example: each rank's pieces in one .npz file, which numpy opens.

rank_0.npz        what rank 0 wrote: a zip archive of .npy files, named by key and box
npz.json          the table of contents: all tensors, and where the bytes of each piece are
metadata.json     which format this is
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar
from urllib.parse import quote

import numpy as np

from megackpt.backends import (
    CONFIG,
    Backend,
    Finished,
    Layout,
    Properties,
    Source,
    Target,
    config_file,
)
from megackpt.backends.ranges import read_raw
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.box import Box
from megackpt.planning.manifest import (
    DIGEST_SIZE,
    LoadPlan,
    Location,
    Manifest,
    SavePlan,
    TensorEntry,
    TensorMeta,
    WriteResult,
    listed,
)
from megackpt.storage import FileWriter, Storage, digest_blocks

CONTENTS = "npz.json"
LONGEST = 60_000  # bytes; the name of a zip member has at most 65,535


def escaped(key: str) -> str:
    """A key may be any text at all; the name of a file may not."""
    return quote(key, safe="", errors="surrogatepass")


def stored_dtype(meta: TensorMeta) -> str:
    """How a .npy file says it. Dtypes that numpy does not know are kept as integers of their size, blobs as bytes."""
    known = None if meta.is_object else getattr(np, meta.dtype, None)
    return np.dtype(known or f"u{max(meta.itemsize, 1)}").newbyteorder("<").str


class Archive:
    """One rank's .npz file, written from front to back, and where in it each piece landed."""

    def __init__(self, file: FileWriter) -> None:
        self.file = file
        self.zip = zipfile.ZipFile(self, "w")
        self.starts: list[int] = []
        self.lengths: list[int] = []
        self.digests: list[bytes] = []

    def add(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        blocks: Iterator[memoryview],
    ) -> None:
        header = {"descr": dtype, "fortran_order": False, "shape": shape}
        with self.zip.open(
            zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True
        ) as member:
            np.lib.format.write_array_header_1_0(member, header)
            self.starts.append(self.file.position)
            for block in blocks:  # each is valid until the next one is asked for
                member.write(block)
                self.digests.append(digest_blocks(block))
            self.lengths.append(self.file.position - self.starts[-1])

    # What the zipfile module asks of a file: this archive is the one that it writes to.

    def write(self, data: bytes | memoryview) -> int:
        self.file.write([memoryview(data)])
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """The storage's file is closed, and made durable, where it was made."""


@dataclass(frozen=True)
class Npz(Backend):
    """Options: ``prefix``, how the names of the archives begin."""

    prefix: str = "rank"

    properties: ClassVar[Properties] = Properties("npz", 1, reads=frozenset({1}))

    def __post_init__(self) -> None:
        if not self.prefix.isidentifier():
            raise BackendError(
                f"prefix becomes part of file names, which {self.prefix!r} cannot"
            )

    def layout(self, ranks: int, manifest: Manifest) -> Layout:
        for key, _ in manifest.tensors:
            if len(escaped(key)) > LONGEST:
                raise BackendError(
                    f"the key {key[:80]!r}... is too long to be a name in an archive"
                )
        archives = [f"{self.prefix}_{rank}.npz" for rank in range(ranks)]
        return Layout([*archives, CONTENTS, CONFIG])

    def write(self, root: Storage, plan: SavePlan, data: Source) -> WriteResult:
        name = f"{self.prefix}_{plan.rank}.npz"
        with root.create(name) as file:
            archive = Archive(file)
            with archive.zip:
                for row, item in enumerate(plan.rows()):
                    shape, blocks = item.shard.box.shape, data.blocks(row)
                    if item.meta.is_object:  # a blob of unknown length
                        blob = b"".join(bytes(block) for block in blocks)
                        shape, blocks = (len(blob),), iter([memoryview(blob)])
                    name_inside = f"{escaped(item.shard.key)}{item.shard.box}"
                    archive.add(name_inside, stored_dtype(item.meta), shape, blocks)
        return WriteResult.of_rows(
            plan.boxes,
            [name],
            file=np.zeros(len(plan), np.int32),
            start=np.array(archive.starts, np.int64),
            length=np.array(archive.lengths, np.int64),
            digests=np.frombuffer(b"".join(archive.digests), np.uint8).reshape(
                -1, DIGEST_SIZE
            ),
        )

    def finish(self, root: Storage, manifest: Manifest) -> Finished:
        chunks = []
        for i, number in enumerate(manifest.chunks.tensor.tolist()):
            chunk = manifest.chunk(i)
            place = chunk.location.file, chunk.location.start, chunk.location.length
            chunks.append([number, chunk.box.offset, chunk.box.shape, *place])
        contents = {
            "tensors": [[key, *meta] for key, meta in manifest.tensors],
            "chunks": chunks,
        }
        files = {CONTENTS: json.dumps(contents).encode()}
        return Finished(manifest, {**files, **config_file(self.properties)})

    def read_manifest(self, root: Storage) -> Manifest:
        try:
            contents = json.loads(root.get(CONTENTS))
            tensors = [
                TensorEntry(key, TensorMeta(tuple(s), dtype))
                for key, s, dtype in contents["tensors"]
            ]
            chunks = [
                (number, Box(tuple(offset), tuple(shape)), Location(*place))
                for number, offset, shape, *place in contents["chunks"]
            ]
        except (
            ValueError,
            TypeError,
            KeyError,
            RecursionError,
            FileNotFoundError,
        ) as error:
            raise CorruptCheckpoint(
                f"{root.location}/{CONTENTS} is damaged: {error!r}"
            ) from error
        backend = self.properties.name, self.properties.version
        return replace(listed(tensors, chunks, backend), tables=(CONTENTS,))

    def read(self, root: Storage, plan: LoadPlan, into: Target, verify: bool) -> None:
        read_raw(root, plan, into, verify)
