"""Tensors that wrap others through every door: by a rule, and without one refused before a byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import megackpt
from megackpt import (
    BackendError,
    CheckpointManager,
    MismatchError,
    ShardedTensor,
    ShardingError,
    Strategy,
    convert,
    dcp,
    deltas,
    remove_sharded_tensors,
    sharded,
)
from megackpt.checkpoint.index import decode_index, encode_index
from megackpt.errors import CorruptCheckpoint
from tests.conftest import PEERS, ROOT, Ranks


class Wrapper(torch.Tensor):
    """A pair of tensors, of which one has a scale for each row."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, step: int = 1) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        made.data_, made.scale, made.step = data, scale, step
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["data_", "scale"], {"step": self.step}

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, *_: Any) -> Wrapper:
        return cls(parts["data_"], parts["scale"], context["step"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = args[0]
        if func is torch.ops.aten.detach.default:
            return cls(found.data_, found.scale, found.step)
        return func(found.data_, *args[1:], **(kwargs or {}))

    def dequantize(self) -> torch.Tensor:
        return self.data_ * self.scale


class Known(Wrapper):
    pass


RULE = {"data_": "... -2 -1", "scale": "-2 -"}


def made(kind: type[Wrapper] = Known, step: int = 1, fill: int = 1) -> Any:
    data = torch.arange(24, dtype=torch.int8).reshape(6, 4) * fill
    return kind(data, torch.arange(6.0).reshape(6, 1) * fill + fill, step)


@pytest.fixture(autouse=True)
def rule() -> None:
    megackpt.register_tensor_subclass(f"{Known.__module__}.Known", RULE)


def by_dcp(state: dict[str, Any], folder: Path) -> None:
    with dcp.install():
        torch_dcp.save(state, checkpoint_id=folder)


def by_planner(state: dict[str, Any], folder: Path) -> None:
    torch_dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))


def published(state: dict[str, Any], folder: Path) -> None:
    with deltas.WeightPublisher(folder) as publisher:
        publisher.publish(0, state)


DOORS: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "save": lambda state, folder: megackpt.save(sharded(state), folder),
    "asynchronous": lambda state, folder: megackpt.save(
        sharded(state), folder, async_sharded_save=True
    ).finalize_fns[0](),
    "undeclared": megackpt.save,
    "manager": lambda state, folder: CheckpointManager(folder).save(1, extra=state),
    "dcp.save": by_dcp,
    "a writer of dcp": by_planner,
    "publisher": published,
}


@pytest.mark.parametrize("door", DOORS)
def test_a_class_without_a_rule_is_refused_by_name_and_nothing_is_written(
    door: str, tmp_path: Path
) -> None:
    with pytest.raises((ShardingError, CheckpointException), match="Wrapper"):
        DOORS[door]({"w": made(Wrapper)}, tmp_path / "ck")
    # torch leaves the writer's note of a save that has begun.
    files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert [name for name in files if not name.startswith(".megackpt-")] == []


@pytest.mark.parametrize("door", ["save", "manager", "dcp.save", "publisher"])
def test_a_class_with_a_rule_passes(door: str, tmp_path: Path) -> None:
    state = {"w": made()}
    DOORS[door](state, tmp_path / "ck")
    key = "extra.w" if door == "manager" else "w"
    folder = next(tmp_path.rglob("megackpt.index")).parent
    target, plain = made(fill=0), torch.zeros(6, 4)
    megackpt.load({"w": ShardedTensor.from_rank_offsets(key, target)}, folder)
    megackpt.load({"w": ShardedTensor.from_rank_offsets(key, plain)}, folder)
    assert torch.equal(target.data_, state["w"].data_)
    assert torch.equal(target.scale, state["w"].scale)
    assert torch.equal(plain, state["w"].dequantize())


