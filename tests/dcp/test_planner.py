"""The planners: coverage told, writers balanced, delegates asked, what torch's planners do still done."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

import megackpt
from megackpt.dcp import FileSystemReader, FileSystemWriter
from megackpt.dcp.planner import Delegate, LoadPlanner, SavePlanner
from megackpt.errors import (
    CoverageError,
    ShardingError,
    UntrustedClass,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FLOAT = torch.float32


def shard(
    key: str,
    offset: tuple[int, ...],
    sizes: tuple[int, ...],
    size: tuple[int, ...],
    dtype: Any = FLOAT,
) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(size))
    return WriteItem(MetadataIndex(key, offset), WriteItemType.SHARD, tensor_data=data)


def blob(key: str) -> WriteItem:
    return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)


def global_plan(*items: list[WriteItem], **options: Any) -> list[SavePlan]:
    planner = SavePlanner(**options)
    plans, _ = planner.create_global_plan(
        [SavePlan(each, planner_data={}) for each in items]
    )
    return plans


def saved(state: dict[str, Any], folder: Path, planner: SavePlanner) -> Any:
    return dcp.save(state, checkpoint_id=folder, planner=planner, no_dist=True)


def loaded(state: dict[str, Any], folder: Path, planner: Any = None) -> dict[str, Any]:
    dcp.load(state, checkpoint_id=folder, planner=planner, no_dist=True)
    return state


# ---- planning for all ranks


def test_a_hole_is_reported_with_its_box_and_the_declared_boxes() -> None:
    with pytest.raises(CoverageError, match=re.escape("'w'")) as caught:
        global_plan(
            [shard("w", (0, 0), (2, 4), (8, 4))], [shard("w", (4, 0), (4, 4), (8, 4))]
        )
    assert "[2:4, 0:4]" in str(caught.value)
    assert "rank 0 [0:2, 0:4]; rank 1 [4:8, 0:4]" in str(caught.value)


def test_an_overlap_of_boxes_with_one_offset_raises() -> None:
    long, short = shard("w", (0,), (8,), (8,)), shard("w", (0,), (4,), (8,))
    DefaultSavePlanner().create_global_plan(
        [SavePlan([long], planner_data={}), SavePlan([short], planner_data={})]
    )
    with pytest.raises(CoverageError, match=r"\[0:4\] of \(8,\) has 2 main replicas"):
        global_plan([long], [short])


def test_all_disagreements_are_in_one_error() -> None:
    whole = (
        shard("shape", (0,), (4,), (4,)),
        shard("dtype", (0,), (4,), (4,)),
        blob("kind"),
    )
    other = (
        shard("shape", (0,), (5,), (5,)),
        shard("dtype", (0,), (4,), (4,), torch.bfloat16),
        shard("kind", (0,), (4,), (4,)),
    )
    with pytest.raises(CoverageError) as caught:
        global_plan([*whole], [*whole], [*other])
    for key in ("'shape'", "'dtype'", "'kind'", "bfloat16", "rank 2"):
        assert key in str(caught.value)


def test_the_error_for_an_unsupported_dtype_names_the_key() -> None:
    with pytest.raises(ShardingError, match="'w': quantized data"):
        global_plan([shard("w", (0,), (4,), (4,), torch.qint8)], [])


def test_what_all_ranks_hold_is_written_once_and_in_level_parts() -> None:
    items = [
        shard(f"w{i}", (0,), (n,), (n,))
        for i, n in enumerate((1000, 900, 500, 500, 400, 100))
    ]
    plans = global_plan(*[[*items, blob("step")] for _ in range(4)])
    keys = [item.index.fqn for plan in plans for item in plan.items]
    assert sorted(keys) == sorted([f"w{i}" for i in range(6)] + ["step"])
    sizes = [
        sum(i.tensor_data.size.numel() for i in p.items if i.tensor_data) for p in plans
    ]
    assert max(sizes) == 1000
    lowest = global_plan(*[items] * 4, dedup_save_to_lowest_rank=True)
    assert [len(plan.items) for plan in lowest] == [6, 0, 0, 0]


def test_an_empty_piece_does_not_take_the_place_of_a_full_one() -> None:
    full, empty = shard("w", (0,), (4,), (4,)), shard("w", (0,), (0,), (4,))
    plans = global_plan([empty], [full], [shard("none", (0, 0), (0, 5), (0, 5))])
    assert [[i.index.fqn for i in plan.items] for plan in plans] == [
        [],
        ["w"],
        ["none"],
    ]


def test_one_rank_alone_is_not_asked_for_what_others_hold() -> None:
    (plan,) = global_plan([shard("w", (4,), (4,), (8,))])
    assert len(plan.items) == 1


# ---- plans that are used again


def test_a_cached_plan_is_dropped_when_only_a_dtype_changed(tmp_path: Path) -> None:
    for n, dtype in enumerate((torch.float32, torch.float32, torch.bfloat16)):
        planner = SavePlanner(enable_plan_caching=True)
        metadata = saved({"w": torch.ones(4, dtype=dtype)}, tmp_path / str(n), planner)
        assert metadata.state_dict_metadata["w"].properties.dtype == dtype


def test_a_tensor_whose_dtype_changed_is_stored_as_a_tensor_under_cached_plans(
    tmp_path: Path,
) -> None:
    for n, dtype in enumerate((torch.float32, torch.bfloat16, torch.bfloat16)):
        writer, planner = (
            FileSystemWriter(tmp_path / str(n)),
            SavePlanner(enable_plan_caching=True),
        )
        dcp.save(
            {"w": torch.ones(4, dtype=dtype)},
            storage_writer=writer,
            planner=planner,
            no_dist=True,
        )
        assert megackpt.load_plain_tensors(tmp_path / str(n))["w"].dtype == dtype


@pytest.mark.parametrize("before", [None, 4])
@pytest.mark.parametrize(
    "once", [False, True]
)  # one planner for all saves, or a new one for each
def test_a_save_that_fails_leaves_no_trace_in_cached_plans(
    tmp_path: Path, before: int | None, once: bool
) -> None:
    kept = SavePlanner(enable_plan_caching=True)

    def save(n: int, where: str, **options: Any) -> None:
        writer = FileSystemWriter(tmp_path / where, **options)
        planner = kept if once else SavePlanner(enable_plan_caching=True)
        dcp.save(
            {"w": torch.ones(n)}, storage_writer=writer, planner=planner, no_dist=True
        )

    dcp.save(
        {"w": torch.ones(1)},
        storage_writer=FileSystemWriter(tmp_path / "full"),
        no_dist=True,
    )
    if before is not None:
        save(before, "before")
    for _ in range(2):
        with pytest.raises(CheckpointException, match="CheckpointExists"):
            save(6, "full", overwrite=False)
    for number, n in enumerate((4, 6, 6)):
        save(n, str(number))
        assert megackpt.load_plain_tensors(tmp_path / str(number))["w"].shape == (n,)
        state = {"w": torch.zeros(n)}
        dcp.load(
            state, storage_reader=FileSystemReader(tmp_path / str(number)), no_dist=True
        )
        assert state["w"].sum() == n


# ---- delegates


class Pair:
    """What torch's planners would pickle."""

    def __init__(self, left: torch.Tensor, name: str = "") -> None:
        self.left = left
        self.name = name


