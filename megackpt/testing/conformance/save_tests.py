"""Conformance tests of saving: a format keeps accepted values bit for bit, and refuses the rest."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier

import numpy as np

from megackpt.errors import BackendError
from megackpt.planning.box import Box
from megackpt.planning.manifest import ITEMSIZE, OBJECT, Manifest
from megackpt.storage import LocalStorage
from megackpt.testing.conformance.harness import Harness, check, summary
from megackpt.testing.fixtures import Blobs, MemorySource, Whole, World
from megackpt.testing.tracing import WatchedStorage

KEYS = (
    *("a/b", "a//b", "/", "..", ".hidden", "__x", "%41", "A", "a", "ключ", "sp ace"),
    *("nul\0", "", "c", "line\n"),
    *("common.pt", "zarr.json", "metadata.json", "x.objects", "x.__lock", "__metadata__"),
    "megackpt.index",
    *("n" * 300, "n" * 299 + "m", "\ud800"),
)  # fmt: skip
"""Odd names of tensors that a format holds, or refuses."""


class SaveTests(Harness):
    def test_every_dtype_is_kept_bit_for_bit(self, tmp_path: Path) -> None:
        tensors = {}
        for seed, dtype in enumerate(self.dtypes):
            tensors[f"t.{dtype}"] = Whole.random(dtype, (5, 6), (2, 6), seed)
        world = World(tensors)
        self.expect_all(world, *self.save(tmp_path / "c", world, ranks=3))

    def test_other_dtypes_are_refused_before_anything_is_written(
        self, tmp_path: Path
    ) -> None:
        for dtype in set(ITEMSIZE) - {OBJECT, *self.dtypes}:
            world = World({"odd": Whole.random(dtype, (4,), (2,))})
            self._expect_refusal(tmp_path / dtype, world, "odd")

    def test_scalars_and_empty_tensors(self, tmp_path: Path) -> None:
        shapes: list[tuple[int, ...]] = [(), (0,), (4, 0), (0, 4), (1,), (1, 1, 1)]
        world = World({str(shape): self.random(*shape) for shape in shapes})
        root, manifest = self.save(tmp_path / "c", world)
        for found in (manifest, self.backend.read_manifest(root)):
            keys = {entry.key for entry in found.tensors}
            check(keys == set(world.tensors), "an empty tensor was lost")
            self.expect_all(world, root, found)

    def test_objects_and_common_state(self, tmp_path: Path) -> None:
        if not self.objects:
            return
        grid = {index: b"x" * sum(index) for index in np.ndindex(4, 2)}
        world = World({}, {"single": {(): b"alone"}, "grid": grid}, b"the common state")
        self.expect_all(world, *self.save(tmp_path / "c", world, ranks=2))

    def test_keys_may_be_any_text(self, tmp_path: Path) -> None:
        tensors: dict[str, Whole] = {}
        objects: dict[str, Blobs] = {}
        for seed, key in enumerate(KEYS):
            if key in self.unfit_keys:
                continue
            tensors[key] = self.random(3, seed=seed)
            if self.objects:
                objects[key + "o"] = {(0,): repr(key).encode()}
        world = World(tensors, objects)
        self.expect_both(world, *self.save(tmp_path / "c", world))

    def test_unfit_keys_are_refused_before_anything_is_written(
        self, tmp_path: Path
    ) -> None:
        for i, key in enumerate(self.unfit_keys):
            world = World({key: self.random(4, shard=(2,))})
            self._expect_refusal(tmp_path / str(i), world, key)

    def test_irregular_shards(self, tmp_path: Path) -> None:
        """Shards that form no grid, such as the flat buckets of optimizer states."""
        bounds = ((0, 17), (17, 400), (400, 401), (401, 1000))
        buckets = [Box((start,), (end - start,)) for start, end in bounds]
        tiles = [Box((0, 0), (6, 2)), Box((0, 2), (2, 4)), Box((2, 2), (4, 4))]
        rows = [Box((0, 0), (3, 5)), Box((3, 0), (7, 5))]
        world = World(
            {
                "buckets": self.random(1000).cut(*buckets),
                "tiles": self.random(6, 6).cut(*tiles),
                "rows": self.random(10, 5).cut(*rows),
            }
        )
        try:
            root, manifest = self.save(tmp_path / "c", world, ranks=3)
        except BackendError as error:
            check(not self.irregular, f"irregular shards are refused: {error}")
            named = "buckets" in str(error)
            check(named, f"the error does not name the tensor: {error}")
            return
        self.expect_both(world, root, manifest)

    def test_ranks_without_shards_and_states_without_tensors(
        self, tmp_path: Path
    ) -> None:
        worlds = [World({"only": self.random(4)})]
        if self.objects:
            worlds.append(World(common=b"nothing else"))
        for i, world in enumerate(worlds):
            root, manifest = self.save(tmp_path / str(i), world, ranks=3)
            found = self.backend.read_manifest(root)
            same = summary(found) == summary(manifest)
            check(same, "read_manifest lists others")
            self.expect_all(world, root, manifest)

    def test_written_files_are_durable(self, tmp_path: Path) -> None:
        """When write returns, its files and their names would survive a power failure."""
        world = self.world()
        root = WatchedStorage(tmp_path / "c", create=True)
        for plan in self.planned(world, 2)[0]:
            self.backend.write(root, plan, MemorySource(world, plan))
            lost = list(root.lost())
            check(
                not lost,
                f"write returned, and {lost} are not durable: "
                "close what storage.create returns, or sync the folders",
            )

    def test_an_error_of_the_source_ends_the_write(self, tmp_path: Path) -> None:
        """A tensor that cannot be read must not lead to a checkpoint that looks complete."""
        world = self.world()
        root = LocalStorage(tmp_path / "c", create=True)
        for plan in self.planned(world, 1)[0]:
            try:
                self.backend.write(root, plan, _Failing(world, plan, len(plan) // 2))
            except _Failure:
                recognised = self.backend.recognises(root)
                check(not recognised, "recognises the rest of a failed write")
            else:
                raise AssertionError("the source failed, and write returned")

    def test_other_files_are_left_alone(self, tmp_path: Path) -> None:
        files = {
            "notes.txt": b"mine",
            "logs/today": b"more",
            "tokenizer.json": b"{}",
            "logs/deep/er": b"",
        }
        for name, content in files.items():
            path = tmp_path / "c" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        root, manifest = self.save(tmp_path / "c", self.world(), ranks=2)
        for name, content in files.items():
            unchanged = (tmp_path / "c" / name).read_bytes() == content
            check(unchanged, f"the save changed {name}, which is not its own")
        found = self.backend.read_manifest(root)
        same = summary(found) == summary(manifest)
        check(same, "read_manifest takes other files for its own")

    def test_an_instance_serves_many_saves(self, tmp_path: Path) -> None:
        """One by one and at once: an instance holds options, and no state of a save."""
        worlds = [self.world(), self.small_world(), self.world()]
        for number, world in enumerate(worlds):
            self.expect_all(world, *self.save(tmp_path / f"{number}", world))

        start = Barrier(len(worlds))

        def save_at_once(number: int) -> tuple[LocalStorage, Manifest]:
            start.wait()
            return self.save(tmp_path / f"{number}-at-once", worlds[number])

        with ThreadPoolExecutor(len(worlds)) as pool:
            saved = list(pool.map(save_at_once, range(len(worlds))))
        for world, (root, manifest) in zip(worlds, saved, strict=True):
            self.expect_all(world, root, manifest)

    def _expect_refusal(self, folder: Path, world: World, key: str) -> None:
        try:
            self.save(folder, world)
        except BackendError as error:
            named = key in str(error) or repr(key) in str(error)
            check(named, f"the error does not name {key!r}: {error}")
            check(not LocalStorage(folder).list(), "something was written")
        else:
            raise AssertionError(
                f"{key!r} of {world.meta(key)} was accepted: "
                "add it to dtypes, or refuse it in layout()"
            )


class _Failure(Exception):
    """The source cannot read its data."""


@dataclass(frozen=True, eq=False)
class _Failing(MemorySource):
    row: int

    def blocks(self, row: int) -> Iterator[memoryview]:
        if row == self.row:
            raise _Failure
        return super().blocks(row)
