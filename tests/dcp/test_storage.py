"""Our writer and reader under stock ``torch.distributed.checkpoint``: save, async_save, load, whatever the planner."""

from __future__ import annotations

import dataclasses
import inspect
import io
import os
import pickle
import re
import resource
import shutil
import signal
import textwrap
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist
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
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import megackpt
from megackpt import ShardedTensor, checkpoint
from megackpt.dcp import FileSystemReader, FileSystemWriter, FileSystemWriterAsync
from megackpt.errors import CheckpointingException, CheckpointReplaced
from megackpt.planning.manifest import ITEMSIZE, OBJECT
from megackpt.storage import LocalStorage
from megackpt.storage.files import LocalReader
from megackpt.storage.objects import BucketWriter
from tests.buckets import Bucket
from tests.torch_names import (
    ASKS_FOR_METADATA_TWICE,
    COPIES_FLOAT4,
    DROPS_ERRORS_OF_READERS,
    HAS_SAVES_WITHOUT_COLLECTIVES,
    PROCESS_OUTLIVES_ERRORS,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]

GOLDEN = Path(__file__).parent.parent / "golden"
READERS = (FileSystemReader, dcp.FileSystemReader)


def bits(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Any bits at all, but for bool, which has two values."""
    size = torch.Size(shape).numel() * ITEMSIZE[dtype]
    top = 2 if dtype == "bool" else 256
    octets = torch.randint(
        0,
        top,
        (size,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    return octets.view(getattr(torch, dtype)).reshape(shape)


def nested(seed: int = 0) -> dict[str, Any]:
    """A state dict as people have them."""
    tensors = {
        name: bits((4, 6), name, seed + i)
        for i, name in enumerate(ITEMSIZE)
        if name != OBJECT
    }
    wide = torch.randn(40, 60, generator=torch.Generator().manual_seed(seed))
    odd = {
        "transposed": wide.t(),
        "view": wide[3:9, 5:50:3],
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(seed),
    }
    layers = [
        {"w": torch.full((3,), float(seed + i)), "name": f"layer {i}"} for i in range(2)
    ]
    parameter = torch.nn.Parameter(torch.full((2, 2), seed + 0.5))
    model = {
        "dtypes": tensors,
        **odd,
        "layers": layers,
        "conj": torch.randn(5, dtype=torch.complex64).conj(),
    }
    model["conj"] = torch.view_as_complex(wide[:5, :2].contiguous()).conj()
    return {
        "model": {**model, "parameter": parameter},
        "step": seed,
        "big": wide.repeat(20, 40),
        "told": {"lr": 0.1},
    }


def emptied(value: Any) -> Any:
    """The same structure with nothing in it."""
    if isinstance(value, dict):
        return {key: emptied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [emptied(inner) for inner in value]
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value.detach().resolve_conj())
    return None


def octets(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""


def assert_same(found: Any, expected: Any, at: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), at
        for key in expected:
            assert_same(found[key], expected[key], f"{at}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), at
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{at}.{number}")
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), at
        assert octets(found) == octets(expected), at
    else:
        assert found == expected, at


@contextmanager
def refused(caplog: pytest.LogCaptureFixture, reason: str) -> Iterator[None]:
    """A load that cannot open the checkpoint says why, in our log where torch drops it."""
    caplog.clear()
    with pytest.raises(CheckpointException) as caught:
        yield
    assert re.search(
        reason, caplog.text if DROPS_ERRORS_OF_READERS else str(caught.value), re.DOTALL
    )


def loaded(reader: Any, like: dict[str, Any], **more: Any) -> dict[str, Any]:
    state: dict[str, Any] = emptied(like)
    dcp.load(state, storage_reader=reader, **more)
    return state


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return tmp_path / "run" / "c"


# ---- one process


@pytest.mark.parametrize("thread_count", [1, 3])
def test_what_we_save_is_read_by_stock_and_by_us(
    where: Path, thread_count: int, tmp_path: Path
) -> None:
    for seed in (1, 2):  # the second replaces the first
        dcp.save(
            nested(seed),
            storage_writer=FileSystemWriter(where, thread_count=thread_count),
        )
        assert len(list(where.glob("*.distcp"))) == thread_count
        for reader in (*READERS, lambda path: FileSystemReader(path, verify=False)):
            assert_same(loaded(reader(where), nested(seed)), nested(seed))
        report = megackpt.verify(where)
        assert (report.ok, report.checked, report.foreign) == (True, True, ()), report
        dcp_to_torch_save(where, tmp_path / "one.pt")
        assert_same(torch.load(tmp_path / "one.pt", weights_only=False), nested(seed))
    assert os.listdir(where.parent) == ["c"]


def test_megackpt_loads_what_was_saved_through_dcp(where: Path) -> None:
    state = nested(4)
    dcp.save(state, checkpoint_id=where, storage_writer=FileSystemWriter("elsewhere"))
    assert megackpt.load_common_state_dict(where) == {}
    asked = {
        "half": ShardedTensor.from_rank_offsets(
            "big", torch.zeros(400, 2400), (0, 1, 2)
        ),
        "step": megackpt.ShardedObject("step", None, (), ()),
    }
    found = megackpt.load(asked, where, validate_access_integrity=False)
    assert_same(found, {"half": state["big"][400:], "step": 4})
    assert {str(key) for key in megackpt.load_tensors_metadata(where)} >= {
        "model.layers.0.w",
        "model.empty",
        "big",
    }


def test_the_table_of_contents_is_what_stock_would_have_written(
    where: Path, tmp_path: Path
) -> None:
    ours = dcp.save(nested(1), storage_writer=FileSystemWriter(where))
    dcp.save(nested(1), storage_writer=dcp.FileSystemWriter(tmp_path / "stock"))
    written, stock = (
        pickle.loads((path / ".metadata").read_bytes())
        for path in (where, tmp_path / "stock")
    )
    for found in (ours, written, FileSystemReader(where).read_metadata()):
        assert found.state_dict_metadata.keys() == stock.state_dict_metadata.keys()
        assert found.planner_data == stock.planner_data
        assert found.storage_data.keys() == stock.storage_data.keys()
        assert found.version == getattr(
            stock, "version", "1.0.0"
        )  # torch 2.8 writes none
        assert found.storage_meta.save_id == written.storage_meta.save_id
    assert written.state_dict_metadata == stock.state_dict_metadata
    assert written.storage_data == FileSystemReader(where).read_metadata().storage_data
    assert b"megackpt" not in (where / ".metadata").read_bytes().replace(
        os.fsencode(where), b""
    )


def test_we_read_what_stock_and_megatron_save(where: Path) -> None:
    dcp.save(nested(5), storage_writer=dcp.FileSystemWriter(where, thread_count=2))
    assert_same(loaded(FileSystemReader(where), nested(5)), nested(5))
    ours, stock = (
        FileSystemReader(where).read_metadata(),
        dcp.FileSystemReader(where).read_metadata(),
    )
    assert ours.storage_data == stock.storage_data
    assert ours.planner_data == stock.planner_data
    assert str(ours.storage_meta.checkpoint_id) == str(stock.storage_meta.checkpoint_id)
    for golden in ("mcore-0.16.1-tp2pp1dp2", "mcore-0.12.3-flat-tp2pp1dp2"):
        metadata = FileSystemReader(GOLDEN / golden).read_metadata()
        like = {
            name: torch.empty(item.size, dtype=item.properties.dtype)
            if hasattr(item, "size")
            else io.BytesIO()
            for name, item in metadata.state_dict_metadata.items()
        }
        found = [loaded(FileSystemReader(GOLDEN / golden), like)]
        if golden.startswith(
            "mcore-0.16"
        ):  # the pickle of the other names Megatron's own classes
            found.append(loaded(dcp.FileSystemReader(GOLDEN / golden), like))
        values = {
            key: value
            for key, value in found[0].items()
            if isinstance(value, torch.Tensor)
        }
        assert values
        assert any(value.count_nonzero() for value in values.values())
        assert_same({key: found[-1][key] for key in values}, values)


def test_regions_are_read_by_their_exact_ranges(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = torch.arange(4 << 20, dtype=torch.float32).reshape(1024, -1)
    dcp.save({"w": big}, storage_writer=FileSystemWriter(where))
    moved: list[int] = []
    read = LocalReader.read_into

    def counted(self: LocalReader, start: int, buffers: Sequence[memoryview]) -> None:
        moved.append(sum(map(len, buffers)))
        read(self, start, buffers)

    class Rows(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            part = torch.Size((2, 4096))
            return dataclasses.replace(
                plan,
                items=[
                    dataclasses.replace(
                        plan.items[0],
                        storage_offsets=torch.Size((500, 0)),
                        lengths=part,
                    )
                ],
            )

    monkeypatch.setattr(LocalReader, "read_into", counted)
    for verify, most in ((False, 2 * 4096 * 4), (True, 1 << 20)):
        state = {"w": torch.zeros(1024, 4096)}
        reader = FileSystemReader(where, verify=verify)
        metadata = reader.read_metadata()
        moved.clear()
        reader.read_metadata = lambda *_, found=metadata, **__: found  # type: ignore[method-assign]
        dcp.load(state, storage_reader=reader, planner=Rows())
        assert torch.equal(state["w"][:2], big[500:502])
        assert most <= sum(moved) <= most + 4096


def test_damage_is_found_by_digests(where: Path) -> None:
    state = {"w": torch.ones(1000), "o": "x" * 1000}
    dcp.save(state, storage_writer=FileSystemWriter(where, thread_count=1))
    (file,) = where.glob("*.distcp")
    for what, key in ((b"\0\0\x80\x3f" * 100, "w"), (b"x" * 500, "o")):
        whole = file.read_bytes()
        at = whole.index(what)
        file.write_bytes(whole[:at] + b"\1" + whole[at + 1 :])
        with pytest.raises(CheckpointException, match=f"{key}.* damaged"):
            loaded(FileSystemReader(where), state)
        file.write_bytes(whole)
    assert_same(loaded(FileSystemReader(where), state), state)


def test_names_of_files_are_the_callers(where: Path) -> None:
    class Named(FileSystemWriter):
        names: Callable[[int, int], str] = staticmethod(
            lambda rank, n: f"data/rank{rank}.{n}"
        )

        def file_name(self, rank: int, n: int) -> str:
            return self.names(rank, n)

    dcp.save(nested(1), storage_writer=Named(where))
    assert sorted(os.listdir(where / "data")) == ["rank0.0", "rank0.1"]
    for reader in READERS:
        assert_same(loaded(reader(where), nested(1)), nested(1))
    for names, told in (
        (lambda *_: "same", r"file_name\(0, 1\) gives 'same', as file_name\(0, 0\)"),
        (lambda *_: "../out", "cannot be a file"),
        (lambda *_: None, "cannot be a file"),
        (lambda *_: ".metadata", "the checkpoint's own"),
    ):
        Named.names = staticmethod(names)  # type: ignore[assignment]
        with pytest.raises(CheckpointException, match=told):
            dcp.save(nested(2), storage_writer=Named(where))
    assert_same(loaded(FileSystemReader(where), nested(1)), nested(1))


def test_what_stock_callers_pass(where: Path) -> None:
    assert FileSystemWriterAsync is FileSystemWriter
    writer = FileSystemWriter(
        where, False, False, 1, 0, cache_staged_state_dict=True, overwrite=False
    )
    assert isinstance(writer, dcp.StorageWriter)
    assert writer.checkpoint_id == where
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    with pytest.raises(CheckpointException, match="CheckpointExists"):
        dcp.save({"w": torch.zeros(2)}, storage_writer=writer)
    writer.reset(where.parent / "other")
    dcp.save({"w": torch.zeros(2)}, storage_writer=writer)
    assert sorted(os.listdir(where.parent)) == ["c", "other"]
    with pytest.raises(CheckpointingException, match="thread_count"):
        FileSystemWriter(where, thread_count=0)
    with pytest.raises(CheckpointingException, match="convert"):
        FileSystemWriter(where, serialization_format=SerializationFormat.SAFETENSORS)
    assert FileSystemWriter.validate_checkpoint_id(where)
    assert FileSystemReader.validate_checkpoint_id(str(where))
    assert not FileSystemWriter.validate_checkpoint_id("")
    with pytest.raises(CheckpointingException, match="has been begun"):
        FileSystemWriter(where).finish(dcp.Metadata({}), [[]])
    with pytest.raises(CheckpointingException, match="call it first"):
        FileSystemReader(where).prepare_local_plan(dcp.LoadPlan([]))


@pytest.mark.skipif(
    not HAS_SAVES_WITHOUT_COLLECTIVES, reason="torch 2.8 has no such saves"
)
def test_a_save_without_collectives_is_refused_and_stocks_is_read(where: Path) -> None:
    with pytest.raises(CheckpointingException, match="needs use_collectives=True"):
        dcp.save(
            nested(1), storage_writer=FileSystemWriter(where), use_collectives=False
        )
    assert not where.exists()
    dcp.save(
        nested(1), storage_writer=dcp.FileSystemWriter(where), use_collectives=False
    )
    assert sorted(os.listdir(where)) == ["__0.metadata", "__0_0.distcp"]
    assert_same(loaded(FileSystemReader(where), nested(1)), nested(1))


class Failing(DefaultSavePlanner):
    """Cannot give the object that is called ``bad``."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == "bad":
            raise ValueError("no such thing")
        return super().resolve_data(write_item)


def test_an_error_of_a_thread_reaches_the_caller_and_is_cleared_up(where: Path) -> None:
    good = {"w": torch.ones(5), "x": torch.zeros(70_000)}
    bad = {**good, "bad": torch.ones(3)}
    dcp.save(bad, storage_writer=FileSystemWriter(where))
    for number in range(2):
        writer = FileSystemWriter(where)
        with pytest.raises(CheckpointException) as caught:
            dcp.save(
                {**bad, "w": torch.full((5,), 2.0)},
                storage_writer=writer,
                planner=Failing(),
            )
        told = str(caught.value)
        assert "rank 0 cannot write " in told
        assert "at 'bad': ValueError: no such thing" in told
        assert ".distcp" in told
        assert_same(loaded(FileSystemReader(where), bad), bad)
        if (
            number
        ):  # the same writer, or (the failed one is held by the exception) another one
            writer = FileSystemWriter(where)
        dcp.save(good, storage_writer=writer)
        assert os.listdir(where.parent) == ["c"]
        assert_same(loaded(FileSystemReader(where), good), good)
        dcp.save(bad, storage_writer=writer)
    with pytest.raises(CheckpointException):
        dcp.save(bad, storage_writer=writer, planner=Failing())
    writer.reset()
    assert os.listdir(where.parent) == ["c"]


def test_a_failed_save_is_over_for_a_save_in_the_background(where: Path) -> None:
    writer = FileSystemWriter(where)
    state, bad = {"w": torch.ones(5)}, {"bad": torch.ones(3)}
    other = where.parent / "other"
    with pytest.raises(CheckpointException) as caught:
        dcp.save(bad, checkpoint_id=where, storage_writer=writer, planner=Failing())
    dcp.async_save(state, checkpoint_id=other, storage_writer=writer).result()
    with pytest.raises(CheckpointException) as again:
        dcp.save(bad, checkpoint_id=where, storage_writer=writer, planner=Failing())
    dcp.async_save(
        state, storage_writer=FileSystemWriter(where)
    ).result()  # the failed one is held by the error
    assert caught.value is not again.value
    assert sorted(os.listdir(where.parent)) == ["c", "other"]
    for folder in (where, other):
        assert_same(loaded(FileSystemReader(folder), state), state)


def test_a_save_of_the_main_thread_is_over_when_its_writer_begins_another(
    where: Path,
) -> None:
    writer, state = FileSystemWriter(where), {"w": torch.ones(5)}
    # Then another rank fails, of which the coordinator's writer hears nothing.
    writer.prepare_global_plan([SavePlan([])])
    with pytest.raises(CheckpointException, match=r"SaveInProgress.*MainThread"):
        dcp.async_save(state, storage_writer=FileSystemWriter(where)).result()
    dcp.async_save(state, storage_writer=writer).result()
    assert_same(loaded(FileSystemReader(where), state), state)


def test_a_save_of_another_thread_is_left_alone_by_a_reset(where: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            begun.set()
            go_on.wait(60)
            return super().resolve_data(write_item)

    writer, state = FileSystemWriter(where), {"w": torch.ones(5)}
    future = dcp.async_save(state, storage_writer=writer, planner=Slow())
    try:
        assert begun.wait(60)
        with pytest.raises(CheckpointException, match=r"SaveInProgress.*Executor"):
            dcp.save(state, checkpoint_id=where.parent / "other", storage_writer=writer)
    finally:
        go_on.set()
    future.result()
    assert os.listdir(where.parent) == ["c"]
    assert_same(loaded(FileSystemReader(where), state), state)


def test_a_planner_that_lists_what_nobody_writes_or_resolves_another_shape(
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


def test_another_save_to_the_directory_is_told(where: Path) -> None:
    place = checkpoint.begin(where, save_id="somebody")
    with pytest.raises(CheckpointException, match=r"SaveInProgress"):
        dcp.save({"w": torch.ones(5)}, storage_writer=FileSystemWriter(where))
    place.abort()
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


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_a_hostile_table_of_contents_is_refused(
    where: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.ones(3)}
    for payload in (
        lambda metadata: dataclasses.replace(metadata, planner_data=Payload()),
        lambda metadata: dataclasses.replace(
            metadata,
            storage_data={
                index: dataclasses.replace(info, relative_path="../c/__0_0.distcp")
                for index, info in metadata.storage_data.items()
            },
        ),
        lambda metadata: dataclasses.replace(
            metadata,
            storage_data={
                index: dataclasses.replace(info, length=1 << 40)
                for index, info in metadata.storage_data.items()
            },
        ),
    ):
        shutil.rmtree(where, ignore_errors=True)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(where))
        table = where / ".metadata"
        table.write_bytes(pickle.dumps(payload(pickle.loads(table.read_bytes()))))
        with refused(caplog, r"posix\.system|no file inside|should end at byte"):
            loaded(FileSystemReader(where), state)
    assert not (tmp_path / "ran").exists()


def test_a_directory_of_another_format(
    where: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    megackpt.save(
        {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, where, "zarr"
    )
    for path, told in (
        (where, "not one of torch DCP's"),
        (tmp_path / "none", "does not exist"),
    ):
        with refused(caplog, told):
            loaded(FileSystemReader(path), {"w": torch.ones(4)})


def test_an_asynchronous_save_in_a_thread(where: Path) -> None:
    writer = FileSystemWriter(where, cache_staged_state_dict=False)
    for seed in (1, 2):
        state = nested(seed)
        future = dcp.async_save(state, storage_writer=writer)
        with torch.no_grad():
            for tensor in (state["big"], state["model"]["parameter"]):
                tensor.zero_()
        future.result()
        assert_same(loaded(FileSystemReader(where), nested(seed)), nested(seed))
    for _ in range(3):
        with pytest.raises(CheckpointException, match="at 'bad'"):
            dcp.async_save(
                {"bad": torch.ones(1)}, storage_writer=writer, planner=Failing()
            ).result()
    dcp.async_save(nested(3), storage_writer=writer).result()
    assert_same(loaded(FileSystemReader(where), nested(3)), nested(3))
    assert os.listdir(where.parent) == ["c"]


def test_a_bucket(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    where = f"{bucket.url}/run/c"
    assert FileSystemWriter.validate_checkpoint_id(where)
    for seed in (1, 2):
        dcp.save(nested(seed), storage_writer=FileSystemWriter(where))
        assert_same(loaded(FileSystemReader(where), nested(seed)), nested(seed))
    with pytest.raises(CheckpointException, match="at 'bad'"):
        dcp.save(
            {"w": torch.ones(3), "bad": 1},
            storage_writer=FileSystemWriter(where),
            planner=Failing(),
        )
    assert megackpt.verify(where).ok
    dcp.save(nested(3), storage_writer=FileSystemWriter(where))
    assert_same(loaded(FileSystemReader(where), nested(3)), nested(3))
    told: list[int] = []  # how much will come, by which the store chooses its parts
    monkeypatch.setattr(BucketWriter, "expect", lambda _, size: told.append(size))
    state = {"w": torch.ones(1000), "x": torch.ones(500, dtype=torch.int64), "o": 1}
    dcp.save(state, storage_writer=FileSystemWriter(where, thread_count=1))
    assert told == [8000]


def test_a_bucket_in_the_background(bucket: Bucket) -> None:
    writer = FileSystemWriter(f"{bucket.url}/run/1")
    for seed in (1, 2):
        state, where = nested(seed), f"{bucket.url}/run/{seed}"
        future = dcp.async_save(state, checkpoint_id=where, storage_writer=writer)
        with torch.no_grad():
            state["big"].zero_()
        future.result()
        assert_same(loaded(FileSystemReader(where), nested(seed)), nested(seed))
    with pytest.raises(CheckpointException, match="at 'bad'"):
        dcp.async_save(
            {"bad": torch.ones(1)}, storage_writer=writer, planner=Failing()
        ).result()
    assert_same(loaded(FileSystemReader(where), nested(2)), nested(2))
    assert megackpt.verify(where).ok
    dcp.async_save(
        nested(3), storage_writer=writer
    ).result()  # it clears the failed save away
    assert_same(loaded(FileSystemReader(where), nested(3)), nested(3))
    assert not bucket.uploads()


def test_the_example_of_the_docstring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    doc = inspect.getdoc(FileSystemWriter) or ""
    example = [
        line
        for line in doc.partition("::")[2].partition("Rank 0")[0].splitlines()
        if line
    ]
    exec(compile(textwrap.dedent("\n".join(example)), "docstring", "exec"), {})  # noqa: S102
    assert megackpt.load_plain_tensors("checkpoints/3")["model.w"].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "state",
    [
        {"x": torch.ones(3), "x/shard_0_1": 7},
        {"x": 5, "x/shard_0_1": 7},
        {"x/shard_0_2": 5, "x/shard_0_1": 7},
        {"x/shard_0_2": 5, "x/shard_1_2": 7},
    ],
)
def test_keys_that_look_like_pieces_of_others(
    where: Path, state: dict[str, Any]
) -> None:
    dcp.save(state, storage_writer=FileSystemWriter(where))
    for reader in READERS:
        assert_same(loaded(reader(where), state), state)
    assert megackpt.verify(where).ok


def test_the_common_state_as_megatron_lists_it(where: Path) -> None:
    state = {"common_state/shard_0_1": [{"a": 1}], "x": torch.ones(2)}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=FileSystemWriter(where), planner=planner)
    for reader in READERS:
        assert_same(loaded(reader(where), {"x": state["x"]}), {"x": state["x"]})
    assert megackpt.verify(where).ok


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("common_state", 5),
        ("common_state", torch.ones(3)),
        ("common_state/shard_0_1", 7),
        ("common_state/shard_0_1", torch.ones(3)),
    ],
)
def test_a_key_of_the_common_state_is_refused(
    where: Path, key: str, value: Any
) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=FileSystemWriter(where))
    with pytest.raises(
        CheckpointException, match=f"'{key}' is the name of a checkpoint's common state"
    ):
        dcp.save(
            {"w": torch.zeros(2), key: value}, storage_writer=FileSystemWriter(where)
        )
    assert megackpt.load_plain_tensors(where)["w"].tolist() == [1, 1]


