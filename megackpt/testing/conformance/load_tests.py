"""Conformance tests of loading: any region can be read, by threads, at the cost of its size."""

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
from megackpt.testing.conformance.harness import Harness, check, summary
from megackpt.testing.fixtures import World
from megackpt.testing.tracing import WatchedStorage


class LoadTests(Harness):
    def test_each_rank_reads_its_shards(self, tmp_path: Path) -> None:
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world, ranks=4)
        shards = list(world.shards())
        for rank in range(4):
            wanted = world.declared(shards[rank::4], rank)
            self.expect(world, self.load(root, manifest, wanted))
        self.load(root, manifest, world.declared([]))  # a rank without requests

    def test_any_box_can_be_read(self, tmp_path: Path) -> None:
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world, ranks=3)
        random = np.random.default_rng(0)
        for verify in (True, False):
            boxes = []
            for key, whole in list(world.tensors.items()) * 10:
                offset, shape = [], []
                for extent in whole.values.shape:
                    low, high = sorted(random.integers(0, extent + 1, 2).tolist())
                    offset.append(low)
                    shape.append(high - low)
                boxes.append(ShardId(key, Box(tuple(offset), tuple(shape))))
            self.expect(world, self.load(root, manifest, world.declared(boxes), verify))

    def test_many_small_boxes(self, tmp_path: Path) -> None:
        """Every element alone, and the whole tensor."""
        world = World({"w": self.random(24, 24, shard=(8, 6))})
        root, manifest = self.save(tmp_path / "c", world, ranks=2)
        boxes = [Box(offset, (1, 1)) for offset in np.ndindex(24, 24)]
        boxes.append(Box.whole((24, 24)))
        wanted = world.declared([ShardId("w", box) for box in boxes])
        for verify in (True, False):
            self.expect(world, self.load(root, manifest, wanted, verify))

    def test_a_thin_slice_reads_few_bytes(self, tmp_path: Path) -> None:
        """Only of chunks that are stored raw, and without digests, which need whole blocks."""
        world = World({"w": self.random(64, 1 << 15)})
        _, manifest = self.save(tmp_path / "c", world)
        if self.backend.decoded_bytes(manifest).any():
            return
        root = WatchedStorage(tmp_path / "c")
        wanted = world.declared([ShardId("w", Box((7, 0), (1, 1 << 15)))])
        self.expect(world, self.load(root, manifest, wanted, False))
        stored = int(manifest.chunks.length.sum())
        few = root.read <= stored // 8
        check(few, f"{root.read} of {stored} bytes were read for a 64th of them")

    def test_many_loads_at_once(self, tmp_path: Path) -> None:
        """One instance and one storage serve several threads."""
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world, ranks=2)
        with ThreadPoolExecutor(4) as pool:
            loads = [
                pool.submit(self.expect_all, world, root, manifest) for _ in range(8)
            ]
        for load in loads:
            load.result()

    def test_read_manifest_agrees_with_the_save(self, tmp_path: Path) -> None:
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world, ranks=3)
        found = self.backend.read_manifest(root)
        same = summary(found) == summary(manifest)
        check(same, "read_manifest lists other chunks than were saved")
        named = found.backend == manifest.backend
        check(named, f"read_manifest names the format {found.backend}")
        lost = set()
        for path in (tmp_path / "c").rglob("*"):
            name = path.relative_to(tmp_path / "c").as_posix()
            if path.is_file() and name not in (*found.files, *found.tables, CONFIG):
                lost.add(name)
        check(not lost, f"read_manifest does not list {lost} in files or tables")
        self.expect_all(world, root, found)

    def test_other_instances_read_it(self, tmp_path: Path) -> None:
        """A load makes the backend without options; workers get copies of it."""
        kind = type(self.backend)
        version, reads = kind.properties.version, kind.properties.reads
        check(version in reads, f"it writes version {version} and reads {reads}")
        world = self.small_world()
        root, manifest = self.save(tmp_path / "c", world)
        copied = pickle.loads(pickle.dumps(self.backend))
        for other in (kind(), copy.deepcopy(self.backend), copied):
            recognised = other.recognises(root)
            check(recognised, f"{other!r} does not recognise its checkpoint")
            for found in (manifest, other.read_manifest(root)):
                wanted = world.declared_all()
                self.expect(world, self.load(root, found, wanted, backend=other))

    def test_raw_chunks_are_raw(self, tmp_path: Path) -> None:
        """Verify and convert read the bytes at these locations without the backend."""
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world, ranks=2)
        for found in (manifest, self.backend.read_manifest(root)):
            decoded = self.backend.decoded_bytes(found)
            count = len(found.chunks)
            right = decoded.shape == (count,) and bool((decoded >= 0).all())
            check(right, f"decoded_bytes: not {count} sizes, but {decoded}")
            for i in np.flatnonzero(decoded == 0).tolist():
                chunk = found.chunk(i)
                key, _ = found.tensors[found.chunks.tensor[i]]
                data = bytearray(chunk.location.length)
                with root.open(chunk.location.file) as reader:
                    reader.read_into(chunk.location.start, [memoryview(data)])
                if key in world.tensors:
                    values = world.tensors[key].values[chunk.box.slices()]
                    expected = values.tobytes()
                else:
                    expected = world.blob(key, chunk.box.offset)
                same = bytes(data) == expected
                check(same, f"{key!r} {chunk.box} is not at {chunk.location}")

    def test_an_empty_directory_is_not_recognised(self, tmp_path: Path) -> None:
        root = LocalStorage(tmp_path)
        check(not self.backend.recognises(root), "recognises an empty directory")
        (tmp_path / CONFIG).write_bytes(b"\x80 invalid")
        check(not self.backend.recognises(root), "recognises garbage")
