"""Conversions that are killed at any step: the next one resumes, and the target is the same, byte for byte."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt.checkpoint import open_checkpoint
from megackpt.converter import cells, conversion
from megackpt.converter.conversion_workers import JOURNAL
from megackpt.errors import CheckpointExists, NotACheckpoint
from megackpt.storage import kernel
from tests.children import died

STEPS = ("fsync", "rename", "link", "unlink", "mkdir", "writev", "pwritev", "chmod")
LIMIT = 1000

pytestmark = pytest.mark.usefixtures("small_tasks")


def die_at(step: int) -> None:
    """From here on, end this process without a word before its ``step``-th change of the disk."""
    left = [step]

    def counting(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            return real(*args, **kwargs)

        return call

    for name in STEPS:
        setattr(os, name, counting(getattr(os, name)))
    kernel.exchange = counting(kernel.exchange)  # type: ignore[assignment]


def dying(step: int, source: Path, target: Path, to: str, overwrite: bool) -> bool:
    def work() -> None:
        die_at(step)
        megackpt.convert(source, target, to, overwrite=overwrite)

    return died(work)


@pytest.mark.parametrize(
    ("to", "before", "stride"),
    [
        ("torch_dist", "foreign", 11),
        pytest.param("torch_dist", "nothing", 11, marks=pytest.mark.slow),
        pytest.param("torch_dist", "checkpoint", 11, marks=pytest.mark.slow),
        ("safetensors", "nothing", 11), ("torch", "checkpoint", 11),
        pytest.param("torch_dist", "nothing", 1, marks=pytest.mark.campaign),
        pytest.param("torch_dist", "checkpoint", 1, marks=pytest.mark.campaign),
        pytest.param("safetensors", "checkpoint", 2, marks=pytest.mark.campaign),
    ],
)  # fmt: skip
def test_a_kill_at_any_step(
    tmp_path, source, files, monkeypatch, to, before, stride
) -> None:
    """Once before each change of the disk (or some of them); then the same call again."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    target, held = tmp_path / "run" / "target", {}
    performed: list[int] = []
    perform = conversion.TaskRunner.perform
    monkeypatch.setattr(
        conversion.TaskRunner,
        "perform",
        lambda self, task, moved: performed.append(1) or perform(self, task, moved),
    )

    def prepared() -> None:
        os.makedirs(tmp_path / "run")
        if before == "checkpoint":
            megackpt.save({"old": 1}, target)
        if before != "nothing":
            target.mkdir(exist_ok=True)
            (target / "notes.txt").write_text("mine")
            held.update({"notes.txt": b"mine"})

    prepared()
    megackpt.convert(source, target, to, overwrite=True)
    whole, tasks = files(target), len(performed)
    assert tasks == 1 if to == "torch" else tasks > 4
    saved = 0
    for step in range(1, LIMIT, stride):
        os.rename(tmp_path / "run", tmp_path / f"run{step}")
        prepared()
        died = dying(step, source, target, to, before == "checkpoint")
        if before == "checkpoint":
            assert megackpt.load_common_state_dict(target) in (
                {"old": 1},
                megackpt.load_common_state_dict(source),
            )
        performed.clear()
        try:
            megackpt.convert(source, target, to, overwrite=before == "checkpoint")
        except CheckpointExists:  # it died when it was done, or not at all
            assert not performed
        assert files(target) == whole, step
        assert os.listdir(tmp_path / "run") == ["target"], step
        saved = max(saved, tasks - len(performed))
        if not died:
            break
    assert step > 50
    assert saved == tasks  # some run died when nothing but the commit was left


def test_a_run_is_resumed_after_each_task(tmp_path, source, files, monkeypatch) -> None:
    """No task is done twice: neither those before the death nor those after it."""
    target = tmp_path / "target"
    megackpt.convert(source, tmp_path / "whole", "torch_dist")
    performed: list[int] = []
    perform = conversion.TaskRunner.perform

    def one_and_no_more(self, task, moved):
        if performed:
            raise KeyboardInterrupt
        performed.append(task.number)
        return perform(self, task, moved)

    monkeypatch.setattr(conversion.TaskRunner, "perform", one_and_no_more)
    finished: list[int] = []
    while True:
        try:
            done = megackpt.convert(source, target, "torch_dist")
        except KeyboardInterrupt:
            with pytest.raises(NotACheckpoint):
                megackpt.load({}, target)
            assert (staging(target) / JOURNAL).exists()
            finished += performed
            performed.clear()
        else:
            finished += performed
            break
    assert finished == list(range(len(finished)))
    assert done.resumed > 0
    assert files(target) == files(tmp_path / "whole")


