"""From every format and generation to every other: tensors bit by bit, objects, common state."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.checkpoint import open_checkpoint
from megackpt.errors import (
    BackendError,
    CheckpointExists,
    CorruptCheckpoint,
    NotACheckpoint,
    StorageError,
)

FORMATS = ("torch_dist", "zarr", "safetensors", "torch")
GOLDEN = Path(__file__).parent.parent / "golden"
GENERATIONS = sorted(
    path.name for path in GOLDEN.iterdir() if path.is_dir() and path.name != "index-v1"
)


@pytest.mark.parametrize("second", FORMATS)
@pytest.mark.parametrize("first", FORMATS)
def test_every_pair(tmp_path, source, assert_same, small_tasks, first, second) -> None:
    megackpt.convert(source, tmp_path / "first", first)
    megackpt.convert(tmp_path / "first", tmp_path / "second", second)
    for name in ("first", "second"):
        assert_same(source, tmp_path / name)
        assert megackpt.verify(tmp_path / name).ok
        assert not megackpt.verify(tmp_path / name).foreign
        objects = {
            (i, j): ShardedObject("rng", None, (2, 2), (i, j))
            for i in range(2)
            for j in range(2)
        }
        loaded = megackpt.load(
            {"o": objects}, tmp_path / name, validate_access_integrity=False
        )["o"]
        assert loaded == {at: {"at": at} for at in objects}


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation(tmp_path, assert_same, generation, to) -> None:
    megackpt.convert(GOLDEN / generation, tmp_path / "new", to)
    assert_same(GOLDEN / generation, tmp_path / "new")
    found = megackpt.load_plain_tensors(tmp_path / "new")
    expected = GOLDEN / f"{generation}.expected.pt"
    tensors = torch.load(expected, weights_only=True) if expected.exists() else {}
    for key, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and key in found:
            assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("to", FORMATS)
def test_an_empty_state(tmp_path, assert_same, to) -> None:
    megackpt.save({}, tmp_path / "a")
    megackpt.convert(tmp_path / "a", tmp_path / "b", to)
    assert_same(tmp_path / "a", tmp_path / "b")


# ---- one file


@pytest.mark.parametrize(
    ("to", "name"),
    [("safetensors", "m.safetensors"), ("torch", "m.pt"), ("torch", "m.bin")],
)
def test_one_file_there_and_back(
    tmp_path, source, assert_same, files, small_tasks, to, name
) -> None:
    file = tmp_path / "out" / name
    done = megackpt.convert(source, file, to, state=to == "torch")
    assert done.target == str(file)
    assert os.listdir(tmp_path / "out") == [name]
    assert_same(source, file, state=to == "torch")
    megackpt.convert(file, tmp_path / "back", "torch_dist")
    assert_same(source, tmp_path / "back", state=to == "torch")
    with pytest.raises(CheckpointExists):
        megackpt.convert(source, file, to, state=False)
    megackpt.convert(source, file, to, state=False, select="model.*", overwrite=True)
    assert os.listdir(tmp_path / "out") == [name]
    assert all(key.startswith("model.") for key in megackpt.load_plain_tensors(file))


def test_a_safetensors_file_cannot_hold_state(tmp_path, source) -> None:
    with pytest.raises(BackendError, match=r"rng\.objects.*common\.pt.*--no-state"):
        megackpt.convert(source, tmp_path / "m.safetensors", "safetensors")
    megackpt.convert(
        source,
        tmp_path / "m.safetensors",
        "safetensors",
        exclude=["rng", "common_state"],
    )
    assert sorted(os.listdir(tmp_path)) == ["m.safetensors", "source"]


def test_a_file_under_another_formats_name_is_refused(tmp_path, source) -> None:
    with pytest.raises(
        BackendError, match="is the name of a file of the format 'torch'"
    ):
        megackpt.convert(source, tmp_path / "m.pt", "safetensors")
    megackpt.convert(source, tmp_path / "m.pt", "zarr")  # a directory under an odd name
    assert (tmp_path / "m.pt" / "metadata.json").exists()


def test_a_run_for_one_file_is_resumed_by_the_same_call_only(
    tmp_path, source, monkeypatch
) -> None:
    file = tmp_path / "out" / "m.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr("megackpt.storage.LocalStorage.rename", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            megackpt.convert(source, file, "safetensors", state=False)
    assert os.listdir(tmp_path / "out") == [".m.safetensors.megackpt"]
    stamp = (tmp_path / "out" / ".m.safetensors.megackpt" / "model.safetensors").stat()
    megackpt.convert(source, file, "safetensors", state=False)
    assert os.path.samestat(file.stat(), stamp)  # it was complete, and only moved
    file.rename(tmp_path / "first")
    with monkeypatch.context() as patch:
        patch.setattr("megackpt.storage.LocalStorage.rename", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            megackpt.convert(source, file, "safetensors", state=False, cast="bf16")
    megackpt.convert(source, file, "safetensors", state=False)
    assert os.listdir(tmp_path / "out") == ["m.safetensors"]
    assert file.read_bytes() == (tmp_path / "first").read_bytes()


def _interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


# ---- refusals


def test_a_target_in_the_source_or_around_it_is_refused(
    tmp_path, source, files
) -> None:
    before = files(source)
    for target in (
        source,
        source / "new",
        tmp_path,
        source / ".." / "source" / "x" / "m.safetensors",
    ):
        with pytest.raises(StorageError, match="choose another target"):
            megackpt.convert(source, target, "zarr", overwrite=True)
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(StorageError, match="choose another target"):
        megackpt.convert(source, tmp_path / "link", "zarr", overwrite=True)
    assert files(source) == before


@pytest.mark.parametrize("to", FORMATS)
def test_a_failed_conversion_leaves_the_target_unchanged(
    tmp_path, source, files, to
) -> None:
    megackpt.save({"old": 1}, tmp_path / "b")
    before = files(tmp_path / "b")
    with pytest.raises(CheckpointExists):
        megackpt.convert(source, tmp_path / "b", to)
    place = open_checkpoint(source).manifest.chunks_of("model.tall")[0].location
    data = bytearray((source / place.file).read_bytes())
    data[place.start] ^= 1
    (source / place.file).write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=r"model\.tall"):
        megackpt.convert(source, tmp_path / "b", to, overwrite=True)
    with pytest.raises(NotACheckpoint):
        megackpt.convert(tmp_path / "none", tmp_path / "b", to, overwrite=True)
    assert files(tmp_path / "b") == before
    assert sorted(os.listdir(tmp_path)) == ["b", "source"]
    megackpt.convert(source, tmp_path / "b", to, overwrite=True, verify=False)
    assert megackpt.verify(tmp_path / "b").ok


def test_a_truncated_source(tmp_path, source) -> None:
    (file,) = source.glob("__0_0.distcp")
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CorruptCheckpoint, match=r"__0_0\.distcp"):
        megackpt.convert(source, tmp_path / "b", "zarr")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.root
def test_an_unreadable_source(tmp_path, source) -> None:
    """Even root cannot read a file whose data is a directory."""
    file = source / "__0_0.distcp"
    file.unlink()
    file.mkdir()
    with pytest.raises(CorruptCheckpoint, match=r"__0_0\.distcp"):
        megackpt.convert(source, tmp_path / "b", "zarr")


def test_the_number_of_files(tmp_path, source, assert_same, small_tasks) -> None:
    megackpt.convert(source, tmp_path / "a", "torch_dist", shards=5)
    assert len(list((tmp_path / "a").glob("*.distcp"))) == 5
    megackpt.convert(source, tmp_path / "b", "safetensors", shards=3)
    assert len(list((tmp_path / "b").glob("*.safetensors"))) == 3
    for name in "ab":
        assert_same(source, tmp_path / name)
    with pytest.raises(BackendError, match="the number of files cannot be chosen"):
        megackpt.convert(source, tmp_path / "c", "zarr", shards=3)
    with pytest.raises(BackendError, match="one file"):
        megackpt.convert(source, tmp_path / "m.pt", "torch", shards=3)
    with pytest.raises(ValueError, match="shards must be at least 1"):
        megackpt.convert(source, tmp_path / "c", "torch_dist", shards=0)


def test_progress_and_the_result(tmp_path, source, small_tasks) -> None:
    reported: list[tuple[int, int]] = []
    done = megackpt.convert(
        source,
        tmp_path / "a",
        "zarr",
        progress=lambda *numbers: reported.append(numbers),
    )
    assert reported[0] == (0, done.bytes)
    assert reported[-1] == (done.bytes, done.bytes)
    assert [d for d, _ in reported] == sorted(d for d, _ in reported)
    assert len(reported) > 10
    assert done.tensors == len(megackpt.load_plain_tensors(source))
    assert done.objects == 2  # "rng" and the common state
    assert done.bytes == int(open_checkpoint(source).manifest.chunks.length.sum())


def test_verify_target_reads_everything_again(tmp_path, source, monkeypatch) -> None:
    megackpt.convert(source, tmp_path / "a", "torch_dist", verify_target=True)
    from megackpt.backends.torch_dist import TorchDist

    write = TorchDist.write

    def damaging(self, root, plan, data):
        result = write(self, root, plan, data)
        largest = result.length.argmax()
        with root.update(result.files[result.file[largest]]) as updater:
            updater.write_at(int(result.start[largest]), [memoryview(b"\xff\xfe\xfd")])
        return result

    monkeypatch.setattr(TorchDist, "write", damaging)
    with pytest.raises(
        CorruptCheckpoint, match="the data read back differs from the data written"
    ):
        megackpt.convert(source, tmp_path / "b", "torch_dist", verify_target=True)
    assert not (tmp_path / "b").exists()


def test_remove_sharded_tensors(tmp_path, source) -> None:
    keys = set(megackpt.load_plain_tensors(source))
    megackpt.remove_sharded_tensors(source, "model.")
    assert set(megackpt.load_plain_tensors(source)) == {
        key for key in keys if not key.startswith("model.")
    }
    assert megackpt.load_common_state_dict(source)["iteration"] == 5
    assert os.listdir(tmp_path) == ["source"]


def test_many_small_tensors_are_read_together(tmp_path, monkeypatch) -> None:
    """A thousand tensors of 1 KiB: few reads."""
    values = torch.arange(256_000, dtype=torch.float32).reshape(1000, 256)
    state = {
        str(i): ShardedTensor.from_rank_offsets(f"t{i}", value)
        for i, value in enumerate(values)
    }
    megackpt.save(state, tmp_path / "a")
    from megackpt.backends.torch_dist import TorchDist

    reads: list[int] = []
    read = TorchDist.read
    monkeypatch.setattr(
        TorchDist,
        "read",
        lambda self, root, plan, *rest: (
            reads.append(len(plan)) or read(self, root, plan, *rest)
        ),
    )
    megackpt.convert(tmp_path / "a", tmp_path / "b", "torch_dist")
    assert sum(reads) == 1001  # with the common state
    assert len(reads) <= 3
