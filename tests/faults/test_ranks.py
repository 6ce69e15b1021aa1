"""A rank that raises, dies or stops in each phase of a save and of a load: the others are told, and go on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import ShardedTensor
from megackpt.errors import CheckpointingException, RankLost
from tests.faults.share import sampled

STEPS = {
    "save": ["declare", "lowest", "gather plan", "scatter plan", "write", "written", "gather write", "broadcast write"],
    "load": [
        "broadcast open", "compare", "gather compare", "broadcast compare", "read", "gather read", "broadcast read",
    ],
}  # fmt: skip
OWN_WORK = {"declare", "begin", "write", "written", "commit", "compare", "read"}
"""Where an error can be raised."""
COORDINATORS = ["begin", "commit"]
BETWEEN = ["returned", "look"]
"""Between the stages of an asynchronous save: before it is scheduled, and before a look whether all have written."""
TOLD = {("save", "broadcast write"), ("load", "broadcast read")}
"""Here the rank has answered, and what is left is to hear the outcome. Before a save is committed, rank 0
asks all ranks whether they are still there."""


def order(
    action: str,
    job: str,
    point: str,
    victim: int,
    strategy: str = "torch_dist",
    **more: Any,
) -> dict[str, Any]:
    told = {
        "action": action,
        "job": job,
        "point": point,
        "victim": victim,
        "strategy": strategy,
    }
    return {**told, "before": True, **more}


def every_order(strategy: str, action: str) -> list[dict[str, Any]]:
    found = [order(action, "save", point, 0, strategy) for point in COORDINATORS]
    for job, points in STEPS.items():
        found += [
            order(action, job, point, victim, strategy)
            for point in points
            for victim in (0, 2)
        ]
    return [one for one in found if action != "raise" or one["point"] in OWN_WORK]


def check(report: dict[str, Any]) -> None:
    """Every rank was told; what stood there stands; the trainer's groups and the next save work."""
    assert "hung" not in report, report
    asked = report["order"]
    victim, outcome_stands = asked["victim"], (asked["job"], asked["point"]) in TOLD
    assert not any(
        "crashed" in one
        for heard in report.values()
        if isinstance(heard, list)
        for one in heard
    ), report
    for told in report["told"]:
        if outcome_stands:
            assert told["error"] in (None, "RankLost"), report
        elif asked["action"] == "raise":
            assert told["error"] == "StorageError", report
            assert "it was to fail here" in told["text"], report
        else:
            assert told["error"] == "RankLost", report
            assert victim in told["failures"], report
            assert f"rank {victim} did not answer" in told["text"], report
    for late in report.get("late", ()):
        assert late["error"] == "RankLost" or outcome_stands, report
    # A coordinator that is lost after its commit cannot tell the others of it.
    committed = outcome_stands and (
        victim == 0 or all(told["error"] is None for told in report["told"])
    )
    value = 2.0 if asked["job"] == "save" and committed else 1.0
    if asked.get("meanwhile"):
        value = 3.0
    assert all(one["found"] == value for one in report.get("found", ())), report
    living = 2 if asked["action"] == "die" else 3
    assert report["after"] == [{"ones": living, "found": 3.0}] * living, report
    more = [f"c{number}" for number in range(1, asked.get("flying", 1))]
    assert report["left"] == ["c", *more, "rendezvous"], report


SAMPLE = [
    order("raise", "save", "commit", 0),
    order("die", "save", "written", 0, "zarr"),
    order("stop", "save", "commit", 0),
    order("stop", "save", "broadcast write", 2),
    order("stop", "save", "write", 2, "zarr", before=False, meanwhile=True),
    order("die", "load", "read", 2),
    order("stop", "load", "gather compare", 0),
    order("raise", "save", "write", 2, "zarr", later="thread"),
    order("die", "save", "write", 2, later="thread"),
    order("stop", "save", "written", 0, later="thread"),
    order("die", "save", "scatter plan", 2, "zarr", later="process", flying=2),
    order("stop", "save", "look", 2, later="process"),
    order("die", "save", "look", 0, later="thread", flying=3),
]


@pytest.mark.slow
def test_the_remaining_ranks_report_a_lost_rank_and_continue(
    tmp_path: Path, worlds: Any
) -> None:
    reports = worlds(SAMPLE, tmp_path)
    assert len(reports) == len(SAMPLE)
    for report in reports:
        check(report)