def test_metadata_that_tells_another_dtype_or_makes_no_index_is_refused(
    where: Path,
) -> None:
    class Lying(DefaultSavePlanner):
        def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            item = metadata.state_dict_metadata["w"]
            properties = dataclasses.replace(item.properties, dtype=torch.int16)
            metadata.state_dict_metadata["w"] = dataclasses.replace(
                item, properties=properties
            )
            return plans, metadata

    state = {"w": torch.ones(4, dtype=torch.bfloat16)}
    with pytest.raises(
        CheckpointException, match=r"rank 0 wrote 'w' \[0:4\] as bfloat16.* int16"
    ):
        dcp.save(state, storage_writer=FileSystemWriter(where), planner=Lying())
    odd = {"y": torch.ones(2), "y/shard_0_1": 1, "y/shard_0_1/shard_0_1": 2}
    with pytest.raises(
        CheckpointException, match=r"no index that can be read: .* a key stands twice"
    ):
        dcp.save(odd, storage_writer=FileSystemWriter(where))
    assert not where.exists()


def test_a_checkpoint_that_is_replaced_under_a_reader_is_told_so(where: Path) -> None:
    dcp.save({"w": torch.ones(4)}, storage_writer=FileSystemWriter(where))
    reader, planner = FileSystemReader(where), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    dcp.save({"w": torch.zeros(4)}, storage_writer=FileSystemWriter(where))
    planner.set_up_planner({"w": torch.empty(4)}, metadata, True)
    with pytest.raises(CheckpointReplaced):
        reader.read_data(
            reader.prepare_local_plan(planner.create_local_plan()), planner
        ).wait()


