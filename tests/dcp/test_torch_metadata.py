"""torch DCP's metadata and our index of the same checkpoint."""

from __future__ import annotations

import dataclasses
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.planner import SavePlan

import megackpt
from megackpt.dcp import FileSystemReader, FileSystemWriter
from tests.dcp.states import (
    READERS,
    assert_same,
    loaded,
    nested,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]


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
        CheckpointException, match=r"no index that can be read: .* a key occurs twice"
    ):
        dcp.save(odd, storage_writer=FileSystemWriter(where))
    assert not where.exists()
