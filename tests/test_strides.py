"""Strides that say nothing, of single elements and of none; and memory that different elements share."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.distributed.checkpoint.api import CheckpointException

import megackpt
from megackpt import ShardedTensor, Strategy
from megackpt.__main__ import main
from megackpt.dcp import FileSystemReader, FileSystemWriter
from megackpt.errors import ShardingError
from megackpt.testing import ThreadedGroup

FORMATS = ("torch_dist", "zarr", "safetensors")
W = torch.arange(6.0).reshape(1, 6)  # as the weight of nn.Linear(6, 1)
ODD: dict[str, torch.Tensor] = {
    "a column": W[:, 2],
    "a column, kept": W[:, 2:3],
    "a row of the transposed": W.t()[2],
    "every other of two": torch.arange(2.0)[::2],
    "every other of everything": torch.arange(8.0).reshape(2, 2, 2)[::2, ::2, ::2],
    "nothing in steps": torch.zeros(4)[0:0:2],
    "nothing, two-dimensional": torch.zeros(4, 6)[::2, 3:3],
    "a byte": torch.arange(4, dtype=torch.uint8)[1::4],
    "expanded": torch.tensor(3.0).expand(1),
    "of a parameter": torch.nn.Parameter(W.clone())[:, 2],
    "bfloat16": W.bfloat16()[:, 4],
    "complex, conjugated": torch.tensor([[1 + 2j, 3 - 4j]])[:, 1].conj(),
    "many, with an odd axis": torch.arange(12.0).as_strided((3, 1, 4), (4, 7, 1)),
}


def declared(data: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    return {
        key: ShardedTensor.from_rank_offsets(key, value) for key, value in data.items()
    }


def blank(strided: bool) -> dict[str, ShardedTensor]:
    """Targets: contiguous, or in the memory of something larger, with the strides of what was saved."""
    return declared(
        {
            key: torch.zeros(128, dtype=value.dtype).as_strided(
                value.shape, value.stride()
            )
            if strided
            else torch.zeros(value.shape, dtype=value.dtype)
            for key, value in ODD.items()
        }
    )


def check(got: dict[str, Any]) -> None:
    for key, value in ODD.items():
        assert torch.equal(got[key], value.detach()), key


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("how", ["at once", "async", "async, in turns"])
def test_saved_and_loaded(tmp_path: Path, name: str, how: str) -> None:
    state: dict[str, Any] = declared(ODD)
    large = torch.zeros(
        3 << 18
    )  # more than may be staged, so that pieces are handed over in turns
    if how == "async, in turns":
        state["large"] = ShardedTensor.from_rank_offsets("large", large)
    strategy = Strategy(name, staging_memory=None if how == "async" else 1 << 20)
    request = megackpt.save(
        state, tmp_path / "a", strategy, async_sharded_save=how != "at once"
    )
    if request is not None:
        request.execute_sync()
    check(megackpt.load_plain_tensors(tmp_path / "a"))
    for strided in (False, True):
        asked = blank(strided)
        got = megackpt.load(asked, tmp_path / "a")
        check(got)
        assert all(got[key] is not None for key in ODD)
        assert all(
            got[key].data_ptr() == shard.data.data_ptr()
            for key, shard in asked.items()
            if shard.data is not None
        )
    assert megackpt.verify(tmp_path / "a").ok


@pytest.mark.parametrize("name", FORMATS)
def test_handed_on_between_ranks_and_converted(tmp_path: Path, name: str) -> None:
    megackpt.save(declared(ODD), tmp_path / "a", name)

    def run(group: ThreadedGroup) -> None:
        exchanging = Strategy(name, exchange="always")
        options: dict[str, Any] = {
            "validate_access_integrity": False,
            "process_group": group,
        }
        check(
            megackpt.load(blank(group.rank == 1), tmp_path / "a", exchanging, **options)
        )

    ThreadedGroup.run(2, run)
    for other in (*FORMATS, "torch"):
        megackpt.convert(tmp_path / "a", tmp_path / other, other, workers=1)
        check(megackpt.load_plain_tensors(tmp_path / other))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_through_dcp(tmp_path: Path) -> None:
    state = {key: value.detach() for key, value in ODD.items() if not value.is_conj()}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "a"), no_dist=True)
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    for directory, reader in itertools.product(
        (tmp_path / "a", tmp_path / "stock"), (FileSystemReader, dcp.FileSystemReader)
    ):
        into = {
            key: torch.zeros(128, dtype=value.dtype).as_strided(
                value.shape, value.stride()
            )
            for key, value in state.items()
        }
        dcp.load(into, storage_reader=reader(directory), no_dist=True)
        assert all(torch.equal(into[key], value) for key, value in state.items())
        got = megackpt.load_plain_tensors(directory)
        assert all(torch.equal(got[key], value) for key, value in state.items())


def test_files_of_torch(tmp_path: Path) -> None:
    torch.save(dict(ODD), tmp_path / "odd.pt")
    check(megackpt.load_plain_tensors(tmp_path / "odd.pt"))


def test_common_states_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {str(i): value.detach() for i, value in enumerate(ODD.values())}
    megackpt.save(common, tmp_path / "a")
    megackpt.save(common, tmp_path / "b")
    megackpt.save({**common, "0": W[:, 3]}, tmp_path / "c")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    assert "common_state" in capsys.readouterr().out


def test_a_common_state_that_differs_between_ranks(tmp_path: Path) -> None:
    def run(group: ThreadedGroup) -> None:
        common = {str(i): value.detach() for i, value in enumerate(ODD.values())}
        own = {"0": W[:, 3]} if group.rank else {}
        megackpt.save({**common, **own}, tmp_path / "a", process_group=group)

    ThreadedGroup.run(2, run)
    got = megackpt.load({}, tmp_path / "a")
    assert all(torch.equal(got[str(i)], v.detach()) for i, v in enumerate(ODD.values()))


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_view(tmp_path: Path, data: st.DataObject) -> None:
    base = torch.arange(512, dtype=torch.int16)
    shape = data.draw(st.lists(st.integers(0, 3), max_size=4))
    strides = data.draw(
        st.lists(st.integers(0, 30), min_size=len(shape), max_size=len(shape))
    )
    view = base.as_strided(shape, strides, data.draw(st.integers(0, 8)))
    megackpt.save({"v": ShardedTensor.from_rank_offsets("v", view)}, tmp_path / "h")
    target = torch.full((512,), -1, dtype=torch.int16).as_strided(shape, strides)
    places = torch.arange(512).as_strided(shape, strides).reshape(-1)
    asked = {"v": ShardedTensor.from_rank_offsets("v", target)}
    if len(places.unique()) < len(places):
        with pytest.raises(ShardingError, match="'v': cannot load into"):
            megackpt.load(asked, tmp_path / "h")
    else:
        assert torch.equal(megackpt.load(asked, tmp_path / "h")["v"], view)


def test_memory_that_elements_share_is_refused_by_name(tmp_path: Path) -> None:
    windows = torch.arange(8.0).unfold(0, 4, 2)
    megackpt.save(
        {"x": ShardedTensor.from_rank_offsets("windows", windows)}, tmp_path / "a"
    )
    memory = torch.zeros(8)
    asked = {"x": ShardedTensor.from_rank_offsets("windows", memory.unfold(0, 4, 2))}
    with pytest.raises(
        ShardingError,
        match=r"'windows': cannot load into .* overlaps itself .*\(2, 1\)",
    ):
        megackpt.load(asked, tmp_path / "a")
    assert not memory.any()
    large = torch.zeros(8).as_strided((1 << 20, 1 << 20), (0, 0))
    with pytest.raises(ShardingError, match="expanded"):
        megackpt.load(
            {"x": ShardedTensor.from_rank_offsets("windows", large)}, tmp_path / "a"
        )


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_dcps_loads_refuse_it_too(tmp_path: Path) -> None:
    windows = torch.arange(8.0).unfold(0, 4, 2)
    dcp.save(
        {"windows": windows},
        storage_writer=FileSystemWriter(tmp_path / "a"),
        no_dist=True,
    )
    into = {"windows": torch.zeros(8).unfold(0, 4, 2)}
    with pytest.raises(CheckpointException, match="windows"):
        dcp.load(into, storage_reader=FileSystemReader(tmp_path / "a"), no_dist=True)


def test_ordinary_views_are_loaded_into(tmp_path: Path) -> None:
    """Transposed, sliced in steps, permuted, a diagonal, a part of larger memory: also of many elements."""
    base = torch.zeros(
        1 << 8, 1 << 7, 1 << 8, dtype=torch.uint8
    )  # more elements than would be looked at one by one
    views = {
        "transposed": base.transpose(0, 2),
        "permuted": base.permute(1, 2, 0),
        "in steps": base[::3, 1::2, ::5],
        "transposed, in steps": base.transpose(0, 1)[::2, ::3],
        "diagonal": torch.zeros(64, 64, 64).diagonal(dim1=0, dim2=2),
        "channels last": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "interleaved": torch.zeros(8).as_strided((2, 3), (3, 2)),
    }
    values = {
        key: torch.arange(view.numel()).reshape(view.shape).to(view.dtype)
        for key, view in views.items()
    }
    megackpt.save(declared(values), tmp_path / "a")
    got = megackpt.load(
        declared({key: view.clone() for key, view in views.items()}), tmp_path / "a"
    )
    assert all(torch.equal(got[key], value) for key, value in values.items())
    for key, view in views.items():  # one after the other: several of them share memory
        assert torch.equal(
            megackpt.load(declared({key: view}), tmp_path / "a")[key], values[key]
        )
