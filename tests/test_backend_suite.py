"""The conformance tests find wrong backends: one mistake each, and the test that must find it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from megackpt.backends.base import Finished, Layout
from megackpt.backends.torch_dist import TorchDist
from megackpt.errors import BackendError, CheckpointingException
from megackpt.planning.box import Boxes
from megackpt.testing import BackendSuite, WatchedStorage


class Wrapper:
    """Another object's attributes, but for those that a subclass has."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Unannounced(TorchDist):
    def layout(self, ranks, manifest):
        return Layout(super().layout(ranks, manifest).files[1:])


class Greedy(TorchDist):
    def layout(self, ranks, manifest):
        return Layout([*super().layout(ranks, manifest).files, "tokenizer.json"])


class WrongOrder(TorchDist):
    def finish(self, root, manifest):
        files = super().finish(root, manifest).files
        return Finished(manifest, dict(reversed(files.items())))


class Hasty(TorchDist):
    def recognises(self, root):
        return any(name.endswith(".distcp") for name in root.list())


class NotDurable(TorchDist):
    def layout(self, ranks, manifest):
        logs = [f"log{rank}" for rank in range(ranks)]
        return Layout([*super().layout(ranks, manifest).files, *logs])

    def write(self, root, plan, data):
        Path(root.location, f"log{plan.rank}").write_text("unsynced")
        return super().write(root, plan, data)


class Swallowing(TorchDist):
    def write(self, root, plan, data):
        try:
            return super().write(root, plan, data)
        except Exception:  # noqa: BLE001 - that is the mistake
            return None


class Tampering(TorchDist):
    def write(self, root, plan, data):
        if "notes.txt" in root.list():
            root.put("notes.txt", b"mine now")
        return super().write(root, plan, data)


class Keeping(TorchDist):
    """Holds on to pieces whose memory is used again."""

    def write(self, root, plan, data):
        class Kept(Wrapper):
            def blocks(self, row):
                return iter(list(self.inner.blocks(row)))

        return super().write(root, plan, Kept(data))


class Overlapping(TorchDist):
    def write(self, root, plan, data):
        result = super().write(root, plan, data)
        boxes = Boxes(np.zeros_like(result.boxes.offset), result.boxes.shape)
        return replace(result, boxes=boxes)


class Shuffled(TorchDist):
    def write(self, root, plan, data):
        return replace(super().write(root, plan, data), item=np.arange(len(plan))[::-1])


class WithoutDigests(TorchDist):
    def write(self, root, plan, data):
        result = super().write(root, plan, data)
        return replace(result, digests=result.digests[:0])


class Fussy(TorchDist):
    def layout(self, ranks, manifest):
        for key, _ in manifest.tensors:
            if key in ("buckets", "a/b"):
                raise BackendError(f"{key!r} is too odd for me")
        return super().layout(ranks, manifest)


class Closed(TorchDist):
    """Never hands over what it has filled."""

    def read(self, root, plan, into, verify):
        class Deaf(Wrapper):
            def close(self, target, box, filled):
                pass

        super().read(root, plan, Deaf(into), verify)


class Trusting(TorchDist):
    def read(self, root, plan, into, verify):
        super().read(root, plan, into, verify=False)


class Wasteful(TorchDist):
    def read(self, root, plan, into, verify):
        for name in {item.chunk.location.file for item in plan.rows()}:
            root.get(name)
        super().read(root, plan, into, verify)


class Raw(TorchDist):
    """Says that others may read the bytes at its locations, which are off by a little."""

    def read_manifest(self, root):
        manifest = super().read_manifest(root)
        chunks = replace(
            manifest.chunks, start=np.maximum(manifest.chunks.start - 64, 0)
        )
        return replace(manifest, chunks=chunks, encoding="raw")


class Forgetful(TorchDist):
    def read_manifest(self, root):
        manifest = super().read_manifest(root)
        rows = np.arange(len(manifest.chunks) - 1)
        return replace(manifest, chunks=manifest.chunks.take(rows))


class Unlisted(TorchDist):
    def read_manifest(self, root):
        return replace(super().read_manifest(root), tables=())


class Careless(TorchDist):
    def read_manifest(self, root):
        try:
            return super().read_manifest(root)
        except CheckpointingException as error:
            raise KeyError("tensors") from error


class Careful(TorchDist):
    def read(self, root, plan, into, verify):
        try:
            super().read(root, plan, into, verify)
        except CheckpointingException as error:
            raise CheckpointingException("something is wrong somewhere") from error


