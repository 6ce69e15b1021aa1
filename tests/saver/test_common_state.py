"""The common state: rank 0's is stored, differences are reported, and what is compared."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import (
    ShardedObject,
    ShardedTensor,
)
from megackpt.errors import (
    CoverageError,
)
from megackpt.testing import ThreadedGroup
from tests.test_save_load import model


def test_only_rank_zeros_common_state_is_stored_and_differences_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(group: ThreadedGroup) -> Any:
        state = {**model(group.rank, 2, 1, 1), "rank": group.rank}
        megackpt.save(state, tmp_path, process_group=group)
        return megackpt.load(model(group.rank, 2, 1, 1), tmp_path, process_group=group)[
            "rank"
        ]

    with caplog.at_level(logging.WARNING):
        assert ThreadedGroup.run(2, run) == [0, 0]
    expected = (
        "Rank 1 common state dict differs from rank 0 common state dict. "
        "Keys only on rank 0: [], Keys only on 1: [], Mismatched keys: "
        "[(('rank',), <class 'int'>, <class 'int'>)]"
    )
    assert [r.message for r in caplog.records if "common state" in r.message] == [
        expected
    ]


def test_a_difference_in_a_later_save_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Later saves reuse the plan of the first one, for which all ranks were alike."""

    def run(group: ThreadedGroup) -> None:
        for step in range(4):
            state = {**model(group.rank, 3, 1, 1), "step": step}
            if step >= 2 and group.rank == 2:
                state |= {"lr": 0.1, "step": "2"}
            group.log.clear()
            megackpt.save(state, tmp_path / f"{step}", process_group=group)
            planned = "scatter" in group.log
            assert planned == (step in (0, 2)), step

    with caplog.at_level(logging.WARNING):
        ThreadedGroup.run(3, run)
    expected = (
        "Rank 2 common state dict differs from rank 0 common state dict. "
        "Keys only on rank 0: [], Keys only on 2: [('lr',)], Mismatched keys: "
        "[(('step',), <class 'int'>, <class 'str'>)]"
    )
    assert [r.message for r in caplog.records if "common state" in r.message] == [
        expected
    ]


class OfRankZero:
    def __getstate__(self) -> int:
        return 1

    def __setstate__(self, _: object) -> None:
        if threading.current_thread().name == "rank 1":
            raise LookupError("not on this rank")


def test_a_common_state_that_one_rank_cannot_make_anew_is_a_warning_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(group: ThreadedGroup) -> None:
        state = {"x": OfRankZero() if group.rank == 0 else 1}
        megackpt.save(state, tmp_path, process_group=group)

    ThreadedGroup.run(2, run)
    assert "LookupError: not on this rank" in caplog.text
    assert megackpt.verify(tmp_path).ok


def test_views_in_the_common_state_are_stored_at_their_own_size(tmp_path: Path) -> None:
    big = torch.arange(1_000_000)
    megackpt.save(
        {"views": [big[:3], {"last": big[-1]}], "none": torch.empty(0)}, tmp_path
    )
    assert (tmp_path / "common.pt").stat().st_size < 10_000
    loaded = megackpt.load_common_state_dict(tmp_path)
    assert loaded["views"][0].tolist() == [0, 1, 2]
    assert loaded["views"][1]["last"].item() == 999_999


def test_a_save_warns_of_classes_that_need_trust(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {
        "half": Fraction(1, 2),
        "o": ShardedObject("o", Fraction(1, 3), (1,), (0,)),
        "plain": [1, "a"],
    }
    with caplog.at_level(logging.WARNING):
        megackpt.save(state, tmp_path)
    told = [r.message for r in caplog.records if "trusted=(Fraction,)" in r.message]
    assert len(told) == 2
    with pytest.raises(megackpt.UntrustedClass, match=r"fractions\.Fraction"):
        megackpt.load({}, tmp_path)
    assert megackpt.load({}, tmp_path, trusted=(Fraction,))["half"] == Fraction(1, 2)


def test_the_compared_view_can_be_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(group: ThreadedGroup) -> None:
        megackpt.save(
            {**model(group.rank, 2, 1, 1), "rank": group.rank},
            tmp_path,
            process_group=group,
            preprocess_common_before_consistancy_check=lambda c: {
                k: v for k, v in c.items() if k != "rank"
            },
        )

    with caplog.at_level(logging.WARNING):
        ThreadedGroup.run(2, run)
    assert "common state" not in caplog.text
    assert megackpt.load_common_state_dict(tmp_path)["rank"] == 0


def test_a_view_that_takes_entries_out_takes_none_from_what_is_saved(
    tmp_path: Path,
) -> None:
    def view(common: Any) -> Any:
        del common["rank"], common["args"]["local_rank"]
        return common

    state = {"rank": 0, "args": {"local_rank": 0, "lr": 1}}
    megackpt.save(state, tmp_path, preprocess_common_before_consistancy_check=view)
    assert (
        megackpt.load_common_state_dict(tmp_path)
        == state
        == {"rank": 0, "args": {"local_rank": 0, "lr": 1}}
    )


@pytest.mark.parametrize("view", [lambda _: None, lambda _: {}])
def test_a_view_of_nothing_leaves_the_validation_on(
    tmp_path: Path, view: Callable[[Any], Any]
) -> None:
    with pytest.raises(CoverageError):
        megackpt.save(
            {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, 0, 2))},
            tmp_path,
            preprocess_common_before_consistancy_check=view,
        )


@pytest.mark.parametrize("content", [{}, {"sharding": "fully", "n": [1, 2]}])
def test_content_metadata(tmp_path: Path, content: dict[str, Any]) -> None:
    group = object()  # a process group cannot be stored
    megackpt.save(
        model(0, 1, 1, 1), tmp_path, content_metadata={**content, "dp_cp_group": group}
    )
    assert megackpt.load_content_metadata(tmp_path) == content
    state = megackpt.load(model(0, 1, 1, 1, blank=True), tmp_path)
    assert megackpt.load_content_metadata(preloaded_state_dict=state) == content
    with pytest.raises(ValueError, match="both are None"):
        megackpt.load_content_metadata()