def state(value: float) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    w = ShardedTensor.from_rank_offsets("w", torch.full((8,), value), (0, rank, size))
    return {"w": w, "value": value}


def tried(directory: str, value: float, seconds: float = 1.5) -> str:
    try:
        megackpt.save(state(value), directory, timeout=timedelta(seconds=seconds))
        return "saved"
    except RankLost as error:
        return str(error)


def one_never_calls(directory: str) -> None:
    """Rank 2 leaves a save out, and goes on with the next ones."""
    rank = dist.get_rank()
    assert tried(directory, 1.0, 60) == "saved"
    told = [] if rank == 2 else [tried(directory, 2.0)]
    dist.barrier()
    while "saved" not in told:
        assert len(told) < 4, told
        told.append(tried(directory, 3.0))
        dist.barrier()  # as a trainer's steps do
    assert megackpt.load(state(0.0), directory)["value"] == 3.0
    if rank == 2:
        assert all("rank 2 comes too late" in text for text in told[:-1]), told
    else:
        assert "rank 2 did not answer" in told[0], told
        assert "(timeout 1.5 s)" in told[0], told


@pytest.mark.slow
def test_a_rank_that_never_calls_is_named_and_finds_its_way_back(
    ranks: Any, tmp_path: Path
) -> None:
    ranks(one_never_calls, 3, tmp_path / "c", timeout=120)


def two_threads(directory: str, refusing: list[int]) -> None:
    """A thread saves; on some ranks another one wants to meanwhile, on the others only when it is done."""
    rank, wait = dist.get_rank(), timedelta(seconds=60)
    inside, go_on = threading.Event(), threading.Event()

    def held(common: Any) -> Any:
        inside.set()
        go_on.wait()
        return common

    def first() -> None:
        view = {"preprocess_common_before_consistancy_check": held}
        megackpt.save(state(1.0), directory, timeout=wait, **view)

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(first)
        inside.wait()
        if rank in refusing:
            with pytest.raises(
                CheckpointingException, match="another thread of this process is saving"
            ):
                megackpt.save(state(2.0), directory, timeout=wait)
        go_on.set()
        saving.result()
    if rank not in refusing:
        assert (
            "rank 1 began one while another thread of its process was at work"
            in tried(directory, 2.0, 60)
        )
    assert megackpt.load(state(0.0), directory, timeout=wait)["value"] == 1.0
    assert tried(directory, 3.0, 60) == "saved"
    assert megackpt.load(state(0.0), directory, timeout=wait)["value"] == 3.0


def second_threads(directory: str) -> None:
    two_threads(f"{directory}/both", [0, 1])
    two_threads(f"{directory}/one", [1])


def test_a_second_thread_over_one_group_is_refused(ranks: Any, tmp_path: Path) -> None:
    """Where only some ranks refuse, the others are told as soon as these go on, and within the timeout else."""
    ranks(second_threads, 2, tmp_path, timeout=120)


@pytest.mark.campaign
@pytest.mark.parametrize("action", ["raise", "die", "stop"])
@pytest.mark.parametrize("strategy", ["torch_dist", "zarr"])
@pytest.mark.parametrize("later", ["", "thread", "process"])
def test_in_every_phase(
    tmp_path: Path, worlds: Any, note: Any, strategy: str, action: str, later: str
) -> None:
    orders = every_order(strategy, action)
    if later:
        orders = [one for one in orders if one["job"] == "save"]
        if action != "raise":
            orders += [
                order(action, "save", point, victim, strategy)
                for point in BETWEEN
                for victim in (0, 2)
            ]
        if (
            later == "process"
        ):  # what the writer does is none of the rank's points: see test_kills
            orders = [one for one in orders if one["point"] not in ("write", "written")]
        orders = [
            {**one, "later": later, "flying": n % 3 + 1} for n, one in enumerate(orders)
        ]
    elif action == "stop":
        orders += [
            order(
                "stop", "save", point, victim, strategy, before=before, meanwhile=True
            )
            for before in (True, False)
            for point, victim in (("write", 2), ("written", 2))
        ]
    orders = sampled(orders, least=3)
    reports = worlds(orders, tmp_path)
    assert len(reports) == len(orders)
    for report in reports:
        check(report)
    kind = f"{action}, asynchronous ({later})" if later else action
    note(
        ("one rank of three", "format", "phases of saves and loads, all told"),
        kind,
        strategy,
        len(reports),
    )
