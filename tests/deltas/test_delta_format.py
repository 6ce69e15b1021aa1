"""The format "delta", as reads use it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megackpt.deltas import WeightPublisher, delta_format
from megackpt.deltas.chain import Version, chain_of, open_version
from megackpt.loader.regions import Regions
from megackpt.planning.box import Box


def test_several_reads_of_a_version_open_its_chain_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"a": torch.zeros(4, 6), "b": torch.zeros(5)}
    with WeightPublisher(tmp_path, max_chain_share=99) as publisher:
        for number in range(4):
            weights["a"][number, 2] = weights["b"][number] = 1 + number
            publisher.publish(number, weights)
    opened: list[int] = []

    def counted(version: Version) -> list[Version]:
        opened.append(version.number)
        return chain_of(version)

    monkeypatch.setattr(delta_format, "chain_of", counted)
    for version in (3, 2):
        regions = Regions(open_version(tmp_path, version).opened)
        # Reads of one tensor get a part of the manifest.
        [b] = regions.arrays([(1, Box((1,), (3,)))])
        assert b.view("f4").tolist() == [2, 3, 4 if version == 3 else 0]
        [a] = regions.arrays([(0, Box((2, 1), (2, 3)))])
        assert a.view("f4").tolist() == [[0, 3, 0], [0, 4 if version == 3 else 0, 0]]
        both = regions.arrays([(0, Box((0, 2), (1, 1))), (1, Box((0,), (1,)))])
        assert [array.view("f4").item() for array in both] == [1, 1]
    assert opened == [3, 2]
