"""slime, SGLang and ModelExpress open the versions that we write as hf-xor, and we open theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megackpt.deltas import WeightPublisher
from megackpt.deltas.hf_xor import folder, read_chain, read_version, write_patched
from megackpt.storage import LocalStorage, root_at
from megackpt.testing import ThreadedGroup
from tests.bits import assert_same
from tests.buckets import Bucket
from tests.conftest import PEERS, Ranks
from tests.deltas.test_publisher import Weights, shards

PROGRAM = Path(__file__).with_name("xor_peers.py")
PATCH = PEERS / "slime" / "docker/patch/latest/sglang-pull_weights.patch"
VERSIONS = 3


def environment(*peers: str) -> dict[str, str]:
    """For a process that imports these from .peers."""
    return {"PYTHONPATH": os.pathsep.join(str(PEERS / peer) for peer in peers)}


SLIME = environment("slime", "", "ray", "huggingface")
MODELEXPRESS = environment("modelexpress", "huggingface")


def call(env: dict[str, str], *args: object) -> str:
    name, *values = args
    done = subprocess.run(
        [sys.executable, PROGRAM, str(name), json.dumps(values, default=str)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def states() -> list[Weights]:
    """The weights of each version. 1 % change by one unit."""
    torch.manual_seed(33)
    shapes = {
        "model.embed_tokens.weight": (1000, 256),
        "model.layers.0.mlp.weight": (700, 513),
        "model.layers.1.mlp.weight": (700, 513),
        "model.norm.weight": (256,),
    }
    state = {
        key: (0.02 * torch.randn(shape)).bfloat16() for key, shape in shapes.items()
    }
    state["bias"] = torch.arange(8)
    found = [state]
    for _ in range(VERSIONS):
        state = {key: tensor.clone() for key, tensor in state.items()}
        for key in list(shapes)[:3]:
            units = state[key].view(torch.int16)
            changed = torch.rand(units.shape) < 0.01
            units[changed] += 2 * torch.randint(2, units.shape)[changed].short() - 1
        found.append(state)
    return found


@pytest.fixture
def chain(tmp_path: Path, states: list[Weights]) -> list[str]:
    """Each version as a Hugging Face directory in two files, with a config."""
    folders = []
    for number, state in enumerate(states):
        place = tmp_path / f"hf{number}"
        place.mkdir()
        (place / "config.json").write_text("{}")
        keys = list(state)
        files = {}
        for name, part in {"a": keys[:2], "b": keys[2:]}.items():
            save_file({key: state[key] for key in part}, place / f"{name}.safetensors")
            files |= dict.fromkeys(part, f"{name}.safetensors")
        index = json.dumps({"metadata": {}, "weight_map": files})
        (place / "model.safetensors.index.json").write_text(index)
        folders.append(str(place))
    return folders


def publish(place: str | Path, states: list[Weights], first: int) -> None:
    """By two ranks, each of which has some rows of the matrices."""
    layout: Any = dict.fromkeys(states[0])
    for key, tensor in states[0].items():
        if tensor.dim() == 2:
            layout[key] = 0, [0, 301, len(tensor)]

    def train(group: ThreadedGroup) -> None:
        with WeightPublisher(place, format="hf-xor", process_group=group) as publisher:
            for version, state in enumerate(states, start=first):
                publisher.publish(version, shards(state, layout, group.rank))

    ThreadedGroup.run(2, train)


def read_all(place: str | Path) -> Weights:
    found: Weights = {}
    for file in sorted(Path(place).glob("*.safetensors")):
        found |= load_file(file)
    return found


def check(place: str | Path, expected: Weights) -> None:
    found = read_all(place)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert_same(found[key], tensor, key)


def check_reading(
    place: str, chain: list[str], states: list[Weights], out: Path
) -> None:
    """We make each version of the first."""
    for target in range(1, VERSIONS + 1):
        written = LocalStorage(out / str(target), create=True)
        write_patched(LocalStorage(chain[0]), read_chain(place, 0, target), written)
        check(out / str(target), states[target])


def payload(place: Path) -> int:
    """Bytes of the versions from 1 on."""
    files = [*place.glob("weight_v*/*")]
    return sum(f.stat().st_size for f in files if f.parent.name != folder(0))


@pytest.mark.slime
def test_we_open_what_slime_writes(ranks: Ranks, tmp_path, chain, states, note):
    places = {name: str(tmp_path / name) for name in ("xxh3-128", "adler32")}
    given = json.dumps([chain, places])
    ranks(PROGRAM, 2, "slime_writes", given, env=SLIME, timeout=240)
    publish(tmp_path / "ours", states, 0)
    for name, place in places.items():
        out = tmp_path / f"read-{name}"
        out.mkdir()
        check_reading(place, chain, states, out)
        share = payload(tmp_path / "ours") / payload(Path(place))
        note(("bytes of hf-xor", "share of slime's"), name, f"{share:.4f}")
        assert share < 1.02


@pytest.mark.slime
def test_sglang_opens_what_we_write(tmp_path, chain, states):
    """Deltas on the directory that it started from, and a full version with deltas."""
    publish(tmp_path / "deltas", states, 0)
    publish(tmp_path / "full", states[1:], 1)
    for place in ("deltas", "full"):
        local = tmp_path / f"local-{place}" / "checkpoint"
        local.parent.mkdir()
        args = PATCH, chain[0], tmp_path / place, VERSIONS, local
        call({}, "sglang_reads", *args)
        check(local, states[VERSIONS])


@pytest.mark.modelexpress
def test_we_open_what_modelexpress_writes(
    ranks: Ranks, bucket: Bucket, tmp_path, chain, states
):
    """Deltas; and a full version, which begins another chain."""
    env = {**MODELEXPRESS, "AWS_DEFAULT_REGION": "us-east-1"}
    for name, full in {"deltas": [], "full": [2]}.items():
        given = json.dumps([chain, f"{bucket.url}/{name}", full])
        ranks(PROGRAM, 2, "modelexpress_writes", given, env=env, timeout=120)
    (tmp_path / "out").mkdir()
    check_reading(f"{bucket.url}/deltas", chain, states, tmp_path / "out")
    place = f"{bucket.url}/full"
    base = root_at(f"{place}/{folder(2)}")
    assert read_version(base) is None
    written = LocalStorage(tmp_path / "last", create=True)
    write_patched(base, read_chain(place, 2, VERSIONS), written)
    check(tmp_path / "last", states[VERSIONS])


@pytest.mark.modelexpress
def test_modelexpress_opens_what_we_write(bucket: Bucket, tmp_path, chain, states):
    """Deltas on the directory that it started from, and a full version with deltas."""
    env = {**MODELEXPRESS, "AWS_DEFAULT_REGION": "us-east-1"}
    publish(f"{bucket.url}/deltas", states, 0)
    publish(f"{bucket.url}/full", states[1:], 1)
    for name, full in {"deltas": [], "full": [1]}.items():
        place = f"{bucket.url}/{name}"
        args = chain[0], place, VERSIONS, full, tmp_path / f"cache-{name}"
        told = call(env, "modelexpress_reads", *args)
        check(told.split("checkpoint:")[1].strip(), states[VERSIONS])
