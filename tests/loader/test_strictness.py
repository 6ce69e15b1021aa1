"""Keys, shapes and dtypes that differ from the stored ones: refused, reported or converted."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import (
    ShardedObject,
    ShardedTensor,
    StrictHandling,
)
from megackpt.errors import (
    MismatchError,
)


@pytest.fixture
def simple(tmp_path: Path) -> Path:
    state = {
        "a": ShardedTensor.from_rank_offsets("a", torch.ones(4)),
        "b": ShardedTensor.from_rank_offsets("b", torch.ones(4)),
        "o": ShardedObject("o", 1, (1,), (0,)),
    }
    megackpt.save(state, tmp_path / "simple")
    return tmp_path / "simple"


def asking(*keys: str) -> dict[str, Any]:
    return {k: ShardedTensor.from_rank_offsets(k, torch.zeros(4)) for k in keys}


@pytest.mark.parametrize(
    "strict", ["raise_unexpected", "raise_all", True, "assume_ok_unexpected"]
)
def test_unexpected_keys_raise(simple: Path, strict: Any) -> None:
    with pytest.raises(
        megackpt.CheckpointingException, match="Unexpected keys"
    ) as caught:
        megackpt.load(
            {**asking("a", "b", "c"), "o": ShardedObject("o", 1, (1,), (0,))},
            simple,
            strict=strict,
        )
    assert "'c'" in str(caught.value)
    assert "Missing keys" not in str(caught.value)


@pytest.mark.parametrize("strict", ["log_unexpected", "log_all", False])
def test_unexpected_keys_are_logged(
    simple: Path, strict: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        state = megackpt.load(asking("a", "b", "c"), simple, strict=strict)
    assert "c" not in state
    assert torch.equal(state["a"], torch.ones(4))
    assert "Unexpected keys" in caplog.text
    assert ("Missing keys" in caplog.text) is (strict != "log_unexpected")


def test_unexpected_and_missing_keys_are_returned(simple: Path) -> None:
    state, missing, unexpected = megackpt.load(
        asking("a", "c"), simple, strict=StrictHandling.RETURN_ALL
    )
    assert (set(state), missing, unexpected) == ({"a"}, {"b", "o"}, {"c"})
    state, missing, unexpected = megackpt.load(
        asking("a", "c"), simple, strict="return_unexpected"
    )
    assert (set(state), missing, unexpected) == ({"a"}, set(), {"c"})


def test_missing_keys_raise_only_where_asked(simple: Path) -> None:
    assert set(megackpt.load(asking("a"), simple)) == {"a"}
    assert set(megackpt.load(asking("a", "z"), simple, strict="ignore_all")) == {"a"}
    with pytest.raises(MismatchError, match="Missing keys"):
        megackpt.load(asking("a"), simple, strict="raise_all")
    with pytest.raises(ValueError, match="Invalid strict flag"):
        megackpt.load(asking("a"), simple, strict="perhaps")


def test_a_key_map_without_a_key_raises(simple: Path) -> None:
    asked = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(8))}
    with pytest.raises(MismatchError, match="key_map gives None for 'w'"):
        megackpt.load(asked, simple, key_map={"w": None})  # type: ignore[dict-item]


def test_an_object_whose_grid_changed_is_unexpected(simple: Path) -> None:
    with pytest.raises(MismatchError, match=re.escape("o/shard_0_2")):
        megackpt.load(
            {"o": ShardedObject("o", None, (2,), (0,))},
            simple,
            validate_access_integrity=False,
        )


# ---- what may differ


def test_shapes_must_agree_unless_a_mismatch_is_allowed(simple: Path) -> None:
    with pytest.raises(MismatchError, match=r"Global shape mismatch.*for key a"):
        megackpt.load(
            {"a": ShardedTensor.from_rank_offsets("a", torch.zeros(6))}, simple
        )
    longer = ShardedTensor.from_rank_offsets(
        "a", torch.full((6,), 9.0), allow_shape_mismatch=True
    )
    shorter = ShardedTensor.from_rank_offsets(
        "b", torch.full((2,), 9.0), allow_shape_mismatch=True
    )
    state = megackpt.load({"a": longer, "b": shorter}, simple)
    assert state["a"].tolist() == [1, 1, 1, 1, 0, 0]
    assert state["b"].tolist() == [1, 1]


def test_dtypes_are_converted_or_refused(simple: Path) -> None:
    def asked() -> dict[str, Any]:
        return {
            "a": ShardedTensor.from_rank_offsets(
                "a", torch.zeros(4, dtype=torch.float64)
            )
        }

    assert megackpt.load(asked(), simple)["a"].dtype == torch.float64
    assert torch.equal(
        megackpt.load(asked(), simple)["a"], torch.ones(4, dtype=torch.float64)
    )
    with pytest.raises(MismatchError, match=r"dtype mismatch.*key a"):
        megackpt.load(asked(), simple, dtype_policy="error")


def test_keys_can_be_mapped(simple: Path) -> None:
    asked = {"x": ShardedTensor.from_rank_offsets("model.a", torch.zeros(4))}
    assert torch.equal(
        megackpt.load(asked, simple, key_map={"model.a": "a"})["x"], torch.ones(4)
    )
    assert torch.equal(
        megackpt.load(asked, simple, key_map=lambda key: key.removeprefix("model."))[
            "x"
        ],
        torch.ones(4),
    )
