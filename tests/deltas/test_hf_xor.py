"""Directories of the format hf-xor: what is written is read and applied; damage and wrong bases are refused."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from numcodecs.zstd import compress
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file

import megackpt
from megackpt.deltas import WeightPublisher, hf_xor_writer
from megackpt.deltas.chain import latest, versions
from megackpt.deltas.hf_xor import (
    Stored,
    folder,
    read_chain,
    read_version,
    write_file,
    write_patched,
)
from megackpt.deltas.hf_xor_writer import HfXor
from megackpt.errors import (
    BackendError,
    CheckpointExists,
    CheckpointingException,
    CorruptCheckpoint,
    NotACheckpoint,
)
from megackpt.planning.manifest import TensorMeta
from megackpt.storage import LocalStorage, root_at
from megackpt.testing import ThreadedGroup
from tests.bits import assert_same, bits
from tests.buckets import Bucket
from tests.deltas.test_processes import KILLED, ROOT, weights_of
from tests.deltas.test_publisher import (
    Layout,
    Weights,
    change,
    copied,
    cut,
    random_weights,
    shards,
)

INDEX = "model.safetensors.index.json"
FILE = "model-00000-of-00001.safetensors"
LAST = 4


def weights() -> Weights:
    return {
        "big": bits((300, 400), "bfloat16", 1),
        "half": bits((1, 77), "float16", 2),
        "one": bits((), "int64", 3),
        "none": bits((0, 4), "float32", 4),
        "still": bits((9,), "bool", 5),
    }


def stepped(before: Weights) -> Weights:
    """Some elements of all tensors but two have other bits."""
    after = copied(before)
    for key in ("big", "half", "one"):
        after[key].reshape(-1).view(torch.uint8)[::50] ^= 1
    return after


@pytest.fixture
def chain(tmp_path: Path) -> list[Weights]:
    """Versions 1 (full) to 4 below ``tmp_path``; state 0 is none of them."""
    states = [weights()]
    with WeightPublisher(tmp_path, format="hf-xor") as publisher:
        for version in range(1, LAST + 1):
            states.append(stepped(states[-1]))
            publisher.publish(version, states[-1], asynchronous=version == 3)
    (tmp_path / folder(1) / "config.json").write_text("{}")
    return states


def read_all(place: Path) -> Weights:
    found: Weights = {}
    for file in sorted(place.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same(found: Weights, expected: Weights) -> bool:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert_same(found[key], tensor, key)
    return True


def patched(place: Path | str, out: Path, base: int, target: int, name: str) -> Weights:
    """A version, made of a directory of version ``base``."""
    source = root_at(f"{place}/{name}")
    write_patched(
        source, read_chain(place, base, target), LocalStorage(out, create=True)
    )
    assert {file.name for file in out.iterdir()} == {*source.list()}
    return read_all(out)


def test_a_chain_gives_each_of_its_versions(tmp_path, chain):
    for target in range(1, LAST + 1):
        found = patched(tmp_path, tmp_path / f"out{target}", 1, target, folder(1))
        assert same(found, chain[target])
        assert (tmp_path / f"out{target}" / "config.json").read_text() == "{}"


def test_a_chain_begins_at_any_version(tmp_path, chain):
    patched(tmp_path, tmp_path / "out", 1, 2, folder(1))
    assert same(patched(tmp_path, tmp_path / "last", 2, LAST, "out"), chain[LAST])


def test_a_full_version_is_a_directory_of_hugging_face(tmp_path, chain):
    assert read_version(LocalStorage(tmp_path / folder(1))) is None
    found = {key: torch.zeros_like(tensor) for key, tensor in chain[1].items()}
    megackpt.load(megackpt.sharded(found), tmp_path / folder(1))
    assert same(found, chain[1])


def test_unchanged_tensors_are_left_out(tmp_path, chain):
    found = read_version(LocalStorage(tmp_path / folder(2)))
    assert found is not None
    assert (found.version, found.base) == (2, 1)
    assert found.frames.keys() == {"big", "half", "one"}


def test_a_version_without_a_change_has_no_file(tmp_path, chain):
    WeightPublisher(tmp_path, format="hf-xor").publish(LAST + 1, chain[LAST])
    assert [file.name for file in (tmp_path / folder(LAST + 1)).iterdir()] == [INDEX]
    found = patched(tmp_path, tmp_path / "out", 1, LAST + 1, folder(1))
    assert same(found, chain[LAST])


def test_files_have_what_the_page_says(tmp_path, chain):
    index = json.loads((tmp_path / "weight_v000002" / INDEX).read_text())
    assert index["metadata"] == {
        "version": "000002",
        "base_version": "000001",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    assert index["weight_map"]["big"] == FILE
    for version in (1, 2):
        with safe_open(tmp_path / folder(version) / FILE, "pt") as file:
            elements = chain[version]["big"].view(torch.uint8).numpy()
            assert file.metadata()["big"] == f"{zlib.adler32(elements):08x}"
            frame = file.get_tensor("big")
    assert (frame.dtype, frame.dim()) == (torch.uint8, 1)


def test_a_bucket_serves_too(bucket: Bucket, tmp_path):
    states = [weights(), stepped(weights())]
    publisher = WeightPublisher(bucket.url, format="hf-xor")
    for version, state in enumerate(states, start=1):
        publisher.publish(version, state)
    found = patched(bucket.url, tmp_path / "out", 1, 2, folder(1))
    assert same(found, states[1])
    keys = set(filter(re.compile("weight").match, bucket.keys()))
    assert keys == {f"{folder(v)}/{name}" for v in (1, 2) for name in (INDEX, FILE)}


def random_history(place: Path, seed: int) -> None:
    """A trainer, restarted at other layouts, by way of Hugging Face directories."""
    chance = random.Random(seed)
    state = {
        key: tensor
        for key, tensor in random_weights(chance).items()
        if tensor.dtype != torch.complex128
    }
    version, states = 0, []
    while version < 7:
        ranks = chance.randint(1, 4)
        layout = cut(chance, state, ranks)
        run = []
        for _ in range(chance.randint(1, 3)):
            change(chance, state)
            run.append(copied(state))
        first = version + 1

        def train(group: ThreadedGroup, run=run, layout=layout, first=first) -> None:
            with WeightPublisher(
                place, format="hf-xor", anchor_every=3, process_group=group
            ) as publisher:
                for turn, now in enumerate(run):
                    mine = shards(now, layout, group.rank)
                    publisher.publish(first + turn, mine, asynchronous=turn % 2 == 1)

        ThreadedGroup.run(ranks, train)
        states += run
        version += len(run)
    for number, expected in enumerate(states, start=1):
        found = patched(place, place / f"out{number}", 1, number, folder(1))
        assert same(found, expected)


@pytest.mark.parametrize("seed", range(6))
def test_random_layouts_give_the_weights_bit_for_bit(tmp_path, seed):
    random_history(tmp_path, seed)


def test_a_restarted_publisher_goes_on(tmp_path, chain):
    state = stepped(chain[LAST])
    WeightPublisher(tmp_path, format="hf-xor").publish(LAST + 1, state)
    assert read_version(LocalStorage(tmp_path / folder(LAST + 1))) is not None
    found = patched(tmp_path, tmp_path / "out", 1, LAST + 1, folder(1))
    assert same(found, state)


def test_after_a_gap_comes_a_full_version(tmp_path, chain):
    WeightPublisher(tmp_path).publish(LAST + 1, stepped(chain[LAST]))
    state = chain[LAST]
    WeightPublisher(tmp_path, format="hf-xor").publish(LAST + 2, state)
    assert read_version(LocalStorage(tmp_path / folder(LAST + 2))) is None
    assert same(read_all(tmp_path / folder(LAST + 2)), state)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("place", ["read", "write_file", "write_index"])
def test_an_error_of_one_rank_is_raised_on_all(
    tmp_path, monkeypatch, place, asynchronous
):
    """And the version that is not visible is written by the next call, or a full one follows."""
    states = [weights()]
    for _ in range(2):
        states.append(stepped(states[-1]))
    layout: Layout = dict.fromkeys(states[0])
    failing = []

    def fail(work, *args):
        if failing and (place != "write_file" or args[1] == 1):
            raise OSError("a fault of one rank")
        return work(*args)

    name = {"read": "open_version"}.get(place, place)
    work = getattr(hf_xor_writer, name)
    monkeypatch.setattr(hf_xor_writer, name, lambda *args: fail(work, *args))

    def train(group: ThreadedGroup) -> None:
        with WeightPublisher(
            tmp_path, format="hf-xor", process_group=group
        ) as publisher:
            publisher.publish(1, shards(states[0], layout, group.rank))
            group.broadcast("test", lambda: failing.append(1))
            mine = shards(states[1], layout, group.rank)

            def publish() -> None:
                publisher.publish(2, mine, asynchronous)
                publisher.wait()

            with pytest.raises(CheckpointingException, match="a fault of one rank"):
                publish()
            group.broadcast("test", failing.clear)
            assert versions(tmp_path) == [1, 2]
            with pytest.raises(NotACheckpoint):
                read_chain(tmp_path, 1, 2)
            if group.rank == 0 and place == "read":
                assert not (tmp_path / folder(2)).exists()
            publisher.publish(3, shards(states[2], layout, group.rank))
        HfXor(str(tmp_path), group).write(2)

    ThreadedGroup.run(3, train)
    assert same(read_all(tmp_path / folder(3)), states[2])
    found = patched(tmp_path, tmp_path / "out", 1, 2, folder(1))
    assert same(found, states[1])


def run(url: str, first: int, last: int) -> None:
    with WeightPublisher(url, format="hf-xor", anchor_every=3) as publisher:
        for version in range(first, last):
            publisher.publish(version, weights_of(version), version % 2 == 1)


def check_visible(place: Path) -> list[int]:
    """The versions with an index are whole."""
    found = [n for n in range(12) if (place / folder(n) / INDEX).exists()]
    for number in found:
        full = number
        while read_version(LocalStorage(place / folder(full))) is not None:
            full -= 1
        out = place / f"out{number}"
        made = patched(place, out, full, number, folder(full))
        assert same(made, weights_of(number))
        shutil.rmtree(out)
    return found


@pytest.mark.slow
def test_killed_before_changes_of_files(tmp_path: Path) -> None:
    """The visible versions are whole, and the next trainer goes on."""
    program = KILLED.replace("tests.deltas.test_processes", "tests.deltas.test_hf_xor")
    assert program != KILLED

    def kill(*numbers: int) -> str:
        command = [sys.executable, "-c", program, str(tmp_path), *map(str, numbers)]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, cwd=ROOT
        )
        return done.stdout

    total = int(kill(0))
    assert total > 80
    numbers = random.Random(7).sample(range(2, total), 6)
    kill(*numbers)
    reached = set()
    for number in numbers:
        place = tmp_path / str(number)
        last = latest(place)
        following = 0 if last is None else last.number + 1
        reached.add(tuple(check_visible(place)))
        run(str(place), following, following + 2)
        assert check_visible(place)[-2:] == [following, following + 1]
    assert len(reached) > 2


def test_what_is_there_is_not_written_again(tmp_path, chain):
    with pytest.raises(CheckpointExists, match="weight_v000002"):
        HfXor(str(tmp_path)).write(2)
    with pytest.raises(ValueError, match="'delta' or 'hf-xor', not 'xor'"):
        WeightPublisher(tmp_path, format="xor")


def test_gaps_and_other_chains_are_named(tmp_path, chain):
    with pytest.raises(CorruptCheckpoint, match="version 3 on base 2"):
        read_chain(tmp_path, 5, 3)
    with pytest.raises(NotACheckpoint, match="weight_v000005"):
        read_chain(tmp_path, 1, 5)
    with pytest.raises(CorruptCheckpoint, match="begin with version 1"):
        read_chain(tmp_path, 0, 4)
    for file in (tmp_path / folder(2)).iterdir():
        file.unlink()
    with pytest.raises(NotACheckpoint, match="weight_v000002"):
        read_chain(tmp_path, 1, 3)
    (tmp_path / folder(2)).rmdir()
    (tmp_path / folder(3)).rename(tmp_path / folder(2))
    with pytest.raises(CorruptCheckpoint, match="version 3 on base 2"):
        read_chain(tmp_path, 1, 2)


def test_a_wrong_base_is_refused(tmp_path, chain):
    with pytest.raises(CorruptCheckpoint, match="not applied to version 2"):
        patched(tmp_path, tmp_path / "out", 2, 3, folder(1))


def test_a_base_without_a_tensor_is_refused(tmp_path, chain):
    save_file(
        {"big": chain[1]["big"].view(torch.int16).numpy()}, tmp_path / folder(1) / FILE
    )
    with pytest.raises(CorruptCheckpoint, match=r"has no tensor .*, which version 2"):
        patched(tmp_path, tmp_path / "out", 1, 2, folder(1))


def one_tensor(place: Path, data: bytes, **metadata: str) -> LocalStorage:
    """A version of one tensor "a" with these stored bytes; its new bytes are 8 zeros."""
    place.mkdir()
    checksum = metadata.pop("checksum", f"{zlib.adler32(bytes(8)):08x}")
    save_file({"a": np.frombuffer(data, np.uint8)}, place / FILE, {"a": checksum})
    values = {
        "version": "000001",
        "base_version": "000000",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    index = {"metadata": values | metadata, "weight_map": {"a": FILE}}
    (place / INDEX).write_text(json.dumps(index))
    return LocalStorage(place)


def test_the_checksum_of_slime_is_read(tmp_path):
    checksum = xxhash.xxh3_128_hexdigest(bytes(8))
    root = one_tensor(
        tmp_path / "v", compress(b"\1" * 8, 1),
        checksum_format="xxh3-128", checksum=checksum,
    )  # fmt: skip
    data = np.ones(8, np.uint8)
    found = read_version(root)
    assert found is not None
    found.patch("a", data)
    assert not data.any()
    with pytest.raises(CorruptCheckpoint, match="the xxh3-128"):
        found.patch("a", data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("delta_encoding", "overwrite"),
        ("compression_format", "lz4"),
        ("checksum_format", "blake3"),
        ("checksum_format", ["adler32"]),
    ],
)
def test_what_is_not_read_is_named(tmp_path, name, value):
    root = one_tensor(tmp_path / "v", b"", **{name: value})
    with pytest.raises(BackendError, match=f"the {name} ") as caught:
        read_version(root)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("version", ["", "-1", "1 ", "٣", "9" * 5000, 0.5, None])
def test_a_version_that_is_no_number_is_refused(tmp_path, version):
    root = one_tensor(tmp_path / "v", b"", version=version)
    with pytest.raises(CorruptCheckpoint, match="not numbers"):
        read_version(root)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no frame",
        compress(bytes(7), 1),
        compress(bytes(9), 1),
        compress(bytes(1 << 30), 1),
        compress(bytes(8), 1)[:-1],
        compress(b"\1" + bytes(7), 1),
    ],
    ids=["empty", "text", "short", "long", "huge", "cut off", "other bytes"],
)
def test_a_frame_of_other_bytes_is_refused(tmp_path, data):
    found = read_version(one_tensor(tmp_path / "v", data))
    assert found is not None
    with pytest.raises(CorruptCheckpoint, match=r"'a' in .*model-00000"):
        found.patch("a", np.zeros(8, np.uint8))


def test_files_that_disagree_are_refused(tmp_path):
    frame = compress(bytes(8), 1)

    def refused(change: str, text: str) -> None:
        root = one_tensor(tmp_path / change, frame)
        path = tmp_path / change / FILE
        index = json.loads((tmp_path / change / INDEX).read_text())
        if change == "dtype":
            save_file({"a": np.zeros(4, "<u2")}, path, {"a": "0"})
        if change == "shape":
            save_file({"a": np.zeros((2, 2), "<u1")}, path, {"a": "0"})
        if change == "checksum":
            save_file({"a": np.zeros(4, "<u1")}, path, {"b": "0"})
        if change == "other name":
            save_file({"b": np.zeros(4, "<u1")}, path, {"b": "0"})
        if change == "outside":
            index["weight_map"]["a"] = "../x.safetensors"
        if change == "absent":
            index["weight_map"]["a"] = "y.safetensors"
        if change == "no map":
            index["weight_map"] = None
        (tmp_path / change / INDEX).write_text(json.dumps(index))
        with pytest.raises(CorruptCheckpoint, match=text):
            read_version(root)

    refused("dtype", "a frame is uint8 of one dimension")
    refused("shape", "a frame is uint8 of one dimension")
    refused("checksum", "no checksum of 'a'")
    refused("other name", "disagrees with its files")
    refused("outside", "leads out of the directory")
    refused("absent", "not there")
    refused("no map", "no weight_map")


def test_names_that_no_file_can_hold_are_refused(tmp_path):
    stored = Stored(TensorMeta((0,), "uint8"), np.empty(0, np.uint8), "0")
    with pytest.raises(BackendError, match="'__metadata__'"):
        write_file(LocalStorage(tmp_path), 0, 1, {"__metadata__": stored})


def test_flipped_bits_give_no_wrong_weights(tmp_path, chain):
    random = np.random.default_rng(0)
    out = tmp_path / "out"
    for file in sorted((tmp_path / folder(2)).iterdir()):
        content = file.read_bytes()
        for bit in random.integers(0, 8 * len(content), 60).tolist():
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            for old in out.glob("*"):
                old.unlink()
            try:
                found = patched(tmp_path, out, 1, 2, folder(1))
            except CheckpointingException:
                continue
            # Spaces of the index, and bits of the zstd header that no reader needs.
            assert same(found, chain[2])
        file.write_bytes(content)
