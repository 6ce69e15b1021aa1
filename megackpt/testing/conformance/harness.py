"""What the conformance tests share: saving and loading small states through a backend's methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from megackpt.backends.base import CONFIG, Backend, plan_for_backend
from megackpt.planning.box import Box
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import (
    DIGEST_BLOCK,
    ITEMSIZE,
    OBJECT,
    Declarations,
    Manifest,
    SavePlan,
    TensorMeta,
    WriteResult,
)
from megackpt.planning.save_plan import SavePolicy
from megackpt.storage import LocalStorage
from megackpt.testing.fixtures import Blobs, MemorySource, MemoryTarget, Whole, World


def check(condition: bool, message: str) -> None:
    """Raise AssertionError. pytest explains plain asserts in files of tests only."""
    if not condition:
        raise AssertionError(message)


class Harness:
    """The base of the conformance tests. BackendSuite documents the attributes."""

    backend: ClassVar[Backend]
    dtypes: ClassVar[Collection[str]] = tuple(d for d in ITEMSIZE if d != OBJECT)
    objects: ClassVar[bool] = True
    irregular: ClassVar[bool] = True
    unfit_keys: ClassVar[Collection[str]] = ()

    def save(
        self, folder: Path, world: World, ranks: int = 1
    ) -> tuple[LocalStorage, Manifest]:
        """Save a state whose shards are dealt out to the ranks; return where, and the manifest.

        All ranks write at once, each through a separate storage, as processes would. An
        ``export_only`` format has one rank.
        """
        root = LocalStorage(folder, create=True)
        before = set(root.list())
        plans, manifest = self.planned(world, ranks)
        files = self.backend.layout(ranks, manifest).files
        announced = {name.partition("/")[0] for name in files}
        taken = announced & before
        check(not taken, f"layout() announces {taken}, which others may need")

        with ThreadPoolExecutor(ranks) as pool:
            written = pool.map(lambda plan: self.write(folder, world, plan), plans)
            results = list(written)
        properties = self.backend.properties
        manifest = replace(
            manifest.located(results),
            backend=(properties.name, properties.version),
            encoding=properties.encoding,
            save_id="0" * 32,
        )
        manifest = self.finish(root, manifest)
        unannounced = sorted(set(root.list()) - announced - before)
        check(not unannounced, f"layout() did not announce {unannounced}")
        return root, manifest

    def planned(self, world: World, ranks: int) -> tuple[list[SavePlan], Manifest]:
        if self.backend.properties.export_only:
            ranks = 1
        shards = list(world.shards())
        parts = [world.declared(shards[rank::ranks], rank) for rank in range(ranks)]
        return plan_for_backend(self.backend, parts, SavePolicy())

    def write(self, folder: Path, world: World, plan: SavePlan) -> WriteResult:
        source = MemorySource(world, plan)
        result = self.backend.write(LocalStorage(folder), plan, source)
        check_pieces(plan, result)
        return result

    def finish(self, root: LocalStorage, manifest: Manifest) -> Manifest:
        # Checked once, and not before each file: a format may also recognise checkpoints of other
        # programs, which lack the last file of megackpt's.
        early = self.backend.recognises(root)
        if not self.backend.properties.export_only:  # one process writes all of it
            check(not early, "recognises data without a table of contents")
        finished = self.backend.finish(root, manifest)
        last = [*finished.files][-1:]
        check(
            CONFIG not in finished.files or last == [CONFIG],
            f"finish ends with {last}, not with {CONFIG}",
        )
        for name, data in finished.files.items():
            root.put(name, data)
        complete = self.backend.recognises(root)
        check(complete, "does not recognise its own complete checkpoint")
        return finished.manifest

    def load(
        self,
        root: LocalStorage,
        manifest: Manifest,
        wanted: Declarations,
        verify: bool = True,
        backend: Backend | None = None,
    ) -> MemoryTarget:
        target = MemoryTarget.of(wanted)
        backend = backend or self.backend
        backend.read(root, plan_load(wanted, manifest), target, verify)
        unclosed = list(Counter(target.opened) - Counter(target.closed))
        check(not unclosed, f"read did not close what it opened: {unclosed}")
        return target

    def expect(self, world: World, target: MemoryTarget) -> None:
        """Check that the target has what the state has, bit for bit."""
        for i, row in enumerate(target.wanted.rows()):
            key, box = row.shard.key, row.shard.box
            if row.meta.is_object:
                same = target.blobs.get(i) == world.blob(key, box.offset)
            else:
                expected = world.tensors[key].values[box.slices()]
                same = target.arrays[i].tobytes() == expected.tobytes()
            check(same, f"{row.shard} ({row.meta.dtype}) differs")

    def expect_all(self, world: World, root: LocalStorage, manifest: Manifest) -> None:
        """Check that every shard is read as the state has it, with digests checked and without."""
        for verify in (True, False):
            target = self.load(root, manifest, world.declared_all(), verify)
            self.expect(world, target)

    def expect_both(self, world: World, root: LocalStorage, manifest: Manifest) -> None:
        """``expect_all`` by the manifest of the save, and by what ``read_manifest`` reads."""
        self.expect_all(world, root, manifest)
        self.expect_all(world, root, self.backend.read_manifest(root))

    def random(self, *shape: int, shard: tuple[int, ...] = (), seed: int = 0) -> Whole:
        """Return a random tensor of a dtype that the format holds (by default of one shard)."""
        dtype = next(iter(self.dtypes))
        if "float32" in self.dtypes:
            dtype = "float32"
        return Whole.random(dtype, shape, shard or shape, seed)

    def world(self) -> World:
        """Return a state with some of everything that the format holds."""
        tensors = {
            "one.dimension": self.random(1000, shard=(250,), seed=1),
            "rows.cut": self.random(10, 6, shard=(4, 6), seed=2),
            "columns.cut": self.random(6, 10, shard=(6, 4), seed=3),
            "both.cut": self.random(3, 7, 11, shard=(1, 4, 3), seed=4),
            # several digest blocks, and a rest
            "large": self.random(3, 5 << 16, shard=(2, 5 << 16), seed=5),
            "scalar": self.random(seed=6),
        }
        if not self.objects:
            return World(tensors)
        small = {index: bytes(index) * (1 + 3 * index[0]) for index in np.ndindex(2, 3)}
        large = b"ab" * DIGEST_BLOCK
        objects: dict[str, Blobs] = {"an.object": small, "large.object": {(0,): large}}
        return World(tensors, objects, b"common")

    def small_world(self) -> World:
        tensors = {"cut": self.random(6, 4, shard=(3, 4)), "s": self.random()}
        if not self.objects:
            return World(tensors)
        return World(tensors, {"o": {(0,): b"blob"}}, b"common")


def check_pieces(plan: SavePlan, result: WriteResult) -> None:
    """Check that a rank's pieces come in the plan's order, and tile each of its rows exactly."""
    items = result.item.tolist()
    check(items == sorted(items), f"pieces are not in the plan's order: rows {items}")
    boxes = result.boxes.widened(plan.boxes.width)
    for row in range(len(plan)):
        shard = plan.row(row).shard
        box = shard.box
        own = np.flatnonzero(result.item == row).tolist()
        pieces = [boxes.row(i, len(box.shape)) for i in own]
        counts = np.zeros(box.shape, np.int64)
        exact = bool(pieces)
        for piece in pieces:
            if not box.contains(piece):
                exact = False
                break
            counts[piece.relative_to(box).slices()] += 1
        if not exact or (counts != 1).any():  # the text may be large
            raise AssertionError(
                f"row {row}, {shard}, was written as the pieces {', '.join(map(str, pieces))}: "
                "holes or overlaps, or a piece that is not within it"
            )
    blocks = int((-(-result.length // DIGEST_BLOCK)).sum())
    check(
        len(result.digests) == blocks,
        f"{len(result.digests)} digests for {blocks} blocks of {DIGEST_BLOCK} bytes",
    )
    known = (result.file >= 0) & (result.file < len(result.files))
    check(bool(known.all()), f"pieces name files {set(result.file.tolist())}")


def summary(manifest: Manifest) -> dict[str, tuple[TensorMeta, set[Box]]]:
    """Return the metadata and chunks of each tensor, for comparisons."""
    found = {}
    for key, meta in manifest.tensors:
        boxes = {chunk.box for chunk in manifest.chunks_of(key)}
        found[key] = meta, boxes
    return found


@contextmanager
def replaced(path: Path, content: bytes | None) -> Iterator[None]:
    """Replace (None: remove) a file for the time of a ``with`` block."""
    whole = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    yield
    path.write_bytes(whole)
