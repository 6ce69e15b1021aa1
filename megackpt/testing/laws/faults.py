"""Laws of damage: what was lost, cut or changed on the disk is a CheckpointingException that says where, never data."""

from __future__ import annotations

from pathlib import Path

from megackpt.errors import CheckpointingException, CorruptCheckpoint
from megackpt.planning.manifest import ShardId
from megackpt.testing.laws.harness import Harness, check, replaced


class FaultLaws(Harness):
    def test_a_flipped_bit_is_caught_and_named(self, tmp_path: Path) -> None:
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world, ranks=2)
        rows = manifest.chunks.block_bounds[-1]
        check(
            len(manifest.chunks.digests) == rows,
            f"{len(manifest.chunks.digests)} digests, {rows} blocks",
        )
        for i in range(len(manifest.chunks)):
            chunk, key = (
                manifest.chunk(i),
                manifest.tensors[manifest.chunks.tensor[i]].key,
            )
            if not chunk.location.length:
                continue
            where = tmp_path / "c" / chunk.location.file
            wanted = world.declared([ShardId(key, chunk.box)])
            with replaced(where, _flipped(where.read_bytes(), chunk.location.start)):
                try:
                    self.load(root, manifest, wanted)
                except CorruptCheckpoint as error:
                    check(
                        key in str(error), f"the error does not name {key!r}: {error}"
                    )
                else:
                    raise AssertionError(
                        f"a flipped bit in {key!r} {chunk.box} went unnoticed"
                    )
            self.expect(world, self.load(root, manifest, wanted))

    def test_lost_and_cut_files_are_corrupt(self, tmp_path: Path) -> None:
        world = self.world()
        root, manifest = self.save(tmp_path / "c", world)
        wanted = world.declared(list(world.shards()))
        for name in {manifest.files[f] for f in manifest.chunks.file}:
            path = tmp_path / "c" / name
            whole = path.read_bytes()
            for remains in (None, whole[: len(whole) // 4]):
                with replaced(path, remains):
                    for verify in (True, False):
                        try:
                            self.load(root, manifest, wanted, verify)
                        except CorruptCheckpoint as error:
                            check(
                                name in str(error),
                                f"the error does not name {name}: {error}",
                            )
                        else:
                            raise AssertionError(
                                f"{name} was lost or cut and nobody noticed"
                            )

    def test_a_damaged_table_of_contents_is_an_error_of_ours(
        self, tmp_path: Path
    ) -> None:
        """Whatever stands in the format's own files: a clear error, or an account that can be planned with."""
        world = self.small_world()
        root, manifest = self.save(tmp_path / "c", world)
        wanted = world.declared(list(world.shards()))
        for name in sorted(self.backend.finish(root, manifest).files):
            path = tmp_path / "c" / name
            whole = path.read_bytes()
            step = max(1, len(whole) // 60)
            damaged = [
                _flipped(whole, position) for position in range(0, len(whole), step)
            ]
            damaged += [whole[: len(whole) * part // 8] for part in range(8)]
            for content in (None, b"null", b"[]", b"{}", b"[" * 100_000, *damaged):
                with replaced(path, content):
                    try:
                        self.load(root, self.backend.read_manifest(root), wanted)
                    except CheckpointingException:
                        continue
                    except Exception as error:
                        raise AssertionError(
                            f"{name} damaged, as {content and content[:80]!r}...: {error!r}, no error of ours"
                        ) from error


def _flipped(data: bytes, position: int) -> bytes:
    damaged = bytearray(data)
    damaged[position] ^= 4
    return bytes(damaged)