@pytest.mark.parametrize("to", ["zarr", "safetensors"])
def test_a_conversion_keeps_the_class(to: str, tmp_path: Path) -> None:
    megackpt.save(sharded({"w": made(), "b": torch.ones(2)}), tmp_path / "ck")
    convert(tmp_path / "ck", tmp_path / "to", to, exclude=["b"])
    target = made(fill=0)
    megackpt.load(sharded({"w": target}), tmp_path / "to", strict="raise_all")
    assert torch.equal(target.data_, made().data_)


def test_a_conversion_that_would_lose_the_class_is_refused(tmp_path: Path) -> None:
    megackpt.save(sharded({"w": made(), "b": torch.ones(2)}), tmp_path / "ck")
    lossy: list[Callable[[], object]] = [
        lambda: convert(tmp_path / "ck", tmp_path / "to", "zarr", exclude=["w.scale"]),
        lambda: convert(tmp_path / "ck", tmp_path / "to", "zarr", cast="bfloat16"),
        lambda: convert(
            tmp_path / "ck", tmp_path / "to", "zarr", rename={"w.*": "x.*"}
        ),
        lambda: convert(tmp_path / "ck", tmp_path / "to", "torch"),
        lambda: remove_sharded_tensors(tmp_path / "ck", "w.scale"),
    ]
    for conversion in lossy:
        with pytest.raises(BackendError, match="'w' wraps"):
            conversion()
    remove_sharded_tensors(tmp_path / "ck", "b")
    megackpt.load(sharded({"w": made(fill=0)}), tmp_path / "ck", strict="raise_all")
    bare = Strategy("safetensors", options={"index": False})
    with pytest.raises(BackendError, match="a format with an index"):
        megackpt.save(sharded({"w": made()}), tmp_path / "bare", bare)


def test_show_names_the_class(tmp_path: Path) -> None:
    megackpt.save(sharded({"w": made()}), tmp_path / "ck")
    command = [sys.executable, "-m", "megackpt", "show", tmp_path / "ck", "--json"]
    shown = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert json.loads(shown.stdout)["wrapping"] == {"w": f"{Known.__module__}.Known"}


def test_keys_with_two_meanings_are_refused(tmp_path: Path) -> None:
    for other in ("w.scale", "w"):
        state = {
            "a": ShardedTensor.from_rank_offsets("w", made()),
            "b": ShardedTensor.from_rank_offsets(other, torch.ones(6, 4)),
        }
        with pytest.raises(ShardingError, match=f"{other!r} is the key of"):
            megackpt.save(state, tmp_path / "ck")
    assert not list(tmp_path.iterdir())


def test_a_changed_context_is_saved_although_shapes_are_equal(tmp_path: Path) -> None:
    """The plan of the first save is not reused."""
    for step in (1, 2):
        megackpt.save(sharded({"w": made(step=step)}), tmp_path / str(step))
    megackpt.load(sharded({"w": made(step=2, fill=0)}), tmp_path / "2")
    with pytest.raises(MismatchError, match=r"'step': 2.*'step': 1"):
        megackpt.load(sharded({"w": made(fill=0)}), tmp_path / "2")


def test_values_without_a_name_are_not_recorded(tmp_path: Path) -> None:
    for step in (object(), float("nan")):
        with pytest.raises(ShardingError, match="no record can be made"):
            megackpt.save(sharded({"w": made(step=step)}), tmp_path / "ck")  # type: ignore[arg-type]


def test_a_record_of_an_attacker_runs_nothing(tmp_path: Path) -> None:
    """A class that no rule names is never looked up, and damaged records are refused."""
    megackpt.save(sharded({"w": made()}), tmp_path / "ck")
    index = tmp_path / "ck" / "megackpt.index"
    known = f"{Known.__module__}.Known".encode()
    from megackpt.storage import digest

    def rewritten(old: bytes, new: bytes) -> bytes:
        body = index.read_bytes()[:-16]
        assert old in body
        assert len(old) == len(new)
        body = body.replace(old, new)
        return body + digest(body)

    evil = rewritten(known, b"subprocess.Popen".ljust(len(known), b"_"))
    for old, new in ((b'\\"class\\"', b'\\"clasz\\"'), (b'\\"data_', b'\\"datum')):
        with pytest.raises(CorruptCheckpoint):
            decode_index(rewritten(old, new))
    index.write_bytes(evil)
    with pytest.raises(MismatchError, match="subprocess"):
        megackpt.load(sharded({"w": torch.zeros(6, 4)}), tmp_path / "ck")


