"""Checkpoints on the hosts: unusual states, options, names and clocks."""

from __future__ import annotations

import shutil
from dataclasses import fields
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megackpt import (
    CheckpointManager,
    CorruptCheckpoint,
    LocalTier,
    ShardedTensor,
    ShardedTensorFactory,
    StorageError,
    UntrustedClass,
)
from megackpt.manager.local.pieces import HostPieces
from megackpt.manager.local.saves import as_one_rank
from megackpt.testing import ThreadedGroup
from tests.manager.local_job import Job, check, state


def two_hosts(tmp_path: Path, **options: Any) -> Job:
    return Job(tmp_path, options, ranks=2, per_host=1)


def test_the_step_of_a_host_that_was_away_is_not_found_after_a_step_back(
    tmp_path: Path,
) -> None:
    job = two_hosts(tmp_path)
    hosts = tmp_path / "hosts"
    job.train(10, 15)
    for step, source in ((10, "local"), (10, "storage")):
        shutil.copytree(hosts / "host1", tmp_path / "away")
        if source == "storage":
            job.lose(0)
            job.lose(1)
        assert job.restore(step=step) == (step, source)
        job.train(11, 12)
        job.lose(1)
        (tmp_path / "away").rename(hosts / "host1")
        assert job.restore() == (12, "local")
        job.train(15)


@pytest.mark.parametrize(
    "strict", ["ignore_all", "log_unexpected", "raise_all", "return_all"]
)
def test_keys_that_other_ranks_saved_are_found_at_any_strictness(
    tmp_path: Path, strict: str
) -> None:
    """As many ranks, in another order of pipeline stages."""
    job = two_hosts(tmp_path)

    def stage(number: int, value: float) -> dict[str, Any]:
        data = torch.full((4,), value)
        return {"w": ShardedTensor.from_rank_offsets(f"layer{number}.w", data)}

    def rank(group: ThreadedGroup) -> tuple[float, Any]:
        with job.manager(group) as manager:
            assert manager.should_save(11)
            manager.save(11, stage(group.rank, group.rank))
            asked = stage(1 - group.rank, -1.0)
            found = manager.restore(asked, strict=strict)
        assert found is not None
        return float(asked["w"].data[0]), found.state

    outcomes = ThreadedGroup.run(2, rank)
    assert [value for value, _ in outcomes] == [1.0, 0.0]
    if strict == "return_all":
        assert [state[1:] for _, state in outcomes] == [(set(), set())] * 2


def test_missing_and_unexpected_keys(tmp_path: Path) -> None:
    """They are those of the whole step, as from the storage."""
    job = two_hosts(tmp_path)
    job.train(10, 11)

    def rank(group: ThreadedGroup) -> list[Any]:
        found = []
        for local in (job.tier(group.rank), None):
            asked = state(group, -1)
            asked["new"] = ShardedTensor.from_rank_offsets(
                "new", torch.zeros(2), replica_id=group.rank
            )
            del asked["b"]
            root = job.folder / "run"
            with CheckpointManager(root, process_group=group, local=local) as manager:
                restored = manager.restore(asked, strict="return_all")
                assert restored is not None
                found += [restored.step, *restored.state[1:]]
        return found

    for found in ThreadedGroup.run(2, rank):
        assert found == [11, {"b"}, {"new"}, 10, {"b"}, {"new"}]


def test_what_factories_build_is_in_the_pieces(tmp_path: Path) -> None:
    """Also where they compute the replicas themselves, from a tuple of three."""
    job = two_hosts(tmp_path)

    def made(group: ThreadedGroup, value: float) -> dict[str, Any]:
        def build(key: str, data: torch.Tensor, replica: Any, _: Any) -> Any:
            first, second = data.chunk(2)
            replica = (*replica[:2], group.rank)
            return [
                ShardedTensor.from_rank_offsets(f"{key}.1", first, replica_id=replica),
                ShardedTensor.from_rank_offsets(f"{key}.2", second, replica_id=replica),
            ]

        data = torch.full((8,), value + group.rank)
        replica = (0, 0, group.rank)
        return {"f": ShardedTensorFactory("f", data, build, torch.cat, replica)}

    def rank(group: ThreadedGroup) -> list[float]:
        with job.manager(group) as manager:
            assert manager.should_save(11)
            manager.save(11, made(group, 5.0))
            found = manager.restore(made(group, 0.0))
        assert found is not None
        return found.state["f"].tolist()

    assert ThreadedGroup.run(2, rank) == [[5.0] * 8, [6.0] * 8]