def test_a_checkpoint_that_is_replaced_while_it_is_opened(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({"w": torch.ones(4)}, storage_writer=FileSystemWriter(where))
    seen: list[str] = []
    size = LocalStorage.size

    def replaced(self: LocalStorage, name: str) -> int | None:
        if name == checkpoint.INDEX and not seen:
            seen.append(name)
            dcp.save({"new": torch.zeros(4)}, storage_writer=FileSystemWriter(where))
        return size(self, name)

    monkeypatch.setattr(LocalStorage, "size", replaced)
    assert list(FileSystemReader(where).read_metadata().state_dict_metadata) == ["new"]
    assert seen


@pytest.mark.skipif(not ASKS_FOR_METADATA_TWICE, reason="torch 2.8 asks once")
def test_a_momentary_error_of_one_rank_does_not_part_it_from_the_others(
    where: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Momentary(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            if not kwargs:
                raise CheckpointReplaced("for a moment")
            return super().read_metadata(*args, **kwargs)

    dcp.save({"w": torch.ones(4)}, storage_writer=FileSystemWriter(where))
    shutil.copy(where / ".metadata", where / "__0.metadata")
    # torch asks again, with the rank: an answer would make this rank load without collectives, which others are in.
    first = "" if DROPS_ERRORS_OF_READERS else "for a moment.*"
    with refused(caplog, rf"{first}__0\.metadata without a \.metadata beside it"):
        dcp.load({"w": torch.zeros(4)}, storage_reader=Momentary(where))
    (where / "__0.metadata").unlink()
    with refused(caplog, rf"{first}holds no __0\.metadata"):
        dcp.load({"w": torch.zeros(4)}, storage_reader=Momentary(where))


# ---- several ranks


def sharded(seed: int, rows: int = 10) -> dict[str, Any]:
    """Two ranks: a sharded DTensor (of rows that two do not divide), a replicated one, plain things."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(rows * 4.0).reshape(rows, 4) + seed
    return {
        "model": {
            "rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "columns": distribute_tensor(whole.clone(), mesh, [Shard(1)]),
            "replicated": distribute_tensor(whole.clone(), mesh, [Replicate()]),
        },
        "plain": torch.full((70_000,), float(seed)),
        "step": seed,
    }


def local(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    return state.to_local() if hasattr(state, "to_local") else state


def check(folder: str, seed: int, rows: int = 10) -> None:
    """On all ranks: a checkpoint of ``sharded`` is read by stock and by us, also at another sharding."""
    for reader in READERS:
        state = sharded(0, rows)
        dcp.load(state, storage_reader=reader(folder))
        assert_same(local(state), local(sharded(seed, rows)))
        like = sharded(0, rows)
        like["model"]["rows"], like["model"]["columns"] = (
            like["model"]["columns"],
            like["model"]["rows"],
        )
        asked = {
            "model": {
                "rows": like["model"]["rows"],
                "columns": like["model"]["columns"],
            }
        }
        dcp.load(asked, storage_reader=reader(folder))
        model = sharded(seed, rows)["model"]
        assert_same(
            local(asked),
            {
                "model": {
                    "rows": local(model["columns"]),
                    "columns": local(model["rows"]),
                }
            },
        )
    assert megackpt.verify(folder).ok


def gathered(value: Any) -> list[Any]:
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    return everybody


def together(folder: str) -> None:
    """On two ranks: the walks of a synchronous save."""
    rank = dist.get_rank()
    one = f"{folder}/one"
    dcp.save(sharded(1), storage_writer=FileSystemWriter(one))
    check(one, 1)

    # Plans that are cached, to one directory and to others, with a structure that changes and changes back.
    writer = FileSystemWriter(one)
    for seed, rows, place in (
        (2, 10, "a"),
        (3, 10, "a"),
        (4, 10, "b"),
        (5, 12, "a"),
        (6, 12, "c"),
        (7, 10, "c"),
    ):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        kept = writer if seed % 2 else FileSystemWriter(f"{folder}/{place}")
        dcp.save(
            sharded(seed, rows),
            checkpoint_id=f"{folder}/{place}",
            storage_writer=kept,
            planner=planner,
        )
        check(f"{folder}/{place}", seed, rows)

    # One rank fails: all are told who and where, and what stood there stands.
    bad = {**sharded(8), "bad": torch.ones(2)}
    dcp.save(bad, storage_writer=FileSystemWriter(one))

    class Rank1Fails(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            if rank == 1:
                raise ValueError("not today")
            return super().finish_plan(new_plan)

    for planner in (Rank1Fails(), DefaultSavePlanner()):
        if type(planner) is DefaultSavePlanner and rank == 1:  # a disk that refuses
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointException) as caught:
            dcp.save(sharded(9), storage_writer=FileSystemWriter(one), planner=planner)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )
        refused = r"rank 1 cannot write \S*\.distcp.*File too large"
        assert re.search(
            refused if type(planner) is DefaultSavePlanner else "not today",
            str(caught.value),
        )
        check(one, 8)
    dcp.save(sharded(10), storage_writer=FileSystemWriter(one))
    check(one, 10)

    # Two jobs at once: whoever comes first wins, and the other is told, or comes after it.
    for seed in range(20, 24):
        dist.barrier()
        told = ""
        try:
            dcp.save(
                {"w": torch.full((9,), seed + rank)},
                storage_writer=FileSystemWriter(one),
                no_dist=True,
            )
        except CheckpointException as error:
            told = str(error)
        assert "" in gathered(told)
        assert not told or "SaveInProgress" in told, told
        found = megackpt.load_plain_tensors(one)["w"]
        assert megackpt.verify(one).ok
        assert {float(value) for value in found} < {float(seed), float(seed + 1)}

    # Ranks that name different directories, or a planner that drops what it should hand on.
    with pytest.raises(CheckpointException, match="all ranks must name the same"):
        dcp.save(sharded(11), storage_writer=FileSystemWriter(f"{folder}/{rank}"))
    dist.barrier()
    if rank == 0:
        dcp.save(
            {"w": torch.ones(3)},
            storage_writer=FileSystemWriter(f"{folder}/0"),
            no_dist=True,
        )
        assert megackpt.verify(f"{folder}/0").ok
        assert sorted(os.listdir(folder)) == ["0", "a", "b", "c", "one"]


def test_two_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks(together, 2, tmp_path)
    assert float(megackpt.load_plain_tensors(tmp_path / "one")["w"][0]) in (23.0, 24.0)


def killed(where: str) -> None:
    """All has been written, nothing was committed."""

    class Dies(FileSystemWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    dcp.save(nested(9), storage_writer=Dies(where))


def test_a_save_that_is_killed_before_its_commit(
    ranks: Any, where: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in (None, 1):
        if seed is not None:
            dcp.save(nested(seed), storage_writer=FileSystemWriter(where))
        (process,) = ranks(killed, 1, where, check=False)
        assert process.returncode == -signal.SIGKILL, process.stderr
        if seed is None:
            with refused(caplog, "died before it was complete"):
                loaded(FileSystemReader(where), nested(1))
        else:
            assert_same(loaded(FileSystemReader(where), nested(seed)), nested(seed))
    dcp.save(nested(2), storage_writer=FileSystemWriter(where))
    assert_same(loaded(FileSystemReader(where), nested(2)), nested(2))
    assert os.listdir(where.parent) == ["c"]


def in_the_background(folder: str) -> None:
    """On two ranks: ``async_save`` in threads and in processes."""
    writer = FileSystemWriter(folder)
    for seed, kind in enumerate(
        [AsyncCheckpointerType.THREAD] + [AsyncCheckpointerType.PROCESS] * 2, 1
    ):
        planner = DefaultSavePlanner(enable_plan_caching=seed > 1)
        place, state = f"{folder}/{seed}", sharded(seed)
        told = {
            "storage_writer": writer,
            "planner": planner,
            "async_checkpointer_type": kind,
        }
        future = dcp.async_save(state, checkpoint_id=place, **told)
        state["plain"].zero_()
        for tensor in state["model"].values():
            tensor.to_local().zero_()
        future.result()
        check(place, seed)
        dist.barrier()
    # In the process, too, a refusal comes back, and the next save goes on.
    told["planner"] = DefaultSavePlanner()
    writer.overwrite = False
    with pytest.raises(CheckpointException, match="CheckpointExists"):
        dcp.async_save(sharded(4), checkpoint_id=place, **told).result()
    if PROCESS_OUTLIVES_ERRORS:
        dcp.async_save(sharded(5), checkpoint_id=f"{folder}/5", **told).result()
        check(f"{folder}/5", 5)


def test_two_ranks_in_the_background(ranks: Any, tmp_path: Path) -> None:
    ranks(in_the_background, 2, tmp_path, timeout=120)
    assert sorted(os.listdir(tmp_path)) == [
        "1",
        "2",
        "3",
        *["5"][:PROCESS_OUTLIVES_ERRORS],
    ]