@pytest.mark.torchao
def test_dtensors_of_torchaos_tensors(
    ranks: Ranks, tmp_path: Path, tensors: ModuleType
) -> None:
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(PEERS / "torchao-0.18.0")])}
    for name in ("float8 by block", "mxfp8 swizzled"):
        ranks(save_dtensors, 2, name, tmp_path / name, env=env)
        ranks(load_dtensors, 4, name, tmp_path / name, env=env)


def held(name: str, is_empty: bool) -> tuple[Any, Any]:
    """A DTensor of this rank's rows, and the rows."""
    from torch.distributed import get_rank, get_world_size
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from tests.low_precision import torchao_tensors

    whole = torchao_tensors.WHOLE[name]()
    rows = len(whole) // get_world_size()
    start = get_rank() * rows
    part = torchao_tensors.cut(whole, slice(start, start + rows), slice(0, 1024))
    local = torchao_tensors.emptied(part) if is_empty else part
    mesh = init_device_mesh("cpu", (get_world_size(),))
    made = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return nn.Parameter(made, requires_grad=False), part


def save_dtensors(name: str, folder: str) -> None:
    megackpt.save(sharded({"w": held(name, False)[0]}), folder)


def load_dtensors(name: str, folder: str) -> None:
    from tests.low_precision import torchao_tensors

    target, expected = held(name, True)
    state = megackpt.load(sharded({"w": target}), folder)
    assert state["w"] is target
    torchao_tensors.assert_equal(target.to_local(), expected)


def test_a_key_map_names_the_whole_tensor(tmp_path: Path) -> None:
    megackpt.save(sharded({"old": made()}), tmp_path / "ck")
    target, plain = made(fill=0), torch.zeros(6, 4)
    for value in (target, plain):
        megackpt.load(sharded({"w": value}), tmp_path / "ck", key_map={"w": "old"})
    assert torch.equal(target.data_, made().data_)
    assert torch.equal(plain, made().dequantize())


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [12, 4]},
        {"shape": []},
        {"shape": [-6, 4]},
        {"class": "os.system"},
        {"class": 5},
        {"context": None},
        {"context": {}},
        {"context": {"step": "x"}},
        {"context": {"step": -5}},
        {"context": {"step": 1e400}},
        {"inner": ["data_"]},
        {"inner": ["data_", "other"]},
    ],
    ids=str,
)
def test_a_wrong_record_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    rule = {"data_": "... -2 -1/step", "scale": "-2 -"}
    megackpt.register_tensor_subclass(f"{Known.__module__}.Known", rule)
    megackpt.save(sharded({"w": made()}), tmp_path / "ck")
    index = tmp_path / "ck" / "megackpt.index"
    manifest, small = decode_index(index.read_bytes())
    [(key, text)] = manifest.subclasses
    record = json.dumps({**json.loads(text), **change})
    index.write_bytes(
        encode_index(replace(manifest, subclasses=((key, record),)), small)
    )
    shape = change.get("shape", [6, 4])
    if -6 not in shape:
        with pytest.raises((MismatchError, CorruptCheckpoint)):
            megackpt.load(sharded({"w": torch.zeros(shape)}), tmp_path / "ck")
    with pytest.raises((MismatchError, CorruptCheckpoint)):
        megackpt.load(sharded({"w": made(fill=0)}), tmp_path / "ck")
