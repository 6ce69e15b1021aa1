"""Metadata, common state and whole tensors, read by one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.distributed import RankGroup
from megackpt.errors import StorageError
from megackpt.testing import ThreadedGroup
from tests.faults.test_slow_disks import Hang
from tests.test_save_load import EXPERTS, FORMATS, FULL, saved


@pytest.mark.parametrize("strategy", FORMATS)
def test_metadata_and_plain_tensors(tmp_path: Path, strategy: str) -> None:
    saved(tmp_path, strategy, 2, 2, 1)
    metadata = megackpt.load_tensors_metadata(tmp_path)
    assert set(metadata) == {"embedding", "layers.w", "bias", "step"}
    layers = metadata["layers.w"]
    assert (layers.local_shape, layers.global_shape, layers.global_offset) == (
        (4, 6, 2),
        (4, 6, 2),
        (0, 0, 0),
    )
    assert layers.axis_fragmentations == (1, 1, 1)
    assert layers.data is None
    everything = megackpt.load_sharded_metadata(tmp_path)
    assert set(everything) == {
        *metadata,
        *(f"meta/shard_{p}.{t}_2.2" for p in (0, 1) for t in (0, 1)),
    }

    def whole(group: RankGroup) -> Any:
        return megackpt.load(
            dict(everything),
            tmp_path,
            validate_access_integrity=False,
            process_group=group,
        )

    for state in ThreadedGroup.run(2, whole):
        assert torch.equal(state["embedding"], FULL)
        assert state["meta/shard_1.0_2.2"] == {"who": (1, 0)}
    plain = megackpt.load_plain_tensors(tmp_path)
    assert torch.equal(plain["layers.w"], EXPERTS)
    assert megackpt.get_default_load_sharded_strategy(tmp_path).backend == strategy


READERS: dict[str, Callable[..., Any]] = {
    name: getattr(megackpt, name)
    for name in (
        "verify",
        "load_plain_tensors",
        "load_common_state_dict",
        "load_content_metadata",
        "load_tensors_metadata",
        "load_sharded_metadata",
        "check_is_distributed_checkpoint",
        "get_default_load_sharded_strategy",
    )
}


@pytest.mark.parametrize("place", ["open", "preadv"])
@pytest.mark.parametrize("name", READERS)
def test_a_storage_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(9)), "step": 3}
    megackpt.save(state, tmp_path / "c", content_metadata={"a": 1})
    READERS[name](tmp_path / "c")  # all modules are imported now
    hang = Hang(monkeypatch, os, place, "megackpt-")
    with pytest.raises(StorageError, match=rf"{tmp_path}/c.* not answered for 0\.4"):
        READERS[name](tmp_path / "c", timeout=timedelta(seconds=0.5))
    assert hang.calls
    hang.end()
    assert READERS[name](tmp_path / "c")
