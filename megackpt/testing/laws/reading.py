"""Laws of loading: any part can be read, by any number at once, for little more than it weighs."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from megackpt.backends.base import CONFIG
from megackpt.planning.box import Box
from megackpt.planning.manifest import ShardId
from megackpt.storage import LocalStorage
from megackpt.testing.laws.harness import Harness, check, summary
from megackpt.testing.watched import WatchedStorage
from megackpt.testing.worlds import Whole, World


class ReadingLaws(Harness):
    def test_shards_come_back_to_the_ranks_that_saved_them(
        self, tmp_path: Path
    ) -> None:
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world, ranks=4)
        shards = list(world.shards())
        for rank in range(4):
            self.expect(
                world, self.load(root, manifest, world.declared(shards[rank::4], rank))
            )
        self.load(root, manifest, world.declared([]))  # a rank that asks for nothing

    def test_any_box_can_be_read(self, tmp_path: Path) -> None:
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world, ranks=3)
        rng = np.random.default_rng(0)
        for verify in (True, False):
            boxes = []
            for key, whole in list(world.tensors.items()) * 10:
                ends = [
                    sorted(rng.integers(0, n + 1, 2).tolist())
                    for n in whole.values.shape
                ]
                boxes.append(
                    ShardId(
                        key,
                        Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends)),
                    )
                )
            self.expect(world, self.load(root, manifest, world.declared(boxes), verify))

    def test_many_small_boxes(self, tmp_path: Path) -> None:
        """Every element by itself, and the whole beside them."""
        world = World({"w": Whole.random(self.dtype, (24, 24), (8, 6))})
        root, manifest = self.save(tmp_path / "c", world, ranks=2)
        boxes = [
            ShardId("w", Box((i, j), (1, 1))) for i in range(24) for j in range(24)
        ]
        wanted = world.declared([*boxes, ShardId("w", Box.whole((24, 24)))])
        for verify in (True, False):
            self.expect(world, self.load(root, manifest, wanted, verify))

    def test_thin_slices_are_cheap(self, tmp_path: Path) -> None:
        """Where chunks lie raw in files, a slice does not cost the whole. Digests need whole blocks, so: without."""
        world = World({"w": Whole.random(self.dtype, (64, 1 << 15), (64, 1 << 15))})
        _, manifest = self.save(tmp_path / "c", world)
        if not self.backend.raw_chunks(manifest).all():
            return
        root = WatchedStorage(tmp_path / "c")
        self.expect(
            world,
            self.load(
                root,
                manifest,
                world.declared([ShardId("w", Box((7, 0), (1, 1 << 15)))]),
                False,
            ),
        )
        stored = int(manifest.chunks.length.sum())
        check(
            root.read <= stored // 8,
            f"{root.read} of {stored} bytes were read for a 64th of them",
        )

    def test_many_loads_at_once(self, tmp_path: Path) -> None:
        """One instance and one storage serve several threads."""
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world, ranks=2)
        with ThreadPoolExecutor(4) as pool:
            loads = [
                pool.submit(self.expect_all, world, root, manifest) for _ in range(8)
            ]
        for one in loads:
            one.result()

    def test_its_own_account_agrees_with_the_manifest(self, tmp_path: Path) -> None:
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world, ranks=3)
        found = self.backend.read_manifest(root)
        check(
            summary(found) == summary(manifest),
            "read_manifest tells of other chunks than were saved",
        )
        check(
            found.backend == manifest.backend,
            f"read_manifest calls itself {found.backend}",
        )
        self.expect_all(world, root, found)

    def test_other_instances_read_it(self, tmp_path: Path) -> None:
        """A load makes the backend without options; workers get copies of it."""
        kind = type(self.backend)
        version, reads = kind.properties.version, kind.properties.reads
        check(version in reads, f"it writes version {version} and reads {reads}")
        world = self.small_world()
        root, manifest = self.save(tmp_path / "c", world)
        for other in (
            kind(),
            copy.deepcopy(self.backend),
            pickle.loads(pickle.dumps(self.backend)),
        ):
            check(
                other.recognises(root),
                f"{other!r} does not recognise what {self.backend!r} wrote",
            )
            for found in (manifest, other.read_manifest(root)):
                target = self.load(
                    root, found, world.declared(list(world.shards())), backend=other
                )
                self.expect(world, target)

    def test_raw_chunks_are_raw(self, tmp_path: Path) -> None:
        """Verifying and converting read the bytes at these locations without asking the format."""
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world, ranks=2)
        for found in (manifest, self.backend.read_manifest(root)):
            raw = self.backend.raw_chunks(found)
            check(
                raw.shape == (len(found.chunks),),
                f"raw_chunks tells of {raw.shape}, not of {len(found.chunks)}",
            )
            for i in np.flatnonzero(raw).tolist():
                chunk, key = found.chunk(i), found.tensors[found.chunks.tensor[i]].key
                data = bytearray(chunk.location.length)
                with root.open(chunk.location.file) as reader:
                    reader.read_into(chunk.location.start, [memoryview(data)])
                whole = world.tensors.get(key)
                blob = b"" if whole else world.blob(key, chunk.box.offset)
                expected = whole.values[chunk.box.slices()].tobytes() if whole else blob
                check(
                    bytes(data) == expected,
                    f"{key!r} {chunk.box} is not what lies at {chunk.location}",
                )

    def test_an_empty_directory_is_not_recognised(self, tmp_path: Path) -> None:
        check(
            not self.backend.recognises(LocalStorage(tmp_path)),
            "recognises an empty directory",
        )
        (tmp_path / CONFIG).write_bytes(b"\x80 no such thing")
        check(not self.backend.recognises(LocalStorage(tmp_path)), "recognises garbage")