def test_ranks_without_an_element_of_a_tensor(tmp_path: Path) -> None:
    """As FSDP2 shards few rows over many ranks."""
    job = two_hosts(tmp_path)

    def rank(group: ThreadedGroup) -> list[float]:
        rows = 3 * (1 - group.rank)

        def shard(value: float) -> dict[str, Any]:
            own = torch.full((rows, 2), value)
            place = (3 - rows, 0)
            held = ShardedTensor(
                "w", own, torch.float32, tuple(own.shape), (3, 2), place, None
            )
            return {"w": held, "step": int(value)}

        with job.manager(group) as manager:
            assert manager.should_save(11)
            manager.save(11, shard(5.0))
            found = manager.restore(shard(-1.0))
        assert found is not None
        assert (found.source, found.state["step"]) == ("local", 5)
        return found.state["w"].flatten().tolist()

    assert ThreadedGroup.run(2, rank) == [[5.0] * 6, []]


def test_replicas_of_megatrons_class_are_in_the_pieces() -> None:
    theirs = type("ShardedTensor", (ShardedTensor,), {})
    theirs.__module__ = "megatron.core.dist_checkpointing.mapping"
    held = ShardedTensor.from_rank_offsets("b", torch.ones(3), replica_id=1)
    (own,) = as_one_rank(
        {"b": theirs(**{f.name: getattr(held, f.name) for f in fields(held)})}
    ).values()
    assert type(own) is ShardedTensor
    assert own.replica_id == 0


