"""Checkpoints on the hosts: ranks as threads, and hosts as directories."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import (
    LocalTier,
    MismatchError,
    ShardedTensor,
    StorageError,
    Strategy,
)
from megackpt.manager.local.pieces import HostPieces
from megackpt.manager.local.tier import next_hosts
from megackpt.testing import ThreadedGroup
from tests.manager.local_job import RANKS, Job, state


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, {})


def test_the_newest_local_step_is_restored(job: Job) -> None:
    job.train(10, 11, 12)
    assert job.pieces(0) == [
        "11:0",
        "11:1",
        "11:2",
        "11:3",
        "12:0",
        "12:1",
        "12:2",
        "12:3",
    ]
    assert job.restore() == (12, "local")


def test_a_lost_host_gets_its_shards_from_the_copies(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.train(10, 11)
    job.lose(1)
    with caplog.at_level(logging.INFO, "megackpt"):
        assert job.restore() == (11, "local")
    moved = "those of rank 2 from 'host0' to 'host1', those of rank 3 from 'host0' to 'host1'"
    assert moved in caplog.text
    assert job.pieces(1) == ["11:2", "11:3"]


def test_without_copies_a_lost_host_is_restored_from_the_storage(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.options["copies"] = 0
    job.train(10, 11)
    job.lose(1)
    assert job.restore() == (10, "storage")
    assert (
        "local step 11 is skipped: no host has the shards of ranks 2, 3 undamaged"
        in caplog.text
    )
    assert job.pieces(0) == ["10:0", "10:1", "11:0", "11:1"]  # until a save is complete
    job.train(11, 12)
    assert job.pieces(0) == ["11:0", "11:1", "12:0", "12:1"]


def files(job: Job) -> list[Path]:
    """All files of the newest local step, on all hosts."""
    steps = (job.folder / "hosts").glob("*/*/step_11_*")
    return sorted(p for step in steps for p in step.rglob("*") if p.is_file())


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("flips", [6, pytest.param(300, marks=pytest.mark.campaign)])
def test_flipped_bits_are_never_loaded(job: Job, tmp_path: Path, flips: int) -> None:
    """One bit in a file of one host: the other copy is taken. In both: the step before is."""
    job.train(10, 11)
    saved = tmp_path / "hosts.saved"
    shutil.copytree(tmp_path / "hosts", saved)
    chance = random.Random(11)
    all_files = files(job)
    for number in range(flips):
        path = chance.choice([p for p in all_files if p.stat().st_size])
        flip(path, chance.randrange(8 * path.stat().st_size))
        assert job.restore() == (11, "local"), (number, path)
        shutil.rmtree(tmp_path / "hosts")
        shutil.copytree(saved, tmp_path / "hosts")


def test_a_step_without_a_good_copy_is_skipped(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.options["generations"] = 3
    job.train(10, 11, 12)
    for host in (0, 1):
        (data,) = (job.folder / "hosts" / f"host{host}").glob(
            "*/step_12_*/rank_1_*/__0_0.distcp"
        )
        flip(data, 8 * (data.stat().st_size // 2))
    assert job.restore() == (11, "local")
    assert (
        "local step 12 is skipped: no host has the shards of rank 1 undamaged"
        in caplog.text
    )


def test_both_hosts_lost(job: Job) -> None:
    job.train(10, 11)
    job.lose(0)
    job.lose(1)
    assert job.restore() == (10, "storage")


def restore_over(job: Job, ranks: int, place: Any) -> tuple[int, str]:
    """Restore "w" in other shards, and check it. ``place``: rank -> which shard."""
    job.ranks = ranks

    def rank(group: ThreadedGroup) -> tuple[int, str]:
        number = place(group.rank)
        shard = torch.zeros(64 * RANKS // ranks)
        with job.manager(group) as manager:
            asked = state(group, -1)
            where = (0, number, ranks)
            asked["w"] = ShardedTensor.from_rank_offsets("w", shard, where)
            del asked["rng"]
            found = manager.restore(asked)
        assert found is not None
        whole = torch.cat(
            [torch.arange(64.0) + 1000 * r + found.step for r in range(RANKS)]
        )
        assert torch.equal(shard, whole.chunk(ranks)[number])
        assert torch.equal(found.state["b"], torch.full((5,), float(found.step)))
        assert found.state["iteration"] == found.step
        return found.step, found.source

    (outcome,) = {*ThreadedGroup.run(ranks, rank)}
    return outcome


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_another_number_of_ranks(job: Job, ranks: int) -> None:
    job.train(10, 11)
    job.per_host = max(1, ranks // 2)
    assert restore_over(job, ranks, lambda rank: rank) == (11, "local")
    assert not list((job.folder / "hosts").glob("*/*/step_*/megackpt.index"))


def test_fewer_hosts(job: Job) -> None:
    """One host is lost, and the other goes on alone."""
    job.train(10, 11)
    job.lose(0)
    (job.folder / "hosts" / "host1").rename(job.folder / "hosts" / "host0")
    assert restore_over(job, 2, lambda rank: rank) == (11, "local")
    job.train(12, 13)
    assert job.restore() == (13, "local")


def test_another_layout_of_as_many_ranks(job: Job) -> None:
    """Each rank asks for other shards than those that its host has."""
    job.options["copies"] = 0
    job.train(10, 11)
    assert restore_over(job, RANKS, lambda rank: RANKS - 1 - rank) == (11, "local")
    assert job.pieces(0)[2:] == ["11:0", "11:1", "11:2", "11:3"]


@pytest.mark.parametrize("stored", [True, False])
def test_a_state_that_does_not_fit(
    job: Job, caplog: pytest.LogCaptureFixture, stored: bool
) -> None:
    """It is a mistake of the caller, with local steps alone, too. No step is skipped or removed."""
    job.train(*((10, 11) if stored else (11,)))

    def rank(group: ThreadedGroup) -> None:
        with job.manager(group) as manager:
            asked = state(group, -1)
            asked["more"] = ShardedTensor.from_rank_offsets(
                "more", torch.zeros(2), replica_id=group.rank
            )
            manager.restore(asked)

    with pytest.raises(MismatchError, match="more"):
        ThreadedGroup.run(RANKS, rank)
    assert "skipped" not in caplog.text
    assert job.restore() == (11, "local")


@pytest.mark.parametrize("hosts", [[0], [0, 1]])
def test_a_refusal_is_not_damage(
    job: Job, monkeypatch: pytest.MonkeyPatch, hosts: list[int]
) -> None:
    """Files that cannot be opened are an error of the storage. No step is skipped or removed."""
    job.train(10, 11)
    real = os.open

    def refusing(path: Any, *args: Any, **options: Any) -> int:
        fd = real(path, *args, **options)
        where = os.readlink(f"/proc/self/fd/{fd}")
        if where.endswith(".distcp") and any(f"/host{h}/" in where for h in hosts):
            os.close(fd)
            raise OSError(errno.EMFILE, "Too many open files")
        return fd

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(StorageError, match="Too many open files"):
        job.restore()
    monkeypatch.undo()
    assert job.restore() == (11, "local")


def test_the_copy_of_a_piece_that_cannot_be_read_is_used(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job.train(10, 11)
    (bad,) = (job.folder / "hosts/host0").glob("*/step_11_*/rank_1_*/__0_0.distcp")
    number, real = bad.stat().st_ino, os.open

    def refusing(path: Any, *args: Any, **options: Any) -> int:
        fd = real(path, *args, **options)
        if os.fstat(fd).st_ino == number:
            os.close(fd)
            raise PermissionError(errno.EACCES, "Permission denied")
        return fd

    monkeypatch.setattr(os, "open", refusing)
    assert job.restore() == (11, "local")
    assert "rank_1_of_4 on host 'host0' cannot be read: cannot open" in caplog.text


def test_a_given_step(job: Job) -> None:
    """Later steps stay until a save after the restore is complete, and count no more then."""
    job.options["generations"] = 4
    job.train(10, 11, 12)
    assert job.restore(step=11) == (11, "local")
    assert job.restore() == (12, "local")
    job.continue_from(11, 12, 13)
    assert job.restore() == (13, "local")
    assert job.restore(step=10) == (10, "storage")
    job.continue_from(10, 11)
    assert job.restore() == (11, "local")


def test_a_newer_step_in_the_storage_wins(job: Job) -> None:
    job.train(10, 11)
    job.options["every"] = 1000
    job.train(20)
    assert job.restore() == (20, "storage")


def test_a_damaged_step_in_the_storage_does_not_hide_older_local_ones(job: Job) -> None:
    """Its damage is found when it is read. The local step is newer than the one before it."""
    job.options["every"] = 4
    job.train(10, 12, 16, 20)
    job.options["every"] = 1000
    job.train(20)
    (damaged,) = (job.folder / "run" / "iter_0000020").glob("__0_*.distcp")
    flip(damaged, 8 * (damaged.stat().st_size // 2))
    for piece in (job.folder / "hosts").glob("*/*/step_20_*"):
        shutil.rmtree(piece)
    assert job.restore() == (16, "local")


def test_a_run_that_starts_again_does_not_find_the_steps_of_the_one_before(
    job: Job,
) -> None:
    job.train(10, 11)
    shutil.rmtree(job.folder / "run")
    assert job.restore() is None
    job.train(3)
    assert job.pieces(0) == ["3:0", "3:1", "3:2", "3:3"]
    assert job.restore() == (3, "local")


def test_steps_that_are_due_on_the_hosts_only(job: Job) -> None:
    job.options["every"] = 2
    job.train(*range(1, 14))
    assert sorted(p.name for p in (job.folder / "run").glob("iter_*")) == [
        "iter_0000010"
    ]
    assert job.pieces(0)[::4] == ["10:0", "12:0"]
    assert job.restore() == (12, "local")


def test_a_save_without_asking_goes_to_the_storage(job: Job) -> None:
    def rank(group: ThreadedGroup) -> None:
        with job.manager(group) as manager:
            manager.save(7, state(group, 7))

    ThreadedGroup.run(RANKS, rank)
    assert (job.folder / "run" / "iter_0000007").is_dir()
    assert job.restore() == (7, "local")


def test_a_host_without_room(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostPieces, "free_bytes", lambda *_: 3 << 20)
    need = "'host0' has 3,145,728 bytes free, and local checkpoints need 8,3.* more: 2 generations"
    with pytest.raises(StorageError, match=need):
        job.train(11)
    with pytest.raises(StorageError, match=need):
        job.train(20)  # due in the storage, too
    assert (job.folder / "run" / "iter_0000020" / "metadata.json").exists()
    shutil.rmtree(job.folder / "run")
    job.train(10, 11, on_error="warn")
    assert job.restore() == (10, "storage")


def test_a_save_that_fails_on_one_host_leaves_the_step_before(job: Job) -> None:
    """A copy cannot be written: no rank counts the step, and the next save removes its pieces."""
    job.options["generations"] = 3

    def rank(group: ThreadedGroup) -> None:
        with job.manager(group) as manager:
            manager.save(10, state(group, 10))
            assert manager.should_save(11)
            if group.rank == 2:
                accept = manager._local._saves._pieces.accept

                def full(*_: Any) -> None:
                    raise StorageError("no space is left")

                manager._local._saves._pieces.accept = full
            with pytest.raises(StorageError, match="no space is left"):
                manager.save(11, state(group, 11))
            if group.rank == 2:
                manager._local._saves._pieces.accept = accept
            assert manager.should_save(12)
            manager.save(12, state(group, 12))

    ThreadedGroup.run(RANKS, rank)
    assert job.pieces(1) == [f"{step}:{rank}" for step in (10, 12) for rank in range(4)]
    assert job.restore() == (12, "local")


def test_values_that_are_not_finite(job: Job) -> None:
    strategy = Strategy("torch_dist", check_values="note")

    def rank(group: ThreadedGroup) -> tuple[int, str]:
        with job.manager(group, strategy=strategy) as manager:
            for step in (10, 11):
                bad = state(group, step)
                if step == 11 and group.rank == 3:
                    bad["w"].data[5] = float("nan")
                if manager.should_save(step):
                    manager.save(step, bad)
            found = manager.restore(state(group, -1), finite=True)
        assert found is not None
        return found.step, found.source

    assert ThreadedGroup.run(RANKS, rank) == [(10, "local")] * RANKS


@pytest.mark.parametrize(
    ("per_host", "copies", "targets"),
    [
        ((2, 2), 1, [[2], [3], [0], [1]]),
        ((1, 1, 1), 2, [[1, 2], [2, 0], [0, 1]]),
        ((2, 1), 1, [[2], [2], [0]]),
        ((2,), 1, [[], []]),
    ],
)
def test_copies_are_on_other_hosts(
    per_host: Sequence[int], copies: int, targets: list[list[int]]
) -> None:
    hosts = [f"host{h}" for h, count in enumerate(per_host) for _ in range(count)]
    assert next_hosts(hosts, copies) == targets


@pytest.mark.parametrize(
    "option", [{"every": 0}, {"copies": -1}, {"generations": 1}, {"every": 1.5}]
)
def test_wrong_settings(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=f"{name} of a LocalTier"):
        LocalTier("/tmp", **({"every": 1} | option))


def test_a_place_on_the_own_host_is_refused() -> None:
    tier = LocalTier("/tmp", 1, place_copies=lambda rank, _: [rank ^ 1])
    with pytest.raises(ValueError, match="a copy on 'host0', the rank's own host"):
        tier.targets(["host0", "host0", "host1", "host1"])
    assert tier.targets(["a", "b"]) == [[1], [0]]
