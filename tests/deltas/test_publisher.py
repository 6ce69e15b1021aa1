"""Versions of weights, published by ranks at one layout and loaded at another one, bit for bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.backends.torch_dist import distcp_writer
from megackpt.deltas import WeightPublisher, snapshot
from megackpt.deltas.chain import latest, open_version, path_of, versions
from megackpt.errors import (
    CheckpointExists,
    CheckpointingException,
    CorruptCheckpoint,
    MismatchError,
    NotACheckpoint,
    ShardingError,
)
from megackpt.huggingface import Fuse, Padded
from megackpt.planning.manifest import ITEMSIZE
from megackpt.planning.tensor_digest import digest, key_of
from megackpt.testing import ThreadedGroup
from tests.bits import assert_same, bits

Weights = dict[str, torch.Tensor]
# For each tensor: the axis along which it is cut, and the bounds of the cuts. None: all ranks hold it.
Layout = dict[str, tuple[int, list[int]] | None]


def cut(chance: random.Random, weights: Weights, ranks: int) -> Layout:
    """Uneven cuts: some ranks may hold nothing of a tensor."""
    layout: Layout = {}
    for key, tensor in weights.items():
        layout[key] = None
        if tensor.dim() and chance.random() < 0.8:
            axis = chance.randrange(tensor.dim())
            size = tensor.shape[axis]
            inner = sorted(chance.choices(range(size + 1), k=ranks - 1))
            layout[key] = axis, [0, *inner, size]
    return layout


def shards(weights: Weights, layout: Layout, rank: int) -> dict[str, ShardedTensor]:
    """What one rank holds: views of the weights."""
    state = {}
    for key, tensor in weights.items():
        offset = [0] * tensor.dim()
        local, replica, place = tensor, rank, layout[key]
        if place is not None:
            axis, bounds = place
            offset[axis] = bounds[rank]
            local = tensor.narrow(axis, bounds[rank], bounds[rank + 1] - bounds[rank])
            replica = 0
        state[key] = ShardedTensor(
            key, local, tensor.dtype, tuple(local.shape), tuple(tensor.shape),
            tuple(offset), None, replica,
        )  # fmt: skip
    return state


def random_weights(chance: random.Random) -> Weights:
    """Small tensors of any dtypes and shapes."""
    dtypes = [name for name in ITEMSIZE if name not in ("object", "complex32")]
    weights = {}
    for number in range(chance.randint(1, 6)):
        shape = tuple(chance.randint(0, 7) for _ in range(chance.randint(0, 3)))
        weights[f"w{number}"] = bits(shape, chance.choice(dtypes), chance.randrange(99))
    return weights


def change(chance: random.Random, weights: Weights) -> None:
    """Other bits in a few places of some tensors, or in all places."""
    for tensor in weights.values():
        if not tensor.numel() or chance.random() < 0.3:
            continue
        flat = tensor.reshape(-1).view(torch.uint8)
        places = range(len(flat))
        if chance.random() < 0.7:
            places = chance.sample(places, min(2, len(flat)))
        for place in places:
            flat[place] = chance.randrange(2 if tensor.dtype == torch.bool else 256)


def copied(weights: Weights) -> Weights:
    return {key: tensor.clone() for key, tensor in weights.items()}


def loaded(url: Path, number: int, like: Weights) -> Weights:
    found = {key: torch.zeros_like(tensor) for key, tensor in like.items()}
    megackpt.load(megackpt.sharded(found), path_of(url, number))
    return found


def check(url: Path, number: int, expected: Weights) -> None:
    found = loaded(url, number, expected)
    for key, tensor in expected.items():
        assert_same(found[key], tensor, f"{key} of version {number}")


def train(
    url: Path,
    first: int,
    states: list[Weights],
    layout: Layout,
    ranks: int,
    **options: Any,
) -> None:
    """Publish these states from version ``first`` on, every second one asynchronously."""

    def work(group: ThreadedGroup) -> None:
        with WeightPublisher(url, process_group=group, **options) as publisher:
            for turn, state in enumerate(states):
                mine = shards(state, layout, group.rank)
                publisher.publish(first + turn, mine, asynchronous=turn % 2 == 1)

    ThreadedGroup.run(ranks, work)


def random_history(url: Path, seed: int) -> None:
    """A trainer that is restarted at other layouts. Engines load each version at another layout."""
    chance = random.Random(seed)
    weights = random_weights(chance)
    history: list[Weights] = []
    every = chance.choice((2, 3, 50))
    for _ in range(chance.randint(1, 3)):  # trainers
        ranks = chance.randint(1, 4)
        layout = cut(chance, weights, ranks)
        turns = chance.randint(1, 3)
        states = []
        for _ in range(turns):
            change(chance, weights)
            states.append(copied(weights))
        options = {"anchor_every": every, "max_chain_share": 9}
        train(url, len(history), states, layout, ranks, **options)
        history += states
    for number, expected in enumerate(history):
        check(url, number, expected)
        assert megackpt.verify(path_of(url, number)).ok
    number = chance.randrange(len(history))
    ranks = chance.randint(1, 4)
    layout = cut(chance, weights, ranks)
    found = {key: torch.zeros_like(tensor) for key, tensor in weights.items()}

    def load(group: ThreadedGroup) -> None:
        state = shards(found, layout, group.rank)
        megackpt.load(state, path_of(url, number), process_group=group)

    ThreadedGroup.run(ranks, load)
    for key, tensor in history[number].items():
        assert_same(found[key], tensor, key)
    # The digests do not depend on the layout: these are of one whole tensor.
    opened = open_version(url, len(history) - 1)
    for key, tensor in weights.items():
        words = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        words = words.view(f"<u{min(8, tensor.element_size())}")
        indices = torch.arange(len(words)).numpy().astype("u8")
        assert opened.digests[key][1] == digest(key_of(key), indices, words), key


@pytest.mark.parametrize("seed", range(25))
def test_random_geometries(tmp_path: Path, seed: int) -> None:
    random_history(tmp_path / "weights", seed)


@pytest.mark.campaign
def test_five_hundred_geometries(tmp_path: Path) -> None:
    for seed in range(1000, 1500):
        random_history(tmp_path / str(seed), seed)


def model(seed: int = 0) -> Weights:
    torch.manual_seed(seed)
    return {
        "a": torch.randn(40, 30) * 0.02,
        "b": torch.randn(17),
        "step": torch.ones(3),
    }


def trained(weights: Weights) -> Weights:
    return {key: tensor * 1.001 for key, tensor in weights.items()}


def test_masters_are_published_in_another_dtype(tmp_path: Path) -> None:
    weights = model()
    counts = torch.arange(4)
    with WeightPublisher(tmp_path, dtype=torch.float16) as publisher:
        for number in range(3):
            state = {**weights, "counts": counts, "name": "common state"}
            publisher.publish(number, state, asynchronous=number == 1)
            half = {key: tensor.half() for key, tensor in weights.items()}
            publisher.wait()
            check(tmp_path, number, {**half, "counts": counts})
            weights = trained(weights)
        halves = sum(2 * tensor.numel() for tensor in weights.values())
        assert publisher.snapshot_bytes == halves + counts.nbytes


def test_of_equal_size_a_dtype_is_converted_too(tmp_path: Path) -> None:
    weights = {key: tensor.half() for key, tensor in model().items()}
    with WeightPublisher(tmp_path, dtype=torch.bfloat16) as publisher:
        publisher.publish(0, weights)
        publisher.publish(1, trained(weights), asynchronous=True)
    for number, expected in enumerate((weights, trained(weights))):
        brains = {key: tensor.bfloat16() for key, tensor in expected.items()}
        check(tmp_path, number, brains)


def test_a_table_gives_hugging_faces_names(tmp_path: Path) -> None:
    table = {
        "fc1": Fuse(("gate", "up")),
        "embedding": Padded("embed", 5),
        "extra": None,
    }
    fc1, embedding = torch.randn(8, 6), torch.randn(7, 6)
    layout: Layout = {"fc1": (0, [0, 4, 8]), "embedding": (0, [0, 4, 7]), "extra": None}

    def work(group: ThreadedGroup) -> None:
        mine = {"fc1": fc1, "embedding": embedding, "extra": torch.ones(2)}
        with WeightPublisher(tmp_path, table=table, process_group=group) as publisher:
            publisher.publish(0, shards(mine, layout, group.rank))
            mine["fc1"] = fc1 + 1
            publisher.publish(1, shards(mine, layout, group.rank))

    ThreadedGroup.run(2, work)
    check(tmp_path, 0, {"gate": fc1[:4], "up": fc1[4:], "embed": embedding[:5]})
    check(tmp_path, 1, {"gate": fc1[:4] + 1, "up": fc1[4:] + 1, "embed": embedding[:5]})
    assert set(open_version(tmp_path, 1).digests) == {"gate", "up", "embed"}


def test_a_version_is_visible_after_its_commit(tmp_path: Path) -> None:
    weights = model()
    with WeightPublisher(tmp_path) as publisher:
        publisher.publish(5, weights, asynchronous=True)
        weights["a"] += 1  # the copy has been made
        assert versions(tmp_path) == [] or latest(tmp_path) is None
        publisher.wait()
        check(tmp_path, 5, model())
        publisher.publish(6, weights, asynchronous=True)
    check(tmp_path, 6, weights)


def test_what_did_not_change_takes_no_space(tmp_path: Path) -> None:
    weights = {"w": torch.randn(512, 512)}
    with WeightPublisher(tmp_path) as publisher:
        publisher.publish(0, weights)
        publisher.publish(1, weights)
        weights["w"][3, 4] += 1
        publisher.publish(2, weights)
    sizes = [
        int(open_version(tmp_path, n).opened.manifest.chunks.length.sum())
        for n in range(3)
    ]
    assert sizes[0] > 1 << 20
    assert max(sizes[1:]) < 2048


def test_an_anchor_follows_a_heavy_chain(tmp_path: Path) -> None:
    weights = {"w": torch.randn(1000)}
    with WeightPublisher(tmp_path, max_chain_share=0.4) as publisher:
        for number in range(5):
            publisher.publish(number, weights)
            weights = trained(weights)
    anchors = [open_version(tmp_path, n).anchor for n in range(5)]
    assert anchors[:2] == [0, 0]
    assert len(set(anchors)) > 1
    with WeightPublisher(tmp_path, anchor_every=1) as publisher:
        publisher.publish(5, weights)
    assert open_version(tmp_path, 5).base is None
    check(tmp_path, 5, weights)


def test_numbers_have_no_gaps_and_one_publisher_wins(tmp_path: Path) -> None:
    weights = model()
    one, other = WeightPublisher(tmp_path), WeightPublisher(tmp_path)
    one.publish(0, weights)
    other.publish(1, trained(weights))
    with pytest.raises(CheckpointExists, match="the next one is 2, not 1"):
        one.publish(1, weights)
    with pytest.raises(ShardingError, match=r"the next version .* is 2, not 7"):
        one.publish(7, weights)
    # It goes on with what the other one has published.
    one.publish(2, weights)
    check(tmp_path, 1, trained(weights))
    check(tmp_path, 2, weights)


def test_the_tensors_of_a_chain_stay_the_same(tmp_path: Path) -> None:
    weights = model()
    publisher = WeightPublisher(tmp_path)
    publisher.publish(0, weights)
    for wrong in (
        {**weights, "b": weights["b"][:3].clone()},
        {**weights, "b": weights["b"].double()},
        {**weights, "new": weights["b"]},
        {"a": weights["a"], "step": weights["step"]},
    ):
        with pytest.raises(MismatchError, match=r"'(b|new)'"):
            publisher.publish(1, wrong)
    publisher.publish(1, trained(weights))
    check(tmp_path, 1, trained(weights))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_version_that_fails_is_published_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """An error of one rank is raised on all ranks, and the snapshots stay at the version before."""
    weights = model()
    layout = cut(random.Random(1), weights, 3)
    real = snapshot.encode
    fails = False

    def encode(*given: Any) -> Any:
        if fails:
            raise CorruptCheckpoint("a fault of one rank")
        return real(*given)

    monkeypatch.setattr(snapshot, "encode", encode)

    def work(group: ThreadedGroup) -> None:
        nonlocal fails
        publisher = WeightPublisher(tmp_path, process_group=group)
        publisher.publish(0, shards(weights, layout, group.rank))
        group.broadcast("test", lambda: None)
        fails = True
        wrong = shards(model(1), layout, group.rank)
        if asynchronous:
            publisher.publish(1, wrong, asynchronous)
        with pytest.raises(CheckpointingException, match="a fault of one rank"):
            publisher.wait() if asynchronous else publisher.publish(1, wrong)
        assert versions(tmp_path) == [0]
        group.broadcast("test", lambda: None)
        fails = False
        publisher.publish(1, shards(trained(weights), layout, group.rank), asynchronous)
        publisher.close()

    ThreadedGroup.run(3, work)
    check(tmp_path, 0, weights)
    check(tmp_path, 1, trained(weights))


def test_a_first_version_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise CorruptCheckpoint("no space")

    publisher = WeightPublisher(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(distcp_writer.Records, "end", full)
        with pytest.raises(CheckpointingException, match="no space"):
            publisher.publish(0, model(1))
    publisher.publish(0, model())
    check(tmp_path, 0, model())
    publisher.publish(1, trained(model()))
    check(tmp_path, 1, trained(model()))
    before, after = open_version(tmp_path, 0).digests["a"]
    assert before == after == open_version(tmp_path, 1).digests["a"][0]


def test_damaged_memory_of_a_publisher_is_not_published(tmp_path: Path) -> None:
    weights = model()
    publisher = WeightPublisher(tmp_path)
    publisher.publish(0, weights)
    row = next(iter(publisher._snapshot._rows.values()))
    row.digest ^= 1
    with pytest.raises(CorruptCheckpoint, match="other digests than the weights"):
        publisher.publish(1, trained(weights))
    assert versions(tmp_path) == [0]


def test_damaged_weights_are_no_base(tmp_path: Path) -> None:
    """A trainer that is restarted compares the weights that it reads with their digests."""
    WeightPublisher(tmp_path).publish(0, model())
    place = tmp_path / "version_000000" / "version.json"
    index = tmp_path / "version_000000" / "megackpt.index"
    fields = json.loads(place.read_text())
    fields["digests"]["a"][1] = f"{1:032x}"
    place.write_text(json.dumps(fields))
    with pytest.raises(CorruptCheckpoint, match=r"version\.json"):
        WeightPublisher(tmp_path).publish(1, model())
    assert index.exists()


def test_a_chain_of_which_a_version_is_missing_or_another(tmp_path: Path) -> None:
    weights = model()
    with WeightPublisher(tmp_path / "one") as publisher:
        for number in range(4):
            publisher.publish(number, weights)
            weights = trained(weights)
    with WeightPublisher(tmp_path / "two") as publisher:
        for number in range(3):
            publisher.publish(number, weights)
            weights = trained(weights)
    (tmp_path / "one" / "version_000002").rename(tmp_path / "kept")
    with pytest.raises(NotACheckpoint, match="based on version 2, and that is gone"):
        loaded(tmp_path / "one", 3, weights)
    with pytest.raises(NotACheckpoint, match="based on version 2, and that is gone"):
        WeightPublisher(tmp_path / "one").publish(4, weights)
    (tmp_path / "two" / "version_000002").rename(tmp_path / "one" / "version_000002")
    with pytest.raises(MismatchError, match=r"is based on save .* of another chain"):
        loaded(tmp_path / "one", 3, weights)
    (tmp_path / "one" / "version_000002").rename(tmp_path / "one" / "version_000007")
    with pytest.raises(CorruptCheckpoint, match="holds version 2: it was renamed"):
        open_version(tmp_path / "one", 7)
    megackpt.save(megackpt.sharded(weights), tmp_path / "one" / "version_000009")
    with pytest.raises(NotACheckpoint, match="no version of weights"):
        open_version(tmp_path / "one", 9)


def test_versions_in_a_bucket(bucket: Any) -> None:
    url = f"{bucket.url}/weights"
    weights = model()
    layout = cut(random.Random(3), weights, 2)

    def work(group: ThreadedGroup) -> None:
        with WeightPublisher(url, process_group=group) as publisher:
            publisher.publish(0, shards(weights, layout, group.rank))
            new = trained(weights)
            publisher.publish(1, shards(new, layout, group.rank), asynchronous=True)

    ThreadedGroup.run(2, work)
    assert versions(url) == [0, 1]
    WeightPublisher(url).publish(2, model(5))
    for number, expected in enumerate((weights, trained(weights), model(5))):
        found = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
        megackpt.load(megackpt.sharded(found), path_of(url, number))
        for key in expected:
            assert_same(found[key], expected[key], key)
