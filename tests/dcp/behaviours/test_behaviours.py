"""What torch's own checkpoint tests check, with stock and with ours in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from megackpt.errors import CheckpointingException
from megackpt.torch_versions import RELEASE
from tests.dcp.behaviours.catalogue import DIFFERENT, Behaviour, collect

pytestmark = pytest.mark.filterwarnings("ignore")

BEHAVIOURS = collect()


def cases() -> list[Any]:
    found = []
    for name, behaviour in BEHAVIOURS.items():
        marks = [pytest.mark.slow]
        if behaviour.quick:
            marks = []
        found.append(pytest.param(name, behaviour, id=name, marks=marks))
    return found


def run_both(name: str, folder: str) -> None:
    """In each of several ranks, with a folder for each library."""
    for library in ("stock", "ours"):
        BEHAVIOURS[name].run(Path(folder) / library, library)


@pytest.mark.parametrize(("name", "behaviour"), cases())
def test_ours_behaves_as_stock(
    ranks: Any, tmp_path: Path, name: str, behaviour: Behaviour
) -> None:
    if behaviour.since > RELEASE:
        pytest.skip(f"stock of this torch, {RELEASE}, does not behave so")
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    stock.mkdir()
    ours.mkdir()
    if behaviour.ranks > 1:
        ranks(run_both, behaviour.ranks, name, tmp_path)
    elif name in DIFFERENT:
        behaviour.run(stock, "stock")
        with pytest.raises((CheckpointException, CheckpointingException)):
            behaviour.run(ours, "ours")
        return
    else:
        run_both(name, str(tmp_path))
    assert not list(stock.rglob("megackpt.index"))
    assert bool(list(ours.rglob("megackpt.index"))) == behaviour.commits


def test_differences_are_few() -> None:
    assert len(BEHAVIOURS) >= 120
    assert DIFFERENT.keys() <= BEHAVIOURS.keys()
    assert len(DIFFERENT) <= 0.02 * len(BEHAVIOURS)
