"""What the killed jobs save: every bit follows from one number, so that two states cannot mix unnoticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.errors import NotACheckpoint

SHAPES = {"up": (128, 24), "down": (16, 6), "ragged": (7, 5), "steps": (9,)}
DTYPES = {
    "up": torch.float32,
    "down": torch.bfloat16,
    "ragged": torch.float64,
    "steps": torch.int64,
}


def _whole(key: str, value: int) -> torch.Tensor:
    """Random bytes as a tensor; any bits, also those of NaNs."""
    dice = torch.Generator().manual_seed(1000 * value + len(key))
    count = torch.Size(SHAPES[key]).numel() * DTYPES[key].itemsize
    octets = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=dice)
    return octets.view(DTYPES[key]).reshape(SHAPES[key])


def _common(value: int) -> dict[str, Any]:
    return {"value": value, "arguments": {"lr": value / 7, "names": ["a", "b"] * value}}


def _object(value: int, part: int) -> dict[str, Any]:
    return {"of": part, "seed": [value * 17] * (10 + part)}


def declared(
    value: int, rank: int = 0, size: int = 1, *, empty: bool = False
) -> dict[str, Any]:
    """What one rank of ``size`` (1, 2 or 4) declares; ``empty``: to be filled by a load.

    "ragged" is cut unevenly, so that zarr leaves fragments to the coordinator; "only <value>" has a name
    that no other value has, so that what is left of an older checkpoint would be seen.
    """
    parts, copy = (range(2), 0) if size == 1 else ([rank % 2], rank // 2)
    state: dict[str, Any] = _common(value) if not empty else {}
    for key, dtype in DTYPES.items():
        whole = torch.zeros(SHAPES[key], dtype=dtype) if empty else _whole(key, value)
        name = f"only {value}" if key == "steps" else key
        if key == "steps":
            state[name] = ShardedTensor.from_rank_offsets(name, whole, replica_id=rank)
            continue
        half = 3 if key == "ragged" else whole.shape[0] // 2
        for part in parts:
            rows = whole[half:] if part else whole[:half]
            offset, grid = (half * part, 0), (2, 1) if key != "ragged" else None
            state[f"{key}.{part}"] = ShardedTensor(
                key,
                rows.contiguous(),
                dtype,
                tuple(rows.shape),
                SHAPES[key],
                offset,
                grid,
                copy,
            )
    for part in parts:
        state[f"rng.{part}"] = ShardedObject(
            "rng", None if empty else _object(value, part), (2,), (part,), copy
        )
    return state


def seen(path: Path) -> int | None:
    """The value of the checkpoint there, None where a reader is told that there is none.

    Everything in it is compared bit for bit, and ``verify`` must agree; other errors are the test's failure.
    """
    try:
        value = int(megackpt.load_common_state_dict(path)["value"])
    except NotACheckpoint:
        return None
    found = megackpt.load(declared(value, empty=True), path)
    compare(found, value)
    assert set(megackpt.load_sharded_metadata(path)) == {
        *(f"only {value}" if key == "steps" else key for key in SHAPES),
        "rng/shard_0_2", "rng/shard_1_2",
    }  # fmt: skip
    report = megackpt.verify(path)
    assert report.ok, report
    return value


def compare(found: dict[str, Any], value: int) -> None:
    """AssertionError unless this is, bit for bit, what was saved of the value."""
    expected = declared(value)
    assert set(found) == set(expected)
    for name, wanted in expected.items():
        if isinstance(wanted, ShardedTensor):
            assert found[name].dtype == wanted.dtype
            assert torch.equal(bits(found[name]), bits(wanted.data)), (
                f"{name!r} is not that of {value}"
            )
        else:
            held = wanted.data if isinstance(wanted, ShardedObject) else wanted
            assert found[name] == held, f"{name!r} is not that of {value}"


def bits(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.contiguous().view(torch.uint8)
