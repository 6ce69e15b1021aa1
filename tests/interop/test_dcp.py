"""Stock torch.distributed.checkpoint, in processes of its own: it reads what we save, we read what it saves."""

from __future__ import annotations

import io
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.checkpoint import open_checkpoint
from megackpt.planning.manifest import ITEMSIZE, OBJECT
from megackpt.testing import ThreadedGroup
from tests.bits import assert_same, bits, octets

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

DTYPES = [name for name in ITEMSIZE if name != OBJECT]
KINDS = ("nested", "dtensor", "fsdp2")


def whole() -> dict[str, torch.Tensor]:
    """Every tensor of our state by key."""
    return {
        **{f"dtype.{name}": bits((8, 6), name, i) for i, name in enumerate(DTYPES)},
        "layers.weight": bits((4, 6, 3), "bfloat16", 100),
        "step": torch.tensor(11),
        "empty": torch.empty(0, 5),
    }


def state(rank: int) -> dict[str, Any]:
    """What this rank holds at TP 2 x DP 2."""
    t, d = rank % 2, rank // 2
    full = whole()

    def sharded(key: str, axis: int) -> ShardedTensor:
        piece = full[key].chunk(2, axis)[t].clone()
        return ShardedTensor.from_rank_offsets(key, piece, (axis, t, 2), replica_id=d)

    def layer(number: int) -> ShardedTensor:
        piece = full["layers.weight"][number].chunk(2)[t].clone()
        places = (0, number, 4), (1, t, 2)
        return ShardedTensor.from_rank_offsets(
            "layers.weight", piece, *places, replica_id=d, prepend_axis_num=1
        )

    return {
        **{
            key: sharded(key, i % 2)
            for i, key in enumerate(full)
            if key.startswith("dtype.")
        },
        "layers": [layer(number) for number in range(4)],
        "step": ShardedTensor.from_rank_offsets("step", full["step"], replica_id=rank),
        "empty": ShardedTensor.from_rank_offsets(
            "empty", full["empty"], replica_id=rank
        ),
        "rng": ShardedObject("rng_state", {"tp": t}, (1, 2), (0, t), replica_id=d),
        "plain": ShardedObject(
            "plain", {"text": ["a", 1, None]}, (), (), replica_id=rank
        ),
        "iteration": 100,
    }


# ---- what stock DCP's processes do


def stock_reads(folder: str, out: str) -> None:
    """On 2 ranks: our checkpoint into plain tensors and into DTensors, and as one file."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    full = whole()
    asked: dict[str, Any] = {
        key: torch.zeros_like(tensor) for key, tensor in full.items()
    }
    names = ["rng_state/shard_0.0_1.2", "rng_state/shard_0.1_1.2"]
    asked |= {**{name: io.BytesIO() for name in names}, "plain": io.BytesIO()}
    dcp.load(asked, checkpoint_id=folder)
    for key, tensor in full.items():
        assert_same(asked[key], tensor, key)
    assert [asked[name] for name in names] == [[{"tp": 0}], [{"tp": 1}]]
    assert asked["plain"] == {"text": ["a", 1, None]}

    mesh = init_device_mesh("cpu", (2,))
    for axis in range(3):
        layers = zeros(
            (4, 6, 3), dtype=torch.bfloat16, device_mesh=mesh, placements=[Shard(axis)]
        )
        dcp.load({"layers.weight": layers}, checkpoint_id=folder)
        mine = full["layers.weight"].chunk(2, axis)[dist.get_rank()]
        assert_same(layers.to_local(), mine, f"axis {axis}")

    if dist.get_rank() == 0:
        dcp_to_torch_save(folder, out)
        found = torch.load(out, weights_only=False)
        for key, tensor in full.items():
            assert_same(found[key], tensor, key)
        assert found.keys() == {*full, *names, "plain"}
    dist.barrier()


def stock_saves(folder: str) -> None:
    """On 4 ranks: state dicts of each kind, and what they hold, whole, by DCP's flat names."""
    import torch.distributed.checkpoint as dcp

    for name in (*KINDS, "overwritten"):
        held = made(name)
        dcp.save(held, checkpoint_id=Path(folder) / name)
        flat = unsharded(held)
        if dist.get_rank() == 0:
            torch.save(flat, Path(folder) / f"{name}.pt")


