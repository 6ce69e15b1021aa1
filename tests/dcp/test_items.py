"""Items of others' planners and extensions, written and read."""

from __future__ import annotations

import dataclasses
import io
import shutil
import zlib
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import (
    ExtensionRegistry,
    StreamTransformExtension,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

import megackpt
from megackpt.dcp import FileSystemReader, FileSystemWriter
from tests.dcp.states import (
    READERS,
    assert_same,
    loaded,
    nested,
)
from tests.torch_names import (
    COPIES_FLOAT4,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]


def test_a_planner_that_lists_unwritten_items_or_resolves_another_shape(
    where: Path,
) -> None:
    class Forgetful(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            return dataclasses.replace(
                super().finish_plan(new_plan), items=new_plan.items[1:]
            )

    class Wrong(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            return torch.ones(3, 3)

    for planner, told in (
        (Forgetful(), "'w'.*no rank has written|no rank has written.*'w'"),
        (Wrong(), r"\(3, 3\)"),
    ):
        with pytest.raises(CheckpointException, match=told):
            dcp.save(
                {"w": torch.ones(5), "x": torch.ones(3)},
                storage_writer=FileSystemWriter(where),
                planner=planner,
            )
        assert not (where / "metadata.json").exists()
    dcp.save({"w": torch.ones(5)}, storage_writer=FileSystemWriter(where))
    assert megackpt.verify(where).ok


class Halved(DefaultSavePlanner):
    """As a planner in torch's documentation: halves, consistently, what it saves."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        found = super().resolve_data(write_item)
        return (
            found
            if write_item.type == WriteItemType.BYTE_IO
            else found.to(torch.float16)
        )


class Unplanned(DefaultSavePlanner):
    """Resolves to another dtype than it has planned, which stock's writer does not mind."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        found = super().resolve_data(write_item)
        return (
            found
            if write_item.type == WriteItemType.BYTE_IO
            else found.to(torch.bfloat16)
        )


@pytest.mark.parametrize("planner", [Halved, Unplanned])
def test_planners_of_others(where: Path, planner: type[DefaultSavePlanner]) -> None:
    state = {"w": torch.arange(12.0).reshape(3, 4), "told": {"x": 1}}
    dcp.save(state, storage_writer=FileSystemWriter(where), planner=planner())
    for reader in READERS:
        assert_same(loaded(reader(where), state), state)
    assert megackpt.verify(where).ok


class Scratch(DefaultSavePlanner):
    """Makes of every item what is to be written in one and the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.empty(70_000)
        self.stream = io.BytesIO()

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        made = super().transform_object(write_item, object)
        if isinstance(made, torch.Tensor):
            return self.numbers[: made.numel()].copy_(made)
        self.stream.seek(0)
        self.stream.truncate()
        self.stream.write(made.getvalue())
        return self.stream


class Told(DefaultLoadPlanner):
    """Has items filled in one and the same memory, and takes them from there."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.empty(400_000)
        self.order: list[str] = []

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self.order.append(read_item.dest_index.fqn)
        return self.numbers[: read_item.lengths.numel()]

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        assert self.order[-1] == read_item.dest_index.fqn
        self.lookup_tensor(read_item.dest_index).copy_(tensor)


def scratched(size: int) -> dict[str, Any]:
    numbers = {f"t{i}": torch.full((size - i,), float(i)) for i in range(8)}
    return {**numbers, **{f"o{i}": i for i in range(8)}}


@pytest.mark.parametrize("thread_count", [1, 3])
def test_a_planner_that_uses_its_memory_again_when_saving(
    where: Path, thread_count: int
) -> None:
    state = scratched(70_000)
    dcp.save(
        state,
        storage_writer=FileSystemWriter(where, thread_count=thread_count),
        planner=Scratch(),
    )
    for reader in READERS:
        assert_same(loaded(reader(where), state), state)


@pytest.mark.parametrize("verify", [False, True])
def test_a_planner_that_uses_its_memory_again_when_loading(
    where: Path, verify: bool
) -> None:
    state = scratched(400_000)
    dcp.save(state, storage_writer=FileSystemWriter(where))
    for _ in range(3):
        planner = Told()
        assert_same(
            loaded(FileSystemReader(where, verify=verify), state, planner=planner),
            state,
        )
        assert len(planner.order) == 8


def test_two_keys_that_are_loaded_into_the_same_memory(where: Path) -> None:
    one, other = torch.full((1_000_000,), 1.0), torch.full((1_000_000,), 2.0)
    dcp.save({"a": one, "b": other}, storage_writer=FileSystemWriter(where))
    for _ in range(3):
        memory = torch.zeros(1_000_001)
        dcp.load(
            {"a": memory[1:], "b": memory[:-1]}, storage_reader=FileSystemReader(where)
        )
        assert torch.equal(memory[1:], one) or torch.equal(memory[:-1], other)


def test_tensors_of_a_dtype_that_is_no_whole_bytes(where: Path) -> None:
    pairs = torch.arange(6, dtype=torch.uint8)
    state = {"q": pairs.view(torch.float4_e2m1fn_x2), "w": torch.ones(3)}
    for make in (FileSystemWriter, dcp.FileSystemWriter):
        dcp.save(state, storage_writer=make(where))
        for reader in READERS if COPIES_FLOAT4 else READERS[:1]:
            assert_same(loaded(reader(where), state), state)
        if make is FileSystemWriter:
            assert megackpt.verify(where).ok
            shutil.rmtree(where)


class Squeezed(StreamTransformExtension):
    """An extension of somebody's: zlib."""

    @staticmethod
    def registry_name() -> str:
        return "test.zlib"

    @staticmethod
    def from_descriptor(version: str) -> Squeezed:  # noqa: ARG004
        return Squeezed()

    def get_descriptor(self) -> str:
        return "test.zlib/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        class Sink(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    output.write(zlib.compress(self.getvalue()))
                    output.close()
                super().close()

        return Sink()

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return io.BytesIO(zlib.decompress(input.read()))


# Python 3.13 shows what a stream of torch's raises when it is closed once more as it is freed.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <torch:pytest.PytestUnraisableExceptionWarning"
)
def test_records_that_went_through_an_extension(where: Path) -> None:
    registry = ExtensionRegistry()
    registry.register(Squeezed)
    for make in (FileSystemWriter, dcp.FileSystemWriter):
        shutil.rmtree(where, ignore_errors=True)
        dcp.save(nested(3), storage_writer=make(where, _extensions=[Squeezed()]))
        for reader in READERS:
            assert_same(loaded(reader(where, registry), nested(3)), nested(3))
        with pytest.raises(CheckpointException, match=r"test\.zlib.*Unknown extension"):
            loaded(FileSystemReader(where), nested(3))
        if make is FileSystemWriter:
            assert megackpt.verify(where).ok
            file = max(where.glob("*.distcp"), key=lambda path: path.stat().st_size)
            file.write_bytes(bytes(file.stat().st_size))
            with pytest.raises(CheckpointException, match="damaged"):
                loaded(FileSystemReader(where, registry), nested(3))


def test_an_extension_for_some_items(where: Path) -> None:
    class Some:
        """As our own planner's: asked item by item."""

        def transform_save_stream(
            self, item: WriteItem, stream: IO[bytes]
        ) -> tuple[IO[bytes], list[str]]:
            if item.index.fqn != "big":
                return stream, []
            return Squeezed().transform_to(stream), ["test.zlib/1"]

    writer = FileSystemWriter(where)
    writer.transforms = Some()  # type: ignore[assignment]
    state = {"big": torch.zeros(100_000), "w": torch.ones(30), "o": "text"}
    dcp.save(state, storage_writer=writer)
    assert sum(file.stat().st_size for file in where.glob("*.distcp")) < 10_000
    registry = ExtensionRegistry()
    registry.register(Squeezed)
    for reader in READERS:
        assert_same(loaded(reader(where, registry), state), state)
    assert_same(megackpt.load_plain_tensors(where), {"w": state["w"]})


def test_what_an_extension_makes_of_a_record_is_bounded(where: Path) -> None:
    class Endless(Squeezed):
        @staticmethod
        def from_descriptor(version: str) -> Endless:  # noqa: ARG004
            return Endless()

        def transform_from(self, input: IO[bytes]) -> IO[bytes]:
            class Zeros(io.BytesIO):
                def read(self, size: int | None = -1) -> bytes:
                    return bytes(size or 1)

            return Zeros()

    dcp.save(
        {"w": torch.ones(1000)},
        storage_writer=FileSystemWriter(where, _extensions=[Squeezed()]),
    )
    registry = ExtensionRegistry()
    registry.register(Endless)
    with pytest.raises(CheckpointException, match="more than 1052576 bytes come of it"):
        loaded(FileSystemReader(where, registry), {"w": torch.ones(1000)})
