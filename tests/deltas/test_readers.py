"""Engines: directories that become later versions, changes of tensors, new versions, removed ones."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megackpt
from megackpt.backends.safetensors.headers import DTYPES
from megackpt.checkpoint import remove
from megackpt.deltas import (
    WeightPublisher,
    apply,
    follow,
    latest_version,
    load,
    materialize,
    patches,
    prune,
    readers,
)
from megackpt.deltas.chain import open_version, path_of, versions
from megackpt.errors import (
    CheckpointingException,
    CorruptCheckpoint,
    MismatchError,
    NotACheckpoint,
    SaveInProgress,
    StorageError,
)
from megackpt.storage import kernel
from tests.bits import assert_same, bits, octets
from tests.buckets import Bucket
from tests.children import died

Weights = dict[str, torch.Tensor]
STEPS = (
    "fsync",
    "rename",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
    "writev",
    "write",
    "pwrite",
    "pwritev",
    "copy_file_range",
)


def model(seed: int = 0, dtypes: tuple[str, ...] = ("bfloat16",)) -> Weights:
    shapes = [(64, 33), (7,), (), (3, 5, 2), (0, 4)]
    return {
        f"{dtype}.{number}": bits(shape, dtype, seed + number)
        for number, shape in enumerate(shapes)
        for dtype in dtypes
    }


def change(weights: Weights, seed: int) -> Weights:
    """Other bits in some places of most tensors, or in all places of a tensor."""
    chance = random.Random(seed)
    changed = {key: tensor.clone() for key, tensor in weights.items()}
    for tensor in changed.values():
        flat = tensor.reshape(-1).view(torch.uint8)
        places = range(len(flat))
        if chance.random() < 0.9 or len(flat) > 99999:
            places = chance.sample(places, min(len(flat), chance.randrange(20)))
        for place in places:
            flat[place] = chance.randrange(2 if tensor.dtype == torch.bool else 256)
    return changed


def history(
    url: Any, count: int, anchor_every: int = 100, weights: Weights | None = None
) -> list[Weights]:
    """Publish ``count`` versions."""
    states = [model() if weights is None else weights]
    for number in range(1, count):
        states.append(change(states[-1], number))
    with WeightPublisher(
        url, anchor_every=anchor_every, max_chain_share=99
    ) as publisher:
        for number, state in enumerate(states):
            publisher.publish(number, state)
    return states


def held(directory: Path) -> Weights:
    """The weights as Hugging Face reads them, from one file or several."""
    found: Weights = {}
    for file in sorted(directory.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def assert_equal(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert_same(found[key], tensor, key)


def expect(directory: Path, expected: Weights) -> None:
    """A complete directory: its own index and Hugging Face's reader agree on the weights."""
    assert_equal(held(directory), expected)
    loaded = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    megackpt.load(megackpt.sharded(loaded), directory)
    assert_equal(loaded, expected)
    report = megackpt.verify(directory)
    assert report.ok, report
    assert report.checked


def tree(directory: Path) -> dict[str, bytes]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("in_place", [False, True])
def test_an_updated_directory_is_what_materialize_writes(
    tmp_path: Path, seed: int, in_place: bool
) -> None:
    chance = random.Random(seed)
    url, engine = tmp_path / "w", tmp_path / "engine"
    dtypes = tuple(chance.sample(sorted(DTYPES), 5))
    every = chance.choice([2, 4, 100])
    states = history(url, 7, every, model(seed, dtypes))
    files = {"config.json": b"{}", "chat/one.jinja": b"x"}
    at = chance.randrange(4)
    materialize(url, at, engine, beside=files, shards=chance.choice([1, 3]))
    expect(engine, states[at])
    while at < 6:
        at = chance.randint(at, 6)
        apply(engine, url, at, in_place=in_place)
        expect(engine, states[at])
        assert tree(engine).items() >= files.items()
        assert sorted(os.listdir(tmp_path)) == ["engine", "w"]
    materialize(url, 6, tmp_path / "anew", shards=len(list(engine.glob("model*s"))))
    found, anew = tree(engine), tree(tmp_path / "anew")
    for name in anew.keys() - {"megackpt.index"}:
        assert found[name] == anew[name], name


def test_large_tensors_and_many_blocks(tmp_path: Path) -> None:
    weights = {
        "large": bits((3 << 20, 2), "bfloat16"),
        "small": bits((1 << 19, 3), "float32"),
    }
    url, engine = tmp_path / "w", tmp_path / "engine"
    states = history(url, 3, 100, weights)
    materialize(url, 0, engine)
    apply(engine, url, 1, in_place=True)
    expect(engine, states[1])
    apply(engine, url, 2)
    expect(engine, states[2])