def stock_reads_again(ours: str, stock: str) -> None:
    """On 2 ranks, where 4 had saved: what we loaded and saved, into state dicts of each kind."""
    import torch.distributed.checkpoint as dcp

    for kind in KINDS:
        held = blank(made(kind))
        dcp.load(held, checkpoint_id=Path(ours) / kind)
        found, (tensors, values) = unsharded(held), expected(Path(stock), kind)
        assert {
            key: value for key, value in found.items() if key not in tensors
        } == values
        for key, tensor in tensors.items():
            assert_same(found[key], tensor.resolve_conj(), f"{kind}: {key}")
    dist.barrier()


def made(kind: str) -> dict[str, Any]:
    return {
        "nested": nested,
        "dtensor": dtensor,
        "fsdp2": fsdp2,
        "overwritten": nested,
    }[kind]()


def unsharded(held: dict[str, Any]) -> dict[str, Any]:
    """By DCP's flat names, DTensors whole."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.tensor import DTensor

    flat = flatten_state_dict(held)[0]
    return {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in flat.items()
    }


def blank(value: Any) -> Any:
    """The same structure, without anything in it that could be taken for loaded."""
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def nested() -> dict[str, Any]:
    base = torch.arange(60.0).reshape(6, 10)
    return {
        "model": {
            "w": base.clone(),
            "layers": [{"b": torch.ones(3).bfloat16()}, {"b": torch.zeros(3).half()}],
        },
        "views": {
            "transposed": base.t(),
            "strided": base[:, ::3],
            "part": base[2:4],
            "conjugate": base.cfloat().conj(),
        },
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "fp8": torch.arange(4.0).to(torch.float8_e4m3fn),
        "none": torch.empty(3, 0),
        "epoch": 3,
        "rate": 0.125,
        "name": "a text",
        "mixed": [1, "two", torch.tensor([3, 4], dtype=torch.uint16), None],
        "tuple": (1, 2),
    }


def dtensor() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    line = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    square = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(0)

    def cut(mesh: Any, *placements: Any, shape: tuple[int, ...] = (7, 10)) -> Any:
        return distribute_tensor(
            torch.rand(shape, generator=generator), mesh, placements
        )

    return {
        "rows": cut(line, Shard(0)),  # of 4 ranks: 2, 2, 2 and 1
        "columns": cut(line, Shard(1)),
        "few": cut(line, Shard(0), shape=(2, 3)),  # nothing on half of 4 ranks
        "same": cut(line, Replicate()),
        "square": cut(square, Shard(0), Shard(1)),
        "half": cut(square, Replicate(), Shard(1)),
        "twice": cut(square, Shard(0), Shard(0), shape=(9, 2)),
    }


def fsdp2() -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=False), torch.nn.LayerNorm(3)
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.rand(2, 5)).sum().backward()
    optimizer.step()
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments}


# ---- tests


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours")
    ThreadedGroup.run(
        4, lambda group: megackpt.save(state(group.rank), folder, process_group=group)
    )
    return folder


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory, ours: Path, ranks: Any) -> Path:
    """A directory of each kind; "overwritten" was ours before."""
    folder = tmp_path_factory.mktemp("stock")
    shutil.copytree(ours, folder / "overwritten")
    ranks(stock_saves, 4, folder, timeout=240)
    return folder


def expected(stock: Path, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors, and all other values, by DCP's flat names."""
    flat = torch.load(stock / f"{kind}.pt", weights_only=True)
    tensors = {
        key: value for key, value in flat.items() if isinstance(value, torch.Tensor)
    }
    return tensors, {key: value for key, value in flat.items() if key not in tensors}


def assert_all_same(
    found: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]
) -> None:
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert_same(found[key], tensor.resolve_conj(), key)


def objects_of(folder: Path) -> dict[str, Any]:
    """The values of all objects without a grid, by key."""
    found = megackpt.load_sharded_metadata(folder).values()
    asked = {
        o.key: o for o in found if isinstance(o, ShardedObject) and not o.global_shape
    }
    return megackpt.load(asked, folder, validate_access_integrity=False)


def test_stock_dcp_reads_what_we_save(ours: Path, tmp_path: Path, ranks: Any) -> None:
    ranks(stock_reads, 2, ours, tmp_path / "whole.pt", timeout=240)


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_of_what_stock_dcp_saves(stock: Path, kind: str) -> None:
    tensors, values = expected(stock, kind)
    assert_all_same(megackpt.load_plain_tensors(stock / kind), tensors)
    assert objects_of(stock / kind) == values
    assert megackpt.load_common_state_dict(stock / kind) == {}
    report = megackpt.verify(stock / kind)
    assert report.ok, report
    assert report.checked
    assert not report.foreign