class Derived(Pair):
    pass


class AsTensor(Delegate):
    def __init__(self) -> None:
        self.filled: list[str] = []

    def create_write_items(self, key: str, value: Pair) -> list[WriteItem]:
        return super().create_write_items(key, value.left)

    def create_chunk_list(self, value: Pair) -> list[ChunkStorageMetadata]:
        return super().create_chunk_list(value.left)

    def lookup_object(self, value: Pair, index: MetadataIndex) -> Any:
        return super().lookup_object(value.left, index)

    def commit_tensor(self, value: Pair, item: Any, tensor: torch.Tensor) -> None:
        self.filled.append(item.dest_index.fqn)


class AsName(Delegate):
    def transform_object(self, item: WriteItem, part: Pair) -> Any:
        return super().transform_object(item, part.name)

    def load_bytes(self, value: Pair, item: Any, stream: Any) -> Any:
        return Derived(value.left, super().load_bytes(value, item, stream))


def test_a_delegate_speaks_for_a_type_and_the_nearest_one_counts(
    tmp_path: Path,
) -> None:
    tensor, name = AsTensor(), AsName()
    state = {
        "a": {
            "pair": Pair(torch.arange(6.0)),
            "deep": {"er": Derived(torch.ones(1), "x")},
        },
        "n": 1,
    }
    saved(state, tmp_path, SavePlanner(delegates={Pair: tensor, Derived: name}))
    empty = {
        "a": {"pair": Pair(torch.zeros(6)), "deep": {"er": Derived(torch.ones(1))}},
        "n": 0,
    }
    found = loaded(
        empty, tmp_path, LoadPlanner(delegates={Pair: tensor, Derived: name})
    )
    assert found["a"]["pair"].left.tolist() == list(range(6))
    assert found["a"]["deep"]["er"].name == "x"
    assert found["n"] == 1
    assert tensor.filled == ["a.pair"]
    plain = loaded(
        {"a": {"pair": torch.zeros(6), "deep": {"er": None}}, "n": 0}, tmp_path
    )
    assert plain == {"a": {"pair": plain["a"]["pair"], "deep": {"er": "x"}}, "n": 1}
    assert plain["a"]["pair"].tolist() == list(range(6))


