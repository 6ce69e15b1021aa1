"""``HuggingFaceStorageWriter`` under stock torch DCP: whole files from all ranks, and nothing else."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import megackpt
from megackpt.dcp import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    SavePlanner,
)
from megackpt.errors import CheckpointingException
from tests.backends.safetensors_pieces import STATE
from tests.backends.torch_files import same
from tests.conftest import PEERS, ROOT, Ranks
from tests.dcp.states import sharded
from tests.huggingface.ready_models import CONFIG
from tests.torch_names import RELEASE

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

INDEX = "model.safetensors.index.json"
ONE = "model-00001-of-00001.safetensors"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """What the reference library finds where the index says."""
    files = json.loads((folder / INDEX).read_text())["weight_map"]
    found = {}
    for key, file in files.items():
        found[key] = load_file(folder / file)[key]
    return found


@pytest.mark.parametrize("planner", [DefaultSavePlanner, SavePlanner])
@pytest.mark.parametrize("distributed", [False, True])
def test_whole_files(where: Path, planner: Any, distributed: bool) -> None:
    writer = HuggingFaceStorageWriter(
        where, save_distributed=distributed, enable_consolidation=distributed
    )
    dcp.save(dict(STATE), storage_writer=writer, planner=planner())
    assert names(where) == {ONE, INDEX}
    assert names(where.parent) == {where.name}
    same(stored(where), STATE)
    same(megackpt.load_plain_tensors(where), STATE)
    total = sum(tensor.nbytes for tensor in STATE.values())
    index = json.loads((where / INDEX).read_text())
    assert index["metadata"] == {"total_size": total}
    readers = [HuggingFaceStorageReader]
    if RELEASE >= (2, 9):
        readers.append(dcp.HuggingFaceStorageReader)
    for reader in readers:
        found = {key: torch.zeros_like(value) for key, value in STATE.items()}
        dcp.load(found, storage_reader=reader(str(where)))
        same(found, STATE)


def test_several_files(where: Path) -> None:
    mapping = {"rows": 1, "columns": 3, "whole": 3, "s": 1}
    dcp.save(dict(STATE), storage_writer=HuggingFaceStorageWriter(where, mapping))
    files = {f"model-0000{n}-of-00003.safetensors" for n in (1, 3)}
    assert names(where) == files | {INDEX}
    same(stored(where), STATE)
    same(megackpt.load_plain_tensors(where), STATE)


def test_an_index_of_ours_is_asked_for(where: Path) -> None:
    """Only with it there are digests, and only then the files are replaced."""
    for seed in (0.0, 1.0):
        state = {"w": torch.full((4,), seed)}
        writer = HuggingFaceStorageWriter(where, index=True)
        dcp.save(state, storage_writer=writer)
        assert names(where) == {ONE, INDEX, "megackpt.index"}
        same(stored(where), state)
    data = bytearray((where / ONE).read_bytes())
    data[-1] ^= 1
    (where / ONE).write_bytes(data)
    assert not megackpt.verify(where).ok
    for path, reason in ((where, "a save without index replaces nothing"), (None, ONE)):
        place = path or where.parent / "other"
        if path is None:
            dcp.save(state, storage_writer=HuggingFaceStorageWriter(place))
        with pytest.raises(CheckpointException, match=reason):
            dcp.save(state, storage_writer=HuggingFaceStorageWriter(place))


@pytest.mark.parametrize(
    ("state", "mapping", "reason"),
    [
        ({"w": torch.ones(2), "step": 3}, None, "not objects: leave out 'step'"),
        ({"w": torch.ones(2), "v": torch.ones(2)}, {"w": 1}, "lacks 'v'"),
        ({"w": torch.ones(2, dtype=torch.complex128)}, None, "has no complex128"),
        ({"w": torch.eye(2).to_sparse()}, None, "'w': sparse data.*to_dense"),
        ({"__metadata__": torch.ones(2)}, None, "the name is the format's own"),
    ],
)
def test_what_cannot_be_stored_is_refused(
    where: Path, state: dict[str, Any], mapping: Any, reason: str
) -> None:
    with pytest.raises(CheckpointException, match=reason):
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(where, mapping))
    assert not where.exists()


def test_cached_plans_are_refused(where: Path) -> None:
    for number in range(2):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        writer = HuggingFaceStorageWriter(where / f"{number}")
        if not number:
            dcp.save(dict(STATE), storage_writer=writer, planner=planner)
            continue
        with pytest.raises(CheckpointException, match="without enable_plan_caching"):
            dcp.save(dict(STATE), storage_writer=writer, planner=planner)
    DefaultSavePlanner._cached_save_plan.clear()


@pytest.mark.parametrize(
    "options",
    [
        {"token": "hf_x"},
        {"fqn_to_index_mapping": {"w": 0}},
        {"fqn_to_index_mapping": {"w": "1"}},
        {"thread_count": 0},
    ],
)
def test_wrong_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(CheckpointingException, match=r"token|numbers|thread_count"):
        HuggingFaceStorageWriter("c", **options)


def test_arguments_are_those_of_stock() -> None:
    if RELEASE < (2, 9):
        pytest.skip("torch 2.8 has other names")
    stock = inspect.signature(dcp.HuggingFaceStorageWriter).parameters
    own = inspect.signature(HuggingFaceStorageWriter).parameters
    assert list(own)[: len(stock)] == list(stock)
    for name, parameter in stock.items():
        assert own[name].default == parameter.default


def model(seed: int) -> dict[str, Any]:
    """What ``sharded`` holds, without objects."""
    state = sharded(seed)
    return {**state["model"], "plain": state["plain"]}


def together(folder: str) -> None:
    """On two ranks: synchronous, in the background, and where one rank fails."""
    rank = dist.get_rank()
    mapping = {"rows": 1, "columns": 1, "replicated": 2, "plain": 2}
    for seed, kind in enumerate(("sync", "thread")):
        writer = HuggingFaceStorageWriter(f"{folder}/{kind}", mapping)
        if kind == "sync":
            dcp.save(model(seed), storage_writer=writer)
        else:
            dcp.async_save(model(seed), storage_writer=writer).result()
        whole = torch.arange(40.0).reshape(10, 4) + seed
        expected = dict.fromkeys(("rows", "columns", "replicated"), whole)
        expected["plain"] = torch.full((70_000,), float(seed))
        same(stored(Path(folder, kind)), expected)
        found = model(7)
        reader = HuggingFaceStorageReader(f"{folder}/{kind}")
        dcp.load(found, storage_reader=reader)
        for key, value in model(seed).items():
            local, other = found[key], value
            if key != "plain":
                local, other = local.to_local(), other.to_local()
            assert torch.equal(local, other), key

    class Fails(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if rank == 1:
                raise ValueError("not today")
            return super().resolve_data(write_item)

    writer = HuggingFaceStorageWriter(f"{folder}/failed")
    with pytest.raises(CheckpointException, match=r"rank 1 cannot write .*not today"):
        dcp.save(model(3), storage_writer=writer, planner=Fails())
    dist.barrier()
    assert not Path(folder, "failed").exists()


@pytest.mark.slow
def test_two_ranks(tmp_path: Path, ranks: Ranks) -> None:
    ranks(together, 2, tmp_path)
    assert names(tmp_path / "sync") == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    }


# transformers' own distributed save, with our writer in the place of torch's.
SCRIPT = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import checkpoint
from megackpt.dcp import HuggingFaceStorageWriter

config = AutoConfig.for_model("llama", **eval(sys.argv[2]))
model, tokens = AutoModelForCausalLM.from_config(config).eval(), torch.arange(9)[None]
checkpoint.HuggingFaceStorageWriter = HuggingFaceStorageWriter
checkpoint._save_model_checkpoint_distributed(model, sys.argv[1])
config.save_pretrained(sys.argv[1])
again, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(info.values()), info
with torch.no_grad():
    assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)
"""


@pytest.mark.transformers
@pytest.mark.slow
def test_transformers_opens_it(where: Path) -> None:
    paths = os.pathsep.join([str(ROOT), str(PEERS / "huggingface")])
    env = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT, str(where), repr(CONFIG)]
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert names(where) == {ONE, INDEX, "config.json"}