def staging(target: Path) -> Path:
    """The directory in which a conversion that was cut off has written."""
    (found,) = target.parent.glob(f".{target.name}.megackpt-*")
    return found


@pytest.fixture
def cut_off(tmp_path, source, monkeypatch) -> Path:
    """A target of which three tasks are done."""
    count = [0]
    perform = conversion.TaskRunner.perform

    def thrice(self, task, moved):
        count[0] += 1
        if count[0] > 3:
            raise KeyboardInterrupt
        return perform(self, task, moved)

    with monkeypatch.context() as patch:
        patch.setattr(conversion.TaskRunner, "perform", thrice)
        with pytest.raises(KeyboardInterrupt):
            megackpt.convert(source, tmp_path / "target", "torch_dist")
    return tmp_path / "target"


def test_tasks_with_a_torn_entry_or_a_short_file_are_repeated(
    cut_off, source, assert_same
) -> None:
    entries = sorted((staging(cut_off) / JOURNAL).iterdir())
    assert len(entries) == 3
    os.truncate(entries[2], entries[2].stat().st_size - 10)
    first = next(staging(cut_off).glob("__0_0.distcp"))
    os.truncate(first, first.stat().st_size - 1)
    done = megackpt.convert(source, cut_off, "torch_dist")
    assert 0 < done.resumed < 17 << 10  # the second task alone was kept
    assert_same(source, cut_off)
    assert megackpt.verify(cut_off).ok


@pytest.mark.parametrize(
    "options",
    [
        {"resume": False},
        {"rename": "model.*=*"},
        {"cast": "bf16"},
        {"exclude": "flag"},
        {"shards": 3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_another_conversion_starts_from_zero(cut_off, source, options) -> None:
    assert megackpt.convert(source, cut_off, "torch_dist", **options).resumed == 0
    assert not (cut_off / JOURNAL).exists()
    assert megackpt.verify(cut_off).ok
    assert not megackpt.verify(cut_off).foreign


def test_another_source_starts_from_zero(
    cut_off, source, tmp_path, assert_same
) -> None:
    state = {"w": megackpt.ShardedTensor.from_rank_offsets("w", torch.ones(9))}
    megackpt.save(state, source)
    assert megackpt.convert(source, cut_off, "torch_dist").resumed == 0
    assert_same(source, cut_off)


def test_a_save_removes_an_interrupted_conversion(cut_off) -> None:
    megackpt.save({"n": 1}, cut_off)
    assert set(os.listdir(cut_off)) == {
        ".metadata",
        "common.pt",
        "megackpt.index",
        "metadata.json",
    }


def test_a_permanent_error_leaves_nothing_behind(tmp_path, source) -> None:
    """A damaged source: going on would end in the same place."""
    place = open_checkpoint(source).manifest.chunks_of("model.tall")[0].location
    data = bytearray((source / place.file).read_bytes())
    data[place.start + 5] ^= 1
    (source / place.file).write_bytes(data)
    with pytest.raises(megackpt.CorruptCheckpoint):
        megackpt.convert(source, tmp_path / "target", "torch_dist")
    assert not (tmp_path / "target").exists()


def test_tasks_do_not_depend_on_workers_or_memory(tmp_path, source, files) -> None:
    megackpt.convert(
        source, tmp_path / "target", "torch_dist", workers=1, max_memory="1GiB"
    )
    first = files(tmp_path / "target")
    megackpt.convert(
        source,
        tmp_path / "target",
        "torch_dist",
        workers=2,
        max_memory="128MiB",
        overwrite=True,
    )
    assert files(tmp_path / "target") == first
    assert len(first) > cells.task_count(100 << 10)