@dataclass(frozen=True)
class Demanding(TorchDist):
    secret: str = ""

    def read_manifest(self, root):
        if not self.secret:
            raise BackendError("what was the option that it was written with?")
        return super().read_manifest(root)


class Remembering(TorchDist):
    seen = None

    def finish(self, root, manifest):
        type(self).seen = type(self).seen or super().finish(root, manifest)
        return self.seen


MISTAKES = [
    (Unannounced(), "test_any_box_can_be_read", r"layout\(\) did not announce \['common.pt'\]"),
    (Greedy(), "test_other_files_are_left_alone", "which others may need"),
    (WrongOrder(), "test_every_dtype_is_kept_bit_for_bit", "finish ends with .*metadata.*, not with metadata.json"),
    (Hasty(), "test_every_dtype_is_kept_bit_for_bit", "recognises data without a table of contents"),
    (NotDurable(), "test_written_files_are_durable", r"\['log0'\] are not durable"),
    (Swallowing(), "test_an_error_of_the_source_ends_the_write", "the source failed, and write returned"),
    (Tampering(), "test_other_files_are_left_alone", r"the save changed notes.txt"),
    (Keeping(), "test_each_rank_reads_its_shards", "differs"),
    (Overlapping(), "test_any_box_can_be_read", "not within it|holes or overlaps"),
    (Shuffled(), "test_any_box_can_be_read", "not in the plan's order"),
    (WithoutDigests(), "test_any_box_can_be_read", "0 digests for"),
    (Fussy(), "test_irregular_shards", "irregular shards are refused: 'buckets' is too odd"),
    (Fussy(), "test_keys_may_be_any_text", "too odd for me"),
    (Closed(), "test_any_box_can_be_read", "did not close what it opened"),
    (Trusting(), "test_a_flipped_bit_is_found_and_named", "was not noticed"),
    (Wasteful(), "test_a_thin_slice_reads_few_bytes", "bytes were read for a 64th"),
    (Raw(), "test_raw_chunks_are_raw", "is not at"),
    (Forgetful(), "test_read_manifest_agrees_with_the_save", "lists other chunks"),
    (Unlisted(), "test_read_manifest_agrees_with_the_save", "does not list {'.metadata'}"),
    (Careless(), "test_a_damaged_table_of_contents", "KeyError.*is not a CheckpointingException"),
    (Careful(), "test_a_flipped_bit_is_found_and_named", "something is wrong somewhere"),
    (Careful(), "test_lost_and_cut_files_are_corrupt", "something is wrong somewhere"),
    (Demanding(secret="x"), "test_other_instances_read_it", "what was the option"),
    (Remembering(), "test_an_instance_serves_many_saves", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "test", "message"),
    MISTAKES,
    ids=lambda x: None if isinstance(x, str) else type(x).__name__,
)
def test_a_mistake_is_found(tmp_path, backend, test, message):
    suite = type("TestOne", (BackendSuite,), {"backend": backend})()
    with pytest.raises(
        (AssertionError, CheckpointingException), match=f"(?s){message}"
    ):
        getattr(suite, test)(tmp_path)


def test_a_correct_backend_passes(tmp_path):
    suite = type("TestOne", (BackendSuite,), {"backend": TorchDist()})()
    for test in {test for _, test, _ in MISTAKES}:
        getattr(suite, test)(tmp_path / test)


def test_a_watched_storage_knows_when_a_batch_is_durable(tmp_path):
    root = WatchedStorage(tmp_path)
    with root.batch() as batch:
        for name in ("one", "of/many"):
            with batch.create(name) as file:
                file.write([memoryview(b"abc")])
        assert list(root.lost()) == ["of/many", "one"]
    assert not list(root.lost())


def test_a_watched_storage_lists_what_a_power_failure_would_take(tmp_path):
    root = WatchedStorage(tmp_path)
    root.put("whole", b"x")
    with root.create("folder/new") as file:
        file.write([memoryview(b"abc")])
        assert list(root.lost()) == ["folder/new"]
    with root.update("shared") as file:
        file.write_at(2, [memoryview(b"abc")])
    assert not list(root.lost())
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").touch()
    assert list(root.lost()) == ["a/b/c"]
    with root.open("shared") as reader:
        reader.read_into(0, [memoryview(bytearray(2)), memoryview(bytearray(3))])
    assert root.read == 5
