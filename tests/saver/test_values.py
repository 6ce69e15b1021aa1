"""What a save notes about values: NaN and infinities are counted, named, refused; steps with them are skipped."""

from __future__ import annotations

import json
import logging
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import CheckpointManager, NonfiniteValues, ShardedTensor, Strategy
from megackpt.__main__ import main
from megackpt.checkpoint import INDEX, open_checkpoint
from megackpt.errors import CheckpointingException, NotACheckpoint, ReplicaMismatch
from megackpt.saver import nonfinite
from megackpt.testing import ThreadedGroup

NOTE = Strategy(check_values="note")


def whole(key: str, tensor: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, tensor)


def noted(path: Path) -> dict[str, tuple[int, float]]:
    manifest = open_checkpoint(path).manifest
    found = manifest.values
    assert found is not None
    return {
        entry.key: (int(found.nonfinite[i]), float(found.largest[i]))
        for i, entry in enumerate(manifest.tensors)
    }


@pytest.mark.parametrize("backend", ["torch_dist", "zarr", "safetensors"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_dtypes(
    tmp_path: Path,
    backend: str,
    asynchronous: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spoiled = torch.tensor([[1.0, math.nan, -5.0], [math.inf, 2.0, -math.inf]])
    tensors = {
        "float": spoiled,
        "strided": spoiled.double().T,
        "half": torch.tensor([-3.0, 2.0]).half(),
        "bfloat16": torch.tensor([math.nan, 1.0]).bfloat16(),
        "float8": torch.tensor([-448.0, math.nan]).to(torch.float8_e4m3fn),
        "complex": torch.tensor(
            [complex(9, math.inf), -7, complex(math.nan, math.nan)]
        ),
        "large": torch.tensor([1e300], dtype=torch.float64),
        "integers": torch.arange(3),
        "empty": torch.zeros(0, 4),
        "all": torch.full((2,), math.nan),
        "scalar": torch.tensor(-0.5),
    }
    if backend == "zarr":
        del tensors["float8"]
    state: dict[str, Any] = {key: whole(key, tensor) for key, tensor in tensors.items()}
    state["step"] = 3
    strategy = Strategy(backend, check_values="note")
    with caplog.at_level(logging.WARNING):
        request = megackpt.save(
            state, tmp_path / "a", strategy, async_sharded_save=asynchronous
        )
        spoiled.zero_()  # what was found is of the values that are saved
        if request is not None:
            queue = megackpt.AsyncCallsQueue()
            queue.schedule_async_request(request)
            queue.close()
    expected = {
        "float": (3, 5.0),
        "strided": (3, 5.0),
        "half": (0, 3.0),
        "bfloat16": (1, 1.0),
        "float8": (1, 448.0),
        "complex": (2, 7.0),
        "large": (0, math.inf),
        "integers": (-1, -1.0),
        "empty": (0, 0.0),
        "all": (2, 0.0),
        "scalar": (0, 0.5),
    }
    found = noted(tmp_path / "a")
    assert {key: found[key] for key in tensors} == {
        key: expected[key] for key in tensors
    }
    warnings = [r.getMessage() for r in caplog.records if "NaN" in r.getMessage()]
    assert len(warnings) == 1
    assert "'float' (3)" in warnings[0]
    assert "'half'" not in warnings[0]
    assert megackpt.verify(tmp_path / "a").ok


def test_blocks_of_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "_BLOCK", 10)
    tensor = torch.arange(70.0).view(7, 10)
    tensor[3, 4] = tensor[6, 9] = math.nan
    assert nonfinite._examine(tensor) == (2, 68.0)
    assert nonfinite._examine(tensor.T) == (2, 68.0)
    assert nonfinite._examine(tensor.view(-1)) == (2, 68.0)
    for shape in ((1, 70), (2, 1, 35), (70,), (1, 1, 7, 10)):
        blocks = list(nonfinite._blocks(tensor.view(shape)))
        assert max(block.numel() for block in blocks) <= 10
        assert sum(block.numel() for block in blocks) == 70
        assert nonfinite._examine(tensor.view(shape)) == (2, 68.0)


def run(path: Path, strategies: list[Strategy]) -> list[BaseException | None]:
    """A row for each rank, and one that all have; rank 2's row has a NaN. The error of each."""

    def save(group: ThreadedGroup) -> BaseException | None:
        row = torch.full((1, 8), float(group.rank))
        if group.rank == 2:
            row[0, 5] = math.nan
        ranks = (0, group.rank, group.size)
        state = {
            "rows": ShardedTensor.from_rank_offsets("rows", row, ranks),
            "same": ShardedTensor.from_rank_offsets(
                "same", torch.ones(100), replica_id=group.rank
            ),
        }
        try:
            strategy = strategies[group.rank]
            megackpt.save(state, path, strategy, process_group=group)
        except CheckpointingException as error:
            return error
        return None

    return ThreadedGroup.run(4, save)


def test_ranks_together(tmp_path: Path) -> None:
    for _ in range(2):  # the second save uses the plan again
        assert run(tmp_path / "a", [NOTE] * 4) == [None] * 4
        found = noted(tmp_path / "a")
        assert (found["rows"], found["same"]) == ((1, 3.0), (0, 1.0))


def test_nothing_is_committed_where_it_is_refused(tmp_path: Path) -> None:
    errors = run(tmp_path / "a", [Strategy(check_values="raise")] * 4)
    assert {type(error) for error in errors} == {NonfiniteValues}
    assert str(errors[0]) == (
        f"{tmp_path}/a is not saved, it has values that are NaN or infinite: 'rows' (1). Go back "
        "to an earlier checkpoint, or save with check_values='note'"
    )
    with pytest.raises(NotACheckpoint):
        megackpt.verify(tmp_path / "a")


def test_ranks_must_agree(tmp_path: Path) -> None:
    errors = run(tmp_path / "a", [NOTE, NOTE, Strategy(), NOTE])
    assert all("different check_values" in str(error) for error in errors)
    assert "only ranks 0, 1, 3 examined the values" in str(errors[0])


def test_without_it_nothing_is_noted(tmp_path: Path) -> None:
    megackpt.save({"a": whole("a", torch.ones(2))}, tmp_path / "a")
    assert open_checkpoint(tmp_path / "a").manifest.values is None


def test_earlier_releases_may_ignore_the_columns(tmp_path: Path) -> None:
    megackpt.save({"a": whole("a", torch.ones(2))}, tmp_path / "a", NOTE)
    data = (tmp_path / "a" / INDEX).read_bytes()
    (length,) = struct.unpack_from("<I", data, 12)
    head = json.loads(data[16 : 16 + length])
    assert set(head["optional"]) == {"nonfinite", "largest"} <= set(head["columns"])


def test_a_manager_skips_steps_that_are_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = torch.ones(4)
    state = {"weight": whole("weight", weight)}
    with CheckpointManager(tmp_path, NOTE) as manager:
        manager.save(1, state)
        weight[2] = math.nan
        manager.save(2, state)
        newest, good = manager.latest(), manager.latest(finite=True)
        assert newest is not None
        assert good is not None
        assert (newest.step, good.step) == (2, 1)
        weight.zero_()
        restored = manager.restore(state, finite=True)
        assert restored is not None
        assert restored.step == 1
        assert weight.tolist() == [1.0] * 4
        again = manager.restore(state)
        assert again is not None
        assert again.step == 2
        second = manager.path(2)
    assert main(["show", "--stats", "--json", second]) == 0
    shown = json.loads(capsys.readouterr().out)
    (entry,) = [each for each in shown["entries"] if each["key"] == "weight"]
    assert (shown["nonfinite"], entry["nonfinite"], entry["largest"]) == (1, 1, 1.0)


def test_the_newest_finite_step_is_kept(tmp_path: Path) -> None:
    weight = torch.ones(4)
    state = {"weight": whole("weight", weight)}
    with CheckpointManager(tmp_path, NOTE, keep_last=2) as manager:
        for step in range(1, 7):
            weight.fill_(math.inf if step > 2 else step)
            manager.save(step, state)
        assert [step.step for step in manager.steps()] == [2, 5, 6]
        restored = manager.restore(state, finite=True)
        assert restored is not None
        assert (restored.step, weight[0]) == (2, 2.0)
        for step in (7, 8):
            weight.fill_(step)
            manager.save(step, state)
        assert [step.step for step in manager.steps()] == [7, 8]


def test_replicas_that_differed_are_noted(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    audited = Strategy(audit="full", on_mismatch="warn")

    def save(group: ThreadedGroup) -> None:
        value = torch.full((3,), float(group.rank))
        shard = ShardedTensor.from_rank_offsets("b", value, replica_id=group.rank)
        megackpt.save({"b": shard}, tmp_path / "a", audited, process_group=group)

    ThreadedGroup.run(2, save)
    assert open_checkpoint(tmp_path / "a").manifest.differing == ("b",)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        megackpt.load({"b": whole("b", torch.zeros(3))}, tmp_path / "a")
    assert "ranks held different values of 'b'" in caplog.text
    assert main(["show", str(tmp_path / "a")]) == 0
    assert "differing: b" in capsys.readouterr().out
    assert issubclass(ReplicaMismatch, CheckpointingException)