def test_options_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count on the hosts as well."""
    monkeypatch.setattr("megackpt.limits.COMMON_STATE_BYTES", 1000)
    monkeypatch.setattr("megackpt.limits.COMMON_STATE_WARNING_BYTES", 1000)
    job = two_hosts(tmp_path)

    def rank(group: ThreadedGroup) -> Any:
        large = state(group, 11) | {"large": torch.ones(1000)}
        with job.manager(group) as manager:
            assert manager.should_save(11)
            options = {"content_metadata": {"a": 1}, "allow_large_common_state": True}
            manager.save(11, large, **options)
            found = manager.restore(state(group, -1))
        assert found is not None
        return found.state["content_metadata"]

    assert ThreadedGroup.run(2, rank) == [{"a": 1}] * 2


def test_a_step_that_is_saved_again_without_asking_goes_to_the_storage(
    tmp_path: Path,
) -> None:
    job = two_hosts(tmp_path)

    def rank(group: ThreadedGroup) -> None:
        with job.manager(group) as manager:
            assert manager.should_save(11)
            manager.save(11, state(group, 11))
            manager.save(11, state(group, 11))

    ThreadedGroup.run(2, rank)
    assert (tmp_path / "run" / "iter_0000011").is_dir()


def test_a_step_that_is_saved_again_counts_when_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = two_hosts(tmp_path, generations=3)
    clock = count(2000, -1)
    fake = SimpleNamespace(time_ns=lambda: next(clock))
    monkeypatch.setattr("megackpt.manager.local.lineage.time", fake)

    def rank(group: ThreadedGroup) -> float:
        for value in (1.0, 2.0):
            with job.manager(group) as manager:
                if value == 2.0:
                    assert manager.restore(state(group, -1)) is not None
                assert manager.should_save(11)
                now = state(group, 11)
                now["w"].data.fill_(value)
                manager.save(11, now)
            found = manager.restore(state(group, -1))
        assert found is not None
        return float(found.state["w"][0])

    assert ThreadedGroup.run(2, rank) == [2.0, 2.0]


def test_a_class_that_is_not_trusted_is_an_error(tmp_path: Path) -> None:
    """The older step, without it, is not loaded instead."""
    job = two_hosts(tmp_path)

    def rank(group: ThreadedGroup) -> None:
        with job.manager(group) as manager:
            for step in (10, 11):
                more = {"job": job} if step == 11 else {}
                assert manager.should_save(step)
                manager.save(step, state(group, step) | more)
            with pytest.raises(UntrustedClass, match="trusted="):
                manager.restore(state(group, -1))
            found = manager.restore(state(group, -1), trusted=(Job, type(tmp_path)))
            assert check(group, found) == (11, "local")

    ThreadedGroup.run(2, rank)


def test_names_that_are_not_pieces(tmp_path: Path) -> None:
    job = two_hosts(tmp_path)
    job.train(10, 11)
    (step,) = (tmp_path / "hosts" / "host0").glob("*/step_11_*")
    (step.parent / "step_12_ab").touch()
    for name in ("rank_0_of_1000000000", "rank_01_of_2", "rank_7_of_2"):
        (step / name).mkdir()
    assert job.restore() == (11, "local")


def test_a_link_in_the_place_of_the_runs_directory_is_refused(tmp_path: Path) -> None:
    job = two_hosts(tmp_path)
    job.train(10, 11)
    (step,) = (tmp_path / "hosts" / "host0").glob("*/step_11_*")
    others = tmp_path / "others"
    (others / "thesis").mkdir(parents=True)
    shutil.rmtree(step.parent)
    step.parent.symlink_to(others)
    with pytest.raises(CorruptCheckpoint, match="is not a directory"):
        job.train(12)
    assert [path.name for path in others.iterdir()] == ["thesis"]


@pytest.mark.parametrize(
    ("path", "host", "match"),
    [
        ("one", None, "shared by the hosts 'host[01]' and 'host[01]'"),
        (None, "localhost", "ranks [01] and [01] are both on host 'localhost'"),
    ],
)
def test_hosts_with_one_name_or_one_directory_raise(
    tmp_path: Path, path: str | None, host: str | None, match: str
) -> None:
    def rank(group: ThreadedGroup) -> None:
        name = f"host{group.rank}"
        local = LocalTier(tmp_path / (path or name), every=1, host=host or name)
        root = tmp_path / "run"
        with CheckpointManager(root, process_group=group, local=local) as manager:
            manager.save(1, state(group, 1))

    with pytest.raises(StorageError, match=match):
        ThreadedGroup.run(2, rank)


def test_a_local_save_that_fails_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted, and the running save in the storage is committed all the same."""
    job = two_hosts(tmp_path)

    def fail(*_: Any) -> None:
        raise StorageError("no space is left")

    monkeypatch.setattr(HostPieces, "clear", fail)

    def rank(group: ThreadedGroup) -> int:
        manager = job.manager(group, asynchronous=True)
        manager.save(10, state(group, 10))
        with pytest.raises(StorageError, match="no space is left"):
            manager.close()
        return manager.failed_saves

    assert ThreadedGroup.run(1, rank) == [1]
    assert (tmp_path / "run" / "iter_0000010" / "metadata.json").exists()


def test_a_restore_waits_for_the_running_local_save(tmp_path: Path) -> None:
    job = two_hosts(tmp_path)

    def rank(group: ThreadedGroup) -> tuple[int, str] | None:
        with job.manager(group, asynchronous=True) as manager:
            assert manager.should_save(11)
            manager.save(11, state(group, 11))
            found = manager.restore(state(group, -1))
            assert manager.should_save(12)
            manager.save(12, state(group, 12))
            return check(group, found)

    # A single rank: threads cannot share their group with the threads that write.
    assert ThreadedGroup.run(1, rank) == [(11, "local")]
    assert job.pieces(0) == ["11:0", "12:0"]
