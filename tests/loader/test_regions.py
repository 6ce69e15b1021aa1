"""Regions of stored tensors as arrays: the right elements of every dtype, from any chunks, and objects' blobs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor, serialization
from megackpt.checkpoint import open_checkpoint
from megackpt.loader.regions import Regions
from megackpt.planning.box import Box
from megackpt.planning.manifest import carried_dtype
from megackpt.staging.source import host_array

GOLDEN = Path(__file__).parent.parent / "golden" / "mcore-0.16.1-tp2pp1dp2"


def test_every_tensor_of_a_golden_in_regions() -> None:
    regions = Regions(open_checkpoint(GOLDEN))
    tensors = megackpt.load_plain_tensors(GOLDEN)
    numbers = regions.opened.manifest.numbers()
    wanted = []
    for key, tensor in tensors.items():
        whole = Box.whole(tuple(tensor.shape))
        half = Box(
            tuple(n // 2 for n in whole.shape), tuple(n - n // 2 for n in whole.shape)
        )
        wanted += [(key, whole), (key, half)]
    found = regions.arrays([(numbers[key], box) for key, box in wanted])
    for (key, box), array in zip(wanted, found, strict=True):
        expected = host_array(tensors[key])[(*box.slices(), ...)]
        assert array.dtype == carried_dtype(tensors[key].element_size())
        assert array.tobytes() == np.ascontiguousarray(expected).tobytes()


def test_blobs(tmp_path: Path) -> None:
    state = {i: ShardedObject("o", {"n": i}, (3,), (i,)) for i in range(3)}
    megackpt.save({"objects": state, "iteration": 4}, tmp_path / "c")
    regions = Regions(open_checkpoint(tmp_path / "c"))
    number = regions.opened.manifest.numbers()["o"]
    blobs = regions.blobs([(number, Box((i,), (1,))) for i in (2, 0)])
    assert [serialization.load(blob) for blob in blobs] == [[{"n": 2}], [{"n": 0}]]
    common = regions.common()
    assert common is not None
    assert serialization.load(common)["iteration"] == 4


def test_digests_are_checked_unless_they_are_not_wanted(tmp_path: Path) -> None:
    megackpt.save(
        {"w": ShardedTensor.from_rank_offsets("w", torch.ones(64))}, tmp_path / "c"
    )
    opened = open_checkpoint(tmp_path / "c")
    (chunk,) = opened.manifest.chunks_of("w")
    file = tmp_path / "c" / chunk.location.file
    data = bytearray(file.read_bytes())
    data[chunk.location.start] ^= 1
    file.write_bytes(data)
    region = [(opened.manifest.numbers()["w"], Box((0,), (64,)))]
    with pytest.raises(megackpt.CorruptCheckpoint, match="'w'"):
        Regions(opened).arrays(region)
    assert Regions(opened, verify=False).arrays(region)[0].nbytes == 256
