"""A default device of torch's (``set_default_device``, ``with torch.device(...)``) changes nothing that is saved or
loaded: every tensor that the library makes names its device."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils._device import _device_constructors

import megackpt
from megackpt import CheckpointManager, ShardedObject, ShardedTensor
from megackpt.adapters.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megackpt.dcp import FileSystemReader, FileSystemWriter, LoadPlanner, SavePlanner
from megackpt.errors import CheckpointingException, CorruptCheckpoint

ROOT = Path(__file__).resolve().parent.parent
FORMATS = ("torch_dist", "zarr", "safetensors")
FACTORIES = _device_constructors()
W = torch.arange(24.0).reshape(4, 6)


def sources() -> list[Path]:
    return sorted(
        path
        for folder in ("megackpt", "tools")
        for path in (ROOT / folder).rglob("*.py")
    )


def dotted(node: ast.expr) -> list[str]:
    """["torch", "zeros"] of that expression; empty for anything but names and dots."""
    if isinstance(node, ast.Name):
        return [node.id]
    head = dotted(node.value) if isinstance(node, ast.Attribute) else []
    return [*head, node.attr] if head and isinstance(node, ast.Attribute) else []


def unplaced(text: str) -> Iterator[tuple[int, str]]:
    """Line and name of each call of a factory that obeys the default device and is not told a device."""
    module = ast.parse(text)
    known = {"torch": torch}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            known |= {
                alias.asname or alias.name: getattr(torch, alias.name, None)
                for alias in node.names
            }
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        first, *rest = dotted(node.func) or [""]
        value = functools.reduce(
            lambda part, name: getattr(part, name, None), rest, known.get(first)
        )
        named = any(keyword.arg == "device" for keyword in node.keywords)
        if (
            value is not None
            and not named
            and any(value is factory for factory in FACTORIES)
        ):
            yield node.lineno, ".".join([first, *rest])


def test_every_tensor_that_is_made_names_its_device() -> None:
    assert list(
        unplaced("import torch\nfrom torch import ones as o\ntorch.zeros(2)\no(3)")
    ) == [
        (3, "torch.zeros"),
        (4, "o"),
    ]
    assert not list(
        unplaced("import torch\ntorch.zeros(2, device='cpu')\ntorch.frombuffer(b'')")
    )
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {what} without device="
        for path in sources()
        for line, what in unplaced(path.read_text(encoding="utf-8"))
    ]
    assert not wrong


@pytest.fixture(params=["context", "global"])
def on_meta(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test's body runs with meta as the default device."""
    if request.param == "context":
        with torch.device("meta"):
            yield
        return
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def state() -> dict[str, Any]:
    rng = torch.get_rng_state()
    return {
        "w": ShardedTensor.from_rank_offsets("w", W.clone()),
        "t": ShardedTensor.from_rank_offsets("t", W.clone().t()),
        "rng": ShardedObject("rng", {"cpu": rng, "none": W[:0]}, (1,), (0,)),
        "sparse": W.to_sparse_coo(),
        "csr": W.to_sparse_csr(),
        "generator": rng,
        "parameter": torch.nn.Parameter(W.clone()),
    }


def wishes() -> dict[str, Any]:
    return {
        "w": ShardedTensor("w", None, torch.float32, (4, 6), (4, 6), (0, 0), (1, 1)),
        "t": ShardedTensor(
            "t", None, torch.float64, (6, 4), (6, 4), (0, 0), (1, 1)
        ),  # converted
        "rng": ShardedObject("rng", None, (1,), (0,)),
    }


def check(got: dict[str, Any]) -> None:
    assert got["w"].device.type == got["t"].device.type == "cpu"
    assert torch.equal(got["w"], W)
    assert torch.equal(got["t"].float(), W.t())
    assert torch.equal(got["rng"]["cpu"], torch.get_rng_state())
    assert got["rng"]["none"].is_cpu
    assert torch.equal(got["generator"], torch.get_rng_state())
    assert torch.equal(got["parameter"], W)
    assert torch.equal(got["sparse"].to_dense(), W)
    assert torch.equal(got["csr"].to_dense(), W)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("on_meta")
def test_saves_and_loads(tmp_path: Path, name: str) -> None:
    megackpt.save(state(), tmp_path / "a", name)
    check(megackpt.load(wishes(), tmp_path / "a"))
    plain = megackpt.load_plain_tensors(tmp_path / "a")
    assert plain["w"].is_cpu
    assert torch.equal(plain["w"], W)
    assert megackpt.verify(tmp_path / "a").ok


