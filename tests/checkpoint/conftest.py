"""A tiny format and whole saves with it, for tests of what makes a directory a checkpoint."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from megackpt import strategies
from megackpt.backends.base import Backend, Finished, Layout, Properties, config_file
from megackpt.checkpoint import (
    begin,
    decode_index,
    encode_index,
    marker,
    open_checkpoint,
)
from megackpt.errors import CorruptCheckpoint, NotACheckpoint
from megackpt.planning.box import Box, Boxes
from megackpt.planning.manifest import (
    Chunks,
    Manifest,
    TensorEntry,
    TensorMeta,
    WriteResult,
)
from megackpt.storage import digest_blocks, root_at

RANKS = 2


class Tiny(Backend):
    """Raw bytes, one file a rank; its table of contents is an index without small files."""

    properties = Properties("tiny", 1, (1,))

    def layout(self, ranks, manifest):
        return Layout([*(f"rank{r}.bin" for r in range(ranks)), "toc", "metadata.json"])

    def write(self, root, plan, data):
        name = f"rank{plan}.bin"
        with root.create(name) as writer:
            writer.write([memoryview(data)])
        rows = np.frombuffer(digest_blocks(memoryview(data)), np.uint8).reshape(-1, 16)
        one = np.array([0], np.int64)
        boxes = Boxes.of([Box((plan * len(data),), (len(data),))])
        return WriteResult.of_rows(
            boxes,
            (name,),
            np.zeros(1, np.int32),
            one,
            np.array([len(data)], np.int64),
            rows,
        )

    def finish(self, root, manifest):
        files = {"toc": encode_index(manifest, {}), **config_file(self.properties)}
        return Finished(manifest, files)

    def recognises(self, root):
        return root.size("metadata.json") is not None and root.size("toc") is not None

    def read_manifest(self, root):
        return replace(decode_index(root.get("toc"))[0], tables=("toc",))

    def read(self, root, plan, into, verify):
        for item in plan.rows():
            location = item.chunk.location
            whole = bytearray(location.length)
            with root.open(location.file) as reader:
                reader.read_into(location.start, [memoryview(whole)])
            if (
                verify
                and digest_blocks(memoryview(whole)) != item.chunk.digests.tobytes()
            ):
                raise CorruptCheckpoint(f"{location.file} is damaged")


class Native(Tiny):
    """The same, claiming that only it knows where the bytes are."""

    properties = Properties("native", 1, (1,))


def find_backend(storage, asked=None):
    if Tiny().recognises(storage):
        return Tiny()
    raise NotACheckpoint(
        f"{storage.called} is not a distributed checkpoint: no known format"
    )


@pytest.fixture
def tiny_formats():
    return {"tiny": Tiny, "native": Native}


@pytest.fixture(autouse=True)
def tiny_format(monkeypatch, tiny_formats):
    monkeypatch.setattr(strategies, "find_backend", find_backend)
    for function in ("backend_named", "reader_of"):
        monkeypatch.setattr(strategies, function, lambda name, *_: tiny_formats[name]())


def planned(size: int, ranks: int = RANKS) -> Manifest:
    """One tensor of bytes, cut over the ranks; nothing written yet."""
    boxes = Boxes.of(Box((r * size,), (size,)) for r in range(ranks))
    nothing = np.zeros(0, np.int64)
    chunks = Chunks(
        np.zeros(ranks, np.int32),
        boxes,
        np.arange(ranks, dtype=np.int32),
        np.full(ranks, -1, np.int32),
        nothing,
        nothing,
        np.zeros((0, 16), np.uint8),
    )
    return Manifest(
        (TensorEntry("weight", TensorMeta((ranks * size,), "uint8")),), (None,), chunks
    )


@dataclass
class Saves:
    """Saves and loads whole checkpoints that hold one value everywhere."""

    size: int = 1000

    def begin(self, directory: Path, save_id: str, **options):
        """A save that can be resumed, begun."""
        place = begin(directory, save_id=save_id, resume=True, **options)
        place.announce(
            Tiny().layout(RANKS, planned(self.size)).files, scratch=["journal"]
        )
        return place

    def write(self, place, rank: int, value: int):
        return Tiny().write(root_at(place.path), rank, bytes([value]) * self.size)

    def commit(self, place, results, **options):
        place.commit(Tiny(), planned(self.size).located(results), **options)

    def save(
        self,
        directory: Path,
        value: int,
        *,
        overwrite: bool = True,
        backend: Backend | None = None,
    ):
        backend = backend or Tiny()
        place = begin(directory, save_id=uuid.uuid4().hex, overwrite=overwrite)
        try:
            manifest = planned(self.size)
            place.announce(backend.layout(RANKS, manifest).files)
            results = [
                backend.write(root_at(place.path), rank, bytes([value]) * self.size)
                for rank in range(RANKS)
            ]
            place.commit(backend, manifest.located(results))
        except BaseException:
            place.abort()
            raise

    def load(self, directory: Path) -> int:
        """The one value that it holds; fails if bytes of two saves are mixed."""
        opened = open_checkpoint(directory)
        values = set()
        for chunk in opened.manifest.chunks_of("weight"):
            data = bytearray(chunk.location.length)
            with opened.storage.open(chunk.location.file) as reader:
                reader.read_into(chunk.location.start, [memoryview(data)])
            assert digest_blocks(memoryview(data)) == chunk.digests.tobytes()
            values |= set(data)
        (value,) = values
        return value


@pytest.fixture
def saves(caplog) -> Saves:
    caplog.set_level("ERROR", logger="megackpt.checkpoint")
    return Saves()


OWN = {"rank0.bin", "rank1.bin", "toc", "metadata.json", "megackpt.index"}


@pytest.fixture(autouse=True)
def no_unfinished_saves():
    """Ids are fixed here. Saves of earlier tests that are not collected yet do not hold them."""
    marker.active.clear()
