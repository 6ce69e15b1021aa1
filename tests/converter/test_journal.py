"""The journal of a conversion checks its lines, and the bytes that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.converter.journal import JOURNAL, Journal
from megackpt.converter.workers import WorkerContext
from megackpt.storage import LocalStorage, digest

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
    real = WorkerContext.perform

    def perform(self: WorkerContext, *task: Any) -> Any:
        if next(parts, None) is None:
            raise Stop
        return real(self, *task)

    with monkeypatch.context() as patch:
        patch.setattr(WorkerContext, "perform", perform)
        with pytest.raises(Stop):
            megackpt.convert(folder / "source", folder / "target", to, workers=1)
    (line,) = (staging(folder / "target") / JOURNAL).read_bytes().splitlines()
    record: dict[str, Any] = json.loads(line.partition(b" ")[2])
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
        whole[record["columns"][2][0] + 5] ^= 1
        path.write_bytes(whole)
    done = megackpt.convert(
        tmp_path / "source", tmp_path / "target", "safetensors", workers=1
    )
    assert bool(done.resumed) is not damaged
    assert torch.equal(megackpt.load_plain_tensors(tmp_path / "target")["w"], weight)


@pytest.mark.parametrize(
    "forged",
    [
        {"task": "x"}, {"task": [1]}, {"files": 5}, {"files": {"a": "b"}}, {"files": {}}, {"files": None},
        {"columns": [[0], [99], [0], [8]]}, {"columns": [[0], [0], [2**70], [8]]}, {"columns": [[-1], [0], [0], [8]]},
        {"columns": 7}, {"digests": ""}, {"overflows": 3}, {"width": 7}, {"boxes": [1]},
    ],
    ids=str,
)  # fmt: skip
def test_an_invalid_line_ends_the_journal(
    tmp_path: Path,
    weight: torch.Tensor,
    forged: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = interrupted(tmp_path, "safetensors", monkeypatch)
    for changes, kept in (({}, 1), (forged, 0)):
        text = json.dumps(record | changes).encode()
        written = staging(tmp_path / "target")
        (written / JOURNAL).write_bytes(
            digest(text).hex().encode() + b" " + text + b"\n"
        )
        assert len(Journal(LocalStorage(written)).done) == kept
