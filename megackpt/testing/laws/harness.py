"""Saving and loading small worlds through the verbs of a format alone, and looking at what comes of it."""

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
from megackpt.testing.worlds import Blobs, MemorySource, MemoryTarget, Whole, World


def check(truth: bool, told: str) -> None:
    """pytest explains asserts in test files only, so the laws say themselves what is wrong."""
    if not truth:
        raise AssertionError(told)


class Harness:
    """What the laws of all rooms stand on. The attributes are told in BackendSuite."""

    backend: ClassVar[Backend]
    dtypes: ClassVar[Collection[str]] = tuple(d for d in ITEMSIZE if d != OBJECT)
    objects: ClassVar[bool] = True
    irregular: ClassVar[bool] = True
    unfit_keys: ClassVar[Collection[str]] = ()

    def save(
        self, folder: Path, world: World, ranks: int = 1
    ) -> tuple[LocalStorage, Manifest]:
        """Save a world whose shards so many ranks hold in turn; returns where, and the manifest of what is stored.

        All ranks write at once, each through a storage of its own, as processes would. A format with
        ``export_only`` has one rank.
        """
        root = LocalStorage(folder, create=True)
        before = set(root.list())
        plans, manifest = self.planned(world, ranks)
        announced = {
            name.partition("/")[0]
            for name in self.backend.layout(ranks, manifest).files
        }
        check(
            not announced & before,
            f"layout() announces {announced & before}, which others may need",
        )
        with ThreadPoolExecutor(ranks) as pool:
            results = list(
                pool.map(lambda plan: self.write(folder, world, plan), plans)
            )
        properties = self.backend.properties
        manifest = replace(
            manifest.located(results),
            backend=(properties.name, properties.version),
            encoding=properties.encoding,
            save_id="0" * 32,
        )
        manifest = self.finish(root, manifest)
        unannounced = set(root.list()) - announced - before
        check(not unannounced, f"layout() did not announce {sorted(unannounced)}")
        return root, manifest

    def planned(self, world: World, ranks: int) -> tuple[list[SavePlan], Manifest]:
        if self.backend.properties.export_only:
            ranks = 1
        shards = list(world.shards())
        parts = [world.declared(shards[rank::ranks], rank) for rank in range(ranks)]
        return plan_for_backend(self.backend, parts, SavePolicy())

    def write(self, folder: Path, world: World, plan: SavePlan) -> WriteResult:
        result = self.backend.write(
            LocalStorage(folder), plan, MemorySource(world, plan)
        )
        check_pieces(plan, result)
        return result

    def finish(self, root: LocalStorage, manifest: Manifest) -> Manifest:
        # Not asked before each file: a format may also know checkpoints of others, which lack our last file.
        check(
            not self.backend.recognises(root),
            "recognises data without a table of contents",
        )
        finished = self.backend.finish(root, manifest)
        last = [*finished.files][-1:]
        check(
            CONFIG not in finished.files or last == [CONFIG],
            f"finish ends with {last}, not with {CONFIG}",
        )
        for name, data in finished.files.items():
            root.put(name, data)
        check(
            self.backend.recognises(root),
            "does not recognise its own complete checkpoint",
        )
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
        (backend or self.backend).read(
            root, plan_load(wanted, manifest), target, verify
        )
        unclosed = Counter(target.opened) - Counter(target.closed)
        check(
            not unclosed,
            f"read did not close what it opened: {[str(box) for _, box in unclosed]}",
        )
        return target

    def expect(self, world: World, target: MemoryTarget) -> None:
        """What was read is what the world holds, bit for bit."""
        for i, row in enumerate(target.wanted.rows()):
            if row.meta.is_object:
                expected = world.blob(row.shard.key, row.shard.box.offset)
                check(
                    target.blobs.get(i) == expected, f"the blob of {row.shard} differs"
                )
            else:
                held = world.tensors[row.shard.key].values[row.shard.box.slices()]
                same = target.arrays[i].tobytes() == held.tobytes()
                check(same, f"{row.shard} ({row.meta.dtype}) differs")

    def expect_all(self, world: World, root: LocalStorage, manifest: Manifest) -> None:
        """Every shard can be read as the world holds it, with digests checked and without."""
        for verify in (True, False):
            self.expect(
                world,
                self.load(root, manifest, world.declared(list(world.shards())), verify),
            )

    @property
    def dtype(self) -> str:
        """The one to take where any will do."""
        return "float32" if "float32" in self.dtypes else next(iter(self.dtypes))

    def world(self) -> World:
        """A little of everything that the format holds."""
        dtype = self.dtype
        tensors = {
            "one.dimension": Whole.random(dtype, (1000,), (250,), 1),
            "rows.cut": Whole.random(dtype, (10, 6), (4, 6), 2),
            "columns.cut": Whole.random(dtype, (6, 10), (6, 4), 3),
            "both.cut": Whole.random(dtype, (3, 7, 11), (1, 4, 3), 4),
            "large": Whole.random(
                dtype, (3, 5 << 16), (2, 5 << 16), 5
            ),  # blocks, and a rest
            "scalar": Whole.random(dtype, (), (), 6),
        }
        if not self.objects:
            return World(tensors)
        blobs: Blobs = {
            (i, j): bytes([i, j]) * (1 + 3 * i) for i in range(2) for j in range(3)
        }
        return World(
            tensors,
            {"an.object": blobs, "large.object": {(0,): b"ab" * DIGEST_BLOCK}},
            b"common",
        )

    def small_world(self) -> World:
        world = World(
            {
                "cut": Whole.random(self.dtype, (6, 4), (3, 4)),
                "s": Whole.random(self.dtype, (), ()),
            }
        )
        return (
            replace(world, objects={"o": {(0,): b"blob"}}, common=b"common")
            if self.objects
            else world
        )


def check_pieces(plan: SavePlan, result: WriteResult) -> None:
    """The pieces that a rank reports come in the plan's order, and tile each of its rows exactly."""
    items = result.item.tolist()
    check(
        items == sorted(items), f"the pieces are not in the plan's order: rows {items}"
    )
    boxes = result.boxes.widened(plan.boxes.width)
    for row in range(len(plan)):
        whole = plan.row(row).shard
        ndim = len(whole.box.shape)
        parts = [
            boxes.row(i, ndim) for i in np.flatnonzero(result.item == row).tolist()
        ]
        told = f"row {row}, {whole}, was written as the pieces {', '.join(map(str, parts))}"
        check(
            bool(parts) and all(whole.box.contains(part) for part in parts),
            f"{told}: not within it",
        )
        counts = np.zeros(whole.box.shape, np.int64)
        for part in parts:
            counts[part.relative_to(whole.box).slices()] += 1
        check(bool((counts == 1).all()), f"{told}: holes or overlaps")
    blocks = int((-(-result.length // DIGEST_BLOCK)).sum())
    check(
        len(result.digests) == blocks,
        f"{len(result.digests)} digests for pieces of {blocks} blocks of {DIGEST_BLOCK}",
    )
    beyond = (result.file < 0) | (result.file >= len(result.files))
    check(
        not beyond.any(),
        f"pieces are in files {set(result.file.tolist())} of {list(result.files)}",
    )


def summary(manifest: Manifest) -> dict[str, tuple[TensorMeta, set[Box]]]:
    return {
        entry.key: (entry.meta, {chunk.box for chunk in manifest.chunks_of(entry.key)})
        for entry in manifest.tensors
    }


@contextmanager
def replaced(path: Path, content: bytes | None) -> Iterator[None]:
    """Another content of a file, or none, for a while."""
    whole = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    yield
    path.write_bytes(whole)
