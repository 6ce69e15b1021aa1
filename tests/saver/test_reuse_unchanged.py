"""Tensors that have not changed are links to files of the step before, and each step stands for itself."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
import torch.distributed.checkpoint as dcp
import zarr

import megackpt
from megackpt import ShardedTensor, Strategy, events
from megackpt.async_save import AsyncCallsQueue
from megackpt.checkpoint import remove
from megackpt.errors import BackendError
from megackpt.manager import CheckpointManager
from megackpt.planning import cache
from megackpt.saver import save_operation
from megackpt.storage import root_at
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


@pytest.mark.parametrize("way", ["thread", "process"])
def test_frozen_tensors_that_change_are_written_from_the_copy(
    tmp_path: Path, way: str
) -> None:
    """Hashed, and then written: the copy is read twice."""
    values = tensors(0)
    with closing(AsyncCallsQueue(way == "process")) as queue:
        for step in range(3):
            values = {k: v + (k == f"tower.{step}") for k, v in values.items()}
            state = {**megackpt.sharded(dict(values)), "step": step}
            strategy = Strategy(reuse_unchanged=True, frozen=TOWER)
            place = tmp_path / str(step)
            request = megackpt.save(state, place, strategy, async_sharded_save=True)
            assert request is not None
            queue.schedule_async_request(request)
            expected = {k: v.clone() for k, v in values.items()}
            for value in values.values():
                value.add_(100)  # the copy does not change
            queue.maybe_finalize_async_calls(blocking=True)
            values = expected
            asked = {k: torch.zeros_like(v) for k, v in values.items()}
            dcp.load(asked, checkpoint_id=place, no_dist=True)
            assert all(torch.equal(asked[k], v) for k, v in values.items())
            assert not megackpt.verify(place).problems


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
    assert "0 was removed, replaced or damaged" in caplog.text
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


def test_another_process_links_the_checkpoint_that_is_named(
    tmp_path: Path, written: list[int]
) -> None:
    strategy = Strategy(reuse_unchanged=True, frozen=TOWER)
    saved(tmp_path / "0", 0, strategy)
    cache.forget()  # as a new process
    named = Strategy(reuse_unchanged=True, reuse_from=tmp_path / "0")
    for step in (1, 2):
        saved(tmp_path / str(step), step, named)
        check(tmp_path / str(step), step)
    assert max(written[1:]) <= 0.21 * written[0]
    assert names(tmp_path / "0")["unchanged/__0_0.distcp"] == 3


@pytest.mark.parametrize("what", ["another layout", "another dtype", "another format"])
def test_what_does_not_fit_is_written(
    tmp_path: Path, written: list[int], what: str
) -> None:
    """Also where the bytes are equal: zeros of another dtype or shape."""
    zeros = {"w": torch.zeros(64, 64, device="cpu"), "v": torch.ones(8, device="cpu")}
    strategy = Strategy(reuse_unchanged=True, frozen=["w", "v"])
    other = dict(zeros)
    if what == "another layout":
        other["w"] = zeros["w"].reshape(32, 128)
    if what == "another dtype":
        other["w"] = zeros["w"].to(torch.int32)
    first = Strategy("zarr") if what == "another format" else strategy
    megackpt.save(megackpt.sharded(other), tmp_path / "0", first)
    cache.forget()
    named = Strategy(reuse_unchanged=True, frozen=["w", "v"], reuse_from=tmp_path / "0")
    megackpt.save(megackpt.sharded(dict(zeros)), tmp_path / "1", named)
    assert not linked(tmp_path / "1")
    asked = {k: torch.full_like(v, 7) for k, v in zeros.items()}
    dcp.load(asked, checkpoint_id=tmp_path / "1", no_dist=True)
    assert all(torch.equal(asked[k], v) for k, v in zeros.items())


def test_a_named_checkpoint_that_is_not_there_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = Strategy(reuse_unchanged=True, reuse_from=tmp_path / "none")
    saved(tmp_path / "0", 0, named)
    assert "none does not exist" in caplog.text
    check(tmp_path / "0", 0)


def test_a_truncated_file_of_the_step_before_is_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = Strategy(reuse_unchanged=True, frozen=TOWER)
    saved(tmp_path / "0", 0, strategy)
    os.truncate(tmp_path / "0" / "unchanged" / "__0_0.distcp", 1000)
    saved(tmp_path / "1", 1, strategy)
    assert "truncated" in caplog.text
    check(tmp_path / "1", 1)


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    strategy = Strategy(reuse_unchanged=True, frozen=TOWER)
    saved(tmp_path / "0", 0, strategy)
    file = tmp_path / "0" / "unchanged" / "__0_0.distcp"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    saved(tmp_path / "1", 1, strategy)
    assert (tmp_path / "elsewhere").stat().st_nlink == 1
    check(tmp_path / "1", 1)


def test_later_saves_change_neither_bytes_nor_mode(tmp_path: Path) -> None:
    strategy = Strategy(reuse_unchanged=True, frozen=TOWER)
    saved(tmp_path / "0", 0, strategy)
    kept = tmp_path / "0" / "unchanged" / "__0_0.distcp"
    kept.chmod(0o444)
    content, mode = kept.read_bytes(), kept.stat().st_mode
    (tmp_path / "1").mkdir(mode=0o700)
    for step in range(1, 5):
        saved(
            tmp_path / "1", step, strategy
        )  # replaces itself, with its mode and owner
    other = megackpt.sharded({k: v * 2 for k, v in tensors(0).items()})
    megackpt.save({**other, "step": 5}, tmp_path / "1", strategy)
    megackpt.save({**other, "step": 5}, tmp_path / "1", Strategy("safetensors"))
    remove(tmp_path / "1")
    assert (kept.read_bytes(), kept.stat().st_mode) == (content, mode)
    assert kept.stat().st_nlink == 1
    check(tmp_path / "0", 0)


def test_no_file_with_two_names_is_written_in_place(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"bytes")
    os.link(tmp_path / "one", tmp_path / "two")
    with pytest.raises(megackpt.StorageError, match="other checkpoints have the file"):
        root_at(tmp_path).update("two")
    assert (tmp_path / "one").read_bytes() == b"bytes"


def test_damage_is_named_in_every_step_that_shares_it(tmp_path: Path) -> None:
    strategy = Strategy(reuse_unchanged=True, frozen=TOWER)
    for step in range(3):
        saved(tmp_path / str(step), step, strategy)
    file = tmp_path / "1" / "unchanged" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2 + 5000] ^= 1
    file.write_bytes(data)  # in place, as a bad sector
    for step in range(3):
        (problem,) = megackpt.verify(tmp_path / str(step)).problems
        assert "tower." in problem


def ranks_save(directory: Path, step: int, strategies: list[Strategy]) -> list[Any]:
    """Two ranks, with replicas of the tower and with halves of the head."""

    def work(group: ThreadedGroup) -> None:
        named = tensors(step)
        state: dict[str, Any] = {"step": step}
        for key, value in named.items():
            if key in TOWER:
                state[key] = ShardedTensor.from_rank_offsets(
                    key, value, replica_id=group.rank
                )
            else:
                half = value[32 * group.rank : 32 * group.rank + 32].contiguous()
                state[key] = ShardedTensor.from_rank_offsets(
                    key, half, (0, group.rank, 2)
                )
        megackpt.save(state, directory, strategies[group.rank], process_group=group)

    return ThreadedGroup.run(2, work)


def test_ranks_link_their_files(tmp_path: Path) -> None:
    strategy = Strategy(reuse_unchanged=True, frozen=TOWER)
    ranks_save(tmp_path / "0", 0, [strategy] * 2)
    named = Strategy(reuse_unchanged=True, reuse_from=tmp_path / "0")
    ranks_save(tmp_path / "1", 1, [named] * 2)
    assert linked(tmp_path / "1") == [
        "unchanged/__0_0.distcp",
        "unchanged/__1_0.distcp",
    ]
    remove(tmp_path / "0")
    check(tmp_path / "1", 1)
    # One process has the shards of both ranks, so it links the files of both.
    saved(tmp_path / "2", 2, Strategy(reuse_unchanged=True, reuse_from=tmp_path / "1"))
    assert linked(tmp_path / "2") == [
        "unchanged/__0_0.distcp",
        "unchanged/__0_1.distcp",
    ]
    check(tmp_path / "2", 2)


def test_all_ranks_must_have_the_option(tmp_path: Path) -> None:
    with pytest.raises(megackpt.ShardingError, match="with reuse_unchanged"):
        ranks_save(tmp_path / "0", 0, [REUSING, Strategy()])


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="cannot reuse unchanged tensors"):
        saved(tmp_path, 0, Strategy("safetensors", reuse_unchanged=True))
    with pytest.raises(BackendError, match="no effect without reuse_unchanged"):
        Strategy(frozen=["w"])
    with pytest.raises(BackendError, match="collection of keys"):
        Strategy(reuse_unchanged=True, frozen="w")


def test_a_foreign_entry_of_the_name_is_left_alone(tmp_path: Path) -> None:
    saved(tmp_path / "0", 0, Strategy())
    (tmp_path / "0" / "unchanged").mkdir()
    (tmp_path / "0" / "unchanged" / "notes").write_text("mine")
    with pytest.raises(megackpt.StorageError, match="unchanged"):
        saved(tmp_path / "0", 1)
    assert (tmp_path / "0" / "unchanged" / "notes").read_text() == "mine"
    check(tmp_path / "0", 0)


def random_orders(folder: Path, seed: int) -> None:
    """Saves, removals and retention in a random order: every step that is left is whole."""
    dice = random.Random(seed)
    cache.forget()
    values = {
        f"w.{i}": torch.full((40 + i, 64), float(i), device="cpu") for i in range(6)
    }
    kept: dict[int, dict[str, torch.Tensor]] = {}
    frozen = dice.sample(sorted(values), dice.randrange(7))
    last = None
    for step in range(12):
        for key in dice.sample(sorted(values), dice.choice((0, 1, 1, 2))):
            values[key] = values[key] + 1
        if dice.random() < 0.1:
            cache.forget()
        strategy = Strategy(
            reuse_unchanged=dice.random() < 0.9,
            options={"files_per_rank": dice.choice((1, 1, 1, 2))},
        )
        if strategy.reuse_unchanged:
            strategy = replace(strategy, frozen=frozen, reuse_from=last)
        number = step if dice.random() < 0.8 or not kept else dice.choice(sorted(kept))
        state = megackpt.sharded({k: v.clone() for k, v in values.items()})
        with CheckpointManager(
            folder, strategy, keep_last=dice.choice((None, 2, 4)), naming="plain"
        ) as manager:
            manager.save(number, state)
        kept[number] = dict(values)
        last = folder / str(number)
        if dice.random() < 0.3:
            remove(folder / str(dice.choice([s.step for s in manager.steps()])))
        steps = manager.steps()
        if step < 11:
            steps = tuple(dice.sample(steps, min(len(steps), 2)))
        for found in steps:
            assert found.complete
            assert found.step is not None
            asked = {k: torch.zeros_like(v) for k, v in values.items()}
            dcp.load(asked, checkpoint_id=folder / found.name, no_dist=True)
            expected = kept[found.step]
            assert all(torch.equal(asked[k], v) for k, v in expected.items()), seed
            assert not megackpt.verify(folder / found.name).problems, seed


@pytest.fixture
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.usefixtures("without_fsync")
@pytest.mark.parametrize("seed", range(10))
def test_random_orders_of_saves_and_removals(tmp_path: Path, seed: int) -> None:
    random_orders(tmp_path, seed)


@pytest.mark.usefixtures("without_fsync")
@pytest.mark.campaign
def test_many_random_orders(tmp_path: Path, note: Callable[..., None]) -> None:
    for seed in range(100, 300):
        random_orders(tmp_path / str(seed), seed)
    note(("random orders of saves and removals", "wrong steps"), 200, 0)


def test_zarr_links_its_cells(tmp_path: Path, written: list[int]) -> None:
    for compression in (None, "zstd"):
        options = {"compression": compression}
        strategy = Strategy("zarr", None, options, reuse_unchanged=True, frozen=TOWER)
        place = tmp_path / str(compression)
        del written[:]
        for step in range(3):
            saved(place / str(step), step, strategy)
        assert max(written[1:]) <= 0.21 * written[0]
        for step in range(3):
            assert not megackpt.verify(place / str(step)).problems
            group = zarr.open_group(place / str(step), mode="r")
            for key, value in tensors(step).items():
                assert np.array_equal(np.asarray(group[key]), value.numpy()), key
                path = str(place / str(step) / key)
                spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
                read = ts.open(spec, open=True).result().read().result()
                assert np.array_equal(read, value.numpy()), key
            remove(place / str(step))


def test_a_large_cell_of_zarr_is_linked(tmp_path: Path, written: list[int]) -> None:
    """A shard: its chunks have no round lengths."""
    strategy = Strategy("zarr", reuse_unchanged=True, frozen=["w"])
    value = torch.arange(3_500_003, dtype=torch.float32, device="cpu").reshape(-1, 1)
    for step in range(2):
        state = megackpt.sharded({"w": value.clone(), "step": step})
        megackpt.save(state, tmp_path / str(step), strategy)
    assert written[1] < 2000
    remove(tmp_path / "0")
    asked = {"w": torch.zeros_like(value)}
    loaded = megackpt.load(megackpt.sharded(asked), tmp_path / "1", verify=True)
    assert torch.equal(loaded["w"], value)
