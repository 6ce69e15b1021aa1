"""Checkpoints on the hosts: steps of a future that was given up, and the files that say which count."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megackpt.testing import ThreadedGroup
from tests.manager.local_job import Job, check, state


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job on two hosts, of a rank each."""
    return Job(tmp_path, {}, ranks=2, per_host=1)


def continue_at(job: Job, step: int) -> tuple[int, str] | None:
    """Restore the newest step, and save another one if it is due."""

    def rank(group: ThreadedGroup) -> tuple[int, str] | None:
        with job.manager(group) as manager:
            found = check(group, manager.restore(state(group, -1)))
            if manager.should_save(step):
                manager.save(step, state(group, step))
        return found

    (outcome,) = {*ThreadedGroup.run(job.ranks, rank)}
    return outcome


@pytest.mark.parametrize("source", ["local", "storage"])
def test_a_host_that_was_away_brings_back_a_later_step(job: Job, source: str) -> None:
    """The step counts until a save of the run that went on without the host is complete."""
    job.options["every"] = 2
    job.train(10, 12, 14)
    host, away = job.folder / "hosts" / "host1", job.folder / "away"
    for piece in (job.folder / "hosts" / "host0").glob("*/step_14_*/rank_1_of_2"):
        shutil.rmtree(piece)

    def leave() -> None:
        shutil.copytree(host, away)
        shutil.rmtree(host)

    def come_back() -> None:
        shutil.rmtree(host)
        away.rename(host)

    leave()
    assert job.restore() == (12, "local")
    come_back()
    assert job.restore() == (14, "local")
    for piece in (job.folder / "hosts" / "host0").glob("*/step_14_*/rank_1_of_2"):
        shutil.rmtree(piece)
    leave()
    job.options["every"] = 13 if source == "local" else 1000
    if source == "storage":
        job.interval = 13
    assert continue_at(job, 13) == (12, "local")
    come_back()
    assert job.restore() == (13, source)


def test_a_save_that_was_not_complete_gives_nothing_up(job: Job) -> None:
    """A save in the storage begins after a restore that skipped a step, and fails."""
    job.options["every"] = 2
    job.train(10, 12, 14)
    saved = job.folder / "saved"
    shutil.copytree(job.folder / "hosts", saved)
    for piece in (job.folder / "hosts").glob("*/*/step_14_*/rank_1_of_2"):
        shutil.rmtree(piece)
    job.interval = 13
    (job.folder / "run" / "iter_0000013").touch()  # in the way of the save
    with pytest.raises(Exception, match="iter_0000013"):
        continue_at(job, 13)
    (job.folder / "run" / "iter_0000013").unlink()
    shutil.rmtree(job.folder / "hosts")
    saved.rename(job.folder / "hosts")
    assert job.restore() == (14, "local")


def test_a_job_that_was_set_back_and_saved_nothing_gives_nothing_up(job: Job) -> None:
    """Steps after the one that was asked for are in the storage when the next save fails."""
    job.options["every"] = 5
    job.train(10, 20, 25)
    job.options["every"] = 1000
    job.interval = 11
    in_the_way = job.folder / "run" / "iter_0000011"
    in_the_way.touch()
    with pytest.raises(Exception, match="iter_0000011"):
        job.continue_from(10, 11)
    in_the_way.unlink()
    assert job.restore() == (25, "local")
    job.continue_from(10, 11)
    assert job.restore() == (20, "storage")


@pytest.mark.parametrize("damage", ["other", "long", "folder", "missing"])
@pytest.mark.parametrize("both", [False, True])
def test_damage_of_the_file_that_says_which_steps_count(
    job: Job, damage: str, both: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its copy is used. Without one, no local step counts. Whole steps of the storage do."""
    job.train(10, 11)
    names = [".megackpt-run", ".megackpt-run.copy"]
    for name in names[: 1 + both]:
        path = job.folder / "run" / name
        path.unlink()
        if damage == "folder":
            path.mkdir()
        elif damage != "missing":
            path.write_text("x" * (16 if damage == "other" else 2 << 20))
    assert job.restore() == ((10, "storage") if both else (11, "local"))
    if damage != "missing":
        assert ".megackpt-run" in caplog.text
    if both:
        assert "local step 11 is skipped" in caplog.text
    continue_at(job, 12)
    caplog.clear()
    assert job.restore() == (12, "local")
    assert not caplog.text
