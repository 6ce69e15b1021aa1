"""The laws of a format as tests, for whoever writes one; and small worlds of ranks to try them on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megackpt.backends.base import Backend, plan_in_format
from megackpt.checkpoint import INDEX
from megackpt.errors import BackendError, CorruptCheckpoint
from megackpt.planning.box import Box
from megackpt.planning.load_plan import plan_load
from megackpt.planning.manifest import (
    COMMON_KEY,
    DIGEST_BLOCK,
    ITEMSIZE,
    OBJECT,
    Declaration,
    Declarations,
    Manifest,
    SavePlan,
    ShardId,
    TensorMeta,
)
from megackpt.planning.save_plan import SavePolicy
from megackpt.runtime.storage import LocalStorage

Blobs = Mapping[tuple[int, ...], bytes]
_CARRIED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


@dataclass(frozen=True, eq=False)
class Whole:
    """A tensor of an invented world: all its elements, and the shape of the shards that ranks hold."""

    dtype: str
    values: NDArray[Any]
    shard: tuple[int, ...]

    @classmethod
    def random(cls, dtype: str, shape: Sequence[int], shard: Sequence[int], seed: int = 0) -> Whole:
        """Any bits at all: a format keeps them, whatever they mean (a bool is 0 or 1)."""
        bits = np.random.default_rng(seed).integers(
            0, 2 if dtype == "bool" else 256, (*shape, ITEMSIZE[dtype]), np.uint8
        )
        return cls(dtype, bits.view(_CARRIED[ITEMSIZE[dtype]]).reshape(shape), tuple(shard))

    def boxes(self) -> Iterator[Box]:
        if not self.values.size:
            yield Box.whole(self.values.shape)
            return
        counts = [-(-n // s) for n, s in zip(self.values.shape, self.shard, strict=True)]
        for index in np.ndindex(*counts):
            offset = tuple(i * s for i, s in zip(index, self.shard, strict=True))
            ends = zip(self.shard, self.values.shape, offset, strict=True)
            yield Box(offset, tuple(min(s, n - o) for s, n, o in ends))


@dataclass(frozen=True)
class World:
    """What some ranks hold together: tensors, objects (offset -> blob), common state."""

    tensors: Mapping[str, Whole] = field(default_factory=dict)
    objects: Mapping[str, Blobs] = field(default_factory=dict)
    common: bytes | None = None

    def meta(self, key: str) -> TensorMeta:
        if key in self.tensors:
            return TensorMeta(self.tensors[key].values.shape, self.tensors[key].dtype)
        last = max(self.objects.get(key, {(): b""}))
        return TensorMeta(tuple(n + 1 for n in last), OBJECT)

    def shards(self) -> Iterator[ShardId]:
        for key, whole in self.tensors.items():
            yield from (ShardId(key, box) for box in whole.boxes())
        for key, blobs in self.objects.items():
            yield from (ShardId(key, Box(offset, (1,) * len(offset))) for offset in blobs)
        if self.common is not None:
            yield ShardId(COMMON_KEY, Box((), ()))

    def declared(self, shards: Sequence[ShardId], rank: int = 0) -> Declarations:
        return Declarations.of(
            [
                Declaration(s, self.meta(s.key), 0, False, s.box.volume * self.meta(s.key).itemsize, rank)
                for s in shards
            ]
        )

    def blob(self, key: str, offset: tuple[int, ...]) -> bytes:
        return (self.common or b"") if key == COMMON_KEY else self.objects[key][offset]


@dataclass(frozen=True, eq=False)
class MemorySource:
    """The Source of a plan's rows, cut out of a World."""

    world: World
    plan: SavePlan

    def blocks(self, row: int) -> Iterator[memoryview]:
        item = self.plan.row(row)
        if item.meta.is_object:
            data = memoryview(self.world.blob(item.shard.key, item.shard.box.offset))
        else:
            data = memoryview(self.array(row).tobytes())
        for start in range(0, len(data), DIGEST_BLOCK):
            yield data[start : start + DIGEST_BLOCK]

    def array(self, row: int) -> NDArray[Any]:
        item = self.plan.row(row)
        return self.world.tensors[item.shard.key].values[item.shard.box.slices()]