@pytest.mark.usefixtures("on_meta")
def test_asynchronous_saves_and_a_manager(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(5, state())
    with CheckpointManager(tmp_path / "run") as manager:
        restored = manager.restore(wishes())
    assert restored is not None
    assert restored.step == 5
    assert not restored.skipped
    check(restored.state)
    request = megackpt.save(state(), tmp_path / "b", async_sharded_save=True)
    assert request is not None
    request.execute_sync()
    check(megackpt.load(wishes(), tmp_path / "b"))


@pytest.mark.parametrize("name", [*FORMATS, "torch"])
@pytest.mark.usefixtures("on_meta")
def test_conversions(tmp_path: Path, name: str) -> None:
    megackpt.save(state(), tmp_path / "a")
    megackpt.convert(tmp_path / "a", tmp_path / "b", name, cast="bf16", workers=1)
    got = megackpt.load_plain_tensors(tmp_path / "b")["w"]
    assert got.is_cpu
    assert torch.equal(got, W.bfloat16())


@pytest.mark.usefixtures("on_meta")
def test_dcps_own_save_and_load(tmp_path: Path) -> None:
    given = {
        "w": W.clone(),
        "odd": W[:, 2],
        "rng": torch.get_rng_state(),
        "n": {"step": 3},
    }
    dcp.save(
        given,
        storage_writer=FileSystemWriter(tmp_path / "a"),
        planner=SavePlanner(),
        no_dist=True,
    )
    for reader in (
        FileSystemReader(tmp_path / "a"),
        dcp.FileSystemReader(tmp_path / "a"),
    ):
        into = {
            "w": torch.zeros(4, 6, dtype=torch.float64, device="cpu"),
            "odd": torch.zeros(4, device="cpu"),
            "rng": torch.zeros_like(given["rng"]),
            "n": {"step": 0},
        }
        dcp.load(into, storage_reader=reader, planner=LoadPlanner(), no_dist=True)
        assert torch.equal(into["w"].float(), W)
        assert torch.equal(into["odd"], W[:, 2])
        assert torch.equal(into["rng"], given["rng"])
        assert into["n"] == {"step": 3}


@pytest.mark.usefixtures("on_meta")
def test_what_others_wrote(tmp_path: Path) -> None:
    dcp.save(
        {"w": W.clone(), "col": W[:, 2:3]}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    torch.save({"w": W.clone(), "v": W.t()}, tmp_path / "w.pt")
    torch.save(
        {"w": W.clone()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False
    )
    assert torch.equal(megackpt.load_plain_tensors(tmp_path / "dcp")["w"], W)
    assert torch.equal(megackpt.load_plain_tensors(tmp_path / "dcp")["col"], W[:, 2:3])
    assert torch.equal(megackpt.load_plain_tensors(tmp_path / "w.pt")["v"], W.t())


@pytest.mark.usefixtures("on_meta")
def test_optimizer_states(tmp_path: Path) -> None:
    """Their groups' numbers are tensors that the adapter makes."""
    weights = [torch.nn.Parameter(W.clone()), torch.nn.Parameter(W.clone())]
    model = {
        f"model.{i}": ShardedTensor.from_rank_offsets(f"model.{i}", weight)
        for i, weight in enumerate(weights)
    }

    def declared(moment: float) -> dict[str, Any]:
        found: dict[str, Any] = {
            "state": {i: {"exp_avg": torch.full_like(W, moment + i)} for i in range(2)},
            "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}],
        }
        optim_state_to_sharding_state(
            found, get_param_id_to_sharded_param_map(model, weights)
        )
        return found

    megackpt.save(declared(1.0), tmp_path / "a")
    got = megackpt.load(declared(0.0), tmp_path / "a")
    assert torch.equal(got["state"][1]["exp_avg"], torch.full_like(W, 2.0))
    assert [group["lr"] for group in got["param_groups"]] == [0.1, 0.2]


class Refuses:
    """A class whose own code fails for a reason that is not the file's."""

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("no accelerator is present")


def test_what_fails_to_be_made_here_is_no_damage(tmp_path: Path) -> None:
    value = Refuses()
    value.__dict__["kept"] = 1
    megackpt.save(
        {"o": value, "w": ShardedTensor.from_rank_offsets("w", W)}, tmp_path / "a"
    )
    with pytest.raises(
        CheckpointingException, match="no accelerator is present"
    ) as caught:
        megackpt.load({}, tmp_path / "a", trusted=(Refuses,))
    assert not isinstance(caught.value, CorruptCheckpoint)


def two_ranks(directory: str) -> None:
    rank = torch.distributed.get_rank()
    mine = W[2 * rank : 2 * rank + 2]

    def save_and_load() -> None:
        whole = ShardedTensor(
            "w", None, torch.float32, (4, 6), (4, 6), (0, 0), (1, 1), rank
        )
        piece = ShardedTensor(
            "w", mine, torch.float32, (2, 6), (4, 6), (2 * rank, 0), (2, 1)
        )
        large = "x" * (3 << 20)  # a message that takes memory of its own
        megackpt.save(
            {"w": piece, "rng": torch.get_rng_state(), "large": large}, directory
        )
        got = megackpt.load({"w": piece.without_data()}, directory)
        assert torch.equal(got["w"], mine)
        assert got["large"] == large
        assert torch.equal(megackpt.load({"w": whole}, directory)["w"], W)

    with torch.device("meta"):
        save_and_load()
    torch.set_default_device("meta")
    save_and_load()


@pytest.mark.slow
def test_two_ranks_over_gloo(ranks: Callable[..., Any], tmp_path: Path) -> None:
    ranks(two_ranks, 2, tmp_path / "a")
