"""In one process: what callers pass to the writer and the reader, read from them, and derive from them."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import (
    ExtensionRegistry,
    StreamTransformExtension,
    ZStandard,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from tests.dcp.behaviours.catalogue import behaviour
from tests.dcp.behaviours.local_values import Net, Stateful
from tests.dcp.states import assert_same, emptied

STATE = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5), "n": [1, "x"]}

STAGES = (
    "set_up_storage_writer",
    "prepare_local_plan",
    "prepare_global_plan",
    "write_data",
    "finish",
)
READ_STAGES = (
    "set_up_storage_reader",
    "prepare_local_plan",
    "prepare_global_plan",
    "read_data",
)


class Inverted(StreamTransformExtension):
    """Bytes with all their bits inverted."""

    class Stream(io.BytesIO):
        target: Any = None

        def close(self) -> None:
            if not self.closed:
                self.target.write(bytes(255 - octet for octet in self.getvalue()))
            super().close()

    @staticmethod
    def from_descriptor(_version: str) -> Inverted:
        return Inverted()

    @staticmethod
    def registry_name() -> str:
        return "stream.inverted"

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: Any) -> Any:
        stream = self.Stream()
        stream.target = output
        return stream

    def transform_from(self, input: Any) -> Any:
        return io.BytesIO(bytes(255 - octet for octet in input.read()))


def loaded(folder: Path, **more: Any) -> dict[str, Any]:
    state: dict[str, Any] = emptied(STATE)
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder, **more))
    return state


@behaviour(thread_count=(1, 2, 5), single_file=(True, False))
def files_and_threads(folder: Path, thread_count: int, single_file: bool) -> None:
    writer = dcp.FileSystemWriter(
        folder, single_file_per_rank=single_file, thread_count=thread_count
    )
    dcp.save(STATE, storage_writer=writer)
    assert_same(loaded(folder), STATE)


@behaviour()
def without_syncing_and_with_copies_ahead(folder: Path) -> None:
    writer = dcp.FileSystemWriter(
        str(folder), sync_files=False, per_thread_copy_ahead=1
    )
    dcp.save(STATE, storage_writer=writer)
    assert_same(loaded(folder), STATE)


@behaviour(thread_count=(1, 2))
def an_extension_for_tensors_and_objects(folder: Path, thread_count: int) -> None:
    saved = {**Net(1).state_dict(), "s": Stateful(b"bytes of an object")}
    writer = dcp.FileSystemWriter(
        folder, thread_count=thread_count, _extensions=[Inverted()]
    )
    dcp.save(saved, storage_writer=writer)
    registry = ExtensionRegistry()
    registry.register(Inverted)
    found = {**Net(2).state_dict(), "s": Stateful(b"")}
    reader = dcp.FileSystemReader(folder, _extension_registry=registry)
    dcp.load(found, storage_reader=reader)
    assert found.pop("s").value == saved.pop("s").value
    assert_same(found, saved)


@behaviour(thread_count=(1, 2))
def zstandard(folder: Path, thread_count: int) -> None:
    saved = {"zeros": torch.zeros(100_000), "n": "text " * 5000}
    writer = dcp.FileSystemWriter(
        folder, thread_count=thread_count, _extensions=[ZStandard()]
    )
    dcp.save(saved, storage_writer=writer)
    data = folder.glob("*.distcp")
    assert sum(path.stat().st_size for path in data) < 50_000
    found = {"zeros": torch.ones(100_000), "n": ""}
    dcp.load(found, storage_reader=dcp.FileSystemReader(folder))
    assert_same(found, saved)


@behaviour()
def an_unknown_extension_is_an_error(folder: Path) -> None:
    dcp.save(
        STATE, storage_writer=dcp.FileSystemWriter(folder, _extensions=[Inverted()])
    )
    with pytest.raises(CheckpointException) as caught:
        loaded(folder)
    assert "stream.inverted" in str(caught.value)


@behaviour(quick=True)
def a_second_save_replaces_the_first(folder: Path) -> None:
    dcp.save({"w": torch.ones(10)}, checkpoint_id=folder)
    writer = dcp.FileSystemWriter(folder, overwrite=True)
    dcp.save({"w": torch.full((10,), 2.0)}, storage_writer=writer)
    found = {"w": torch.zeros(10)}
    dcp.load(found, checkpoint_id=folder)
    assert found["w"].sum() == 20


@behaviour(quick=True)
def a_checkpoint_is_kept_without_overwrite(folder: Path) -> None:
    first = dcp.FileSystemWriter(folder, overwrite=False)
    dcp.save({"w": torch.ones(10)}, storage_writer=first)
    second = dcp.FileSystemWriter(folder, overwrite=False)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.zeros(10)}, storage_writer=second)
    assert "Checkpoint already exists" in str(caught.value)
    found = {"w": torch.zeros(10)}
    dcp.load(found, checkpoint_id=folder)
    assert found["w"].sum() == 10


@behaviour()
def a_smaller_state_replaces_a_larger_one(folder: Path) -> None:
    dcp.save({f"k{i}": torch.ones(1000) for i in range(9)}, checkpoint_id=folder)
    dcp.save({"k0": torch.zeros(2)}, checkpoint_id=folder)
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert list(names) == ["k0"]
    assert names["k0"].size == torch.Size([2])


@behaviour()
def one_writer_for_several_saves(folder: Path) -> None:
    writer = dcp.FileSystemWriter(folder / "none")
    for step in (1, 2):
        path = folder / str(step)
        dcp.save({"n": torch.tensor(step)}, storage_writer=writer, checkpoint_id=path)
        assert os.fspath(writer.checkpoint_id) == os.fspath(path)
    reader = dcp.FileSystemReader(folder / "none")
    for step in (1, 2):
        found = {"n": torch.tensor(0)}
        dcp.load(found, storage_reader=reader, checkpoint_id=folder / str(step))
        assert found["n"] == step
    assert not (folder / "none").exists() or not list((folder / "none").iterdir())


@behaviour()
def directories_are_made(folder: Path) -> None:
    dcp.save(STATE, checkpoint_id=folder / "a" / "b" / "c")
    assert_same(loaded(folder / "a" / "b" / "c"), STATE)


@behaviour(kind=("str", "Path"))
def the_id_is_a_str_or_a_path(folder: Path, kind: str) -> None:
    path: Any = folder / "c"
    if kind == "str":
        path = str(path)
    dcp.save(STATE, checkpoint_id=path)
    found = emptied(STATE)
    dcp.load(found, checkpoint_id=path)
    assert_same(found, STATE)


@behaviour()
def a_relative_path(folder: Path) -> None:
    before = Path.cwd()
    os.chdir(folder)
    try:
        dcp.save(STATE, checkpoint_id="runs/1")
        found = emptied(STATE)
        dcp.load(found, checkpoint_id="runs/1")
    finally:
        os.chdir(before)
    assert_same(found, STATE)


@behaviour()
def files_of_others_in_the_directory_stay(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    dcp.save(STATE, checkpoint_id=folder)
    dcp.save(STATE, checkpoint_id=folder)
    assert (folder / "notes.txt").read_text() == "mine"
    assert_same(loaded(folder), STATE)


@behaviour()
def a_checkpoint_is_moved(folder: Path) -> None:
    dcp.save(STATE, checkpoint_id=folder / "here")
    (folder / "here").rename(folder / "there")
    assert_same(loaded(folder / "there"), STATE)


@behaviour()
def metadata_tells_who_saved_and_who_loads(folder: Path) -> None:
    writer = dcp.FileSystemWriter(folder)
    save_id = writer.save_id
    dcp.save({"a": torch.zeros(4)}, storage_writer=writer)
    reader = dcp.FileSystemReader(folder)
    told: Any = reader.read_metadata().storage_meta
    assert str(told.checkpoint_id) == str(folder) == str(reader.checkpoint_id)
    assert (told.save_id, told.load_id) == (save_id, reader.load_id)


@behaviour()
def the_writer_keeps_the_id_of_its_save(folder: Path) -> None:
    writer = dcp.FileSystemWriter(folder)
    dcp.save({"a": torch.zeros(4)}, storage_writer=writer)
    told: Any = dcp.FileSystemReader(folder).read_metadata().storage_meta
    assert told.save_id == writer.save_id


@behaviour(quick=True)
def metadata_lists_tensors_and_objects(folder: Path) -> None:
    dcp.save({"m": STATE}, checkpoint_id=folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    listed = metadata.state_dict_metadata
    assert set(listed) == {"m.w", "m.b", "m.n"}
    assert isinstance(listed["m.n"], BytesStorageMetadata)
    tensor = listed["m.w"]
    assert isinstance(tensor, TensorStorageMetadata)
    assert (tensor.size, tensor.properties.dtype) == ((3, 4), torch.float32)
    (chunk,) = tensor.chunks
    assert (chunk.offsets, chunk.sizes) == ((0, 0), (3, 4))
    assert metadata.planner_data == {key: ("m", key[2:]) for key in listed}
    assert MetadataIndex("m.w", torch.Size([0, 0])) in metadata.storage_data
    assert MetadataIndex("m.n") in metadata.storage_data


@behaviour(since=(2, 9))
def metadata_has_a_version(folder: Path) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.planner import LoadPlanner

    dcp.save(STATE, checkpoint_id=folder)
    planner: LoadPlanner = DefaultLoadPlanner()
    dcp.load(emptied(STATE), checkpoint_id=folder, planner=planner)
    assert planner.metadata is not None  # type: ignore[attr-defined]
    assert planner.metadata.version == "1.0.0"  # type: ignore[attr-defined]


@behaviour()
def save_returns_the_metadata(folder: Path) -> None:
    metadata: Any = dcp.save(STATE, checkpoint_id=folder)
    assert set(metadata.state_dict_metadata) == set(STATE)
    assert {index.fqn for index in metadata.storage_data} == set(STATE)


@behaviour()
def properties_of_old_sharded_tensors_in_metadata(folder: Path) -> None:
    from unittest.mock import patch

    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    name = "torch.distributed.checkpoint.metadata.TensorProperties"
    with patch(name, TensorProperties):
        dcp.save({"a": torch.ones(4, 4)}, storage_writer=dcp.FileSystemWriter(folder))
    found = {"a": torch.zeros(4, 4)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(folder))
    assert found["a"].sum() == 16


@behaviour(commits=False)
def nothing_there_is_an_error(folder: Path) -> None:
    for path in (folder / "none", folder):
        try:
            loaded(path)
        except CheckpointException:
            continue
        raise AssertionError(f"{path} was loaded")


@behaviour(commits=False)
def where_a_checkpoint_can_be(folder: Path) -> None:
    for kind in (dcp.FileSystemWriter, dcp.FileSystemReader):
        assert kind.validate_checkpoint_id(folder / "new")
        assert kind.validate_checkpoint_id(str(folder / "new"))
        for url in ("abc://abc.abc", "memory://a/b", "hf://model"):
            assert not kind.validate_checkpoint_id(url)


@behaviour(commits=False)
def what_they_derive_from(folder: Path) -> None:
    from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager

    writer = dcp.FileSystemWriter(folder)
    assert isinstance(writer, (dcp.StorageWriter, AsyncStager, BlockingAsyncStager))
    assert isinstance(writer, dcp.filesystem.FileSystemWriter)
    assert isinstance(dcp.FileSystemReader(folder), dcp.StorageReader)
    assert dcp.FileSystemReader.__name__ == "FileSystemReader"


@behaviour(stage=STAGES)
def a_derived_writer_that_fails(folder: Path, stage: str) -> None:
    class Faulty(dcp.FileSystemWriter):  # type: ignore[misc]
        fails = True

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fails:
            raise ValueError(f"injected into {stage}")
        return getattr(super(Faulty, self), stage)(*args, **kwargs)

    setattr(Faulty, stage, fail)
    writer = Faulty(folder)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(STATE, storage_writer=writer)
    assert set(caught.value.failures) == {0}
    assert isinstance(caught.value.failures[0][0], ValueError)
    assert not (folder / ".metadata").exists()
    Faulty.fails = False
    dcp.save(STATE, storage_writer=writer, checkpoint_id=folder)
    assert_same(loaded(folder), STATE)


@behaviour(stage=READ_STAGES)
def a_derived_reader_that_fails(folder: Path, stage: str) -> None:
    class Faulty(dcp.FileSystemReader):  # type: ignore[misc]
        pass

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise ValueError(f"injected into {stage}")

    setattr(Faulty, stage, fail)
    dcp.save(STATE, checkpoint_id=folder)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(emptied(STATE), storage_reader=Faulty(folder))
    assert isinstance(caught.value.failures[0][0], ValueError)
    assert_same(loaded(folder), STATE)


@behaviour(quick=True)
def a_derived_writer_and_reader_see_every_stage(folder: Path) -> None:
    calls: list[str] = []

    def watched(base: Any, stages: tuple[str, ...]) -> Any:
        def wrap(stage: str) -> Any:
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                calls.append(stage)
                return getattr(super(kind, self), stage)(*args, **kwargs)

            return call

        kind = type(base.__name__, (base,), {stage: wrap(stage) for stage in stages})
        return kind

    # torch looks for **kwargs in the first of these methods: a wrapper has them.
    dcp.save(STATE, storage_writer=watched(dcp.FileSystemWriter, STAGES)(folder))
    assert calls == list(STAGES)
    calls.clear()
    reader = watched(dcp.FileSystemReader, ("read_metadata", *READ_STAGES))(folder)
    found = emptied(STATE)
    dcp.load(found, storage_reader=reader)
    assert calls == ["read_metadata", *READ_STAGES]
    assert_same(found, STATE)


@behaviour()
def a_writer_with_other_storage_metadata(folder: Path) -> None:
    class Writer(dcp.FileSystemWriter):  # type: ignore[misc]
        def storage_meta(self) -> Any:
            meta: Any = super().storage_meta()
            meta.checkpoint_id = "renamed"
            return meta

    dcp.save(STATE, storage_writer=Writer(folder))
    told: Any = dcp.FileSystemReader(folder).read_metadata().storage_meta
    assert told.checkpoint_id == "renamed"


@behaviour()
def metadata_read_before_and_changed(folder: Path) -> None:
    """A reader that hides a key, as readers of converted checkpoints do."""

    class Reader(dcp.FileSystemReader):  # type: ignore[misc]
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            metadata = super().read_metadata(*args, **kwargs)
            metadata.state_dict_metadata["renamed"] = metadata.state_dict_metadata["w"]
            del metadata.state_dict_metadata["b"]
            return metadata

    dcp.save(STATE, checkpoint_id=folder)
    listed = Reader(folder).read_metadata().state_dict_metadata
    assert "b" not in listed
    assert listed["renamed"].size == (3, 4)


@behaviour(size=("file", "nothing"))
def damaged_files_are_an_error(folder: Path, size: str) -> None:
    dcp.save({"w": torch.ones(50_000)}, checkpoint_id=folder)
    for path in folder.glob("*.distcp"):
        if size == "nothing":
            path.unlink()
        else:
            os.truncate(path, path.stat().st_size // 2)
    try:
        dcp.load({"w": torch.zeros(50_000)}, checkpoint_id=folder)
    except CheckpointException:
        return
    raise AssertionError("damaged data was loaded")