def columns_of(
    tensors: dict[str, torch.Tensor], group: ThreadedGroup
) -> tuple[dict[str, ShardedTensor], dict[str, torch.Tensor]]:
    """Blank, and full: this rank's share of each tensor along its last axis, where it was not cut before."""
    asked, pieces = {}, {}
    for key, tensor in tensors.items():
        if not tensor.dim():
            blank = torch.zeros_like(tensor)
            asked[key] = ShardedTensor.from_rank_offsets(
                key, blank, replica_id=group.rank
            )
            pieces[key] = tensor
            continue
        start, stop = (
            tensor.shape[-1] * i // group.size for i in (group.rank, group.rank + 1)
        )
        pieces[key] = tensor[..., start:stop].resolve_conj()
        shape, begin = tuple(pieces[key].shape), (*(0,) * (tensor.dim() - 1), start)
        blank = torch.empty(shape, dtype=tensor.dtype)
        asked[key] = ShardedTensor(
            key, blank, tensor.dtype, shape, tuple(tensor.shape), begin, None
        )
    return asked, pieces


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3])
def test_it_is_resharded(stock: Path, kind: str, size: int) -> None:
    tensors, _ = expected(stock, kind)

    def run(group: ThreadedGroup) -> None:
        asked, pieces = columns_of(tensors, group)
        found = megackpt.load(
            asked, stock / kind, process_group=group, dtype_policy="error"
        )
        assert_all_same(found, pieces)

    ThreadedGroup.run(size, run)


def test_stock_dcp_reads_what_we_make_of_its_own(
    stock: Path, tmp_path: Path, ranks: Any
) -> None:
    def run(kind: str, group: ThreadedGroup) -> None:
        tensors, values = expected(stock, kind)
        asked, _ = columns_of(tensors, group)
        megackpt.load(asked, stock / kind, process_group=group)
        objects = {
            key: ShardedObject(key, value, (), (), group.rank)
            for key, value in values.items()
        }
        megackpt.save({**asked, **objects}, tmp_path / kind, process_group=group)

    for kind in KINDS:
        ThreadedGroup.run(3, partial(run, kind))
    ranks(stock_reads_again, 2, tmp_path, stock, timeout=240)


@pytest.mark.parametrize("kind", KINDS)
def test_converted_to_zarr_and_back(stock: Path, tmp_path: Path, kind: str) -> None:
    tensors, values = expected(stock, kind)
    megackpt.convert(stock / kind, tmp_path / "zarr", "zarr")
    megackpt.convert(tmp_path / "zarr", tmp_path / "back", "torch_dist")
    for folder in (tmp_path / "zarr", tmp_path / "back"):
        assert_all_same(megackpt.load_plain_tensors(folder), tensors)
        assert objects_of(folder) == values
        assert megackpt.verify(folder).ok


def test_a_flipped_byte_is_found(stock: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stock / "nested", tmp_path / "ckpt")
    location = open_checkpoint(folder).manifest.chunks_of("model.w")[0].location
    data = bytearray((folder / location.file).read_bytes())
    data[data.index(octets(nested()["model"]["w"]), location.start) + 100] ^= 1
    (folder / location.file).write_bytes(data)
    (problem,) = megackpt.verify(folder).problems
    assert "'model.w'" in problem
    assert location.file in problem


def test_replaced_by_ours(stock: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stock / "fsdp2", tmp_path / "ckpt")
    (folder / "notes.txt").write_text("somebody's")
    megackpt.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}, folder)
    assert_all_same(megackpt.load_plain_tensors(folder), {"w": torch.ones(3)})
    assert (folder / "notes.txt").read_text() == "somebody's"
    assert megackpt.verify(folder).foreign == ("notes.txt",)
    assert {p.name for p in tmp_path.iterdir()} == {"ckpt"}


def test_ours_overwritten_by_stock_dcp(stock: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stock / "overwritten", tmp_path / "ckpt")
    message = r"\.metadata is newer.*[Rr]emove megackpt.index"
    for read in (megackpt.load_plain_tensors, megackpt.load_common_state_dict):
        with pytest.raises(megackpt.CorruptCheckpoint, match=message):
            read(folder)
    with pytest.raises(megackpt.CorruptCheckpoint, match=message):
        megackpt.load(
            {"w": ShardedTensor.from_rank_offsets("model.w", torch.zeros(6, 10))},
            folder,
        )
    assert any(
        ".metadata is newer" in problem for problem in megackpt.verify(folder).problems
    )
    (folder / "megackpt.index").unlink()
    tensors, values = expected(stock, "nested")
    assert_all_same(megackpt.load_plain_tensors(folder), tensors)
    assert objects_of(folder) == {
        **values,
        "iteration": 100,
    }  # stock DCP leaves common.pt as it was
