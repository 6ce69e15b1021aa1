"""Tensors that have not changed are links to files of the step before, and each step stands for itself."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import megackpt
from megackpt import Strategy, events
from megackpt.async_save import AsyncCallsQueue
from megackpt.checkpoint import remove
from megackpt.planning import cache
from megackpt.saver import save_operation
from megackpt.testing import ThreadedGroup

REUSING = Strategy(reuse_unchanged=True)
TOWER = [f"tower.{i}" for i in range(8)]
FIGURES = ("case", "bytes written of a full save")


class Written(events.Observer):
    """The bytes that each save of this process has written."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def stage_ended(self, stage: events.Stage, event: events.Event) -> None:
        if stage.name == "write":
            self.bytes.append(stage.done)


@pytest.fixture
def written() -> Iterator[list[int]]:
    observer = Written()
    events.add_observer(observer)
    yield observer.bytes
    events.remove_observer(observer)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    cache.forget()
    monkeypatch.setattr(save_operation, "_named_refusals", set())


def tensors(step: int, rows: int = 64) -> dict[str, torch.Tensor]:
    """80 % of the bytes do not depend on the step."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    named = {k: torch.randn(rows, 256, generator=generator) for k in TOWER}
    for i in range(2):
        named[f"head.{i}"] = torch.full((rows, 256), float(step + i), device="cpu")
    return named


def saved(
    directory: Path, step: int, strategy: Strategy = REUSING, **options: Any
) -> Any:
    state = {**megackpt.sharded(tensors(step)), "step": step}
    return megackpt.save(state, directory, strategy, **options)


def check(directory: Path, step: int) -> None:
    """By megackpt and by stock torch."""
    assert not megackpt.verify(directory).problems
    expected = tensors(step)
    asked = {k: torch.zeros_like(v) for k, v in expected.items()}
    loaded = megackpt.load(
        {**megackpt.sharded(dict(asked)), "step": None}, directory, verify=True
    )
    assert loaded["step"] == step
    dcp.load(asked, checkpoint_id=directory, no_dist=True)
    for key, value in expected.items():
        assert torch.equal(loaded[key], value), key
        assert torch.equal(asked[key], value), key


def names(directory: Path) -> dict[str, int]:
    """The names that each data file has."""
    return {
        str(path.relative_to(directory)): path.stat().st_nlink
        for path in sorted(directory.rglob("*.distcp"))
    }


def linked(directory: Path) -> list[str]:
    return [name for name, count in names(directory).items() if count > 1]


@pytest.mark.parametrize("way", ["at once", "thread", "process"])
def test_frozen_tensors_are_written_once(
    tmp_path: Path, written: list[int], note: Callable[..., None], way: str
) -> None:
    strategy = Strategy(reuse_unchanged=True, frozen=TOWER)
    queue = AsyncCallsQueue(way == "process")
    for step in range(4):
        asynchronous = way != "at once"
        request = saved(
            tmp_path / str(step), step, strategy, async_sharded_save=asynchronous
        )
        if request is not None:
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    assert linked(tmp_path / "3") == ["unchanged/__0_0.distcp"]
    note(FIGURES, way, f"{max(written[1:]) / written[0]:.4f}")
    assert max(written[1:]) <= 0.21 * written[0]
    for step in range(4):
        check(tmp_path / str(step), step)
        remove(tmp_path / str(step))


def test_equal_digests_of_two_saves_are_enough(
    tmp_path: Path, written: list[int]
) -> None:
    for step in range(5):
        saved(tmp_path / str(step), step)
    full = written[0]
    assert written[:3] == [full] * 3
    assert max(written[3:]) <= 0.21 * full
    for step in range(4):
        remove(tmp_path / str(step))
    assert set(names(tmp_path / "4").values()) == {1}
    check(tmp_path / "4", 4)


def test_a_save_replaces_the_step_whose_files_it_links(
    tmp_path: Path, written: list[int]
) -> None:
    strategy = Strategy(reuse_unchanged=True, frozen=TOWER)
    for step in range(3):
        saved(tmp_path / "latest", step, strategy)
    assert max(written[1:]) <= 0.21 * written[0]
    check(tmp_path / "latest", 2)
    assert os.listdir(tmp_path) == ["latest"]


def test_a_save_without_the_option_is_as_before(tmp_path: Path) -> None:
    for step in range(4):
        saved(tmp_path / str(step), step, Strategy())
    assert list(names(tmp_path / "3")) == ["__0_0.distcp", "__0_1.distcp"]
    assert not linked(tmp_path / "3")


@pytest.mark.parametrize(
    "number", [errno.EXDEV, errno.EMLINK, errno.EPERM, errno.ENOTSUP, errno.EIO]
)
def test_a_refused_link_is_written_and_said_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    written: list[int],
    number: int,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "one", None, "other")

    monkeypatch.setattr(os, "link", refuse)
    strategy = Strategy(reuse_unchanged=True, frozen=TOWER)
    for step in range(4):
        saved(tmp_path / str(step), step, strategy)
        check(tmp_path / str(step), step)
    assert written == written[:1] * 4
    (said,) = [r for r in caplog.records if "written again" in r.getMessage()]
    assert os.strerror(number) in said.getMessage()


def test_a_step_before_that_is_gone_is_said_and_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, written: list[int]
) -> None:
    strategy = Strategy(reuse_unchanged=True, frozen=TOWER)
    saved(tmp_path / "0", 0, strategy)
    remove(tmp_path / "0")
    saved(tmp_path / "1", 1, strategy)
    assert written[0] == written[1]
    assert "does not exist" in caplog.text
    check(tmp_path / "1", 1)


def test_the_files_of_another_save_are_not_linked(
    tmp_path: Path, written: list[int]
) -> None:
    """Another job has replaced the step before: same layout, same sizes, other values."""
    strategy = Strategy(reuse_unchanged=True, frozen=TOWER)
    saved(tmp_path / "0", 0, strategy)
    other = {k: v + 1 for k, v in tensors(0).items()}
    state = {**megackpt.sharded(other), "step": 0}
    ThreadedGroup.run(
        1,
        lambda group: megackpt.save(
            state, tmp_path / "0", strategy, process_group=group
        ),
    )
    saved(tmp_path / "1", 1, strategy)
    assert written[-1] == written[0]
    check(tmp_path / "1", 1)


def test_a_changed_tensor_breaks_its_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[int]
) -> None:
    from megackpt.backends.torch_dist import distcp_writer

    monkeypatch.setattr(distcp_writer, "UNCHANGED_BYTES", 4 * 64 * 256 * 2)
    strategy = Strategy(reuse_unchanged=True, frozen=TOWER)
    values = tensors(0)
    for step in range(4):
        if step == 2:
            values["tower.5"] += 1
        state = {**megackpt.sharded(dict(values)), "step": step}
        megackpt.save(state, tmp_path / str(step), strategy)
    # Four files of two tensors each. Other two tensors are found to be equal in the saves 0 and 1.
    assert len(linked(tmp_path / "0")) == 4
    assert sorted(names(tmp_path / "3").values()) == [1, 1, 2, 4, 4, 4]
    one = 64 * 256 * 4
    assert [nbytes // one for nbytes in written] == [10, 2, 4, 2]
    asked = {k: torch.zeros_like(v) for k, v in values.items()}
    dcp.load(asked, checkpoint_id=tmp_path / "3", no_dist=True)
    assert all(torch.equal(asked[k], v) for k, v in values.items())
