"""A load names what is stored and was not asked for, and only that; how this is silenced."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import megackpt
from megackpt import ShardedObject, ShardedTensor
from megackpt.testing import ThreadedGroup


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [text for text in found if "asked for by no rank" in text]


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(12)))
    return model, torch.optim.AdamW(model.parameters())


def declared(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[Any, Any]:
    return megackpt.sharded(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    )


def tensors(*keys: str) -> dict[str, Any]:
    return {key: ShardedTensor.from_rank_offsets(key, torch.ones(4)) for key in keys}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A checkpoint of a model and an optimizer that has made a step."""
    model, optimizer = training()
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    with megackpt.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, declared(model, optimizer))
    return tmp_path


def test_a_load_into_an_optimizer_without_steps_names_the_unasked_keys(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    megackpt.load(declared(*training()), run / "iter_0000001")
    [text] = warnings(caplog)
    assert "iter_0000001" in text
    for name in ("exp_avg", "exp_avg_sq"):
        assert f"'optimizer.state.*.{name}' (24 keys, 12.8 KiB)" in text
    assert "'optimizer.state.*.step' (24 keys, 96 B)" in text
    assert "model" not in text
    assert "strict='raise_unexpected'" in text


def test_a_manager_restores_with_the_same_warning(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with megackpt.CheckpointManager(run) as checkpoints:
        checkpoints.restore(declared(*training()))
        assert len(warnings(caplog)) == 1
        caplog.clear()
        checkpoints.restore(declared(*training()), strict="raise_unexpected")
    assert not warnings(caplog)


def test_also_of_the_step_before_a_damaged_one(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = training()
    with megackpt.CheckpointManager(run) as checkpoints:
        checkpoints.save(2, declared(model, optimizer))
        for file in (run / "iter_0000002").glob("*.distcp"):
            file.write_bytes(bytes(file.stat().st_size))
        restored = checkpoints.restore(declared(model, optimizer))
    assert restored is not None
    assert restored.step == 1
    assert "optimizer.state.*.exp_avg" in "".join(warnings(caplog))


def test_who_asks_for_everything_hears_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {**tensors("a", "b"), "o": ShardedObject("o", [1], (1,), (0,)), "step": 5}
    megackpt.save(state, tmp_path / "c")
    megackpt.load(
        {**tensors("a", "b"), "o": ShardedObject("o", None, (1,), (0,))}, tmp_path / "c"
    )
    megackpt.load(
        {"x": tensors("b")["b"], "y": state["a"], "o": state["o"]}, tmp_path / "c"
    )
    megackpt.load(
        {**tensors("m.a", "m.b"), "o": state["o"]},
        tmp_path / "c",
        key_map=lambda key: key.removeprefix("m."),
    )
    megackpt.load_plain_tensors(tmp_path / "c")
    megackpt.load_common_state_dict(tmp_path / "c")
    megackpt.convert(tmp_path / "c", tmp_path / "d", "zarr")
    assert not warnings(caplog)


def test_a_key_counts_as_asked_for_when_any_rank_asks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pipeline stages ask for different keys; a half of a tensor, and a cell of objects, are enough."""
    megackpt.save({**tensors("first", "second", "left")}, tmp_path / "c")

    def load(group: ThreadedGroup, *keys: str) -> None:
        own = keys[group.rank :: group.size]
        megackpt.load(tensors(*own), tmp_path / "c", process_group=group)

    ThreadedGroup.run(2, lambda group: load(group, "first", "second", "left"))
    assert not warnings(caplog)
    ThreadedGroup.run(2, lambda group: load(group, "first", "second"))
    [text] = warnings(caplog)  # of rank 0 alone
    assert "'left' (1 key, 16 B)" in text
    assert "first" not in text


def test_objects_count_with_their_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {
        str(i): ShardedObject(f"rng.{i}", b"x" * 2000, (1,), (0,)) for i in range(3)
    }
    megackpt.save({**tensors("a", "rng.t"), **state}, tmp_path / "c")
    megackpt.load(tensors("a"), tmp_path / "c")
    [text] = warnings(caplog)
    assert "'rng.*' (3 keys, " in text
    assert "'rng.t' (1 key, 16 B)" in text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"strict": "raise_unexpected"}, 0),
        ({"strict": "ignore_all"}, 0),
        ({"strict": "return_all"}, 0),
        ({"strict": "log_unexpected"}, 0),
        ({"validate_access_integrity": False}, 0),
        ({"strict": "assume_ok_unexpected"}, 1),
        ({}, 1),
    ],
    ids=str,
)
def test_what_silences_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], told: int
) -> None:
    megackpt.save(tensors("a", "b"), tmp_path / "c")
    megackpt.load(tensors("a"), tmp_path / "c", **options)
    assert len(warnings(caplog)) == told


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stored=st.lists(
        st.lists(
            st.sampled_from(["a", "bias", "7", "0", "layers", ""]),
            min_size=1,
            max_size=5,
        )
        .map(".".join)
        .filter(bool),
        min_size=1,
        max_size=40,
        unique=True,
    ),
    data=st.data(),
)
def test_the_groups_hold_every_key_once(
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
    stored: list[str],
    data: st.DataObject,
) -> None:
    asked = data.draw(st.sets(st.sampled_from(stored)))
    directory = tmp_path_factory.mktemp("c") / "c"
    megackpt.save(tensors(*stored), directory)
    caplog.clear()
    megackpt.load(tensors(*asked), directory)
    found = warnings(caplog)
    left = set(stored) - asked
    assert len(found) == bool(left)
    if left:
        listed, _, _ = found[0].partition(". (To load")
        counts = [int(part.split(" key")[0]) for part in listed.split(" (")[1:]]
        assert sum(counts) == len(left) or "more" in listed
        assert len(counts) <= 6


def test_optimizers_are_named_only_where_their_keys_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    megackpt.save(tensors("a", "b", "optimizer.state.exp_avg.a"), tmp_path / "c")
    megackpt.load(tensors("a"), tmp_path / "c")
    megackpt.load(tensors("a", "optimizer.state.exp_avg.a"), tmp_path / "c")
    both, without = warnings(caplog)
    assert "of an optimizer without state asks for none" in both
    assert "'b'" in without
    assert "ptimizer" not in without.replace(str(tmp_path), "")
