"""State dicts as PyTorch gives them: what a save says of tensors in the common state, and what declares them."""

from __future__ import annotations

import logging
from inspect import isfunction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megackpt
from megackpt.testing import ThreadedGroup

MIB = 1 << 20


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [text for text in found if "the common state holds" in text]


def training(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))


def stepped(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = training(seed)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
    }


def test_one_warning_tells_number_size_cost_and_cure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.zeros(3 * MIB // 4 // 4)
    state = {
        "model": {"a": weight, "b": [weight + 1]},
        "curve": np.zeros(MIB // 2, np.uint8),
    }
    megackpt.save(state, tmp_path / "c")
    [text] = warnings(caplog)
    assert "leaves 512.0 KiB as they are, numpy arrays" in text
    for word in (
        "3 tensors and arrays",
        "2.0 MiB",
        "['model']",
        "rank 0 alone writes",
        "not resharded",
    ):
        assert word in text
    assert "megackpt.save(megackpt.sharded(state), directory)" in text
    caplog.clear()
    megackpt.save(state, tmp_path / "d", allow_large_common_state=True)
    assert not warnings(caplog)
    assert megackpt.load({}, tmp_path / "d")["model"]["b"][0].sum() == weight.numel()


def test_a_run_is_warned_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"weight": torch.zeros(MIB)}
    for step in range(3):
        megackpt.save(state, tmp_path / "run" / f"iter_{step:07}")
        megackpt.save(state, tmp_path / "run" / "latest")
    assert len(warnings(caplog)) == 1
    megackpt.save(
        {"weight": torch.zeros(MIB), "more": torch.zeros(9)},
        tmp_path / "run" / "latest",
    )
    megackpt.save(state, tmp_path / "another" / "latest")
    assert len(warnings(caplog)) == 3


@pytest.mark.parametrize(
    ("nbytes", "warned"),
    [(MIB - 1, False), (MIB, True)],
    ids=["below the limit", "at the limit"],
)
def test_the_limit_is_of_all_tensors_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, nbytes: int, warned: bool
) -> None:
    half = torch.zeros(nbytes // 2, dtype=torch.uint8)
    rest = torch.zeros(nbytes - nbytes // 2, dtype=torch.uint8)
    megackpt.save({"half": half, "beside": ({"rest": rest},)}, tmp_path / "c")
    assert bool(warnings(caplog)) is warned


def test_memory_that_is_stored_once_counts_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.zeros(3 * MIB // 4, dtype=torch.uint8)
    tied = {"embedding": weight, "head": weight.view(-1), "again": [weight]}
    megackpt.save(tied, tmp_path / "tied")
    megackpt.save(
        {"row": torch.zeros(1024, 4096)[3], "expanded": torch.zeros(1).expand(MIB)},
        tmp_path / "r",
    )
    assert not warnings(caplog)
    array = np.zeros(MIB // 2, np.uint8)
    megackpt.save({"a": array, "b": array}, tmp_path / "array")
    assert not warnings(caplog)


def test_declared_tensors_and_local_values_are_no_common_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    large = torch.zeros(2 * MIB, dtype=torch.uint8)
    state = {
        "weight": large,
        "own": megackpt.LocalNonpersistentObject(large),
        "step": 1,
    }
    megackpt.save(megackpt.sharded(state), tmp_path / "c")
    assert not warnings(caplog)


def test_of_two_gib_all_ranks_hear_before_a_byte_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    megackpt.save({"step": 1}, tmp_path / "c")
    kept = sorted(tmp_path.rglob("*"))

    def save(group: ThreadedGroup, **options: Any) -> None:
        rows = torch.empty(
            2 << 30, dtype=torch.uint8
        )  # never touched, so it takes no memory
        common = {"model": {"rows": rows}} if group.rank == 0 else {}
        megackpt.save(
            common,
            tmp_path / "c",
            process_group=group,
            validate_access_integrity=False,
            **options,
        )

    for options in ({}, {"async_sharded_save": True}):
        for error in ThreadedGroup.outcomes(
            2, lambda group, given=options: save(group, **given)
        ):
            assert isinstance(error, megackpt.ShardingError)
            for word in (
                "rank 0",
                "['model']['rows']",
                "2.0 GiB",
                "sharded(",
                "allow_large_common_state=True",
            ):
                assert word in str(error)
    assert sorted(tmp_path.rglob("*")) == kept
    assert megackpt.load({}, tmp_path / "c") == {"step": 1}
    assert not warnings(caplog)


def test_a_manager_passes_the_argument_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"weight": torch.zeros(MIB, dtype=torch.uint8)}
    with megackpt.CheckpointManager(tmp_path, asynchronous=True) as checkpoints:
        checkpoints.save(1, state, allow_large_common_state=True)
        assert not warnings(caplog)
        checkpoints.save(2, state)
    assert len(warnings(caplog)) == 1


def test_the_public_name_is_a_function() -> None:
    from megackpt import sharded
    from megackpt.adapters.dtensor import sharded as same

    assert isfunction(sharded)
    assert sharded is megackpt.sharded is same
    assert "sharded" in megackpt.__all__


@pytest.mark.parametrize("format", ["torch_dist", "zarr", "safetensors"])
def test_a_model_and_its_optimizer_go_and_come_back_in_place(
    tmp_path: Path, format: str
) -> None:
    model, optimizer = stepped()
    megackpt.save(
        megackpt.sharded(state_of(model, optimizer, 7)), tmp_path / "c", format
    )
    stored = megackpt.load_plain_tensors(tmp_path / "c")
    assert {
        "model.1.num_batches_tracked",
        "optimizer.state.3.exp_avg",
        "optimizer.state.0.step",
    } <= set(stored)

    fresh, its = stepped(seed=1)
    loaded = megackpt.load(megackpt.sharded(state_of(fresh, its, 0)), tmp_path / "c")
    its.load_state_dict(loaded["optimizer"])
    assert loaded["step"] == 7
    assert its.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)
    for number, moments in optimizer.state_dict()["state"].items():
        for name, tensor in moments.items():
            assert torch.equal(its.state_dict()["state"][number][name], tensor)


def test_lists_scalars_tied_tensors_and_plain_values(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    state = {
        "embedding": weight,
        "head": weight,
        "parts": [torch.ones(2), {"x": torch.zeros(2, 2)}],
        "scale": torch.tensor(2.5),
        "column": torch.arange(6.0).view(3, 2)[:, 1],
        "names": ["a", "b"],
        "betas": (0.9, 0.95),
        5: torch.full((2,), 5.0),
    }
    before = dict(state)
    megackpt.save(megackpt.sharded(state), tmp_path / "c")
    assert list(state.items()) == list(before.items())
    target = {
        "embedding": (other := torch.zeros(4, 3)),
        "head": other,
        "parts": [torch.zeros(2), {"x": torch.ones(2, 2)}],
        "scale": torch.tensor(0.0),
        "column": torch.zeros(3),
        5: torch.zeros(2),
    }
    loaded = megackpt.load(megackpt.sharded(target), tmp_path / "c")
    assert torch.equal(other, weight)
    assert loaded["embedding"] is not None
    assert target["parts"][0].tolist() == [1.0, 1.0]  # type: ignore[index, union-attr]
    assert target["scale"].item() == 2.5  # type: ignore[union-attr]
    assert target["column"].tolist() == [1.0, 3.0, 5.0]  # type: ignore[union-attr]
    assert target[5].tolist() == [5.0, 5.0]  # type: ignore[union-attr]
    assert loaded["names"] == ["a", "b"]
    assert loaded["betas"] == (0.9, 0.95)


def test_two_tensors_of_one_name_are_refused_by_name(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}
    with pytest.raises(
        megackpt.CoverageError,
        match=r"'a\.b' is not covered.*\n.*\n.*holds? the key twice",
    ):
        megackpt.save(megackpt.sharded(state), tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_checkpoint_of_before_the_function_was_used_says_how_to_load_it(
    tmp_path: Path,
) -> None:
    state = {"model": {"w": torch.arange(3.0)}}
    megackpt.save(state, tmp_path / "c")
    with pytest.raises(
        megackpt.MismatchError,
        match=r"megackpt\.load\(\{\}, directory\) returns it, with tensors",
    ):
        megackpt.load(megackpt.sharded(state), tmp_path / "c")
    assert torch.equal(
        megackpt.load({}, tmp_path / "c")["model"]["w"], torch.arange(3.0)
    )


def test_a_load_into_a_plain_state_dict_advises_sharded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    megackpt.save(megackpt.sharded({"weight": torch.ones(2)}), tmp_path / "c")
    megackpt.load({"weight": torch.zeros(2)}, tmp_path / "c")
    assert "megackpt.load(megackpt.sharded(state), directory)" in caplog.text


@pytest.mark.campaign
def test_two_gib_are_stored_where_it_is_allowed(tmp_path: Path) -> None:
    rows = torch.zeros(2 << 30, dtype=torch.uint8)
    rows[-1] = 7
    megackpt.save(
        {"rows": rows},
        tmp_path / "c",
        validate_access_integrity=False,
        allow_large_common_state=True,
    )
    assert megackpt.load({}, tmp_path / "c")["rows"][-3:].tolist() == [0, 0, 7]
