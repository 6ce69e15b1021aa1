"""That the common state differs between ranks is a warning, whatever it holds: no save fails of the comparison."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.testing import ThreadedGroup

DTYPES = [
    "float32", "bfloat16", "float16", "float64", "uint8", "int8", "bool", "int16", "int32", "int64",
    "uint16", "uint32", "uint64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


class Compares:
    """Compares as people write it: what it is compared with has the same attributes, they think."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return bool(self.value == other.value)  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


class Fails(Compares):
    error: type[Exception] = KeyError

    def __eq__(self, other: object) -> bool:
        raise self.error("compared")

    __hash__ = None  # type: ignore[assignment]


class FailsOddly(Fails):
    class error(Exception):  # noqa: N801 - in the place of the other one
        def __str__(self) -> str:
            raise RuntimeError("no text")


class FailsToShow(Compares):
    @property
    def shape(self) -> Any:
        raise LookupError("shape")


class FailsToOpen(Compares):
    def __setstate__(self, state: Any) -> None:
        raise OSError("opened")


class FailsAsKey:
    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        raise ZeroDivisionError("shown")


def unlike(rank: int) -> dict[str, Any]:
    """Rank 0's and the others' values of these keys."""
    return {
        "compares": Compares(1) if rank == 0 else 5,
        "fails": Fails(1) if rank == 0 else Fails(2),
        "oddly": FailsOddly(1) if rank == 0 else FailsOddly(2),
        "shape": FailsToShow(1) if rank == 0 else FailsToShow(2),
        "nan": float("nan"),
        "tensor": torch.ones(2 + rank),
        "only": {str(rank): rank},
    }


def save(
    state: Callable[[int], dict[Any, Any]], directory: Path, asynchronous: bool = False
) -> None:
    def run(group: ThreadedGroup) -> None:
        shard = ShardedTensor.from_rank_offsets(
            "w", torch.ones(2), (0, group.rank, group.size)
        )
        request = megackpt.save(
            {"w": shard, **state(group.rank)},
            directory,
            async_sharded_save=asynchronous,
            process_group=group,
        )
        if request is not None:
            queue = megackpt.AsyncCallsQueue(process_group=group)
            queue.schedule_async_request(request)
            queue.close()

    ThreadedGroup.run(2, run)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage()
        for r in caplog.records
        if "common state dict differs" in r.getMessage()
    ]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", [n for n in DTYPES if hasattr(torch, n)])
def test_tensors_of_every_dtype_travel(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    dtype = getattr(torch, name)
    same = torch.ones(32, dtype=torch.uint8).view(dtype)

    def state(rank: int) -> dict[str, Any]:
        other = torch.full((32,), rank, dtype=torch.uint8).view(dtype)
        return {"same": same.clone(), "other": other, "rank": rank}

    save(state, tmp_path / "a")
    (text,) = warnings(caplog)
    assert "'other'" in text
    assert "'rank'" in text
    assert "'same'" not in text
    got = megackpt.load({}, tmp_path / "a")
    assert torch.equal(got["same"].view(torch.uint8), same.view(torch.uint8))
    assert got["rank"] == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_comparisons_that_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    save(unlike, tmp_path / "a", asynchronous)
    (text,) = warnings(caplog)
    for key in ("compares", "fails", "oddly", "tensor", "only"):
        assert repr(key) in text
    trusted = (Compares, Fails, FailsOddly, FailsToShow)
    assert megackpt.load({}, tmp_path / "a", trusted=trusted)["compares"].value == 1


@pytest.mark.parametrize("kind", [FailsToOpen, FailsAsKey])
def test_what_cannot_even_be_opened_or_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type
) -> None:
    def state(rank: int) -> dict[Any, Any]:
        return (
            {"o": FailsToOpen(rank)}
            if kind is FailsToOpen
            else {"o": {FailsAsKey(): rank}}
        )

    caplog.set_level(logging.WARNING)
    save(state, tmp_path / "a")
    (text,) = warnings(caplog)
    assert "comparing failed" in text
    assert torch.equal(megackpt.load_plain_tensors(tmp_path / "a")["w"], torch.ones(4))


def test_a_view_that_fails_is_no_reason_either(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def view(common: Any) -> Any:
        raise LookupError("of the view")

    def run(group: ThreadedGroup) -> None:
        megackpt.save(
            {"step": 3},
            tmp_path / "a",
            process_group=group,
            preprocess_common_before_consistancy_check=view,
        )

    ThreadedGroup.run(2, run)
    assert "of the view" in caplog.text
    assert megackpt.load({}, tmp_path / "a") == {"step": 3}
