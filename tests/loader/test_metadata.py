"""Metadata, common state and whole tensors, read by one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt.distributed import RankGroup
from megackpt.testing import ThreadedGroup
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