def test_an_index_is_resolved_in_the_flattened_state_dict() -> None:
    weight, pair = torch.ones(2, 3), Pair(torch.ones(4))
    planner = SavePlanner(delegates={Pair: AsTensor()})
    planner.set_up_planner(
        {"layers": [{"weight": weight}], "pair": pair, "n": 1}, is_coordinator=True
    )
    assert planner.lookup_object(MetadataIndex("layers.0.weight", (0, 0))) is weight
    assert planner.lookup_object(MetadataIndex("pair", (0,))) is pair.left
    assert planner.lookup_object(MetadataIndex("n")) == 1
    with pytest.raises(ValueError, match="Could not find FQN"):
        planner.lookup_object(MetadataIndex("other"))


def test_a_delegated_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    saved({"w": torch.ones(4)}, tmp_path, SavePlanner())
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        loaded(
            {"w": torch.ones(5)},
            tmp_path,
            LoadPlanner(delegates={torch.Tensor: Delegate()}),
        )


class Moments(Delegate):
    def extensions(self, item: WriteItem) -> list[ZStandard]:
        return [ZStandard()] if "moment" in item.index.fqn else []


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, FileSystemWriter])
def test_some_tensors_are_compressed_and_stock_reads_them(
    tmp_path: Path, writer: Any
) -> None:
    values = torch.arange(4096.0)
    state = {
        "moment": values.clone(),
        "nested": [{"moment": values + 1}],
        "weight": values + 2,
        "n": 5,
    }
    planner = SavePlanner(delegates={torch.Tensor: Moments(), int: Moments()})
    through = writer(tmp_path)
    if writer is dcp.FileSystemWriter:
        through.transforms = planner.transforms
    dcp.save(state, storage_writer=through, planner=planner, no_dist=True)
    stored = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    compressed = {
        index.fqn
        for index, info in stored.items()
        if getattr(info, "transform_descriptors", None)
    }
    assert compressed == {"moment", "nested.0.moment"}
    empty = torch.zeros(4096)
    found = {
        "moment": empty.clone(),
        "nested": [{"moment": empty.clone()}],
        "weight": empty.clone(),
        "n": 0,
    }
    loaded(found, tmp_path)
    assert torch.equal(found["moment"], values)
    assert torch.equal(found["nested"][0]["moment"], values + 1)
    assert torch.equal(found["weight"], values + 2)
    assert found["n"] == 5


def test_the_writers_extensions_are_for_items_whose_delegate_names_none(
    tmp_path: Path,
) -> None:
    class Odd(DefaultSavePlanner):
        transforms = ("of its own",)

    values = torch.zeros(4096)
    state = {"moment": values, "weight": values, "n": 5}
    for n, planner in enumerate(
        (SavePlanner(delegates={torch.Tensor: Moments()}), Odd())
    ):
        writer = FileSystemWriter(tmp_path / str(n), _extensions=[ZStandard()])
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
        stored = dcp.FileSystemReader(tmp_path / str(n)).read_metadata().storage_data
        assert {info.transform_descriptors[0] for info in stored.values()} == {
            "stream.zstd/1"
        }
        found = loaded(
            {"moment": values + 1, "weight": values + 1, "n": 0}, tmp_path / str(n)
        )
        assert not found["moment"].any()
        assert found["n"] == 5


# ---- loading objects


class Stranger:
    def __init__(self) -> None:
        self.told = "x"


def test_objects_are_read_without_running_what_they_ask_for(tmp_path: Path) -> None:
    saved({"a": Stranger(), "b": {"c": [1, {2}]}}, tmp_path, SavePlanner())
    asked = {"a": None, "b": {"c": [0, None]}}
    with pytest.raises(dcp.CheckpointException) as caught:
        loaded(asked, tmp_path, LoadPlanner())
    error, _ = caught.value.failures[0]
    assert isinstance(error, UntrustedClass)
    assert str(error).startswith("'a'")
    found = loaded(asked, tmp_path, LoadPlanner(trusted=(Stranger,)))
    assert found["a"].told == "x"
    assert found["b"] == {"c": [1, {2}]}


@pytest.mark.parametrize("flat", [True, False])
def test_objects_land_in_the_callers_dict_however_it_is_flattened(
    tmp_path: Path, flat: bool
) -> None:
    saved({"n": 7}, tmp_path, SavePlanner(flatten_state_dict=flat))
    assert loaded({"n": 0}, tmp_path, LoadPlanner(flatten_state_dict=flat)) == {"n": 7}