def test_a_version_as_a_checkpoint_of_another_format(tmp_path: Path) -> None:
    states = history(tmp_path / "w", 3)
    materialize(tmp_path / "w", 2, tmp_path / "zarr", "zarr")
    loaded = {key: torch.zeros_like(tensor) for key, tensor in states[2].items()}
    megackpt.load(megackpt.sharded(loaded), tmp_path / "zarr")
    assert_equal(loaded, states[2])
    record = json.loads((tmp_path / "zarr" / "megackpt_weights.json").read_bytes())
    save_id = open_version(tmp_path / "w", 2).save_id
    assert record == {"format": 1, "version": 2, "save_id": save_id}
    with pytest.raises(MismatchError, match="not of safetensors"):
        apply(tmp_path / "zarr", tmp_path / "w", 2)


def test_patches_lead_to_the_next_version(tmp_path: Path) -> None:
    dtypes = ("bool", "bfloat16", "float8_e4m3fn", "uint16", "int64", "complex128")
    states = history(tmp_path, 6, 4, model(3, dtypes))
    found = {key: torch.zeros_like(tensor) for key, tensor in states[0].items()}
    for number, expected in enumerate(states):
        before = {key: tensor.clone() for key, tensor in found.items()}
        for name, shape, dtype, indices, values in patches(tmp_path, number):
            assert shape == expected[name].shape
            assert values.dtype == dtype
            size = dtype.itemsize
            items = found[name].reshape(-1).view(torch.uint8).reshape(-1, size)
            items[indices] = values.view(torch.uint8).reshape(-1, size)
            assert (indices.diff() > 0).all()
            if number % 4:
                old = before[name].reshape(-1).view(torch.uint8).reshape(-1, size)
                assert (items != old).any(1).nonzero().flatten().equal(indices)
        assert_equal(found, expected)


def test_a_version_is_loaded(tmp_path: Path) -> None:
    states = history(tmp_path, 5)
    assert latest_version(tmp_path) == 4
    assert latest_version(tmp_path / "none") is None
    found = {key: torch.zeros_like(tensor) for key, tensor in states[4].items()}
    load(megackpt.sharded(found), tmp_path, 4)
    assert_equal(found, states[4])


# Killed calls


