"""FileSystemReader under stock torch DCP: stock's and Megatron's checkpoints, damage, replacement."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
)

import megackpt
from megackpt import ShardedTensor, checkpoint
from megackpt.dcp import FileSystemReader, FileSystemWriter
from megackpt.errors import CheckpointingException, CheckpointReplaced
from megackpt.storage import LocalStorage
from megackpt.storage.files import LocalReader
from tests.dcp.states import (
    GOLDEN,
    assert_same,
    loaded,
    nested,
    refused,
)
from tests.torch_names import (
    ASKS_FOR_METADATA_TWICE,
    DROPS_ERRORS_OF_READERS,
    HAS_SAVES_WITHOUT_COLLECTIVES,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]


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
        with refused(caplog, r"posix\.system|not a file inside|should end at byte"):
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


def test_a_checkpoint_replaced_during_a_read_raises(where: Path) -> None:
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
