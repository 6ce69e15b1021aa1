"""State dicts, readers and comparisons that the tests of torch DCP share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.planner import WriteItem

import megackpt
from megackpt.dcp import FileSystemReader
from megackpt.planning.manifest import ITEMSIZE, OBJECT
from tests.torch_names import (
    DROPS_ERRORS_OF_READERS,
)

GOLDEN = Path(__file__).parent.parent / "golden"


READERS = (FileSystemReader, dcp.FileSystemReader)


def bits(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Any bits at all, but for bool, which has two values."""
    size = torch.Size(shape).numel() * ITEMSIZE[dtype]
    top = 2 if dtype == "bool" else 256
    octets = torch.randint(
        0,
        top,
        (size,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    return octets.view(getattr(torch, dtype)).reshape(shape)


def nested(seed: int = 0) -> dict[str, Any]:
    """A state dict as people have them."""
    tensors = {
        name: bits((4, 6), name, seed + i)
        for i, name in enumerate(ITEMSIZE)
        if name != OBJECT
    }
    wide = torch.randn(40, 60, generator=torch.Generator().manual_seed(seed))
    odd = {
        "transposed": wide.t(),
        "view": wide[3:9, 5:50:3],
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(seed),
    }
    layers = [
        {"w": torch.full((3,), float(seed + i)), "name": f"layer {i}"} for i in range(2)
    ]
    parameter = torch.nn.Parameter(torch.full((2, 2), seed + 0.5))
    model = {
        "dtypes": tensors,
        **odd,
        "layers": layers,
        "conj": torch.randn(5, dtype=torch.complex64).conj(),
    }
    model["conj"] = torch.view_as_complex(wide[:5, :2].contiguous()).conj()
    return {
        "model": {**model, "parameter": parameter},
        "step": seed,
        "big": wide.repeat(20, 40),
        "told": {"lr": 0.1},
    }


def emptied(value: Any) -> Any:
    """The same structure with nothing in it."""
    if isinstance(value, dict):
        return {key: emptied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [emptied(inner) for inner in value]
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value.detach().resolve_conj())
    return None


def octets(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""


def assert_same(found: Any, expected: Any, at: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), at
        for key in expected:
            assert_same(found[key], expected[key], f"{at}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), at
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{at}.{number}")
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), at
        assert octets(found) == octets(expected), at
    else:
        assert found == expected, at


@contextmanager
def refused(caplog: pytest.LogCaptureFixture, reason: str) -> Iterator[None]:
    """A load that cannot open the checkpoint says why, in our log where torch drops it."""
    caplog.clear()
    with pytest.raises(CheckpointException) as caught:
        yield
    assert re.search(
        reason, caplog.text if DROPS_ERRORS_OF_READERS else str(caught.value), re.DOTALL
    )


def loaded(reader: Any, like: dict[str, Any], **more: Any) -> dict[str, Any]:
    state: dict[str, Any] = emptied(like)
    dcp.load(state, storage_reader=reader, **more)
    return state


class Failing(DefaultSavePlanner):
    """Cannot give the object that is called ``bad``."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == "bad":
            raise ValueError("no such thing")
        return super().resolve_data(write_item)


def sharded(seed: int, rows: int = 10) -> dict[str, Any]:
    """Two ranks: a sharded DTensor (of rows that two do not divide), a replicated one, plain things."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(rows * 4.0).reshape(rows, 4) + seed
    return {
        "model": {
            "rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "columns": distribute_tensor(whole.clone(), mesh, [Shard(1)]),
            "replicated": distribute_tensor(whole.clone(), mesh, [Replicate()]),
        },
        "plain": torch.full((70_000,), float(seed)),
        "step": seed,
    }


def local(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    return state.to_local() if hasattr(state, "to_local") else state


def check(folder: str, seed: int, rows: int = 10) -> None:
    """On all ranks: a checkpoint of ``sharded`` is read by stock and by us, also at another sharding."""
    for reader in READERS:
        state = sharded(0, rows)
        dcp.load(state, storage_reader=reader(folder))
        assert_same(local(state), local(sharded(seed, rows)))
        like = sharded(0, rows)
        like["model"]["rows"], like["model"]["columns"] = (
            like["model"]["columns"],
            like["model"]["rows"],
        )
        asked = {
            "model": {
                "rows": like["model"]["rows"],
                "columns": like["model"]["columns"],
            }
        }
        dcp.load(asked, storage_reader=reader(folder))
        model = sharded(seed, rows)["model"]
        assert_same(
            local(asked),
            {
                "model": {
                    "rows": local(model["columns"]),
                    "columns": local(model["rows"]),
                }
            },
        )
    assert megackpt.verify(folder).ok


def gathered(value: Any) -> list[Any]:
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    return everybody
