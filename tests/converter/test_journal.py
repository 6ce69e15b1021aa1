"""The journal of a conversion checks its files, and the bytes that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.converter.conversion_workers import JOURNAL, Journal, TaskRunner
from megackpt.storage import LocalStorage

pytestmark = pytest.mark.usefixtures("small_tasks")


class Stop(BaseException):
    """As an interruption."""


@pytest.fixture
def weight(tmp_path: Path) -> torch.Tensor:
    weight = torch.randn(1 << 18)
    megackpt.save(
        {"w": ShardedTensor.from_rank_offsets("w", weight)}, tmp_path / "source"
    )
    return weight


def staging(target: Path) -> Path:
    """The directory in which a conversion that was cut off has written."""
    (found,) = target.parent.glob(f".{target.name}.megackpt-*")
    return found


def interrupted(
    folder: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """A conversion that ends after its first part; what the journal says of that part."""
    parts = iter(range(1))
    real = TaskRunner.perform

    def perform(self: TaskRunner, *task: Any) -> Any:
        if next(parts, None) is None:
            raise Stop
        return real(self, *task)

    with monkeypatch.context() as patch:
        patch.setattr(TaskRunner, "perform", perform)
        with pytest.raises(Stop):
            megackpt.convert(folder / "source", folder / "target", to, workers=1)
    (entry,) = (staging(folder / "target") / JOURNAL).iterdir()
    record: dict[str, Any] = json.loads(entry.read_bytes()[16:])
    return record


@pytest.mark.parametrize("damaged", [False, True])
def test_data_that_changed_since_is_written_again(
    tmp_path: Path, weight: torch.Tensor, damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This format takes its digests at the end, from what is there."""
    record = interrupted(tmp_path, "safetensors", monkeypatch)
    path = staging(tmp_path / "target") / next(iter(record["files"]))
    if damaged:
        whole = bytearray(path.read_bytes())
        whole[record["numbers"][2][0] + 5] ^= 1
        path.write_bytes(whole)
    done = megackpt.convert(
        tmp_path / "source", tmp_path / "target", "safetensors", workers=1
    )
    assert bool(done.resumed) is not damaged
    assert torch.equal(megackpt.load_plain_tensors(tmp_path / "target")["w"], weight)


@pytest.mark.parametrize("kind", ["intact", "changed", "torn"])
def test_a_damaged_file_of_the_journal_is_removed(
    tmp_path: Path,
    weight: torch.Tensor,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted(tmp_path, "safetensors", monkeypatch)
    written = staging(tmp_path / "target")
    (entry,) = (written / JOURNAL).iterdir()
    data = entry.read_bytes()
    if kind == "changed":
        data = data.replace(b'"task": 0', b'"task": 1')
    if kind == "torn":
        data = data[:-1]
    entry.write_bytes(data)
    finished = Journal(LocalStorage(written)).done
    assert list(finished) == ([0] if kind == "intact" else [])
    assert entry.exists() is (kind == "intact")
