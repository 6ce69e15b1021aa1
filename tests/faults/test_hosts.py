"""A directory that is not shared between hosts: said so, with rank, host and path, by saves and by loads."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest


def order(
    job: str, victim: int, *, before: bool = False, strategy: str = "torch_dist"
) -> dict[str, Any]:
    return {
        "action": "hosts",
        "job": job,
        "victim": victim,
        "before": before,
        "strategy": strategy,
    }


ORDERS = [
    order("save", 2),
    order("save", 0, strategy="zarr"),
    order("load", 2, before=True),
    order("load", 0),
]


@pytest.mark.root
def test_a_directory_that_is_not_shared(tmp_path: Path, worlds: Any) -> None:
    reports = worlds(ORDERS, tmp_path)
    assert len(reports) == len(ORDERS)
    for report in reports:
        assert "hung" not in report, report
        asked = report["order"]
        for told in report["told"]:
            assert told["error"], report
            assert "/disk/c" in told["text"], report
            blind = "ranks 1, 2" if asked["victim"] == 0 else "rank 2"
            if (
                asked["job"] == "load" and asked["victim"] == 0
            ):  # where the coordinator looks there is nothing
                blind = "So rank 0 sees it"
            assert "is the directory shared between all hosts?" in told["text"], report
            assert repr(socket.gethostname()) in told["text"], report
            assert blind in told["text"], report
        assert report["after"] == [{"ones": 2, "found": 3.0}] * 2, report
