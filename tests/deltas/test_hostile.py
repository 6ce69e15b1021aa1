"""Chains that were damaged, pruned or forged, and comparisons of versions."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import megackpt
from megackpt.checkpoint import open_checkpoint
from megackpt.checkpoint.index import INDEX, decode_index, encode_index
from megackpt.cli.compare import compare
from megackpt.deltas import WeightPublisher
from megackpt.deltas.chain import VERSION_FILE, latest, open_version, path_of
from megackpt.errors import CorruptCheckpoint, MismatchError, ShardingError
from megackpt.planning.box import Box
from megackpt.planning.manifest import TensorEntry, TensorMeta
from megackpt.planning.tensor_digest import MODULUS, digest_of
from megackpt.storage import digest as bytes_digest
from megackpt.testing import ThreadedGroup
from tests.bits import assert_same


def publish(url: Path, *states: torch.Tensor) -> None:
    with WeightPublisher(url, max_chain_share=9) as publisher:
        for number, weights in enumerate(states):
            publisher.publish(number, {"w": weights})


def loaded(url: Path, number: int, like: torch.Tensor) -> torch.Tensor:
    found = {"w": torch.zeros_like(like)}
    megackpt.load(megackpt.sharded(found), path_of(url, number))
    return found["w"]


@pytest.mark.parametrize("step", [0, 1])
def test_equal_changes_of_other_weights_differ(tmp_path: Path, step: int) -> None:
    """Digests of pieces say nothing about the weights."""
    ones = torch.ones(100, dtype=torch.int32)
    change = torch.zeros_like(ones)
    change[5] = step
    publish(tmp_path / "a", ones, ones + change)
    publish(tmp_path / "b", 2 * ones, 2 * ones + change)
    one, other = (
        open_checkpoint(path_of(tmp_path / name, 1)) for name in ("a", "b")
    )  # fmt: skip
    found = compare(one, other)
    assert [tensor.elements for tensor in found.tensors] == [100]
    assert compare(one, one).same


def test_a_version_is_the_same_as_an_anchor_of_its_weights(tmp_path: Path) -> None:
    weights = torch.arange(100)
    publish(tmp_path / "a", weights, weights + 1)
    publish(tmp_path / "b", weights + 1)
    one = open_checkpoint(path_of(tmp_path / "a", 1))
    assert compare(one, open_checkpoint(path_of(tmp_path / "b", 0))).same


def forge(directory: str, change: Callable[[str], str]) -> None:
    """Replace the text of version.json, and its digest in the index."""
    place, index = Path(directory, VERSION_FILE), Path(directory, INDEX)
    text = change(place.read_text()).encode()
    place.write_bytes(text)
    manifest, files = decode_index(index.read_bytes(), directory)
    index.write_bytes(
        encode_index(manifest, {**files, VERSION_FILE: (len(text), bytes_digest(text))})
    )


def without_base(text: str) -> str:
    return json.dumps({**json.loads(text), "base": None})


def infinite(text: str) -> str:
    return text.replace('"base": {"version": 0', '"base": {"version": Infinity')


@pytest.mark.parametrize("change", [without_base, infinite])
def test_forged_places_in_the_chain(
    tmp_path: Path, change: Callable[[str], str]
) -> None:
    publish(tmp_path, *map(torch.full, [(9,)] * 3, range(3)))
    forge(path_of(tmp_path, 1), change)
    for number in (1, 2):
        with pytest.raises(CorruptCheckpoint, match="version_000001"):
            loaded(tmp_path, number, torch.ones(9, dtype=torch.int64))
    assert not megackpt.verify(path_of(tmp_path, 1)).ok


def test_an_anchor_with_other_dtypes_is_no_base(tmp_path: Path) -> None:
    publish(tmp_path / "a", torch.ones(9), torch.zeros(9))
    publish(tmp_path / "b", torch.ones(9, dtype=torch.float64))
    anchor = tmp_path / "a" / "version_000000"
    anchor.rename(tmp_path / "old")
    (tmp_path / "b" / "version_000000").rename(anchor)
    save_id = open_version(tmp_path / "a", 0).save_id

    def rebased(text: str) -> str:
        fields = json.loads(text)
        fields["base"]["save_id"] = save_id
        return json.dumps(fields)

    forge(path_of(tmp_path / "a", 1), rebased)
    with pytest.raises(MismatchError, match="'w'"):
        loaded(tmp_path / "a", 1, torch.ones(9))


def test_after_a_version_was_removed_an_anchor_follows(tmp_path: Path) -> None:
    """A publisher that holds the weights does not go on with a chain that nobody can read."""
    weights = torch.arange(100)
    publisher = WeightPublisher(tmp_path, max_chain_share=9)
    for number in range(3):
        publisher.publish(number, {"w": weights + number})
    (tmp_path / "version_000001").rename(tmp_path / "removed")
    publisher.publish(3, {"w": weights + 3})
    assert open_version(tmp_path, 3).base is None
    assert_same(loaded(tmp_path, 3, weights), weights + 3, "w")


def test_versions_have_no_negative_numbers(tmp_path: Path) -> None:
    with (
        WeightPublisher(tmp_path) as publisher,
        pytest.raises(ShardingError, match="0 or more"),
    ):
        publisher.publish(-1, {"w": torch.ones(3)})
    assert latest(tmp_path) is None


@pytest.mark.parametrize("number", [np.int64(1), True])
def test_numbers_of_other_types(tmp_path: Path, number: int) -> None:
    with WeightPublisher(tmp_path) as publisher:
        publisher.publish(number, {"w": torch.ones(3)})
    assert open_version(tmp_path, 1).number == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_learn_of_the_commit(tmp_path: Path, rank: int) -> None:
    """The other rank holds the version: this rank reads it."""
    weights = torch.arange(8)

    def work(group: ThreadedGroup) -> None:
        def publish(number: int) -> None:
            mine = weights[4 * group.rank :][:4] + number
            publisher.publish(
                number,
                {
                    "w": megackpt.ShardedTensor(
                        "w", mine, mine.dtype, (4,), (8,), (4 * group.rank,), None
                    )
                },
            )

        publisher = WeightPublisher(tmp_path, process_group=group)
        publish(0)
        if group.rank == rank:
            # As if this rank were interrupted after the commit.
            publisher._snapshot.commit = lambda: None  # type: ignore[method-assign]
        publish(1)
        if group.rank == rank:
            del publisher._snapshot.commit
        publish(2)
        publish(3)

    ThreadedGroup.run(2, work)
    for number in range(4):
        assert_same(loaded(tmp_path, number, weights), weights + number, "w")


def test_a_rank_without_tensors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(group: ThreadedGroup) -> None:
        with WeightPublisher(tmp_path, process_group=group) as publisher:
            for number in range(2):
                weights = torch.full((9,), number)
                state = {
                    "w": megackpt.ShardedTensor(
                        "w", weights, weights.dtype, (9,), (9,), (0,), None
                    )
                }
                publisher.publish(number, state if group.rank else {})

    ThreadedGroup.run(2, work)
    assert_same(loaded(tmp_path, 1, torch.ones(9).long()), torch.ones(9).long(), "w")
    assert not caplog.records


def test_digests_take_little_memory() -> None:
    """Not an index of 8 bytes for each element at a time."""
    entry = TensorEntry("w", TensorMeta((1 << 12, 1 << 11), "bfloat16"))
    bits = np.zeros(1 << 23, "<u2")
    tracemalloc.start()
    try:
        total = digest_of(entry, Box.whole(entry.meta.shape), bits)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * bits.nbytes
    parts = [Box((0, 0), (1 << 12, 7)), Box((0, 7), (1 << 12, (1 << 11) - 7))]
    found = [digest_of(entry, box, bits[: box.volume]) for box in parts]
    assert sum(found) % MODULUS == total
