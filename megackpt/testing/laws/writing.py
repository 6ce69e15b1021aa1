"""Laws of saving: what a format takes it keeps, bit for bit; what it cannot keep it refuses; no more is touched."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier

from megackpt.errors import BackendError
from megackpt.planning.box import Box
from megackpt.planning.manifest import ITEMSIZE, OBJECT, Manifest
from megackpt.storage import LocalStorage
from megackpt.testing.laws.harness import Harness, check, summary
from megackpt.testing.watched import WatchedStorage
from megackpt.testing.worlds import Blobs, MemorySource, Whole, World

KEYS = (
    *(
        "a/b",
        "a//b",
        "/",
        "..",
        ".hidden",
        "__x",
        "%41",
        "A",
        "a",
        "ключ",
        "sp ace",
        "nul\0",
        "",
        "c",
        "line\n",
    ),
    *(
        "common.pt",
        "zarr.json",
        "metadata.json",
        "x.objects",
        "x.__lock",
        "__metadata__",
        "megackpt.index",
    ),
    *("n" * 300, "n" * 299 + "m", "\ud800"),
)
"""What people, or their model's code, may call a tensor."""


class WritingLaws(Harness):
    def test_every_dtype_comes_back_bit_for_bit(self, tmp_path: Path) -> None:
        world = World(
            {
                f"t.{d}": Whole.random(d, (5, 6), (2, 6), i)
                for i, d in enumerate(self.dtypes)
            }
        )
        self.expect_all(world, *self.save(tmp_path / "c", world, ranks=3))

    def test_other_dtypes_are_refused_before_anything_is_written(
        self, tmp_path: Path
    ) -> None:
        for i, dtype in enumerate(set(ITEMSIZE) - {OBJECT} - set(self.dtypes)):
            self._expect_refusal(
                tmp_path / str(i),
                World({"odd": Whole.random(dtype, (4,), (2,))}),
                "odd",
            )

    def test_scalars_and_empty_tensors(self, tmp_path: Path) -> None:
        shapes: list[tuple[int, ...]] = [(), (0,), (4, 0), (0, 4), (1,), (1, 1, 1)]
        world = World(
            {str(shape): Whole.random(self.dtype, shape, shape) for shape in shapes}
        )
        root, manifest = self.save(tmp_path / "c", world)
        for found in (manifest, self.backend.read_manifest(root)):
            check(
                {e.key for e in found.tensors} == set(world.tensors),
                "an empty tensor was lost",
            )
            self.expect_all(world, root, found)

    def test_objects_and_common_state(self, tmp_path: Path) -> None:
        if not self.objects:
            return
        blobs: dict[str, Blobs] = {
            "single": {(): b"alone"},
            "grid": {(i, j): b"x" * (i + j) for i in range(4) for j in range(2)},
        }
        world = World({}, blobs, b"the common state")
        self.expect_all(world, *self.save(tmp_path / "c", world, ranks=2))

    def test_keys_may_be_any_text(self, tmp_path: Path) -> None:
        keys = [key for key in KEYS if key not in self.unfit_keys]
        world = World(
            {k: Whole.random(self.dtype, (3,), (3,), i) for i, k in enumerate(keys)}
        )
        if self.objects:
            world = replace(
                world, objects={key + "o": {(0,): repr(key).encode()} for key in keys}
            )
        root, manifest = self.save(tmp_path / "c", world)
        for found in (manifest, self.backend.read_manifest(root)):
            self.expect_all(world, root, found)

    def test_unfit_keys_are_refused_before_anything_is_written(
        self, tmp_path: Path
    ) -> None:
        for i, key in enumerate(self.unfit_keys):
            self._expect_refusal(
                tmp_path / str(i),
                World({key: Whole.random(self.dtype, (4,), (2,))}),
                key,
            )

    def test_irregular_shards(self, tmp_path: Path) -> None:
        """Shards that form no grid, as flat buckets of optimizer state do not."""
        buckets = [
            Box((start,), (end - start,))
            for start, end in ((0, 17), (17, 400), (400, 401), (401, 1000))
        ]
        tiles = [Box((0, 0), (6, 2)), Box((0, 2), (2, 4)), Box((2, 2), (4, 4))]
        rows = [Box((0, 0), (3, 5)), Box((3, 0), (7, 5))]
        world = World(
            {
                "buckets": Whole.random(self.dtype, (1000,), (1000,)).cut(*buckets),
                "tiles": Whole.random(self.dtype, (6, 6), (6, 6)).cut(*tiles),
                "rows": Whole.random(self.dtype, (10, 5), (10, 5)).cut(*rows),
            }
        )
        try:
            root, manifest = self.save(tmp_path / "c", world, ranks=3)
        except BackendError as error:
            check(not self.irregular, f"irregular shards are refused: {error}")
            check(
                "buckets" in str(error), f"the error does not name the tensor: {error}"
            )
            return
        for found in (manifest, self.backend.read_manifest(root)):
            self.expect_all(world, root, found)

    def test_ranks_without_shards_and_states_without_tensors(
        self, tmp_path: Path
    ) -> None:
        worlds = [World({"only": Whole.random(self.dtype, (4,), (4,))})]
        if self.objects:
            worlds.append(World(common=b"nothing else"))
        for i, world in enumerate(worlds):
            root, manifest = self.save(tmp_path / str(i), world, ranks=3)
            check(
                summary(self.backend.read_manifest(root)) == summary(manifest),
                "read_manifest tells of others",
            )
            self.expect_all(world, root, manifest)

    def test_what_is_written_is_durable(self, tmp_path: Path) -> None:
        """When write returns, its files and their names in their folders would survive a power cut."""
        world = self.world()
        root = WatchedStorage(tmp_path / "c", create=True)
        plans, _ = self.planned(world, 2)
        for plan in plans:
            self.backend.write(root, plan, MemorySource(world, plan))
            lost = list(root.lost())
            check(
                not lost,
                f"write returned, and {lost} are not durable: close what storage.create gives, or sync the folders",
            )

    def test_an_error_of_the_model_ends_the_write(self, tmp_path: Path) -> None:
        """A tensor that cannot be fetched must not become a checkpoint that looks complete."""
        world = self.world()
        root = LocalStorage(tmp_path / "c", create=True)
        for plan in self.planned(world, 1)[0]:
            try:
                self.backend.write(root, plan, _Failing(world, plan, len(plan) // 2))
            except _Lost:
                check(
                    not self.backend.recognises(root),
                    "recognises what a failed write left",
                )
            else:
                raise AssertionError(
                    "the data could not be fetched, and write returned all the same"
                )

    def test_entries_of_others_are_left_alone(self, tmp_path: Path) -> None:
        notes = {
            "notes.txt": b"mine",
            "logs/today": b"more",
            "tokenizer.json": b"{}",
            "logs/deep/er": b"",
        }
        for name, content in notes.items():
            (tmp_path / "c" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "c" / name).write_bytes(content)
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world, ranks=2)
        changed = [
            name
            for name, content in notes.items()
            if (tmp_path / "c" / name).read_bytes() != content
        ]
        check(not changed, f"the save changed {changed}, which are not its own")
        check(
            summary(self.backend.read_manifest(root)) == summary(manifest),
            "read_manifest takes them for its own",
        )

    def test_an_instance_serves_many_saves(self, tmp_path: Path) -> None:
        """One after the other and at once: an instance holds options, and nothing of a save."""
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
            check(
                key in str(error) or repr(key) in str(error),
                f"the error does not name {key!r}: {error}",
            )
            check(not LocalStorage(folder).list(), "something was written all the same")
        else:
            raise AssertionError(
                f"{key!r} of {world.meta(key)} was taken: add it to dtypes, or refuse it in files()"
            )


class _Lost(Exception):
    """The model cannot give its data."""


@dataclass(frozen=True, eq=False)
class _Failing(MemorySource):
    row: int

    def blocks(self, row: int) -> Iterator[memoryview]:
        if row == self.row:
            raise _Lost
        return super().blocks(row)