def die_at(step: int) -> None:
    """From here on, end this process in the middle of its ``step``-th change of the disk."""
    left = [step]

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                if name == "pwrite":
                    real(args[0], args[1][: len(args[1]) // 2], *args[2:])
                os._exit(9)
            return real(*args, **named)

        return call

    for name in STEPS:
        setattr(os, name, counting(name, getattr(os, name)))
    kernel.exchange = counting("exchange", kernel.exchange)


def killed(step: int, work: Callable[[], object]) -> bool:
    """True if a child that does this died, False if it was done before."""

    def dying() -> None:
        die_at(step)
        work()

    return died(dying)


def refusal(where: Path) -> str:
    """Why a directory is not opened; empty if it is."""
    try:
        megackpt.verify(where)
    except SaveInProgress as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_an_update_in_place_that_is_killed_is_refused_and_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, where = tmp_path / "w", tmp_path / "engine"
    states = history(url, 4)
    materialize(url, 1, tmp_path / "old", shards=2)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    seen = []
    for step in range(1, 500):
        shutil.rmtree(where, ignore_errors=True)
        shutil.copytree(tmp_path / "old", where)
        if not killed(step, lambda: apply(where, url, 2, in_place=True)):
            break
        if reason := refusal(where):
            seen.append("refused")
            assert str(where) in reason
            assert "megackpt.deltas.apply" in reason
            if step % 3 == 0:  # killed again, while it is completed
                killed(1 + step // 3, lambda: apply(where, url, 2, in_place=True))
        else:
            seen.append("old" if same(where, states[1]) else "new")
            expect(where, states[1 if seen[-1] == "old" else 2])
        apply(where, url, 3, in_place=step % 2 == 0)
        expect(where, states[3])
        assert set(os.listdir(where)) == set(os.listdir(tmp_path / "old"))
    assert set(seen) == {"old", "refused", "new"}
    expect(where, states[2])


def same(where: Path, expected: Weights) -> bool:
    found = held(where)
    return all(octets(found[key]) == octets(expected[key]) for key in expected)


def test_files_that_other_directories_share_are_not_changed_in_place(
    tmp_path: Path,
) -> None:
    url, where = tmp_path / "w", tmp_path / "engine"
    states = history(url, 3)
    materialize(url, 0, where)
    shutil.copytree(where, tmp_path / "kept", copy_function=os.link)
    with pytest.raises(megackpt.StorageError, match="shares files"):
        apply(where, url, 1, in_place=True)
    expect(where, states[0])
    apply(where, url, 1)
    expect(where, states[1])
    expect(tmp_path / "kept", states[0])


def test_nothing_reads_a_directory_that_is_changed_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, where = tmp_path / "w", tmp_path / "engine"
    states = history(url, 3)
    materialize(url, 0, where)
    with monkeypatch.context() as patched:
        patched.setattr(readers, "_redo", lambda _: None)
        apply(where, url, 1, in_place=True)
    target = {key: torch.zeros_like(tensor) for key, tensor in states[0].items()}
    for refused in (
        lambda: megackpt.load(megackpt.sharded(target), where),
        lambda: megackpt.verify(where),
        lambda: megackpt.convert(where, tmp_path / "other", "zarr"),
        lambda: materialize(url, 2, where, overwrite=True),
        lambda: remove(where),
    ):
        with pytest.raises(SaveInProgress, match=r"megackpt\.deltas\.apply"):
            refused()
    apply(where, url, 1)
    expect(where, states[1])


@pytest.mark.slow
def test_an_update_that_is_killed_leaves_the_old_or_the_new_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, where = tmp_path / "w", tmp_path / "run" / "engine"
    states = history(url, 4)
    materialize(url, 1, tmp_path / "old", beside={"config.json": b"{}"})
    monkeypatch.setattr(os, "fsync", lambda _: None)
    seen = set()
    for step in range(1, 500):
        shutil.rmtree(where.parent, ignore_errors=True)
        shutil.copytree(tmp_path / "old", where)
        if not killed(step, lambda: apply(where, url, 2)):
            break
        number = json.loads((where / "megackpt_weights.json").read_bytes())["version"]
        seen.add(number)
        expect(where, states[number])
        apply(where, url, 3)
        expect(where, states[3])
        assert os.listdir(where.parent) == ["engine"]
        assert (where / "config.json").read_bytes() == b"{}"
    assert seen == {1, 2}
    expect(where, states[2])


@pytest.mark.slow
def test_a_prune_that_is_killed_leaves_readable_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = history(tmp_path / "old", 4, 3)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    url, seen = tmp_path / "w", set()
    for step in range(1, 500):
        shutil.rmtree(url, ignore_errors=True)
        shutil.copytree(tmp_path / "old", url)
        if not killed(step, lambda: prune(url, 1)):
            break
        left = []
        for number in versions(url):
            try:
                open_version(url, number)
            except NotACheckpoint:
                continue
            left.append(number)
        assert left == [*range(len(left) - 1), 3]
        seen.add(len(left))
        if step % 10 == 0:
            for number in left:
                target = {k: torch.zeros_like(t) for k, t in states[number].items()}
                load(megackpt.sharded(target), url, number)
                assert_equal(target, states[number])
        prune(url, 1)
        assert versions(url) == [3]
    assert versions(url) == [3]
    assert seen == {1, 2, 3, 4}


# Wrong chains, and damage


def test_a_directory_and_a_chain_that_do_not_fit(tmp_path: Path) -> None:
    url, other, engine = tmp_path / "w", tmp_path / "other", tmp_path / "engine"
    history(url, 6, 3)
    history(other, 6, 9)
    materialize(url, 1, engine)
    before = tree(engine)
    with pytest.raises(MismatchError) as wrong:
        apply(engine, other, 2)
    assert open_version(url, 1).save_id in str(wrong.value)
    assert open_version(other, 1).save_id in str(wrong.value)
    with pytest.raises(MismatchError, match=r"has version 1 .* give a later version"):
        apply(engine, url, 0)
    with pytest.raises(NotACheckpoint, match="version_000009"):
        apply(engine, url, 9)
    with pytest.raises(NotACheckpoint, match="is not a directory"):
        apply(tmp_path / "none", url, 2)
    megackpt.convert(path_of(url, 0), tmp_path / "plain", "safetensors")
    with pytest.raises(NotACheckpoint, match=r"megackpt_weights\.json is missing"):
        apply(tmp_path / "plain", url, 2)
    materialize(url, 1, tmp_path / "cast", cast="fp16")
    with pytest.raises(MismatchError, match="has other tensors than version 2"):
        apply(tmp_path / "cast", url, 2)
    record = engine / "megackpt_weights.json"
    for content in (b"{", b"[]", b"{}", b'{"format": 2}'):
        record.write_bytes(content)
        with pytest.raises(CorruptCheckpoint, match=r"weights\.json is damaged"):
            apply(engine, url, 2)
    record.write_bytes(before["megackpt_weights.json"])
    assert tree(engine) == before
    shutil.rmtree(path_of(url, 4))
    with pytest.raises(
        NotACheckpoint, match=r"version 5 cannot be .*000005 is based on version 4"
    ):
        apply(engine, url, 5)
    with pytest.raises(NotACheckpoint, match="version 5 cannot be read"):
        list(patches(url, 5))
    shutil.rmtree(path_of(url, 0))
    with pytest.raises(NotACheckpoint, match="is based on version 0, and that is gone"):
        materialize(url, 2, tmp_path / "new")
    assert tree(engine) == before


def test_an_engine_behind_the_anchor_reads_all_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = tmp_path / "w"
    states = history(url, 6, 4)
    for name in ("a", "b"):
        materialize(url, 1, tmp_path / name)
    assert prune(url, 1) == [3, 2, 1, 0]
    apply(tmp_path / "a", url, 5)
    apply(tmp_path / "b", url, 4, in_place=True)
    expect(tmp_path / "a", states[5])
    expect(tmp_path / "b", states[4])
    assert "has version 1: all weights are read, from the anchor 4 on" in caplog.text


def test_renamed_versions_and_a_base_of_another_chain(tmp_path: Path) -> None:
    url, engine = tmp_path / "w", tmp_path / "engine"
    history(url, 4)
    history(tmp_path / "other", 4, 100, model(9))
    materialize(url, 0, engine)
    shutil.rmtree(path_of(url, 2))
    shutil.copytree(path_of(tmp_path / "other", 2), path_of(url, 2))
    with pytest.raises(
        MismatchError, match=r"version 2 cannot be read: .* another chain"
    ):
        apply(engine, url, 2)
    shutil.rmtree(path_of(url, 2))
    shutil.copytree(path_of(url, 3), path_of(url, 2))
    with pytest.raises(CorruptCheckpoint, match="holds version 3: it was renamed"):
        apply(engine, url, 2)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_base_of_other_weights_is_found_by_the_digests(
    tmp_path: Path, in_place: bool
) -> None:
    """The record says version 0, and the index fits the weights, which are of another model."""
    url, other, engine = tmp_path / "w", tmp_path / "other", tmp_path / "engine"
    history(url, 2)
    history(other, 1, weights=model(50))
    materialize(url, 0, tmp_path / "right")
    materialize(other, 0, engine)
    record = (tmp_path / "right" / "megackpt_weights.json").read_bytes()
    (engine / "megackpt_weights.json").write_bytes(record)
    before = tree(engine)
    with pytest.raises(CorruptCheckpoint) as found:
        apply(engine, url, 1, in_place=in_place)
    text = str(found.value)
    assert "has other weights than version 1 is based on" in text
    assert "engine/model.safetensors" in text
    assert "'bfloat16.0'" in text
    assert tree(engine) == before
    assert sorted(os.listdir(tmp_path)) == ["engine", "other", "right", "w"]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.slow
def test_flipped_bits_never_lead_to_wrong_weights(
    tmp_path: Path, in_place: bool
) -> None:
    chance = random.Random(5)
    url, engine = tmp_path / "w", tmp_path / "engine"
    states = history(url, 5, 3)
    old, chain = tmp_path / "old", tmp_path / "chain"
    materialize(url, 3, old)
    shutil.move(url, chain)
    files = [path for path in chain.rglob("*") if path.is_file()]
    files += [path for path in old.rglob("*") if path.is_file()]
    errors = 0
    for _ in range(30):
        shutil.rmtree(url, ignore_errors=True)
        shutil.rmtree(engine, ignore_errors=True)
        shutil.copytree(chain, url)
        shutil.copytree(old, engine)
        path = chance.choice(files)
        flipped = (url if path.is_relative_to(chain) else engine) / path.relative_to(
            chain if path.is_relative_to(chain) else old
        )
        data = bytearray(flipped.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        flipped.write_bytes(data)
        try:
            apply(engine, url, 4, in_place=in_place)
            expect(engine, states[4])
            materialize(url, 2, tmp_path / "new", overwrite=True)
        except CheckpointingException:
            errors += 1
        else:
            expect(tmp_path / "new", states[2])
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
    assert errors >= 10


def test_two_updates_at_once(tmp_path: Path) -> None:
    url, engine = tmp_path / "w", tmp_path / "engine"
    states = history(url, 3)
    materialize(url, 0, engine)
    refused = []

    def update(in_place: bool) -> None:
        try:
            apply(engine, url, 2, in_place=in_place)
        except SaveInProgress as error:
            refused.append(error)

    threads = [threading.Thread(target=update, args=(n % 2 == 0,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) < 4
    expect(engine, states[2])
    assert sorted(os.listdir(tmp_path)) == ["engine", "w"]


def test_a_file_system_without_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, engine = tmp_path / "w", tmp_path / "engine"
    states = history(url, 2)
    materialize(url, 0, engine)
    monkeypatch.setattr(kernel, "libc_function", lambda *_: None)
    with pytest.raises(StorageError, match="cannot exchange directories: use in_place"):
        apply(engine, url, 1)
    expect(engine, states[0])
    assert sorted(os.listdir(tmp_path)) == ["engine", "w"]
    apply(engine, url, 1, in_place=True)
    expect(engine, states[1])


# Following, and pruning


def test_follow_yields_versions_in_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = tmp_path / "w"
    assert list(follow(url, timeout=0)) == []
    caplog.set_level("INFO", "megackpt.deltas")
    seen: list[int] = []
    running: Iterator[int] = follow(url, poll_seconds=0.01, timeout=60)
    with WeightPublisher(url, anchor_every=2, max_chain_share=99) as publisher:
        for number in range(7):
            publisher.publish(number, model(number))
            if number != 4:
                seen.append(next(running))
            if number == 3:
                prune(url, 1)
    # It is behind by one version.
    assert seen == [0, 1, 2, 3, 4, 5]
    assert prune(url, 1) == [5, 4, 3, 2]
    assert next(running) == 6
    assert list(follow(url, 1, timeout=0)) == [6]
    assert "version 2 is gone, going on with the anchor 6" in caplog.text
    assert list(follow(url, 6, timeout=0)) == []
    assert list(follow(url, 5, timeout=0)) == [6]


def test_a_gap_without_an_anchor_waits(tmp_path: Path) -> None:
    history(tmp_path, 5)
    shutil.move(path_of(tmp_path, 2), tmp_path / "away")
    assert list(follow(tmp_path, timeout=0)) == [0, 1]
    shutil.move(tmp_path / "away", path_of(tmp_path, 2))
    assert list(follow(tmp_path, 1, timeout=0)) == [2, 3, 4]


def test_prune_keeps_chains(tmp_path: Path) -> None:
    history(tmp_path, 8, 3)  # anchors: 0, 3, 6
    with pytest.raises(ValueError, match="keep_anchors is 1 or more"):
        prune(tmp_path, 0)
    assert prune(tmp_path, 3) == []
    assert prune(tmp_path / "none") == []
    assert prune(tmp_path) == [2, 1, 0]
    assert prune(tmp_path) == []
    assert versions(tmp_path) == [3, 4, 5, 6, 7]
    # What is left of a removed chain goes with the next one.
    assert prune(tmp_path, 1) == [5, 4, 3]


def test_a_bucket(tmp_path: Path, bucket: Bucket) -> None:
    url, engine = f"{bucket.url}/run/weights", tmp_path / "engine"
    states = history(url, 6, 3)
    assert latest_version(url) == 5
    materialize(url, 3, engine)
    for number in follow(url, 3, timeout=0):
        apply(engine, url, number, in_place=number == 5)
        expect(engine, states[number])
    found = {key: tensor.clone() for key, tensor in states[3].items()}
    for name, _, dtype, indices, values in patches(url, 4):
        items = found[name].reshape(-1).view(torch.uint8).reshape(-1, dtype.itemsize)
        items[indices] = values.view(torch.uint8).reshape(-1, dtype.itemsize)
    assert_equal(found, states[4])
    assert prune(url, 1) == [2, 1, 0]
    assert list(follow(url, timeout=0)) == [3, 4, 5]
    target = {key: torch.zeros_like(tensor) for key, tensor in states[5].items()}
    load(megackpt.sharded(target), url, 5)
    assert_equal(target, states[5])


def test_an_engine_does_not_import_the_publisher() -> None:
    program = (
        "import sys; from megackpt.deltas import apply, follow, materialize, patches; "
        "sys.exit('megackpt.deltas.publisher' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