@dataclass(frozen=True, eq=False)
class MemoryTarget:
    """A Target of arrays, one for each wanted row: every second element of a wider one, so strided."""

    wanted: Declarations
    arrays: dict[int, NDArray[Any]] = field(default_factory=dict)
    blobs: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, wanted: Declarations) -> MemoryTarget:
        target = cls(wanted)
        for i, row in enumerate(wanted.rows()):
            if not row.meta.is_object:
                shape = (*row.shard.box.shape, 2)
                target.arrays[i] = np.zeros(shape, _CARRIED[row.meta.itemsize])[..., 0]
        return target

    def open(self, target: int, box: Box) -> NDArray[Any]:
        place: tuple[Any, ...] = box.relative_to(self.wanted.row(target).shard.box).slices()
        return self.arrays[target][(*place, ...)]  # with "..." a view even of no dimensions

    def close(self, target: int, box: Box, filled: NDArray[Any]) -> None:
        """Nothing to do: the array is the place itself."""

    def blob(self, target: int, data: bytes) -> None:
        self.blobs[target] = bytes(data)


def _check(truth: bool, told: str) -> None:
    """pytest explains asserts in test files only, so this suite says itself what is wrong."""
    if not truth:
        raise AssertionError(told)


class BackendSuite:
    """The laws of a format as a pytest class, for the authors of backends.

    ::

        class TestMine(BackendSuite):
            backend = MyBackend()

    ``dtypes`` are those that the format can hold; it must refuse the others with BackendError before it
    writes. ``objects``: False for formats of tensors only. The files are real, below ``tmp_path``.
    """

    backend: ClassVar[Backend]
    dtypes: ClassVar[Collection[str]] = tuple(d for d in ITEMSIZE if d != OBJECT)
    objects: ClassVar[bool] = True

    def save(self, folder: Path, world: World, ranks: int = 1) -> tuple[LocalStorage, Manifest]:
        """Save a world whose shards so many ranks hold in turn; returns where, and the located manifest."""
        root = LocalStorage(folder, create=True)
        shards = list(world.shards())
        parts = [world.declared(shards[rank::ranks], rank) for rank in range(ranks)]
        plans, manifest = plan_in_format(self.backend, parts, SavePolicy())
        announced = set(self.backend.files(ranks, manifest))
        results = [
            self.backend.write(LocalStorage(folder), plan, MemorySource(world, plan)) for plan in plans
        ]
        manifest = replace(
            manifest.located(results), backend=(self.backend.name, self.backend.version), save_id="0" * 32
        )
        manifest = self._put(root, manifest)
        unannounced = set(root.list()) - announced
        _check(not unannounced, f"files() did not announce {sorted(unannounced)}")
        return root, manifest

    def _put(self, root: LocalStorage, manifest: Manifest) -> Manifest:
        # Not asked before each file: a format may also know checkpoints of others, which lack our last file.
        _check(not self.backend.recognises(root), "recognises data without a table of contents")
        finished = self.backend.finish(root, manifest)
        last = [*finished.files, *([] if finished.files else [INDEX])][-1]
        _check(last == self.backend.last_file, f"finish ends with {last}, not last_file")
        for name, data in finished.files.items():
            root.put(name, data)
        _check(self.backend.recognises(root), "does not recognise its own complete checkpoint")
        return finished.manifest

    def load(
        self, root: LocalStorage, manifest: Manifest, wanted: Declarations, verify: bool = True
    ) -> MemoryTarget:
        target = MemoryTarget.of(wanted)
        self.backend.read(root, plan_load(wanted, manifest), target, verify)
        return target

    def expect(self, world: World, target: MemoryTarget) -> None:
        """What was read is what the world holds, bit for bit."""
        for i, row in enumerate(target.wanted.rows()):
            if row.meta.is_object:
                expected = world.blob(row.shard.key, row.shard.box.offset)
                _check(target.blobs.get(i) == expected, f"the blob of {row.shard} differs")
            else:
                held = world.tensors[row.shard.key].values[row.shard.box.slices()]
                same = target.arrays[i].tobytes() == held.tobytes()
                _check(same, f"{row.shard} ({row.meta.dtype}) differs")

    def world(self) -> World:
        """A little of everything that the format holds."""
        dtype = "float32" if "float32" in self.dtypes else next(iter(self.dtypes))
        tensors = {
            "one.dimension": Whole.random(dtype, (1000,), (250,), 1),
            "rows.cut": Whole.random(dtype, (10, 6), (4, 6), 2),
            "columns.cut": Whole.random(dtype, (6, 10), (6, 4), 3),
            "both.cut": Whole.random(dtype, (3, 7, 11), (1, 4, 3), 4),
            "large": Whole.random(dtype, (3, 1 << 18), (1, 1 << 18), 5),
            "scalar": Whole.random(dtype, (), (), 6),
        }
        if not self.objects:
            return World(tensors)
        blobs: Blobs = {(i, j): bytes([i, j]) * (1 + 3 * i) for i in range(2) for j in range(3)}
        return World(tensors, {"an.object": blobs, "large.object": {(0,): b"ab" * DIGEST_BLOCK}}, b"common")

    # -- the laws

    def test_every_dtype_comes_back_bit_for_bit(self, tmp_path: Path) -> None:
        world = World({f"t.{d}": Whole.random(d, (5, 6), (2, 6), i) for i, d in enumerate(self.dtypes)})
        root, manifest = self.save(tmp_path / "c", world, ranks=3)
        for verify in (True, False):
            wanted = world.declared([ShardId(key, Box.whole((5, 6))) for key in world.tensors])
            self.expect(world, self.load(root, manifest, wanted, verify))

    def test_other_dtypes_are_refused_before_anything_is_written(self, tmp_path: Path) -> None:
        for i, dtype in enumerate(set(ITEMSIZE) - {OBJECT} - set(self.dtypes)):
            world = World({"odd": Whole.random(dtype, (4,), (2,))})
            try:
                self.save(tmp_path / str(i), world)
            except BackendError as error:
                _check("odd" in str(error), f"the error does not name the tensor: {error}")
                _check(not LocalStorage(tmp_path / str(i)).list(), "something was written all the same")
            else:
                raise AssertionError(f"a tensor of {dtype} was taken")

    def test_shards_come_back_to_the_ranks_that_saved_them(self, tmp_path: Path) -> None:
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world, ranks=4)
        shards = list(world.shards())
        for rank in range(4):
            self.expect(world, self.load(root, manifest, world.declared(shards[rank::4], rank)))

    def test_any_box_can_be_read(self, tmp_path: Path) -> None:
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world, ranks=3)
        rng = np.random.default_rng(0)
        for verify in (True, False):
            boxes = []
            for key, whole in list(world.tensors.items()) * 10:
                ends = [sorted(rng.integers(0, n + 1, 2).tolist()) for n in whole.values.shape]
                boxes.append(ShardId(key, Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))))
            self.expect(world, self.load(root, manifest, world.declared(boxes), verify))

    def test_objects_and_common_state(self, tmp_path: Path) -> None:
        if not self.objects:
            return
        blobs: dict[str, Blobs] = {
            "single": {(): b"alone"},
            "grid": {(i, j): b"x" * (i + j) for i in range(4) for j in range(2)},
        }
        world = World({}, blobs, b"the common state")
        root, manifest = self.save(tmp_path / "c", world, ranks=2)
        self.expect(world, self.load(root, manifest, world.declared(list(world.shards()))))

    def test_scalars_and_empty_tensors(self, tmp_path: Path) -> None:
        dtype = next(iter(self.dtypes))
        shapes: list[tuple[int, ...]] = [(), (0,), (4, 0), (0, 4), (1,), (1, 1, 1)]
        world = World({str(shape): Whole.random(dtype, shape, shape) for shape in shapes})
        root, manifest = self.save(tmp_path / "c", world)
        for found in (manifest, self.backend.read_manifest(root)):
            _check({e.key for e in found.tensors} == set(world.tensors), "an empty tensor was lost")
            self.expect(world, self.load(root, found, world.declared(list(world.shards()))))

    def test_keys_may_be_any_text(self, tmp_path: Path) -> None:
        dtype = next(iter(self.dtypes))
        keys = [
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
        ]
        keys += [
            "common.pt",
            "zarr.json",
            "metadata.json",
            "x.objects",
            "x.__lock",
            "n" * 300,
            "n" * 299 + "m",
        ]
        world = World({k: Whole.random(dtype, (3,), (3,), i) for i, k in enumerate(keys)})
        if self.objects:
            world = replace(world, objects={key + "o": {(0,): key.encode()} for key in keys})
        root, manifest = self.save(tmp_path / "c", world)
        for found in (manifest, self.backend.read_manifest(root)):
            self.expect(world, self.load(root, found, world.declared(list(world.shards()))))

    def test_a_flipped_bit_is_caught_and_named(self, tmp_path: Path) -> None:
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world, ranks=2)
        rows = manifest.chunks.block_bounds[-1]
        _check(len(manifest.chunks.digests) == rows, f"{len(manifest.chunks.digests)} digests, {rows} blocks")
        for i in range(len(manifest.chunks)):
            chunk, key = manifest.chunk(i), manifest.tensors[manifest.chunks.tensor[i]].key
            if not chunk.location.length:
                continue
            where = tmp_path / "c" / chunk.location.file
            wanted = world.declared([ShardId(key, chunk.box)])
            with _flipped(where, chunk.location.start):
                try:
                    self.load(root, manifest, wanted)
                except CorruptCheckpoint as error:
                    _check(key in str(error), f"the error does not name {key!r}: {error}")
                else:
                    raise AssertionError(f"a flipped bit in {key!r} {chunk.box} went unnoticed")
            self.expect(world, self.load(root, manifest, wanted))

    def test_lost_and_cut_files_are_corrupt(self, tmp_path: Path) -> None:
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world)
        wanted = world.declared(list(world.shards()))
        for name in {manifest.files[f] for f in manifest.chunks.file}:
            path = tmp_path / "c" / name
            whole = path.read_bytes()
            for remains in (None, whole[: len(whole) // 4]):
                path.unlink()
                if remains is not None:
                    path.write_bytes(remains)
                for verify in (True, False):
                    try:
                        self.load(root, manifest, wanted, verify)
                    except CorruptCheckpoint as error:
                        _check(name in str(error), f"the error does not name {name}: {error}")
                    else:
                        raise AssertionError(f"{name} was lost or cut and nobody noticed")
                path.write_bytes(whole)

    def test_its_own_account_agrees_with_the_manifest(self, tmp_path: Path) -> None:
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world, ranks=3)
        found = self.backend.read_manifest(root)
        _check(_summary(found) == _summary(manifest), "read_manifest tells of other chunks than were saved")
        _check(found.backend == manifest.backend, f"read_manifest calls itself {found.backend}")
        self.expect(world, self.load(root, found, world.declared(list(world.shards()))))

    def test_an_empty_directory_is_not_recognised(self, tmp_path: Path) -> None:
        _check(not self.backend.recognises(LocalStorage(tmp_path)), "recognises an empty directory")
        (tmp_path / self.backend.last_file).write_bytes(b"\x80 no such thing")
        _check(not self.backend.recognises(LocalStorage(tmp_path)), "recognises garbage")

    def test_an_instance_serves_many_saves(self, tmp_path: Path) -> None:
        world = self.world()
        for name in ("first", "second"):
            root, manifest = self.save(tmp_path / name, world, ranks=2)
            self.expect(world, self.load(root, manifest, world.declared(list(world.shards()))))


@contextmanager
def _flipped(path: Path, position: int) -> Iterator[None]:
    """One bit of a file the other way round, for a while."""
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[position] ^= 4
    path.write_bytes(damaged)
    yield
    path.write_bytes(whole)


def _summary(manifest: Manifest) -> dict[str, tuple[TensorMeta, set[Box]]]:
    return {
        entry.key: (entry.meta, {chunk.box for chunk in manifest.chunks_of(entry.key)})
        for entry in manifest.tensors
    }
