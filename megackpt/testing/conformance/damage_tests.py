"""Conformance tests of damage: lost, cut or changed files raise an error that says where."""

from __future__ import annotations

from pathlib import Path

from megackpt.errors import CheckpointingException, CorruptCheckpoint
from megackpt.planning.manifest import Declarations, Manifest, ShardId
from megackpt.storage import LocalStorage
from megackpt.testing.conformance.harness import Harness, check, replaced


class DamageTests(Harness):
    def test_a_flipped_bit_is_found_and_named(self, tmp_path: Path) -> None:
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world, ranks=2)
        digests, blocks = len(manifest.chunks.digests), manifest.chunks.block_bounds[-1]
        check(digests == blocks, f"{digests} digests, {blocks} blocks")
        for i, number in enumerate(manifest.chunks.tensor.tolist()):
            chunk, key = manifest.chunk(i), manifest.tensors[number].key
            if not chunk.location.length:
                continue
            path = tmp_path / "c" / chunk.location.file
            damaged = _flip(path.read_bytes(), chunk.location.start)
            wanted = world.declared([ShardId(key, chunk.box)])
            with replaced(path, damaged):
                self._expect_corrupt(root, manifest, wanted, key)
            self.expect(world, self.load(root, manifest, wanted))

    def test_lost_and_cut_files_are_corrupt(self, tmp_path: Path) -> None:
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world)
        wanted = world.declared_all()
        for name in {manifest.files[number] for number in manifest.chunks.file}:
            path = tmp_path / "c" / name
            whole = path.read_bytes()
            for content in (None, whole[: len(whole) // 4]):
                with replaced(path, content):
                    for verify in (True, False):
                        self._expect_corrupt(root, manifest, wanted, name, verify)

    def test_a_damaged_table_of_contents(self, tmp_path: Path) -> None:
        """Whatever its files contain: a CheckpointingException, or a manifest that can be read."""
        world = self.small_world()
        root, manifest = self.save(tmp_path / "c", world)
        for name in sorted(self.backend.finish(root, manifest).files):
            path = tmp_path / "c" / name
            whole = path.read_bytes()
            contents = [None, b"null", b"[]", b"{}", b"[" * 100_000]
            step = max(1, len(whole) // 60)
            contents += [_flip(whole, start) for start in range(0, len(whole), step)]
            contents += [whole[: len(whole) * part // 8] for part in range(8)]
            for content in contents:
                with replaced(path, content):
                    try:
                        found = self.backend.read_manifest(root)
                        self.load(root, found, world.declared_all())
                    except CheckpointingException:
                        continue
                    except Exception as error:
                        start = content and content[:80]
                        raise AssertionError(
                            f"{name} with the content {start!r}... raised {error!r}, "
                            "which is not a CheckpointingException"
                        ) from error

    def _expect_corrupt(
        self,
        root: LocalStorage,
        manifest: Manifest,
        wanted: Declarations,
        name: str,
        verify: bool = True,
    ) -> None:
        try:
            self.load(root, manifest, wanted, verify)
        except CorruptCheckpoint as error:
            named = name in str(error)
            check(named, f"the error does not name {name!r}: {error}")
        else:
            raise AssertionError(f"the damage of {name!r} was not noticed")


def _flip(data: bytes, position: int) -> bytes:
    damaged = bytearray(data)
    damaged[position] ^= 4
    return bytes(damaged)
